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
from decaylab.diagnosis import (
    Stepping,
    Suggestion,
    convert_decay,
    equivalent_schedule,
    scale_decay,
    suggest,
    words,
)
from decaylab.diagnosis.runs import read_run
from decaylab.errors import DecaylabError
from decaylab.optim.laws import OPTIMIZER_NAMES, law_named

app = typer.Typer(help="Choose, convert or replace weight decay.", no_args_is_help=True)

Rotation = Annotated[
    float | None, typer.Option("--rotation", help="Turn the weights by this many radians per step.")
]
NormAt = Annotated[
    int | None, typer.Option("--norm-at", help="Keep the norms of this step instead of the first.")
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Act within so many steps (the run's own, else).")
]
LEGEND = """\
norm: in the records used; leads to: the norm that the suggested decay leads to; balance: the norm
to which the present decay leads; turns: radians per step there; steps: until it is reached
"""
OPTIMIZER_HELP = f"{', '.join(OPTIMIZER_NAMES)}."
RULES_HELP = {
    "epochs": "the averaging time in epochs stays (Wang and Aitchison 2024, arXiv:2405.13698;"
    " checked there on ResNets, ViTs and GPTs under AdamW)",
    "run": "the averaging time stays the same part of the run (Bergsma et al. 2025, Power Lines,"
    " arXiv:2505.13738; checked there on language models at one ratio of tokens to parameters)",
    "rotation": "the angle per root of the batch stays (after Kosson et al. 2024,"
    " arXiv:2305.17212; the equilibrium is checked in tests/optim/test_laws.py)",
}


@app.command("suggest")
def suggest_command(
    run: options.Run,
    rotation: Rotation = None,
    norm_at: NormAt = None,
    steps: Steps = None,
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
) -> None:
    """Suggest a weight decay that acts within the budget, from how a run's norms changed.

    It keeps each layer at the norm it started with where that takes no more than the budget, so
    that its effective learning rate stays the same; else it is the weakest decay that acts within
    it. Use --norm-at or --rotation to ask for something else.
    """
    source = found_records(run, runs)
    found = suggest(source, rotation=rotation, norm_at=norm_at, steps=steps)
    if json_output:
        print_json(found.as_dict())
        return
    for note in found.notes:
        print(words.sentence(note))
    console(110).print(_table(found))
    if not found.groups:
        return
    print(LEGEND)
    for group in found.groups:
        low, high = group.spread
        spread = f" ({low:.3g} to {high:.3g} over layers)" if low != high else ""
        who = f"{group.optimizer}: " if group.optimizer else ""
        print(
            f"suggested for {words.names(group.layers)}: {who}{group.decay} weight decay of"
            f" {group.weight_decay:.3g}{spread} at lr {group.lr:.3g}, to act within"
            f" {found.budget} steps"
        )


@app.command("scale")
def scale_command(
    weight_decay: Annotated[float, typer.Argument(help="AdamW's weight decay now.")],
    lr: Annotated[float, typer.Option("--lr", help="Its learning rate now.")],
    batch: Annotated[
        str, typer.Option("--batch", metavar="FROM:TO", help="Batch size, as in 64:256.")
    ] = "1:1",
    steps: Annotated[
        str, typer.Option("--steps", metavar="FROM:TO", help="Steps of the run.")
    ] = "1:1",
    width: Annotated[
        str, typer.Option("--width", metavar="FROM:TO", help="Width; lr follows muP, lr / width.")
    ] = "1:1",
    json_output: options.Json = False,
) -> None:
    """Scale AdamW's decay to another batch size, length or width, by the rules that there are."""
    factors = {"batch": _factor(batch), "steps": _factor(steps), "width": _factor(width)}
    found = scale_decay(weight_decay, lr, **factors)
    if json_output:
        print_json([asdict(rule) for rule in found])
        return
    for rule in found:
        now, there = rule.timescales
        print(
            f"{rule.rule}: weight decay {rule.weight_decay:.4g} at lr {rule.lr:.4g} (averages over"
            f" {there:.4g} steps, {now:.4g} before)"
        )
        print(f"  {RULES_HELP[rule.rule]}")


def _factor(pair: str) -> float:
    before, _, after = pair.partition(":")
    try:
        return float(after) / float(before)
    except (ValueError, ZeroDivisionError) as error:
        raise DecaylabError(f"{pair!r} is no change: give FROM:TO, as in 64:256") from error


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
        float | None, typer.Option("--from-momentum", help="Momentum of --from (Adam: beta1).")
    ] = None,
    target_momentum: Annotated[
        float | None, typer.Option("--to-momentum", help="Momentum of --to (Adam: beta1).")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Convert a weight decay to another optimizer or kind, keeping the effective learning rate.

    The kinds are l2 (added to the gradient, as in torch's SGD), decoupled (beside the step, times
    lr, as in AdamW) and independent (beside the step, whatever the lr). The default is l2 for sgd
    and decoupled for the others.
    """
    first = Stepping(source, source_lr, source_decay or _kind(source), source_momentum)
    second = Stepping(target, target_lr, target_decay or _kind(target), target_momentum)
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
    before, after = found.rotations
    if before is not None and after is not None:
        print(
            f"at equilibrium the weights turn by {before:.3g} radians per step under {source} and"
            f" by {after:.3g} under {target}"
        )
    if any(stepping.law.name == "kfac" for stepping in (first, second)):
        print(
            "note: K-FAC has this equilibrium through its damping. Where that hardly matters, how"
            " far its weights turn does not depend on the decay"
        )


def _kind(optimizer: str) -> str:
    return "l2" if law_named(optimizer).sums_l2 else "decoupled"


def _named(weight_decay: float, stepping: Stepping) -> str:
    law = stepping.law
    memory = {name: getattr(law, name) for name in ("momentum", "beta1") if hasattr(law, name)}
    said = "".join(f", {name} {value:g}" for name, value in memory.items())
    return (
        f"{stepping.decay} weight decay {weight_decay:.6g} of {stepping.optimizer} (lr"
        f" {stepping.lr:g}{said})"
    )


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
    read = read_run(source)
    for trouble in read.troubles:
        print(f"{run}: {words.sentence(trouble)}", file=sys.stderr)
    fisher = [x for x in read.layers.values() if x.settings and x.first.curvature == "fisher"]
    if fisher:
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
    headings = ("decay", "suggested", "norm", "leads to", "balance", "turns", "steps")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in found.layers:
        numbers = (
            *(row.weight_decay, row.suggested, row.norm, row.target),
            *(row.equilibrium, row.rotation, row.steps),
        )
        cells = ["-" if value is None else f"{value:.3g}" for value in numbers]
        table.add_row(escape(row.layer), *cells, escape(words.note_texts(row.notes)))
    return table
