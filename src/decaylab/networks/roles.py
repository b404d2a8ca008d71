"""What each parameter of a network is: scale-invariant weight, head, bias, norm parameter.

Works on any `nn.Module`, by the types and shapes of its modules, never by parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decaylab.errors import DecaylabError
from decaylab.networks.kept import cuda_devices, kept, kept_buffers

Role = Literal["invariant", "weight", "head", "bias", "norm", "other"]
Kind = Literal["conv", "linear", "norm", "embedding", "other"]

INVARIANCE_THRESHOLD = 0.05

# What a parameter is called that several modules share (tied weights): the first of these.
PRIORITY: tuple[Role, ...] = ("head", "invariant", "weight", "norm", "bias", "other")

NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
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
KINDS: tuple[tuple[tuple[type[nn.Module], ...], Kind], ...] = (
    ((nn.modules.conv._ConvNd,), "conv"),
    ((nn.Linear, nn.Bilinear, nn.MultiheadAttention), "linear"),
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
)


@dataclass(frozen=True)
class ParameterRole:
    """What one parameter is; `module` (as in `named_modules`) is the layer that gives it its role.

    Roles: `invariant` (weight of a layer whose scale the output does not depend on), `head` (weight
    of the last conv or linear layer), `weight` (of any other layer), `bias`, `norm` (gamma and beta
    of a normalisation, the gain of weight normalisation), `other`.
    """

    parameter: str
    module: str
    role: Role
    kind: Kind


@dataclass(frozen=True)
class Layer:
    """The parameters of a module that holds a weight."""

    kind: Kind
    weights: list[Tensor]
    biases: list[Tensor]
    gains: list[Tensor]
    others: list[Tensor]
    parametrised: bool

    @property
    def scaled(self) -> list[Tensor]:
        """What Eq. 8 multiplies."""
        # Weight and spectral normalisation act before the bias is added, so it does not cancel.
        return self.weights if self.parametrised else self.weights + self.biases


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The module's own parameters, with those below its parametrisations."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def _older(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    """Its normalisations in torch's older form, a hook (nn.utils.weight_norm, spectral_norm)."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]


def _gains(module: nn.Module) -> list[Tensor]:
    """The learnt norms of weight-normalised weights (parametrisations.weight_norm)."""
    found = [hook.name for hook in _older(module) if isinstance(hook, WeightNorm)]
    gains = [getattr(module, f"{name}_g") for name in found]
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        gains += [each.original0 for each in lists.values() if isinstance(each[0], _WeightNorm)]
    return gains


def _layer(module: nn.Module) -> Layer | None:
    """The module as a layer, or None where it owns no weight (or is a normalisation)."""
    if isinstance(module, (*NORMALISATIONS, parametrize.ParametrizationList)):
        return None
    gains = _gains(module)
    gain_ids = {id(gain) for gain in gains}
    own = [p for p in _own_parameters(module) if id(p) not in gain_ids]
    kind: Kind = next((kind for types, kind in KINDS if isinstance(module, types)), "other")
    others: list[Tensor] = []
    if isinstance(module, nn.MultiheadAttention):
        others = [p for p in (module.bias_k, module.bias_v) if p is not None]
    rest = [p for p in own if all(p is not other for other in others)]
    weights = [p for p in rest if p.ndim >= 2]
    if not weights:
        return None
    biases = [p for p in rest if p.ndim < 2]
    parametrised = parametrize.is_parametrized(module) or bool(_older(module))
    return Layer(kind, weights, biases, gains, others, parametrised)


def _layers(model: nn.Module) -> dict[str, Layer]:
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise DecaylabError("the model has lazy layers: run one batch through it first")
    found = ((name, _layer(module)) for name, module in model.named_modules())
    return {name: layer for name, layer in found if layer is not None}


def scaled_parameters(model: nn.Module) -> dict[str, list[Tensor]]:
    """By layer, what Eq. 8 multiplies: weight and bias, or what a weight is computed from."""
    return {name: layer.scaled for name, layer in _layers(model).items()}


def _tensors(output: Any) -> list[Tensor]:
    """All floating-point tensors in a model's output, in order."""
    if isinstance(output, Tensor):
        return [output.detach()] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _tensors(part)]
    return []


def _run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors of the model's output for a tensor, a tuple of arguments or a mapping."""
    try:
        if isinstance(inputs, Mapping):
            return _tensors(model(**inputs))
        return _tensors(model(*inputs) if isinstance(inputs, tuple | list) else model(inputs))
    except Exception as error:
        raise DecaylabError(
            f"the model fails on these inputs ({type(error).__name__}: {error}): give a batch as in"
            " training, with two or more examples for batch norm"
        ) from error


def _distance(outputs: list[Tensor], reference: list[Tensor]) -> Tensor:
    squares = [
        torch.linalg.vector_norm(a.double() - b.double()) ** 2
        for a, b in zip(outputs, reference, strict=True)
    ]
    return torch.stack(squares).sum().sqrt()


@contextmanager
def _left_untouched(model: nn.Module) -> Iterator[None]:
    """Train mode without gradients; afterwards mode, buffers and generators are as they were."""
    try:
        with kept(model), torch.no_grad():
            model.train()
            yield
    finally:
        torch.clear_autocast_cache()  # of weights that were scaled


class _Evaluation:
    """f(inputs) again and again, each time from the same state.

    Of the generators, for dropout, and of the buffers: a power iteration (spectral normalisation)
    goes on from its last one. Autocast, the caller's or one in the model's own forward, stays on;
    what it has cached are weights as they were before they were scaled.
    """

    def __init__(self, model: nn.Module, inputs: Any):
        self.model, self.inputs = model, inputs
        self.cpu = torch.get_rng_state()
        self.devices = cuda_devices(model)
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    def __call__(self) -> list[Tensor]:
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        torch.clear_autocast_cache()
        with kept_buffers(self.model):
            return _run(self.model, self.inputs)

    def scaled(self, parameters: list[Tensor], factor: float) -> list[Tensor]:
        """The output with some parameters times a factor; they are then restored bit for bit.

        Through `.data`: a graph that still waits for its backward pass stays valid, and modules
        that keep their own lists of weights (LSTM) see the change.
        """
        kept = [p.detach().clone() for p in parameters]
        try:
            for p in parameters:
                p.data.mul_(factor)
            return self()
        finally:
            for p, value in zip(parameters, kept, strict=True):
                p.data.copy_(value)


def invariance(model: nn.Module, inputs: Any) -> dict[str, float]:
    """How far the output is from not depending on the scale of each layer (Eq. 8, Sec. 4.1).

    defect_l = |f(2 W_l) - f(W_l)| / |f(W_l)|, f in train mode (batch statistics), Euclidean norm
    over the whole output, nothing averaged; invariant is a layer below `INVARIANCE_THRESHOLD`. W_l
    is the layer's weight *and* bias, as in Eq. 8: batch normalisation cancels the bias, but layer
    and group normalisation cancel only the scale of both together. Where the weight is
    parametrised (weight or spectral normalisation), W_l is what it is computed from, without bias
    and learnt gain.

    A small defect proves nothing where the output hardly depends on the layer at all: unused,
    zero, or one weak branch of many. Such a layer, whose removal (W_l = 0) changes the output by
    less than five times what doubling does, gets `nan`, which is not below the threshold.

    `inputs`: a tensor, a tuple of arguments or a mapping of keyword arguments; a batch of at least
    two under batch normalisation. Key: module name. Cost: one forward pass, and one per layer, two
    where the defect is below the threshold. Parameters, buffers, gradients, modes and torch's
    generators are left bit for bit as they were. Does not cover randomness from other generators.
    """
    layers = _layers(model)
    if not layers:
        return {}
    with _left_untouched(model):
        evaluate = _Evaluation(model, inputs)
        reference = evaluate()
        if not reference:
            raise DecaylabError("the model's output holds no floating-point tensor to compare")
        size = _distance(reference, [torch.zeros_like(t) for t in reference])
        defects = {}
        for name, layer in layers.items():
            change = _distance(evaluate.scaled(layer.scaled, 2.0), reference)
            defect = float(change / size)
            if defect < INVARIANCE_THRESHOLD:
                removal = _distance(evaluate.scaled(layer.scaled, 0.0), reference)
                weak = float(removal) < 5 * float(change) or float(removal) == 0.0
                defect = math.nan if weak else defect
            defects[name] = defect
    return defects


def _order(model: nn.Module, inputs: Any) -> list[str]:
    """Module names in the order in which they run, or without inputs are registered."""
    names = {module: name for name, module in model.named_modules()}
    if inputs is None:
        return list(names.values())
    ran: list[str] = []

    def record(module: nn.Module, _: Any) -> None:
        ran.append(names[module])
        if isinstance(module, nn.MultiheadAttention):  # uses this layer without calling it
            ran.append(names[module.out_proj])

    handles = [module.register_forward_pre_hook(record) for module in names]
    try:
        with _left_untouched(model):
            _run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return ran


def _invariant_by_order(model: nn.Module, layers: dict[str, Layer]) -> dict[str, nn.Module | None]:
    """Layers whose next module is a normalisation, with it, and the weight-normalised ones."""
    found: dict[str, nn.Module | None] = {n: None for n, layer in layers.items() if layer.gains}
    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    parametrisations = {module for each in lists for module in each.modules()}
    previous: str | None = None
    for name, module in model.named_modules():
        if module in parametrisations:
            continue
        if name in layers:
            # what follows a block that has weights of its own is its first part, in front of them
            parts = {part for part, _ in module.named_children()} - {"parametrizations"}
            previous = None if parts and layers[name].kind == "other" else name
        elif isinstance(module, NORMALISATIONS):
            if previous is not None:
                found[previous] = module
            previous = None
        elif not any(module.children()) and not isinstance(module, HOMOGENEOUS):
            previous = None
    return found


def normalised_layers(model: nn.Module) -> dict[str, tuple[Layer, nn.Module | None]]:
    """The layers that are invariant by the order of modules, and the normalisation behind each.

    None where there is none: the weight itself is normalised.
    """
    layers = _layers(model)
    return {name: (layers[name], norm) for name, norm in _invariant_by_order(model, layers).items()}


def roles(model: nn.Module, inputs: Any = None) -> dict[str, ParameterRole]:
    """What each parameter of any model is; key: its name in `named_parameters`.

    With `inputs` (as for `invariance`), a layer is invariant where its measured defect is below
    `INVARIANCE_THRESHOLD`, and the head is the conv or linear layer that ran last. Without, both go
    by the order in which modules are registered: invariant is a layer with a normalisation next
    (ReLU, dropout, pooling and flattening may stand between), the head is the last layer. That
    misjudges what order cannot tell: a residual sum before the normalisation, functional
    normalisation, modules registered in another order than they run. An invariant last layer is
    `invariant`, and the model then has no head. A tied weight has one role, `head` if it is one.
    Vectors beside the weight of a layer are biases; parameters of unknown modules with two or
    more dimensions are weights.
    """
    layers = _layers(model)
    if inputs is None:
        invariant = set(_invariant_by_order(model, layers))
    else:
        defects = invariance(model, inputs)
        invariant = {name for name, defect in defects.items() if defect < INVARIANCE_THRESHOLD}
    candidates = [
        name
        for name in _order(model, inputs)
        if name in layers and layers[name].kind in ("conv", "linear")
    ]
    head = candidates[-1] if candidates and candidates[-1] not in invariant else None

    found: dict[int, tuple[str, Role, Kind]] = {}

    def note(parameters: list[Tensor], module: str, role: Role, kind: Kind) -> None:
        for parameter in parameters:
            known = found.get(id(parameter))
            if known is None or PRIORITY.index(role) < PRIORITY.index(known[1]):
                found[id(parameter)] = (module, role, kind)

    for name, module in model.named_modules():
        layer = layers.get(name)
        if layer is not None:
            role: Role = "head" if name == head else "invariant" if name in invariant else "weight"
            note(layer.weights, name, role, layer.kind)
            note(layer.biases, name, "bias", layer.kind)
            note(layer.gains, name, "norm", layer.kind)
            note(layer.others, name, "other", layer.kind)
        elif isinstance(module, NORMALISATIONS):
            note(list(module.parameters(recurse=False)), name, "norm", "norm")
        else:
            note(list(module.parameters(recurse=False)), name, "other", "other")
    return {
        name: ParameterRole(name, *found[id(parameter)])
        for name, parameter in model.named_parameters()
    }
