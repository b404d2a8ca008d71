"""Where the numbers come from: every run folder with its status, versions, device and time."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from decaylab.errors import DecaylabError
from decaylab.paper import TIERS
from decaylab.paper.estimate import device_seconds
from decaylab.records import Manifest, RunFolder, RunStore
from decaylab.report.page import Block, Cell, Grid, Section, Tone
from decaylab.training import RunSpec

MOST_SEEDS = 10  # a seed may also be a date
TONES: dict[str, Tone] = {"finished": "good", "diverged": "bad", "failed": "bad"}


@dataclass(frozen=True)
class Found:
    """A run folder that could be read, its spec resolved.

    `device_seconds`: how long it had the device, over all resumes; of a shared one, its share.
    """

    folder: RunFolder
    spec: RunSpec
    manifest: Manifest
    epochs: int
    device_seconds: float


def survey(store: RunStore, *beside: RunStore) -> tuple[list[Found], list[str]]:
    """All runs of a store, whatever became of them, and what could not be read, in sentences.

    The runs `beside` count where they shared the device.
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
    others = [(manifest, 0.0) for other in beside for manifest in _manifests(other)]
    shares = device_seconds(times + others)[: len(found)]
    shared = [replace(run, device_seconds=share) for run, share in zip(found, shares, strict=True)]
    return shared, left_out


def _manifests(store: RunStore) -> list[Manifest]:
    """Those that can be read."""
    found = []
    for folder in store.runs():
        with suppress(DecaylabError):
            found.append(folder.manifest())
    return [manifest for manifest in found if manifest is not None]


def seeds_of(found: Sequence[Found]) -> int:
    """How many seeds a cell may have among some runs: 0 to the largest, up to `MOST_SEEDS`."""
    return min(MOST_SEEDS, 1 + max((run.manifest.seed for run in found), default=0))


def tiers_of(found: Sequence[Found]) -> list[str]:
    """The tiers that there are runs of, the longest schedule first."""
    labels = {run.manifest.tier for run in found}
    return [tier for tier in reversed(TIERS) if tier in labels]


def _read(folder: RunFolder) -> tuple[Found | None, list[str]]:
    manifest = folder.manifest()
    if manifest is None:
        return None, [f"{folder.id}: it has no manifest, so it was never begun"]
    spec = RunSpec.of_run(folder).resolved()
    rows = folder.rows()
    notes = [f"{folder.id}: {note}" for note in rows.damaged]
    last = rows.rows[-1] if rows.rows else None
    epochs, seconds = (last.epoch, last.seconds) if last else (0, 0.0)
    return Found(folder, spec, manifest, epochs, seconds), notes


def provenance(found: Sequence[Found]) -> Section:
    """The table of runs."""
    names = ("run", "status", "tier", "seed", "device", "code", "torch", "epochs", "seconds")
    numeric = ("seed", "epochs", "seconds")
    header = [Cell(name, "number" if name in numeric else "") for name in names]
    rows = [_row(run) for run in found]
    total = sum(run.device_seconds for run in found)
    took = f"{total / 60:.1f} minutes" if total < 7200 else f"{total / 3600:.1f} hours"
    title = f"{len(found)} runs, {took} of device time in all"
    missing = "" if rows else "No runs yet: `decaylab demo` makes some in minutes."
    block = Block(
        "runs",
        title,
        grids=[Grid(header, rows)] if rows else (),
        missing=missing,
        folded=bool(rows),
    )
    return Section("provenance", "Runs", blocks=[block])


def _row(run: Found) -> list[Cell]:
    manifest = run.manifest
    commit = "" if manifest.commit is None else f" ({_short(manifest.commit)})"
    return [
        Cell(manifest.id, "key"),
        Cell(manifest.status, tone=TONES.get(manifest.status, "near")),
        Cell(manifest.tier),
        Cell(str(manifest.seed), "number"),
        Cell(manifest.device),
        Cell(manifest.version + commit),
        Cell(manifest.torch),
        Cell(f"{run.epochs} of {run.spec.epochs}", "number"),
        Cell(f"{run.device_seconds:.1f}", "number"),
    ]


def _short(commit: str) -> str:
    """The first digits of a commit, with the `+` of a changed checkout."""
    return commit[:9] + ("+" if commit.endswith("+") else "")
