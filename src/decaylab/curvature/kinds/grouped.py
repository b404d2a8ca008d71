"""Several matrices in one parameter, each with rows of its own: attention, experts.

Their products are functional calls, `F.linear` with a part of the parameter or `F.grouped_mm` with
all of it, which no module's hook sees; they are met where those functions are called. Every
position is a row, whatever `sharing` says.
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
            for here, part in _pieces(site, use):
                rows = vector_rows(product_ready(use.inputs[part], shape.dtype), site.columns)
                counted = None if use.counted is None else [use.counted[part]]
                vectors, count = counted_rows([rows], counted, "expand")
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
            for here, part in _pieces(site, use):
                vectors = product_ready(gradient[part], shape.dtype)
                rows = vectors.reshape(-1, gradient.shape[-1] // shape.output_dim, shape.output_dim)
                rows = rows.movedim(1, 0)
                total[here] += second_moment(rows, shape.dtype, diagonal=shape.output_diagonal)
        return total


def _pieces(site: Site, use: Use) -> Iterator[tuple[slice, slice]]:
    """Which matrices of the parameter a call used, with which of its rows."""
    if use.ends is None:
        first = use.offset // (site.weight.numel() // site.groups)
        yield slice(first, first + use.shape[-1] // site.shape.output_dim), slice(None)
        return
    begin = 0
    for group, end in enumerate(use.ends):
        if end > begin:
            yield slice(group, group + 1), slice(begin, end)
        begin = end


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

    Multiplied one by one by `F.linear` (`experts_implementation="eager"`), or all of them by
    `F.grouped_mm`, which is the default.
    """

    observed: tuple[str, ...] = ("eager", "grouped_mm")

    def matches(self, module: nn.Module) -> bool:
        """By its parameters: as many experts as it says, with matrices and perhaps biases."""
        experts = getattr(module, "num_experts", None)
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        weights = {name for name, p in parameters.items() if p.dim() == 3}
        biases = {f"{name}_bias" for name in weights}
        of_experts = all(p.dim() > 1 and p.shape[0] == experts for p in parameters.values())
        turned = bool(getattr(module, "is_transposed", False))
        known = bool(weights) and parameters.keys() <= weights | biases
        return of_experts and known and turned == self.transposed

    def refusal(self, module: Any) -> Reason | None:
        """Other implementations are other products."""
        config = getattr(module, "config", None)
        chosen = getattr(config, "_experts_implementation", None)
        if chosen is None:
            chosen = self.observed[0] if config is None else "eager"
        return None if chosen in self.observed else Reason.OTHER_PRODUCT

    def parts(self, name: str, module: nn.Module) -> Iterator[Part]:
        """Each matrix under its own name."""
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3:
                yield Part(f"{name}.{attribute}", module, self, attribute, f"{attribute}_bias")

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """The weight is [experts, out, in]."""
        return weight.shape[0], weight.shape[2], weight.shape[1]


class TransposedExperts(Experts):
    """Experts in one parameter [experts, in, out], as gpt-oss has them: by `F.grouped_mm` alone."""

    transposed = True
    observed = ("grouped_mm",)

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """The weight is [experts, in, out]."""
        return weight.shape[0], weight.shape[1], weight.shape[2]

    def as_weight(self, site: Site, rows: Tensor) -> Tensor:
        """A transposed view."""
        return rows.mT
