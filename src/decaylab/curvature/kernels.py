"""Kernels for CUDA where torch would run through memory several times.

Each has a version in plain torch, which is what runs on a CPU or without Triton, and what the
kernel is tested against.
"""

import warnings
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096
# Triton compiles a kernel when it is first used, with a C compiler that may not be there.
_usable = True


def fold_(average: Tensor, total: Tensor, keep: Tensor, count: Tensor | float) -> None:
    """average[i] <- keep[i] average[i] + (1 - keep[i]) total[i] / count, in place.

    average and total are [n, ...], keep is [n], count a number or [n]. Where keep[i] is 1 nothing
    is read of total[i]: one that is not finite does not spread. On CUDA one pass over the memory.
    """
    if isinstance(count, Tensor) and count.dim():
        # an entry without rows, whose count is zero, is one that is left as it is
        count = count.view((-1,) + (1,) * (total.dim() - 1)).to(total.dtype)
    if average.is_cuda and total.is_contiguous() and _folded(average, total, keep, count):
        return
    kept = keep.view((-1,) + (1,) * (total.dim() - 1))
    mixed = kept * average + (1 - kept) / count * total
    average.copy_(torch.where(kept == 1, average, mixed))


def _folded(average: Tensor, total: Tensor, keep: Tensor, count: Tensor | float) -> bool:
    """`fold_` by the kernel; False, with nothing done, where there is none."""
    global _usable
    if not _usable or _kernel() is None:
        return False
    if isinstance(count, Tensor):  # of masked rows; else a number that the kernel takes
        total, count = total / count, 1.0
    size = average[0].numel()
    grid = -(-size // BLOCK), len(average)  # the second axis is the short one on a GPU
    try:
        with torch.cuda.device(average.device):
            _kernel()[grid](
                *(average, total, keep, float(count), average.stride(0), size), BLOCK=BLOCK
            )
    except (RuntimeError, OSError, SubprocessError) as error:  # what compiling it runs into
        _usable = False
        said = f"Triton cannot compile here ({error}): K-FAC folds its factors by torch, slower"
        warnings.warn(said, stacklevel=2)
        return False
    return True


@cache
def _kernel() -> Any:
    """The Triton kernel of `fold_`; None where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def fold(  # type: ignore[no-untyped-def]
        average, total, keep, count, stride, size, BLOCK: tl.constexpr
    ):
        entry = tl.program_id(1).to(tl.int64)
        kept = tl.load(keep + entry)
        if kept != 1:
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            here = average + entry * stride + at
            old = tl.load(here, mask=inside)
            new = tl.load(total + entry * size + at, mask=inside)
            tl.store(here, kept * old + (1 - kept) / count * new, mask=inside)

    return fold
