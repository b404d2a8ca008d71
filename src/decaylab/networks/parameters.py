"""The parameters of a network by layer: weights, biases, learnt gains of normalised weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decaylab.errors import Lacks
from decaylab.networks.sharded import refuse_flat_parameters

Kind = Literal["conv", "linear", "norm", "embedding", "other"]

NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_normalisation(module: nn.Module) -> bool:
    """Whether it is one of torch's normalisations, or calls itself a norm and holds vectors alone.

    The latter are those that libraries write themselves, such as Hugging Face's LlamaRMSNorm.
    """
    if isinstance(module, NORMALISATIONS):
        return True
    vectors = all(parameter.ndim < 2 for parameter in module.parameters())
    named = "norm" in type(module).__name__.lower()
    return named and vectors and not any(module.children())


KINDS: tuple[tuple[tuple[type[nn.Module], ...], Kind], ...] = (
    ((nn.modules.conv._ConvNd,), "conv"),
    ((nn.Linear, nn.Bilinear, nn.MultiheadAttention), "linear"),
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
)


@dataclass(frozen=True)
class Layer:
    """A weight and what belongs to it; `module` is where it is, as in `named_modules`."""

    module: str
    kind: Kind
    weights: list[Tensor]
    biases: list[Tensor]
    gains: list[Tensor]
    parametrised: bool

    @property
    def scaled(self) -> list[Tensor]:
        """What Eq. 8 multiplies."""
        # Weight and spectral normalisation act before the bias is added, so it does not cancel.
        return self.weights if self.parametrised else self.weights + self.biases


def layer_name(module: str, attribute: str) -> str:
    """What the layer of a parameter is called: its `weight` is the module's, others are their own.

    >>> layer_name("block.fc", "weight"), layer_name("block.attn", "wq"), layer_name("", "pos")
    ('block.fc', 'block.attn.wq', 'pos')
    """
    if attribute in ("weight", "in_proj_weight"):  # the latter is MultiheadAttention's
        return module
    return f"{module}.{attribute}" if module else attribute


def _own_parameters(module: nn.Module) -> dict[str, list[Tensor]]:
    """The module's own parameters by attribute; of a normalised one, what it is computed from."""
    computed = {
        f"{hook.name}{end}": hook.name for hook in _older(module) for end in ("_g", "_v", "_orig")
    }
    parameters: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters(recurse=False):
        parameters.setdefault(computed.get(name, name), []).append(parameter)
    if parametrize.is_parametrized(module):
        originals: Any = module.parametrizations
        for name, each in originals.items():
            parameters.setdefault(name, []).extend(each.parameters())
    return parameters


def _older(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    """Its normalisations in torch's older form, a hook (nn.utils.weight_norm, spectral_norm)."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]


def _gains(module: nn.Module) -> list[Tensor]:
    """The learnt norms of weight-normalised weights (parametrisations.weight_norm)."""
    hooks = [hook for hook in _older(module) if isinstance(hook, WeightNorm)]
    gains = [getattr(module, f"{hook.name}_g") for hook in hooks]
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        gains += [each.original0 for each in lists.values() if isinstance(each[0], _WeightNorm)]
    return gains


def _layers(name: str, module: nn.Module) -> dict[str, Layer]:
    """The layers of a module, one per weight; none of a normalisation, or of vectors alone."""
    if isinstance(module, (*NORMALISATIONS, parametrize.ParametrizationList)):
        return {}
    kind: Kind = next((kind for types, kind in KINDS if isinstance(module, types)), "other")
    gain_ids = {id(gain) for gain in _gains(module)}
    own = _own_parameters(module)
    without_gains = {a: [p for p in ps if id(p) not in gain_ids] for a, ps in own.items()}
    shapes = {a: max(ps, key=lambda p: p.numel()).shape for a, ps in without_gains.items() if ps}
    if isinstance(module, nn.MultiheadAttention):  # tokens of its own
        shapes = {a: shape for a, shape in shapes.items() if a not in ("bias_k", "bias_v")}
    paired = _paired(shapes, kind)
    parametrised = parametrize.is_parametrized(module) or bool(_older(module))
    return {
        layer_name(name, weight): Layer(
            name,
            kind,
            matrices,
            [p for p in without_gains[weight] if all(p is not matrix for matrix in matrices)]
            + [p for bias in biases for p in without_gains[bias]],
            [p for p in own[weight] if id(p) in gain_ids],
            parametrised,
        )
        for weight, biases in paired.items()
        for matrices in [_matrices(without_gains[weight], kind)]
    }


def _matrices(parameters: list[Tensor], kind: Kind) -> list[Tensor]:
    """Those with two axes or more; if there is none, the largest, as of a single output."""
    matrices = [p for p in parameters if _long_axes(p.shape, kind) >= 2]
    return matrices or [max(parameters, key=lambda p: p.numel())]


def _paired(shapes: Mapping[str, torch.Size], kind: Kind) -> dict[str, list[str]]:
    """The weights among a module's parameters, each with its biases; the rest stand alone.

    A matrix with one row or column is a weight if it has a bias as long as its columns. A bias is
    called as its weight is (`weight_ih_l0` and `bias_ih_l0`, `w1` and `b1`, `up_proj` and
    `up_proj_bias`) and has fewer axes. Beside a single weight without one, it is every vector
    registered later that is as long as the weight has rows or columns.
    """
    axes = {attribute: _long_axes(shape, kind) for attribute, shape in shapes.items()}
    for attribute, shape in shapes.items():
        biases = [shapes.get(bias) for bias in _bias_names(attribute, alone=False)]
        if len(shape) == 2 and shape[:1] in biases:
            axes[attribute] = 2
    weights = [attribute for attribute in shapes if axes[attribute] >= 2]
    owner: dict[str, str] = {}
    for weight in weights:
        for bias in _bias_names(weight, alone=len(weights) == 1):
            if bias in axes and axes[bias] < axes[weight]:
                owner[bias] = weight
    weights = [weight for weight in weights if weight not in owner]
    if len(weights) == 1 and not owner:
        (weight,) = weights
        shape, attributes = shapes[weight], list(shapes)
        for vector in attributes[attributes.index(weight) + 1 :]:
            shorter = axes[vector] < 2 and len(shapes[vector]) < len(shape)
            if shorter and shapes[vector].numel() in (shape[0], shape[-1]):
                owner[vector] = weight
    return {weight: [bias for bias, w in owner.items() if w == weight] for weight in weights}


def _bias_names(weight: str, *, alone: bool) -> Iterator[str]:
    """What the bias of a weight may be called; `alone`: the only weight of its module."""
    if "weight" in weight:
        yield weight.replace("weight", "bias")
    elif weight[0] in "wW":
        yield from (f"b{weight[1:]}", f"B{weight[1:]}")
    yield from (f"{weight}_bias", f"{weight}_b")
    if alone:
        yield "bias"


def _long_axes(shape: torch.Size, kind: Kind) -> int:
    """How many axes; of modules that are not known, those of length one do not count."""
    return len([length for length in shape if length > 1 or kind != "other"])


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every weight of the model as a layer, by `layer_name`."""
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise Lacks("a lazy layer", "shape yet", "run one batch through the model first")
    refuse_flat_parameters(model)
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        layers |= _layers(name, module)
    return layers


def scaled_parameters(model: nn.Module) -> dict[str, list[Tensor]]:
    """By layer, what Eq. 8 multiplies: weight and bias, or what a weight is computed from."""
    return {name: layer.scaled for name, layer in find_layers(model).items()}
