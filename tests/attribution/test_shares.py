import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from decaylab.attribution.arms import OTHERS, SIZE_FREE_ROTATION, WITH, WITHOUT, ArmResult, Plan
from decaylab.attribution.reasons import Doubt, Fault
from decaylab.attribution.shares import decompose, estimate, fraction

TWO, THREE = ("size", "rotation"), ("size", "rotation", "damping")


def results(plan, value, seeds=(0, 1, 2)):
    """Arms whose metric is value(paths as with decay, arm, seed)."""
    everything = frozenset(plan.paths)
    return [
        ArmResult(
            arm.name, seed, {"y": value(everything if arm == WITH else arm.as_with, arm, seed)}
        )
        for seed in seeds
        for arm in plan.arms()
    ]


def test_the_arms_of_a_plan():
    assert [arm.name for arm in Plan(TWO).arms()] == [
        *("with decay", "without decay", "size", "rotation"),
    ]
    assert len(Plan(THREE).arms()) == 8
    assert len(Plan(TWO, others=True).arms()) == 5
    assert len(Plan(TWO, direction=True).arms()) == 5
    assert Plan(TWO, others=True).crossed([]) is OTHERS
    assert len(Plan(TWO, extra=(SIZE_FREE_ROTATION,)).arms()) == 5


def test_effects_that_add_up_have_no_interaction():
    weights = {"size": 1.0, "rotation": 3.0, "damping": -0.5}
    plan = Plan(THREE)
    shares = decompose("y", plan, results(plan, lambda on, *_: sum(weights[p] for p in on)))
    assert shares.total.value == 3.5
    for path, weight in weights.items():
        assert shares.effects[path].value == pytest.approx(weight)
        assert shares.alone[path].value == pytest.approx(weight)
        assert shares.shares[path].value == pytest.approx(weight / 3.5)
        assert shares.factorial[path].value == pytest.approx(weight)
    assert shares.effects["interaction"].value == pytest.approx(0)
    assert all(abs(shares.factorial[n].value) < 1e-12 for n in shares.factorial if " x " in n)


def test_what_only_comes_together_is_shared_in_halves():
    plan = Plan(TWO)
    shares = decompose("y", plan, results(plan, lambda on, *_: float(len(on) == 2)))
    assert shares.effects["interaction"].value == shares.factorial["size x rotation"].value == 1
    assert shares.shares["size"].value == shares.shares["rotation"].value == 0.5
    assert shares.alone["size"].value == 0


@pytest.mark.parametrize("paths", [TWO, THREE])
def test_against_orders_counted_one_by_one_and_a_regression(paths):
    rng = np.random.default_rng(0)
    subsets = [frozenset(c) for k in range(4) for c in itertools.combinations(paths, k)]
    table = {subset: rng.normal() for subset in subsets}
    plan = Plan(paths)
    shares = decompose("y", plan, results(plan, lambda on, *_: table[on], seeds=(0,)))
    orders = list(itertools.permutations(paths))
    for path in paths:
        gains = [
            table[frozenset(o[: o.index(path) + 1])] - table[frozenset(o[: o.index(path)])]
            for o in orders
        ]
        assert shares.effects[path].value == pytest.approx(np.mean(gains))
    assert sum(shares.effects[p].value for p in paths) == pytest.approx(shares.total.value)
    # factorial effects: regression on coded factors -1, +1 has half of the |Q|-fold mean difference
    design = np.array(
        [[math.prod(1 if p in s else -1 for p in q) for q in subsets] for s in subsets]
    )
    coefficients = np.linalg.solve(design, [table[s] for s in subsets])
    for q, coefficient in zip(subsets[1:], coefficients[1:], strict=True):
        name = " x ".join(p for p in paths if p in q)
        assert shares.factorial[name].value == pytest.approx(coefficient * 2 ** len(q))


def test_the_others_and_the_direction_complete_the_total():
    plan = Plan(TWO, others=True, direction=True)
    special = {WITH.name: 10.0, WITHOUT.name: 1.0, OTHERS.name: 2.0, "size + rotation": 7.0}

    def value(on, arm, seed):
        return special.get(arm.name, 3.0)

    shares = decompose("y", plan, results(plan, value))
    assert shares.effects["others"].value == 1
    assert shares.effects["direction"].value == 3
    parts = [shares.shares[name].value for name in (*TWO, "others", "direction")]
    assert sum(parts) == pytest.approx(1)


def test_intervals_are_scipys():
    values = [1.2, 0.7, 1.9, 1.1]
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = estimate(values)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_fractions_have_the_bounds_at_which_a_t_test_rejects():
    parts, totals = np.array([0.9, 1.4, 1.0]), np.array([1.5, 1.9, 1.4])
    found = fraction(parts, totals)
    for bound in (found.low, found.high):
        assert stats.ttest_1samp(parts - bound * totals, 0).pvalue == pytest.approx(0.05, abs=1e-6)
    assert found.low < found.value < found.high
    assert stats.ttest_1samp(parts - found.value * totals, 0).pvalue == pytest.approx(1)


def test_fractions_of_nothing_have_no_bounds():
    found = fraction([0.1, -0.2, 0.3], [0.2, -0.1, 0.1])
    assert (found.low, found.high) == (-math.inf, math.inf)
    plan = Plan(TWO)
    noise = iter(np.random.default_rng(1).normal(size=100))
    assert decompose("y", plan, results(plan, lambda *_: next(noise))).doubt is Doubt.TOTAL_UNCLEAR


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(0)
    totals = rng.normal(2.0, 0.3, size=(4000, 3))
    parts = 0.7 * totals + rng.normal(0, 0.2, size=(4000, 3))
    held = np.mean([0.7 in fraction(p, t) for p, t in zip(parts, totals, strict=True)])
    assert abs(held - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_one_seed_has_no_interval():
    plan = Plan(TWO)
    shares = decompose("y", plan, results(plan, lambda on, *_: float(len(on)), seeds=(0,)))
    assert shares.doubt is Doubt.ONE_SEED
    assert math.isnan(shares.shares["size"].low)


def test_arms_that_missed_or_diverged_are_not_used():
    plan = Plan(TWO)
    good = results(plan, lambda on, *_: float(len(on)))
    missed = ArmResult("size", 1, {"y": 99.0}, {"size": {"a": 0.001, "b": 0.03}})
    kept = [r for r in good if (r.arm, r.seed) != ("size", 1)]
    shares = decompose("y", plan, [*kept, missed])
    assert shares.total.seeds == 3
    assert shares.shares["size"].seeds == 2
    assert shares.shares["size"].value == 0.5
    assert missed.unused_for("y").fault is Fault.MISSED
    assert (missed.unused_for("y").layer, missed.unused_for("y").error) == ("b", 0.03)
    lost = [ArmResult("rotation", r.seed, {"y": math.nan}, finite=False) for r in good[:1]]
    rest = [r for r in good if r.arm != "rotation"]
    shares = decompose("y", plan, [*rest, *lost])
    assert shares.doubt is Doubt.NO_SEED
    assert shares.total.value == 2.0
    assert lost[0].unused_for("y").fault is Fault.DIVERGED
    assert ArmResult("size", 0, {"y": 1.0}, {"size": {"a": math.nan}}).unused_for("y") is not None


@pytest.mark.parametrize("paths", [TWO, THREE], ids=len)
def test_intervals_hold_the_truth_as_often_as_they_say(paths):
    """Known effects, noise by seed and by arm, three seeds, 400 experiments each."""
    plan, random = Plan(paths), np.random.default_rng(0)
    effects = dict(zip(paths, (1.0, 0.5, -0.3), strict=False))
    together, experiments = 0.3, 400
    total = sum(effects.values()) + together
    held = Counter()
    for _ in range(experiments):
        shifts = random.normal(0, 1, 3)
        made = results(
            plan,
            lambda on, _, seed: (
                shifts[seed]  # noqa: B023 - used in here alone
                + sum(effects[path] for path in on)
                + together * (len(on) == len(paths))
                + random.normal(0, 0.2)
            ),
        )
        shares = decompose("y", plan, made)
        held["total"] += total in shares.total
        for path, effect in effects.items():
            truth = effect + together / len(paths)
            held[f"effect of {path}"] += truth in shares.effects[path]
            held[f"share of {path}"] += truth / total in shares.shares[path]
            held[f"{path} alone"] += effect / total in shares.alone_shares[path]
    deviation = (0.95 * 0.05 / experiments) ** 0.5
    assert len(held) == 1 + 3 * len(paths)
    assert all(abs(count / experiments - 0.95) < 4 * deviation for count in held.values()), held


def test_a_total_without_spread_is_doubted():
    """Two seeds of a coarse metric agree to the last digit by chance."""
    plan = Plan(TWO)
    values = results(plan, lambda on, _, seed: seed + len(on) + 0.1 * seed * (on == {"size"}))
    shares = decompose("y", plan, values)
    assert shares.total.low == pytest.approx(shares.total.high)
    assert shares.doubt is Doubt.NO_SPREAD
