"""How long runs will take, from step times that were measured."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from decaylab.data.facts import DATA_SETS
from decaylab.optim.decay import OPTIMIZERS
from decaylab.records import RunStore
from decaylab.sweeps.run_index import IndexedRun, indexed_runs
from decaylab.training import RunSpec

# ms per step, by the optimizer's law (of K-FACs the slower one). The paper's nets at batch 128:
# measured on one H200 (bf16, captured steps, BN, augmentation, inversions not hidden). MNIST MLPs:
# a guess. Digits stand-ins at batch 32: measured on one core of a server.
MEASURED: dict[str, dict[str, float]] = {
    "vgg16": {"sgd": 1.9, "adam": 1.9, "kfac": 3.3},
    "resnet32": {"sgd": 5.1, "adam": 5.1, "kfac": 6.7},
    "mlp": {"sgd": 0.3, "adam": 0.3, "kfac": 0.6},
    "digits mlp": {"sgd": 0.7, "adam": 0.9, "kfac": 1.4},
    "digits resnet20": {"sgd": 10.0, "adam": 10.0, "kfac": 18.0},
}
OVERHEAD = 1.2
STARTUP = 0.3  # seconds a run needs before its first step
# Depth against VGG16's and ResNet32's, for those that were not measured.
DEPTH = {
    **{"vgg11": 8 / 13, "vgg13": 10 / 13, "vgg19": 16 / 13},
    **{"resnet20": 19 / 31, "resnet44": 43 / 31, "resnet56": 55 / 31},
}


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds a run should take, and whether that is of a like run in the records."""

    seconds: float
    recorded: bool


class Estimator:
    """The mean of like finished runs of a store where there are some, else from `MEASURED`.

    For a CPU or a GPU; without a device digits are estimated for a CPU, everything else for a GPU.
    Estimates from runs that took turns are for as many at once.
    """

    def __init__(self, store: RunStore, device: torch.device | None = None) -> None:
        by_kind = defaultdict[tuple[object, ...], list[float]](list)
        for run in _timed(store, device):
            by_kind[_kind(run.spec)].append(run.device_seconds / run.steps)
        self._per_step = {kind: statistics.fmean(times) for kind, times in by_kind.items()}

    def of(self, spec: RunSpec) -> TimeEstimate:
        """What one run should take from its start to its end."""
        steps = (spec.resolved().epochs or 0) * steps_per_epoch(spec)
        recorded = self._per_step.get(_kind(spec))
        if recorded is not None:
            return TimeEstimate(steps * recorded, recorded=True)
        return TimeEstimate(_from_table(spec, steps), recorded=False)

    def total(self, specs: Iterable[RunSpec]) -> float:
        """Seconds for all of them, one after the other."""
        return sum(self.of(spec).seconds for spec in specs)


@dataclass(frozen=True)
class CheckedEstimate:
    """A recorded run: seconds it had the device, and what would have been estimated before it.

    `from_like`: from the other runs of its kind; None if it is the only one.
    """

    spec: RunSpec
    seconds: float
    from_table: float
    from_like: float | None


def checked_estimates(store: RunStore, device: torch.device | None = None) -> list[CheckedEstimate]:
    """Every timed run of a store against the estimates that know nothing of it."""
    runs = _timed(store, device)
    by_kind = defaultdict[tuple[object, ...], list[IndexedRun]](list)
    for run in runs:
        by_kind[_kind(run.spec)].append(run)
    checked = []
    for run in runs:
        others = [r for r in by_kind[_kind(run.spec)] if r is not run]
        times = [other.device_seconds / other.steps for other in others]
        like = run.steps * statistics.fmean(times) if times else None
        table = _from_table(run.spec, run.steps)
        checked.append(CheckedEstimate(run.spec, run.device_seconds, table, like))
    return checked


def _timed(store: RunStore, device: torch.device | None) -> list[IndexedRun]:
    """Finished runs whose seconds say something about others on such a device."""
    timed = []
    for run in indexed_runs(store)[0]:
        manifest = run.manifest
        on_cpu = run.spec.data == "digits" if device is None else device.type == "cpu"
        stopped = manifest.at_once > 1 and manifest.resumes  # its seconds say nothing
        like = manifest.status == "finished" and on_cpu == (manifest.device == "cpu")
        if like and run.steps and not stopped:
            timed.append(run)
    return timed


def _from_table(spec: RunSpec, steps: int) -> float:
    return STARTUP + steps * OVERHEAD * _measured(spec) / 1000


def steps_per_epoch(spec: RunSpec) -> int:
    """Full batches in an epoch."""
    images = DATA_SETS[spec.data].splits["train"].count
    return max(1, (images - images // 10 if spec.held_out else images) // spec.batch_size)


def _kind(spec: RunSpec) -> tuple[object, ...]:
    """What decides the time of a step."""
    shape = (spec.data, spec.network, spec.width, spec.resolved().hidden, spec.batch_norm)
    return (*shape, spec.optimizer, spec.batch_size, spec.precision)


def _measured(spec: RunSpec) -> float:
    """Ms per step from the table, larger batches in proportion."""
    law = OPTIMIZERS[spec.optimizer]
    if f"{spec.data} {spec.network}" in MEASURED:
        return MEASURED[f"{spec.data} {spec.network}"][law] * spec.batch_size / 32
    like = "vgg16" if spec.network.startswith("vgg") else "resnet32"
    base = MEASURED.get(spec.network, MEASURED[like])[law]
    return base * DEPTH.get(spec.network, 1.0) * max(1.0, spec.batch_size / 128)
