"""A table of who is decayed, how, and by which factor a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from decaylab.networks import ParameterRole, roles
from decaylab.optim.decay import decay_of
from decaylab.optim.laws import sums_up
from decaylab.optim.optimizer_behaviour import behaviour, is_torchs, unwrapped

HOW = {
    "none": "not decayed",
    "l2": "in the gradient, inside the momentum",
    "decoupled": "beside the step, times lr",
    "independent": "beside the step, whatever the lr",
}


@dataclass(frozen=True)
class DecayRow:
    """How one parameter decays; `factor` and `long_run` multiply it per step, None: not fixed."""

    parameter: str
    role: str
    decay: str
    weight_decay: float
    how: str
    factor: float | None
    long_run: float | None


def decay_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[DecayRow]:
    """Who is decayed, how, and by which factor a step: one row per parameter, in model order.

    Of any torch optimizer: one from elsewhere is tried (`behaviour`). factor: what one step
    multiplies W by through the decay term alone, from rest; long_run: once the momentum has settled
    (`steady_shrink`). Both are None for L2 behind a preconditioner (Adam, K-FAC), and for L2 in an
    optimizer from elsewhere that does not step as torch's SGD does.
    """
    optimizer = unwrapped(optimizer)
    group_of = {
        id(p): {**group, "params": [p]} for group in optimizer.param_groups for p in group["params"]
    }
    found = roles(model)
    return [
        _row(found[name], optimizer, group_of.get(id(p))) for name, p in model.named_parameters()
    ]


def _row(
    role: ParameterRole, optimizer: torch.optim.Optimizer, group: Mapping[str, Any] | None
) -> DecayRow:
    who = (role.parameter, role.role)
    if group is None:
        return DecayRow(*who, "none", 0.0, "not in this optimizer", 1.0, 1.0)
    decay, strength = decay_of(dict(group), optimizer)
    if decay == "none":
        return DecayRow(*who, decay, 0.0, HOW[decay], 1.0, 1.0)
    weight_decay = float(strength)
    lr, momentum = float(group.get("lr") or 0.0), float(group.get("momentum", 0.0))
    if decay == "decoupled" and group.get("lr") is None:  # some find theirs themselves
        return DecayRow(*who, decay, weight_decay, HOW[decay], None, None)
    if decay != "l2":
        factor = 1 - weight_decay * (lr if decay == "decoupled" else 1.0)
        return DecayRow(*who, decay, weight_decay, HOW[decay], factor, factor)
    if group.get("law") == "kfac" or not sums_up(optimizer, group):
        known = "decay" in group or is_torchs(optimizer) or behaviour(optimizer, group).decay
        how = "in the gradient, then preconditioned" if known else "of no known kind"
        return DecayRow(*who, decay, weight_decay, how, None, None)
    amount = lr * weight_decay
    if group.get("nesterov"):
        factor, long_run = 1 - amount * (1 + momentum), _nesterov(amount, momentum)
    else:
        later = amount * (1 - group.get("dampening", 0.0) if momentum else 1)
        factor, long_run = 1 - amount, 1 - steady_shrink(later, momentum)
    return DecayRow(*who, decay, weight_decay, HOW[decay], factor, long_run)


def steady_shrink(amount: float, momentum: float) -> float:
    """By which part of itself a weight shrinks in one step, in the long run, by L2 alone.

    With a = lr * weight_decay, v' = momentum * v + a W, W' = W - v' has the rates
    r^2 - (1 + momentum - a) r + momentum = 0, and the larger |r| wins: 1 - |r|, which is
    a / (1 - momentum) up to a part momentum * a / (1 - momentum)^2 of it. From
    a = (1 - sqrt(momentum))^2 on W oscillates and the result is 1 - sqrt(momentum). Holds for a
    constant lr without preconditioner and without gradient.

    >>> round(steady_shrink(5e-5, 0.9), 7)
    0.0005023
    """
    if momentum == 0:
        return amount
    half = (1 + momentum - amount) / 2
    discriminant = half * half - momentum
    if discriminant <= 0:
        return 1 - math.sqrt(momentum)
    if half < 0:
        return 1 + half - math.sqrt(discriminant)
    # 1 - half - sqrt(discriminant), without the cancellation at a small amount
    return amount / ((1 - momentum + amount) / 2 + math.sqrt(discriminant))


def _nesterov(amount: float, momentum: float) -> float:
    """The larger |r| of v' = m v + a W, W' = W - a W - m v': r^2 - (1 + m)(1 - a) r + m (1 - a)."""
    half, product = (1 + momentum) * (1 - amount) / 2, momentum * (1 - amount)
    inside = half * half - product
    return math.sqrt(abs(product)) if inside <= 0 else abs(half) + math.sqrt(inside)
