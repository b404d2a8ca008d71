"""Which runs some cells need, in which order."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from decaylab.paper.epoch_probes import epoch_probe
from decaylab.paper.suite import Cell, artefacts, select
from decaylab.paper.suite import cells as cells_of
from decaylab.paper.tiers import tier_of
from decaylab.sweeps.plan import PlannedRun
from decaylab.training import RunSpec


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


def plan(
    cells: Iterable[Cell], others: Iterable[Cell] = (), *, tier: str = "custom"
) -> list[PlannedRun]:
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
            wanted = (
                (cell.sources, ()),
                (cell.runs, cell.probes),
                (cell.searched_runs, cell.probes),
            )
            for runs, names in wanted:
                for spec in runs[seed : seed + 1]:
                    ordered.setdefault(spec.id, spec)
                    serves.setdefault(spec.id, {})[cell.artefact] = None
                    probes.setdefault(spec.id, {}).update(dict.fromkeys(names))
    for cell in others:
        for spec in (*cell.runs, *cell.searched_runs):
            if spec.id in ordered:
                serves[spec.id][cell.artefact] = None
                probes[spec.id].update(dict.fromkeys(cell.probes))
    planned = []
    for run_id, spec in ordered.items():
        names = tuple(sorted(probes[run_id]))
        planned.append(PlannedRun(spec, names, tuple(serves[run_id]), tier, epoch_probe(names)))
    return planned
