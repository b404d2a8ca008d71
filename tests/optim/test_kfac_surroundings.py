"""K-FAC in code that was not written for it: what others do to a model, its layers and tensors."""

import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded
from oracle.kfac_runs import train_step as step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from decaylab.curvature.capture import Call
from decaylab.errors import Conflict, Damaged, Lacks

CLASSES = 3


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def images():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, CLASSES))


def data(size: int = 8, seed: int = 0):
    return random(size, 4, seed=seed), labels_for(size, classes=CLASSES, seed=seed)


def same(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


FORMATS = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize(("before", "after"), [FORMATS, FORMATS[::-1]])
def test_a_model_that_changes_its_memory_format_later_takes_the_same_steps(before, after):
    x, y = random(6, 2, 4, 4), labels_for(6, classes=CLASSES)
    plain, moved = seeded(images), seeded(images).to(memory_format=before)
    opt, other = KFAC(plain, 0.1, **EXACT), KFAC(moved, 0.1, **EXACT)
    moved.to(memory_format=after)
    for _ in range(2):
        step(opt, plain, x, y)
        step(other, moved, x, y)
    same(moved, plain)


# -- tensors that change after a layer saw them --


class Residual(nn.Module):
    """Adds to a layer's input in place, which autograd allows where autocast copied it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        hidden = self.first(x).float()
        hidden += self.inner(hidden)
        return self.last(hidden)


def test_an_input_that_is_overwritten_under_autocast_is_an_error_with_its_remedy():
    model = Residual()
    opt = KFAC(model, 0.1)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        refuses(Damaged, what="the input of layer 'inner'"),
    ):
        model(torch.randn(8, 4))
    opt.detach()


def test_a_buffer_that_is_filled_again_before_an_empirical_fisher_was_read():
    model = seeded(net)
    opt = KFAC(model, 0.1, curvature="empirical-fisher")
    buffer = torch.empty(8, 4, dtype=torch.float64)
    for seed in range(2):
        x, y = data(seed=seed)
        (cross_entropy(model(buffer.copy_(x)), y) / 2).backward()
    with refuses(Damaged, what="the input of layer '0'"):
        opt.step()


class Apply(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def zero_first(x):
    x[..., 0] = 0
    return x


IN_PLACE = {
    "relu": (F.relu_, F.relu),
    "a part": (zero_first, lambda x: zero_first(x.clone())),
    "through a view": (lambda x: x.view(-1).mul_(2).view_as(x), lambda x: 2 * x),
}


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (2, 3, 2, 4)])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_an_output_that_is_overwritten(kind, shape, bias, curvature):
    """Torch's Linear returns a view where its input has more than two axes."""
    models = []
    for function in IN_PLACE[kind]:
        model = seeded(
            lambda f=function: nn.Sequential(nn.Linear(4, 5, bias), Apply(f), nn.Linear(5, CLASSES))
        )
        opt = KFAC(model, 0.1, curvature=curvature, **EXACT)
        for seed in range(2):
            step(opt, model, random(*shape, seed=seed), labels_for(*shape[:-1], classes=CLASSES))
        models.append(model)
    same(*models)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
def test_an_output_of_one_example_that_is_overwritten(curvature, layout):
    """Without a batch axis a convolution's output is a view too."""
    models = []
    for function in (F.relu_, F.relu):
        model = seeded(
            lambda f=function: nn.Sequential(
                nn.Conv2d(2, 3, 2),
                Apply(f),
                nn.Flatten(0),
                nn.Linear(18, 3),
                nn.Unflatten(0, (1, 3)),
            )
        ).to(memory_format=layout)
        opt = KFAC(model, 0.1, curvature=curvature, **EXACT)
        step(opt, model, random(2, 4, 3), labels_for(1, classes=CLASSES))
        models.append(model)
    same(*models)


def test_inputs_from_inference_mode_under_autocast():
    model = net()
    opt = KFAC(model, 0.1)
    with torch.inference_mode():
        features = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(features), data()[1])
    loss.backward()
    opt.step()
    torch.testing.assert_close(opt.factors()["0"].A[:4, :4], features.T @ features / 8)


def test_inputs_that_are_sparse():
    models = []
    x, y = data()
    for inputs in (x.relu().to_sparse(), x.relu()):
        model = seeded(net)
        step(KFAC(model, 0.1, **EXACT), model, inputs, y)
        models.append(model)
    same(*models)


# -- hooks and wrappers of others --


class Bent(nn.Module):
    def forward(self, x):
        return 3 * x.sin()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
def test_a_hook_that_changes_a_layers_output_is_what_follows_the_layer(curvature, late):
    """Whether it was there before the optimizer or came later, and in front."""
    hooked, written = seeded(net), seeded(net)
    optimizers = [KFAC(hooked, 0.1, curvature=curvature, **EXACT)] if late else []
    hooked[0].register_forward_hook(lambda module, args, output: Bent()(output), prepend=late)
    written.insert(1, Bent())
    for model in (hooked, written):
        opt = optimizers.pop() if optimizers else KFAC(model, 0.1, curvature=curvature, **EXACT)
        step(opt, model, *data())
    same(hooked, written)


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_changes_the_models_output_makes_the_logits(late):
    """Whether it was there before the optimizer or came later."""
    hooked, written = seeded(net), seeded(net).append(Bent())

    optimizers = [(KFAC(written, 0.1, **EXACT), written)]
    if late:
        optimizers.append((KFAC(hooked, 0.1, **EXACT), hooked))
    hooked.register_forward_hook(lambda module, args, output: Bent()(output))
    if not late:
        optimizers.append((KFAC(hooked, 0.1, **EXACT), hooked))
    for opt, model in optimizers:
        step(opt, model, *data())
    same(hooked, written)


def test_replicas_of_data_parallel_are_refused():
    """Each of their threads would begin a pass of its own in the same optimizer."""
    model = seeded(net)
    opt = KFAC(model, 0.1)
    replica = model._replicate_for_data_parallel()  # as nn.DataParallel makes one per device
    with refuses(Conflict, settings=["K-FAC", "nn.DataParallel"]):
        replica(data()[0])
    with opt.paused():
        replica(data()[0])
    model.eval()
    replica(data()[0])


class Block(nn.Module):
    """Not torch's own Sequential, which `compile()` leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self, *, recomputed: bool) -> None:
        super().__init__()
        self.body, self.head, self.recomputed = Block(), nn.Linear(4, CLASSES), recomputed

    def forward(self, x):
        if self.recomputed:
            return self.head(checkpoint(self.body, x, use_reentrant=False))
        return self.head(self.body(x))


@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_parts_of_the_model_that_are_compiled_on_their_own(in_place, recomputed):
    plain = seeded(lambda: Stack(recomputed=recomputed))
    model = copy.deepcopy(plain)
    # aot_eager saves other tensors for the backward pass than eager code: a checkpoint notices
    if in_place:
        model.body.compile(backend="aot_eager")
    else:
        model.body = torch.compile(model.body, backend="aot_eager")
    opt, other = (KFAC(m, 0.1, outputs="exact", refresh_every=2) for m in (plain, model))
    for seed in range(4):
        step(opt, plain, *data(seed=seed))
        step(other, model, *data(seed=seed))
    same(model, plain)


def test_code_that_is_compiled_inside_the_forward_pass_is_named_as_a_cause():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, CLASSES)
            self.compiled = torch.compile(lambda x: self.first(x), backend="eager")

        def forward(self, x):
            return self.last(self.compiled(x))

    model = seeded(Inside)
    opt = KFAC(model, 0.1)
    with refuses(Lacks, what="measured curvature for the gradient of layer 'first'"):
        step(opt, model, *data())


def test_a_traced_pass_is_not_observed():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in newer versions
        torch.jit.trace(model, data()[0])
    assert not opt.estimator.sums


@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy])
def test_a_model_is_scripted_without_the_hooks(again):
    model = seeded(net)
    opt = KFAC(model, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in newer versions
        with refuses(Conflict, settings=["torch.jit.script", "K-FAC"]):
            torch.jit.script(again(model))
        hooks = list(model._forward_hooks.values())
        assert not any(hasattr(hook, "__name__") for hook in hooks)  # for whoever else asks
        opt.detach()
        torch.jit.script(again(model))


def test_pruning_a_layer_later():
    model = seeded(net)
    opt = KFAC(model, 0.1, kl_clip=1e-3, **EXACT)
    step(opt, model, *data())
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    before = model[0].weight_orig.detach().clone()
    step(opt, model, *data())
    assert not torch.equal(model[0].weight_orig, before)
    assert int((model[0].weight == 0).sum()) == 10


# -- passes that are not the training of these layers --


@pytest.mark.parametrize("through", [True, False])
def test_a_pass_through_a_model_frozen_for_the_moment_is_not_observed(through):
    """As through a discriminator in the generator's turn."""
    model, other = seeded(net), seeded(net)
    opt, alone = KFAC(model, 0.1, **EXACT), KFAC(other, 0.1, **EXACT)
    model.requires_grad_(False)
    model(random(8, 4, seed=7).requires_grad_(through))
    model.requires_grad_(True)
    step(opt, model, *data())
    step(alone, other, *data())
    same(model, other)


@pytest.mark.parametrize("logits", ["output", "observed"])
def test_a_phase_in_which_no_covered_layer_is_trained(logits):
    model = seeded(lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, CLASSES)))
    opt = KFAC(model, 0.1, logits=logits, refresh_every=1)
    moved = []
    for trained in (False, True, False):
        model[1].requires_grad_(trained)
        before = model[0].weight.detach().clone(), model[1].weight.detach().clone()
        output = model(data()[0])
        opt.observe(output)
        cross_entropy(output, data()[1]).backward()
        opt.step()
        opt.zero_grad()
        moved.append([not torch.equal(model[i].weight, before[i]) for i in (0, 1)])
    assert moved == [[True, False], [True, True], [True, False]]


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
def test_a_batch_without_rows_changes_no_factor(curvature):
    model = seeded(net)
    opt = KFAC(model, 0.1, curvature=curvature, **EXACT)
    step(opt, model, *data())
    before = opt.factors()
    model(data()[0][:0]).sum().backward()
    with pytest.warns(UserWarning, match="factors are unchanged"):
        opt.step()
    for name, factors in opt.factors().items():
        assert torch.equal(factors.A, before[name].A)
        assert torch.equal(factors.S, before[name].S)


class Experts(nn.Module):
    """Each example goes to one expert; nothing goes to the last."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(layers), nn.Linear(4, CLASSES)

    def forward(self, x):
        chosen = (x[:, 0, 0] > 0).long()
        hidden = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            hidden = hidden.index_add(0, mine, expert(x[mine]))
        return self.head(hidden.mean(2))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_an_expert_without_examples_is_left_out(kind, sharing):
    made = {"linear": lambda: nn.Linear(4, 4), "convolution": lambda: nn.Conv1d(4, 4, 1)}[kind]
    model = seeded(lambda: Experts([made() for _ in range(3)]))
    idle = model.experts[2].weight.detach().clone()
    opt = KFAC(model, 0.1, sharing=sharing, **EXACT)
    x, y = random(8, 4, 4), labels_for(8, classes=CLASSES)
    step(opt, model, x, y)
    factors = opt.factors()
    assert torch.equal(model.experts[2].weight, idle)
    assert not factors["experts.2"].A.any()
    here = x[x[:, 0, 0] <= 0]
    rows = here.flatten(0, 1) if kind == "linear" else here.mT.flatten(0, 1)
    if sharing == "reduce":
        rows = here.mean(1 if kind == "linear" else 2)
    expected = rows.T @ rows / len(rows)
    torch.testing.assert_close(factors["experts.0"].A[:4, :4], expected, rtol=1e-10, atol=1e-12)


# -- the empirical Fisher listens to the loss --


def test_losses_that_go_back_one_after_the_other_are_their_sum():
    factors = []
    for together in (True, False):
        model = seeded(net)
        opt = KFAC(model, 0.1, curvature="empirical-fisher")
        x, y = data()
        logits = model(x)
        losses = cross_entropy(logits, y), logits.square().sum(-1).mean()
        if together:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        opt.step()
        factors.append(opt.factors())
    for one, other in zip(*(f.values() for f in factors), strict=True):
        for side in ("A", "S", "T"):
            torch.testing.assert_close(
                getattr(one, side), getattr(other, side), rtol=1e-10, atol=1e-12
            )


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
@pytest.mark.parametrize("backward", [True, False])
def test_what_was_kept_of_a_pass_is_freed(curvature, backward):
    """By reference counts: the collector does not see a cycle through autograd's graph."""
    model = seeded(net)
    opt = KFAC(model, 0.1, curvature=curvature, refresh_every=1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            if backward:
                step(opt, model, *data())
            else:
                model(data()[0])
        assert not any(type(kept) is Call for kept in gc.get_objects())
    finally:
        gc.enable()


# -- what the model no longer holds --


def assigned(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def another_parameter(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(model[2].bias.detach().clone())


def another_layer(model: nn.Module) -> None:
    model[2] = nn.Linear(5, CLASSES).double()


def another_layer_with_the_same_parameters(model: nn.Module) -> None:
    twin = nn.Linear(5, CLASSES)
    twin.weight, twin.bias = model[2].weight, model[2].bias
    model[2] = twin


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        (assigned, "parameter '0.weight'"),
        (another_parameter, "parameter '2.bias'"),
        (another_layer, "parameter '2.weight'"),
        (another_layer_with_the_same_parameters, "layer '2'"),
    ],
)
def test_what_was_replaced_is_refused_at_the_next_refresh(change, gone):
    """Else the weights in use would stand still."""
    model = seeded(net)
    opt = KFAC(model, 0.1, refresh_every=2)
    step(opt, model, *data())
    change(model)
    step(opt, model, *data())
    with refuses(Lacks, owner="the model", what=f"{gone} that KFAC was built with"):
        step(opt, model, *data())


def test_layers_that_are_wrapped_in_their_place_go_on():
    """A wrapper holds the layer, and a new neighbour is nothing of KFAC's."""
    model, expected = seeded(net), seeded(net)
    opt, oracle = KFAC(model, 0.1, **EXACT), KFAC(expected, 0.1, **EXACT)
    model[2] = nn.Sequential(model[2])
    model[1] = nn.Tanh()
    for _ in range(2):
        step(opt, model, *data())
        step(oracle, expected, *data())
    same(model, expected)
