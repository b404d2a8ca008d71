"""Weight decay: its kinds, its scope, its strength, and the one place where it is added.

L2 regularisation and weight decay are one term, `weight_decay * W`, at different places (Eq. 6, 7):

| kind          | where the term is added               | what it alone removes from W per step |
|---------------|---------------------------------------|---------------------------------------|
| `none`        | nowhere                               | nothing                               |
| `l2`          | in the gradient, so inside            | SGD, in the long run:                 |
|               | preconditioner and momentum           | lr * weight_decay / (1 - momentum);   |
|               |                                       | others: no fixed fraction             |
| `decoupled`   | to the step, after both               | lr * weight_decay                     |
| `independent` | to the step, whatever the lr          | weight_decay                          |

The paper's SGD cells decay inside the momentum: that is kind `l2` here (recipe 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from decaylab.errors import NOT_NEGATIVE, Lacks, check_name, warn_user
from decaylab.networks import ParameterRole, roles
from decaylab.optim.decay_operator import DecayOperator
from decaylab.optim.optimizer_behaviour import behaviour, decay_setting, is_torchs, unwrapped

Decay = Literal["none", "l2", "decoupled", "independent"]
LawName = Literal["sgd", "adam", "lion", "muon", "shampoo", "kfac", "schedule-free", "unknown"]
"""The families of optimizers (`decaylab.optim.laws`)."""
Scope = str | Callable[[ParameterRole], bool]

DECAYS: tuple[str, ...] = ("none", "l2", "decoupled", "independent")
SCOPES: tuple[str, ...] = ("all", "conv", "fc")
OPTIMIZERS: dict[str, LawName] = {"sgd": "sgd", "adam": "adam", "kfac-f": "kfac", "kfac-g": "kfac"}
"""By name, how a step depends on the norm of the weights (`probes.effective_learning_rate`)."""


def add_decay(
    directions: list[Tensor], parameters: list[Tensor], amount: float | Tensor
) -> list[Tensor]:
    """The decay term: direction + amount * W for each pair. It is added here and nowhere else.

    L2: directions are gradients, amount is weight_decay (Eq. 6). Decoupled: directions are the
    steps behind preconditioner and momentum (Eq. 7), or W itself with -lr * weight_decay. `amount`
    may be a 0-dim tensor; nothing waits for the device. (torch's own optimizers add their L2, and
    Adam its decoupled term, themselves.)
    """
    if not directions:
        return []
    if isinstance(amount, Tensor):
        return list(torch._foreach_add(directions, torch._foreach_mul(parameters, amount)))
    return list(torch._foreach_add(directions, parameters, alpha=amount))


def check_decay(decay: str, weight_decay: float) -> None:
    """Refuse an unknown kind, and a weight decay that is negative or not a number."""
    check_name("decay", decay, DECAYS)
    NOT_NEGATIVE.check("weight_decay", weight_decay)


def check_optimizer(optimizer: str) -> None:
    """Refuse a name that is not in `OPTIMIZERS`."""
    check_name("optimizer", optimizer, OPTIMIZERS)


def _in_scope(roles_by_name: dict[str, ParameterRole], scope: Scope) -> set[str]:
    """Names of the parameters that a scope takes."""
    if callable(scope):
        return {name for name, role in roles_by_name.items() if scope(role)}
    check_name("scope", scope, SCOPES)
    head = {role.layer for role in roles_by_name.values() if role.role == "head"}
    return {
        name
        for name, role in roles_by_name.items()
        if scope == "all"
        or (scope == "fc" and role.layer in head)
        or (scope == "conv" and role.layer not in head and role.role not in ("norm", "other"))
    }


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    decay: str = "decoupled",
    scope: Scope = "all",
    inputs: Any = None,
) -> list[dict[str, Any]]:
    """The model's parameters as torch param groups: those that decay, then those that do not.

    Each group has `params`, `names`, `weight_decay` and `decay`. Scopes (recipe 16; Fig. 2), biases
    included: `all`; `conv`, the layers before the last (under batch normalisation those followed by
    it); `fc`, the last layer; or a predicate on `ParameterRole`. gamma and beta of a normalisation
    are in `all` only. `inputs` (a batch, as for `roles`) finds the last layer by running the model
    instead of by module order. With decay `none`, or a weight decay of 0, no parameter decays.

    `decay` is read by KFAC and by `decaylab.optim.first_order`. Torch's own optimizers have one
    kind each and do not read it: AdamW is decoupled, Adam and SGD are L2.
    """
    check_decay(decay, weight_decay)
    chosen = _in_scope(roles(model, inputs), scope)
    active = decay != "none" and weight_decay > 0
    if active and not chosen:
        raise Lacks(f"the scope {scope!r}", "parameter of this model", "try 'all'")
    parameters = dict(model.named_parameters())
    decayed = [name for name in parameters if active and name in chosen]
    rest = [name for name in parameters if not (active and name in chosen)]
    return [
        {
            "params": [parameters[name] for name in names],
            "names": names,
            "weight_decay": float(weight_decay) if names is decayed else 0.0,
            "decay": decay if names is decayed else "none",
        }
        for names in (decayed, rest)
        if names
    ]


def decay_rate(
    weight_decay: float, decay: str, *, law: LawName, lr: float, momentum: float = 0.0
) -> float:
    """The decay that one step adds to the exposure, to first order (recipe, before line 1).

    independent: weight_decay; decoupled: lr * weight_decay; l2: the same, and divided by
    (1 - momentum) where the momentum sums the term up (SGD and K-FAC; Adam's average does not). For
    L2 in Adam and K-FAC it is the rate before the preconditioner: compare it only with the same.
    """
    check_decay(decay, weight_decay)
    if decay == "none":
        return 0.0
    if decay == "independent":
        return weight_decay
    if decay == "l2" and law in ("sgd", "kfac"):
        return lr * weight_decay / (1 - momentum)
    return lr * weight_decay


def learning_rate(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The lr of a group; None if its optimizer finds it itself (the `d` of Prodigy, D-Adaptation).

    The `d` of torch's Adafactor is another thing.
    """
    return None if "d" in group and not is_torchs(unwrapped(optimizer)) else group.get("lr")


OUTSIDE = "outside_weight_decay"
"""Key of a group whose decay a hook applies; torch's own `weight_decay` is then 0."""


# torch's optimizers that decouple and have no option that says so
ALWAYS_DECOUPLED = (torch.optim.Adafactor, torch.optim.Muon)


USUAL_KINDS = {
    "l2": "l2",
    "decoupled": "decoupled",
    "independent": "independent",
    "lr-squared": "decoupled",
    "masked": "decoupled",
    "averaged": "decoupled",
    "in-momentum": "decoupled",
}
"""What operators of `decay_operator` come to; the others have no counterpart."""
_warned_of: WeakSet[torch.optim.Optimizer] = WeakSet()  # that their decay is of no known kind


def strength(
    group: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> float | Tensor:
    """The weight decay of a param group, under whatever name, or applied by a hook; 0 for none."""
    return group.get(OUTSIDE, 0.0) or group.get(decay_setting(optimizer, group)) or 0.0


def operator_of(
    group: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> DecayOperator:
    """What a param group's weight decay does, in our optimizers or others.

    Torch's own optimizers ignore what a group says under "decay" (unless a hook of ours reads it).
    In others, the group may state its kind; if not, the optimizer is tested (`behaviour`).
    """
    optimizer = optimizer and unwrapped(optimizer)
    torchs = optimizer is not None and is_torchs(optimizer)
    unasked = float(group.get("lambd") or 0.0) if torchs else 0.0  # of ASGD
    if not strength(group, optimizer):
        return DecayOperator("none", unasked=unasked)
    kind = group.get("decay")
    if kind not in DECAYS or (torchs and not group.get(OUTSIDE)):
        if optimizer is not None and not torchs:
            return behaviour(optimizer, group).operator
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, ALWAYS_DECOUPLED))
        kind = "decoupled" if decoupled else "l2"
    return DecayOperator(kind, (1.0, 1.0), along=math.nan, unasked=unasked)  # type: ignore[arg-type]


def decay_of(
    group: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> tuple[str, float]:
    """Kind and weight decay of a param group: what `operator_of` finds, as one of `DECAYS`.

    The weight decay is that of the usual operator that removes as much: times k if it is applied k
    times, times lr / lr_0 for lr-squared decay, times the share of the weights that is decayed at a
    time; none if it is ignored. "scaled" has no usual operator: k depends on gradients, shapes or
    the step. Anything else counts as L2, with a warning.

    >>> decay_of({"weight_decay": 0.1, "decoupled_weight_decay": True})
    ('decoupled', 0.1)
    """
    operator = operator_of(group, optimizer)
    if operator.kind in ("none", "ignored"):
        return "none", 0.0
    weight_decay: Any = strength(group, optimizer)
    factor = 1.0 if operator.times is None or operator.kind == "averaged" else operator.factor
    if factor is None:
        return "scaled", weight_decay
    if abs(factor - 1) > 1e-3:
        weight_decay = factor * weight_decay
    if operator.kind == "lr-squared" and optimizer is not None and group.get("lr") is not None:
        first = first_lr(operator, group, optimizer)
        weight_decay = weight_decay * group["lr"] / first if first else weight_decay
    if operator.kind == "masked":
        weight_decay = weight_decay * operator.share
    if operator.kind in USUAL_KINDS:
        return USUAL_KINDS[operator.kind], weight_decay
    if optimizer is not None and optimizer not in _warned_of:
        _warned_of.add(optimizer)
        warn_user(
            f"the weight decay of {type(optimizer).__name__} is none of the known kinds and counts"
            ' as L2; if that is wrong, set "decay" in the param groups (docs/extend.md)'
        )
    return "l2", weight_decay


def lost_to_rounding(
    weight: Tensor, group: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> bool:
    """Whether rounding undoes a group's decay: W (1 - s) is W, for every number W of the format.

    Below a power of two numbers are eps / 2 apart, relative to it, so s up to eps / 4 rounds back:
    0.002 in bfloat16. This holds for torch's own optimizers, whose decoupled decay is a product
    before the step; fused ones round to 16 bits once for both.
    """
    optimizer = unwrapped(optimizer)
    rounds_once = group.get("fused") and weight.element_size() < 4
    if not is_torchs(optimizer) or rounds_once or group.get(OUTSIDE):
        return False
    kind, weight_decay = decay_of(group, optimizer)
    if kind != "decoupled":
        return False
    return 0 < float(group["lr"]) * weight_decay <= torch.finfo(weight.dtype).eps / 4


def first_lr(
    operator: DecayOperator, group: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> float:
    """The lr_0 of lr-squared decay."""
    first = group.get("initial_lr", optimizer.defaults.get("lr"))
    return float(first or 0.0) if operator.over_first_lr else 1.0
