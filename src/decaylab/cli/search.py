"""`decaylab search`: learning rate, weight decay and damping by held-out accuracy."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from decaylab.cli import options
from decaylab.cli.board import follow
from decaylab.data import load
from decaylab.errors import DecaylabError
from decaylab.paper import artefacts, cells, tier_of
from decaylab.paper.grid import first_line, points, second_line, winner
from decaylab.paper.plan import PlannedRun
from decaylab.paper.reproduce import How, Reproduction
from decaylab.paper.search import (
    ACCURACY,
    MOST_WIDENINGS,
    Search,
    SearchPlan,
    Trial,
    Winner,
    default_space,
    grid_specs,
    on_all_images,
    widened,
    write_winner,
)
from decaylab.paper.settings import ROW, on_edge
from decaylab.paper.suite import searched_cell, spec_for
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, train_to_end

Cell = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="The cell of Table 1: dataset, network, batch_norm, ..."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Search around your own spec instead."),
]
Values = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Values to try; for tpe, the range.")
]


def search_command(
    cell: Cell = None,
    config: Config = None,
    scheme: Annotated[str, typer.Option("--scheme", help="Kind of decay: l2, wd or none.")] = "l2",
    tier: Annotated[str, typer.Option("--tier", help="smoke, quick, short or full.")] = "quick",
    method: Annotated[
        str, typer.Option("--method", help="grid, lines (--runs-only) or tpe.")
    ] = "grid",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials, for tpe.")] = 30,
    lr: Values = None,
    weight_decay: Values = None,
    damping: Values = None,
    runs_only: Annotated[
        bool,
        typer.Option(
            "--runs-only",
            help="Search without Optuna: no pruning, and the winner is read from the runs.",
        ),
    ] = False,
    widen: Annotated[
        bool,
        typer.Option(
            help="Try more values while the best is at the edge (--no-widen: with --runs-only)."
        ),
    ] = True,
    at_once: Annotated[
        int, typer.Option(min=1, help="With --runs-only: this many take turns.")
    ] = 1,
    processes: options.Processes = 1,
    compiled: options.Compiled = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            callback=options.positive_minutes,
            help="With --runs-only: stop cleanly after this many minutes.",
        ),
    ] = None,
    whole_runs: options.WholeRuns = False,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Finally train the winner on all training images.")
    ] = False,
    runs: options.Runs = options.RUNS,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
) -> None:
    """Search for the best settings of a cell or a spec, by accuracy on held-out training images.

    Cells with constant_lr=1 (Fig. 9) are searched by their training loss.

    Uses Optuna unless --runs-only is given. Giving the same command again continues a search that
    was stopped. The winner is stored in RUNS/searched, where `reproduce` finds it, and as a spec
    for `train`.
    """
    if (config is None) == (not cell):
        raise DecaylabError(
            "give a cell (dataset=cifar10 network=vgg16 batch_norm=0 augment=0 optimizer=adam) or"
            " --config FILE, not both"
        )
    given = {"lr": lr, "weight_decay": weight_decay, "damping": damping}
    space = {name: _numbers(name, text) for name, text in given.items() if text is not None}
    limits: dict[str, Any] = {"method": method, "trials": trials}
    if config is None:
        plan = cell_plan(cell or [], scheme, tier, space, limits)
    else:
        plan = _of_file(config, space, limits)
    of_runs = {
        "--no-widen": not widen,
        "--at-once": at_once > 1,
        "--processes": processes > 1,
        "--max-minutes": max_minutes is not None,
        "--whole-runs": whole_runs,
    }
    _check_options(plan, runs_only, [option for option, given in of_runs.items() if given])
    if plan.base.data == "digits":
        torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
        device = "cpu" if device == "auto" else device
    where = options.chosen_device(device)
    folder = runs / "searched"
    if runs_only:
        how = How(
            device=where,
            tier=plan.tier,
            data_dir=data_dir,
            seconds=None if max_minutes is None else 60 * max_minutes,
            whole_runs=whole_runs,
            at_once=at_once,
            processes=processes,
            compiled=compiled,
        )
        best = make_runs(plan, folder, how, widen=widen)
    else:
        images = load(plan.base.data, data_dir).to(where)
        search = Search(plan, folder, images, where, compiled=compiled)
        for trial in search.run():
            print(_line(trial), flush=True)
        best = _say_winner(plan, folder, search.found())
    if retrain and best is not None:
        data = load(plan.base.data, data_dir).to(where)
        execution = Execution(tier=plan.tier, compiled=compiled)
        last = train_to_end(
            best, data=data, device=where, store=RunStore(runs), execution=execution
        )
        print(f"{best.id}: test accuracy {100 * last.values['test/accuracy']:.2f} %")


def _check_options(plan: SearchPlan, runs_only: bool, of_runs: list[str]) -> None:
    if plan.method == "lines" and not runs_only:
        raise DecaylabError("--method lines needs --runs-only: Optuna makes grids and TPE")
    if plan.method == "tpe" and runs_only:
        raise DecaylabError("--method tpe is Optuna's: leave --runs-only out, or take lines")
    if of_runs and not runs_only:
        raise DecaylabError(
            f"{of_runs[0]} needs --runs-only: Optuna makes one trial after the other, to the end,"
            " and widens its grids"
        )


def make_runs(plan: SearchPlan, folder: Path, how: How, *, widen: bool) -> RunSpec | None:
    """The search's runs, then the winner. None where runs are left: the same command goes on."""
    store = RunStore(folder / "runs")
    until = None if how.seconds is None else time.monotonic() + how.seconds
    most = MOST_WIDENINGS if widen else 0
    grids: list[SearchPlan] = []

    def searched(grid: SearchPlan) -> bool:
        """Make a grid, wider while the best lies on its edge; False where runs are left."""
        grids.append(grid)
        for widenings in range(most + 1):
            seconds = None if until is None else max(until - time.monotonic(), 1e-3)
            if not _make_grid(grids[-1], store, replace(how, seconds=seconds)):
                return False
            wider = widened(grids[-1], winner(grids, store)) if widenings < most else None
            if wider is None:
                break
            grids[-1] = wider
        return True

    if not searched(first_line(plan) if plan.method == "lines" else plan):
        return None
    if plan.method == "lines":
        decay = winner(grids, store).values["weight_decay"]
        if not searched(second_line(plan, decay)):
            return None
    found = winner(grids, store)
    devices = [point.device for grid in grids for point in points(grid, store)]
    write_winner(plan, folder, found, ", ".join(dict.fromkeys(devices)))
    return _say_winner(plan, folder, found)


def _make_grid(grid: SearchPlan, store: RunStore, how: How) -> bool:
    """Make the runs of a grid; False where some are left."""
    planned = [PlannedRun(spec, (), ("search",)) for spec in grid_specs(grid)]
    reproduction = Reproduction(planned, store, how)
    reproduction.check_data()
    follow(reproduction, sys.stdout)
    ended = points(grid, store)
    print(f"{len(ended)} of {len(planned)} runs made")
    for run, reason in reproduction.outcome.failed.items():
        print(f"{run}: {reason}")
    return len(ended) == len(planned)


def _say_winner(plan: SearchPlan, folder: Path, found: Winner) -> RunSpec:
    """Say what was found, and what to know of it; the winner as a spec."""
    said = ", ".join(f"{name} {found.values[name]:g}" for name in plan.space)
    print(f"winner: {said}\nas a spec: {folder / plan.name / 'winner.toml'}")
    best = on_all_images(plan, found.values)
    if plan.cell is not None:
        print(_use(plan, plan.cell["scheme"], folder, best))
    edges = on_edge(found.values, found.tried)
    if edges:
        options_of = ", ".join(f"--{name.replace('_', '-')}" for name in edges)
        remedy = f"give {options_of} beyond it"
        if plan.method == "tpe":  # its values are drawn from a range, mostly inside
            remedy = f"give more --trials, or {options_of} with a wider range"
        print(f"on the edge of what was tried: {', '.join(edges)} ({remedy})")
    return best


def _use(plan: SearchPlan, scheme: str, folder: Path, best: RunSpec) -> str:
    """What `reproduce` makes of a cell's winner: the tables and figures that have it as a run."""
    used = []
    for name in artefacts():
        found = cells(name, plan.tier, searched_folder=folder)
        if best.id in {spec.id for cell in found for spec in (*cell.runs, *cell.own)}:
            used.append(name)
    if used:
        return f"at tier {plan.tier}, `reproduce` uses it in {', '.join(used)}"
    return f"`reproduce` does not use it: no table or figure has this cell with scheme {scheme}"


def cell_plan(
    conditions: list[str], scheme: str, tier: str, space: dict[str, Any], limits: dict[str, Any]
) -> SearchPlan:
    """The search of a cell of Table 1, given as key=value."""
    if scheme not in ("l2", "wd", "none"):
        raise DecaylabError(
            f"scheme {scheme!r} cannot be searched: choose l2, wd or none, or give a spec with"
            " its decay by --config"
        )
    size, key = tier_of(tier), _key(conditions)
    spec = spec_for(key, scheme, tier)
    where = searched_cell(key, size)
    where = {**{name: where[name] for name in ROW}, "batch_size": key.get("batch_size", 128)}
    constant = bool(key.get("constant_lr"))  # Fig. 9, which is about training loss
    words = [tier, where["dataset"], where["network"]]
    words += [name for name in ("batch_norm", "augment") if int(where[name])]
    words += [where["optimizer"], scheme]
    words += [str(key["batch_size"])] if "batch_size" in key else []
    words += ["constant_lr"] if constant else []
    return SearchPlan(
        name="-".join(words),
        base=spec,
        space=default_space(spec, scheme, size.on_digits) | space,
        cell={**where, "scheme": scheme} | ({"constant_lr": 1} if constant else {}),
        tier=tier,
        by="train/running_loss" if constant else ACCURACY,
        **limits,
    )


def _key(conditions: list[str]) -> dict[str, Any]:
    """The columns of a cell, from key=value."""
    key: dict[str, Any] = {}
    known = (*ROW, "batch_size", "constant_lr")
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals or name not in known:
            raise DecaylabError(
                f"{condition!r} is not key=value with a known key: {', '.join(known)}"
            )
        key[name] = int(value) if value.isdecimal() else value
    if key.get("constant_lr", 0) not in (0, 1):
        raise DecaylabError(f"constant_lr must be 0 or 1, not {key['constant_lr']!r}")
    if missing := [name for name in ROW if name not in key]:
        raise DecaylabError(f"the cell lacks {', '.join(missing)}: give {missing[0]}=...")
    return key


def _of_file(config: Path, space: dict[str, Any], limits: dict[str, Any]) -> SearchPlan:
    spec = RunSpec.from_file(config)
    found = default_space(spec, "own") | space
    return SearchPlan(name=f"search-{spec.id}", base=spec, space=found, **limits)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        option = name.replace("_", "-")
        raise DecaylabError(f"--{option} {text!r} is no list of numbers such as 0.1,1") from None


def _line(trial: Trial) -> str:
    values = " ".join(f"{name}={value:g}" for name, value in trial.values.items())
    accuracy = "" if trial.accuracy is None else f": {100 * trial.accuracy:.2f} %"
    return f"trial {trial.number} {values} {trial.state}{accuracy}"
