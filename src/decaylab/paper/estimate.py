"""How long runs will take, from step times that were measured."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import torch

from decaylab.data.facts import DATA_SETS
from decaylab.errors import DecaylabError
from decaylab.optim.decay import OPTIMIZERS
from decaylab.records import Manifest, RunStore
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
class Estimate:
    """Seconds a run should take, and whether that is of a like run in the records."""

    seconds: float
    recorded: bool


def device_seconds(runs: Sequence[tuple[Manifest, float]]) -> list[float]:
    """How long each run had the device: its time at work, or of a shared device its share.

    Runs that take turns wait for each other's work, so that the time at work of one says little
    (only their sum does). From its start to its end such a run has the n-th part of each moment,
    where n of those given are under way on the same device; no more than its `at_once`, since there
    may be several such devices. One that was stopped in between keeps its time at work.
    """
    took_turns = [run.at_once > 1 and not run.resumes for run, _ in runs]
    shared = [run for run, _ in compress(runs, took_turns)]
    return [
        _share(run, shared) if turns else at_work
        for (run, at_work), turns in zip(runs, took_turns, strict=True)
    ]


def _share(run: Manifest, shared: list[Manifest]) -> float:
    """The integral over a run's time of 1 / the number of runs under way."""
    beside = [
        other
        for other in shared
        if other.device == run.device
        and other.started < run.updated
        and run.started < other.updated
    ]
    changes = {run.started, run.updated}
    changes |= {time for other in beside for time in (other.started, other.updated)}
    moments = sorted(time for time in changes if run.started <= time <= run.updated)
    return sum(
        (end - begin)
        / min(run.at_once, sum(other.started <= begin < other.updated for other in beside))
        for begin, end in pairwise(moments)
    )


class Estimator:
    """The mean of like finished runs of a store where there are some, else from `MEASURED`.

    For a CPU or a GPU; without a device digits are estimated for a CPU, everything else for a GPU.
    Estimates from runs that took turns are for as many at once.
    """

    def __init__(self, store: RunStore, device: torch.device | None = None) -> None:
        specs, steps, runs = [], [], []
        for folder in store.runs():
            try:
                manifest = folder.manifest()
                if manifest is None or manifest.status != "finished":
                    continue
                if manifest.at_once > 1 and manifest.resumes:  # its seconds say nothing
                    continue
                spec = RunSpec.of_run(folder)
                on_cpu = spec.data == "digits" if device is None else device.type == "cpu"
                if on_cpu != (manifest.device == "cpu"):
                    continue
                rows = folder.rows().rows
            except DecaylabError:
                continue
            last = max(rows, key=lambda row: row.step, default=None)
            if last is not None and last.step:
                specs.append(spec)
                steps.append(last.step)
                runs.append((manifest, last.seconds))
        found = defaultdict[tuple[object, ...], list[float]](list)
        for spec, count, seconds in zip(specs, steps, device_seconds(runs), strict=True):
            found[_kind(spec)].append(seconds / count)
        self._per_step = {kind: statistics.fmean(like) for kind, like in found.items()}

    def of(self, spec: RunSpec) -> Estimate:
        """What one run should take from its start to its end."""
        steps = (spec.resolved().epochs or 0) * steps_per_epoch(spec)
        recorded = self._per_step.get(_kind(spec))
        if recorded is not None:
            return Estimate(steps * recorded, recorded=True)
        return Estimate(STARTUP + steps * OVERHEAD * _measured(spec) / 1000, recorded=False)

    def total(self, specs: Iterable[RunSpec]) -> float:
        """Seconds for all of them, one after the other."""
        return sum(self.of(spec).seconds for spec in specs)


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
