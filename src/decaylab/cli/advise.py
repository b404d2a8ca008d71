"""`decaylab advise`: a decay from measured dynamics, one decay in other words, a schedule."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from decaylab.cli import options
from decaylab.cli.diagnose import found_records
from decaylab.cli.output import console, print_json
from decaylab.diagnosis import Stepping, Suggestion, convert_decay, equivalent_schedule, suggest
from decaylab.diagnosis.observed import observe
from decaylab.optim.decay import OPTIMIZERS
from decaylab.paper.settings import decay_kind

app = typer.Typer(help="Choose, convert or replace weight decay.", no_args_is_help=True)

Rotation = Annotated[
    float | None, typer.Option("--rotation", help="Turn the weights by this many radians per step.")
]
NormAt = Annotated[
    int | None, typer.Option("--norm-at", help="Keep the norms of this step instead of the first.")
]
LEGEND = """\
norm: in the records used; target: the norm that the suggested decay holds; balance: the norm to
which the present decay leads; rotation: radians per step at the target; steps: until it is reached
"""
OPTIMIZER_HELP = f"{', '.join(OPTIMIZERS)}."


@app.command("suggest")
def suggest_command(
    run: options.Run,
    rotation: Rotation = None,
    norm_at: NormAt = None,
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
) -> None:
    """Suggest a weight decay for a run's scale-invariant layers, from how their norms changed.

    The suggested decay keeps each layer at the norm it started with, so its effective learning
    rate stays the same. Use --norm-at or --rotation to ask for something else.
    """
    source = found_records(run, runs)
    found = suggest(source, rotation=rotation, norm_at=norm_at)
    if json_output:
        print_json(found.as_dict())
        return
    for note in found.notes:
        print(note)
    console(140).print(_table(found))
    if not any(row.suggested for row in found.layers):
        return
    print(LEGEND)
    if found.weight_decay is None:
        return
    print(
        f"suggested for the scale-invariant layers: {found.decay} weight decay of"
        f" {found.weight_decay:.3g} at lr {found.lr:g}"
    )
    waits, steps = [row.steps for row in found.layers if row.steps], observe(source).steps
    if waits and min(waits) > steps:
        print(
            f"note: this decay needs {min(waits):.3g} steps or more to take effect, and the run"
            f" had {steps}"
        )


@app.command("convert")
def convert_command(
    weight_decay: Annotated[float, typer.Argument(help="The weight decay to convert.")],
    source: Annotated[str, typer.Option("--from", help=OPTIMIZER_HELP)],
    source_lr: Annotated[float, typer.Option("--from-lr", help="Learning rate of --from.")],
    target: Annotated[str, typer.Option("--to", help=OPTIMIZER_HELP)],
    target_lr: Annotated[float, typer.Option("--to-lr", help="Learning rate of --to.")],
    source_decay: Annotated[
        str, typer.Option("--from-decay", help="Its kind: l2, decoupled or independent.")
    ] = "",
    target_decay: Annotated[
        str, typer.Option("--to-decay", help="Its kind: l2, decoupled or independent.")
    ] = "",
    source_momentum: Annotated[
        float, typer.Option("--from-momentum", help="Momentum of --from (Adam: beta1).")
    ] = 0.9,
    target_momentum: Annotated[
        float, typer.Option("--to-momentum", help="Momentum of --to (Adam: beta1).")
    ] = 0.9,
    json_output: options.Json = False,
) -> None:
    """Convert a weight decay to another optimizer or kind, keeping the effective learning rate.

    The kinds are l2 (added to the gradient, as in torch's SGD), decoupled (beside the step, times
    lr, as in AdamW) and independent (beside the step, whatever the lr). The default is l2 for sgd
    and decoupled for the others.
    """
    first = Stepping(source, source_lr, source_decay or decay_kind(source), source_momentum)
    second = Stepping(target, target_lr, target_decay or decay_kind(target), target_momentum)
    found = convert_decay(weight_decay, first, second)
    if json_output:
        print_json(asdict(found))
        return
    print(f"{_named(weight_decay, first)} = {_named(found.weight_decay, second)}")
    if not found.shrink:
        return
    print(
        f"both remove the fraction {found.shrink:.3g} of the weights per step, so decay needs about"
        f" {found.steps:.4g} steps to take effect"
    )
    print(
        f"at equilibrium the weights turn by {found.rotations[0]:.3g} radians per step under"
        f" {source} and by {found.rotations[1]:.3g} under {target}"
    )
    if any(OPTIMIZERS[of.optimizer] == "kfac" for of in (first, second)):
        print(
            "note: K-FAC has this equilibrium through its damping. Where that hardly matters, how"
            " far its weights turn does not depend on the decay"
        )


def _named(weight_decay: float, of: Stepping) -> str:
    beta = "beta1" if OPTIMIZERS[of.optimizer] == "adam" else "momentum"
    at = f"lr {of.lr:g}, {beta} {of.momentum:g}"
    return f"{of.decay} weight decay {weight_decay:.6g} of {of.optimizer} ({at})"


@app.command("schedule")
def schedule_command(
    run: options.Run,
    out: Annotated[Path, typer.Option("--out", help="File to write, .csv or .toml.")],
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
) -> None:
    """Write a learning-rate schedule that replaces a run's weight decay.

    The file has, for each step, lr for the scale-invariant layers, lr_others for all other
    parameters and, for K-FAC, the damping. In Python, pass
    decaylab.diagnosis.EquivalentSchedule.from_csv(...).lambdas() to torch's LambdaLR.
    """
    source = found_records(run, runs)
    observed = observe(source)
    for trouble in observed.troubles:
        print(f"{run}: {trouble}", file=sys.stderr)
    if observed.spec is not None and observed.spec.optimizer == "kfac-f":
        print(
            f"{run}: the Fisher matrix shrinks as the network fits the data, so this schedule is"
            " not reliable for K-FAC-F (docs/diagnosis.md)",
            file=sys.stderr,
        )
    schedule = equivalent_schedule(source)
    schedule.save(out)
    facts = {
        "file": str(out),
        "layers": list(schedule.layers),
        "steps": len(schedule.lr),
        "first_lr": schedule.lr[0],
        "last_lr": schedule.lr[-1],
        "last_lr_with_decay": schedule.others[-1],
    }
    if json_output:
        print_json(facts)
        return
    count = len(schedule.layers)
    layers = f"{count} scale-invariant layer{'s' * (count != 1)}"
    print(
        f"{out}: {len(schedule.lr)} steps. Without decay, lr goes from {schedule.lr[0]:.3g} to"
        f" {schedule.lr[-1]:.3g} for {layers}; for all other parameters it stays"
        f" ({schedule.others[0]:.3g} to {schedule.others[-1]:.3g})"
    )


def _table(found: Suggestion) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    headings = ("decay", "suggested", "norm", "target", "balance", "rotation", "steps")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in found.layers:
        numbers = (
            *(row.weight_decay, row.suggested, row.norm, row.target),
            *(row.equilibrium, row.rotation, row.steps),
        )
        cells = ["-" if value is None else f"{value:.3g}" for value in numbers]
        table.add_row(escape(row.layer), *cells, escape(row.reason))
    return table
