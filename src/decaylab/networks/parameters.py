"""The parameters of a network by layer: weights, biases, learnt gains of normalised weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decaylab.errors import Lacks

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
    hooks = [hook for hook in _older(module) if isinstance(hook, WeightNorm)]
    gains = [getattr(module, f"{hook.name}_g") for hook in hooks]
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        gains += [each.original0 for each in lists.values() if isinstance(each[0], _WeightNorm)]
    return gains


def _layer(module: nn.Module) -> Layer | None:
    """The module as a layer, or None if it owns no weight (or is a normalisation)."""
    if isinstance(module, (*NORMALISATIONS, parametrize.ParametrizationList)):
        return None
    gains = _gains(module)
    gain_ids = {id(gain) for gain in gains}
    parameters = [p for p in _own_parameters(module) if id(p) not in gain_ids]
    kind: Kind = next((kind for types, kind in KINDS if isinstance(module, types)), "other")
    others: list[Tensor] = []
    if isinstance(module, nn.MultiheadAttention):
        others = [p for p in (module.bias_k, module.bias_v) if p is not None]
    weights_and_biases = [p for p in parameters if all(p is not other for other in others)]
    weights = [p for p in weights_and_biases if _is_weight(p, kind)]
    if not weights:
        return None
    biases = [p for p in weights_and_biases if not _is_weight(p, kind)]
    parametrised = parametrize.is_parametrized(module) or bool(_older(module))
    return Layer(kind, weights, biases, gains, others, parametrised)


def _is_weight(parameter: Tensor, kind: Kind) -> bool:
    """Of modules that are not known, vectors are none, however many axes of one they have."""
    axes = [length for length in parameter.shape if length > 1 or kind != "other"]
    return len(axes) >= 2


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every module that owns a weight, by its name in `named_modules`."""
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise Lacks("a lazy layer", "shape yet", "run one batch through the model first")
    layers = ((name, _layer(module)) for name, module in model.named_modules())
    return {name: layer for name, layer in layers if layer is not None}


def scaled_parameters(model: nn.Module) -> dict[str, list[Tensor]]:
    """By layer, what Eq. 8 multiplies: weight and bias, or what a weight is computed from."""
    return {name: layer.scaled for name, layer in find_layers(model).items()}
