"""`decaylab advise`: a decay from measured dynamics, converted or scaled decays, a schedule."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from decaylab.cli import options
from decaylab.cli.diagnose import found_records
from decaylab.cli.options import option
from decaylab.cli.terminal import print_json, say, show, warn
from decaylab.diagnosis import (
    Stepping,
    Suggestion,
    convert_decay,
    equivalent_schedule,
    scale_decay,
    suggest,
)
from decaylab.diagnosis.advice import tokens_per_parameter
from decaylab.diagnosis.runs import read_run
from decaylab.diagnosis.words.advice import group_text, note_texts, steps_to_act
from decaylab.diagnosis.words.phrases import three_digits, times
from decaylab.diagnosis.words.reasons import sentence
from decaylab.errors import BadValue
from decaylab.optim.laws import OPTIMIZER_NAMES, law_named
from decaylab.text_table import Column, TextTable

app = typer.Typer(help="Choose, convert or replace weight decay.", no_args_is_help=True)

Rotation = Annotated[
    float | None, option("--rotation", "Turn the weights by this many radians per step.")
]
NormAt = Annotated[
    int | None, option("--norm-at", "Keep the norms of this step instead of the first.")
]
Steps = Annotated[
    int | None, option("--steps", "Act within this many steps; by default the run's own.")
]
LEGEND = (
    "norm: now, in the records used; leads to: the norm that the suggested decay leads to; balance:"
    " the norm that the present decay leads to; turns: radians per step at balance; steps: how many"
    " the suggested decay needs to act\n"
)
OPTIMIZER_HELP = f"{', '.join(OPTIMIZER_NAMES)}."
RULES_HELP = {
    "epochs": "the averaging time 1/(lr x decay) stays the same in epochs (Wang and Aitchison, ICML"
    " 2025, arXiv:2405.13698; checked there for AdamW on ResNet-18, ViTs and a NanoGPT)",
    "run": "the averaging time stays the same fraction of the run (Bergsma et al., NeurIPS 2025,"
    " Power Lines, arXiv:2505.13738; checked there for AdamW on language models, for other batch"
    " sizes at the same number of parameters and tokens)",
    "rotation": "the angle per step, over the root of the batch size, stays the same (equilibrium:"
    " Kosson et al., ICML 2024, arXiv:2305.17212, and tests/optim/test_laws.py; the root of the"
    " batch size follows for independent gradients and is not checked on a task)",
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

    Keeps each layer at the norm it started with, so its effective learning rate stays the same. If
    that takes longer than the budget, suggests the weakest decay that acts within it. Use --norm-at
    or --rotation to ask for something else.
    """
    source = found_records(run, runs)
    suggestion = suggest(source, rotation=rotation, norm_at=norm_at, steps=steps)
    if json_output:
        print_json(suggestion.as_dict())
        return
    for note in suggestion.notes:
        say(sentence(note))
    show(_table(suggestion))
    if not suggestion.groups:
        return
    say("", LEGEND)
    for group in suggestion.groups:
        say(group_text(group, suggestion.budget))


@app.command("scale")
def scale_command(
    weight_decay: Annotated[
        float, typer.Argument(metavar="DECAY", help="AdamW's weight decay now.")
    ],
    lr: Annotated[float, option("--lr", "Its learning rate now.")],
    batch: Annotated[
        str, option("--batch", "Batch size, as in 64:256.", metavar="FROM:TO")
    ] = "1:1",
    steps: Annotated[str, option("--steps", "Steps of the run.", metavar="FROM:TO")] = "1:1",
    width: Annotated[
        str, option("--width", "Width; lr follows muP, lr / width.", metavar="FROM:TO")
    ] = "1:1",
    json_output: options.Json = False,
) -> None:
    """Scale AdamW's decay to another batch size, length or width, by each known rule."""
    factors = {"batch": _factor(batch), "steps": _factor(steps), "width": _factor(width)}
    scaled = scale_decay(weight_decay, lr, **factors)
    if json_output:
        print_json([asdict(rule) for rule in scaled])
        return
    for rule in scaled:
        steps_now, scaled_steps = rule.timescales
        say(
            f"{rule.rule}: weight decay {rule.weight_decay:.4g} at lr {rule.lr:.4g} (averages over"
            f" {three_digits(scaled_steps)} steps, {three_digits(steps_now)} before)"
        )
        say(RULES_HELP[rule.rule], indent="  ")
    ratio = tokens_per_parameter(**factors)
    if not math.isclose(ratio, 1):
        note = (
            f"note: tokens per parameter change to {times(ratio)} (if parameters grow with"
            " the width squared). Power Lines finds that the best fraction of the run to average"
            " over falls as a power of this ratio, so the second rule is rough here"
        )
        say(note)


def _factor(pair: str) -> float:
    before, _, after = pair.partition(":")
    try:
        return float(after) / float(before)
    except (ValueError, ZeroDivisionError) as error:
        raise BadValue("a change", pair, "FROM:TO, as in 64:256") from error


@app.command("convert")
def convert_command(
    weight_decay: Annotated[
        float, typer.Argument(metavar="DECAY", help="The weight decay to convert.")
    ],
    source: Annotated[str, option("--from", OPTIMIZER_HELP)],
    source_lr: Annotated[float, option("--from-lr", "Learning rate of --from.")],
    target: Annotated[str, option("--to", OPTIMIZER_HELP)],
    target_lr: Annotated[float, option("--to-lr", "Learning rate of --to.")],
    source_decay: Annotated[
        str, option("--from-decay", "Its kind: l2, decoupled or independent.")
    ] = "",
    target_decay: Annotated[
        str, option("--to-decay", "Its kind: l2, decoupled or independent.")
    ] = "",
    source_momentum: Annotated[
        float | None, option("--from-momentum", "Momentum of --from (Adam: beta1).")
    ] = None,
    target_momentum: Annotated[
        float | None, option("--to-momentum", "Momentum of --to (Adam: beta1).")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Convert a weight decay to another optimizer or kind, keeping the effective learning rate.

    The kinds are l2 (added to the gradient, as in torch's SGD), decoupled (separate from the
    step, times lr, as in AdamW) and independent (separate, whatever the lr). The default is l2 for
    sgd and decoupled for the others.
    """
    first = Stepping(source, source_lr, source_decay or _kind(source), source_momentum)
    second = Stepping(target, target_lr, target_decay or _kind(target), target_momentum)
    converted = convert_decay(weight_decay, first, second)
    if json_output:
        print_json(asdict(converted))
        return
    say(f"{_named(weight_decay, first)} = {_named(converted.weight_decay, second)}")
    if not converted.shrink:
        return
    say(
        f"both remove the fraction {converted.shrink:.3g} of the weights per step, so decay needs"
        f" about {three_digits(converted.steps)} steps to take effect"
    )
    before, after = converted.rotations
    if before is not None and after is not None:
        say(
            f"at equilibrium the weights turn by {before:.3g} radians per step under {source} and"
            f" by {after:.3g} under {target}"
        )
    if any(stepping.law.name == "kfac" for stepping in (first, second)):
        say(
            "note: K-FAC has this equilibrium through its damping. Where that hardly matters, how"
            " far its weights turn does not depend on the decay"
        )


def _kind(optimizer: str) -> str:
    return "l2" if law_named(optimizer).sums_l2 else "decoupled"


def _named(weight_decay: float, stepping: Stepping) -> str:
    law = stepping.law
    memory = {name: getattr(law, name) for name in ("momentum", "beta1") if hasattr(law, name)}
    settings = "".join(f", {name} {value:g}" for name, value in memory.items())
    return (
        f"{stepping.decay} weight decay {weight_decay:.6g} of {stepping.optimizer} (lr"
        f" {stepping.lr:g}{settings})"
    )


@app.command("schedule")
def schedule_command(
    run: options.Run,
    out: Annotated[Path, option("--out", "File to write, .csv or .toml.")],
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
        warn(f"{run}: {sentence(trouble)}")
    fisher = [x for x in read.layers.values() if x.settings and x.first.curvature == "fisher"]
    if fisher:
        warn(
            f"{run}: the Fisher matrix shrinks as the network fits the data, so this schedule is"
            " not reliable for K-FAC-F (docs/diagnosis.md)"
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
    before, after = (f"{lr:.3g}" for lr in (schedule.others[0], schedule.others[-1]))
    others = before if before == after else f"{before} to {after}"
    say(
        f"{out}: {len(schedule.lr)} steps. Without decay, lr goes from {schedule.lr[0]:.3g} to"
        f" {schedule.lr[-1]:.3g} for {layers}; for all other parameters it is that of the run"
        f" ({others})"
    )


def _table(suggestion: Suggestion) -> TextTable:
    headings = ("decay", "suggested", "norm", "leads to", "balance", "turns", "steps")
    columns = [Column(heading, number=True) for heading in headings]
    table = TextTable([Column("layer", path=True), *columns, Column("note", words=True)])
    for row in suggestion.layers:
        numbers = (
            *(row.weight_decay, row.suggested, row.norm, row.target),
            *(row.equilibrium, row.rotation, steps_to_act(row.steps)),
        )
        cells = ["-" if value is None else three_digits(value) for value in numbers]
        table.add(row.layer, *cells, note_texts(row.notes))
    return table
