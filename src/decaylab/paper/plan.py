"""Which runs some cells need, in which order, and where each of them stands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decaylab.paper.suite import Cell, artefacts, select
from decaylab.paper.suite import cells as cells_of
from decaylab.paper.tiers import tier_of
from decaylab.records import RunStore
from decaylab.training import RunSpec

State = Literal["finished", "diverged", "busy", "waiting", "ready"]


@dataclass(frozen=True)
class PlannedRun:
    """A run to make: its spec, what to record in it, and the artefacts it serves.

    `tier`: a label kept with the results; empty: that of the whole reproduction.
    """

    spec: RunSpec
    probes: tuple[str, ...]
    artefacts: tuple[str, ...]
    tier: str = ""


def chosen_cells(
    artefact: str, tier: str, seeds: int, only: Sequence[str], runs: Path
) -> list[Cell]:
    """The cells of an artefact, or of all, that match every condition; searches are in `runs`."""
    tier_of(tier)
    names = list(artefacts()) if artefact == "all" else [artefact]
    folder = runs / "searched"
    chosen = [
        cell for name in names for cell in cells_of(name, tier, seeds, searched_folder=folder)
    ]
    return select(chosen, only)


def plan(cells: Iterable[Cell], others: Iterable[Cell] = ()) -> list[PlannedRun]:
    """The runs of some cells, each once, with the union of the probes that any cell wants.

    `others` (of other artefacts) bring no runs of their own, but what they want of these is
    recorded too, since a run is trained once.

    In the order of the cells (whose comparison column varies fastest, so that pairs with and
    without decay stand together), first seeds first; a run stands behind the one whose norms it
    takes over, which is added where no cell has it.
    """
    cells = list(cells)
    probes: dict[str, dict[str, None]] = {}
    serves: dict[str, dict[str, None]] = {}
    ordered: dict[str, RunSpec] = {}
    for seed in range(max((len(cell.runs) for cell in cells), default=0)):
        for cell in cells:
            wanted = ((cell.sources, ()), (cell.runs, cell.probes), (cell.own, cell.probes))
            for runs, names in wanted:
                for spec in runs[seed : seed + 1]:
                    ordered.setdefault(spec.id, spec)
                    serves.setdefault(spec.id, {})[cell.artefact] = None
                    probes.setdefault(spec.id, {}).update(dict.fromkeys(names))
    for cell in others:
        for spec in (*cell.runs, *cell.own):
            if spec.id in ordered:
                serves[spec.id][cell.artefact] = None
                probes[spec.id].update(dict.fromkeys(cell.probes))
    return [
        PlannedRun(spec, tuple(sorted(probes[run_id])), tuple(serves[run_id]))
        for run_id, spec in ordered.items()
    ]


def state_of(planned: PlannedRun, store: RunStore) -> State:
    """Where a run stands; `waiting` is for the run whose norms it takes over."""
    folder = store.folder(planned.spec.id)
    manifest = folder.manifest()
    if manifest is not None and manifest.status in ("finished", "diverged"):
        folder.check_same_spec(planned.spec.to_toml())
        return "finished" if manifest.status == "finished" else "diverged"
    if folder.locked():
        return "busy"
    source = planned.spec.norm_source
    if source and not store.folder(source).is_finished():
        return "waiting"
    return "ready"
