"""`decaylab reproduce`: the runs behind a table or figure of the paper."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from decaylab.cli import options
from decaylab.cli.board import follow
from decaylab.cli.output import console, in_words, print_json
from decaylab.cli.queue import Queue, print_queue, work_off
from decaylab.cli.search import make_search
from decaylab.cli.sweep import engine_options, submit
from decaylab.errors import RUNS_LEFT, DecaylabError
from decaylab.paper import Cell, Readings, tier_of
from decaylab.paper.plan import chosen_cells, plan
from decaylab.paper.searches import missing_searches
from decaylab.records import RunStore
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.plan import PlannedRun, state_of
from decaylab.sweeps.queue import CommandEntry, read_queue
from decaylab.sweeps.worker import Worker, WorkerOptions

Name = Annotated[
    str | None, typer.Argument(metavar="ARTEFACT", help="table1-3, fig1-9, decay-alone, or all.")
]
TierOption = Annotated[
    str | None,
    typer.Option("--tier", help="smoke, quick, short or full.", show_default="smoke"),
]
Seeds = Annotated[
    int | None,
    typer.Option("--seeds", help="Number of runs per cell, with seeds 0, 1, ...", show_default="1"),
]
QueueFile = Annotated[
    Path | None,
    typer.Option(
        "--queue", metavar="FILE", help="Work off a queue instead (docs/reproduction.md)."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="KEY=VALUE", help="Run only these cells; may be repeated."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the plan and an estimate of the time.")
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep-checkpoints",
        help="Keep the models of finished runs, for `decaylab probe` (K-FAC: gigabytes).",
    ),
]


def reproduce_command(
    artefact: Name = None,
    tier: TierOption = None,
    seeds: Seeds = None,
    only: Only = None,
    queue: QueueFile = None,
    max_minutes: options.MaxMinutes = None,
    whole_runs: options.WholeRuns = False,
    dry_run: DryRun = False,
    search: Annotated[
        bool, typer.Option(help="First search the settings of cells that have none (L2 of Fig. 1).")
    ] = True,
    runs: options.Runs = options.RUNS,
    data_dir: options.DataDir = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda or auto; the tier decides the default."),
    ] = None,
    at_once: options.AtOnce = 1,
    processes: options.Processes = 1,
    compiled: options.Compiled = False,
    checkpoint_every: options.CheckpointEvery = 60.0,
    keep_checkpoints: Keep = False,
    engine: Annotated[
        str, typer.Option("--engine", help="Who makes the runs: local, slurm or ray.")
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Processes at a time (local: one per GPU), or jobs at least."
        ),
    ] = None,
    job_minutes: Annotated[
        float, typer.Option("--job-minutes", min=0.01, help="How long a job may be, estimated.")
    ] = 60.0,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="KEY=VALUE", help="An option of Slurm's sbatch."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Slurm: stay, and submit once more what is left.")
    ] = False,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="ID", help="Make only these of the runs; may be repeated."),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Make the runs behind a table or figure of the paper.

    Giving the same command again continues: finished runs are skipped, stopped ones continue,
    failed ones are tried once more and listed. Cells whose settings must be searched first are
    searched. Exit codes: 0 all made, 1 some failed, 75 the time was up with work left.
    """
    if (artefact is None) == (queue is None):
        raise DecaylabError("give an artefact (table1, fig4, all ...) or --queue FILE")
    if queue is not None and (tier or seeds or only or keep_checkpoints):
        raise DecaylabError("the entries of a queue say --tier, --seeds and --only: leave them out")
    tier, seeds = tier or "smoke", 1 if seeds is None else seeds

    def worker_options(*tiers: str) -> WorkerOptions:
        """For runs of these tiers; an error where they would take weeks here."""
        on_digits = all(tier_of(name).on_digits for name in tiers)
        if device is None and not on_digits and not torch.cuda.is_available():
            raise DecaylabError(
                "tiers short and full are for a GPU, and torch sees none: give --tier quick, or"
                " --device cpu to begin all the same"
            )
        return WorkerOptions(
            device=options.chosen_device(device or ("cpu" if on_digits else "auto")),
            data_dir=data_dir,
            seconds=None if max_minutes is None else 60 * max_minutes,
            whole_runs=whole_runs,
            keep_checkpoints=keep_checkpoints,
            checkpoint_every=checkpoint_every,
            at_once=at_once,
            processes=processes,
            compiled=compiled,
        )

    if queue is not None:
        entries = read_queue(queue)
        tiers = [entry.tier for entry in entries if not isinstance(entry, CommandEntry)]
        limits = None if dry_run else worker_options(*tiers)
        _work_off(Queue(entries, runs), limits, json_output)
        return
    store = RunStore(runs)
    chosen = chosen_cells(artefact or "", tier, seeds, only or [], runs)
    planned = plan(chosen, chosen_cells("all", tier, seeds, [], runs), tier=tier)
    if run:
        planned = _only_these(planned, run)
    how = engine_options(engine, jobs, job_minutes, sbatch or [], wait, device == "cpu")
    if not run and not how.in_this_process:
        if max_minutes is not None or whole_runs:
            raise DecaylabError("--max-minutes and --whole-runs are for one process: give --jobs 1")
        words = ["reproduce", artefact or "", "--tier", tier, "--seeds", str(seeds)]
        words += [word for condition in only or [] for word in ("--only", condition)]
        words += ["--runs", str(runs.resolve()), "--at-once", str(at_once)]
        words += [] if data_dir is None else ["--data-dir", str(data_dir.resolve())]
        words += [] if device is None else ["--device", device]
        words += ["--checkpoint-every", f"{checkpoint_every:g}"]
        words += ["--compiled"] * compiled + ["--keep-checkpoints"] * keep_checkpoints
        on_gpus = not tier_of(tier).on_digits and device != "cpu"
        submit(
            planned,
            runs,
            words,
            how,
            gpus=float(on_gpus),
            dry_run=dry_run,
            stream=sys.stderr if json_output else sys.stdout,
        )
        _say_missing({} if dry_run else _missing(chosen))
        return
    if dry_run:
        _print_plan(planned, chosen, store, json_output)
        return
    if tier_of(tier).on_digits:
        torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    stream = sys.stderr if json_output else sys.stdout
    limits = worker_options(tier)
    searches = missing_searches(chosen, tier) if search and not run else []
    ends = None if limits.seconds is None else time.monotonic() + limits.seconds
    for search_plan in searches:
        make_search(search_plan, runs / "searched", _until(limits, ends), stream)
    if searches:
        chosen = chosen_cells(artefact or "", tier, seeds, only or [], runs)
        planned = plan(chosen, chosen_cells("all", tier, seeds, [], runs), tier=tier)
    worker = Worker(planned, store, _until(limits, ends))
    worker.check_data()
    follow(worker, stream)
    _summarise(worker, chosen, tier, json_output)
    _exit(bool(worker.outcome.failed), bool(worker.outcome.left))


def _only_these(planned: list[PlannedRun], ids: list[str]) -> list[PlannedRun]:
    """Some of the planned runs, by id."""
    known = {run.spec.id for run in planned}
    if unknown := [run for run in ids if run not in known]:
        raise DecaylabError(
            f"--run {unknown[0]} is none of these {len(planned)} runs: --dry-run lists them"
        )
    return [run for run in planned if run.spec.id in ids]


def _until(limits: WorkerOptions, ends: float | None) -> WorkerOptions:
    """The options with what is left of their time."""
    if ends is None:
        return limits
    return replace(limits, seconds=max(ends - time.monotonic(), 1e-3))


def _exit(failed: bool, left: bool) -> None:
    """End with an exit code that says whether the same command has something to go on with."""
    if failed or left:
        raise typer.Exit(1 if failed else RUNS_LEFT)


def _work_off(queue: Queue, worker_options: WorkerOptions | None, json_output: bool) -> None:
    """Work off a queue, or (without options) print what is left."""
    if worker_options is None:
        print_queue(queue, json_output)
        return
    failed = work_off(queue, worker_options, sys.stderr if json_output else sys.stdout)
    print_queue(queue, json_output)
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    _exit(bool(failed), any(entry.state == "to do" for entry in queue.standing()))


def _plan_entries(planned: list[PlannedRun], store: RunStore) -> list[dict[str, Any]]:
    """Of each run: what it is for, where it stands, and how long it should take."""
    estimator = Estimator(store)
    entries: list[dict[str, Any]] = []
    for run in planned:
        try:
            state: str = state_of(run, store)
        except DecaylabError as error:
            state = f"unreadable ({error})"
        estimate = estimator.of(run.spec)
        entries.append(
            {
                "run": run.spec.id,
                "artefacts": list(run.purposes),
                "state": {"ready": "to do", "waiting": "to do, after its source"}.get(state, state),
                "seconds": estimate.seconds,
                "recorded": estimate.recorded,
            }
        )
    return entries


def _print_plan(
    planned: list[PlannedRun], chosen: list[Cell], store: RunStore, json_output: bool
) -> None:
    entries = _plan_entries(planned, store)
    to_do = [entry for entry in entries if entry["state"].startswith("to do")]
    left = sum(entry["seconds"] for entry in to_do)
    missing = _missing(chosen)
    if json_output:
        print_json({"runs": entries, "seconds_left": left, "missing": missing})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "for", "state", "estimate"):
        table.add_column(heading, no_wrap=heading == "run")
    for entry in entries:
        mark = "" if entry["recorded"] else " *"
        table.add_row(
            entry["run"],
            " ".join(entry["artefacts"]),
            entry["state"],
            in_words(entry["seconds"]) + mark,
        )
    console(200).print(table)
    done = sum(entry["state"] == "finished" for entry in entries)
    print(
        f"\n{len(chosen)} cells, {len(entries)} runs: {done} done, {len(to_do)} left,"
        f" about {in_words(left)}"
    )
    if any(not entry["recorded"] for entry in entries):
        print("* from a table of step times (H200; digits: one CPU core), not from these records")
    _say_missing(missing)


def _missing(chosen: list[Cell]) -> dict[str, str]:
    return {f"{cell.artefact} {cell.label}": cell.missing for cell in chosen if cell.missing}


def _say_missing(missing: dict[str, str]) -> None:
    if missing:
        print(f"\n{len(missing)} cells without a run yet:")
        for reason in dict.fromkeys(missing.values()):
            print(f"  {reason}")


def _summarise(worker: Worker, chosen: list[Cell], tier: str, json_output: bool) -> None:
    outcome, store = worker.outcome, worker.store
    readings = Readings(store)
    lacking = dict(readings.lacking(chosen))
    filled = sum(bool(cell.runs) and all(map(readings.of, cell.runs)) for cell in chosen)
    missing = _missing(chosen)
    if json_output:
        facts = {
            "cells": len(chosen),
            "cells_filled": filled,
            "lacking_probes": lacking,
            "missing": missing,
            "left_out": readings.left_out,
        }
        print_json(vars(outcome) | facts)
        return
    print(
        f"{filled} of {len(chosen)} cells filled: {len(outcome.finished)} runs made,"
        f" {len(outcome.before)} done before, {len(outcome.left)} left"
    )
    if outcome.out_of_time:
        print("the time is up: give the same command again to continue")
    if outcome.late:
        print(
            f"{len(outcome.late)} of those left were not begun, since they should not have ended in"
            " time (--whole-runs): give more --max-minutes if that stays so"
        )
    for run_id in outcome.elsewhere:
        print(f"another process is working on {run_id}")
    for run_id, reason in outcome.failed.items():
        print(f"failed: {run_id}: {reason}", file=sys.stderr)
    for run_id, probes in lacking.items():
        print(
            f"{run_id} was finished without {', '.join(probes)}: move its folder away to make it"
            " again",
        )
    for note in readings.left_out:
        print(f"left out: {note}", file=sys.stderr)
    _say_missing(missing)
    if filled:
        print(f"`decaylab report --runs {store.root}` shows them beside the paper's")
    if tier == "smoke":
        print("tier smoke only shows that everything runs: --tier quick trains for minutes")
