"""Where the numbers come from: every run folder with its status, versions, device and time."""

from collections.abc import Sequence

from decaylab.document import Grid, GridCell, Section, Subsection, Tone, cells
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
    total = sum(run.device_seconds for run in indexed)
    took = f"{total / 60:.1f} minutes" if total < 7200 else f"{total / 3600:.1f} hours"
    title = f"{len(indexed)} runs, {took} of device time in all"
    if indexed:
        header = [*cells(["run", "status", "tier"]), GridCell("seed", "number")]
        header += cells(["device", "code", "torch"]) + cells(["epochs", "seconds"], "number")
        grid = Grid(header, [_row(run) for run in indexed])
        block = Subsection("runs", title, grids=[grid], folded=True)
    else:
        missing = "No runs yet: `decaylab demo` makes some in minutes."
        block = Subsection("runs", title, missing=missing)
    return Section("provenance", "Runs", blocks=[block])


def _row(run: IndexedRun) -> list[GridCell]:
    manifest = run.manifest
    commit = "" if manifest.commit is None else f" ({_short(manifest.commit)})"
    epochs, seconds = f"{run.epochs} of {run.spec.epochs}", f"{run.device_seconds:.1f}"
    return [
        GridCell(manifest.id, "key"),
        GridCell(manifest.status, tone=TONES.get(manifest.status, "near")),
        GridCell(manifest.tier),
        GridCell(str(manifest.seed), "number"),
        *cells([manifest.device, manifest.version + commit, manifest.torch]),
        *cells([epochs, seconds], "number"),
    ]


def _short(commit: str) -> str:
    """The first digits of a commit, with the `+` of a changed checkout."""
    return commit[:9] + ("+" if commit.endswith("+") else "")
