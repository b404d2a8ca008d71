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
        self._blocks = {name: blocks[name] for name in layers}
        self.norms = {name: _norm(block) for name, block in self._blocks.items()}

    def ratios(self) -> dict[str, Tensor]:
        """|W_l(0)|^2 / |W_l|^2 for each layer."""
        return {name: (self.norms[name] / _norm(b)) ** 2 for name, b in self._blocks.items()}

    @contextmanager
    def held(self, state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
        """Steps in here turn the weights, and leave |W_l| as it is.

        With this damping a step is as long as W_l is, times something that does not depend on
        |W_l|: nothing would hold the norms, and they grow or shrink exponentially. Put back with
        the velocity (in `state`), they move in the same directions: exactly so while the inverses
        are fresh and nothing decays by L2, which knows |W_l|. The bias goes with the weight: layer
        and group normalisation cancel the scale of both together.
        """
        before = {name: _norm(block) for name, block in self._blocks.items()}
        yield
        for name, block in self._blocks.items():
            after = _norm(block)
            there = (before[name] > 0) & (after > 0)
            back = torch.where(there, before[name] / after, 1.0)
            for parameter in (block.layer.weight, block.layer.bias if block.bias else None):
                if parameter is None or not parameter.requires_grad:
                    continue
                parameter.mul_(back)
                velocity = state.get(parameter, {}).get("momentum_buffer")
                if velocity is not None:
                    velocity.mul_(back)


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


def _norm(block: Block) -> Tensor:
    return torch.linalg.vector_norm(block.layer.weight.detach().to(block.shape.dtype))
