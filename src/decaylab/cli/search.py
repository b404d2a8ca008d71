"""`decaylab search`: learning rate, weight decay and other settings by held-out accuracy."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer

from decaylab.cli import options
from decaylab.cli.board import follow
from decaylab.cli.options import option
from decaylab.cli.sweep import EngineOptions, Work, submit
from decaylab.cli.terminal import say
from decaylab.errors import AT_LEAST_ONE, RUNS_LEFT, BadValue, DecaylabError
from decaylab.paper import artefacts, cells
from decaylab.paper.searches import cell_plan, default_space, search_probe
from decaylab.records import RunStore
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.search import (
    Search,
    SearchPlan,
    first_specs,
    made_and_left,
    on_all_images,
    on_edge,
)
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.training import RunSpec

Cell = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="The cell of Table 1: dataset, network, batch_norm, ..."
    ),
]
Config = Annotated[
    Path | None, option("--config", "Search around your own spec instead.", metavar="FILE")
]
Values = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Values to try; for tpe, the range.")
]


@options.spread
def search_command(
    cell: Cell = None,
    config: Config = None,
    scheme: Annotated[str, option("--scheme", "Kind of decay: l2, wd or none.")] = "l2",
    tier: Annotated[str, option("--tier", "smoke, quick, short or full.")] = "quick",
    method: Annotated[
        str, option("--method", "grid, lines (decays, then the rest) or tpe (Optuna).")
    ] = "grid",
    trials: Annotated[
        int,
        option(
            "--trials", "For tpe: number of trials, including recorded ones.", allowed=AT_LEAST_ONE
        ),
    ] = 30,
    lr: Values = None,
    weight_decay: Values = None,
    damping: Values = None,
    kl_clip: Values = None,
    widen: Annotated[
        bool, typer.Option(help="Try more values while the best of a grid is at its edge.")
    ] = True,
    retrain: Annotated[
        bool, option("--retrain", "Finally train the winner on all training images.")
    ] = False,
    *,
    training: options.TrainingOptions,
    engine: EngineOptions,
) -> None:
    """Search for the best settings of a cell or a spec, by accuracy on held-out training images.

    Cells with constant_lr=1 (Fig. 9) are searched by their training loss after ten epochs.

    Running the same command again resumes a stopped search; several processes may share one search.
    The winner is stored in RUNS/searched, where `reproduce` finds it, and as a spec for
    `train`, unless a better one is there already. Exit code 75: time ran out with runs left.
    """
    if (config is None) == (not cell):
        raise DecaylabError(
            "give a cell (dataset=cifar10 network=vgg16 batch_norm=0 augment=0 optimizer=adam) or"
            " --config FILE, not both"
        )
    ranges = {"lr": lr, "weight_decay": weight_decay, "damping": damping, "kl_clip": kl_clip}
    space = {name: _numbers(name, text) for name, text in ranges.items() if text is not None}
    limits: dict[str, Any] = {"method": method, "trials": trials, "widen": widen}
    if config is None:
        plan = cell_plan(cell or [], scheme, tier, space, **limits)
    else:
        spec = RunSpec.from_file(config)
        space = default_space(spec, "own") | space
        plan = SearchPlan(name=f"search-{spec.id}", base=spec, space=space, **limits)
    runs, on_digits = training.runs, plan.base.data == "digits"
    if engine.dry_run or not engine.in_this_process(training):
        words = ["search", *(cell or ["--config", str(config)])]
        words += options.flags(scheme=scheme, tier=tier, method=method, trials=trials)
        words += ["--widen" if widen else "--no-widen", *options.flags(**ranges)]

        def planned_runs(specs: list[RunSpec]) -> list[PlannedRun]:
            return [PlannedRun(s, purposes=("search",), tier=plan.tier) for s in specs]

        def left() -> list[PlannedRun]:
            return planned_runs(made_and_left(plan, runs / "searched")[1])

        planned = planned_runs(first_specs(plan))
        work = Work(words, planned, "searched/runs", shared=True, left=left)
        submit(work, training, engine, digits=on_digits, stream=sys.stdout)
        if engine.leaves:
            return
    if on_digits:
        torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    worker_options = training.worker_options(training.device_for(digits=on_digits))
    best = make_search(plan, runs / "searched", worker_options, sys.stdout)
    if best is None:
        raise typer.Exit(RUNS_LEFT)
    if retrain:
        planned = [PlannedRun(best, purposes=("search",), tier=plan.tier)]
        worker = Worker(planned, RunStore(runs), replace(worker_options, keep_checkpoints=True))
        follow(worker, sys.stdout)
        for reason in worker.outcome.failed.values():
            raise DecaylabError(reason)
        accuracy = RunStore(runs).folder(best.id).rows().last("test/accuracy") or 0.0
        say(f"{best.id}: test accuracy {100 * accuracy:.2f} %")


def make_search(
    plan: SearchPlan, folder: Path, worker_options: WorkerOptions, stream: TextIO
) -> RunSpec | None:
    """A search's runs, then its winner; None if runs are left, for the same command to go on."""
    left = worker_options.running_out()
    search = Search(plan, folder, worker_options, search_probe(plan))
    for worker in search.rounds():
        worker.options = replace(worker.options, seconds=left().seconds)
        worker.check_data()
        follow(worker, stream)
        ended = sum(trial.ended for trial in search.trials())
        say(f"{ended} runs of {plan.name} recorded", stream=stream)
        for run, reason in worker.outcome.failed.items():
            say(f"{run}: {reason}", stream=stream)
    winner = search.winner()
    if winner is None:
        return None
    standing = search.write_winner(winner)
    words = ", ".join(f"{name} {value:g}" for name, value in standing.values.items())
    say(f"winner: {words}\nas a spec: {folder / plan.name / 'winner.toml'}", stream=stream)
    if standing.values != winner.values:
        say("an earlier search found it, and it is better than what was tried now")
    best = on_all_images(plan, standing.values)
    if plan.cell is not None:
        say(_use(plan, plan.cell["scheme"], folder, best), stream=stream)
    edges = on_edge(standing.values, standing.tried)
    if edges:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in edges)
        remedy = f"try {flags} beyond it"
        if plan.method == "tpe":  # its values are drawn from a range, mostly inside
            remedy = f"give more --trials, or {flags} with a wider range"
        say(f"on the edge of what was tried: {', '.join(edges)} ({remedy})", stream=stream)
    return best


def _use(plan: SearchPlan, scheme: str, folder: Path, best: RunSpec) -> str:
    """What `reproduce` makes of a cell's winner: the tables and figures that have it as a run."""
    used = []
    for name in artefacts():
        cells_of_artefact = cells(name, plan.tier, searched_folder=folder)
        specs = [spec for cell in cells_of_artefact for spec in (*cell.runs, *cell.searched_runs)]
        if plan.cell and plan.cell.get("constant_lr"):  # searched in its first epochs alone
            epochs = best.epochs
            constant = [spec for spec in specs if spec.lr_drop_every == spec.epochs]
            specs = [replace(spec, epochs=epochs, lr_drop_every=epochs) for spec in constant]
        if best.id in {spec.id for spec in specs}:
            used.append(name)
    if used:
        return f"at tier {plan.tier}, `reproduce` uses it in {', '.join(used)}"
    return f"`reproduce` does not use it: no table or figure has this cell with scheme {scheme}"


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        option = name.replace("_", "-")
        raise BadValue(f"--{option}", text, "a list of numbers such as 0.1,1") from None
