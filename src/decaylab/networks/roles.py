"""What each parameter of a network is: scale-invariant weight, head, bias, norm parameter.

Works on any `nn.Module`, by the types and shapes of its modules. Names of parameters only tell
which bias belongs to which weight (`parameters.find_layers`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize

from decaylab.networks.parameters import (
    NORMALISATIONS,
    Kind,
    Layer,
    find_layers,
    is_normalisation,
    layer_name,
)
from decaylab.networks.rescaling import INVARIANCE_THRESHOLD, invariance, run_order

Role = Literal["invariant", "weight", "head", "bias", "norm", "other"]

# What a parameter is called that several modules share (tied weights): the first of these.
PRIORITY: tuple[Role, ...] = ("head", "invariant", "weight", "norm", "bias", "other")

# f(a x) = a f(x) for a > 0: a normalisation behind one of these sees the layer before it.
HOMOGENEOUS = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.Flatten,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)


@dataclass(frozen=True)
class ParameterRole:
    """What one parameter is, and the `layer` that gives it its role.

    A layer is called as its module in `named_modules`; one whose weight is not its module's
    `weight`, and a parameter that stands alone, as the parameter in `named_parameters`.

    Roles: `invariant` (weight of a layer whose scale the output does not depend on), `head` (weight
    of the last conv or linear layer), `weight` (of any other layer), `bias`, `norm` (gamma and beta
    of a normalisation, the gain of weight normalisation), `other`.
    """

    parameter: str
    layer: str
    role: Role
    kind: Kind


def _invariant_by_order(model: nn.Module, layers: dict[str, Layer]) -> dict[str, nn.Module | None]:
    """Layers whose next module is a normalisation, with it, and the weight-normalised ones."""
    norms: dict[str, nn.Module | None] = {n: None for n, layer in layers.items() if layer.gains}
    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    parametrisations = {module for each in lists for module in each.modules()}
    by_module: dict[str, list[str]] = {}
    for name, layer in layers.items():
        by_module.setdefault(layer.module, []).append(name)
    embeddings = [layer.module for layer in layers.values() if layer.kind == "embedding"]
    beside = Counter(module.rpartition(".")[0] for module in embeddings)
    previous: str | None = None
    for name, module in model.named_modules():
        if module in parametrisations:
            continue
        if name in by_module:
            # what follows a block that has weights of its own is its first part, in front of them;
            # of several weights, it is not known what lies between them
            parts = {part for part, _ in module.named_children()} - {"parametrizations"}
            known = layers[by_module[name][0]].kind != "other"
            previous = by_module[name][0] if known or not parts else None
            previous = previous if len(by_module[name]) == 1 else None
            if name in embeddings and beside[name.rpartition(".")[0]] > 1:
                previous = None  # words, positions and types are added up in front of it
        elif isinstance(module, NORMALISATIONS):
            if previous is not None:
                norms[previous] = module
            previous = None
        elif not any(module.children()) and not isinstance(module, HOMOGENEOUS):
            previous = None
    return norms


def normalised_layers(model: nn.Module) -> dict[str, tuple[Layer, nn.Module | None]]:
    """The layers that are invariant by module order, and the normalisation after each.

    None if there is none: the weight itself is normalised.
    """
    layers = find_layers(model)
    return {name: (layers[name], norm) for name, norm in _invariant_by_order(model, layers).items()}


def roles(model: nn.Module, inputs: Any = None) -> dict[str, ParameterRole]:
    """What each parameter of a model is; key: its name in `named_parameters`.

    With `inputs` (as for `invariance`), a layer is invariant where its measured defect is below
    `INVARIANCE_THRESHOLD`, and the head is the conv or linear layer that ran last. Without, both go
    by the order in which modules are registered: a layer followed by a normalisation is invariant
    (ReLU, dropout, pooling and flattening may come between), and the last layer is the head. That
    misjudges what order cannot show: a residual sum before the normalisation, functional
    normalisation, modules registered in another order than they run. An invariant last layer is
    `invariant`, and the model then has no head. A tied weight has one role, `head` if it is one.
    Of unknown modules, every parameter with two or more dimensions is a weight, and a layer of its
    own; a vector is the bias of a weight (`parameters.find_layers`), or stands alone (a class
    token, a layer scale, a temperature) and is `other`.
    """
    layers = find_layers(model)
    if inputs is None:
        invariant = set(_invariant_by_order(model, layers))
    else:
        defects = invariance(model, inputs)
        invariant = {name for name, defect in defects.items() if defect < INVARIANCE_THRESHOLD}
    candidates = [
        name
        for name in run_order(model, inputs)
        if name in layers and layers[name].kind in ("conv", "linear")
    ]
    head = candidates[-1] if candidates and candidates[-1] not in invariant else None

    by_parameter: dict[int, tuple[str, Role, Kind]] = {}

    def note(parameters: list[Tensor], layer: str, role: Role, kind: Kind) -> None:
        for parameter in parameters:
            noted = by_parameter.get(id(parameter))
            if noted is None or PRIORITY.index(role) < PRIORITY.index(noted[1]):
                by_parameter[id(parameter)] = (layer, role, kind)

    for name, layer in layers.items():
        role: Role = "head" if name == head else "invariant" if name in invariant else "weight"
        note(layer.weights, name, role, layer.kind)
        note(layer.biases, name, "bias", layer.kind)
        note(layer.gains, name, "norm", layer.kind)
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if is_normalisation(module):
                note([parameter], name, "norm", "norm")
            else:
                alone: Role = "bias" if parameter.ndim == 1 and "bias" in attribute else "other"
                note([parameter], layer_name(name, attribute), alone, "other")
    return {
        name: ParameterRole(name, *by_parameter[id(parameter)])
        for name, parameter in model.named_parameters()
    }
