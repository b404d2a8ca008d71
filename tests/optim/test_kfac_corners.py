"""Corners of a K-FAC step: missing gradients, raised dampings, layers named as invariant."""

import math

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.nn.functional import cross_entropy

from decaylab.curvature.factors import Sums
from decaylab.errors import Lacks, UnknownName
from decaylab.optim.first_order import sgd
from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (6,), generator=generator)


def test_a_gradient_that_is_gone_is_zero_in_its_block():
    """The bias has a gradient at first and none later: what it had is not used a second time."""
    model, (x, y) = net(), data()
    opt = KFAC(model, 0.1, momentum=0.0, damping=0.1, refresh_every=100, outputs="exact")
    cross_entropy(model(x), y).backward()
    opt.step()
    factors, layer = opt.factors()["0"], model[0]
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    layer.bias.grad = None
    before = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().clone()
    gradient = torch.cat([layer.weight.grad, torch.zeros(4, 1).double()], 1)
    opt.step()
    A, G = factors.A, factors.T * factors.S
    pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
    root = math.sqrt(0.1)
    step = torch.linalg.inv(G + root / pi * torch.eye(4).double()) @ gradient
    step = step @ torch.linalg.inv(A + pi * root * torch.eye(4).double())
    torch.testing.assert_close(layer.weight.detach(), before[:, :3] - 0.1 * step[:, :3])
    assert torch.equal(layer.bias.detach(), before[:, 3])


def test_a_kl_clip_where_no_block_has_a_gradient():
    """Only a parameter outside the blocks moves, by its own method."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x, y = data()
    opt = KFAC(model, 0.1, kl_clip=1e-3, others="sgd", momentum=0.0)
    cross_entropy(model(x), y).backward()
    for layer in (model[0], model[2]):
        layer.weight.grad = layer.bias.grad = None
    before = [p.detach().clone() for p in model.parameters()]
    gradient = model[1].weight.grad.clone()
    opt.step()
    torch.testing.assert_close(model[1].weight.detach(), 1 - 0.1 * gradient)
    for layer, old in ((model[0], before[:2]), (model[2], before[4:])):
        assert torch.equal(layer.weight, old[0])
        assert torch.equal(layer.bias, old[1])


def test_dampings_are_those_of_the_next_inversion():
    """Raised after a failed factorisation, scaled with the norm where that is asked for."""
    model = nn.Sequential(
        nn.Conv1d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, 3), nn.BatchNorm1d(3)
    )
    model = model.append(nn.Linear(3, 2)).double()
    x, y = torch.randn(6, 4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    opt = KFAC(
        model,
        0.0,
        damping=0.3,
        damping_scaling="scale-free",
        refresh_every=1000,
        invert_every=1,
        options=KFACOptions(invariant=("2",)),
    )

    def trained() -> None:
        cross_entropy(model(x), y).backward()
        opt.step()

    trained()
    assert {name: float(value) for name, value in opt.dampings().items()} == pytest.approx(
        {"0": 0.3, "2": 0.3, "4": 0.3}
    )
    state = opt.state_dict()
    for name in ("0", "2"):
        values = curvature_state(state)["layers"][name]["A"]
        values[-1, 0, 0] -= 100 * values.abs().max()  # of the convolution the second group alone
    opt.load_state_dict(state)
    trained()
    with torch.no_grad():
        model[2].weight.mul_(3)
    found = opt.dampings()
    assert all(value.dim() == 0 for value in found.values())
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"0": 0.6, "2": 0.6 / 9, "4": 0.3}
    )


def test_layers_named_as_invariant_are_those_that_scale():
    for named in (("0",), ("2",), ("0", "2"), ()):
        model = net()
        options = KFACOptions(invariant=named)
        opt = KFAC(model, 0.1, damping=0.5, damping_scaling="scale-free", options=options)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        want = {name: 0.5 / 4 if name in named else 0.5 for name in ("0", "2")}
        assert {name: float(v) for name, v in opt.dampings().items()} == pytest.approx(want)
    with refuses(UnknownName, name="1", choices=("0", "2")):
        KFAC(net(), 0.1, damping_scaling="scale-free", options=KFACOptions(invariant=("0", "1")))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scale_free_steps_leave_norms_and_what_does_not_move_alone(momentum):
    """Bit for bit where a step is skipped or a weight frozen. Zeros have no scale, and descend."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model.double()
    nn.init.zeros_(model[0].weight)
    named = KFACOptions(invariant=("0", "2", "4"))
    opt = KFAC(model, 0.5, damping_scaling="scale-free", momentum=momentum, options=named)
    x, y = data()

    def trained(*frozen: int, spoiled: bool = False) -> list[bool]:
        before = [model[layer].weight.detach().clone() for layer in (0, 2, 4)]
        opt.zero_grad()
        for layer in (0, 2, 4):
            model[layer].weight.requires_grad_(layer not in frozen)
        cross_entropy(model(x), y).backward()
        if spoiled:
            model[2].weight.grad.fill_(math.nan)
        opt.step()
        norms = [float(model[layer].weight.detach().norm()) for layer in (2, 4)]
        assert norms == pytest.approx([float(w.norm()) for w in before[1:]], rel=1e-12)
        return [torch.equal(model[n].weight, w) for n, w in zip((0, 2, 4), before, strict=True)]

    assert trained() == [False, False, False]
    assert trained(spoiled=True) == [True, True, True]
    assert trained(4) == [False, False, True]
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_default_damping_does_not_scale():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opt = KFAC(model, 0.1, damping=0.5)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert {float(value) for value in opt.dampings().values()} == {0.5}


def test_a_fused_step_under_a_grad_scaler_keeps_its_velocity():
    """What a GradScaler tells fused steps is set by hand; five of them are five of plain SGD."""
    ours, plain = (nn.Linear(3, 2).double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    made = sgd([{"params": [p]} for p in ours.parameters()], lr=0.1, momentum=0.9)
    for group in made.param_groups:
        group["fused"] = True
    made.found_inf, made.grad_scale = torch.zeros(()), None
    stock = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for seed in range(5):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).double()
        for model, optimizer in ((ours, made), (plain, stock)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_observing_twice_is_an_error_where_the_loop_hands_logits_over():
    model, (x, _) = net(), data()
    opt = KFAC(model, 0.1, logits="observed")
    logits = model(x)
    opt.observe(logits)
    with refuses(Lacks, what="forward pass to observe"):
        opt.observe(logits)
    seen = KFAC(net(), 0.1)
    logits = seen.model(x)
    seen.observe(logits)  # the model's own output, observed already: nothing to do
    with refuses(Lacks, what="forward pass to observe"):
        seen.observe(logits, mask=torch.ones(6, dtype=torch.bool))  # it was, with all rows


def test_counters_go_with_the_state():
    """Failed inversions and skipped steps, into an optimizer that has seen neither."""
    model, (x, y) = net(), data()
    opt = KFAC(model, 0.0, refresh_every=1000, invert_every=1)
    cross_entropy(model(x), y).backward()
    opt.step()
    state = opt.state_dict()
    curvature_state(state)["layers"]["0"]["A"][..., 0, 0] -= 1e3
    opt.load_state_dict(state)
    opt.step()
    model[0].weight.grad[0, 0] = math.nan
    opt.step()
    health = opt.check()
    assert (health.skipped, health.skipped_in_a_row, health.failed_inversions) == (1, 1, {"0": 2})
    other = KFAC(net(), 0.0, refresh_every=1000, invert_every=1)
    other.load_state_dict(opt.state_dict())
    assert other.check() == health


def test_a_loaded_state_replaces_an_inversion_that_was_begun():
    options = {"refresh_every": 1, "invert_every": 4, "options": KFACOptions(inversion_lag=2)}

    def trained(steps: int) -> KFAC:
        model, (x, y) = net(), data()
        opt = KFAC(model, 0.1, **options)
        for _ in range(steps):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
        return opt

    begun, plain = curvature_state(trained(5).state_dict()), trained(4).state_dict()
    assert begun["begun"] is not None
    assert curvature_state(plain)["begun"] is None
    opt = trained(5)
    opt.load_state_dict(plain)
    found = curvature_state(opt.state_dict())["layers"]
    for name, layer in curvature_state(plain)["layers"].items():
        assert found[name].keys() == layer.keys()
        assert "A_pending" in begun["layers"][name]


@pytest.mark.parametrize("others", ["sgd", "adam"])
def test_a_grad_scaler_scales_the_others_back(others):
    """As a GradScaler does it: gradients times 8, and the optimizer is told so."""
    moved = []
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        x, y = data()
        opt = KFAC(model, 0.1, others=others, options=KFACOptions(seed=0, others_eps=1.0))
        (scale * cross_entropy(model(x.float()), y)).backward()
        opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
        opt.step()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-5, atol=1e-7)


def test_a_state_saved_while_most_of_an_inversion_is_to_come():
    """Three shapes, one inverted a step: saving does the rest, and who loads it goes on alike."""
    x, y = data()

    def made() -> KFAC:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 2)).double()
        options = KFACOptions(inversion_lag=3, seed=0)
        return KFAC(model, 0.1, refresh_every=1, invert_every=4, options=options)

    def trained(opt: KFAC, steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            cross_entropy(opt.model(x), y).backward()
            opt.step()

    first, second = made(), made()
    trained(first, 5)  # an inversion was begun at the fifth
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for opt in (first, second):
        trained(opt, 4)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)
    whole = made()
    trained(whole, 9)  # never saved
    for p, q in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_loaded_optimizer_has_seen_its_layers():
    """A refresh without a forward pass is a warning then, as it would have been without saving."""
    model, (x, y) = net(), data()
    opt = KFAC(model, 0.0)
    cross_entropy(model(x), y).backward()
    opt.step()
    other = KFAC(net(), 0.0, refresh_every=1)
    other.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="no forward pass in train mode was observed"):
        other.step()


@pytest.mark.parametrize("python", [True, False])
def test_what_the_first_step_inverts_is_not_inverted_again_behind_it(python):
    """A damping that follows the weights tells: the first inverses stay until the next are due.

    Where steps are replayed graphs, from the second on, the Python of `device_step` does not run.
    """
    model, (x, y) = net(), data()
    options = KFACOptions(inversion_lag=2, invariant=("0",))
    opt = KFAC(
        model, 0.5, refresh_every=100, invert_every=4, damping_scaling="scale-free", options=options
    )

    def layer() -> dict[str, torch.Tensor]:
        return curvature_state(opt.state_dict())["layers"]["0"]

    inverses, pending = [], []
    for step in range(7):
        opt.before_step()
        if step == 0 or python:
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.device_step()
        model[0].weight.data *= 1.1
        inverses.append(layer()["A_inverse"])
        opt.after_step()
        pending.append("A_pending" in layer())
    assert pending == [False, False, False, False, True, True, False]
    for later in inverses[1:6]:
        assert torch.equal(later, inverses[0])
    assert not torch.equal(inverses[6], inverses[0])  # begun behind the fifth step


@pytest.mark.parametrize("first", [True, False])
def test_the_empirical_fisher_leaves_out_passes_that_were_not_observed(first):
    """A pass of another loss, whose logits are not handed over, before or behind ours."""
    x, y = data()

    def measured(other: bool) -> dict:
        model = net()
        opt = KFAC(model, 0.1, curvature="empirical-fisher", logits="observed")
        if other and first:
            model(2 * x).square().sum().backward()
        logits = model(x)
        opt.observe(logits)
        cross_entropy(logits, y).backward()
        if other and not first:
            model(2 * x).square().sum().backward()
        opt.step()
        return opt.factors()

    expected, found = measured(False), measured(True)
    for name, factors in expected.items():
        for key in ("A", "S", "T"):
            assert torch.equal(getattr(found[name], key), getattr(factors, key))


@pytest.mark.parametrize("decay", ["decoupled", "independent", "l2", "none"])
def test_matrices_and_scalars_outside_the_blocks_decay_as_they_should(decay):
    """An excluded layer and a scalar, by SGD: W - lr (g + [l2] wd W) - ([lr] wd W)."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(torch.tanh(self.scale * self.first(x)))

    torch.manual_seed(0)
    model, (x, y) = Scaled().double(), data()
    first, last = model.first, model.last
    opt = KFAC(
        model,
        0.5,
        weight_decay=0.125,
        decay=decay,
        momentum=0.0,
        others="sgd",
        others_lr=0.25,
        params=[
            {"params": p} for p in ([model.scale], [*first.parameters()], [*last.parameters()])
        ],
        options=KFACOptions(exclude=("first",)),
    )
    cross_entropy(model(x), y).backward()
    wanted = {}
    for p in (model.scale, model.first.weight, model.first.bias):
        kept = 1 - {"decoupled": 0.25 * 0.125, "independent": 0.125, "l2": 0.25 * 0.125}.get(
            decay, 0
        )
        wanted[p] = kept * p.detach() - 0.25 * p.grad
    opt.step()
    for p, value in wanted.items():
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-14)


def test_a_group_is_split_only_where_it_has_both_kinds():
    """So that a scheduler's list of learning rates fits the groups that were given."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    given = [[model[0].weight], list(model[1].parameters()), [model[2].weight, model[2].bias]]
    opt = KFAC(model, 0.1, params=[{"params": group} for group in given])
    assert [group["params"] for group in opt.param_groups] == given
    assert [group["law"] for group in opt.param_groups] == ["kfac", "adam", "kfac"]
    whole = KFAC(model, 0.1)
    assert [group["law"] for group in whole.param_groups] == ["kfac", "adam"]


def test_factors_are_copies_and_zero_before_a_layer_was_seen():
    model, (x, y) = net(), data()
    opt = KFAC(model, 0.1)
    before = opt.factors()
    cross_entropy(model(x), y).backward()
    opt.step()
    for factors in before.values():
        assert not any(tensor.any() for tensor in (factors.A, factors.S, factors.T))


@pytest.mark.parametrize("curvature", ["gauss-newton", "empirical-fisher"])
def test_a_measurement_that_an_error_cut_short_counts_for_nothing(curvature, monkeypatch):
    """Out of memory, say, and the loop goes on with the next batch."""
    model, (x, y) = net(), data()
    whole = Sums.add_inputs

    def fails(*arguments):
        monkeypatch.setattr(Sums, "add_inputs", whole)
        raise torch.OutOfMemoryError

    def train(opt):
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()

    fresh = KFAC(model, 0.0, curvature=curvature, outputs="exact")
    train(fresh)
    fresh.detach()
    opt = KFAC(model, 0.0, curvature=curvature, outputs="exact")
    monkeypatch.setattr(Sums, "add_inputs", fails)
    with pytest.raises(torch.OutOfMemoryError):
        train(opt)
    train(opt)
    for name, factors in fresh.factors().items():
        torch.testing.assert_close(opt.factors()[name].S, factors.S, rtol=1e-12, atol=0)


def test_sides_above_8192_are_diagonal_if_nothing_is_said():
    assert KFAC(nn.Sequential(nn.Linear(8192, 2)), 0.1).factors()["0"].A.shape == (8193,)
    assert KFAC(net(), 0.1, max_factor_dim=1).factors()["0"].A.shape == (4,)


def test_a_saved_state_stays_as_it_was_saved():
    """While steps are skipped, and while another state is loaded."""
    model, larger = net(), net()
    with torch.no_grad():
        larger[0].weight.mul_(2)
    options = {"damping_scaling": "scale-free", "options": KFACOptions(invariant=("0",))}
    opt, other = KFAC(model, 0.1, **options), KFAC(larger, 0.1, **options)
    saved = curvature_state(opt.state_dict())
    x, y = data()
    cross_entropy(model(x), y).backward()
    model[0].weight.grad.fill_(math.nan)
    opt.step()
    assert opt.check().skipped == 1
    assert saved["skips"].tolist() == [0, 0]
    opt.load_state_dict(other.state_dict())
    torch.testing.assert_close(saved["initial_norms"]["0"], net()[0].weight.norm().detach())
