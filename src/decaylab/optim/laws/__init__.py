"""The laws of optimizers: how far a step turns a weight, and how much decay takes from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from decaylab.errors import FRACTION, check_name
from decaylab.optim.decay import LawName, decay_of, learning_rate
from decaylab.optim.laws.adam import Adam
from decaylab.optim.laws.kfac import Kfac
from decaylab.optim.laws.law import Equilibrium, Law, balance, shrink_for_norm
from decaylab.optim.laws.lion import Lion
from decaylab.optim.laws.muon import Muon
from decaylab.optim.laws.schedule_free import ScheduleFree
from decaylab.optim.laws.sgd import Sgd
from decaylab.optim.laws.shampoo import Shampoo
from decaylab.optim.laws.unknown import Unknown
from decaylab.optim.optimizer_behaviour import behaviour, is_torchs, momentum_of, unwrapped
from decaylab.records.settings import LayerSettings

__all__ = [
    "OPTIMIZER_NAMES",
    "Adam",
    "Equilibrium",
    "Kfac",
    "Law",
    "Lion",
    "Muon",
    "ScheduleFree",
    "Sgd",
    "Shampoo",
    "Unknown",
    "balance",
    "exposure_rate",
    "law_for",
    "law_named",
    "law_of",
    "shrink_for_norm",
    "sums_up",
]

# torch's optimizers whose step does not change when the gradient is multiplied by a number
GRADIENT_SCALE_FREE = tuple(
    getattr(torch.optim, name)
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
)
# Words in the names of classes from elsewhere whose rule is known, the first that fits.
CLASS_WORDS: dict[str, LawName] = {
    "schedulefree": "schedule-free",
    "lion": "lion",
    "muon": "muon",
    "shampoo": "shampoo",
    "soap": "shampoo",
}
# Names that people give, where they are not laws' own.
ALIASES: dict[str, LawName] = {
    **dict.fromkeys(("adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad"), "adam"),
    **dict.fromkeys(("adadelta", "adopt"), "adam"),
    "adafactor": "unknown",  # its steps go with the norm, or not: an option says so
    "ademamix": "unknown",  # of two momenta
    "soap": "shampoo",
    "kfac-f": "kfac",
    "kfac-g": "kfac",
}
MEMORYLESS = {"rmsprop", "adagrad", "adadelta"}  # no momentum, unless one is given
POWER_LAWS: dict[int, LawName] = {2: "sgd", 1: "adam", 0: "kfac"}
# Adagrad forgets nothing. Beside any number of steps, this is as good as 1, and has a mean.
NEVER_FORGETS = 1 - 1e-9


OPTIMIZER_NAMES = tuple(
    dict.fromkeys([*(law for law in get_args(LawName) if law != "unknown"), *ALIASES])
)
"""What `law_named` knows."""


def law_named(name: str, memory: float | None = None, beta2: float | None = None) -> Law:
    """The law of an optimizer by its usual name; `memory`: its momentum or beta1.

    >>> law_named("AdamW").name, law_named("soap").name
    ('adam', 'shampoo')
    """
    key = name.lower()
    kind = ALIASES.get(key, key)
    check_name("optimizer", key, OPTIMIZER_NAMES)
    nesterov = key in ("nadam", "muon")
    usual = {"sgd": 0.9, "kfac": 0.9, "muon": 0.95}.get(kind, 0.0 if key in MEMORYLESS else 0.9)
    memory = usual if memory is None else memory
    FRACTION.check("momentum", memory)
    return _made(kind, memory, beta2, nesterov=nesterov)


def _made(kind: str, memory: float, beta2: float | None, *, nesterov: bool) -> Law:
    if kind == "sgd":
        return Sgd(memory, nesterov=nesterov)
    if kind == "adam":
        return Adam(memory, beta2, nesterov)
    if kind == "lion":
        return Lion(memory, 0.99 if beta2 is None else beta2)
    if kind == "muon":
        return Muon(memory, nesterov)
    if kind == "shampoo":
        return Shampoo(memory, beta2, nesterov)
    if kind == "kfac":
        return Kfac(memory)
    if kind == "schedule-free":
        return ScheduleFree(memory, Sgd() if beta2 is None else Adam(0.0, beta2))
    return Unknown()


def law_for(settings: LayerSettings) -> Law:
    """The law that recorded settings of a layer say."""
    momentum, beta1, beta2 = (settings.momentum, settings.beta1, settings.beta2)
    memory = next((known for known in (momentum, beta1) if known is not None), math.nan)
    if beta2 is not None and math.isnan(beta2):
        return Unknown()  # which gradients it divides by is not known
    beta2 = None if beta2 is None else min(beta2, NEVER_FORGETS)
    nesterov = bool(settings.nesterov) or settings.optimizer == "NAdam"
    if settings.law == "sgd":
        return Sgd(memory, settings.dampening or 0.0, nesterov)
    if settings.law == "kfac":
        return Kfac(memory, settings.step_rms, nesterov)
    if settings.law == "lion":
        memory = beta1 if beta1 is not None else memory
    return _made(settings.law, memory, beta2, nesterov=nesterov)


def law_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Law:
    """The law that a param group of an optimizer follows.

    Its `"law"` says so; else torch's own and those of known names are known, and others are tried
    (`behaviour`). `Unknown` where that shows none, and of L2 inside a momentum of unknown kind.
    """
    kind, base = _kind(optimizer, group), unwrapped(optimizer)
    betas = group.get("betas")
    betas = betas if isinstance(betas, tuple | list) and len(betas) > 1 else None
    momentum = math.nan if (known := momentum_of(optimizer, group)) is None else known
    memory = float(betas[0]) if betas and kind not in ("sgd", "kfac") else momentum
    beta2 = float(betas[1]) if betas else group.get("alpha")
    nesterov = bool(group.get("nesterov", kind == "muon")) or isinstance(base, torch.optim.NAdam)
    if kind == "sgd":
        return Sgd(memory, float(group.get("dampening") or 0.0), nesterov)
    if kind == "kfac":
        nesterov = bool(getattr(base, "nesterov", False))
        return Kfac(memory, getattr(base, "step_rms", None), nesterov)
    return _made(kind, memory, beta2, nesterov=nesterov)


def _kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    named = group.get("law")
    if named in get_args(LawName):
        return str(named)
    optimizer = unwrapped(optimizer)
    if is_torchs(optimizer):
        if isinstance(optimizer, torch.optim.SGD):
            return "sgd"
        if isinstance(optimizer, torch.optim.Muon):
            return "muon"
        if isinstance(optimizer, GRADIENT_SCALE_FREE):
            return "adam"
    class_name = type(optimizer).__name__.lower()
    seen = behaviour(optimizer, group)
    power = seen.power
    for word, law in CLASS_WORDS.items():
        divides = law in ("lion", "muon") and seen.second_moment  # Adam, on groups of the rest
        if word in class_name and not divides and (power == 1 or law == "schedule-free"):
            return law
    law = POWER_LAWS.get(power, "unknown") if power is not None else "unknown"
    inside = law == "sgd" and decay_of(dict(group), optimizer)[0] == "l2"
    return "unknown" if inside and not sums_up(optimizer, group) else law


def sums_up(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether what stands in the gradient arrives in the step by torch's momentum.

    So it is in torch's SGD, in groups that name its law or K-FAC's (which preconditions it first),
    and in another optimizer that was seen to step as SGD does (`behaviour`).
    """
    if "law" in group:
        return group["law"] in ("sgd", "kfac")
    optimizer = unwrapped(optimizer)
    if is_torchs(optimizer):
        return isinstance(optimizer, torch.optim.SGD)
    return behaviour(optimizer, group).as_sgd


def exposure_rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | Tensor:
    """The decay that one step adds to this group's exposure: `Law.shrink`.

    The sum over steps is the decay exposure (recipe): 1 means that the weights of the start count
    for 1/e by decay alone. Decoupled: lr * wd; independent: wd; L2 under SGD: lr * wd / (1 -
    momentum), times 1 - dampening. For L2 under Adam it is the rate before the preconditioner,
    under K-FAC that before the preconditioner and behind the momentum. Schedule-free: the part of
    lr * wd that reaches the weights (`ScheduleFree`).
    """
    decay, strength = decay_of(dict(group), optimizer)
    if decay == "none":
        return 0.0
    lr = learning_rate(group, optimizer)
    lr = math.nan if lr is None else lr
    if decay == "scaled":
        return math.nan
    if decay == "l2" and sums_up(optimizer, group):
        momentum, dampening = momentum_of(optimizer, group), float(group.get("dampening") or 0.0)
        return Sgd(momentum or 0.0, dampening).shrink(strength, decay, lr)
    # torch's others all take what the kind says, and betas on the device are not waited for
    law = Unknown() if is_torchs(unwrapped(optimizer)) else law_of(optimizer, group)
    return law.shrink(strength, decay, lr)
