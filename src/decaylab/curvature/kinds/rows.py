"""Rows of vectors: what a matrix multiplies, and what comes back for each product.

A layer computes s = W a for many vectors a: one per example and output position. K-FAC needs those
a and the gradients g at the matching s, as rows:

    input rows     [groups, rows, in / groups (+ 1 for the bias)]
    gradient rows  [groups, rows, out / groups]

`expand` (Martens & Grosse 2015; Grosse & Martens 2016 for convolutions) makes a row of each
example and position. `reduce` (Eschenhagen et al. 2023) makes one row of each example: a averaged,
g summed over its positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decaylab.curvature import guards

Sharing = Literal["expand", "reduce"]


@dataclass(frozen=True)
class Columns:
    """What a row of inputs holds: a if a weight is trained, 1 if a bias is, zeros up to `wide`."""

    weight: bool
    bias: bool
    wide: int


def vector_rows(inputs: Tensor, columns: Columns) -> Tensor:
    """[1, examples, positions, wide] of inputs [examples, ..., in]."""
    vectors = by_example(inputs)[None]
    width = vectors.shape[-1]
    if columns.weight and columns.wide == width:
        return vectors
    rows = rows_like(vectors, vectors.shape[:3], width, columns)
    if columns.weight:
        rows[..., :width] = vectors
    return rows


def rows_like(like: Tensor, shape: Sequence[int], width: int, columns: Columns) -> Tensor:
    """Uninitialised but for the 1 and the zeros behind the first `width` columns."""
    rows = like.new_empty(*shape, columns.wide)
    width = width * columns.weight
    rows[..., width:].zero_()
    if columns.bias:
        rows[..., width].fill_(1)
    return rows


def counted_rows(
    calls: list[Tensor], masks: list[Tensor] | None, sharing: Sharing
) -> tuple[Tensor, Tensor | float]:
    """Input rows [groups, rows, width] of all calls in one pass, and how many count.

    Several calls (a layer used twice) are further positions. `masks` (for each call, true for a
    position that counts) leave the others out of the mean.
    """
    vectors = joined(calls, sharing)
    examples, positions = vectors.shape[1:3]
    if masks is None:
        count = examples if sharing == "reduce" else examples * positions
        return shared(vectors, sharing, torch.mean), count
    weights = joined([by_example(mask[..., None])[None] for mask in masks], sharing)
    weights = weights.to(vectors.dtype)
    if sharing == "expand":
        return (vectors * weights).flatten(1, 2), weights.sum()
    counted = weights.sum(2)
    return (vectors * weights).sum(2) / counted.clamp(min=1), counted.clamp(max=1).sum()


def shared(vectors: Tensor, sharing: Sharing, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[groups, examples, positions, width] to rows: all of them, or one per example."""
    return vectors.flatten(1, 2) if sharing == "expand" else reduce(vectors, 2)


def joined(calls: list[Tensor], sharing: Sharing) -> Tensor:
    """The calls' vectors [groups, examples, positions, width] as one, along the positions."""
    if len(calls) == 1:
        return calls[0]
    if sharing == "expand":  # the number of examples may differ from call to call
        calls = [vectors.flatten(1, 2)[:, None] for vectors in calls]
    else:
        guards.refuse_uneven_calls([vectors.shape[1] for vectors in calls])
    return torch.cat(calls, 2)


def by_example(tensor: Tensor) -> Tensor:
    """[examples, ..., width] as [examples, positions, width]; a single vector is one example."""
    if tensor.dim() == 1:
        return tensor[None, None]
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def second_moment(rows: Tensor, dtype: torch.dtype, *, diagonal: bool = False) -> Tensor:
    """Sum over rows of r r', or its diagonal, in `dtype`: [groups, dim, dim] or [groups, dim]."""
    if diagonal:
        return rows.to(dtype).square().sum(1)
    if rows.dtype == dtype:
        return torch.bmm(rows.mT, rows)
    return torch.bmm(rows.mT, rows, out_dtype=dtype)


def product_ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the factor's dtype, but for bf16 and fp16 on CUDA, whose products accumulate in fp32."""
    reduced = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor if tensor.is_cuda and reduced and dtype == torch.float32 else tensor.to(dtype)
