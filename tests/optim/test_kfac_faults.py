"""What goes wrong, and what is said or done about it: bad input, NaN, failed factorisations."""

import copy
import warnings
from contextlib import nullcontext
from fractions import Fraction

import numpy
import pytest
import torch
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.errors import BadValue, Lacks, Mismatch, OutOfRange, UnknownName, WrongType
from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions

CLASSES = 3


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))


def data(seed: int = 0, size: int = 6):
    return random(size, 4, seed=seed), labels_for(size, classes=CLASSES, seed=seed)


def snapshot(opt: KFAC, model: nn.Module) -> list[torch.Tensor]:
    """Parameters and every tensor of torch's own state (velocities, Adam's moments)."""
    tensors = [p.detach().clone() for p in model.parameters()]
    for state in opt.state_dict()["state"].values():
        tensors += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return tensors


def equal(left, right) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


# -- what is refused --

CHOICES = ["curvature", "likelihood", "outputs", "decay", "damping_scaling", "step_scaling"]
CHOICES += ["reduction", "sharing", "logits", "others"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("damping", 0.0),
        ("damping", -1.0),
        ("damping", float("nan")),
        ("lr", -0.1),
        ("momentum", 1.0),
        ("momentum", -0.5),
        ("weight_decay", -1e-4),
        ("kl_clip", 0.0),
        ("refresh_every", 0),
        ("invert_every", 0),
        ("factor_decay", 1.0),
        ("factor_decay", -0.1),
        ("max_factor_dim", 0),
        ("curvature_scale", 0.0),
        ("inversion_lag", -1),
        ("inversion_lag", 100),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    given = {name: value}
    if name == "inversion_lag":
        given = {"options": KFACOptions(**given)}
    with refuses(OutOfRange, name=name, value=value):
        KFAC(seeded(net), **({"lr": 0.1} | given))


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_choices_are_named(name):
    with refuses(UnknownName, kind=name, name="nosuch"):
        KFAC(seeded(net), **({"lr": 0.1} | {name: "nosuch"}))
    options = KFACOptions(invariant=("nosuch",))
    with refuses(UnknownName, name="nosuch"):
        KFAC(seeded(net), 0.1, damping_scaling="scale-free", options=options)


def test_a_model_without_any_covered_layer():
    with refuses(Lacks, what="layer that K-FAC covers"):
        KFAC(nn.Sequential(nn.LayerNorm(3)), 0.1)
    frozen = seeded(net).requires_grad_(False)
    with refuses(Lacks, what="layer that K-FAC covers"):
        KFAC(frozen, 0.1)


def test_parameters_that_are_not_the_models():
    with refuses(BadValue, name="the number of given parameters of another model"):
        KFAC(seeded(net), 0.1, params=seeded(net).parameters())
    with refuses(Lacks, owner="params"):
        KFAC(seeded(net), 0.1, params=[])


def test_a_model_on_two_devices():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta"))
    with refuses(BadValue, value=["cpu", "meta"]):
        KFAC(model, 0.1)


def test_a_model_without_memory():
    with refuses(BadValue, name="the device of the model", value="meta"):
        KFAC(nn.Linear(2, 2, device="meta"), 0.1)


def test_an_output_that_is_not_logits():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    KFAC(model, 0.1)
    opt = KFAC(model, 0.1)
    with refuses(BadValue, name="the logits"):
        model(data()[0])
    opt.detach()


def test_one_class_needs_another_likelihood():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 1)))
    opt = KFAC(model, 0.1)
    with refuses(Lacks, owner="a categorical likelihood over one class"):
        model(data()[0])
    opt.detach()


def test_a_class_dimension_that_moved():
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.moved = nn.Linear(4, CLASSES), False

        def forward(self, x):
            z = self.layer(x)
            return z.mT if self.moved else z

    model = seeded(Moving)
    opt = KFAC(model, 0.1, refresh_every=1)
    train_step(opt, model, *data())
    model.moved = True
    with refuses(Mismatch, what="number of classes"):
        model(data()[0])


def test_a_mask_of_another_shape():
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed")
    logits = model(data()[0])
    with refuses(Mismatch, values={"the mask": [3], "the rows": [6]}):
        opt.observe(logits, mask=torch.ones(3, dtype=torch.bool))


def test_logits_without_a_graph():
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed")
    logits = model(data()[0])
    with refuses(Lacks, what="graph"):
        opt.observe(logits.detach())


def test_observing_the_wrong_logits():
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed")
    model(data()[0])
    strange = random(6, CLASSES).requires_grad_() * 2
    with refuses(Lacks, owner="the graph of the logits"):
        opt.observe(strange)


@pytest.mark.parametrize(
    ("link", "likelihood", "curvature", "refused"),
    [
        (nn.Softmax(-1), "categorical", "fisher", "softmax"),
        (nn.Sigmoid(), "bernoulli", "fisher", "sigmoid"),
        (nn.LogSoftmax(-1), "categorical", "fisher", False),  # logits that are shifted
        (nn.Sigmoid(), "gaussian", "fisher", False),
        (nn.Softmax(-1), "categorical", "gauss-newton", False),  # of whatever the model returns
    ],
)
def test_probabilities_in_the_place_of_logits(link, likelihood, curvature, refused):
    model = nn.Sequential(nn.Linear(4, 3), link)
    opt = KFAC(model, 0.1, likelihood=likelihood, curvature=curvature)
    with (
        refuses(BadValue, name="the end of the model", value=refused) if refused else nullcontext()
    ):
        train_step(opt, model, random(6, 4).float(), labels_for(6, classes=3))


def test_a_misspelt_setting_of_a_param_group_is_named():
    model = seeded(net)
    for misspelt in ("weigth_decay", "weightdecay", "Momentum"):
        with refuses(UnknownName, kind="setting of a param group", name=misspelt):
            KFAC(model, 0.1, params=[{"params": model.parameters(), misspelt: 0.1}])
    own = {"params": model.parameters(), "name": "all", "no_decay": True, "lr_scale": 0.5}
    assert KFAC(model, 0.1, params=[own]).param_groups[0]["lr_scale"] == 0.5


def test_a_kind_of_decay_set_later_is_checked():
    """An unknown one would be none, in silence."""
    model = seeded(net)
    opt = KFAC(model, 0.1, weight_decay=0.1)
    train_step(opt, model, *data())
    opt.param_groups[0]["decay"] = "L2"
    with refuses(UnknownName, kind="decay", name="L2"):
        train_step(opt, model, *data())


def test_a_step_without_any_forward_pass():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with refuses(Lacks, owner="the first step", what="observed forward pass before it"):
        opt.step()


def test_a_refresh_without_forward_pass_later_warns_and_keeps_the_factors():
    model = seeded(net)
    opt = KFAC(model, 0.1, **EXACT)
    train_step(opt, model, *data())
    before = opt.factors()["0"].S
    with opt.paused():
        cross_entropy(model(data(1)[0]), data(1)[1]).backward()
    with pytest.warns(UserWarning, match="factors are unchanged"):
        opt.step()
    assert torch.equal(opt.factors()["0"].S, before)


def test_a_weight_used_behind_the_layers_back():
    """All such layers are named, and of each what has a gradient: of a bias alone too."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight.requires_grad_(False)
            self.last = nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.last(x @ self.first.weight.T + self.second.bias)

    model = seeded(Direct)
    opt = KFAC(model, 0.1)
    cross_entropy(model(data()[0]), data()[1]).backward()
    with refuses(Lacks, what="measured curvature for the gradient of layers 'first', 'second'"):
        opt.step()


def test_initialize_without_batches_or_loss():
    opt = KFAC(seeded(net), 0.1)
    with refuses(Lacks, what="batches"):
        opt.initialize([])
    empirical = KFAC(seeded(net), 0.1, curvature="empirical-fisher")
    with refuses(Lacks, owner="the empirical Fisher", what="loss"):
        empirical.initialize([data()])


# -- gradients that are not finite --


def test_a_first_step_that_is_skipped_leaves_no_velocities_behind(monkeypatch):
    """Torch's fused SGD, for the norm here, makes them without writing to them."""
    made = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **kwargs: made(*args, **kwargs).fill_(1e30)
    )
    model = seeded(net)
    opt = KFAC(model, 0.1, others="sgd", **EXACT)
    cross_entropy(model(data()[0]), data()[1]).backward()
    model[1].weight.grad.fill_(torch.inf)
    opt.step()
    assert all(not state["momentum_buffer"].any() for state in opt.state.values())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["3.weight", "1.weight"])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(poison, target, decay):
    """In a block or outside: weights, velocities and Adam's moments stay, also under decay."""
    model = seeded(net)
    opt = KFAC(model, 0.1, weight_decay=0.1, decay=decay, kl_clip=1e-3, **EXACT)
    train_step(opt, model, *data())
    before = snapshot(opt, model)
    cross_entropy(model(data(1)[0]), data(1)[1]).backward()
    model.get_parameter(target).grad.view(-1)[0] = poison
    opt.step()
    opt.zero_grad()
    assert equal(before, snapshot(opt, model))
    health = opt.check()
    assert (health.skipped, health.skipped_in_a_row) == (1, 1)
    train_step(opt, model, *data(2))
    assert not equal(before, snapshot(opt, model))
    health = opt.check()
    assert (health.steps, health.skipped, health.skipped_in_a_row) == (3, 1, 0)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton", "empirical-fisher"])
def test_a_batch_with_nan_leaves_the_factors_clean(curvature):
    model = seeded(net)
    opt = KFAC(model, 0.1, curvature=curvature, **EXACT)
    train_step(opt, model, *data())
    before, weights = opt.factors(), snapshot(opt, model)
    x, y = data(1)
    x[0, 0] = float("nan")
    train_step(opt, model, x, y)
    for name, factors in opt.factors().items():
        assert torch.equal(factors.A, before[name].A)
        assert torch.equal(factors.S, before[name].S)
    assert equal(weights, snapshot(opt, model))


@pytest.mark.parametrize("side", ["inputs", "gradients"])
def test_a_layer_with_one_side_that_overflows_keeps_both(side):
    """The logits are finite, and the squares of 1e200 are not; the other layer goes on."""
    model = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    opt = KFAC(model, 0.0, **EXACT)
    x, y = random(6, 2), labels_for(6, classes=2)
    train_step(opt, model, x, y)
    before = opt.factors()
    with torch.no_grad():
        model[0].weight[:, 0] = 0.0
        if side == "inputs":
            x[:, 0] = 1e200
        else:
            model[0].weight.zero_()
            model[0].bias.zero_()
            model[1].weight.mul_(1e200)
    train_step(opt, model, x, y)
    after = opt.factors()
    assert torch.equal(after["0"].A, before["0"].A)
    assert torch.equal(after["0"].S, before["0"].S)
    assert after["1"].A.isfinite().all()
    assert not torch.equal(after["1"].A, before["1"].A)


def test_nan_in_the_very_first_batch():
    """Nothing is known yet, so nothing moves; the next batch starts as if it were the first."""
    model, fresh = seeded(net), seeded(net)
    opt, expected = KFAC(model, 0.1, **EXACT), KFAC(fresh, 0.1, **EXACT)
    x, y = data()
    train_step(opt, model, x * float("nan"), y)
    train_step(opt, model, x, y)
    train_step(expected, fresh, x, y)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_nan_in_the_very_first_batch_at_the_default_intervals():
    """Gradient descent until the next refresh, and no longer until the next inversion."""
    model, (x, y) = seeded(net), data()
    opt = KFAC(model, 0.1, momentum=0.0)
    for step in range(11):
        before = model[0].weight.detach().clone()
        opt.zero_grad()
        cross_entropy(model(x if step else x * float("nan")), y).backward()
        opt.step()
        if step == 0:
            assert torch.equal(model[0].weight, before)
            continue
        descended = torch.allclose(model[0].weight, before - 0.1 * model[0].weight.grad)
        assert descended == (step < 10)


def test_a_run_that_was_saved_after_nothing_but_nan_goes_on_bit_for_bit():
    """Its layers were measured, and have no factor yet."""
    options = {"refresh_every": 3, "invert_every": 5, "options": KFACOptions(inversion_lag=4)}
    model, again = seeded(net), seeded(net, seed=1)
    opt, other = KFAC(model, 0.1, **options), KFAC(again, 0.1, **options)
    x, y = data()
    train_step(opt, model, x * float("nan"), y)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(11):
        train_step(opt, model, x, y)
        train_step(other, again, x, y)
        assert equal(snapshot(opt, model), snapshot(other, again))
    assert not torch.equal(model[0].weight, seeded(net)[0].weight)


def test_ten_in_a_row_raise():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    train_step(opt, model, *data())
    for count in range(1, 11):
        cross_entropy(model(data()[0]), data()[1]).backward()
        model[3].bias.grad.fill_(float("nan"))
        opt.step()
        opt.zero_grad()
        if count < 10:
            assert opt.check().skipped_in_a_row == count
    with refuses(Lacks, owner="each of the last 10 steps", what="finite gradient"):
        opt.check()


# -- Cholesky --


def poisoned(opt: KFAC, layer: str, factor: str) -> None:
    """Give a factor a negative eigenvalue, through the state dict."""
    state = opt.state_dict()
    values = curvature_state(state)["layers"][layer][factor]
    values[..., 0, 0] -= 10 * values.abs().max()
    opt.load_state_dict(state)


@pytest.mark.parametrize("factor", ["A", "G"])
def test_a_failed_factorisation_keeps_the_old_inverse_and_doubles_the_damping(factor):
    model = seeded(net)
    opt = KFAC(model, 0.1, outputs="exact", refresh_every=1000, invert_every=1)
    train_step(opt, model, *data())
    sound = curvature_state(opt.state_dict())["layers"]
    poisoned(opt, "0", factor)
    for tries in range(1, 4):
        train_step(opt, model, *data(tries))
        state = curvature_state(opt.state_dict())["layers"]
        for inverse in ("A_inverse", "G_inverse"):
            assert torch.equal(state["0"][inverse], sound["0"][inverse])
        assert float(state["0"]["boost"]) == 2**tries
        assert float(state["3"]["boost"]) == 1
        assert opt.check().failed_inversions == {"0": tries}
    assert opt.check().skipped == 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_enough_doubling_mends_a_slightly_indefinite_factor():
    model = seeded(net)
    opt = KFAC(model, 1e-3, outputs="exact", refresh_every=1000, invert_every=1, damping=1e-6)
    train_step(opt, model, *data())
    state = opt.state_dict()
    A = curvature_state(state)["layers"]["0"]["A"]
    A -= 0.01 * A.diagonal(dim1=1, dim2=2).mean() * torch.eye(A.shape[-1], dtype=A.dtype)
    A -= torch.linalg.eigvalsh(A).min() * torch.eye(A.shape[-1], dtype=A.dtype)
    A -= 1e-2 * torch.eye(A.shape[-1], dtype=A.dtype)  # smallest eigenvalue: -0.01
    opt.load_state_dict(state)
    failures = []
    for step in range(30):
        train_step(opt, model, *data(step))
        failures.append(opt.check().failed_inversions.get("0", 0))
    assert failures[0] == 1  # it failed at first
    assert failures[-1] < 30  # and then some inversion worked
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_singular_factor_is_no_crash(dtype):
    """All inputs equal and damping lost in rounding: a pivot of the factorisation is exactly 0."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, CLASSES))).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    opt = KFAC(model, 0.1, damping=1e-40, refresh_every=1, invert_every=1)
    x, y = torch.ones(4, 3, dtype=dtype), labels_for(4, classes=CLASSES)
    cross_entropy(model(x), y).backward()
    opt.step()
    assert opt.check().failed_inversions == {"0": 1}
    for parameter, old in zip(model.parameters(), before, strict=True):  # no inverse yet
        assert torch.allclose(parameter, old - 0.1 * parameter.grad)


def test_a_loop_that_goes_nowhere_is_told_so_once():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    opt = KFAC(model, lr=0.1, refresh_every=5)
    torch.optim.lr_scheduler.StepLR(opt, 1000)  # a wrapper more around step()
    x, y = random(6, 3), labels_for(6, classes=2)
    for good in (True, False, True):  # fewer than ten in a row are an accident
        for _ in range(9):
            train_step(opt, model, x if good else x * torch.nan, y)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(60):
            train_step(opt, model, x * torch.nan, y)
    assert len(told) == 1
    assert "steps has no finite gradient" in str(told[0].message)
    assert "set kl_clip" in str(told[0].message)
    assert told[0].filename == train_step.__code__.co_filename  # where the user calls step()


def test_what_torchs_optimizers_take_first_is_refused():
    parameters = list(nn.Linear(3, 2).parameters())
    for model in (iter(parameters), [{"params": parameters}]):
        with refuses(WrongType, name="model", value=model):
            KFAC(model, lr=0.1)
    with refuses(WrongType, name="lr"):
        KFAC(nn.Linear(3, 2), [{"params": parameters}])


def test_a_learning_rate_may_be_any_number():
    for lr in (numpy.float32(0.25), Fraction(1, 4), 1, torch.tensor(0.25)):
        KFAC(nn.Linear(3, 2), lr)
