"""Learning rates by epoch, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable

from decaylab.errors import AT_LEAST_ONE, POSITIVE

Schedule = Callable[[int, float], float]
"""(epoch counted from 0, base learning rate) -> learning rate of that epoch."""


def step(every: int, factor: float = 10.0) -> Schedule:
    """Divide the learning rate by `factor` every `every` epochs (Appendix A; recipe 14).

    lr(epoch) = base / factor^floor(epoch / every). The paper: every 60 of 200 epochs for SGD and
    Adam (80 at batch 2000), every 40 of 100 for K-FAC.

    >>> schedule = step(every=60)
    >>> [schedule(epoch, 1.0) for epoch in (0, 59, 60, 119, 120, 180)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.001]
    """
    AT_LEAST_ONE.check("every", every)
    POSITIVE.check("factor", factor)

    def learning_rate(epoch: int, base: float) -> float:
        return base / factor ** (epoch // every)

    return learning_rate
