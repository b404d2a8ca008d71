"""Kernels for CUDA where torch would run through memory, or launch, several times.

Each has a version in plain torch, which is what runs on a CPU or without Triton, and what the
kernel is tested against. Those that return False have done nothing.
"""

from collections.abc import Sequence
from functools import cache
from subprocess import SubprocessError
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from decaylab.errors import warn_user

BLOCK = 4096
# The most columns of a tile of BLOCK numbers.
COLUMNS = 128
# Triton compiles a kernel when it is first used, with a C compiler that may not be there.
_usable = True


def fold_(average: Tensor, total: Tensor, keep: Tensor, count: Tensor) -> None:
    """average[i] <- keep[i] average[i] + (1 - keep[i]) total[i] / count[i], in place.

    average and total are [n, ...], keep and count [n], all contiguous. Where keep[i] is 1 nothing
    is read of total[i]: one that is not finite does not spread. On CUDA one pass over the memory.
    """
    if average.is_cuda and _folded(average, total, keep, count):
        return
    ones = (1,) * (total.dim() - 1)
    retention = keep.view(-1, *ones)
    mixed = retention * average + (1 - retention) / count.view(-1, *ones) * total
    average.copy_(torch.where(retention == 1, average, mixed))


def gathered_patches(
    rows: Tensor,
    inputs: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    margin: Sequence[int],
    dilation: Sequence[int],
    outputs: Sequence[int],
    *,
    bias: bool,
) -> bool:
    """Write the patch under each output position of a convolution to a row, with a 1 behind it.

    inputs [examples, channels, height, width] in any memory format, rows [groups, examples *
    positions, wide]: (channel, kernel axes) of a group, then 1 with `bias`, then zeros. `margin` is
    how many zeros precede each axis. One pass over the memory.
    """
    groups, count, wide = rows.shape
    per_group = inputs.shape[1] // groups
    columns = min(COLUMNS, 2 ** (wide - 1).bit_length())
    height = BLOCK // columns
    grid = -(-count // height), -(-wide // columns), groups
    sizes = (*inputs.shape[2:], outputs[1], outputs[0] * outputs[1])
    numbers = (count, per_group, per_group * kernel[0] * kernel[1], int(bias), *sizes)
    numbers = (*numbers, *stride, *margin, *dilation, *inputs.stride())
    constants = {"HIGH": kernel[0], "LONG": kernel[1], "ROWS": height, "COLUMNS": columns}
    return _launched("gather", grid, (rows, inputs, wide, *numbers), constants)


def packed_triangles(triangles: Tensor, matrices: Tensor) -> bool:
    """Write `storage.pack(matrices)` to `triangles`, reading no more than a triangle of each."""
    count, rows, half = triangles.shape
    tile = 32, min(COLUMNS, 2 ** (half - 1).bit_length())
    grid = -(-rows // tile[0]), -(-half // tile[1]), count
    numbers = (triangles, matrices, matrices.shape[-1], rows, half)
    return _launched("pack", grid, numbers, {"ROWS": tile[0], "COLUMNS": tile[1]})


def _folded(average: Tensor, total: Tensor, keep: Tensor, count: Tensor) -> bool:
    """`fold_` by the kernel."""
    size = average[0].numel()
    grid = -(-size // BLOCK), len(average)  # the second axis is the short one on a GPU
    return _launched("fold", grid, (average, total, keep, count, size), {"BLOCK": BLOCK})


def _launched(
    name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, int]
) -> bool:
    """Launch a kernel on its first argument's device; False if it cannot be."""
    global _usable
    if not _usable or _kernels() is None:
        return False
    try:
        with torch.cuda.device(arguments[0].device):
            getattr(_kernels(), name)[grid](*arguments, **constants)
    except (RuntimeError, OSError, SubprocessError) as error:  # what compiling it runs into
        _usable = False
        warn_user(f"Triton cannot compile here ({error}): K-FAC uses slower torch operations")
        return False
    return True


@cache
def _kernels() -> Any:
    """The Triton kernels, by name; None if there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    # one compilation for all entries, wherever their numbers begin
    @triton.jit(do_not_specialize_on_alignment=["keep", "count"])
    def fold(average, total, keep, count, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        entry = tl.program_id(1).to(tl.int64)
        kept = tl.load(keep + entry)
        if kept != 1:
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            here = entry * size + at
            old = tl.load(average + here, mask=inside)
            new = tl.load(total + here, mask=inside)
            share = (1 - kept) / tl.load(count + entry)
            tl.store(average + here, kept * old + share * new, mask=inside)

    # one compilation for all sizes; `wide`, a multiple of 32, may widen the stores
    sizes = ["count", "per_group", "width", "bias", "height", "length", "out_length", "positions"]
    sizes += ["stride_h", "stride_l", "margin_h", "margin_l", "dilation_h", "dilation_l"]
    sizes += ["by_example", "by_channel", "by_row", "by_column"]

    @triton.jit(do_not_specialize=sizes)
    def gather(  # type: ignore[no-untyped-def]
        rows,
        inputs,
        wide,
        count,
        per_group,
        width,
        bias,
        height,
        length,
        out_length,
        positions,
        stride_h,
        stride_l,
        margin_h,
        margin_l,
        dilation_h,
        dilation_l,
        by_example,
        by_channel,
        by_row,
        by_column,
        HIGH: tl.constexpr,
        LONG: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        group = tl.program_id(2).to(tl.int64)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        example, position = row // positions, row % positions
        channel, place = column // (HIGH * LONG), column % (HIGH * LONG)
        y = (position // out_length) * stride_h - margin_h + (place // LONG) * dilation_h
        x = (position % out_length) * stride_l - margin_l + (place % LONG) * dilation_l
        within = (y >= 0) & (y < height) & (x >= 0) & (x < length)
        at = inputs + group * per_group * by_channel + example.to(tl.int64) * by_example
        at += channel.to(tl.int64) * by_channel + y * by_row + x * by_column
        values = tl.load(at, mask=within & (row < count) & (column < width), other=0.0)
        ones = (column == width) & (bias != 0)
        values = tl.where(ones, 1.0, values).to(rows.dtype.element_ty)
        to = rows + (group * count + row.to(tl.int64)) * wide + column
        tl.store(to, values, mask=(row < count) & (column < wide))

    @triton.jit
    def pack(  # type: ignore[no-untyped-def]
        triangles,
        matrices,
        length,
        rows,
        half,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        entry = tl.program_id(2).to(tl.int64)
        i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (i < rows) & (j < half)
        first = j < i  # of the first half of the matrix's columns; else the last part, transposed
        row, column = tl.where(first, i - 1, half + j), tl.where(first, j, half + i)
        at = matrices + entry * length * length + row.to(tl.int64) * length + column
        there = inside & (row < length) & (column < length)  # an odd length has zeros behind it
        values = tl.load(at, mask=there, other=0.0)
        tl.store(triangles + (entry * rows + i) * half + j, values, mask=inside)

    return SimpleNamespace(fold=fold, gather=gather, pack=pack)
