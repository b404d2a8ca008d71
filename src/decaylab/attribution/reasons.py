"""Why a layer is not held, why an arm is not used, why a share cannot be told: as data."""

from dataclasses import dataclass
from enum import Enum

LIMIT = 0.02
"""An arm that missed a path by more than this, relatively, is not used."""


class LayerNote(Enum):
    """What is to be said about a layer in the scope of an attribution."""

    FROZEN = "frozen"
    TIED = "tied"
    SPARSE = "sparse"
    ZERO = "zero"
    SEVERAL_STEPS = "several steps in one"
    SPLIT = "split between optimizers"
    NOT_STEPPED = "not stepped"

    @property
    def held(self) -> bool:
        """Whether such a layer is held all the same."""
        return self is LayerNote.TIED


class Fault(Enum):
    """Why an arm is not used."""

    MISSED = "missed its path"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Unused:
    """An arm that is not used.

    Attributes:
        arm, seed: which.
        fault: why.
        path, layer, error: of an arm that missed: which path it missed, where, and by how much.
    """

    arm: str
    seed: int
    fault: Fault
    path: str = ""
    layer: str = ""
    error: float = 0.0


class Doubt(Enum):
    """Why shares of a metric have no value or no interval."""

    NO_SEED = "no seed has all arms"
    ONE_SEED = "one seed"
    TOTAL_UNCLEAR = "the total is not told from zero"
