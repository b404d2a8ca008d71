"""`decaylab decay-table`: who is decayed, how, and by which factor a step."""

import math
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from decaylab.cli import options
from decaylab.cli.output import console, print_json
from decaylab.errors import DecaylabError
from decaylab.networks import build
from decaylab.optim.decay import check_optimizer, parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.kfac import KFAC
from decaylab.optim.table import DecayRow, decay_table
from decaylab.training.spec import PUBLISHED

Network = Annotated[str, typer.Argument(help="mlp, vgg11/13/16/19 or resnet20/32/44/56.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="sgd, adam, kfac-f or kfac-g.")]
Decay = Annotated[str, typer.Option("--decay", help="none, l2, decoupled or independent.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", help="Strength of the decay.")]
Scope = Annotated[str, typer.Option("--scope", help="What is decayed: all, conv or fc.")]
LearningRate = Annotated[
    float | None,
    typer.Option("--lr", help="Learning rate; without it, the paper's for the optimizer."),
]
Momentum = Annotated[float, typer.Option("--momentum", help="Momentum of SGD and K-FAC.")]
BatchNorm = Annotated[
    bool, typer.Option("--batch-norm/--no-batch-norm", help="Batch normalisation.")
]
Width = Annotated[float, typer.Option("--width", help="Factor on the number of channels.")]


def decay_table_command(
    network: Network,
    optimizer: Optimizer = "sgd",
    decay: Decay = "decoupled",
    weight_decay: WeightDecay = 5e-4,
    scope: Scope = "all",
    lr: LearningRate = None,
    momentum: Momentum = 0.9,
    batch_norm: BatchNorm = False,
    width: Width = 1.0,
    json_output: options.Json = False,
) -> None:
    """Show which parameters are decayed, how, and by which factor per step.

    The network is built for CIFAR-10. "a step" is the factor by which decay alone multiplies a
    weight in the first step; "long run" is that factor once the momentum has settled. L2 in Adam
    and K-FAC passes through the preconditioner, so it has no fixed factor.
    """
    check_optimizer(optimizer)
    rate = PUBLISHED[optimizer]["lr"] if lr is None else lr
    if not (math.isfinite(rate) and rate >= 0):
        raise DecaylabError(f"the learning rate must be zero or more, and it is {rate}")
    if not 0 <= momentum < 1:
        raise DecaylabError(f"momentum must be at least 0 and below 1, and it is {momentum}")
    model = build(network, classes=10, batch_norm=batch_norm, width=width)
    groups = parameter_groups(model, weight_decay=weight_decay, decay=decay, scope=scope)
    rows = decay_table(model, _built(optimizer, model, groups, rate, momentum))
    if json_output:
        print_json([asdict(row) for row in rows])
        return
    print(f"{network}, {optimizer} at lr {rate:g}, {decay} decay of {weight_decay:g} on {scope}")
    console(200, markup=False).print(_table(rows))
    decayed = sum(row.decay != "none" for row in rows)
    print(f"{decayed} of {len(rows)} parameters decay")


def _built(
    name: str, model: nn.Module, groups: list[dict[str, Any]], lr: float, momentum: float
) -> torch.optim.Optimizer:
    if name == "sgd":
        return sgd(groups, lr=lr, momentum=momentum)
    if name == "adam":
        return adam(groups, lr=lr)
    return KFAC(model, lr, params=groups, momentum=momentum)


def _table(rows: list[DecayRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("parameter", "role", "decay", "how", "a step", "long run"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        numbers = ["-" if value is None else f"{value:.8g}" for value in (row.factor, row.long_run)]
        kind = row.decay if row.decay == "none" else f"{row.decay} {row.weight_decay:g}"
        table.add_row(row.parameter, row.role, kind, row.how, *numbers)
    return table
