"""What trying an optimizer finds out is what its formula says."""

import copy
import gc
import math
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from oracle.formulas import (
    Algorithm1,
    ByShape,
    Cautious,
    Clipped,
    Corrected,
    Formula,
    HeavyBall,
    Lamb,
    Lion,
    MatricesOnly,
    Noisy,
    Proximal,
    RunningMean,
    Stable,
    TensorRate,
    TrustIfDecayed,
    Warming,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from decaylab.diagnosis.layers import decay_rate
from decaylab.diagnosis.reasons import Because
from decaylab.optim import optimizer_behaviour
from decaylab.optim.decay import decay_of
from decaylab.optim.laws import GRADIENT_SCALE_FREE, exposure_rate, law_for, law_of
from decaylab.optim.optimizer_behaviour import Behaviour, behaviour
from decaylab.optim.table import Problem, decay_table
from decaylab.probes import layers_of
from decaylab.probes.settings import layer_settings


def tried(kind, **settings):
    optimizer = kind([torch.nn.Parameter(torch.randn(4, 3))], **{"lr": 0.3, **settings})
    return behaviour(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Lion, Behaviour("decoupled", 1)),
        (Lamb, Behaviour(None, 0)),
        (HeavyBall, Behaviour("l2", 2)),
        (RunningMean, Behaviour("l2", 2)),
        (Algorithm1, Behaviour("independent", 2)),
        (Proximal, Behaviour("decoupled", 1)),
        (Cautious, Behaviour(None, 1)),
        (Warming, Behaviour("l2", 2)),
        (Clipped, Behaviour("decoupled", None)),
        (Stable, Behaviour(None, 1)),
        (Corrected, Behaviour(None, 1)),
        (TrustIfDecayed, Behaviour("decoupled", 0)),
        (Noisy, Behaviour(None, 1)),
        (MatricesOnly, Behaviour("decoupled", 1)),
        (ByShape, Behaviour(None, 1)),
        (TensorRate, Behaviour("decoupled", 1)),
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
    assert tried(torch.optim.SGD, momentum=momentum, **more) == Behaviour("l2", 2, as_sgd=True)


def test_sgd_without_momentum_has_one_kind_of_decay():
    assert tried(torch.optim.SGD) == Behaviour("decoupled", 2, as_sgd=True)


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
            # Yogi adds 1e-3 to the root of its second moment, no little to many gradients
            assert seen.power == (None if name == "yogi" else 1), name
        fixed = {"weight_decouple": True, "fixed_decay": True}
        assert tried(kind, weight_decay=0.2, **fixed).decay == "independent", name
    galore = library.load_optimizer("galore")
    assert tried(galore, weight_decay=0.2, weight_decouple=False).decay == "decoupled"
    assert tried(library.load_optimizer("adai"), weight_decay=0.2).decay == "l2"
    assert tried(library.load_optimizer("gravity"), weight_decay=0.2).decay is None  # it has none
    assert tried(library.load_optimizer("stableadamw"), weight_decay=0.2).decay is None
    for maximize in (True, False):
        seen = tried(library.load_optimizer("adamp"), weight_decay=0.2, maximize=maximize)
        assert seen.decay is None  # a tenth of it where gradients stand across the weights
    # and this one's tenth is, by its momentum, just the decoupled rate
    assert tried(library.load_optimizer("sgdp"), weight_decay=0.2, momentum=0.9).decay is None


def test_settings_follow_from_what_was_seen():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = Lion(model.parameters(), lr=0.5, weight_decay=0.25)
    (group,) = optimizer.param_groups
    assert decay_of(dict(group), optimizer) == ("decoupled", 0.25)
    assert law_of(optimizer, group).name == "lion"
    assert exposure_rate(optimizer, group) == 0.125
    found = layer_settings([optimizer], layers_of(model))["0"]
    assert (found.law, found.beta1) == ("lion", 0.9)
    assert found.beta2 == 0.99
    group["decay"] = "l2"  # what a group says comes first
    group["law"] = "sgd"
    assert decay_of(dict(group), optimizer) == ("l2", 0.25)
    assert law_of(optimizer, group).name == "sgd"


class HeavyBall(Formula):
    name = "momentum"
    own = {"momentum": 0.5}

    def move(self, group, state, p, grad):
        m = state.setdefault("m", torch.zeros_like(p))
        m.mul_(group[self.name]).add_(grad + group["weight_decay"] * p)
        return -group["lr"] * m


def test_l2_inside_a_momentum_decays_at_the_rate_of_the_long_run():
    optimizer = HeavyBall([torch.nn.Parameter(torch.randn(4, 3))], lr=0.5, weight_decay=0.25)
    assert exposure_rate(optimizer, optimizer.param_groups[0]) == pytest.approx(0.25)
    assert behaviour(optimizer, optimizer.param_groups[0]).as_sgd


def test_a_momentum_that_is_a_mean_does_not_add_up_the_decay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = RunningMean(model.parameters(), lr=0.5, weight_decay=0.25)
    assert exposure_rate(optimizer, optimizer.param_groups[0]) == 0.125
    assert layer_settings([optimizer], layers_of(model))["0"].law == "unknown"


class Momentum(HeavyBall):
    """Its momentum has another name than torch's."""

    name = "mu"
    own = {"mu": 0.9}


class Adam(Formula):
    """Decoupled decay; each beta is a setting of its own."""

    own = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}

    def move(self, group, state, p, grad):
        m, v = (state.setdefault(k, torch.zeros_like(p)) for k in ("exp_avg", "exp_avg_sq"))
        state["step"] = t = state.get("step", 0) + 1
        m.lerp_(grad, 1 - group["beta1"])
        v.lerp_(grad**2, 1 - group["beta2"])
        scale = (1 - group["beta2"] ** t) ** 0.5 / (1 - group["beta1"] ** t)
        decay = group["weight_decay"] * p
        return -group["lr"] * (scale * m / (v.sqrt() + group["eps"]) + decay)


class Nesterov(Momentum):
    def move(self, group, state, p, grad):
        return group["mu"] * super().move(group, state, p, grad) - group["lr"] * grad


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Momentum, {"kind": torch.optim.SGD, "momentum": 0.9}),
        (Adam, {"kind": torch.optim.AdamW, "betas": (0.9, 0.99)}),
    ],
)
def test_a_momentum_of_another_name_is_measured(mine, theirs):
    """It decides where the angle settles: at 0.9, 4.4 times nearer than without."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    theirs = dict(theirs)
    optimizers = [
        kind(model.parameters(), lr=0.01, weight_decay=0.2, **more)
        for kind, more in ((mine, {}), (theirs.pop("kind"), theirs))
    ]
    rates, angles = [], []
    for optimizer in optimizers:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        rates.append(exposure_rate(optimizer, optimizer.param_groups[0]))
        recorded = layer_settings([optimizer], layers_of(model))["0"]
        laws = (law_of(optimizer, optimizer.param_groups[0]), law_for(recorded))
        angles += [law.rotation(0.001) for law in laws]
    assert rates[0] == pytest.approx(rates[1])
    assert angles == pytest.approx(angles[:1] * 4)


def test_no_balance_is_given_where_the_momentum_is_of_no_known_form():
    optimizer = Nesterov([torch.nn.Parameter(torch.randn(4, 3))], lr=0.01, law="sgd")
    law = law_of(optimizer, optimizer.param_groups[0])
    assert (law.norm_power, law.rotation(0.001)) == (2, None)


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
    optimizer.param_groups[0].update(lr=0.1, betas=(0.5, 0.5))  # OneCycleLR changes both
    assert behaviour(optimizer, optimizer.param_groups[0]) == first
    assert len(made) == count
    optimizer.param_groups[0]["flag"] = True
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


def test_among_several_processes_one_that_sends_is_not_tried(monkeypatch):
    """`tests/probes/sharded_cases.py` has the same with processes."""

    class Sending(Lion):
        def move(self, group, state, p, grad):
            torch.ops._c10d_functional.all_reduce(grad, "sum", "everyone")
            super().move(group, state, p, grad)

    monkeypatch.setattr(optimizer_behaviour, "several", lambda: True)
    assert tried(Lion) == Behaviour("decoupled", 1)
    assert tried(Sending) == Behaviour()


def test_one_that_only_takes_single_precision_is_tried_in_it():
    class Single(Lion):
        def move(self, group, state, p, grad):
            if p.dtype != torch.float32:
                raise TypeError("float32 only")
            return super().move(group, state, p, grad)

    assert tried(Single) == Behaviour("decoupled", 1)


def test_groups_of_vectors_are_tried_with_a_vector():
    assert tried(MatricesOnly, weight_decay=0.2).decay == "decoupled"
    bias = MatricesOnly([torch.nn.Parameter(torch.randn(5))], weight_decay=0.2)
    assert behaviour(bias, bias.param_groups[0]).decay is None  # another setting may decay them


def test_the_table_of_one_that_is_not_known_says_so():
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = Lamb(model.parameters(), lr=0.1, weight_decay=0.2)
    table = decay_table(model, optimizer)
    (row,) = table
    assert (row.decay, row.factor, row.long_run) == ("rescaled", None, None)
    assert [problem.problem for problem in table.problems] == [Problem.UNKNOWN]
    with pytest.warns(UserWarning, match="none of the known kinds"):
        assert decay_of(optimizer.param_groups[0], optimizer) == ("l2", 0.2)
    decay_of(optimizer.param_groups[0], optimizer)  # said once, not at each record


def test_flags_of_a_group_that_are_no_defaults():
    """As in Muons that step some groups with Adam, and keep all settings in the groups."""

    class Mixed(torch.optim.Optimizer):
        def __init__(self, params):
            assert all("kind" in group for group in params)
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    direction = p.grad.sign() if group["kind"] == "sign" else p.grad
                    p.sub_(group["lr"] * (direction + group["weight_decay"] * p))

    optimizer = Mixed(
        [
            {"params": [torch.nn.Parameter(torch.randn(3, 2))], "kind": kind} | setting
            for kind in ("sign", "plain")
            for setting in [{"lr": 0.1, "weight_decay": 0.3}]
        ]
    )
    sign, plain = (behaviour(optimizer, group) for group in optimizer.param_groups)
    assert (sign.decay, sign.power) == ("decoupled", 1)
    assert (plain.decay, plain.power) == ("decoupled", 2)


@pytest.mark.parametrize(
    ("kept_as", "expected"), [("fixed", "independent"), ("is_fixed", None), (None, "decoupled")]
)
def test_flags_that_an_optimizer_keeps_for_itself(kept_as, expected):
    """Under the name of the argument they are asked for again; under another nothing is tried."""

    class Keeps(Formula):
        def __init__(self, params, lr=1e-3, weight_decay=0.0, fixed=False):
            super().__init__(params, lr, weight_decay)
            if kept_as:
                setattr(self, kept_as, fixed)

        def move(self, group, state, p, grad):
            rate = 1.0 if kept_as and getattr(self, kept_as) else group["lr"]
            return -group["lr"] * grad.sign() - rate * group["weight_decay"] * p

    assert tried(Keeps, weight_decay=0.2, fixed=True).decay == expected


def test_a_step_of_ones_own_is_tried_whatever_it_is_derived_from():
    class Own(torch.optim.Adam):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * (p.grad + group["weight_decay"] * p))

    own = Own([torch.nn.Parameter(torch.randn(4, 3))], weight_decay=0.2)
    assert decay_of(own.param_groups[0], own) == ("decoupled", 0.2)
    assert law_of(own, own.param_groups[0]).name == "sgd"


def test_wrappers_are_looked_through_if_they_change_nothing():
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.2)
    wrapped = accelerate.Accelerator(cpu=True).prepare(sgd)
    assert wrapped is not sgd
    assert law_of(wrapped, wrapped.param_groups[0]).name == "sgd"
    assert decay_table(model, wrapped) == decay_table(model, sgd)
    lightning = pytest.importorskip("pytorch_lightning.core.optimizer")
    assert decay_table(model, lightning.LightningOptimizer(sgd)) == decay_table(model, sgd)


def test_a_trial_is_not_noticed(capsys, recwarn):
    class Loud(Lion):
        def __init__(self, *given, **more):
            print("loud")
            warnings.warn("loud", stacklevel=2)
            torch.manual_seed(5)
            super().__init__(*given, **more)

        def move(self, group, state, p, grad):
            group["counted"].add_(1)
            return super().move(group, state, p, grad) + 0 * (random.random() + np.random.random())

    counted = torch.zeros(())
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = Loud([parameter], weight_decay=0.2, counted=counted)
    capsys.readouterr()
    recwarn.clear()
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    hooked = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: hooked.append("before")),
        register_optimizer_step_post_hook(lambda *_: hooked.append("after")),
    ]
    with torch.inference_mode():
        assert behaviour(optimizer, optimizer.param_groups[0]).decay == "decoupled"
    assert not capsys.readouterr().out
    assert not recwarn.list
    assert not hooked
    assert counted == 0
    now = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], now[0])
    assert before[1:] == now[1:]
    parameter.grad = torch.randn(4, 3)
    optimizer.step()
    assert hooked == ["before", "after"]
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_whatever_the_default_dtype_and_device(default):
    optimizer = Lion([torch.nn.Parameter(torch.randn(4, 3))], weight_decay=0.2)
    torch.set_default_dtype(default)
    torch.set_default_device("meta")
    try:
        assert behaviour(optimizer, optimizer.param_groups[0]) == Behaviour("decoupled", 1)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_a_number_called_decay_is_no_kind_of_decay():
    optimizer = Lion([torch.nn.Parameter(torch.randn(4, 3))], weight_decay=0.2, decay=0.9)
    assert decay_of(optimizer.param_groups[0], optimizer) == ("decoupled", 0.2)


def test_decay_that_depends_on_the_shape_has_no_one_factor():
    model = torch.nn.Linear(16, 12, bias=False)
    (row,) = decay_table(model, ByShape(model.parameters(), lr=0.1, weight_decay=0.2))
    assert (row.decay, row.factor) == ("decoupled", None)
    assert row.operator.times == (pytest.approx(2 / 16), pytest.approx(2 / 14))


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdan"])
def test_the_learning_rate_of_d_adaptation_is_not_lr(name):
    """Its lr is d lr, and d grows from 1e-6: neither factor is that of a run."""
    library = pytest.importorskip("pytorch_optimizer")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    settings = {"weight_decay": 0.2, "weight_decouple": True}
    optimizer = getattr(library, name)(model.parameters(), lr=1.0, **settings)
    row, *_ = decay_table(model, optimizer)
    assert (row.decay, row.factor, row.long_run) == ("decoupled", None, None)
    assert math.isnan(exposure_rate(optimizer, optimizer.param_groups[0]))
    assert layer_settings([optimizer], layers_of(model))["0"].lr is None


def test_an_optimizer_that_finds_its_own_learning_rate_is_watched():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = Lion(model.parameters(), lr=0.1, weight_decay=0.2)
    optimizer.param_groups[0]["lr"] = None
    assert math.isnan(exposure_rate(optimizer, optimizer.param_groups[0]))
    assert layer_settings([optimizer], layers_of(model))["0"].lr is None
    row, *_ = decay_table(model, optimizer)
    assert (row.decay, row.factor, row.long_run) == ("decoupled", None, None)


class Moonlight(torch.optim.Optimizer):
    """Calls its weight decay `wd`, as Moonshot's Muon does."""

    def __init__(self, params, lr=0.02, wd=0.1, momentum=0.9, steps=5):
        super().__init__(params, {"lr": lr, "wd": wd, "momentum": momentum, "steps": steps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["wd"])
                p.sub_(group["lr"] * m.sign())


def test_a_weight_decay_of_another_name_is_found():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "wd": 0.0}]
    optimizer = Moonlight(groups, lr=0.1, wd=0.2)
    assert decay_of(optimizer.param_groups[0], optimizer) == ("decoupled", 0.2)
    assert decay_of(optimizer.param_groups[1], optimizer) == ("none", 0.0)
    assert behaviour(optimizer, optimizer.param_groups[0]) == Behaviour("decoupled", 1)
    assert [row.weight_decay for row in decay_table(model, optimizer)] == [0.2, 0.2, 0.0, 0.0]
    optimizer.param_groups[0]["wd"] = 0.4  # a schedule of the decay
    assert exposure_rate(optimizer, optimizer.param_groups[0]) == pytest.approx(0.04)


class BiasCorrected(Formula):
    """Scales its decay by Adam's bias corrections, which take thousands of steps to vanish."""

    def move(self, group, state, p, grad):
        state["step"] = state.get("step", 0) + 1
        corrected = group["lr"] * (1 - 0.999 ** state["step"]) ** 0.5
        return -corrected * (grad.sign() + group["weight_decay"] * p)


@pytest.mark.parametrize("kind", [BiasCorrected, ByShape])
def test_decay_scaled_by_what_changes_takes_no_known_part(kind):
    model = torch.nn.Sequential(torch.nn.Linear(16, 12, bias=False), torch.nn.LayerNorm(12))
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.2)
    assert math.isnan(exposure_rate(optimizer, optimizer.param_groups[0]))
    settings = layer_settings([optimizer], layers_of(model))["0"]
    assert settings.decays
    assert isinstance(decay_rate(settings), Because)


def test_nothing_is_compiled_for_a_trial():
    """An optimizer that compiles its step would be compiled anew for every trial."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Compiled(Lion):
        def move(self, group, state, p, grad):
            double = torch.compile(lambda tensor: 2 * tensor, backend=backend)
            return super().move(group, state, p, double(grad))

    assert tried(Compiled) == Behaviour("decoupled", 1)
    assert not compiled
