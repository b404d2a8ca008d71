"""How a run is carried out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decaylab.training.run import TrainingRun


@dataclass(frozen=True)
class Execution:
    """How a run is carried out: nothing here changes what is computed, or the run's id.

    `checkpoint_every` is in seconds (0: after every step). `observe` is called with the run at the
    start and after each epoch; the numbers it returns are recorded with the others. `at_once`: how
    many runs take turns with this one: recorded, since their seconds mingle. `compiled`: the
    network goes through torch.compile, which rounds otherwise: recorded, too.
    """

    checkpoint_every: float = 60.0
    every_step: bool = False
    train_set_each_epoch: bool = False
    tier: str = "custom"
    at_once: int = 1
    compiled: bool = False
    observe: "Callable[[TrainingRun], Mapping[str, float]] | None" = None
