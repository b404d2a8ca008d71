"""Scale-free damping: the effective damping of Eq. 14 stays where it was asked to be."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.blocks import Block
from decaylab.curvature.shards import Shards, own
from decaylab.errors import check_name, warn_user
from decaylab.networks import roles
from decaylab.networks.roles import normalised_layers


class ScaleFree:
    """The norms |W_l(0)| of scale-invariant layers, and what their damping is multiplied by.

    For such a layer the curvature goes with 1 / |W_l|^2 (Eq. 13), so that a fixed lambda outgrows
    it as the weight grows; lambda |W_l(0)|^2 / |W_l|^2 does not.
    """

    def __init__(self, blocks: Mapping[str, Block], layers: Sequence[str], shards: Shards) -> None:
        self._shards = shards
        # kept: pruning, say, may put something else in their place
        self._parts = {name: _parts(blocks[name]) for name in layers}
        self.norms = self._norms()

    def ratios(self) -> dict[str, Tensor]:
        """|W_l(0)|^2 / |W_l|^2 for each layer."""
        return {name: (self.norms[name] / norm) ** 2 for name, norm in self._norms().items()}

    @contextmanager
    def held(self, state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
        """Steps in here turn the weights, and leave |W_l| as it is.

        With this damping a step is as long as W_l is, times something that does not depend on
        |W_l|: nothing would hold the norms, and they grow or shrink exponentially. Put back with
        the velocity (in `state`), they move in the same directions: exactly so while the inverses
        are fresh and nothing decays by L2, which knows |W_l|. The bias goes with the weight: layer
        and group normalisation cancel the scale of both together.
        """
        before = self._norms()
        yield
        for name, after in self._norms().items():
            nonzero = (before[name] > 0) & (after > 0)
            back = torch.where(nonzero, before[name] / after, 1.0)
            for parameter in self._parts[name]:
                if not parameter.requires_grad:
                    continue
                own(parameter).mul_(back)
                velocity = state.get(parameter, {}).get("momentum_buffer")
                if velocity is not None:
                    own(velocity).mul_(back)

    def _norms(self) -> dict[str, Tensor]:
        """|W_l| now, in float32 at least."""
        norms = self._shards.norms(parts[0].detach() for parts in self._parts.values())
        return dict(zip(self._parts, norms, strict=True))


def invariant_layers(
    model: nn.Module, blocks: Mapping[str, Block], named: Sequence[str] | None
) -> list[str]:
    """The covered layers whose scale does not matter: those named, or by their role in the net."""
    for name in named or ():
        check_name("layer in options.invariant", name, blocks)
    by_order = named is None
    if named is None:
        named = [r.layer for r in roles(model).values() if r.role == "invariant"]
    invariant = [
        name for name, block in blocks.items() if name in set(named) and block.site.trains_weight
    ]
    if by_order and (guessed := _guessed(model, invariant)):
        warn_user(
            f"scale-free damping assumes that layer {guessed[0]!r} (of {len(guessed)} such) is "
            "scale-invariant, from module order alone, but a residual sum may precede its "
            "normalisation: name the layers that roles(model, inputs) measures as invariant with "
            "options=KFACOptions(invariant=...)"
        )
    return invariant


def _guessed(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Those whose normalisation is not certainly what their output goes to.

    It is in `nn.Sequential`, and so usual for a batch norm beside a layer that it is taken for it.
    """
    names = {module: name for name, module in model.named_modules()}
    norms = {layer: norm for layer, (_, norm) in normalised_layers(model).items()}
    guessed = []
    for layer in layers:
        norm = norms.get(layer)
        if norm is None:
            continue
        layer_path, norm_path = layer.split("."), names[norm].split(".")
        beside = layer_path[:-1] == norm_path[:-1] and isinstance(
            norm, nn.modules.batchnorm._BatchNorm
        )
        common = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(layer_path, norm_path, strict=False)
            )
        )
        around = {
            ".".join(path[:i]) for path in (layer_path, norm_path) for i in range(common, len(path))
        }
        kinds = [type(model.get_submodule(name)) for name in around]
        if not beside and any(kind.forward is not nn.Sequential.forward for kind in kinds):
            guessed.append(layer)
    return guessed


def _parts(block: Block) -> list[Tensor]:
    """A layer's weight, and its bias where that is trained."""
    site = block.site
    return [site.weight, *([site.bias] if site.trains_bias and site.bias is not None else [])]
