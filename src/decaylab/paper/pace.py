"""Seconds of training at an epoch, for runs whose own seconds mean nothing.

A run that shared its device, or was compiled, has the same curve over epochs as alone, but other
seconds. The first epochs of the same run alone on the device (artefact `fig9-pace`) have its pace.
"""

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

from decaylab.paper.finished_runs import FinishedRun, FinishedRuns
from decaylab.training import RunSpec

EPOCHS = 5  # of `fig9-pace`
SECONDS = "train/seconds"


@dataclass(frozen=True)
class Pace:
    """How fast a run goes on a device that it has to itself.

    Attributes:
        device: its name.
        first: seconds of the first epoch, with all that comes before it.
        each: seconds of an epoch after that, the median.
    """

    device: str
    first: float
    each: float

    def seconds(self, epoch: int) -> float:
        """Seconds of training when an epoch ends."""
        return self.first + (epoch - 1) * self.each if epoch > 0 else 0.0


@dataclass(frozen=True)
class TimedCurve:
    """(seconds of training, value) on a device; `paced` where the seconds are a pace's."""

    device: str
    points: list[tuple[float, float]]
    paced: bool


def pace_spec(spec: RunSpec) -> RunSpec:
    """The run that has the pace of another: its first epochs at a constant learning rate."""
    epochs = min(EPOCHS, spec.resolved().epochs or EPOCHS)
    return replace(spec, epochs=epochs, lr_drop_every=epochs)


def pace_of(spec: RunSpec, finished_runs: FinishedRuns) -> Pace | None:
    """The pace of a run; None if it was not measured alone on a device."""
    run = finished_runs.of(pace_spec(spec))
    ends = [] if run is None else [at for at, _ in run.timed_curve(SECONDS) if at > 0]
    if run is None or len(ends) < 2:
        return None
    later = [after - before for before, after in pairwise(ends)]
    return Pace(run.manifest.device, ends[0], statistics.median(later))


def timed(run: FinishedRun, name: str, finished_runs: FinishedRuns) -> TimedCurve | None:
    """A name over seconds: the run's own where it was alone, else those of its pace."""
    if timed_curve := run.timed_curve(name):
        return TimedCurve(run.manifest.device, timed_curve, paced=False)
    curve, pace = run.curve(name), pace_of(run.spec, finished_runs)
    if pace is None or not curve:
        return None
    points = [(pace.seconds(epoch), value) for epoch, value in curve]
    return TimedCurve(pace.device, points, paced=True)
