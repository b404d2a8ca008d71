"""Convolutions: nn.Conv1d, nn.Conv2d, nn.Conv3d, whose rows are patches; groups are entries."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decaylab.curvature.kernels import gathered_patches
from decaylab.curvature.kinds.kind import Kind, Site, Use
from decaylab.curvature.kinds.rows import (
    Columns,
    Sharing,
    counted_rows,
    joined,
    product_ready,
    rows_like,
    second_moment,
    shared,
)
from decaylab.networks.layers import NormalisedConv2d

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Conv(Kind):
    """s[position] = W patch[position] + b, each group for itself."""

    bases = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    known = (NormalisedConv2d,)
    masked = False
    classes_last = False

    def matches(self, module: nn.Module) -> bool:
        """A convolution whose `forward`, and what that calls, is torch's."""
        kind: Any = type(module)
        base: Any = self.base(module)
        inherited = base is not None and kind._conv_forward is base._conv_forward
        return inherited and super().matches(module)

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """Groups, channels times kernel, output channels of a group."""
        return module.groups, weight.shape[1:].numel(), weight.shape[0] // module.groups

    def stored_order(self, module: Any) -> Tensor | None:
        """Of a channels-last weight, which lies in memory as (out, kernel axes, in)."""
        weight = module.weight
        if weight.is_contiguous() or not weight.movedim(1, -1).is_contiguous():
            return None
        shape = weight.shape[1:]
        return torch.arange(shape.numel()).view(*shape[1:], shape[0]).movedim(-1, 0).flatten()

    def as_weight(self, site: Site, rows: Tensor) -> Tensor:
        """A view of rows [groups, out / groups, in / groups] in the shape of the weight."""
        shape = site.weight.shape
        if site.order is None:
            return rows.view(shape)
        return rows.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)

    def input_moment(
        self, site: Site, uses: list[Use], sharing: Sharing
    ) -> tuple[Tensor, Tensor | float]:
        """Sum of patch patch' over examples and output positions, and how many there are."""
        inputs = [product_ready(use.inputs.to_dense(), site.shape.dtype) for use in uses]
        calls = [patch_rows(site, x, site.columns) for x in inputs]
        rows, count = counted_rows(calls, None, sharing)
        return second_moment(rows, site.shape.dtype, diagonal=site.shape.input_diagonal), count

    def gradient_moment(
        self, site: Site, uses: list[Use], gradients: list[Tensor], sharing: Sharing
    ) -> Tensor:
        """Sum of g g' over them."""
        shape = site.shape
        ready = [product_ready(g, shape.dtype) for g in gradients]
        vectors = joined([channel_rows(site, g, shape.output_dim) for g in ready], sharing)
        rows = shared(vectors, sharing, torch.sum)
        return second_moment(rows, shape.dtype, diagonal=shape.output_diagonal)

    def same_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a functional call (behind input, weight and bias) is the module's own."""
        if args == (module.stride, module.padding, module.dilation, module.groups) and not kwargs:
            return bool(module.padding_mode == "zeros")  # as torch's own module calls it
        names = ("stride", "padding", "dilation", "groups")
        defaults = dict(zip(names, (1, 0, 1, 1), strict=True))
        arguments = defaults | kwargs | dict(zip(names, args, strict=False))

        def tuples(value: Any) -> Any:
            return (value,) * len(module.kernel_size) if isinstance(value, int) else value

        same = all(tuple(tuples(arguments[n])) == tuple(getattr(module, n)) for n in names[:3])
        return same and arguments["groups"] == module.groups and module.padding_mode == "zeros"


def patches(layer: Convolution, inputs: Tensor, *, channels_last: bool) -> Tensor:
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
    outputs = _positions(sizes, kernel, stride, dilation)
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


def channel_rows(site: Site, images: Tensor, width: int) -> Tensor:
    """A view [groups, examples, positions, width] of images [examples, groups * width, *axes]."""
    layer: Any = site.module
    if images.dim() == len(layer.kernel_size) + 1:
        images = images[None]
    split = images.reshape(len(images), site.groups, width, images.shape[2:].numel())
    return split.permute(1, 0, 3, 2)


def patch_rows(site: Site, inputs: Tensor, columns: Columns) -> Tensor:
    """[groups, examples, positions, wide] of a convolution's inputs: its patches, copied once."""
    layer: Any = site.module
    axes = len(layer.kernel_size)
    channels_last = site.order is not None
    if inputs.is_cuda and columns.weight and not channels_last:
        gathered = _gathered(layer, inputs, columns)
        if gathered is not None:
            return gathered
    if channels_last and inputs.dim() == axes + 2:
        inputs = inputs.movedim(1, -1).contiguous().movedim(-1, 1)
    view = patches(layer, inputs, channels_last=channels_last)
    outputs, patch = view.shape[2 : 2 + axes], view.shape[2 + axes :]
    shape = (view.shape[0], view.shape[1], outputs.numel())
    rows = rows_like(view, shape, patch.numel(), columns)
    if columns.weight:
        room = rows[..., : patch.numel()].view(*view.shape)
        copy_runs(room, view)
    return rows


def _gathered(layer: Convolution, inputs: Tensor, columns: Columns) -> Tensor | None:
    """`patch_rows` in plain order by one kernel; None if there is none for this layer."""
    axes = len(layer.kernel_size)
    if axes > 2 or layer.padding_mode != "zeros" or inputs.dim() != axes + 2:
        return None
    inputs = inputs if axes == 2 else inputs[:, :, None]  # a Conv1d is one of height 1
    shapes = (layer.kernel_size, layer.stride, _padding(layer), layer.dilation)
    geometry = _geometry(inputs.shape[2:], *map(tuple, shapes))
    positions = geometry[-1][0] * geometry[-1][1]
    rows = inputs.new_empty(layer.groups, len(inputs) * positions, columns.wide)
    if not gathered_patches(rows, inputs, *geometry, bias=columns.bias):
        return None
    return rows.view(layer.groups, len(inputs), positions, columns.wide)


@lru_cache(maxsize=1024)
def _geometry(
    sizes: Sequence[int],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> tuple[Any, Any, Any, Any, Any]:
    """Kernel, stride, first margins, dilation and output positions in two axes."""
    missing = 2 - len(kernel)
    margins = ((0, 0),) * missing + padding
    kernel, stride, dilation = ((1,) * missing + each for each in (kernel, stride, dilation))
    padded = [size + sum(margin) for size, margin in zip(sizes, margins, strict=True)]
    outputs = tuple(_positions(padded, kernel, stride, dilation))
    return kernel, stride, tuple(margin[0] for margin in margins), dilation, outputs


def _positions(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """How many positions a kernel has along each axis of a padded input."""
    return [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
    ]


def copy_runs(target: Tensor, source: Tensor) -> None:
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


def _padding(layer: Convolution) -> list[tuple[int, int]]:
    """Padding before and after each spatial axis; 'same' puts the odd one after, as torch does."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in layer.padding if not isinstance(p, str)]
