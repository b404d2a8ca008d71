"""`decaylab reproduce`: the runs behind a table or figure of the paper."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer

from decaylab.cli import options
from decaylab.cli.board import follow
from decaylab.cli.options import option
from decaylab.cli.queue import Queue, print_queue, work_off
from decaylab.cli.search import make_search
from decaylab.cli.sweep import EngineOptions, Work, submit
from decaylab.cli.terminal import print_json, say, show, warn
from decaylab.errors import RUNS_LEFT, DecaylabError, Misplaced, UnknownName
from decaylab.paper import Cell, FinishedRuns, tier_of
from decaylab.paper.plan import chosen_cells, plan
from decaylab.paper.searches import missing_searches
from decaylab.records import RunStore
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.plan import PlannedRun, has_ended, state_of
from decaylab.sweeps.queue import ArtefactEntry, CommandEntry, read_queue
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.text_table import Column, TextTable, in_words
from decaylab.training.world import launched

Name = Annotated[
    str | None, typer.Argument(metavar="ARTEFACT", help="table1-3, fig1-9, decay-alone, or all.")
]
TierOption = Annotated[
    str | None, option("--tier", "smoke, quick, short or full.", show_default="smoke")
]
Seeds = Annotated[
    int | None, option("--seeds", "Number of runs per cell, with seeds 0, 1, ...", show_default="1")
]
QueueFile = Annotated[
    Path | None, option("--queue", "Work through a queue, a TOML file, instead.", metavar="FILE")
]
Only = Annotated[
    list[str] | None,
    option("--only", "Run only these cells; may be repeated.", metavar="KEY=VALUE"),
]


@options.spread
def reproduce_command(
    artefact: Name = None,
    tier: TierOption = None,
    seeds: Seeds = None,
    only: Only = None,
    queue: QueueFile = None,
    search: Annotated[
        bool, typer.Option(help="First search the settings of cells that have none (L2 of Fig. 1).")
    ] = True,
    run: Annotated[
        list[str] | None, option("--run", "Train only these runs; may be repeated.", metavar="ID")
    ] = None,
    json_output: options.Json = False,
    *,
    training: options.TrainingOptions,
    engine: EngineOptions,
) -> None:
    """Train the runs behind a table or figure of the paper.

    Running the same command again skips finished runs, resumes stopped ones, and tries failed ones
    once more and lists them. Unknown settings are searched first. Exit codes: 0 all done, 1 some
    failed, 75 time ran out with work left.
    """
    if (artefact is None) == (queue is None):
        raise DecaylabError("give an artefact (table1, fig4, all ...) or --queue FILE")
    stream = sys.stderr if json_output else sys.stdout
    if queue is not None:
        if tier or seeds or only or training.keep_checkpoints:
            settings = ["--tier", "--seeds", "--only", "--keep-checkpoints"]
            raise Misplaced(settings, "an artefact; the entries of a queue set their own")
        _reproduce_queue(queue, training, engine, json_output, stream)
        return
    runs, store = training.runs, RunStore(training.runs)
    tier, seeds = tier or "smoke", 1 if seeds is None else seeds

    def planned_runs() -> tuple[list[Cell], list[PlannedRun]]:
        chosen = chosen_cells(artefact or "", tier, seeds, only or [], runs)
        return chosen, plan(chosen, chosen_cells("all", tier, seeds, [], runs), tier=tier)

    chosen, planned = planned_runs()
    if run:
        known = {planned_run.spec.id for planned_run in planned}
        for name in run:
            if name not in known:
                raise UnknownName("run", name, known, f"--dry-run lists these {len(planned)}")
        planned = [planned_run for planned_run in planned if planned_run.spec.id in run]
    on_digits = tier_of(tier).on_digits
    if not run and not engine.in_this_process(training):
        words = ["reproduce", artefact or "", *options.flags(tier=tier, seeds=seeds, only=only)]
        submit(Work(words, planned), training, engine, digits=on_digits, stream=stream)
        _say_missing({} if engine.dry_run else _missing(chosen))
        return
    if engine.dry_run:
        _print_plan(planned, chosen, store, json_output)
        return
    if on_digits:
        torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    limits = _worker_options(training, on_digits)
    searches = missing_searches(chosen, tier) if search and not run else []
    if searches and launched():
        raise DecaylabError(
            f"{len(searches)} searches come first, which only one process can run: run the command"
            " without torchrun, or add --no-search"
        )
    left = limits.running_out()
    for search_plan in searches:
        make_search(search_plan, runs / "searched", left(), stream)
    if searches:
        chosen, planned = planned_runs()
    with options.together(training.device or "auto", limits.device) as world:
        worker = Worker(planned, store, replace(left(), world=world))
        worker.check_data()
        if not world.first:
            worker.assist()
            return
        follow(worker, stream)
    _summarise(worker, chosen, tier, json_output)
    _exit(bool(worker.outcome.failed), bool(worker.outcome.left))


def _reproduce_queue(
    file: Path,
    training: options.TrainingOptions,
    engine: EngineOptions,
    json_output: bool,
    stream: TextIO,
) -> None:
    """Work through a queue, and print what is left; or only the latter."""
    if launched():
        raise DecaylabError("torchrun takes an artefact, not a queue: name one")
    queue = Queue(read_queue(file), training.runs)
    tiers = [entry.tier for entry in queue.entries if not isinstance(entry, CommandEntry)]
    on_digits = all(tier_of(name).on_digits for name in tiers)
    if engine.dry_run and engine.engine == "local":
        print_queue(queue.standing(), json_output)
        return
    here, planned = engine.in_this_process(training), list[PlannedRun]()
    if not here:  # jobs divide these runs, and the first to come to it does the rest
        entries = [e for e in queue.entries if isinstance(e, ArtefactEntry)]
        planned = queue.planned([e for e in entries if not (e.hold or e.again)])
    divides = not all(has_ended(run, queue.store) for run in planned)
    if here or (engine.engine == "local" and not divides):
        failed = work_off(queue, _worker_options(training, on_digits), stream)
        standing = queue.standing()
        print_queue(standing, json_output)
        for name, reason in failed.items():
            warn(f"failed: {name}: {reason}")
        _exit(bool(failed), any(entry.state == "to do" for entry in standing))
    else:
        if not divides and any(entry.state == "to do" for entry in queue.standing()):
            raise DecaylabError(
                f"the queue has no runs left that {engine.engine} can divide, but other work: do it"
                " with --engine local"
            )
        work = Work(["reproduce", "--queue", str(file.resolve())], planned, shared=True)
        submit(work, training, engine, digits=on_digits, stream=stream)


def _worker_options(training: options.TrainingOptions, on_digits: bool) -> WorkerOptions:
    """An error if the runs would take weeks here."""
    if training.device is None and not on_digits and not torch.cuda.is_available():
        raise DecaylabError(
            "tiers short and full are for a GPU, and torch sees none: use --tier quick, or"
            " --device cpu to train anyway"
        )
    return training.worker_options(training.device_for(digits=on_digits))


def _exit(failed: bool, left: bool) -> None:
    """End with an exit code that says whether the same command has something to go on with."""
    if failed or left:
        raise typer.Exit(1 if failed else RUNS_LEFT)


def _plan_entry(run: PlannedRun, store: RunStore, estimator: Estimator) -> dict[str, Any]:
    """What a run is for, its state, and how long it should take."""
    try:
        state: str = state_of(run, store)
    except DecaylabError as error:
        state = f"unreadable ({error})"
    return {
        "run": run.spec.id,
        "artefacts": list(run.purposes),
        "state": {"ready": "to do", "waiting": "to do, after its source"}.get(state, state),
        **vars(estimator.of(run.spec)),
    }


def _print_plan(
    planned: list[PlannedRun], chosen: list[Cell], store: RunStore, json_output: bool
) -> None:
    estimator = Estimator(store)
    entries = [_plan_entry(run, store, estimator) for run in planned]
    to_do = [entry for entry in entries if entry["state"].startswith("to do")]
    left = sum(entry["seconds"] for entry in to_do)
    missing = _missing(chosen)
    if json_output:
        print_json({"runs": entries, "seconds_left": left, "missing": missing})
        return
    columns = (Column("run"), Column("for", words=True), Column("state", words=True))
    table = TextTable([*columns, Column("estimate", number=True)])
    for entry in entries:
        seconds = in_words(entry["seconds"]) + ("" if entry["recorded"] else " *")
        table.add(entry["run"], " ".join(entry["artefacts"]), entry["state"], seconds)
    show(table)
    done = sum(entry["state"] == "finished" for entry in entries)
    say(
        f"\n{len(chosen)} cells, {len(entries)} runs: {done} done, {len(to_do)} left,"
        f" about {in_words(left)}"
    )
    if any(not entry["recorded"] for entry in entries):
        say("* from a table of step times (H200; digits: one CPU core), not from these records")
    _say_missing(missing)


def _missing(chosen: list[Cell]) -> dict[str, str]:
    return {f"{cell.artefact} {cell.label}": cell.missing for cell in chosen if cell.missing}


def _say_missing(missing: dict[str, str]) -> None:
    if missing:
        say(f"\n{len(missing)} cells without a run yet:")
        for reason in dict.fromkeys(missing.values()):
            say(f"  {reason}")


def _summarise(worker: Worker, chosen: list[Cell], tier: str, json_output: bool) -> None:
    outcome, store = worker.outcome, worker.store
    finished_runs = FinishedRuns(store)
    lacking = dict(finished_runs.lacking(chosen))
    filled = sum(bool(cell.runs) and all(map(finished_runs.of, cell.runs)) for cell in chosen)
    missing = _missing(chosen)
    if json_output:
        facts = {
            "cells": len(chosen),
            "cells_filled": filled,
            "lacking_probes": lacking,
            "missing": missing,
            "left_out": finished_runs.left_out,
        }
        print_json(vars(outcome) | facts)
        return
    say(
        f"{filled} of {len(chosen)} cells filled: {len(outcome.finished)} runs made,"
        f" {len(outcome.before)} done before, {len(outcome.left)} left"
    )
    if outcome.out_of_time:
        say("the time is up: run the same command again to resume")
    if outcome.late:
        say(
            f"{len(outcome.late)} of those left were not started, since they would not have"
            " finished in time (--whole-runs): raise --max-minutes if this happens again"
        )
    for run_id in outcome.elsewhere:
        say(f"another process is working on {run_id}")
    for run_id, reason in outcome.failed.items():
        warn(f"failed: {run_id}: {reason}")
    for run_id, probes in lacking.items():
        say(
            f"{run_id} was finished without {', '.join(probes)}: move its folder away to make it"
            " again"
        )
    for note in finished_runs.left_out:
        warn(f"left out: {note}")
    _say_missing(missing)
    if filled:
        say(f"`decaylab report --runs {store.root}` shows them next to the paper's")
    if tier == "smoke":
        say("tier smoke only shows that everything runs: --tier quick trains for minutes")
