"""Bursts: decay shortens a scale-invariant layer until a step is too long for it.

In terms of its direction u = W / |W| the step of SGD is lr / |W|^2 grad L(u), and K-FAC's is that
over lambda where the damping dominates (Eq. 14). While the gradients are small, decay shortens W
and lengthens this step, until it breaks out and throws W far off (Lobacheva et al. 2021,
arXiv:2106.15739). Here it is seen by the norms alone; benchmarks/bursts.py counts them by accuracy.
"""

from dataclasses import dataclass
from itertools import pairwise

from decaylab.diagnosis.layers import RecordedLayer
from decaylab.diagnosis.rules import RULES


@dataclass(frozen=True)
class Burst:
    """A layer's norm at `step`, and at the next record."""

    layer: str
    step: int
    before: float
    after: float


def bursts(layer: RecordedLayer) -> list[Burst]:
    """Where the norm fell for several intervals, and the next, at no larger lr, undid it all.

    Slower growth is not one: that is how weights move when training gets going.
    """
    burst_list, norms, falling = [], layer.norms, RULES.burst_falling
    for i in range(falling, len(norms) - 1):
        (step, before), (later, after) = norms[i], norms[i + 1]
        if after < RULES.burst_growth * before or after <= norms[i - falling][1]:
            continue  # it did not undo the fall
        fell = all(b < a for (_, a), (_, b) in pairwise(norms[i - falling : i + 1]))
        rates = [layer.settings_at(at).lr or 0.0 for at in (later, step)]
        if fell and rates[0] <= rates[1]:
            burst_list.append(Burst(layer.name, step, before, after))
    return burst_list
