"""The layers of a model: their trained weights, what they are, and which optimizer steps them.

A layer's weight is W_l without its bias (recipe line 20); of a parametrised one what it is computed
from, without a learnt gain. A module with several weights (an LSTM, an attention of your own) has
as many layers. Frozen weights are left out. None of this runs the model, except where `inputs` are
given.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.preserve import bare, check_inputs, trainable, untouched
from decaylab.networks import ParameterRole, invariance, roles
from decaylab.networks.parameters import scaled_parameters
from decaylab.networks.rescaling import INVARIANCE_THRESHOLD
from decaylab.networks.scale_invariance import Invariance
from decaylab.networks.sharded import Parts, put_back
from decaylab.records.settings import LayerRole


@dataclass(frozen=True)
class Layers:
    """The trainable weights of a model by layer, and which layers are scale-invariant.

    Attributes:
        weights: layer name -> parameter name -> parameter (not a copy).
        defects: invariant layer -> how far from invariant it is; nan if it was not measured.
        scaled: invariant layer that was not measured -> what Eq. 8 multiplies, weight and bias.
        vectors: as weights, of the gains of normalisations and of normalised weights, and of what
            stands alone: a class token, a layer scale, a temperature.
        roles: what each layer is, vectors and frozen ones included.
        frozen: the layers that are not trained.
        measured: how the logits answer to the layers' scales, where that was measured.
    """

    weights: Mapping[str, Mapping[str, Tensor]]
    defects: Mapping[str, float]
    scaled: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    vectors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    roles: Mapping[str, LayerRole] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    measured: Invariance | None = None

    def invariant(self, layer: str) -> bool | None:
        """Whether a layer is scale-invariant; None if it is not known."""
        if self.measured is not None:
            return self.measured.invariant(layer) if layer in self.measured.defects else None
        return layer in self.defects if layer in self.weights else None

    def together(self, layer: str) -> tuple[str, ...]:
        """The layers that are invariant with this one, if only together."""
        if self.measured is None or layer not in self.measured.defects:
            return ()
        return self.measured.together(layer)


def layers_of(model: nn.Module | Layers, inputs: Tensor | None = None) -> Layers:
    """Find a model's layers once, so that the probes below need not look again.

    With `inputs`, invariant is what `invariance(model, inputs)` finds (LayerNorm, GroupNorm and
    weight-normalised nets included): one forward pass per layer. Without, it is read off the order
    of the modules and costs nothing.
    """
    if isinstance(model, Layers):
        return model
    model = bare(model)
    put_back(model)
    parameters, known = trainable(model), roles(model)
    weights: dict[str, dict[str, Tensor]] = {}
    vectors: dict[str, dict[str, Tensor]] = {}
    kinds: dict[str, LayerRole] = {}
    for name, parameter in model.named_parameters():
        role = known[name]
        if role.role in ("invariant", "weight", "head"):
            embedding = role.kind == "embedding" and role.role != "head"
            kind: LayerRole = "head" if role.role == "head" else "weight"
            kinds.setdefault(role.layer, "embedding" if embedding else kind)
            if name in parameters:
                weights.setdefault(role.layer, {})[name] = parameter
        elif name in parameters and (role.role == "other" or _is_gain(role, parameter)):
            # the gain of a normalised weight shares its layer with the weight
            layer = role.layer if role.kind in ("norm", "other") else name
            vectors.setdefault(layer, {})[name] = parameter
            kinds.setdefault(layer, "gain" if _is_gain(role, parameter) else "vector")
    normalised = {role.layer for role in known.values() if role.role == "invariant"}
    frozen = tuple(layer for layer in kinds if layer not in weights and layer not in vectors)
    if inputs is None:
        defects = {layer: math.nan for layer in weights if layer in normalised}
        every = scaled_parameters(model)
        scaled = {layer: every[layer] for layer in defects}
    else:
        check_inputs(model, inputs)
        with untouched(model):
            measured = invariance(model, inputs)
        defects, scaled = {k: v for k, v in measured.items() if v < INVARIANCE_THRESHOLD}, {}
    return Layers(weights, defects, scaled, vectors, kinds, frozen)


def _is_gain(role: ParameterRole, parameter: Tensor) -> bool:
    """Of a normalisation, torch's or another (a vector called `weight`); shifts are none."""
    last = role.parameter.rpartition(".")[2]
    if role.role == "norm":
        return last != "bias"
    return role.role == "other" and last == "weight" and parameter.ndim == 1


def groups_of(layers: Layers, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The param group that steps each layer's weight; layers it does not step are left out.

    Of a weight computed from several parameters, the group of the first that has one.
    """
    holders = stepped_by([optimizer])
    held = {
        layer: next((holders[p][1] for p in weights.values() if p in holders), None)
        for layer, weights in layers.weights.items()
    }
    return {layer: group for layer, group in held.items() if group is not None}


def stepped_by(
    optimizers: Iterable[torch.optim.Optimizer],
) -> dict[Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Who steps each parameter: the optimizer, the first of several, and its param group."""
    holders: dict[Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                holders.setdefault(parameter, (optimizer, group))
    return holders


def joined_norms(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    """|W_l| in float64 from the norms of a layer's tensors; one host synchronisation."""
    if not layers:
        return {}
    places = places_in(layers)
    parts = Parts.of(layers[layer][name] for layer, name in places)
    (norms,) = listed(parts.norms(dtype=torch.float64))
    return joined(places, norms)


def places_in(layers: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, str]]:
    """(layer, parameter) of every tensor."""
    return [(layer, name) for layer, weights in layers.items() for name in weights]


def listed(*columns: Sequence[Tensor]) -> list[list[float]]:
    """Columns of 0-d tensors as floats, with one host synchronisation for all."""
    table = torch.stack([value for column in columns for value in column]).double()
    rows: list[list[float]] = table.view(len(columns), -1).tolist()
    return rows


def summed(places: list[tuple[str, str]], values: Sequence[float]) -> dict[str, float]:
    """By layer, the sum over its tensors."""
    totals: dict[str, float] = {}
    for (layer, _), value in zip(places, values, strict=True):
        totals[layer] = totals.get(layer, 0.0) + value
    return totals


def joined(places: list[tuple[str, str]], norms: Sequence[float]) -> dict[str, float]:
    """By layer, the norm of all its tensors together, from theirs."""
    squares = summed(places, [norm**2 for norm in norms])
    return {layer: math.sqrt(square) for layer, square in squares.items()}
