"""Adam's memory of norms that are gone, and the effective learning rate that it makes.

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
        (step, kept * mean / norm)
        for (step, norm), (_, kept), (_, mean) in zip(norms, remembered, means, strict=True)
    )


def remembered_norms(norms: Series, beta2: float, moments: Series = ()) -> Series:
    """N_v at the records, from |W| and |v| there. Norms move geometrically between two records."""
    known = by_step(norms, moments)
    step, norm = norms[0]
    v = known.get(step, (1 - beta2**step) / norm**2)
    squares = v * norm**2  # (1 - beta2) sum beta2^k h^2
    found = [(step, norm)]
    for (before, a), (after, b) in pairwise(norms):
        kept = beta2 ** (after - before)
        between = mean_between(a**2, b**2, after - before, beta2)
        now = known[after] if known else kept * v + (1 - kept) / between
        squares = kept * squares + max(now - kept * v, 0.0) * between
        v = now
        found.append((after, math.sqrt(squares / v) if v > 0 else b))
    return tuple(found)


def moments_at(norms: Series, others: Series, beta2: float, moments: Series) -> Series:
    """|v| had the norms been `others` under the same h: g^2 goes with 1/|W|^2."""
    known = by_step(norms, moments)
    if not known:
        return ()
    v = known[norms[0][0]] * (norms[0][1] / others[0][1]) ** 2
    found = [(norms[0][0], v)]
    for i in range(1, len(norms)):
        (before, a), (after, b) = norms[i - 1 : i + 1]
        kept = beta2 ** (after - before)
        mine = mean_between(a**2, b**2, after - before, beta2)
        other = mean_between(others[i - 1][1] ** 2, others[i][1] ** 2, after - before, beta2)
        v = kept * v + max(known[after] - kept * known[before], 0.0) * mine / other
        found.append((after, v))
    return tuple(found)


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
    for step, now in moments:
        kept = beta2 ** (step - before)
        sizes.append(max(now - kept * v, 1e-3 * now, 1e-300) / (1 - kept))
        steps.append(step)
        v, before = now, step
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
    found = [values[0]]
    for (before, a), (after, b) in pairwise(values):
        kept = beta ** (after - before)
        total = kept * total + (1 - kept) * mean_between(a, b, after - before, beta)
        weight = kept * weight + 1 - kept
        found.append((after, total / weight))
    return tuple(found)
