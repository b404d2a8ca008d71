"""The laws of optimizers: how far a step turns a weight, and how much decay takes from it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from decaylab.errors import DecaylabError
from decaylab.optim.decay import OPTIMIZERS, Law, decay_of, decay_rate
from decaylab.optim.experiment import behaviour, is_torchs, unwrapped

POWERS: dict[Law, int] = {"sgd": 2, "adam": 1, "kfac": 0}
"""The effective learning rate of an invariant layer is lr / |W|^power (Eq. 9)."""
# Optimizers whose step does not change when the gradient is multiplied by a number.
GRADIENT_SCALE_FREE = tuple(
    getattr(torch.optim, name)
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Muon")
)


def law_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Law:
    """Which law of `probes.effective_learning_rate` a param group follows.

    Its `"law"` says so; else torch's SGD and Adam are known, and others are tried (`behaviour`).
    """
    named = group.get("law")
    if named is not None and named in OPTIMIZERS.values():
        return named
    optimizer = unwrapped(optimizer)
    if is_torchs(optimizer) and isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if is_torchs(optimizer) and isinstance(optimizer, GRADIENT_SCALE_FREE):
        return "adam"
    power = behaviour(optimizer, group).power
    for law, known in POWERS.items():
        if power == known:
            return law
    raise DecaylabError(
        f"the effective learning rate of {type(optimizer).__name__} is not known: "
        "say which law it follows with law='sgd', 'adam' or 'kfac', or as 'law' in its param groups"
    )


def sums_up(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether what stands in the gradient arrives in the step by torch's momentum.

    So it is in torch's SGD, in groups that name its law or K-FAC's (which preconditions it first),
    and in another optimizer that was seen to step as SGD does (`behaviour`).
    """
    if "law" in group:
        return group["law"] != "adam"
    optimizer = unwrapped(optimizer)
    if is_torchs(optimizer):
        return isinstance(optimizer, torch.optim.SGD)
    return behaviour(optimizer, group).as_sgd


def exposure_rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | Tensor:
    """The decay that one step adds to this group's exposure: `decaylab.optim.decay.decay_rate`.

    The sum over steps is the decay exposure (recipe): 1 means that the weights of the start count
    for 1/e by decay alone. Decoupled: lr * wd; independent: wd; L2 under SGD: lr * wd / (1 -
    momentum), times 1 - dampening. For L2 under Adam or K-FAC it is the rate before the
    preconditioner, and before a momentum of which not more is known than its name.
    """
    decay, strength = decay_of(dict(group), optimizer)
    if decay == "none":
        return 0.0
    try:
        law = law_of(optimizer, group)
    except DecaylabError:  # the rate of L2 before whatever changes it
        law = "adam"
    momentum = float(group.get("momentum", 0.0)) if sums_up(optimizer, group) else 0.0
    if decay == "l2" and momentum:
        strength *= 1 - group.get("dampening", 0.0)
    lr = math.nan if group.get("lr") is None else group["lr"]  # some find theirs themselves
    return decay_rate(strength, decay, law=law, lr=lr, momentum=momentum)
