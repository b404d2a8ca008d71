"""Adam's memory of past norms, and the effective learning rate that results.

Let W be scale-invariant, u = W/|W|, and h = grad L(u), so that the gradient is g = h / |W|. Adam's
step is lr m / sqrt(v), m a mean of g with the weights beta1^k, v one of g^2 with beta2^k. Beside
what Adam would do with the gradients h, it turns u by

    lr N_v / (|W| N_m),    N_v^2 = mean(h^2) / mean(g^2) over beta2^k,   1/N_m = mean(1/|W|) over
    beta1^k

That is Adam's counterpart of Eq. 9. N_v is the norm that v remembers. Where |W| stands still for
1/(1 - beta2) steps, N_v = N_m = |W| and lr/|W| is left. Over shorter times N_v does not move, and
the law is SGD's, lr/|W|^2: at beta2 = 0.999 that is the first thousand steps of any run, and every
time that norms move by e in less. h and g are taken as one number a layer (their squares summed).
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

from decaylab.optim.laws.dynamics import Series


def effective_adam(norms: Series, betas: tuple[float, float], moments: Series = ()) -> Series:
    """N_v / (|W| N_m) at the records: times lr, Adam's effective learning rate.

    `moments`: |v| at the same steps (the probe `second_moment`); without, |h| is taken to be
    constant, as where `training` has recorded the norms only.
    """
    remembered = remembered_norms(norms, betas[1], moments)
    means = _running_means(tuple((step, 1 / norm) for step, norm in norms), betas[0])
    return tuple(
        (step, remembered_norm * mean / norm)
        for (step, norm), (_, remembered_norm), (_, mean) in zip(
            norms, remembered, means, strict=True
        )
    )


def remembered_norms(norms: Series, beta2: float, moments: Series = ()) -> Series:
    """N_v at the records, from |W| and |v| there. Norms move geometrically between two records."""
    moment_at = by_step(norms, moments)
    step, norm = norms[0]
    v = moment_at.get(step, (1 - beta2**step) / norm**2)
    squares = v * norm**2  # (1 - beta2) sum beta2^k h^2
    remembered = [(step, norm)]
    for (before, a), (after, b) in pairwise(norms):
        retention = beta2 ** (after - before)
        between = mean_between(a**2, b**2, after - before, beta2)
        next_v = moment_at[after] if moment_at else retention * v + (1 - retention) / between
        squares = retention * squares + max(next_v - retention * v, 0.0) * between
        v = next_v
        remembered.append((after, math.sqrt(squares / v) if v > 0 else b))
    return tuple(remembered)


def moments_at(norms: Series, others: Series, beta2: float, moments: Series) -> Series:
    """|v| had the norms been `others` under the same h: g^2 goes with 1/|W|^2."""
    moment_at = by_step(norms, moments)
    if not moment_at:
        return ()
    v = moment_at[norms[0][0]] * (norms[0][1] / others[0][1]) ** 2
    estimated = [(norms[0][0], v)]
    for i in range(1, len(norms)):
        (before, a), (after, b) = norms[i - 1 : i + 1]
        retention = beta2 ** (after - before)
        mine = mean_between(a**2, b**2, after - before, beta2)
        other = mean_between(others[i - 1][1] ** 2, others[i][1] ** 2, after - before, beta2)
        v = (
            retention * v
            + max(moment_at[after] - retention * moment_at[before], 0.0) * mine / other
        )
        estimated.append((after, v))
    return tuple(estimated)


def by_step(norms: Series, moments: Series) -> dict[int, float]:
    """|v| by step: 0 before the first one; nothing where a record has none."""
    known = {0: 0.0, **dict(moments)}
    return known if all(step in known for step, _ in norms) and moments else {}


def gradient_squares(moments: Series, beta2: float) -> Callable[[int], float]:
    """By step, the mean of |g|^2 between the records around it, from |v| there; else 1.

    >>> size = gradient_squares(((1, 0.5), (3, 0.875)), beta2=0.5)  # g^2 = 1, 1, 1
    >>> [size(1), size(2), size(3)]
    [1.0, 1.0, 1.0]
    """
    if not moments:
        return lambda step: 1.0
    steps, sizes, v, before = [], [], 0.0, 0
    for step, moment in moments:
        retention = beta2 ** (step - before)
        sizes.append(max(moment - retention * v, 1e-3 * moment, 1e-300) / (1 - retention))
        steps.append(step)
        v, before = moment, step
    return lambda step: sizes[min(bisect_left(steps, step), len(sizes) - 1)]


def interpolated(series: Series, step: int) -> float:
    """The value at a step, geometrically between two records; the first and last one outside.

    >>> [interpolated(((2, 1.0), (4, 4.0)), step) for step in (0, 2, 3, 4, 9)]
    [1.0, 1.0, 2.0, 4.0, 4.0]
    """
    after = bisect_left(series, (step, -math.inf))
    if after in (0, len(series)):
        return series[min(after, len(series) - 1)][1]
    (first, a), (last, b) = series[after - 1 : after + 1]
    return float(a * (b / a) ** ((step - first) / (last - first)))


def mean_between(first: float, last: float, steps: int, beta: float) -> float:
    """The mean, with the weights beta^k, of what goes geometrically from `first` to `last`.

    >>> round(mean_between(1.0, 8.0, 3, 1e-9), 6)  # 1, 2, 4, the latest of which counts
    4.0
    """
    growth = (last / first) ** (1 / steps)
    if abs(growth - beta) < 1e-9:
        return first * steps * growth ** (steps - 1) * (1 - beta) / (1 - beta**steps)
    total = (growth**steps - beta**steps) / (growth - beta)
    return first * total * (1 - beta) / (1 - beta**steps)


def _running_means(values: Series, beta: float) -> Series:
    step, value = values[0]
    weight = max(1 - beta**step, 1e-300)
    total = weight * value
    means = [values[0]]
    for (before, a), (after, b) in pairwise(values):
        retention = beta ** (after - before)
        total = retention * total + (1 - retention) * mean_between(a, b, after - before, beta)
        weight = retention * weight + 1 - retention
        means.append((after, total / weight))
    return tuple(means)
