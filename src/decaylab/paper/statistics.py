"""Is an effect on test accuracy more than noise? Seeds, test images, and many comparisons.

Three sources of error, each with its own answer:

- **Seeds.** One seed's standard deviation is pooled over all cells that were run with several, by
  data set and optimizer (`Pool`), and used for every cell, those with one seed included. An effect
  is tested by Student's t on the pooled degrees of freedom (Welch and Satterthwaite where pools
  differ).
- **Test images.** Where the runs recorded which images they hit, the same effect is tested on these
  images: McNemar's exact test for one pair of runs, a t test over the images otherwise. An effect
  counts if it stands both tests, so the larger p-value is taken. Runs without that record go by
  their seeds alone.
- **Many comparisons.** That one of 32 effects is a loss is no surprise if all are small: a loss
  counts if it survives Holm's correction over the comparisons of its claim.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
LEAST_DEGREES = 3  # a spread of fewer degrees of freedom is not used by itself

Hits = Sequence[tuple[float, Sequence[NDArray[np.bool_]]]]
"""Terms of an effect: a factor, and the hits [images] of each run it multiplies the mean of."""


@dataclass(frozen=True)
class Pool:
    """One seed's standard deviation, in points, and on how many degrees of freedom it stands."""

    name: str
    deviation: float
    degrees: float = math.inf

    @classmethod
    def over(cls, name: str, cells: Iterable[Sequence[float]]) -> "Pool":
        """The spread within cells of several seeds, in points each, pooled.

        >>> Pool.over("adam", [[88.0, 88.4, 88.8], [90.0, 90.2]]).degrees
        3
        """
        replicated = [np.asarray(values) for values in cells if len(values) > 1]
        squares = sum(float(np.square(values - values.mean()).sum()) for values in replicated)
        degrees = sum(len(values) - 1 for values in replicated)
        return cls(name, math.sqrt(squares / degrees) if degrees else math.nan, degrees)


@dataclass(frozen=True)
class Noise:
    """The variance of an effect, by the pool it was estimated from."""

    variances: Mapping[Pool, float]

    @property
    def error(self) -> float:
        """One standard error."""
        return math.sqrt(sum(self.variances.values()))

    @property
    def degrees(self) -> float:
        """Degrees of freedom, by Welch and Satterthwaite."""
        parts = sum(variance**2 / pool.degrees for pool, variance in self.variances.items())
        return sum(self.variances.values()) ** 2 / parts if parts > 0 else math.inf

    def p_value(self, effect: float) -> float:
        """Of a true effect of zero, two-sided."""
        if effect == 0 or math.isnan(effect):
            return 1.0
        if self.error == 0:
            return 0.0
        from scipy import stats  # slow to import

        size = abs(effect) / self.error
        known = math.isinf(self.degrees)
        return float(2 * (stats.norm.sf(size) if known else stats.t.sf(size, self.degrees)))

    @classmethod
    def of_terms(cls, terms: Iterable[tuple[float, Pool, int]]) -> "Noise":
        """Of a sum of factor * mean over n runs, each run with its pool's deviation."""
        variances: dict[Pool, float] = {}
        for factor, pool, runs in terms:
            added = factor**2 * pool.deviation**2 / runs
            variances[pool] = variances.get(pool, 0.0) + added
        return cls(variances)

    @classmethod
    def of_mean(cls, noises: Sequence["Noise"]) -> "Noise":
        """Of the mean of independent effects."""
        variances: dict[Pool, float] = {}
        for noise in noises:
            for pool, variance in noise.variances.items():
                variances[pool] = variances.get(pool, 0.0) + variance / len(noises) ** 2
        return cls(variances)


def image_p_value(terms: Hits, expected: float = 0.0) -> float:
    """Of the effect sum(factor * mean hits) being `expected`, over the test images; two-sided.

    McNemar's exact test where one run is compared with another; else a t test over the images.
    """
    from scipy import stats

    means = [(factor, np.mean(np.stack(runs), axis=0)) for factor, runs in terms]
    by_image = sum(factor * mean for factor, mean in means)
    assert isinstance(by_image, np.ndarray)
    pair = sorted(factor for factor, _ in means) == [-1, 1] and all(len(r) == 1 for _, r in terms)
    if pair and expected == 0:
        gained, lost = int((by_image > 0).sum()), int((by_image < 0).sum())
        return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    if np.ptp(by_image) == 0:
        return float(by_image[0] == expected)
    return float(stats.ttest_1samp(by_image, expected).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: reject where it is at most `ALPHA`.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Correlation:
    """A rank correlation (Spearman), with what is left of it within groups.

    Attributes:
        rank: over all points.
        low, high: its 95 % interval (Fisher's z).
        p: of no correlation.
        within: of the ranks less their group's mean; nan where groups have a point each.
        share_within: the part of the ranks' covariance that lies within groups.
        count: points.
    """

    rank: float
    low: float
    high: float
    p: float
    within: float
    share_within: float
    count: int


def correlation(xs: Sequence[float], ys: Sequence[float], groups: Sequence[object]) -> Correlation:
    """Spearman's correlation of two quantities, and how much of it is within groups."""
    from scipy import stats

    ranks = np.stack([stats.rankdata(xs), stats.rankdata(ys)])
    result = stats.pearsonr(*ranks)
    interval = result.confidence_interval(0.95)
    left = ranks.copy()
    for group in set(groups):
        members = np.array([label == group for label in groups])
        left[:, members] -= ranks[:, members].mean(axis=1, keepdims=True)
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    whole, inside = float(centred[0] @ centred[1]), float(left[0] @ left[1])
    constant = np.ptp(left, axis=1).min() < 1e-12
    return Correlation(
        rank=float(result.statistic),
        low=float(interval.low),
        high=float(interval.high),
        p=float(result.pvalue),
        within=math.nan if constant else float(stats.pearsonr(*left).statistic),
        share_within=inside / whole if whole else math.nan,
        count=len(xs),
    )
