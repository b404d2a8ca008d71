"""What trying an optimizer finds out is what its formula says."""

import copy
import gc
import weakref

import pytest
import torch

from decaylab.optim import experiment
from decaylab.optim.decay import decay_of
from decaylab.optim.experiment import Behaviour, behaviour
from decaylab.optim.laws import GRADIENT_SCALE_FREE, exposure_rate, law_of
from decaylab.probes import layers_of
from decaylab.probes.settings import settings


class Formula(torch.optim.Optimizer):
    """W <- W + step(group, state, W, gradient); its settings are `own`."""

    own: dict = {}

    def __init__(self, params, lr=1e-3, weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **self.own, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.move(group, self.state[p], p, p.grad))


class Lion(Formula):
    own = {"betas": (0.9, 0.99)}

    def move(self, group, state, p, grad):
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        fast, slow = group["betas"]
        sign = (fast * m + (1 - fast) * grad).sign()
        m.lerp_(grad, 1 - slow)
        return -group["lr"] * (sign + group["weight_decay"] * p)


class Lamb(Formula):
    """The trust ratio makes its decay depend on the gradients: no known kind."""

    def move(self, group, state, p, grad):
        direction = grad / (grad.abs() + 1e-8) + group["weight_decay"] * p
        return -group["lr"] * p.norm() / direction.norm() * direction


class HeavyBall(Formula):
    """Decay within a momentum that is a running mean: L2."""

    def move(self, group, state, p, grad):
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(grad + group["weight_decay"] * p, 0.1)
        return -group["lr"] * m


class Algorithm1(Formula):
    """Decay as the paper's Algorithm 1 prints it, without lr."""

    def move(self, group, state, p, grad):
        return -group["lr"] * grad - group["weight_decay"] * p


class Proximal(Formula):
    def move(self, group, state, p, grad):
        return (p - group["lr"] * grad.sign()) / (1 + group["lr"] * group["weight_decay"]) - p


class Cautious(Formula):
    """Decays only where the gradient pulls the same way: without gradients, nothing is seen."""

    def move(self, group, state, p, grad):
        pulled = (grad * p > 0).to(p.dtype)
        return -group["lr"] * (grad.sign() + group["weight_decay"] * p * pulled)


class Warming(Formula):
    """Its steps grow without end: no momentum does that."""

    def move(self, group, state, p, grad):
        state["step"] = state.get("step", 0) + 1
        return -group["lr"] * state["step"] * (grad + group["weight_decay"] * p)


def tried(kind, **settings):
    optimizer = kind([torch.nn.Parameter(torch.randn(4, 3))], **{"lr": 0.3, **settings})
    return behaviour(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Lion, Behaviour("decoupled", 1)),
        (Lamb, Behaviour(None, 0)),
        (HeavyBall, Behaviour("l2", 2)),
        (Algorithm1, Behaviour("independent", 2)),
        (Proximal, Behaviour("decoupled", 1)),
        (Cautious, Behaviour(None, 1)),
        (Warming, Behaviour(None, 2)),
    ],
)
def test_formulas(kind, expected):
    assert tried(kind, weight_decay=0.2) == expected


@pytest.mark.parametrize("name", [kind.__name__ for kind in GRADIENT_SCALE_FREE])
def test_torchs_scale_free_optimizers_are_seen_to_be_so(name):
    seen = tried(getattr(torch.optim, name))
    assert seen.power == 1
    assert seen.decay == ("decoupled" if name == "Muon" else "l2")


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
def test_torchs_flag_for_decoupled_decay_is_seen(name):
    seen = tried(getattr(torch.optim, name), decoupled_weight_decay=True)
    assert seen == Behaviour("decoupled", 1, second_moment=True)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"dampening": 0.25}])
def test_sgds_decay_is_inside_its_momentum(momentum, more):
    assert tried(torch.optim.SGD, momentum=momentum, **more) == Behaviour("l2", 2)


def test_sgd_without_momentum_has_one_kind_of_decay():
    assert tried(torch.optim.SGD) == Behaviour("decoupled", 2)


def test_one_that_cannot_be_tried_is_not_known():
    assert tried(torch.optim.LBFGS) == Behaviour()


def test_an_independent_librarys_flags():
    """Where it heeds them; some of its optimizers have the flag and decouple whatever it says."""
    library = pytest.importorskip("pytorch_optimizer")
    for name in ("adabelief", "adabound", "adamod", "lion", "tiger", "yogi", "ademamix", "came"):
        kind = library.load_optimizer(name)
        for decoupled in (True, False):
            seen = tried(kind, weight_decay=0.2, weight_decouple=decoupled)
            assert seen.decay == ("decoupled" if decoupled else "l2"), name
            assert seen.power == 1, name
        fixed = {"weight_decouple": True, "fixed_decay": True}
        assert tried(kind, weight_decay=0.2, **fixed).decay == "independent", name
    galore = library.load_optimizer("galore")
    assert tried(galore, weight_decay=0.2, weight_decouple=False).decay == "decoupled"


def test_settings_follow_from_what_was_seen():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = Lion(model.parameters(), lr=0.5, weight_decay=0.25)
    (group,) = optimizer.param_groups
    assert decay_of(dict(group), optimizer) == ("decoupled", 0.25)
    assert law_of(optimizer, group) == "adam"
    assert exposure_rate(optimizer, group) == 0.125
    found = settings(optimizer, layers_of(model))
    assert (found["setting_power/0"], found["setting_beta1/0"]) == (1.0, 0.9)
    assert "setting_beta2/0" not in found  # it is no memory of squared gradients
    group["decay"] = "l2"  # what a group says comes first
    group["law"] = "sgd"
    assert decay_of(dict(group), optimizer) == ("l2", 0.25)
    assert law_of(optimizer, group) == "sgd"


def test_l2_inside_a_momentum_decays_at_the_rate_of_the_long_run():
    class Plain(Formula):
        own = {"momentum": 0.5}

        def move(self, group, state, p, grad):
            m = state.setdefault("m", torch.zeros_like(p))
            m.mul_(group["momentum"]).add_(grad + group["weight_decay"] * p)
            return -group["lr"] * m

    optimizer = Plain([torch.nn.Parameter(torch.randn(4, 3))], lr=0.5, weight_decay=0.25)
    assert exposure_rate(optimizer, optimizer.param_groups[0]) == pytest.approx(0.25)


def test_nothing_of_the_users_is_touched_and_it_is_tried_once(monkeypatch):
    made = []

    class Counted(Lion):
        def __init__(self, *given, **more):
            made.append(self)
            super().__init__(*given, **more)

    weight = torch.nn.Parameter(torch.randn(4, 3))
    weight.grad = torch.randn(4, 3)
    optimizer = Counted([weight], lr=0.5, weight_decay=0.25)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces its step
    optimizer.step()
    kept = copy.deepcopy((weight.data, weight.grad, optimizer.state_dict()))
    generator = torch.get_rng_state()
    steps.clear()
    with torch.no_grad():
        first = behaviour(optimizer, optimizer.param_groups[0])
    count = len(made)
    optimizer.param_groups[0]["lr"] = 0.1  # a schedule
    assert behaviour(optimizer, optimizer.param_groups[0]) == first
    assert len(made) == count
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    behaviour(optimizer, optimizer.param_groups[0])
    assert len(made) > count
    assert not steps
    assert torch.equal(torch.get_rng_state(), generator)
    now = (weight.data, weight.grad, optimizer.state_dict())
    assert torch.equal(kept[0], now[0])
    assert torch.equal(kept[1], now[1])
    assert torch.equal(kept[2]["state"][0]["exp_avg"], now[2]["state"][0]["exp_avg"])


def test_what_was_seen_does_not_keep_an_optimizer_alive():
    optimizer = Lion([torch.nn.Parameter(torch.randn(4, 3))])
    behaviour(optimizer, optimizer.param_groups[0])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_among_several_processes_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(experiment.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(experiment.dist, "get_world_size", lambda: 2)
    assert tried(Lion) == Behaviour()


def test_one_that_only_takes_single_precision_is_tried_in_it():
    class Single(Lion):
        def move(self, group, state, p, grad):
            if p.dtype != torch.float32:
                raise TypeError("float32 only")
            return super().move(group, state, p, grad)

    assert tried(Single) == Behaviour("decoupled", 1)
