"""Laws of optimizers against simulated steps: one scale-invariant matrix, random gradients."""

import math

import pytest
import torch
from oracle.formulas import Lion as LionOptimizer
from refusals import refuses
from torch import nn

from decaylab import KFAC
from decaylab.errors import OutOfRange, UnknownName
from decaylab.optim.laws import (
    Adam,
    Kfac,
    Lion,
    Muon,
    ScheduleFree,
    Sgd,
    Unknown,
    exposure_rate,
    law_named,
    law_of,
)
from decaylab.optim.laws.law import balance, momentum_correlation

SHAPE = (16, 48)


def walk(build, steps, start):
    """|W| and the angle of every step, gradients (I - uu') xi / |W| with xi white."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(start * weight / weight.norm())
    optimizer = build([weight])
    norms, angles = [], []
    for _ in range(steps):
        before = weight.detach().clone()
        noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        unit = before / before.norm()
        weight.grad = (noise - (noise * unit).sum() * unit) / before.norm()
        optimizer.step()
        after = weight.detach()
        cosine = float((before * after).sum() / before.norm() / after.norm())
        angles.append(math.acos(min(cosine, 1.0)))
        norms.append(float(after.norm()))
    return optimizer, norms, angles


def sgd(momentum, nesterov=False):
    return lambda p: torch.optim.SGD(
        p, lr=0.01, momentum=momentum, nesterov=nesterov, weight_decay=0.02 if momentum else 0.2
    )


SIMULATED = {
    "sgd": (sgd(0.0), 1.5),
    "sgd, momentum": (sgd(0.9), 3.0),
    "sgd, nesterov": (sgd(0.9, True), 3.0),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=1.0), 1.0),
    "adamw, other betas": (
        lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=1.0, betas=(0.8, 0.95)),
        1.0,
    ),
    "nadam": (
        lambda p: torch.optim.NAdam(
            p, lr=2e-3, weight_decay=1.0, decoupled_weight_decay=True, momentum_decay=1e3
        ),
        1.0,
    ),
    "lion": (lambda p: LionOptimizer(p, lr=1e-3, weight_decay=1.0), 4.0),
    "muon": (lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1), 1.0),
    "muon, plain": (
        lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=False),
        1.0,
    ),
}


@pytest.mark.parametrize("case", SIMULATED)
def test_the_equilibrium_holds(case):
    """Rotation and norm within 15 % after three timescales, from the settings alone.

    The timescale is 1/(2 s (1 - e)). The norm is predicted from the length of the last steps.
    """
    build, start = SIMULATED[case]
    probe = build([nn.Parameter(torch.ones(SHAPE, dtype=torch.float64))])
    (group,) = probe.param_groups
    law = law_of(probe, group)
    decay = "l2" if law.name == "sgd" else "decoupled"
    shrink = law.shrink(group["weight_decay"], decay, group["lr"])
    timescale = 1 / (2 * shrink * (1 - law.elasticity()))
    _, norms, angles = walk(build, round(8 * timescale), start)
    after = round(3 * timescale)
    seen = math.sqrt(sum(a**2 for a in angles[after:]) / len(angles[after:]))
    assert seen == pytest.approx(law.rotation(shrink), rel=0.15)
    lengths = [norm * angle for norm, angle in zip(norms, angles, strict=True)][after:]
    length = math.sqrt(sum(d**2 for d in lengths) / len(lengths))
    norm = sum(norms[after:]) / len(norms[after:])
    found = law.equilibrium(law.correlation() * length**2, norm, shrink)
    assert norm == pytest.approx(found.norm, rel=0.15)
    assert found.steps == pytest.approx(timescale)


@pytest.mark.parametrize(("share", "e"), [(None, 1.0), (1.0, 1.0), (0.5, 0.0), (0.0, -1.0)])
def test_kfac_is_between_its_two_ends(share, e):
    assert Kfac().elasticity(share) == e
    assert Kfac(step_rms=0.1).elasticity(share) == 0.0
    assert (Kfac().norm_power, Kfac(step_rms=0.1).norm_power) == (0, 1)
    found = Kfac().equilibrium(0.01, 1.0, 0.003, share)
    assert (found is None) == (e == 1.0)


def test_kfac_whose_steps_have_one_length():
    """|d| before the momentum is set: the balance is Adam's, simulated. Within 5 %."""
    law, lr, weight_decay = Kfac(0.9, step_rms=0.02), 0.1, 0.05
    shrink = law.shrink(weight_decay, "decoupled", lr)
    generator = torch.Generator().manual_seed(0)
    weight, buffer = torch.randn(2000, generator=generator), torch.zeros(2000)
    angles = []
    for step in range(1200):
        noise = torch.randn(2000, generator=generator)
        unit = weight / weight.norm()
        noise -= (noise @ unit) * unit
        buffer = 0.9 * buffer + 0.02 * noise / noise.norm() * math.sqrt(2000)
        after = weight * (1 - shrink) - lr * buffer
        if step >= 600:
            angles.append(math.acos(min(float(weight @ after / weight.norm() / after.norm()), 1.0)))
        weight = after
    assert sum(angles) / len(angles) == pytest.approx(law.rotation(shrink), rel=0.05)


@pytest.mark.parametrize("nesterov", [True, False])
def test_kfac_whose_steps_are_spectral(nesterov):
    """As Muon's above, within 15 %, under a damping that drowns the curvature."""

    class Held(KFAC):
        """Of a layer that is observed once; gradients come from elsewhere."""

        def __init__(self, params):
            model = nn.Linear(*SHAPE[::-1], bias=False, dtype=torch.float64)
            (model.weight,) = params
            settings = {"weight_decay": 0.1, "damping": 1e12, "likelihood": "gaussian"}
            settings |= {"refresh_every": 10**6, "invert_every": 10**6}
            super().__init__(model, 0.02, step_scaling="spectral", **settings)
            self.nesterov = nesterov
            model(torch.randn(100, SHAPE[1], dtype=torch.float64))

    probe = Held([nn.Parameter(torch.ones(SHAPE, dtype=torch.float64))])
    law = law_of(probe, probe.param_groups[0])
    assert law == Kfac(0.9, 0.2, nesterov)
    shrink = law.shrink(0.1, "decoupled", 0.02)
    _, _, angles = walk(Held, round(8 / (2 * shrink)), 1.0)
    late = angles[round(3 / (2 * shrink)) :]
    seen = math.sqrt(sum(angle**2 for angle in late) / len(late))
    assert seen == pytest.approx(law.rotation(shrink), rel=0.15)


@pytest.mark.parametrize("beta1", [0.0, 0.9, 0.95])
def test_signs_of_a_running_mean_correlate_as_lion_says(beta1):
    """C = (variance of the sum over many steps) / (steps), within four standard errors or 3 %."""
    generator = torch.Generator().manual_seed(0)
    steps, walkers = 3000, 2000
    mean, total = torch.zeros(walkers), torch.zeros(walkers)
    for _ in range(steps):
        gradient = torch.randn(walkers, generator=generator)
        total += (beta1 * mean + (1 - beta1) * gradient).sign()
        mean.lerp_(gradient, 0.01)
    seen = float(total.square().mean() / steps)
    error = seen * math.sqrt(2 / walkers)
    expected = Lion(beta1, 0.99).correlation()
    # the sum ends at finite time: what it lacks is about C times the memory over the steps
    assert abs(seen - expected) < 4 * error + 0.05 * expected


def test_correlations_are_those_of_their_weights():
    """(sum w)^2 / sum w^2 of the weights written out."""
    for m in (0.0, 0.5, 0.9, 0.95):
        plain = [m**k for k in range(2000)]
        nesterov = [1 + m, *(m ** (k + 1) for k in range(1, 2000))]
        for weights, flag in ((plain, False), (nesterov, True)):
            exact = sum(weights) ** 2 / sum(w**2 for w in weights)
            assert momentum_correlation(m, nesterov=flag) == pytest.approx(exact, rel=1e-9)


def test_what_l2_takes_under_each():
    assert Sgd(0.9).shrink(5e-4, "l2", 0.1) == pytest.approx(5e-4)
    assert Sgd(0.9, dampening=0.9).shrink(5e-4, "l2", 0.1) == pytest.approx(5e-5)
    for law in (Sgd(0.9), Lion(), Muon(), Kfac(), Unknown()):
        assert law.shrink(0.1, "decoupled", 0.01) == pytest.approx(1e-3)
        assert law.shrink(0.1, "independent", 0.01) == pytest.approx(0.1)
        assert law.shrink(0.1, "none", 0.01) == 0.0
        assert law.weight_decay_for(1e-3, "decoupled", 0.01) == pytest.approx(0.1)
    assert [law.sums_l2 for law in (Sgd(), Lion(), Kfac(), law_named("adamw"))] == [True] + 3 * [
        False
    ]


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.98])
def test_what_schedule_free_weights_lose_by_decay_alone(beta):
    """Without gradients, to first order in what decay has taken from z."""
    library = pytest.importorskip("schedulefree")
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = library.AdamWScheduleFree([weight], lr=1e-5, weight_decay=0.1, betas=(beta, 0.99))
    optimizer.train()
    (group,), steps = optimizer.param_groups, 1000
    rate = exposure_rate(optimizer, group)
    assert rate == law_of(optimizer, group).shrink(0.1, "decoupled", 1e-5)
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert 1 - float(weight.detach()[0]) == pytest.approx(rate * steps, rel=5e-3)


def test_what_is_not_known_is_none():
    assert Unknown().rotation(1e-3) is None
    assert Unknown().elasticity() is None
    assert Unknown().equilibrium(0.1, 1.0, 1e-3) is None
    assert Unknown().effective_per_lr(((1, 1.0),)) == ()
    assert ScheduleFree().rotation(1e-3) is None
    assert (ScheduleFree().norm_power, ScheduleFree(0.9, Adam(0.0)).norm_power) == (2, 1)
    assert ScheduleFree().clipped().norm_power is None
    assert balance(0.0, 1.0, 1e-3, e=0.0) is None
    with refuses(OutOfRange, name="rotation", value=2.0):
        Sgd().shrink_for_rotation(2.0)


@pytest.mark.parametrize(
    ("name", "law"),
    [("AdamW", "adam"), ("SOAP", "shampoo"), ("rmsprop", "adam"), ("kfac-g", "kfac")],
)
def test_names_that_people_give(name, law):
    assert law_named(name).name == law
    with refuses(UnknownName, kind="optimizer"):
        law_named(name + "?")
    with refuses(OutOfRange, name="momentum", value=1.0):
        law_named(name, memory=1.0)


def test_laws_of_optimizers_from_elsewhere():
    library = pytest.importorskip("pytorch_optimizer")
    laws = {"lion": "lion", "soap": "shampoo", "shampoo": "shampoo", "muon": "muon"}
    laws |= {"adamp": "adam", "stableadamw": "adam", "sgdw": "sgd", "lamb": "unknown"}
    laws |= {"schedulefreeadamw": "schedule-free", "schedulefreesgd": "schedule-free"}
    for name, law in laws.items():
        own = {"params": [nn.Parameter(torch.randn(4, 3))]}
        own |= {"use_muon": True} if name == "muon" else {}
        optimizer = library.load_optimizer(name)([own])
        assert law_of(optimizer, optimizer.param_groups[0]).name == law, name


def test_adafactor_has_no_balance_by_name():
    """torch's turns by lr whatever the decay: its steps go with the norm."""
    for weight_decay in (0.01, 0.1):
        settings = {"lr": 0.01, "weight_decay": weight_decay}
        _, _, angles = walk(lambda p, s=settings: torch.optim.Adafactor(p, **s), 1200, 3.0)
        assert sum(angles[-200:]) / 200 == pytest.approx(0.01, rel=0.05)
    law = law_named("Adafactor")
    assert law.rotation(1e-4) is None
    assert law.shrink(0.1, "decoupled", 0.01) == pytest.approx(1e-3)


def test_groups_that_a_muon_steps_with_adam_follow_adams_law():
    library = pytest.importorskip("pytorch_optimizer")
    groups = [
        {"params": [nn.Parameter(torch.randn(4, 3))], "use_muon": True},
        {"params": [nn.Parameter(torch.randn(4, 3))], "use_muon": False},
    ]
    optimizer = library.Muon(groups, weight_decay=0.1)
    laws = [law_of(optimizer, group) for group in optimizer.param_groups]
    assert [law.name for law in laws] == ["muon", "adam"]


def test_a_muon_that_does_not_say_otherwise_is_nesterovs():
    """As its authors define it; torch's says so in its groups."""

    class Muon(LionOptimizer):
        own = {"momentum": 0.95}

        def move(self, group, state, p, grad):
            m = state.setdefault("momentum_buffer", torch.zeros_like(p))
            m.lerp_(grad, 1 - group["momentum"])
            u, _, v = torch.linalg.svd(grad.lerp(m, group["momentum"]), full_matrices=False)
            return -group["lr"] * (u @ v + group["weight_decay"] * p)

    optimizer = Muon([nn.Parameter(torch.randn(4, 3))], weight_decay=0.1)
    assert law_of(optimizer, optimizer.param_groups[0]).nesterov
    plain = Muon([nn.Parameter(torch.randn(4, 3))], weight_decay=0.1, nesterov=False)
    assert not law_of(plain, plain.param_groups[0]).nesterov
