"""The runs of a store, whatever became of them, and how long each had the device."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress, pairwise

from decaylab.errors import DecaylabError
from decaylab.records import Manifest, RunFolder, RunStore
from decaylab.training import RunSpec

# In a folder of runs: those of its searches, and those that were made again.
NESTED = ("searched/runs", "repeats")


@dataclass(frozen=True)
class Found:
    """A run folder that could be read, its spec resolved, and how far it came.

    `device_seconds`: how long it had the device, over all resumes; of a shared one, its share.
    """

    folder: RunFolder
    spec: RunSpec
    manifest: Manifest
    epochs: int
    steps: int
    device_seconds: float


def survey(store: RunStore) -> tuple[list[Found], list[str]]:
    """All runs of a store, and what could not be read, in sentences.

    Runs of the other stores of its folder (`NESTED`) count where they shared the device.
    """
    found, left_out = [], []
    for folder in store.runs():
        try:
            run, notes = _read(folder)
        except DecaylabError as error:
            left_out.append(str(error))
            continue
        left_out += notes
        if run is not None:
            found.append(run)
    times = [(run.manifest, run.device_seconds) for run in found]
    others = [(manifest, 0.0) for manifest in _manifests_beside(store)]
    shares = device_seconds(times + others)[: len(found)]
    shared = [replace(run, device_seconds=share) for run, share in zip(found, shares, strict=True)]
    return shared, left_out


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


def _manifests_beside(store: RunStore) -> list[Manifest]:
    """Those that can be read, of the other stores of a store's folder."""
    own = top = store.root.resolve()
    for nested in NESTED:
        if top.match(f"*/{nested}"):
            top = top.parents[nested.count("/")]
    found = []
    for root in {top, *(top / nested for nested in NESTED)} - {own}:
        for folder in RunStore(root).runs():
            with suppress(DecaylabError):
                found.append(folder.manifest())
    return [manifest for manifest in found if manifest is not None]


def _read(folder: RunFolder) -> tuple[Found | None, list[str]]:
    manifest = folder.manifest()
    if manifest is None:
        return None, [f"{folder.id}: it has no manifest, so it was never begun"]
    spec = RunSpec.of_run(folder).resolved()
    rows = folder.rows()
    notes = [f"{folder.id}: {note}" for note in rows.damaged]
    last = rows.rows[-1] if rows.rows else None
    reached = (last.epoch, last.step, last.seconds) if last else (0, 0, 0.0)
    return Found(folder, spec, manifest, *reached), notes
