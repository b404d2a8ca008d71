"""Where the numbers come from: every run folder with its status, versions, device and time."""

from collections.abc import Sequence

from decaylab.document import Grid, GridCell, Section, Subsection, Tone
from decaylab.paper import TIERS
from decaylab.sweeps.run_index import IndexedRun

MOST_SEEDS = 10  # a seed may also be a date
TONES: dict[str, Tone] = {"finished": "good", "diverged": "bad", "failed": "bad"}


def seeds_of(indexed: Sequence[IndexedRun]) -> int:
    """How many seeds a cell may have among some runs: 0 to the largest, up to `MOST_SEEDS`."""
    return min(MOST_SEEDS, 1 + max((run.manifest.seed for run in indexed), default=0))


def tiers_of(indexed: Sequence[IndexedRun]) -> list[str]:
    """The tiers that there are runs of, the longest schedule first."""
    labels = {run.manifest.tier for run in indexed}
    return [tier for tier in reversed(TIERS) if tier in labels]


def provenance(indexed: Sequence[IndexedRun]) -> Section:
    """The table of runs."""
    names = ("run", "status", "tier", "seed", "device", "code", "torch", "epochs", "seconds")
    numeric = ("seed", "epochs", "seconds")
    header = [GridCell(name, "number" if name in numeric else "") for name in names]
    rows = [_row(run) for run in indexed]
    total = sum(run.device_seconds for run in indexed)
    took = f"{total / 60:.1f} minutes" if total < 7200 else f"{total / 3600:.1f} hours"
    title = f"{len(indexed)} runs, {took} of device time in all"
    missing = "" if rows else "No runs yet: `decaylab demo` makes some in minutes."
    block = Subsection(
        "runs",
        title,
        grids=[Grid(header, rows)] if rows else (),
        missing=missing,
        folded=bool(rows),
    )
    return Section("provenance", "Runs", blocks=[block])


def _row(run: IndexedRun) -> list[GridCell]:
    manifest = run.manifest
    commit = "" if manifest.commit is None else f" ({_short(manifest.commit)})"
    return [
        GridCell(manifest.id, "key"),
        GridCell(manifest.status, tone=TONES.get(manifest.status, "near")),
        GridCell(manifest.tier),
        GridCell(str(manifest.seed), "number"),
        GridCell(manifest.device),
        GridCell(manifest.version + commit),
        GridCell(manifest.torch),
        GridCell(f"{run.epochs} of {run.spec.epochs}", "number"),
        GridCell(f"{run.device_seconds:.1f}", "number"),
    ]


def _short(commit: str) -> str:
    """The first digits of a commit, with the `+` of a changed checkout."""
    return commit[:9] + ("+" if commit.endswith("+") else "")
