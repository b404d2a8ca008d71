"""`decaylab reproduce`: the runs behind a table or figure of the paper."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from decaylab.cli import options
from decaylab.cli.output import console, in_words, print_json
from decaylab.errors import DecaylabError
from decaylab.paper import Cell, Readings, artefacts, cells, select, tier_of
from decaylab.paper.estimate import Estimator
from decaylab.paper.plan import PlannedRun, plan, state_of
from decaylab.paper.reproduce import Event, How, Reproduction
from decaylab.records import RunStore

Name = Annotated[
    str, typer.Argument(metavar="ARTEFACT", help="table1-3, fig1-9, decay-alone, or all.")
]
TierOption = Annotated[str, typer.Option("--tier", help="smoke, quick, short or full.")]
Seeds = Annotated[
    int, typer.Option("--seeds", help="Number of runs per cell, with seeds 0, 1, ...")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="KEY=VALUE", help="Run only these cells; may be repeated."),
]
MaxMinutes = Annotated[
    float | None,
    typer.Option(
        "--max-minutes",
        callback=options.positive_minutes,
        help="Stop cleanly after this many minutes.",
    ),
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
    artefact: Name,
    tier: TierOption = "smoke",
    seeds: Seeds = 1,
    only: Only = None,
    max_minutes: MaxMinutes = None,
    whole_runs: options.WholeRuns = False,
    dry_run: DryRun = False,
    runs: options.Runs = options.RUNS,
    data_dir: options.DataDir = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda or auto; the tier decides the default."),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once", min=1, help="Runs that take turns on the device; 2 to 4 suit a GPU."
        ),
    ] = 1,
    processes: options.Processes = 1,
    compiled: options.Compiled = False,
    checkpoint_every: options.CheckpointEvery = 60.0,
    keep_checkpoints: Keep = False,
    json_output: options.Json = False,
) -> None:
    """Make the runs behind a table or figure of the paper.

    Giving the same command again continues: finished runs are skipped, stopped ones continue,
    failed ones are tried once more and listed. Cells that need a search for their settings first
    are listed too.
    """
    store = RunStore(runs)
    chosen = chosen_cells(artefact, tier, seeds, only or [], runs)
    planned = plan(chosen, chosen_cells("all", tier, seeds, [], runs))
    if dry_run:
        _print_plan(planned, chosen, store, json_output)
        return
    if tier_of(tier).on_digits:
        torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    how = How(
        device=options.chosen_device(device or tier_of(tier).device),
        tier=tier,
        data_dir=data_dir,
        seconds=None if max_minutes is None else 60 * max_minutes,
        whole_runs=whole_runs,
        keep_checkpoints=keep_checkpoints,
        checkpoint_every=checkpoint_every,
        at_once=at_once,
        processes=processes,
        compiled=compiled,
    )
    reproduction = Reproduction(planned, store, how)
    reproduction.check_data()
    follow(reproduction, sys.stderr if json_output else sys.stdout)
    _summarise(reproduction, chosen, json_output)
    if reproduction.outcome.failed:
        raise typer.Exit(1)


def chosen_cells(artefact: str, tier: str, seeds: int, only: list[str], runs: Path) -> list[Cell]:
    """The cells of an artefact, or of all, that match every condition."""
    tier_of(tier)
    names = list(artefacts()) if artefact == "all" else [artefact]
    found = [
        c for name in names for c in cells(name, tier, seeds, searched_folder=runs / "searched")
    ]
    return select(found, only)


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
                "artefacts": list(run.artefacts),
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


def follow(reproduction: Reproduction, stream: TextIO) -> None:
    """Make the runs: a live table on a terminal, else a line for each that ends."""
    total = len(reproduction.planned)
    if not stream.isatty():
        for event in reproduction.run():
            if event.kind in ("finished", "failed", "retried"):
                made = len(reproduction.outcome.finished) + len(reproduction.outcome.before)
                print(f"{made}/{total} {_line(event)}", file=stream, flush=True)
        return
    board = _Board(reproduction)
    with Live(board.table(), console=Console(file=stream), refresh_per_second=4) as live:
        for event in reproduction.run():
            board.note(event)
            if event.kind in ("failed", "retried"):
                live.console.print(_line(event), highlight=False, soft_wrap=True)
            live.update(board.table())


def _line(event: Event) -> str:
    run_id = event.run.spec.id
    if event.progress is None:
        again = "failed, trying once more" if event.kind == "retried" else "failed"
        return f"{run_id} {again}: {event.message}"
    values = event.progress.values
    return (
        f"{run_id} seed {event.run.spec.seed}: test accuracy {100 * values['test/accuracy']:.2f} %,"
        f" train loss {values['train/loss']:.3g}, {in_words(event.progress.seconds)}"
    )


class _Board:
    """Done, running, left and the time left, as a small table."""

    def __init__(self, reproduction: Reproduction) -> None:
        self._reproduction, self._estimator = reproduction, Estimator(reproduction.store)
        self._begun = time.monotonic()
        self._spent = 0.0  # estimated seconds of what was made since then
        self._event: Event | None = None

    def note(self, event: Event) -> None:
        self._event = event
        if event.kind == "finished":
            self._spent += self._estimator.of(event.run.spec).seconds

    def table(self) -> Table:
        outcome = self._reproduction.outcome
        ended = {*outcome.finished, *outcome.before, *outcome.failed, *outcome.elsewhere}
        left = [run.spec for run in self._reproduction.planned if run.spec.id not in ended]
        seconds = self._estimator.total(left)
        if self._spent > 0:  # this machine against the estimates
            seconds *= (time.monotonic() - self._begun) / self._spent
        running = ""
        if self._event is not None and self._event.kind in ("begun", "epoch"):
            at = self._event.progress
            running = self._event.run.spec.id + (f"  epoch {at.epoch}/{at.epochs}" if at else "")
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row("done", f"{len(outcome.finished) + len(outcome.before)}")
        table.add_row("running", running)
        table.add_row("left", f"{len(left)}, about {in_words(seconds)}")
        if outcome.failed:
            table.add_row("failed", str(len(outcome.failed)))
        return table


def _summarise(reproduction: Reproduction, chosen: list[Cell], json_output: bool) -> None:
    outcome, store = reproduction.outcome, reproduction.store
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
    if reproduction.how.tier == "smoke":
        print("tier smoke only shows that everything runs: --tier quick trains for minutes")
