"""Layers as matrix products: which vectors a weight multiplies, and what comes back for them.

A Linear or convolution layer computes s = W a for many vectors a: one per example and output
position. K-FAC needs those a (patches, for a convolution) and the gradients g at the matching s,
as rows:

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
import torch.nn.functional as F
from torch import Tensor, nn

from decaylab.errors import DecaylabError
from decaylab.networks.layers import NormalisedConv2d, NormalisedLinear

Sharing = Literal["expand", "reduce"]
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
# By exact type: a subclass may compute something else. Those of ours are linear maps too.
LAYER_TYPES: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(NormalisedLinear, NormalisedConv2d),
)


def is_channels_last(layer: Layer) -> bool:
    """Whether a convolution's weight lies in memory as (out, kernel axes, in)."""
    weight = layer.weight
    return not weight.is_contiguous() and weight.movedim(1, -1).is_contiguous()


def groups_of(layer: Layer) -> int:
    """Number of independent blocks of the layer: a convolution's groups."""
    return 1 if isinstance(layer, nn.Linear) else layer.groups


@dataclass(frozen=True)
class Columns:
    """What a row of inputs holds: a if a weight is trained, 1 if a bias is, zeros up to `wide`.

    `channels_last`: a patch runs over (kernel axes, channel), not over (channel, kernel axes).
    """

    weight: bool
    bias: bool
    wide: int
    channels_last: bool


def input_rows(
    layer: Layer,
    inputs: list[Tensor],
    columns: Columns,
    sharing: Sharing,
    masks: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | int]:
    """The rows [a, 1, 0] of the calls of `layer` in one pass, and how many count.

    [groups, rows, wide]. Several calls (a layer used twice) are further positions. `masks` (for
    each call of a Linear layer, true for a position that counts) leave the others out of the mean.
    """
    if isinstance(layer, nn.Linear):
        vectors = _joined([_linear_rows(x, columns) for x in inputs], sharing)
    else:
        vectors = _joined([_patch_rows(layer, x, columns) for x in inputs], sharing)
    examples, positions = vectors.shape[1:3]
    if masks is None:
        count = examples if sharing == "reduce" else examples * positions
        return _shared(vectors, sharing, torch.mean), count
    weights = _joined([_by_example(mask[..., None])[None] for mask in masks], sharing)
    weights = weights.to(vectors.dtype)
    if sharing == "expand":
        return (vectors * weights).flatten(1, 2), weights.sum()
    kept = weights.sum(2)
    return (vectors * weights).sum(2) / kept.clamp(min=1), kept.clamp(max=1).sum()


def gradient_rows(layer: Layer, gradients: list[Tensor], sharing: Sharing) -> Tensor:
    """The rows g of those calls, from the gradients at their outputs."""
    if isinstance(layer, nn.Linear):
        vectors = [_by_example(gradient)[None] for gradient in gradients]
    else:
        axes = len(layer.kernel_size)
        batched = [g[None] if g.dim() == axes + 1 else g for g in gradients]
        split = [g.flatten(2).unflatten(1, (layer.groups, -1)) for g in batched]
        vectors = [g.permute(1, 0, 3, 2) for g in split]
    return _shared(_joined(vectors, sharing), sharing, torch.sum)


def patches(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, *, channels_last: bool
) -> Tensor:
    """The patch under each output position: a view [groups, examples, *positions, *patch].

    Of the padded input, without a copy; any number of axes, stride, padding (numbers, 'same',
    'valid', and every padding mode), dilation, groups and memory format. `patch` runs over
    (channel, kernel axes), or with `channels_last` over (kernel axes, channel), which is the order
    in memory if the inputs are in that format.
    """
    axes = len(layer.kernel_size)
    if inputs.dim() == axes + 1:
        inputs = inputs[None]
    margins = [m for before_after in reversed(_padding(layer)) for m in before_after]
    if any(margins):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, margins, mode=mode)
    examples, channels, *sizes = inputs.shape
    per_group = channels // layer.groups
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    outputs = [(sizes[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(axes)]
    by_example, by_channel, *by_axis = inputs.stride()
    view = inputs.as_strided(
        (layer.groups, examples, *outputs, per_group, *kernel),
        (
            by_channel * per_group,
            by_example,
            *(by_axis[i] * stride[i] for i in range(axes)),
            by_channel,
            *(by_axis[i] * dilation[i] for i in range(axes)),
        ),
    )
    return view.movedim(2 + axes, -1) if channels_last else view


def second_moment(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over rows of r r', accumulated and returned in `dtype`: [groups, dim, dim]."""
    if rows.dtype == dtype:
        return torch.bmm(rows.mT, rows)
    return torch.bmm(rows.mT, rows, out_dtype=dtype)


def _linear_rows(inputs: Tensor, columns: Columns) -> Tensor:
    """[1, examples, positions, wide] of a Linear layer's inputs."""
    vectors = _by_example(inputs)[None]
    width = vectors.shape[-1]
    if columns.weight and columns.wide == width:
        return vectors
    rows = _rows_like(vectors, vectors.shape[:3], width, columns)
    if columns.weight:
        rows[..., :width] = vectors
    return rows


def _patch_rows(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, columns: Columns
) -> Tensor:
    """[groups, examples, positions, wide] of a convolution's inputs: its patches, copied once."""
    axes = len(layer.kernel_size)
    view = patches(layer, inputs, channels_last=columns.channels_last)
    outputs, patch = view.shape[2 : 2 + axes], view.shape[2 + axes :]
    shape = (view.shape[0], view.shape[1], outputs.numel())
    rows = _rows_like(view, shape, patch.numel(), columns)
    if columns.weight:
        room = rows[..., : patch.numel()].view(*view.shape)
        _copy_runs(room, view)
    return rows


def _copy_runs(target: Tensor, source: Tensor) -> None:
    """Copy; where both lie in runs of 16 bytes, run by run instead of number by number."""
    run = 16 // source.element_size()
    for tensor in (target, source):
        if (
            tensor.stride(-1) != 1
            or tensor.shape[-1] % run
            or tensor.data_ptr() % 16
            or tensor.storage_offset() % run  # memory of others may begin anywhere
            or any(stride % run for stride in tensor.stride()[:-1])
        ):
            target.copy_(source)
            return
    target.view(torch.complex128).copy_(source.view(torch.complex128))


def _rows_like(like: Tensor, shape: Sequence[int], width: int, columns: Columns) -> Tensor:
    """Uninitialised but for the 1 and the zeros behind the first `width` columns."""
    rows = like.new_empty(*shape, columns.wide)
    width = width * columns.weight
    rows[..., width:] = 0
    if columns.bias:
        rows[..., width] = 1
    return rows


def _shared(vectors: Tensor, sharing: Sharing, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[groups, examples, positions, width] to rows: all of them, or one per example."""
    return vectors.flatten(1, 2) if sharing == "expand" else reduce(vectors, 2)


def _joined(calls: list[Tensor], sharing: Sharing) -> Tensor:
    """The calls' vectors [groups, examples, positions, width] as one, along the positions."""
    if len(calls) == 1:
        return calls[0]
    if sharing == "expand":  # the number of examples may differ from call to call
        calls = [vectors.flatten(1, 2)[:, None] for vectors in calls]
    elif len({vectors.shape[1] for vectors in calls}) > 1:
        raise DecaylabError(
            "a layer was called with different numbers of examples in one forward pass: "
            "build KFAC with sharing='expand'"
        )
    return torch.cat(calls, 2)


def _by_example(tensor: Tensor) -> Tensor:
    """[examples, ..., width] as [examples, positions, width]; a single vector is one example."""
    if tensor.dim() == 1:
        return tensor[None, None]
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[tuple[int, int]]:
    """Padding before and after each spatial axis; 'same' puts the odd one after, as torch does."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in layer.padding if not isinstance(p, str)]
