"""How the norm of a scale-invariant layer moves under pushes and decay, in plain numbers.

The gradient of such a layer is orthogonal to its weight (Eq. 8), so that a step lengthens it and
only decay shortens it. With N = |W|^2, s the part of W that decay takes a step (`decay_rate`)
and G the growth of N by the gradients' pushes, per step in the long run,

    N' = N - 2 s N + G + O(s^2),     G = c N^e

where the elasticity e says how a push depends on the norm: SGD's step is proportional to 1/|W|,
so e = -1; Adam's is not, e = 0; K-FAC's undamped one is proportional to |W|, e = 1, its damped
one to 1/|W|, and with a second-order share q (Eq. 14) e = 2 q - 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from decaylab.errors import DecaylabError

Series = tuple[tuple[int, float], ...]
"""(step, value), by step."""

FLAT = 1e-6  # of 1 - e: below it, pushes count as proportional to N
FARTHEST = 600.0  # of |log N|, for e near 1: floats end at 700


def elasticity(power: int, share: float | None = None) -> float:
    """The e of the push G = c N^e, from the law lr/|W|^power and, for K-FAC, its share.

    >>> [elasticity(2), elasticity(1), elasticity(0, share=0.25)]
    [-1.0, 0.0, -0.5]
    """
    if power == 0:
        return 1.0 if share is None else 2.0 * share - 1.0
    return -1.0 if power == 2 else 0.0


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
    found = [(norms[0][0], math.sqrt(m))]
    for i in range(1, len(norms)):
        before, after = norms[i - 1][1] ** 2, norms[i][1] ** 2
        if min(before, after, m) > 0:
            between = (e[i - 1] + e[i]) / 2
            c = pushes(before, after, exposures[i] - exposures[i - 1], between)
            if factors is not None:
                c *= math.sqrt(factors[i - 1] * factors[i])
            m = _grown(m, c, between)
        found.append((norms[i][0], math.sqrt(m)))
    return tuple(found)


def _grown(m: float, c: float, e: float) -> float:
    """M after pushes of c M^e."""
    p = 1 - e
    return m * math.exp(min(c, 50.0)) if p < FLAT else (m**p + p * c) ** (1 / p)


@dataclass(frozen=True)
class Equilibrium:
    """Where pushes and decay balance.

    Attributes:
        norm: |W| there. rotation: radians that the direction turns in one step there.
        steps: after so many steps the distance of N from its balance has fallen to 1/e.
    """

    norm: float
    rotation: float
    steps: float


def equilibrium(
    growth: float, norm: float, shrink: float, *, e: float, memory: float = 0.0
) -> Equilibrium | None:
    """The balance of a layer that grows by `growth` in N = |W|^2 per step while at `norm`.

    G = growth (N / norm^2)^e = 2 s N gives N^(1-e) = growth norm^(-2e) / (2 s), for e < 1. Near it,
    N returns at the rate 2 s (1 - e): 1 / (2 s (1 - e)) steps. The rotation per step: with a
    momentum (Adam: beta1) of m, a step d is a running sum of gradients that, taken as independent,
    has |d|^2 = G (1 - m) / (1 + m), since in the long run its parts add up to G a step. So

        rotation = sqrt(2 s (1 - m) / (1 + m))

    whatever the gradients are: SGD with L2 (s = lr wd / (1 - m)): sqrt(2 lr wd / (1 + m)); AdamW
    and K-FAC (s = lr wd): sqrt(2 lr wd (1 - m) / (1 + m)). Gradients that agree from step to step
    turn it further. None where there is no balance: no decay, or e >= 1 (undamped K-FAC, whose
    direction turns by lr whatever the norm).
    """
    if shrink <= 0 or e >= 1 or growth <= 0:
        return None
    log_n = math.log(growth * norm ** (-2 * e) / (2 * shrink)) / (1 - e)
    squared = math.exp(min(max(log_n, -FARTHEST), FARTHEST))
    return Equilibrium(
        math.sqrt(squared), rotation_per_step(shrink, memory), 1 / (2 * shrink * (1 - e))
    )


def rotation_per_step(shrink: float, memory: float = 0.0) -> float:
    """Radians per step at equilibrium: sqrt(2 s (1 - m) / (1 + m)), as `equilibrium` derives."""
    return math.sqrt(2 * shrink * (1 - memory) / (1 + memory))


def shrink_for_rotation(rotation: float, memory: float = 0.0) -> float:
    """The s whose equilibrium turns by `rotation` a step: the inverse of `rotation_per_step`."""
    if not 0 < rotation < 1:
        raise DecaylabError(f"a rotation per step is between 0 and 1 radian, not {rotation}")
    return rotation**2 * (1 + memory) / (2 * (1 - memory))


def shrink_for_norm(growth: float, at: float, norm: float, *, e: float) -> float:
    """The s that holds a layer at `norm`, when it grows by `growth` in |W|^2 per step at `at`."""
    return growth * (norm / at) ** (2 * e) / (2 * norm**2)
