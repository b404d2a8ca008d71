"""Attribution: how much of decay's effect goes through each path, by experiment."""

from decaylab.attribution.arms import SIZE_FREE_ROTATION, Arm, ArmResult
from decaylab.attribution.experiment import attribute
from decaylab.attribution.result import Attribution
from decaylab.attribution.shares import Estimate, Shares

__all__ = [
    "SIZE_FREE_ROTATION",
    "Arm",
    "ArmResult",
    "Attribution",
    "Estimate",
    "Shares",
    "attribute",
]
