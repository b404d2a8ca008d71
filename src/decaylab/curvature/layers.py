"""Layers as matrix products: which vectors a weight multiplies, and what comes back for them.

A Linear or convolution layer computes s = W a for many vectors a: one per example and output
position. K-FAC needs those a (patches, for a convolution) and the gradients g at the matching s,
as rows:

    input rows     [groups, rows, in / groups]      in the order of `weight.flatten(1)`: (channel,
    kernel axes) gradient rows  [groups, rows, out / groups]

`expand` (Martens & Grosse 2015; Grosse & Martens 2016 for convolutions) makes a row of each
example and position. `reduce` (Eschenhagen et al. 2023) makes one row of each example: a averaged,
g summed over its positions.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sharing = Literal["expand", "reduce"]
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYER_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_channels_last(layer: Layer) -> bool:
    """Whether a convolution's weight lies in memory as (out, kernel axes, in)."""
    weight = layer.weight
    if isinstance(layer, nn.Linear) or weight.is_contiguous():
        return False
    return weight.movedim(1, -1).is_contiguous()


def groups_of(layer: Layer) -> int:
    """Number of independent blocks of the layer: a convolution's groups."""
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def input_rows(
    layer: Layer, inputs: list[Tensor], sharing: Sharing, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | int]:
    """The rows a of the calls of `layer` in one pass, and how many count.

    Several calls (a layer used twice) are further positions. `mask` (true for a row of the logits
    that counts) is applied to Linear layers whose leading axes are those of the mask: a masked
    position is left out of the mean.
    """
    masked = mask is not None and isinstance(layer, nn.Linear)
    masked = masked and all(mask.shape == x.shape[:-1] for x in inputs)  # type: ignore[union-attr]
    if isinstance(layer, nn.Linear):
        vectors = _joined([_by_example(x)[None] for x in inputs], sharing)
    else:
        vectors = _joined([patches(layer, x) for x in inputs], sharing)
    if not masked:
        examples, positions = vectors.shape[1:3]
        return _shared(vectors, sharing, torch.mean), examples * (
            1 if sharing == "reduce" else positions
        )
    assert mask is not None
    weights = _joined([_by_example(mask[..., None])[None] for _ in inputs], sharing)
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


def patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> Tensor:
    """The patch under each output position: [groups, examples, positions, in / groups].

    A strided view of the padded input, copied once; any number of axes, stride, padding (numbers,
    'same', 'valid', and every padding mode), dilation, groups and memory format. The last axis
    runs over (channel, kernel axes).
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
    if is_channels_last(layer):
        view = view.movedim(2 + axes, -1)
    return view.reshape(layer.groups, examples, math.prod(outputs), -1)


def second_moment(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over rows of r r', accumulated and returned in `dtype`: [groups, dim, dim]."""
    if rows.dtype == dtype:
        return torch.bmm(rows.mT, rows)
    return torch.bmm(rows.mT, rows, out_dtype=dtype)


def input_moment(
    rows: Tensor, count: Tensor | int, dtype: torch.dtype, *, weight: bool, bias: bool
) -> Tensor:
    """Sum over rows of [a; 1] [a; 1]': [groups, dim, dim].

    The a is there if a weight is trained, the 1 if a bias is.
    """
    groups, _, width = rows.shape
    if not bias:
        return second_moment(rows, dtype)
    dim = width * weight + 1
    moment = torch.empty(groups, dim, dim, dtype=dtype, device=rows.device)
    if weight:
        total = rows.sum(1, dtype=dtype)
        moment[:, :width, :width] = second_moment(rows, dtype)
        moment[:, :width, width] = total
        moment[:, width, :width] = total
    moment[:, -1, -1] = count
    return moment


def input_squares(
    rows: Tensor, count: Tensor | int, dtype: torch.dtype, *, weight: bool, bias: bool
) -> Tensor:
    """The diagonal of `input_moment`, for a side too long for a matrix: [groups, dim]."""
    parts = [rows.to(dtype).square().sum(1)] if weight else []
    if bias:
        parts.append(torch.ones(len(rows), 1, dtype=dtype, device=rows.device) * count)
    return torch.cat(parts, 1)


def _shared(vectors: Tensor, sharing: Sharing, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[groups, examples, positions, width] to rows: all of them, or one per example."""
    return vectors.flatten(1, 2) if sharing == "expand" else reduce(vectors, 2)


def _joined(calls: list[Tensor], sharing: Sharing) -> Tensor:
    """The calls' vectors [groups, examples, positions, width] as one, along the positions."""
    if len(calls) == 1:
        return calls[0]
    if sharing == "expand":  # the number of examples may differ from call to call
        calls = [vectors.flatten(1, 2)[:, None] for vectors in calls]
    return torch.cat(calls, 2)


def _by_example(tensor: Tensor) -> Tensor:
    """[examples, ..., width] as [examples, positions, width]; a single vector is one example."""
    if tensor.dim() == 1:
        return tensor[None, None]
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[tuple[int, int]]:
    """Padding before and after each spatial axis; 'same' puts the odd one after, as torch does."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in layer.padding if not isinstance(p, str)]
