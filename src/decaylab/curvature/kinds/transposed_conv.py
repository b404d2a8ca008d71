"""Transposed convolutions: nn.ConvTranspose1d to 3d, as decoders and U-Nets have them.

The vector at each position of the input becomes a patch, W' a, and patches that overlap add up. So
rows are the vectors of the input, and the patches of the output's gradient: as in a convolution,
with input and output changed over. The bias joins behind the sum: it is not in the block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.kinds.conv import channel_rows, patch_rows
from decaylab.curvature.kinds.kind import Kind, Part, Reason, Site, Use
from decaylab.curvature.kinds.rows import (
    Columns,
    Sharing,
    joined,
    product_ready,
    rows_like,
    second_moment,
    shared,
)


class TransposedConv(Kind):
    """patch[position] = W' a[position], each group for itself; W is [in, out / groups, kernel]."""

    bases = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    functional = False
    masked = False
    classes_last = False
    transposed = True

    def refusal(self, module: Any) -> Reason | None:
        """Padding of the output by a whole stride would be a position without an input."""
        pairs = zip(module.output_padding, module.stride, strict=True)
        return Reason.NO_BLOCK if any(padding >= stride for padding, stride in pairs) else None

    def parts(self, name: str, module: nn.Module) -> Iterator[Part]:
        """The weight alone."""
        yield Part(name, module, self, bias=None)

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """Groups, input channels of a group, its output channels times kernel."""
        return module.groups, weight.shape[0] // module.groups, weight.shape[1:].numel()

    def as_weight(self, site: Site, rows: Tensor) -> Tensor:
        """A view of rows [groups, out / groups * kernel, in / groups] in the weight's shape."""
        return rows.mT.view(site.weight.shape)

    def input_moment(
        self, site: Site, uses: list[Use], sharing: Sharing
    ) -> tuple[Tensor, Tensor | float]:
        """Sum of a a' over examples and input positions, and how many there are."""
        shape, columns = site.shape, site.columns
        inputs = [product_ready(use.inputs.to_dense(), shape.dtype) for use in uses]
        vectors = joined([channel_rows(site, x, shape.width) for x in inputs], sharing)
        if columns.wide > shape.width:
            rows = rows_like(vectors, vectors.shape[:3], shape.width, columns)
            rows[..., : shape.width] = vectors
            vectors = rows
        rows = shared(vectors, sharing, torch.mean)
        return second_moment(rows, shape.dtype, diagonal=shape.input_diagonal), rows.shape[1]

    def gradient_moment(
        self, site: Site, uses: list[Use], gradients: list[Tensor], sharing: Sharing
    ) -> Tensor:
        """Sum of g g' over them, g being the patch under each position."""
        shape = site.shape
        columns = Columns(weight=True, bias=False, wide=shape.output_dim)
        patches = [patch_rows(site, product_ready(g, shape.dtype), columns) for g in gradients]
        rows = shared(joined(patches, sharing), sharing, torch.sum)
        return second_moment(rows, shape.dtype, diagonal=shape.output_diagonal)
