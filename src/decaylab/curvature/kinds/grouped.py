"""Several matrices in one parameter, each with rows of its own: attention, experts.

Their products are functional calls, `F.linear` with a part of the parameter, which no module's hook
sees; they are met where that function is called. Every position is a row, whatever `sharing` says.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.kinds.kind import Kind, Part, Reason, Site, Use
from decaylab.curvature.kinds.rows import (
    Sharing,
    counted_rows,
    product_ready,
    second_moment,
    vector_rows,
)


class Stacked(Kind):
    """Parameters [groups * out, in] or [groups, out, in]; a call uses one of the matrices, or more.

    A call of several (attention of a sequence to itself) has the same inputs for all of them. Those
    that a pass does not reach count no row in it, and their factors stay as they are.
    """

    hooked = False
    counts_groups = True

    def input_moment(
        self, site: Site, uses: list[Use], sharing: Sharing
    ) -> tuple[Tensor, Tensor | float]:
        """Sum of a a' of each group, and how many rows each has: [groups]."""
        device, shape = uses[0].inputs.device, site.shape
        wide = shape.wide(device)
        size = (site.groups, *(wide,) * (2 - shape.input_diagonal))
        total = torch.zeros(size, dtype=shape.dtype, device=device)
        counts = torch.zeros(site.groups, dtype=torch.float64, device=device)
        for use in uses:
            rows = vector_rows(product_ready(use.inputs, shape.dtype), site.columns)
            counted = None if use.counted is None else [use.counted]
            vectors, count = counted_rows([rows], counted, "expand")
            here = _groups(site, use)
            total[here] += second_moment(vectors, shape.dtype, diagonal=shape.input_diagonal)
            counts[here] += count
        return total, counts

    def gradient_moment(
        self, site: Site, uses: list[Use], gradients: list[Tensor], sharing: Sharing
    ) -> Tensor:
        """Sum of g g' of each group."""
        shape = site.shape
        size = (site.groups, *(shape.output_dim,) * (2 - shape.output_diagonal))
        total = torch.zeros(size, dtype=shape.dtype, device=gradients[0].device)
        for use, gradient in zip(uses, gradients, strict=True):
            ready = product_ready(gradient, shape.dtype).reshape(-1, gradient.shape[-1])
            rows = ready.unflatten(1, (-1, shape.output_dim)).movedim(1, 0)
            here = _groups(site, use)
            total[here] += second_moment(rows, shape.dtype, diagonal=shape.output_diagonal)
        return total


def _groups(site: Site, use: Use) -> slice:
    """Which matrices of the parameter a call used."""
    first = use.offset // (site.shape.output_dim * site.weight.shape[-1])
    return slice(first, first + use.shape[-1] // site.shape.output_dim)


class Attention(Stacked):
    """nn.MultiheadAttention: query, key and value as three matrices, and the output projection."""

    bases = (nn.MultiheadAttention,)

    def parts(self, name: str, module: Any) -> Iterator[Part]:
        """The packed projection under the name of the module; or three with keys of another size.

        Their bias is one parameter, then left to the first-order method.
        """
        if module._qkv_same_embed_dim:
            yield Part(name, module, self, "in_proj_weight", "in_proj_bias")
        else:
            for letter in "qkv":
                weight = f"{letter}_proj_weight"
                yield Part(f"{name}.{weight}", module, PROJECTION, weight, None)
        yield Part(f"{name}.out_proj", module.out_proj, PROJECTION)

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """The weight is [3 width, width]."""
        return 3, weight.shape[1], weight.shape[0] // 3


class Projection(Kind):
    """One matrix that is met in functional calls, on [positions, width]."""

    hooked = False

    def input_moment(
        self, site: Site, uses: list[Use], sharing: Sharing
    ) -> tuple[Tensor, Tensor | float]:
        """As a Linear's, position by position."""
        return super().input_moment(site, uses, "expand")

    def gradient_moment(
        self, site: Site, uses: list[Use], gradients: list[Tensor], sharing: Sharing
    ) -> Tensor:
        """As a Linear's, position by position."""
        return super().gradient_moment(site, uses, gradients, "expand")


PROJECTION = Projection()


class Experts(Stacked):
    """Experts in one parameter [experts, out, in], as Hugging Face's Mixtral and its like have.

    Where they are multiplied one by one by `F.linear`, which is `experts_implementation="eager"`.
    """

    def matches(self, module: nn.Module) -> bool:
        """By its parameters: all of three axes, and as many experts as it says."""
        experts = getattr(module, "num_experts", None)
        parameters = [p for p in module._parameters.values() if p is not None]
        return bool(parameters) and all(p.dim() == 3 and p.shape[0] == experts for p in parameters)

    def refusal(self, module: Any) -> Reason | None:
        """Other implementations are other products."""
        chosen = getattr(getattr(module, "config", None), "_experts_implementation", "eager")
        transposed = getattr(module, "is_transposed", False)
        return Reason.OTHER_PRODUCT if chosen != "eager" or transposed else None

    def parts(self, name: str, module: nn.Module) -> Iterator[Part]:
        """Each parameter under its own name."""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield Part(f"{name}.{attribute}", module, self, attribute, None)

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """The weight is [experts, out, in]."""
        return weight.shape[0], weight.shape[2], weight.shape[1]
