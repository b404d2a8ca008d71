"""Scale-free damping: the effective damping of Eq. 14 stays where it was asked to be."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.factors import Block
from decaylab.errors import DecaylabError
from decaylab.networks import roles


class ScaleFree:
    """The norms |W_l(0)| of scale-invariant layers, and what their damping is multiplied by.

    For such a layer the curvature goes with 1 / |W_l|^2 (Eq. 13), so that a fixed lambda outgrows
    it as the weight grows; lambda |W_l(0)|^2 / |W_l|^2 does not.
    """

    def __init__(self, blocks: Mapping[str, Block], layers: Sequence[str]) -> None:
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
            there = (before[name] > 0) & (after > 0)
            back = torch.where(there, before[name] / after, 1.0)
            for parameter in self._parts[name]:
                if not parameter.requires_grad:
                    continue
                parameter.mul_(back)
                velocity = state.get(parameter, {}).get("momentum_buffer")
                if velocity is not None:
                    velocity.mul_(back)

    def _norms(self) -> dict[str, Tensor]:
        """|W_l| now, in float32 at least."""
        weights = {name: parts[0].detach() for name, parts in self._parts.items()}
        return {
            name: torch.linalg.vector_norm(
                weight, dtype=torch.promote_types(weight.dtype, torch.float32)
            )
            for name, weight in weights.items()
        }


def invariant_layers(
    model: nn.Module, blocks: Mapping[str, Block], named: Sequence[str] | None
) -> list[str]:
    """The covered layers whose scale does not matter: those named, or by their role in the net."""
    unknown = sorted(set(named or ()) - blocks.keys())
    if unknown:
        raise DecaylabError(f"options.invariant names no covered layer: {', '.join(unknown)}")
    if named is None:
        named = [r.module for r in roles(model).values() if r.role == "invariant"]
    return [name for name, block in blocks.items() if name in set(named) and block.weight]


def _parts(block: Block) -> list[Tensor]:
    """A layer's weight, and its bias where that is trained."""
    layer = block.layer
    return [layer.weight, *([layer.bias] if block.bias and layer.bias is not None else [])]
