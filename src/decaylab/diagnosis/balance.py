"""Where pushes and decay balance, by the power of the norm."""

import math
from dataclasses import dataclass

from decaylab.errors import DecaylabError
from decaylab.optim.laws.dynamics import FARTHEST


def elasticity(power: int, share: float | None = None) -> float:
    """The e of the push G = c N^e, from the law lr/|W|^power and, for K-FAC, its share.

    >>> [elasticity(2), elasticity(1), elasticity(0, share=0.25)]
    [-1.0, 0.0, -0.5]
    """
    if power == 0:
        return 1.0 if share is None else 2.0 * share - 1.0
    return -1.0 if power == 2 else 0.0


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
