"""Norms, updates and rotations of the weights, the effective learning rate.

A layer's weight is W_l without its bias (recipe line 20): of a module with several weights (an
LSTM) all of them joined, of a parametrised one what the weight is computed from, without a learnt
gain. Frozen weights are left out. None of this runs the model, except where `inputs` are given.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.untouched import bare, check_inputs, trainable, untouched
from decaylab.errors import DecaylabError
from decaylab.networks import ParameterRole, invariance, roles
from decaylab.networks.parameters import scaled_parameters
from decaylab.networks.rescaling import INVARIANCE_THRESHOLD
from decaylab.optim.decay import LawName
from decaylab.optim.laws import law_named, law_of
from decaylab.probes.reading import Reading, row_name
from decaylab.records.settings import LayerRole


@dataclass(frozen=True)
class Layers:
    """The trainable weights of a model by layer, and which layers are scale-invariant.

    Attributes:
        weights: layer name -> parameter name -> parameter (not a copy).
        defects: invariant layer -> how far from invariant it is; nan where it was not measured.
        scaled: invariant layer that was not measured -> what Eq. 8 multiplies, weight and bias.
        gains: as weights, of the gains of normalisations and of normalised weights.
        roles: what each layer is, gains and frozen ones included.
        frozen: the layers that are not trained.
    """

    weights: Mapping[str, Mapping[str, Tensor]]
    defects: Mapping[str, float]
    scaled: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    gains: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    roles: Mapping[str, LayerRole] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def invariant(self, layer: str) -> bool | None:
        """Whether a layer is scale-invariant; gains are not asked for."""
        return layer in self.defects if layer in self.weights else None


def layers_of(model: nn.Module | Layers, inputs: Tensor | None = None) -> Layers:
    """Find a model's layers once, so that the probes below need not look again.

    With `inputs`, invariant is what `invariance(model, inputs)` finds (LayerNorm, GroupNorm and
    weight-normalised nets included): one forward pass per layer. Without, it is read off the order
    of the modules and costs nothing.
    """
    if isinstance(model, Layers):
        return model
    model = bare(model)
    parameters, known = trainable(model), roles(model)
    weights: dict[str, dict[str, Tensor]] = {}
    gains: dict[str, dict[str, Tensor]] = {}
    kinds: dict[str, LayerRole] = {}
    for name, parameter in model.named_parameters():
        role = known[name]
        if role.role in ("invariant", "weight", "head"):
            embedding = role.kind == "embedding" and role.role != "head"
            kind: LayerRole = "head" if role.role == "head" else "weight"
            kinds.setdefault(role.module, "embedding" if embedding else kind)
            if name in parameters:
                weights.setdefault(role.module, {})[name] = parameter
        elif name in parameters and _is_gain(role):
            # the gain of a normalised weight shares its module with the weight
            layer = role.module if role.kind in ("norm", "other") else name
            gains.setdefault(layer, {})[name] = parameter
            kinds.setdefault(layer, "gain")
    normalised = {role.module for role in known.values() if role.role == "invariant"}
    frozen = tuple(layer for layer in kinds if layer not in weights and layer not in gains)
    if inputs is None:
        defects = {layer: math.nan for layer in weights if layer in normalised}
        every = scaled_parameters(model)
        scaled = {layer: every[layer] for layer in defects}
    else:
        check_inputs(model, inputs)
        with untouched(model):
            measured = invariance(model, inputs)
        defects, scaled = {k: v for k, v in measured.items() if v < INVARIANCE_THRESHOLD}, {}
    return Layers(weights, defects, scaled, gains, kinds, frozen)


def _is_gain(role: ParameterRole) -> bool:
    """Of a normalisation, torch's or another (a vector called `weight`); shifts are none."""
    last = role.parameter.rpartition(".")[2]
    return last != "bias" if role.role == "norm" else role.role == "other" and last == "weight"


def weight_norms(model: nn.Module | Layers) -> Reading:
    """|W_l| of every layer: Euclidean norm of the weight without bias. The total is of all."""
    values = _norms(layers_of(model).weights)
    total = math.sqrt(sum(value**2 for value in values.values()))
    return Reading("weight_norm", "weight", values, total)


Snapshot = Mapping[str, Mapping[str, Tensor]]
"""The weights of every layer at one moment: layer name -> parameter name -> values."""


def snapshot(model: nn.Module | Layers) -> Snapshot:
    """Copy the weights, for `update_norms` and `rotations` after a step."""
    return {
        layer: {name: weight.detach().clone() for name, weight in weights.items()}
        for layer, weights in layers_of(model).weights.items()
    }


def update_norms(model: nn.Module | Layers, before: Snapshot) -> Reading:
    """|W_l - W_l(before)| of every layer: the length of what moved it, decay included."""
    return movement(model, before)[0]


def rotations(model: nn.Module | Layers, before: Snapshot) -> Reading:
    """Angle between the directions W_l / |W_l| before and now (Sec. 4.1), in radians, 0 to pi.

    tan(angle) = |d - (d.u) u| / (|W_l(before)| + d.u) for the move d and the old direction u:
    precise for small angles too. 0 where decay alone acted; nan where the old weight was zero.
    """
    return movement(model, before)[1]


def movement(model: nn.Module | Layers, before: Snapshot) -> tuple[Reading, Reading]:
    """`update_norms` and `rotations` together."""
    now = layers_of(model).weights
    if now.keys() != before.keys():
        raise DecaylabError("the snapshot is of another model, or of other trainable layers")
    lengths: dict[str, float] = {}
    angles: dict[str, float] = {}
    places = _places(before)
    if places:
        with torch.no_grad():
            w = [_wide(before[layer][name]) for layer, name in places]
            d = torch._foreach_sub([_wide(now[layer][name]) for layer, name in places], w)
            products = [torch.dot(a.flatten(), b.flatten()) for a, b in zip(d, w, strict=True)]
            old, moved, dot = _listed(torch._foreach_norm(w), torch._foreach_norm(d), products)
            norms, dots = _joined(places, old), _summed(places, dot)
            along = {k: dots[k] / norm**2 if norm else math.nan for k, norm in norms.items()}
            # the part of the move across the old direction, by subtraction of vectors, not of norms
            parts = torch._foreach_mul(w, [-along[layer] for layer, _ in places])
            (rest,) = _listed(torch._foreach_norm(torch._foreach_add(d, parts)))
        lengths, across = _joined(places, moved), _joined(places, rest)
        angles = {k: math.atan2(across[k], norm * (1 + along[k])) for k, norm in norms.items()}
    return (
        Reading("update_norm", "weight", lengths),
        Reading("rotation", "radian", angles),
    )


@dataclass(frozen=True)
class EffectiveLearningRate(Reading):
    """By scale-invariant layer; `defects`: how far from invariant each is (nan: not measured)."""

    law: str = ""
    defects: Mapping[str, float] = field(default_factory=dict)

    def rows(self) -> dict[str, float]:
        """As `Reading.rows`, with the measured defects under `invariance/layer`."""
        measured = {k: v for k, v in self.defects.items() if not math.isnan(v)}
        return super().rows() | {row_name("invariance", k): v for k, v in measured.items()}


def effective_learning_rate(
    model: nn.Module | Layers,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor | None = None,
    *,
    law: LawName | None = None,
) -> EffectiveLearningRate:
    """How fast each scale-invariant layer's direction turns, per unit of what drives it (Eq. 9).

    For an invariant layer the loss depends on the direction u = W/|W| alone, its gradient is
    orthogonal to W and grad L(W) = grad L(u) / |W|. A step W -= lr p then changes u by
    -(lr/|W|) (I - uu') p + O(lr^2), and it remains to see how p depends on |W|:

    - SGD: p = grad L(W) = grad L(u) / |W|, so the direction moves with **lr / |W|^2** (Eq. 9).
      Momentum mu multiplies that by 1/(1 - mu) in the long run; it is not included.
    - Adam: p = m / (sqrt(v) + eps) does not change when all gradients are multiplied by a number:
      the factor 1/|W| of the gradient cancels and **lr / |W|** is left (while |W| changes slowly
      against Adam's averages, and eps is negligible). So for the other optimizers that divide by a
      running gradient size.
    - K-FAC: p = C(W)^-1 grad L(W), and C(W) = C(u) / |W|^2 (Eq. 13): p = |W| C(u)^-1 grad L(u), and
      the direction moves with **lr** whatever the norm. That is the undamped step. With damping
      lambda (Eq. 14) p = |W| (C(u) + lambda |W|^2 I)^-1 grad L(u): as before where eigenvalues of
      C(u) exceed lambda |W|^2, and lr / (lambda |W|^2), SGD's law, where they do not.
      `effective_damping` measures which of the two it is.

    With `inputs`, invariant is what `invariance(model, inputs)` finds (LayerNorm, GroupNorm and
    weight-normalised nets included), with the defect beside it: one forward pass per layer.
    Without, it is read off the order of the modules and costs nothing. `law` overrides the
    optimizer's kind.
    """
    layers = layers_of(model, inputs)
    groups = groups_of(layers, optimizer)
    weights = {
        layer: of
        for layer, of in layers.weights.items()
        if layer in layers.defects and layer in groups
    }
    values, used = {}, set()
    for layer, norm in _norms(weights).items():
        kind = law_named(law) if law else law_of(optimizer, groups[layer])
        power = kind.norm_power
        if power is None:
            raise DecaylabError(
                f"the effective learning rate of {type(optimizer).__name__} is not known: say which"
                " law it follows with law='sgd', 'adam' or 'kfac', or as 'law' in its param groups"
            )
        used.add((power, kind.name))
        values[layer] = _effective(power, float(groups[layer]["lr"]), norm)
    units = {2: "lr / weight^2", 1: "lr / weight", 0: "lr"}
    kinds = sorted(used, reverse=True)
    return EffectiveLearningRate(
        "effective_lr",
        " or ".join(dict.fromkeys(units[power] for power, _ in kinds)),
        values,
        law=" and ".join(name for _, name in kinds),
        defects={layer: layers.defects[layer] for layer in values},
    )


def groups_of(layers: Layers, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The param group that steps each layer's weight; layers it does not step are left out.

    Of a module with several weights, the group of the first that has one.
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


def _effective(power: int, lr: float, norm: float) -> float:
    return math.inf if norm == 0.0 and power else lr / norm**power


def _norms(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    """|W_l| in float64 from the norms of a layer's tensors; one host synchronisation."""
    if not layers:
        return {}
    places = _places(layers)
    tensors = [layers[layer][name].detach() for layer, name in places]
    (norms,) = _listed(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    return _joined(places, norms)


def _wide(tensor: Tensor) -> Tensor:
    """In at least 32 bits: products of 16-bit numbers leave their range."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _places(layers: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, str]]:
    """(layer, parameter) of every tensor."""
    return [(layer, name) for layer, weights in layers.items() for name in weights]


def _listed(*columns: Sequence[Tensor]) -> list[list[float]]:
    """Columns of 0-d tensors as floats, with one host synchronisation for all."""
    table = torch.stack([value for column in columns for value in column]).double()
    rows: list[list[float]] = table.view(len(columns), -1).tolist()
    return rows


def _summed(places: list[tuple[str, str]], values: Sequence[float]) -> dict[str, float]:
    """By layer, the sum over its tensors."""
    found: dict[str, float] = {}
    for (layer, _), value in zip(places, values, strict=True):
        found[layer] = found.get(layer, 0.0) + value
    return found


def _joined(places: list[tuple[str, str]], norms: Sequence[float]) -> dict[str, float]:
    """By layer, the norm of all its tensors together, from theirs."""
    squares = _summed(places, [norm**2 for norm in norms])
    return {layer: math.sqrt(square) for layer, square in squares.items()}
