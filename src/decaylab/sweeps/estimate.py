"""How long runs will take, from step times that were measured."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decaylab.data.facts import DATA_SETS
from decaylab.optim.decay import OPTIMIZERS
from decaylab.records import RunStore
from decaylab.sweeps.run_index import IndexedRun, indexed_runs, stores_beside
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
# Seconds of a run that do not grow with its steps. GPU: compiling, capturing, K-FAC's first pass;
# with it, runs at a fifth of a schedule foretell whole ones within a few percent (results/).
STARTUP = {"cpu": 0.3, "cuda": 3.0}
# Where like runs differ, it is mostly by company on the device that the records do not know of,
# which slows a run and never speeds it up: their lower third, not their mean.
TYPICAL = 1 / 3
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
    """From like finished runs where there are some, else from `MEASURED`.

    Runs of the store itself come first, then those of the others of its folder: a search evaluates
    less than the runs of a table, but has nothing else to go by where it is the first of its kind.
    For a CPU or a GPU; without a device digits are estimated for a CPU, everything else for a GPU.
    Estimates from runs that took turns are for as many at once.
    """

    def __init__(self, store: RunStore, device: torch.device | None = None) -> None:
        self._device = device
        self._like: dict[tuple[object, ...], list[IndexedRun]] = {}
        for each in (store, *stores_beside(store)):
            self._like = _by_kind(_timed(each, device)) | self._like

    def of(self, spec: RunSpec) -> TimeEstimate:
        """What one run should take from its start to its end."""
        steps = (spec.resolved().epochs or 0) * steps_per_epoch(spec)
        startup = _startup(spec, self._device)
        if like := self._like.get(_kind(spec)):
            return TimeEstimate(_from_like(like, steps, startup), recorded=True)
        return TimeEstimate(_from_table(spec, steps, startup), recorded=False)

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
    by_kind = _by_kind(runs)
    checked = []
    for run in runs:
        others = [r for r in by_kind[_kind(run.spec)] if r is not run]
        startup = _startup(run.spec, device)
        like = _from_like(others, run.steps, startup) if others else None
        table = _from_table(run.spec, run.steps, startup)
        checked.append(CheckedEstimate(run.spec, run.device_seconds, table, like))
    return checked


def _on_cpu(spec: RunSpec, device: torch.device | None) -> bool:
    return spec.data == "digits" if device is None else device.type == "cpu"


def _startup(spec: RunSpec, device: torch.device | None) -> float:
    return STARTUP["cpu" if _on_cpu(spec, device) else "cuda"]


def _timed(store: RunStore, device: torch.device | None) -> list[IndexedRun]:
    """Finished runs whose seconds say something about others on such a device."""

    def tells(run: IndexedRun) -> bool:
        manifest = run.manifest
        stopped = manifest.at_once > 1 and manifest.resumes  # its seconds say nothing
        alike = _on_cpu(run.spec, device) == (manifest.device == "cpu")
        return manifest.status == "finished" and alike and run.steps > 0 and not stopped

    return list(filter(tells, indexed_runs(store)[0]))


def _by_kind(runs: Iterable[IndexedRun]) -> dict[tuple[object, ...], list[IndexedRun]]:
    like = defaultdict[tuple[object, ...], list[IndexedRun]](list)
    for run in runs:
        like[_kind(run.spec)].append(run)
    return dict(like)


def _from_like(runs: Sequence[IndexedRun], steps: int, startup: float) -> float:
    per_step = [max(0.0, run.device_seconds - startup) / run.steps for run in runs]
    return startup + steps * float(np.quantile(per_step, TYPICAL))


def _from_table(spec: RunSpec, steps: int, startup: float) -> float:
    return startup + steps * OVERHEAD * _measured(spec) / 1000


def steps_per_epoch(spec: RunSpec) -> int:
    """Batches in an epoch."""
    images = DATA_SETS[spec.data].splits["train"].count
    images -= images // 10 * spec.held_out
    full, left_over = divmod(images, spec.batch_size)
    return max(1, full + (spec.keep_last_batch and left_over > 0))


def _kind(spec: RunSpec) -> tuple[object, ...]:
    """What decides the time of a step: sizes, and whether there is curvature beside the gradient.

    (SGD's and Adam's steps take as long as each other, and K-FAC-F's and -G's. A hundred classes
    instead of ten do not show.)
    """
    image = DATA_SETS[spec.data].shape
    network = (spec.network, spec.width, spec.resolved().hidden, spec.batch_norm)
    kfac = OPTIMIZERS[spec.optimizer] == "kfac"
    return (image, *network, kfac, spec.batch_size, spec.precision)


def _measured(spec: RunSpec) -> float:
    """Ms per step from the table, larger batches in proportion."""
    law = OPTIMIZERS[spec.optimizer]
    if f"{spec.data} {spec.network}" in MEASURED:
        return MEASURED[f"{spec.data} {spec.network}"][law] * spec.batch_size / 32
    like = "vgg16" if spec.network.startswith("vgg") else "resnet32"
    base = MEASURED.get(spec.network, MEASURED[like])[law]
    return base * DEPTH.get(spec.network, 1.0) * max(1.0, spec.batch_size / 128)
