"""How a run is carried out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decaylab.training.world import World

if TYPE_CHECKING:
    from decaylab.training.run import TrainingRun


@dataclass(frozen=True)
class Execution:
    """How a run is carried out: nothing here is part of its id or, but for rounding, its numbers.

    Attributes:
        checkpoint_every: seconds between checkpoints, at least; 0: after every step.
        keep_checkpoint: whether a finished run has one: it may be over a gigabyte, and the runs
            beside it wait until it is written.
        every_step: yield after each step too.
        train_set_each_epoch: evaluate the training set after each epoch, not the last one alone.
        tier: a label kept with the results.
        at_once: how many runs share the device, this one included; recorded, as their seconds
            mingle.
        compiled: the network goes through torch.compile, which rounds otherwise; recorded too.
        world: the processes that train it together, of which the first writes (`training.world`).
        record_paths: record what each layer goes through at every step, for other runs to follow:
            `paths.safetensors` in the run's folder. Runs that follow others record theirs anyway.
        probes: names of probes to record at the start and after each epoch, as far as they are due
            (`Probe.when`), beside those of every run.
        epoch_probe: called with the run at the start and after each epoch; the numbers that it
            returns are recorded with the others.
    """

    checkpoint_every: float = 60.0
    keep_checkpoint: bool = True
    every_step: bool = False
    train_set_each_epoch: bool = False
    tier: str = "custom"
    at_once: int = 1
    compiled: bool = False
    world: World = World()  # noqa: RUF009 - frozen
    record_paths: bool = False
    probes: tuple[str, ...] = ()
    epoch_probe: "Callable[[TrainingRun], Mapping[str, float]] | None" = None
