"""The factor by which K-FAC's KL clip multiplies a step."""

from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register


def _measure(moment: Moment) -> list[Reading]:
    """`clip_coefficient` of the last step: 1 where nothing was clipped; nothing without a clip."""
    coefficient = getattr(moment.kfac, "clip_coefficient", None)
    if coefficient is None:
        return []
    return [Reading("clip_coefficient", "1", total=float(coefficient))]


register(Probe("clip_coefficient", "free", _measure, unit="1"))
