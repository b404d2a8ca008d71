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
    wanted: dict[str, tuple[RunSpec, dict[str, None], set[str]]] = {}  # spec, artefacts, probes

    def want(specs: Iterable[RunSpec], artefact: str, probes: Iterable[str]) -> None:
        for spec in specs:
            _, serves, names = wanted.setdefault(spec.id, (spec, {}, set()))
            serves[artefact] = None
            names.update(probes)

    for seed in range(max((len(cell.runs) for cell in cells), default=0)):
        for cell in cells:
            want(cell.sources[seed : seed + 1], cell.artefact, ())
            want(cell.runs[seed : seed + 1], cell.artefact, cell.probes)
            want(cell.searched_runs[seed : seed + 1], cell.artefact, cell.probes)
    for cell in others:
        runs = (spec for spec in (*cell.runs, *cell.searched_runs) if spec.id in wanted)
        want(runs, cell.artefact, cell.probes)
    return [
        PlannedRun(spec, tuple(sorted(names)), tuple(serves), tier, epoch_probe(names))
        for spec, serves, names in wanted.values()
    ]
