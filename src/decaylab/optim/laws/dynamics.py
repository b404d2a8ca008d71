"""How the norm of a scale-invariant layer moves under pushes and decay, in plain numbers.

The gradient of such a layer is orthogonal to its weight (Eq. 8), so that a step lengthens it and
only decay shortens it. With N = |W|^2, s the part of W that decay takes a step (`Law.shrink`)
and G the growth of N by the gradients' pushes, per step in the long run,

    N' = N - 2 s N + G + O(s^2),     G = c N^e

where the elasticity e (`Law.elasticity`) says how a push depends on the norm.
"""

import math
from collections.abc import Sequence

Series = tuple[tuple[int, float], ...]
"""(step, value), by step."""

FLAT = 1e-6  # of 1 - e: below it, pushes count as proportional to N
FARTHEST = 600.0  # of |log N|, for e near 1: floats end at 700


def pushes(before: float, after: float, exposure: float, e: float) -> float:
    """The c of G = c N^e, summed over the steps between two records of N = |W|^2.

    With c and s constant in between, N^(1-e) follows a line: d N^(1-e) = (1 - e) (c - 2 s N^(1-e))
    dt. With x the decay exposure, the sum of s, and k = exp(-2 (1 - e) x), the sum of c is

        (N1^(1-e) - N0^(1-e) k) 2 x / (1 - k)     (at e = 1: log(N1 / N0) + 2 x)

    Never below zero.

    >>> round(pushes(1.0, 3.0, 0.0, e=-1.0), 12)  # SGD without decay: dN = c / N
    4.0
    """
    p = 1 - e
    if p < FLAT:
        return max(math.log(after / before) + 2 * exposure, 0.0)
    lost = -math.expm1(-2 * p * exposure)
    weight = 1 / p if lost < 1e-9 else 2 * exposure / lost
    return max((after**p - before**p * (1 - lost)) * weight, 0.0)


def norms_without_decay(
    norms: Series,
    exposures: Sequence[float],
    e: Sequence[float],
    factors: Sequence[float] | None = None,
) -> Series:
    """The norms |W| that the same motion of the direction would have given without decay.

    `exposures`: the decay exposure at each record, `e` the elasticity there. Between two records
    the pushes are those of the run, for the other norm: with M the squared norm without decay,
    dM = c M^e, so M^(1-e) grows by 1 - e times the sum of c (at e = 1: log M by the sum of c). It
    is a reconstruction: it takes |grad L(u)| to be what it was in the run. `factors`, at each
    record, are on c: what a push of Adam's also hangs on (`memory`).
    """
    if not norms:
        return ()
    m = norms[0][1] ** 2
    without_decay = [(norms[0][0], math.sqrt(m))]
    for i in range(1, len(norms)):
        before, after = norms[i - 1][1] ** 2, norms[i][1] ** 2
        if min(before, after, m) > 0:
            between = (e[i - 1] + e[i]) / 2
            c = pushes(before, after, exposures[i] - exposures[i - 1], between)
            if factors is not None:
                c *= math.sqrt(factors[i - 1] * factors[i])
            m = _grown(m, c, between)
        without_decay.append((norms[i][0], math.sqrt(m)))
    return tuple(without_decay)


def _grown(m: float, c: float, e: float) -> float:
    """M after pushes of c M^e."""
    p = 1 - e
    return m * math.exp(min(c, 50.0)) if p < FLAT else (m**p + p * c) ** (1 / p)
