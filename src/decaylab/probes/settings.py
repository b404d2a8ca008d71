"""How each layer is stepped, as rows: what a diagnosis needs beside the probes, and no pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.untouched import bare
from decaylab.networks import roles
from decaylab.optim.decay import DECAYS, decay_of
from decaylab.optim.experiment import behaviour, is_torchs
from decaylab.optim.kfac import KFAC
from decaylab.optim.laws import law_of
from decaylab.probes.moments import kept
from decaylab.probes.reading import row_name
from decaylab.probes.weights import Layers, groups_of


def settings(optimizer: torch.optim.Optimizer, layers: Layers) -> dict[str, float]:
    """By row name, how the optimizer steps each layer's weight now. No pass through the model.

    `setting_lr` (if its group has one), `setting_decay` (its place in `DECAYS`),
    `setting_weight_decay`, `setting_momentum` (SGD, K-FAC; `setting_dampening` where its momentum
    has one) or `setting_beta1` (Adam), `setting_beta2` (which part a step keeps of the second
    moment, of whatever divides by one: 1 in Adagrad) and `setting_eps`, `setting_power` (absent
    where the optimizer's law, the momentum of its L2 or its second moment is not known),
    `setting_floor` (Adafactor: the norm below which its steps do not follow the norm any more),
    `setting_invariant` (1 or 0), `setting_damping` (K-FAC's lambda as asked for),
    `setting_scale_free`, `setting_factor_decay`, `setting_refresh_every` and
    `setting_invert_every`. A layer that this optimizer does not hold has `setting_moved` 0.
    """
    found: dict[str, float] = {}
    groups = groups_of(layers, optimizer)
    for layer in layers.weights:
        values = {"moved": 0.0}
        if layer in groups:
            held = {id(p) for p in groups[layer]["params"]}
            weight = next(p for p in layers.weights[layer].values() if id(p) in held)
            values = _of_group(optimizer, groups[layer], layer, weight)
        values["invariant"] = float(layer in layers.defects)
        found |= {row_name(f"setting_{name}", layer): value for name, value in values.items()}
    return found


def _of_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], layer: str, weight: Tensor
) -> dict[str, float]:
    decay, weight_decay = decay_of(dict(group), optimizer)
    values = {"decay": float(DECAYS.index(decay)), "weight_decay": float(weight_decay)}
    if group.get("lr") is not None:  # some find theirs themselves
        values["lr"] = float(group["lr"])
    beta2 = kept(optimizer, group, weight)
    if "betas" in group and group.get("law") != "kfac":
        values["beta1"] = float(group["betas"][0])
        if not beta2 and _as_adam(optimizer, group):
            beta2 = float(group["betas"][1])
    else:
        values["momentum"] = float(group.get("momentum", 0.0))
        if values["momentum"] and group.get("dampening"):
            values["dampening"] = float(group["dampening"])
    if beta2 > 0:
        values["beta2"] = beta2
    if beta2 > 0 and isinstance(group.get("eps"), float):
        values["eps"] = group["eps"]
    power, law = law_of(optimizer, group).norm_power, law_of(optimizer, group).name
    if power is None or (math.isnan(beta2) and "law" not in group):
        return values  # not known; nor is it while norms move: which gradients it divides by
    values["power"] = float(power)
    eps = group.get("eps")
    if law == "kfac" and isinstance(eps, tuple | list) and len(eps) == 2:
        values["floor"] = float(eps[1]) * math.sqrt(weight.numel())
    if law == "kfac" and isinstance(optimizer, KFAC):
        values["damping"] = float(optimizer.damping)
        values["scale_free"] = float(layer in optimizer.scale_free.norms)
        memory = ("factor_decay", "refresh_every", "invert_every")
        values |= {name: float(getattr(optimizer, name)) for name in memory}
    return values


def _as_adam(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether betas are Adam's, before a step has shown it; Adamax remembers a maximum instead."""
    if len(group["betas"]) != 2 or isinstance(optimizer, torch.optim.Adamax):
        return False
    return is_torchs(optimizer) or "law" in group or behaviour(optimizer, group).second_moment


def stored(layers: Layers) -> dict[str, float]:
    """`setting_size/layer`, how many numbers its weight has; of 16 bits, `setting_rounding` too.

    The second is how far apart such numbers are, relative to their size.
    """
    found: dict[str, float] = {}
    for layer, weights in layers.weights.items():
        found[row_name("setting_size", layer)] = float(sum(w.numel() for w in weights.values()))
        rounding = max(torch.finfo(weight.dtype).eps for weight in weights.values())
        if rounding > torch.finfo(torch.float32).eps:
            found[row_name("setting_rounding", layer)] = rounding
    return found


def gains_of(model: nn.Module) -> list[Tensor]:
    """The trained gains and shifts of normalisations, and the gains of normalised weights."""
    found = roles(bare(model))
    named = bare(model).named_parameters()
    return [p for name, p in named if found[name].role == "norm" and p.requires_grad]


def decayed_gains(optimizer: torch.optim.Optimizer, gains: list[Tensor]) -> dict[str, float]:
    """`decayed_gains`: how many of these decay. They are part of the function, as layers are."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    held = [groups[id(p)] for p in gains if id(p) in groups]
    decays = {id(group): decay_of(dict(group), optimizer)[0] != "none" for group in held}
    return {"decayed_gains": float(sum(decays[id(group)] for group in held))}


def frozen_layers(model: nn.Module) -> dict[str, float]:
    """`setting_frozen/layer` = 1 for each layer whose weights are all frozen."""
    parameters = dict(bare(model).named_parameters())
    trained: dict[str, bool] = {}
    for name, role in roles(bare(model)).items():
        if role.role in ("invariant", "weight", "head"):
            known = trained.get(role.module, False)
            trained[role.module] = known or parameters[name].requires_grad
    return {row_name("setting_frozen", k): 1.0 for k, moves in trained.items() if not moves}
