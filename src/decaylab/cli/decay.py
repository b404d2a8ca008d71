"""`decaylab decay-table`, `audit-decay`: what decays, and what an optimizer's decay does."""

from dataclasses import asdict
from typing import Annotated

import typer

from decaylab.audits import audit_decay
from decaylab.cli import options
from decaylab.cli.audit import imported
from decaylab.cli.options import option
from decaylab.cli.terminal import print_json, say
from decaylab.errors import Lacks
from decaylab.networks import build
from decaylab.optim.table import DecayTable, decay_table
from decaylab.training import RunSpec, build_optimizer

Network = Annotated[
    str,
    typer.Argument(
        metavar="NETWORK",
        help="MODULE:FUNCTION that returns your model and its optimizers; or a built-in"
        " network (mlp, vgg11/13/16/19, resnet20/32/44/56), to which the options apply.",
    ),
]
Optimizer = Annotated[str, option("--optimizer", "sgd, adam, adamw, kfac-f or kfac-g.")]
Decay = Annotated[str, option("--decay", "none, l2, decoupled or independent.")]
WeightDecay = Annotated[float, option("--weight-decay", "Strength of the decay.")]
Scope = Annotated[str, option("--scope", "What is decayed: all, conv or fc.")]
LearningRate = Annotated[float | None, option("--lr", "Learning rate; by default the paper's.")]
Momentum = Annotated[
    float | None, option("--momentum", "Momentum of SGD and K-FAC; by default the paper's.")
]
BatchNorm = Annotated[bool, option("--batch-norm/--no-batch-norm", "Batch normalisation.")]
Width = Annotated[float, option("--width", "Factor on the number of channels.")]


def decay_table_command(
    network: Network,
    optimizer: Optimizer = "sgd",
    decay: Decay = "decoupled",
    weight_decay: WeightDecay = 5e-4,
    scope: Scope = "all",
    lr: LearningRate = None,
    momentum: Momentum = None,
    batch_norm: BatchNorm = False,
    width: Width = 1.0,
    json_output: options.Json = False,
) -> None:
    """Show which parameters are decayed, how, and by what factor per step.

    Built-in networks take CIFAR-10 images. "a step" is the factor by which decay alone multiplies
    a weight in the first step; "long run" is that factor once the momentum has settled. L2 in Adam
    and K-FAC passes through the preconditioner, so it has no fixed factor. Parameters whose
    names differ only in a number share a line.
    """
    if ":" in network:
        table = audit_decay(imported(network)).table
        if table is None:
            raise Lacks(network, "model", "let it return your model and its optimizers")
        _print(table, "", json_output)
        return
    values = {
        "network": network,
        "width": width,
        "batch_norm": batch_norm,
        "optimizer": optimizer,
        "lr": lr,
        "momentum": momentum,
        "decay": decay,
        "weight_decay": 0.0 if decay == "none" else weight_decay,
        "decay_scope": scope,
    }
    spec = RunSpec.from_mapping(values).resolved()
    model = build(network, classes=10, batch_norm=batch_norm, width=width)
    strength = f"{decay} decay of {spec.weight_decay:g} on {scope}"
    title = f"{network}, {optimizer} at lr {spec.lr:g}, {strength}"
    _print(decay_table(model, build_optimizer(spec, model)), title, json_output)


def _print(rows: DecayTable, title: str, json_output: bool) -> None:
    if json_output:
        print_json([asdict(row) | {"how": row.how} for row in rows])
        return
    if title:
        say(title)
    say(str(rows))
    decayed = sum(row.decay != "none" and not row.lost for row in rows)
    say(f"{decayed} of {len(rows)} parameters decay")


Factory = Annotated[
    str, typer.Argument(metavar="MODULE:FACTORY", help="An optimizer class, or a function.")
]
Expect = Annotated[
    str | None, option("--expect", "Fail unless it is this operator, e.g. decoupled.")
]


def audit_decay_command(
    factory: Factory, expect: Expect = None, json_output: options.Json = False
) -> None:
    """Test what an optimizer's weight decay does, and whether all of it takes effect.

    MODULE:FACTORY is an optimizer class, a function of `params` or of a model, or a function
    without arguments that returns an optimizer (or several) with or without its model. The module
    may be in the current folder. Names the operator: l2, decoupled, independent, lr-squared,
    masked, towards-start, averaged, in-momentum, rescaled or ignored; or unknown, with what was
    measured. Exits with 1 if a check fails.
    """
    audited = audit_decay(imported(factory), expect=expect)
    if json_output:
        print_json(audited.as_dict())
    else:
        say(str(audited), "it passes" if audited.passed else "it does not pass")
    if not audited.passed:
        raise typer.Exit(1)
