"""The runs of a store, however they ended, and how long each had the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from decaylab.errors import DecaylabError, printable
from decaylab.records import Manifest, RunFolder, RunStore
from decaylab.records.index import summaries
from decaylab.training import RunSpec

# In a folder of runs: those of its searches, and those that were made again.
NESTED = ("searched/runs", "repeats")


@dataclass(frozen=True)
class IndexedRun:
    """A run folder that could be read, its spec resolved, and how far it came.

    `device_seconds`: how long it had the device, over all resumes; of a shared one, its share.
    """

    folder: RunFolder
    spec: RunSpec
    manifest: Manifest
    epochs: int
    steps: int
    device_seconds: float


def indexed_runs(store: RunStore) -> tuple[list[IndexedRun], list[str]]:
    """All runs of a store, and what could not be read, in sentences.

    Runs of the other stores of its folder (`NESTED`) count where they shared the device.
    """
    known, unreadable = summaries(store)
    indexed, left_out = [], list(unreadable.values())
    for summary in known:
        name = printable(summary.folder.id)
        left_out += [f"{name}: {note}" for note in summary.damaged]
        if summary.manifest is None:
            left_out.append(
                f"{name}: it has no manifest, so it never started: delete it, or train it"
            )
            continue
        try:
            spec = RunSpec.of_summary(summary).resolved()
        except DecaylabError as error:
            left_out.append(str(error))
            continue
        reached = summary.epoch, summary.step, summary.seconds
        indexed.append(IndexedRun(summary.folder, spec, summary.manifest, *reached))
    times = [(run.manifest, run.device_seconds) for run in indexed]
    beside = [summary.manifest for other in stores_beside(store) for summary in summaries(other)[0]]
    others = [(manifest, 0.0) for manifest in beside if manifest is not None]
    pairs = zip(indexed, device_seconds(times + others), strict=False)  # the others come last
    return [replace(run, device_seconds=share) for run, share in pairs], left_out


def device_seconds(runs: Sequence[tuple[Manifest, float]]) -> list[float]:
    """How long each run had the device: its time at work, or of a shared device its share.

    Runs that take turns wait for the device together, so that the time at work of one says little
    (only their sum does). From its start to its end such a run has the n-th part of each moment,
    where n of those given are under way on the same device; no more than its `at_once`, since there
    may be several such devices. One that was stopped in between keeps its time at work.

    This assumes that each goes at its own pace (`interleave`). In version 0.2.0 runs went in
    lockstep: beside one with longer steps a run had less of the device than is counted here, and
    the other had more.
    """
    took_turns = [run.at_once > 1 and not run.resumes for run, _ in runs]
    shares = _Shares([run for run, _ in compress(runs, took_turns)])
    return [
        shares.of(run) if turns else at_work
        for (run, at_work), turns in zip(runs, took_turns, strict=True)
    ]


class _Shares:
    """For runs that share devices: the integral over a run's time of 1 / the number under way."""

    def __init__(self, runs: Sequence[Manifest]) -> None:
        self._moments: dict[str, np.ndarray] = {}  # by device: when a run begins or ends
        self._sums: dict[tuple[str, int], np.ndarray] = {}  # up to each moment, by most at once
        for device in {run.device for run in runs}:
            here = [run for run in runs if run.device == device]
            starts = np.sort([run.started for run in here])
            ends = np.sort([run.updated for run in here])
            moments = np.unique(np.concatenate([starts, ends]))
            begun = np.searchsorted(starts, moments, side="right")
            under_way = np.maximum(begun - np.searchsorted(ends, moments, side="right"), 1)
            self._moments[device] = moments
            for most in {run.at_once for run in here}:
                parts = np.diff(moments) / np.minimum(most, under_way[:-1])
                self._sums[device, most] = np.concatenate([[0.0], np.cumsum(parts)])

    def of(self, run: Manifest) -> float:
        """Seconds of the device for one of the runs."""
        places = np.searchsorted(self._moments[run.device], [run.started, run.updated])
        first, last = self._sums[run.device, run.at_once][places]
        return float(last - first)


def stores_beside(store: RunStore) -> list[RunStore]:
    """The other stores of a store's folder, whether it is the folder itself or one in it."""
    this_store = top = store.root.resolve()
    for nested in NESTED:
        if top.match(f"*/{nested}"):
            top = top.parents[nested.count("/")]
    roots = [top, *(top / nested for nested in NESTED)]
    return [RunStore(root) for root in roots if root != this_store]
