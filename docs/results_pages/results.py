"""What there is in a folder of results: runs, searches, and what is still to be run.

Blocks of Markdown for pages (`blocks`).
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from decaylab.document import text_grid
from decaylab.errors import Damaged
from decaylab.paper import TIERS, Cell, FinishedRun, FinishedRuns, artefact_of, artefacts
from decaylab.paper.claims import Claim, judge
from decaylab.records import RunStore
from decaylab.report.names import differing, key_words, named, percent
from decaylab.report.provenance import seeds_of, tiers_of
from decaylab.report.sections import Filled, fill, titled
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.run_index import IndexedRun, indexed_runs
from results_pages.searches import by_cell

PAPERS_OWN = [tier.name for tier in reversed(TIERS.values()) if not tier.on_digits]
"""Tiers on the paper's data, the full one first."""


class Results:
    """The records of a folder, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.finished_runs = FinishedRuns(RunStore(root))
        self.searched_runs = FinishedRuns(RunStore(root / "searched" / "runs"))
        stores = self.finished_runs.store, self.searched_runs.store, RunStore(root / "repeats")
        self.indexed, self.searched, self.again = (indexed_runs(store)[0] for store in stores)
        self.seeds = seeds_of(self.indexed)
        files = sorted((root / "independent").glob("*.json"))
        self.independent = [run for path in files for run in _runs_in(path)]

    @cached_property
    def tiers(self) -> list[str]:
        """The paper's own tiers there are runs of, the full one first."""
        return [tier for tier in tiers_of(self.indexed) if tier in PAPERS_OWN]

    @cache  # noqa: B019 - one object a command
    def filled(self, name: str, tier: str) -> Filled:
        """An artefact with what there is of it."""
        return fill(artefact_of(name), tier, self.finished_runs, self.seeds)

    @cache  # noqa: B019
    def claims(self, tier: str) -> dict[str, Claim]:
        """The paper's claims by id, judged at a tier."""
        return {claim.id: claim for claim in judge(self.finished_runs, tier, self.seeds)}

    @cached_property
    def used(self) -> dict[str, FinishedRun]:
        """The finished runs of all artefacts."""
        filled = [self.filled(name, tier) for tier in self.tiers for name in artefacts()]
        return {
            name: run for artefact in filled for name, run in self.runs_of(artefact.cells).items()
        }

    @cached_property
    def unused(self) -> list[IndexedRun]:
        """The runs in no artefact."""
        return [run for run in self.indexed if run.manifest.id not in self.used]

    def runs_of(self, cells: Sequence[Cell]) -> dict[str, FinishedRun]:
        """The finished runs of some cells, each once, those at our own settings too."""
        specs = [
            spec for cell in cells for spec in (*cell.runs, *cell.searched_runs, *cell.sources)
        ]
        runs_by_id = {spec.id: self.finished_runs.of(spec) for spec in specs}
        return {name: run for name, run in runs_by_id.items() if run is not None}


def _runs_in(path: Path) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_bytes())
    except ValueError as error:
        raise Damaged(path, error, "move it away, or make it again") from error
    return entries


def all_times(results: Results) -> list[tuple[str, float]]:
    """The device of every run there is, and for how many minutes it had it."""
    recorded = [*map(_time, (*results.indexed, *results.again, *results.searched))]
    return recorded + [(run.get("device", ""), run["seconds"] / 60) for run in results.independent]


def runs(results: Results) -> str:
    """What was run for each artefact, on what, and how long it had the device.

    A run serves several artefacts: it is counted in the first of them, in the order they are run,
    and its minutes in `all its runs` of each.
    """
    rows, counted = [], set[str]()
    times = {run.manifest.id: _time(run) for run in results.indexed}
    for tier in results.tiers:
        for artefact in artefacts().values():
            filled = results.filled(artefact.name, tier)
            artefact_runs = results.runs_of(filled.cells)
            if not artefact_runs:
                continue
            new = [name for name in artefact_runs if name not in counted]
            counted.update(new)
            devices = dict.fromkeys(run.manifest.device for run in artefact_runs.values())
            rows.append(
                [
                    *(tier, titled(artefact), filled.coverage, ", ".join(devices)),
                    *(str(len(new)), device_minutes(times[name] for name in new)),
                    *(
                        str(len(artefact_runs)),
                        device_minutes(times[name] for name in artefact_runs),
                    ),
                ]
            )
    others = [
        ("in no table or figure", "", [*map(_time, results.unused)]),
        ("made again, without `--compiled` or in TF32", "", [*map(_time, results.again)]),
        (
            "searches on held-out images",
            f"{len(by_cell(results.searched))} cells",
            [*map(_time, results.searched)],
        ),
        (
            "the independent script",
            "",
            [(run.get("device", ""), run["seconds"] / 60) for run in results.independent],
        ),
    ]
    for words, cells, made in others:
        if made:
            devices = dict.fromkeys(device for device, _ in made)
            totals = [str(len(made)), device_minutes(made)]
            rows.append(["", words, cells, ", ".join(devices), *totals, *totals])
    header = ["tier", "artefact", "filled", "on", "runs", "GPU-minutes"]
    header += ["all its runs", "their GPU-minutes"]
    everything = [times[name] for name in counted]
    everything += [run for _, _, made in others for run in made]
    total = f"{len(everything)} runs; GPU-minutes: {device_minutes(everything)}"
    return text_grid(header, rows) + f"\nIn all {total}.\n"


def _time(run: IndexedRun) -> tuple[str, float]:
    """The device of a run, and for how many minutes it had it."""
    return run.manifest.device, run.device_seconds / 60


def device_minutes(runs: Iterable[tuple[str, float]]) -> str:
    """GPU-minutes of runs (device, minutes), and those on a CPU apart."""
    runs = list(runs)
    on_cpu = [minutes for device, minutes in runs if device == "cpu"]
    on_gpu = sum(minutes for _, minutes in runs) - sum(on_cpu)
    return f"{on_gpu:.1f}" + (f" (on a CPU: {sum(on_cpu):.1f})" if on_cpu else "")


def variants(results: Results) -> str:
    """The runs in no table or figure: which run of one is nearest, and in what they differ."""
    rows = []
    used = [(run.manifest.tier, run.spec.resolved()) for run in results.used.values()]
    for run in results.unused:
        tier = run.manifest.tier
        specs = [spec for other, spec in used if other == tier]
        if not specs:
            continue
        nearest = min(specs, key=lambda spec: len(differing(run.spec, spec)))
        changed = [
            f"{name} {getattr(run.spec, name)} instead of {getattr(nearest, name)}"
            for name in differing(run.spec, nearest)
        ]
        reading = results.finished_runs.of(run.spec)
        curve = [] if reading is None else reading.curve("test/accuracy")
        jacobian = None if reading is None else reading.final("jacobian_norm")
        epoch, best = max(curve, key=lambda point: point[1], default=(0, None))
        rows.append(
            [
                *(run.manifest.id, tier, nearest.id.rpartition("-")[2], "; ".join(changed)),
                percent(curve[-1][1]) if curve else f"{run.manifest.status}, epoch {run.epochs}",
                "—" if best is None else f"{percent(best)} (epoch {epoch})",
                "—" if jacobian is None else f"{jacobian:.4g}",
            ]
        )
    header = ["run", "tier", "as", "but with", "last epoch", "best epoch", "squared Jacobian norm"]
    return text_grid(header, rows) if rows else "*There are none.*\n"


def rest(results: Results) -> str:
    """What has not been run, the command that runs it, and about how long that takes.

    A run is counted in the first of its artefacts; times are those of `reproduce --dry-run`.
    """
    estimator, rows, counted = Estimator(results.finished_runs.store), [], set[str]()
    for tier in reversed(PAPERS_OWN):
        for artefact in artefacts().values():
            cells = results.filled(artefact.name, tier).cells
            # seed 0 alone, as the command makes it
            first = {run.id: run for cell in cells for run in (*cell.sources[:1], *cell.runs[:1])}
            left = {
                name: run for name, run in first.items() if results.finished_runs.of(run) is None
            }
            new = [run for name, run in left.items() if name not in counted]
            counted.update(left)
            unsearched = sum(bool(cell.missing) for cell in cells)
            if new or unsearched:
                command = f"`decaylab reproduce {artefact.name} --tier {tier}`"
                minutes = f"{estimator.total(new) / 60:.0f}"
                rows.append([command, str(len(new)), minutes, str(unsearched or "")])
    header = [
        "command",
        "runs not in a line above",
        "GPU-minutes",
        "cells that need a search first",
    ]
    return text_grid(header, rows) if rows else "Nothing: everything has been run at both tiers.\n"


def independent(results: Results) -> str:
    """What the independently written script got (`benchmarks/independent.py --json`)."""
    rows = [_independent_row(run) for run in results.independent]
    header = ["network", "optimizer", "lr", "decay", "tested on", "precision", "seed", "epochs"]
    header += ["last epoch", "best epoch", "BN statistics re-estimated", "training accuracy"]
    return text_grid(header, rows) if rows else "*It has not been run yet.*\n"


def _independent_row(run: dict[str, Any]) -> list[str]:
    asked = run["options"]
    style = {"batch_norm": int(asked["bn"]), "augment": int(asked["aug"])}
    words = [named(asked["network"]), *key_words(style, list(style))]
    words += ["gamma and beta"] if asked["affine"] else []
    outside = asked["optimizer"] == "sgd" and asked["decay"] == "decoupled"
    done = len(run["curve"])
    again = run["reestimated"]
    return [
        *(", ".join(words), {"adamw": "Adam"}.get(asked["optimizer"], "SGD"), f"{asked['lr']:g}"),
        f"{asked['wd']:g}" + (" outside the momentum" if outside else ""),
        *("held-out images" if asked["held_out"] else "test images", asked["precision"]),
        *(str(asked["seed"]), str(done) if run["finished"] else f"{done} of {asked['epochs']}"),
        *(f"{run['last']:.2f}", f"{run['best']:.2f} (epoch {run['best_epoch']})"),
        *("—" if again is None else f"{again:.2f}", f"{run['train_accuracy_frozen']:.2f}"),
    ]
