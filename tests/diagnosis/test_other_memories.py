"""What optimizers beside Adam remember of gradients, against how far their steps turn a weight.

Gradients at W/|W| have one size in all runs, so that the ratio of two runs' turns is that of their
effective learning rates.
"""

import math
from functools import partial

import pytest
import torch
from diagnosis.invariant_runs import SIZE, random_run
from diagnosis.recorded import ScriptedLayer, reasons, records
from oracle.formulas import Formula

from decaylab import diagnose
from decaylab.diagnosis import Reason, equivalent_schedule, suggest
from decaylab.errors import DecaylabError
from decaylab.records import Row, Rows


class AdaBelief(Formula):
    """Zhuang et al. 2020, with decoupled decay."""

    own = {"betas": (0.9, 0.999)}

    def move(self, group, state, p, grad):
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        v = state.setdefault("exp_avg_var", torch.zeros_like(p))
        t = state["step"] = state.get("step", 0) + 1
        fast, slow = group["betas"]
        m.lerp_(grad, 1 - fast)
        v.lerp_((grad - m).square(), 1 - slow)
        step = m / (1 - fast**t) / (v / (1 - slow**t)).sqrt()
        return -group["lr"] * (step + group["weight_decay"] * p)


class ThreeBetas(AdaBelief):
    """Adan's third beta, not its second, is that of the squares."""

    own = {"betas": (0.98, 0.92, 0.99)}

    def move(self, group, state, p, grad):
        return super().move({**group, "betas": group["betas"][::2]}, state, p, grad)


def amsgrad(groups, **settings):
    return torch.optim.AdamW(groups, amsgrad=True, **settings)


def schedule_free(groups, **settings):
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(groups, **settings)
    optimizer.train()
    return optimizer


def both(build, steps, start, lr, weight_decay, clip=None):
    """Runs with decay and without, and the factor in the turns over their second half."""
    runs = [
        random_run(build, steps, start, clip, lr=lr, weight_decay=decay)
        for decay in (weight_decay, 0.0)
    ]
    (decayed, _, turns), (plain, _, others) = runs
    late = list(zip(turns, others, strict=True))[steps // 2 :]
    return decayed, plain, math.exp(sum(math.log(a / b) for a, b in late) / len(late))


@pytest.mark.parametrize(
    ("build", "lr", "weight_decay"),
    [
        (AdaBelief, 0.002, 1.0),
        (torch.optim.Adagrad, 0.05, 0.1),
        (torch.optim.RMSprop, 0.004, 0.3),
    ],
)
def test_second_moments_of_other_names(build, lr, weight_decay):
    decayed, plain, truth = both(build, 400, 3.0, lr, weight_decay)
    found = diagnose(decayed, plain)["effective l"]
    assert truth > 1.5
    assert found.effect.value == pytest.approx(truth, rel=0.03)
    if build is AdaBelief:  # the others' decay is L2, rescaled: one run does not tell
        assert diagnose(decayed)["effective l"].effect.value == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_schedule_free_weights_lose_half_of_what_decay_takes(beta2):
    decayed, plain, truth = both(partial(schedule_free, betas=(0.9, beta2)), 600, 3.0, 0.002, 0.5)
    assert truth > 1.25
    for verdict in (diagnose(decayed, plain), diagnose(decayed)):
        assert verdict["effective l"].effect.value == pytest.approx(truth, rel=0.03)
    with pytest.raises(DecaylabError, match="schedule-free"):
        equivalent_schedule(decayed)


def test_adamax_remembers_a_maximum_which_is_soon_another():
    decayed, plain, truth = both(torch.optim.Adamax, 800, 3.0, 0.004, 0.3)
    found = diagnose(decayed, plain)["effective l"]
    assert truth > 1.5
    assert found.effect.value == pytest.approx(truth, rel=0.08)


@pytest.mark.parametrize("clip", [1e-3, 8.0])
def test_adam_remembers_no_norm_by_clipped_gradients(clip):
    """At 1e-3 each gradient is clipped, at 8 those of the later, smaller weights with decay."""
    decayed, plain, truth = both(torch.optim.AdamW, 800, 3.0, 0.002, 1.0, clip)
    for given in ((decayed, plain), (decayed,)):
        found = diagnose(*given)
        assert found["effective l"].effect.value == pytest.approx(truth, rel=0.05)
        assert "second_moment" not in found["effective l"].effect.probes
        assert reasons(found.troubles) == {Reason.UNSTEPPED_PARAMETERS}  # the gains
    (row,) = suggest(decayed).layers
    assert row.equilibrium == pytest.approx(math.sqrt(0.002 * SIZE / 2), rel=0.1)


@pytest.mark.parametrize("eps", [1e-3, 1.0])
def test_an_eps_that_is_much_leaves_adam_no_law(eps):
    """The root of the second moment is about 0.4."""

    def build(groups, **settings):
        return torch.optim.AdamW(groups, eps=eps, **settings)

    decayed, plain, truth = both(build, 600, 3.0, 0.002 * (1 + eps / 0.4), 1.0)
    found = diagnose(decayed, plain)
    if eps < 0.1:
        assert found["effective l"].effect.value == pytest.approx(truth, rel=0.03)
        assert reasons(found.troubles) == {Reason.UNSTEPPED_PARAMETERS}  # the gains
    else:
        assert found["effective l"].effect.probes == ("rotation",)  # as recorded: no law is needed
        assert found["effective l"].effect.value == pytest.approx(truth, rel=0.05)
        assert diagnose(decayed)["effective l"].verdict == "cannot tell"
        eps_of_both = [x for x in found.troubles if x.reason is Reason.EPS_COUNTS]
        assert [x["layers"] for x in eps_of_both] == [["0"], ["0"]]


def test_clipped_gradients_leave_kfac_no_law():
    """Its undamped step goes with |W|, and by |W|^2 where each gradient has the same length."""
    kfac = {"power": 0, "damping": 1e-3, "share": 0.5, "growth": 1e-3}
    runs = [records({"a": ScriptedLayer(weight_decay=decay, **kfac)}) for decay in (0.01, 0.0)]
    steps = {row.step for row in runs[0].rows}
    same = [Row(step, 0, 0.0, "gradient_norm", 1.0) for step in steps]
    clipped = [Rows((*run.rows, *same)) for run in runs]
    assert diagnose(*runs)["effective l"].verdict == "does not act"
    found = diagnose(*clipped)
    assert found["effective l"].verdict == "cannot tell"
    assert Reason.CLIPPED in reasons(found["effective l"])
    assert found["effective d"] == diagnose(*runs)["effective d"]  # two runs' norms tell it
    assert diagnose(runs[0])["effective d"].effect is not None
    assert diagnose(clipped[0])["effective d"].effect is None
    assert suggest(clipped[0]).weight_decay is None


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("build", [amsgrad, ThreeBetas])
def test_what_is_not_known_of_a_memory_is_not_said(build, clip):
    """Of which clipping is not the reason."""
    decayed, plain, _ = both(build, 100, 0.5, 0.005, 1.0, clip)
    for given in ((decayed, plain), (decayed,)):
        found = diagnose(*given)["effective l"]
        if len(given) == 1:
            assert (found.verdict, found.effect) == ("cannot tell", None)
            assert Reason.LAW_UNKNOWN in reasons(found)
        else:  # two runs show it by how far they turned
            assert found.effect.probes == ("rotation",)


@pytest.mark.parametrize(("steps", "start"), [(300, 3.0), (300, 0.04)])
def test_adafactor_follows_the_norm_above_its_floor_alone(steps, start):
    """Its steps are lr times the root mean square of W, or of 1e-3 if that is more."""
    decayed, plain, truth = both(torch.optim.Adafactor, steps, start, 0.005, 1.0)
    found = diagnose(decayed, plain)["effective l"]
    assert (truth > 1.25) is (start < 1)
    assert found.verdict == ("acts" if start < 1 else "does not act")
    if start < 1:  # as recorded; one run does not show it
        assert found.effect.value == pytest.approx(truth, rel=0.05)
        assert diagnose(decayed)["effective l"].verdict == "cannot tell"
