"""Bursts: decay shortens a scale-invariant layer until a step is too long for it.

In terms of its direction u = W / |W| the step of SGD is lr / |W|^2 grad L(u), and K-FAC's is that
over lambda where the damping dominates (Eq. 14). While the gradients are small, decay shortens W
and lengthens this step, until it breaks out and throws W far off (Lobacheva et al. 2021,
arXiv:2106.15739). Here it is seen by the norms alone; benchmarks/bursts.py counts them by accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from decaylab.diagnosis.layers import LayerRecord, Setting

FALLING = 5  # intervals between records in which the norm fell, one after the other
GROWTH = 1.2  # the least factor by which it grows in the next


@dataclass(frozen=True)
class Burst:
    """A layer's norm at `step`, and at the next record."""

    layer: str
    step: int
    before: float
    after: float


def bursts(layer: LayerRecord) -> list[Burst]:
    """Where the norm fell for `FALLING` intervals, and the next, at no larger lr, undid it all.

    Slower growth is not one: that is how weights move when training gets going.
    """
    found, norms = [], layer.norms
    for i in range(FALLING, len(norms) - 1):
        (step, before), (later, after) = norms[i], norms[i + 1]
        falling = all(b < a for (_, a), (_, b) in pairwise(norms[i - FALLING : i + 1]))
        undone = after >= GROWTH * before and after > norms[i - FALLING][1]
        if falling and undone and layer.setting_at(later).lr <= layer.setting_at(step).lr:
            found.append(Burst(layer.name, step, before, after))
    return found


def burst_words(found: Sequence[Burst], setting: Setting | None) -> str:
    """What happened, why, and what helps; `setting`: of the layer of the first, which is named."""
    first = found[0]
    remedy = "a smaller lr or less decay"
    if setting is not None and setting.damping is not None:
        free = "a larger damping" if setting.scale_free else 'damping_scaling="scale-free"'
        remedy = f"{free}, {remedy}"
    others = len(found) - 1
    more = f" There {'is' if others == 1 else 'are'} {others} more like it." if others else ""
    return (
        f"A burst: after step {first.step} the norm of {first.layer} grew from {first.before:.3g}"
        f" to {first.after:.3g} by the next record.{more} Decay had shortened these weights, which"
        f" makes each step turn them further, until one was too long. What helps: {remedy}, at that"
        " stage."
    )
