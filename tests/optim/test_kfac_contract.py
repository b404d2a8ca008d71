"""K-FAC in the loop of SGD: which forward passes are observed, and what they leave behind."""

import copy
from types import SimpleNamespace

import pytest
import torch
from oracle.kfac_runs import (
    EXACT,
    cross_entropy,
    labels_for,
    random,
    same_factors,
    seeded,
    train_step,
)
from oracle.plain_kfac import KFAC
from oracle.small_conv import CLASSES, data, flat, net
from refusals import refuses
from torch import nn

import decaylab
from decaylab.errors import Lacks
from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions

# -- the loop --


def test_it_is_a_torch_optimizer_and_exported():
    assert issubclass(KFAC, decaylab.KFAC)
    assert issubclass(KFAC, torch.optim.Optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_loop_of_sgd_learns(set_to_none):
    model = seeded(net)
    opt = KFAC(model, 0.1, refresh_every=3, invert_every=3)
    x, y = data(size=8)
    losses = []
    for _ in range(15):
        loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_zeroing_gradients_in_place_changes_nothing():
    after = []
    for set_to_none in (True, False):
        model = seeded(net)
        opt = KFAC(model, 0.1, weight_decay=0.1, **EXACT)
        for step in range(3):
            cross_entropy(model(data(step)[0]), data(step)[1]).backward()
            opt.step()
            opt.zero_grad(set_to_none=set_to_none)
        after.append(flat(model))
    assert torch.equal(*after)


def test_a_closure():
    model, other = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(other, 0.1, **EXACT)
    x, y = data()

    def closure():
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert float(opt.step(closure).detach()) == float(train_step(expected, other, x, y))
    assert torch.equal(flat(model), flat(other))


def test_gradients_are_those_of_the_loss_alone():
    """The extra backward pass leaves no trace in .grad."""
    model, plain = seeded(net), seeded(net)
    x, y = data()
    _opt = KFAC(model, 0.1, outputs="exact")
    cross_entropy(model(x), y).backward()
    cross_entropy(plain(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_the_global_random_state_is_not_touched():
    model = seeded(net)
    opt = KFAC(model, 0.1, refresh_every=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train_step(opt, model, *data())
    opt.initialize([data()[0]])
    assert torch.equal(before, torch.get_rng_state())


# -- when the hooks act --


def count_refreshes(opt: KFAC) -> int:
    """The optimizer's generator moves exactly when a curvature sample is drawn."""
    return hash(curvature_state(opt.state_dict())["generator"].numpy().tobytes())


def test_only_due_forward_passes_in_train_mode_are_observed():
    model = seeded(net)
    opt = KFAC(model, 0.1, refresh_every=2)
    x, y = data()
    start = count_refreshes(opt)

    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.eval()
    model(x)
    model.train()
    with opt.paused():
        model(x)
    with opt.paused(), opt.paused():
        model(x)
    parameters = dict(model.named_parameters())
    torch.func.functional_call(model.eval(), parameters, (x,))
    model.train()
    torch.func.vmap(lambda row: torch.func.functional_call(model, parameters, (row[None],)))(x)
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
    torch.func.jacrev(lambda inputs: model(inputs))(x[:1])
    assert count_refreshes(opt) == start

    train_step(opt, model, x, y)
    first = count_refreshes(opt)
    assert first != start
    train_step(opt, model, x, y)  # no refresh is due at step 2
    assert count_refreshes(opt) == first
    train_step(opt, model, x, y)
    assert count_refreshes(opt) != first


def test_passes_that_are_not_observed_do_not_change_the_factors():
    model, other = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(other, 0.1, **EXACT)
    x, y = data()
    loss = cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        model(data(1)[0])
    with opt.paused():
        model(data(2)[0])
    model.eval()
    model(data(3)[0])
    model.train()
    opt.step()
    train_step(expected, other, x, y)
    assert same_factors(opt, expected, 0.0)


def test_detach_removes_every_hook():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    modules = list(model.modules())
    assert any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    opt.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    before = count_refreshes(opt)
    model(data()[0])
    assert count_refreshes(opt) == before


def test_a_copied_model_is_not_observed():
    model, untouched = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(untouched, 0.1, **EXACT)
    x, y = data()
    loss = cross_entropy(model(x), y)
    twin = copy.deepcopy(model)
    cross_entropy(twin(data(1)[0]), data(1)[1]).backward()
    loss.backward()
    opt.step()
    train_step(expected, untouched, x, y)
    assert torch.equal(flat(model), flat(untouched))
    # the copy can have an optimizer of its own
    again = KFAC(twin, 0.1)
    again.zero_grad()
    train_step(again, twin, x, y)


def test_a_dropped_optimizer_leaves_the_model_usable():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    train_step(opt, model, *data())
    del opt
    cross_entropy(model(data()[0]), data()[1]).backward()


# -- where the logits are --


class Wrapped(nn.Module):
    """Returns the logits in a container."""

    def __init__(self, container) -> None:
        super().__init__()
        self.net = net()
        self.container = container

    def forward(self, x):
        return self.container(self.net(x))


@pytest.mark.parametrize(
    ("container", "logits_of"),
    [
        (lambda z: {"logits": z, "n": 1}, lambda out: out["logits"]),
        (lambda z: (z, None), lambda out: out[0]),
    ],
)
def test_observe_finds_logits_in_a_container(container, logits_of):
    model, plain = seeded(lambda: Wrapped(container)), seeded(net)
    plain.load_state_dict(model.net.state_dict())
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(plain, 0.1, **EXACT)
    for step in range(2):
        x, y = data(step)
        logits = logits_of(model(x))
        opt.observe(logits)
        cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()
        train_step(expected, plain, x, y)
        assert torch.equal(flat(model), flat(plain))


def test_logits_in_an_object_are_found_by_themselves():
    """As Hugging Face models return them: an object with `.logits`."""
    model, plain = seeded(lambda: Wrapped(lambda z: SimpleNamespace(logits=z))), seeded(net)
    plain.load_state_dict(model.net.state_dict())
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(plain, 0.1, **EXACT)
    for step in range(2):
        x, y = data(step)
        cross_entropy(model(x).logits, y).backward()
        opt.step()
        opt.zero_grad()
        train_step(expected, plain, x, y)
        assert torch.equal(flat(model), flat(plain))


def test_counted_rows_are_asked_of_the_keyword_arguments():
    """The same factors as those of the rows that count, given alone."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES))

        def forward(self, x, padded=None):
            return self.net(x)

    model, plain = seeded(Padded), seeded(lambda: Padded().net)
    plain.load_state_dict(model.net.state_dict())
    options = KFACOptions(counted_rows=lambda kwargs, logits: ~kwargs["padded"])
    opt, expected = KFAC(model, 0.1, options=options, **EXACT), KFAC(plain, 0.1, **EXACT)
    x, y = random(5, 3), labels_for(5, classes=CLASSES)
    padded = torch.tensor([False, True, False, False, True])
    cross_entropy(model(x, padded=padded)[~padded], y[~padded]).backward()
    opt.step()
    train_step(expected, plain, x[~padded], y[~padded])
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-10, atol=1e-12)
    opt.initialize([{"x": x, "padded": padded}])
    expected.initialize([x[~padded]])
    assert same_factors(opt, expected)


def test_a_container_without_observe_is_refused():
    model = seeded(lambda: Wrapped(lambda z: {"logits": z}))
    opt = KFAC(model, 0.1)
    x, y = data()
    cross_entropy(model(x)["logits"], y).backward()
    with refuses(Lacks, what="logits for the refresh that is due"):
        opt.step()


def test_observe_is_free_and_harmless_when_the_model_returns_logits():
    model, plain = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(plain, 0.1, **EXACT)
    x, y = data()
    logits = model(x)
    opt.observe(logits)
    cross_entropy(logits, y).backward()
    opt.step()
    train_step(expected, plain, x, y)
    assert same_factors(opt, expected, 0.0)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(3, 5)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.left(h), self.right(h)


def test_several_heads_add_up():
    """Their losses add, so does the curvature of what they share."""
    model, x = seeded(TwoHeads), random(4, 4)

    def body_factors(heads):
        net = copy.deepcopy(model)
        opt = KFAC(net, 0.1, curvature="gauss-newton", **EXACT)
        outputs = net(x)
        opt.observe([outputs[i] for i in heads])
        sum(outputs[i].square().mean() for i in heads).backward()
        opt.step()
        return opt.factors()["body"].S

    together = body_factors([0, 1])
    torch.testing.assert_close(together, body_factors([0]) + body_factors([1]))


# -- several forward passes before a step --


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton", "empirical-fisher"])
def test_gradient_accumulation_equals_one_big_batch(curvature):
    options = {"curvature": curvature, "weight_decay": 0.1} | EXACT
    model, whole = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **options), KFAC(whole, 0.1, **options)
    for step in range(3):
        x, y = data(step, size=6)
        for part in range(3):
            chunk = slice(2 * part, 2 * part + 2)
            (cross_entropy(model(x[chunk]), y[chunk]) / 3).backward()
        opt.step()
        opt.zero_grad()
        train_step(expected, whole, x, y)
        assert same_factors(opt, expected)
        torch.testing.assert_close(flat(model), flat(whole), rtol=0, atol=1e-11)


def test_accumulation_over_parts_of_different_size_weights_by_rows():
    model, whole = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(whole, 0.1, **EXACT)
    x, y = data(size=6)
    for chunk in (slice(0, 1), slice(1, 6)):
        (cross_entropy(model(x[chunk]), y[chunk], "sum") / 6).backward()
    opt.step()
    train_step(expected, whole, x, y)
    assert same_factors(opt, expected)
