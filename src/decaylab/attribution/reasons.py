"""Why an arm is not used or a share is unknown, as data."""

from dataclasses import dataclass
from enum import Enum

LIMIT = 0.02
"""An arm that missed a path by more than this, relatively, is not used."""


class Fault(Enum):
    """Why an arm is not used."""

    MISSED = "missed its path"
    DIVERGED = "diverged"
    NO_NUMBER = "no number"


@dataclass(frozen=True)
class Unused:
    """An arm that is not used.

    Attributes:
        arm, seed: which.
        fault: why.
        path, layer, error: of an arm that missed: which path it missed, where, and by how much.
        metric: of an arm with no (finite) number: of what.
    """

    arm: str
    seed: int
    fault: Fault
    path: str = ""
    layer: str = ""
    error: float = 0.0
    metric: str = ""


class Doubt(Enum):
    """Why shares of a metric have no value or no interval."""

    NO_SEED = "no seed has all arms"
    ONE_SEED = "one seed"
    NO_SPREAD = "all seeds have the same total"
    TOTAL_UNCLEAR = "the total is not told from zero"
