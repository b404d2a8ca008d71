"""Which cells of a table a further seed would tell something about."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from decaylab.errors import BadValue
from decaylab.paper.evidence import Bench, Sample
from decaylab.paper.finished_runs import FinishedRuns
from decaylab.paper.suite import Cell, artefact_of, artefacts

NEAR = 1.0  # points of accuracy that a full run may be off the paper
SEEDS = 10  # of a cell, at most, in the pooled spread


def with_doubt(chosen: Sequence[Cell], finished_runs: FinishedRuns, tier: str) -> list[Cell]:
    """Those that are over a point off the paper, and pairs with an effect that may be noise.

    By seed 0. An effect of decay may be noise where it is below twice the standard deviation over
    seeds, which is pooled over replicated cells. Pairs without a run yet are left out.
    """
    bench = Bench(finished_runs, tier, SEEDS, finished_runs.store.root / "searched")
    pairs: dict[tuple[object, ...], list[Cell]] = {}
    for cell in chosen:
        _check(cell.artefact)
        *names, _ = cell.key
        pairs.setdefault(tuple(cell.key[name] for name in names), []).append(cell)
    return [cell for pair in pairs.values() for cell in _doubtful(pair, bench)]


def _check(artefact: str) -> None:
    compared = [a.name for a in artefacts().values() if a.reference and a.percent]
    if artefact_of(artefact).name not in compared:
        remedy = f"one of {', '.join(compared)}, which have the paper's accuracies"
        raise BadValue("an artefact of doubtful cells", artefact, remedy)


def _doubtful(pair: Sequence[Cell], bench: Bench) -> Iterator[Cell]:
    samples = [bench.sample(replace(cell, runs=cell.runs[:1])) for cell in pair]
    known = [sample for sample in samples if sample is not None]
    unclear = len(known) == 2 and _may_be_noise(known, bench)
    for cell, sample in zip(pair, samples, strict=True):
        off = sample and cell.paper is not None and abs(100 * sample.mean - cell.paper) > NEAR
        if off or unclear:
            yield cell


def _may_be_noise(pair: Sequence[Sample], bench: Bench) -> bool:
    effect = 100 * abs(pair[0].mean - pair[1].mean)
    return effect < 2 * max(bench.pool(sample).deviation for sample in pair)
