"""Searches on held-out images: what each found, and all that it tried."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from decaylab.document import text_grid
from decaylab.paper import FinishedRuns
from decaylab.paper.settings import on_edge, searched
from decaylab.report.names import key_words, named, percent
from decaylab.sweeps.run_index import IndexedRun
from decaylab.sweeps.search import INSTEAD

ACCURACY, LOSS = "test/accuracy", "train/pass_loss"  # a trial is tested on the held-out images
FIELDS = {"lr": "lr", "weight_decay": "decay", "kl_clip": "KL clip"}  # that a search may vary


def searches(indexed: Sequence[IndexedRun], finished_runs: FinishedRuns, folder: Path) -> str:
    """The best of every search and all that was tried; `folder` has the winners.

    The best has the highest accuracy on the held-out images after the last epoch or, where the
    learning rate never drops, the lowest training loss (Fig. 9). Named are searches that have not
    ended, and of the others those whose best lies at the end of what was tried.
    """
    rows, edges, unfinished = [], [], []
    for title, runs in by_cell(indexed).items():
        trials = [_tried(run, finished_runs) for run in runs]
        best = min(trials, key=lambda trial: trial.rank)
        tried = {
            field: sorted({trial.point[field] for trial in trials if field in trial.point})
            for field in FIELDS
        }
        searched_fields = [field for field in FIELDS if field == "lr" or len(tried[field]) > 1]
        rows.append(
            [
                *(title, runs[0].manifest.tier, str(len(runs))),
                ", ".join(
                    f"{FIELDS[field]} {best.point[field]:g}"
                    for field in FIELDS
                    if field in searched_fields or (field == "weight_decay" and best.point[field])
                ),
                percent(best.accuracy),
                "—" if best.loss is None else f"{best.loss:.2g}",
                _all_tried(trials, searched_fields),
            ]
        )
        if not _has_ended(runs[0], folder):
            unfinished.append(title)
            continue
        edges += [
            f"{title} ({FIELDS[field]} {best.point[field]:g})"
            for field in on_edge(best.point, {name: tried[name] for name in searched_fields})
        ]
    if not rows:
        return "*No search has been made yet.*\n"
    header = ["cell", "tier", "runs", "best", "accuracy", "training loss", "tried"]
    notes = {
        "Not finished, so that nothing has won yet": unfinished,
        "The best is on the edge of what was tried, and may lie beyond it": edges,
    }
    lines = [f"\n{what}: {'; '.join(cells)}.\n" for what, cells in notes.items() if cells]
    return text_grid(header, rows) + "".join(lines)


def by_cell(indexed: Sequence[IndexedRun]) -> dict[str, list[IndexedRun]]:
    """The runs of searches by the cell they are for."""
    cells: dict[str, list[IndexedRun]] = {}
    for run in indexed:
        key = _cell_of(run)
        words = key_words(key, ["dataset", "network", "batch_norm"])
        words += [f"batch {key['batch_size']}"] if key["batch_size"] != 128 else []
        words += ["constant lr"] if key["constant_lr"] else []
        title = ", ".join([*words, named(run.spec.optimizer), named(run.spec.decay)])
        cells.setdefault(title, []).append(run)
    return cells


@dataclass(frozen=True)
class _Trial:
    """One run of a search; `rank` is lowest for the best, `score` what decides, in words."""

    point: Mapping[str, float]
    accuracy: float | None
    loss: float | None
    rank: float
    score: str


def _tried(run: IndexedRun, finished_runs: FinishedRuns) -> _Trial:
    reading = finished_runs.of(run.spec)
    accuracies = [] if reading is None else reading.curve(ACCURACY)
    losses = [] if reading is None else reading.curve(LOSS) or reading.curve(INSTEAD[LOSS])
    accuracy, loss = (curve[-1][1] if curve else None for curve in (accuracies, losses))
    rank, score = math.inf, str(run.manifest.status)  # unless it has ended
    if _constant_lr(run) and loss is not None:
        rank, score = loss, f"{loss:.2g}"
    elif accuracy is not None:
        rank, score = -accuracy, percent(accuracy)
    values = {field: getattr(run.spec, field) for field in FIELDS}
    point = {field: value for field, value in values.items() if value is not None}
    return _Trial(point, accuracy, loss, rank, score)


def _all_tried(trials: Sequence[_Trial], fields: Sequence[str]) -> str:
    """`lr 0.01: 80.58, 0.03: 81.66`; with several fields `lr 0.01, decay 1e-06: 80.58; lr ...`."""
    *outer, inner = fields
    ordered = sorted(trials, key=lambda trial: [trial.point[field] for field in fields])
    lines = []
    for values, group in groupby(ordered, lambda trial: [trial.point[field] for field in outer]):
        names = [f"{FIELDS[field]} {value:g}" for field, value in zip(outer, values, strict=True)]
        points = ", ".join(f"{trial.point[inner]:g}: {trial.score}" for trial in group)
        lines.append(", ".join([*names, f"{FIELDS[inner]} {points}"]))
    return "; ".join(lines)


def _has_ended(run: IndexedRun, folder: Path) -> bool:
    """Whether the search that a run belongs to has a winner."""
    tier, decay = run.manifest.tier, run.spec.decay
    both = decay == "l2" and run.spec.optimizer == "sgd"  # they are the same there
    schemes = ("l2", "wd") if both else (decay if decay in ("none", "l2") else "wd",)
    winners = [searched(_cell_of(run), scheme, [tier], folder) for scheme in schemes]
    return any(winner is not None for winner in winners)


def _cell_of(run: IndexedRun) -> dict[str, Any]:
    """The cell that a run was searched for, but for its kind of decay."""
    spec = run.spec
    return {
        **{"dataset": spec.data, "network": spec.network, "optimizer": spec.optimizer},
        **{"batch_norm": int(spec.batch_norm), "augment": int(spec.augment)},
        **{"batch_size": spec.batch_size, "constant_lr": _constant_lr(run)},
    }


def _constant_lr(run: IndexedRun) -> bool:
    return (run.spec.lr_drop_every or 0) >= (run.spec.epochs or 0)
