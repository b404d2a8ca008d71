r"""How much of decay's effect each path carries, with intervals over seeds.

Let y(P) be a metric of the arm in which the paths P are as with decay and the others as without.
Of the effect y(all) - y(none), per seed:

    alone(p)    = y({p}) - y({})                                what p alone recovers
    shapley(p)  = mean over the orders of the paths of what p adds when it is switched on
    interaction = y(all) - y({}) - sum_p alone(p)               what only appears together

For two paths shapley(p) is the main effect of p in the 2 x 2 design, (alone(p) + y(all) -
y(all but p)) / 2. Shapley shares add up to the effect of the paths; with the shares of the others
(parameters that decay and are not held) and of the direction (`decaylab.attribution.arms`), where
there are such, to the total effect of decay.

Intervals are 95 %, from Student's t on the differences of paired seeds. Fractions of the total have
Fieller's: the numbers r for which a t test cannot tell effect - r total from zero.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from decaylab.attribution.arms import WITH, WITHOUT, ArmResult, Path, Plan
from decaylab.attribution.reasons import Doubt

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its interval; nan bounds if there is only one seed."""

    value: float
    low: float
    high: float
    seeds: int

    def __contains__(self, number: float) -> bool:
        """Whether the interval holds a number.

        >>> 1.0 in Estimate(0.9, 0.8, 1.1, 3)
        True
        """
        return self.low <= number <= self.high


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one number per seed and its t interval.

    >>> estimate([1.0, 1.0, 1.0])
    Estimate(value=1.0, low=1.0, high=1.0, seeds=3)
    """
    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    if count < 2:
        return Estimate(mean, math.nan, math.nan, count)
    half = _quantile(count) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def fraction(parts: Sequence[float], totals: Sequence[float]) -> Estimate:
    """Mean part / mean total with Fieller's interval; unbounded where the total may be zero."""
    count = len(parts)
    part, total = (float(np.mean(v)) if count else math.nan for v in (parts, totals))
    if not count or total == 0:
        return Estimate(math.nan, -math.inf, math.inf, count)
    ratio = part / total
    if count < 2:
        return Estimate(ratio, math.nan, math.nan, count)
    (pp, pt), (_, tt) = np.cov(parts, totals) / count
    t = _quantile(count)
    leading = total**2 - t**2 * tt
    if leading <= 0:
        return Estimate(ratio, -math.inf, math.inf, count)
    middle = part * total - t**2 * pt
    last = part**2 - t**2 * pp
    half = math.sqrt(max(middle**2 - leading * last, 0.0))
    return Estimate(ratio, (middle - half) / leading, (middle + half) / leading, count)


def _quantile(count: int) -> float:
    from scipy import stats  # slow to import

    return float(stats.t.ppf((1 + LEVEL) / 2, count - 1))


@dataclass(frozen=True)
class Shares:
    """The decomposition of one metric.

    Attributes:
        metric: its name.
        total: with decay minus without, in the metric's unit.
        effects: by name of a share, in the metric's unit: each path's Shapley effect,
            "interaction" and, if they exist, "others" and "direction".
        alone: path -> what it alone recovers, in the metric's unit.
        shares, alone_shares: the same as fractions of the total.
        factorial: names of paths joined by " x " -> the factorial effect: the difference their
            joint change makes, averaged over the settings of the other paths.
        extra: arms outside the design -> what they recover, as a fraction of the total;
            counted from the run without decay where nothing decays in the arm either.
        doubt: why shares have no value or no interval; None if they have.
        in_points: whether the metric is a fraction given in percentage points (an accuracy).
    """

    metric: str
    total: Estimate
    effects: Mapping[str, Estimate] = field(default_factory=dict)
    alone: Mapping[str, Estimate] = field(default_factory=dict)
    shares: Mapping[str, Estimate] = field(default_factory=dict)
    alone_shares: Mapping[str, Estimate] = field(default_factory=dict)
    factorial: Mapping[str, Estimate] = field(default_factory=dict)
    extra: Mapping[str, Estimate] = field(default_factory=dict)
    doubt: Doubt | None = None
    in_points: bool = False


def in_points(metric: str, values: Sequence[float]) -> bool:
    """Whether a metric is an accuracy between 0 and 1, by its name and values.

    >>> in_points("val_acc", [0.91, 0.93]), in_points("val_acc", [91.0, 93.0])
    (True, False)
    """
    named = re.search(r"(?<![a-z])acc(uracy)?(?![a-z])", metric.lower()) is not None
    return named and all(0 <= value <= 1 for value in values if math.isfinite(value))


def seeds_to_tell(total: Estimate) -> int | None:
    """How many seeds would tell a total from zero, at this value and spread; None if very many.

    >>> seeds_to_tell(Estimate(1.0, -0.5, 2.5, 3))
    4
    """
    if total.seeds < 2 or not total.value:
        return None
    deviation = (total.high - total.low) / 2 / _quantile(total.seeds) * math.sqrt(total.seeds)
    for count in range(total.seeds + 1, 100):
        if _quantile(count) * deviation / math.sqrt(count) < abs(total.value):
            return count
    return None


def decompose(metric: str, plan: Plan, results: Sequence[ArmResult]) -> Shares:
    """The shares of one metric from the arms that can be used."""
    values: dict[int, dict[str, float]] = {}
    for result in results:
        if result.unused_for(metric) is None:
            values.setdefault(result.seed, {})[result.arm] = result.metrics[metric]
    ends = [by_arm for by_arm in values.values() if WITH.name in by_arm and WITHOUT.name in by_arm]
    total = estimate([by_arm[WITH.name] - by_arm[WITHOUT.name] for by_arm in ends])
    points = in_points(metric, [value for by_arm in values.values() for value in by_arm.values()])
    design = [arm.name for arm in plan.arms() if arm not in plan.extra]
    complete = [by_arm for by_arm in ends if all(name in by_arm for name in design)]
    if not complete:
        return Shares(metric, total, doubt=Doubt.NO_SEED, in_points=points)
    totals = [by_arm[WITH.name] - by_arm[WITHOUT.name] for by_arm in complete]
    effects, alone = _effects(plan, complete)
    shares = {name: fraction(parts, totals) for name, parts in effects.items()}
    doubt = None
    if len(complete) == 1:
        doubt = Doubt.ONE_SEED
    elif 0.0 in estimate(totals):
        doubt = Doubt.TOTAL_UNCLEAR
    elif math.isclose(min(totals), max(totals), rel_tol=1e-9):
        doubt = Doubt.NO_SPREAD
    return Shares(
        metric=metric,
        total=total,
        effects={name: estimate(parts) for name, parts in effects.items()},
        alone={name: estimate(parts) for name, parts in alone.items()},
        shares=shares,
        alone_shares={name: fraction(parts, totals) for name, parts in alone.items()},
        factorial=_factorial(plan, complete),
        extra=_extra(plan, ends),
        doubt=doubt,
        in_points=points,
    )


Values = Mapping[str, float]
"""Arm -> a metric, of one seed."""


def _effects(
    plan: Plan, seeds: Sequence[Values]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Shapley and other effects by name, and those of each path alone: a number per seed."""
    effects: dict[str, list[float]] = {}
    alone: dict[str, list[float]] = {}
    for by_arm in seeds:
        none = by_arm[plan.base.name]
        for path in plan.paths:
            alone.setdefault(path, []).append(by_arm[plan.crossed([path]).name] - none)
            effects.setdefault(path, []).append(_shapley(plan, by_arm, path))
        if plan.others:
            effects.setdefault("others", []).append(none - by_arm[WITHOUT.name])
        if plan.direction:
            effects.setdefault("direction", []).append(
                by_arm[WITH.name] - by_arm[plan.all_paths.name]
            )
        together = by_arm[plan.all_paths.name] - none
        singles = sum(alone[path][-1] for path in plan.paths)
        effects.setdefault("interaction", []).append(together - singles)
    return effects, alone


def _shapley(plan: Plan, by_arm: Values, path: Path) -> float:
    """Mean over the orders of the paths of what `path` adds when its turn comes."""
    rest = [other for other in plan.paths if other != path]
    total = 0.0
    for count in range(len(rest) + 1):
        weight = 1 / (len(plan.paths) * math.comb(len(rest), count))
        for chosen in combinations(rest, count):
            after, before = plan.crossed([*chosen, path]), plan.crossed(chosen)
            total += weight * (by_arm[after.name] - by_arm[before.name])
    return total


def _factorial(plan: Plan, seeds: Sequence[Values]) -> dict[str, Estimate]:
    """Main effects and interactions of the 2^k design, in the convention of mean differences.

    For paths Q: the mean over the settings of the other paths of the |Q|-fold difference.
    """
    estimates = {}
    for count in range(1, len(plan.paths) + 1):
        for chosen in combinations(plan.paths, count):
            per_seed = [_contrast(plan, by_arm, chosen) for by_arm in seeds]
            estimates[" x ".join(chosen)] = estimate(per_seed)
    return estimates


def _contrast(plan: Plan, by_arm: Values, chosen: Sequence[Path]) -> float:
    total = 0.0
    for count in range(len(plan.paths) + 1):
        for as_with in combinations(plan.paths, count):
            off = sum(path not in as_with for path in chosen)
            total += (-1) ** off * by_arm[plan.crossed(as_with).name]
    return total / 2 ** (len(plan.paths) - len(chosen))


def _extra(plan: Plan, ends: Sequence[Values]) -> dict[str, Estimate]:
    fractions = {}
    for arm in plan.extra:
        base = WITHOUT.name if arm.decayed == "none" else plan.base.name
        seeds = [by_arm for by_arm in ends if arm.name in by_arm and base in by_arm]
        parts = [by_arm[arm.name] - by_arm[base] for by_arm in seeds]
        fractions[arm.name] = fraction(
            parts, [by_arm[WITH.name] - by_arm[WITHOUT.name] for by_arm in seeds]
        )
    return fractions
