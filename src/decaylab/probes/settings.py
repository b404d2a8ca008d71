"""How each layer is stepped: what a diagnosis needs besides the probes, without pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decaylab.optim.decay import decay_of, learning_rate, lost_to_rounding
from decaylab.optim.kfac import KFAC
from decaylab.optim.laws import law_of
from decaylab.optim.optimizer_behaviour import behaviour, is_torchs, momentum_of, unwrapped
from decaylab.probes.layers import Layers, stepped_by
from decaylab.probes.moments import kept
from decaylab.records.settings import LayerSettings

Optimizers = Iterable[torch.optim.Optimizer]


def layer_settings(optimizers: Optimizers, layers: Layers) -> dict[str, LayerSettings]:
    """How each layer is stepped now, vectors and frozen layers included. No pass through the model.

    The law is "unknown" where the optimizer's, the momentum of its L2 or its second moment is. Of
    a weight computed from several parameters, what is said is of the first that an optimizer
    holds. Named as in rows.
    """
    holders = stepped_by(optimizers)
    by_layer: dict[str, LayerSettings] = {}
    for layer, weights in {**layers.weights, **layers.vectors}.items():
        held = next((p for p in weights.values() if p in holders), None)
        settings = LayerSettings(stepped=False)
        if held is not None:
            settings = _of_group(*holders[held], layer, held)
        by_layer[layer or "model"] = replace(
            settings,
            role=layers.roles[layer],
            invariant=layers.invariant(layer),
            together=layers.together(layer),
            size=sum(weight.numel() for weight in weights.values()),
            rounding=_rounding(weights.values()),
        )
    for layer in layers.frozen:
        by_layer[layer or "model"] = LayerSettings(
            frozen=True, stepped=False, role=layers.roles[layer]
        )
    return by_layer


def _of_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], layer: str, weight: Tensor
) -> LayerSettings:
    optimizer = unwrapped(optimizer)
    decay, weight_decay = decay_of(dict(group), optimizer)
    law, lr = _law(optimizer, group, weight), learning_rate(group, optimizer)
    settings = LayerSettings(
        optimizer=type(optimizer).__name__,
        law=law,
        lr=None if lr is None else float(lr),
        decay=decay,
        weight_decay=float(weight_decay),
        lost=lost_to_rounding(weight, group, optimizer),
        **_memory(optimizer, group, weight),
    )
    if law == "lion" and len(group.get("betas", ())) == 2:  # of its momentum, not of a variance
        settings = replace(settings, beta2=float(group["betas"][1]))
    eps = group.get("eps")
    if law == "kfac" and isinstance(eps, tuple | list) and len(eps) == 2:
        settings = replace(settings, floor=float(eps[1]) * math.sqrt(weight.numel()))
    if law == "kfac" and isinstance(optimizer, KFAC):
        settings = replace(
            settings,
            damping=float(optimizer.damping),
            curvature=optimizer.curvature,
            scale_free=optimizer.damping_scaling == "trace" or layer in optimizer.scale_free.norms,
            kl_clip=optimizer.kl_clip,
            factor_decay=float(optimizer.factor_decay),
            refresh_every=optimizer.refresh_every,
            invert_every=optimizer.invert_every,
            step_rms=optimizer.step_rms,
            momentum_first=optimizer.momentum_first,
            nesterov=True if optimizer.nesterov and settings.momentum else None,
        )
    return settings


def _memory(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor
) -> dict[str, Any]:
    """Momentum or beta1, and which part a step keeps of the second moment (1 in Adagrad)."""
    values: dict[str, Any] = {}
    beta2 = kept(optimizer, group, weight)
    if "betas" in group and group.get("law") != "kfac":
        values["beta1"] = float(group["betas"][0])
        if not beta2 and _as_adam(optimizer, group):
            beta2 = float(group["betas"][1])
    else:
        values["momentum"] = momentum_of(optimizer, group)
        if values["momentum"] and group.get("dampening"):
            values["dampening"] = float(group["dampening"])
        if values["momentum"] and group.get("nesterov"):
            values["nesterov"] = True
    if beta2 > 0:
        values["beta2"] = beta2
        if isinstance(group.get("eps"), float):
            values["eps"] = group["eps"]
    return values


def _law(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> str:
    if "law" not in group and math.isnan(kept(optimizer, group, weight)):
        return "unknown"  # which gradients it divides by, while norms move
    return law_of(optimizer, group).name


def _as_adam(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether betas are Adam's, before a step has shown it; Adamax remembers a maximum instead."""
    if len(group["betas"]) != 2 or isinstance(optimizer, torch.optim.Adamax):
        return False
    return is_torchs(optimizer) or "law" in group or behaviour(optimizer, group).second_moment


def _rounding(weights: Iterable[Tensor]) -> float:
    """How far apart numbers of 16 bits are, relative to their size; 0 for longer ones."""
    eps = max(torch.finfo(weight.dtype).eps for weight in weights)
    return eps if eps > torch.finfo(torch.float32).eps else 0.0
