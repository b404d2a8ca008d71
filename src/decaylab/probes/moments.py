"""What an optimizer remembers of the gradients' size: the second moment, by layer."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.networks.sharded import Parts
from decaylab.optim.optimizer_behaviour import unwrapped
from decaylab.probes.layers import Layers, layers_of, listed, places_in, summed
from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register

# By its name in the state, the setting that says which part of it a step keeps; None: all of it.
KEPT: dict[str, tuple[str, ...] | None] = {
    "exp_avg_sq": ("betas", "beta2"),  # Adam and its kin
    "exp_avg_var": ("betas",),  # AdaBelief: of g - m
    "square_avg": ("alpha", "rho"),  # RMSprop, Adadelta
    "sum": None,  # Adagrad
}


def second_moments(model: nn.Module | Layers, optimizer: torch.optim.Optimizer) -> list[Reading]:
    """|v| of every layer: Adam's second moment v = (1 - beta2) sum_k beta2^k g^2, summed (L1).

    As the optimizer holds it, not divided by 1 - beta2^step: of two records n steps apart, v - v'
    beta2^n is what the gradients in between were (`optim.laws.memory` asks for that). One number a
    layer, no pass; nothing where the optimizer keeps none (SGD, Lion, K-FAC's own layers). Of
    others than Adam, what they have in its place (`KEPT`). Of ZeroRedundancyOptimizer, the layers
    whose moments this process has.
    """
    held: dict[str, dict[str, Tensor]] = {}
    state = unwrapped(optimizer).state
    for layer, weights in layers_of(model).weights.items():
        names = {n: _name(state.get(p, {})) for n, p in weights.items()}
        if None not in names.values():
            held[layer] = {n: state[weights[n]][key] for n, key in names.items()}
    if not held:
        return []
    places = places_in(held)
    parts = Parts.of(held[layer][name] for layer, name in places)
    (sums,) = listed(parts.sums([part.sum(dtype=torch.float64) for part in parts.tensors]))
    return [Reading("second_moment", "gradient^2", summed(places, sums))]


def kept(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> float:
    """The part of the second moment of `weight` that a step keeps; 0 where there is none.

    nan if it is not known: of more than two betas which one; AMSGrad keeps now all, now none.
    """
    name = _name(optimizer.state.get(weight, {}))
    if name is None:
        return 0.0
    if group.get("amsgrad"):
        return math.nan
    settings = KEPT[name]
    if settings is None:
        return 1.0
    value = next((group[key] for key in settings if key in group), math.nan)
    if not isinstance(value, float | int):
        value = value[1] if len(value) == 2 else math.nan
    return float(value)


def _name(state: Any) -> str | None:
    if not isinstance(state, Mapping):  # somebody's own
        return None
    return next((name for name in KEPT if isinstance(state.get(name), Tensor)), None)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state says that it has; that of SGD without momentum says nothing."""
    states = [s for s in unwrapped(optimizer).state.values() if isinstance(s, Mapping)]
    counts = [
        state["step"] for state in states if isinstance(state.get("step"), int | float | Tensor)
    ]
    stepped = any(bool(torch.as_tensor(count).gt(0).any()) for count in counts)
    return stepped or any(state.get("momentum_buffer") is not None for state in states)


def _measure(moment: Moment) -> list[Reading]:
    readings = [r for o in moment.optimizers for r in second_moments(moment.layers, o)]
    layers = {layer: value for reading in readings for layer, value in reading.layers.items()}
    return [Reading("second_moment", "gradient^2", layers)] if layers else []


register(Probe("second_moment", "free", _measure, unit="gradient^2"))
