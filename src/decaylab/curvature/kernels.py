"""Kernels for CUDA where torch would run through memory several times.

Each has a version in plain torch, which is what runs on a CPU or without Triton, and what the
kernel is tested against.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096


def fold_(average: Tensor, total: Tensor, keep: Tensor, count: Tensor | float) -> None:
    """average[i] <- keep[i] average[i] + (1 - keep[i]) total[i] / count, in place.

    average and total are [n, ...], keep is [n]. Where keep[i] is 1 nothing is read of total[i]: one
    that is not finite does not spread. On CUDA one pass over the memory.
    """
    if average.is_cuda and total.is_contiguous() and _kernel() is not None:
        if isinstance(count, Tensor):  # of masked rows; else a number that the kernel takes
            total, count = total / count, 1.0
        size = average[0].numel()
        with torch.cuda.device(average.device):
            _kernel()[len(average), -(-size // BLOCK)](
                *(average, total, keep, float(count), average.stride(0), size), BLOCK=BLOCK
            )
        return
    kept = keep.view((-1,) + (1,) * (total.dim() - 1))
    mixed = kept * average + (1 - kept) / count * total
    average.copy_(torch.where(kept == 1, average, mixed))


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
        entry = tl.program_id(0).to(tl.int64)
        kept = tl.load(keep + entry)
        if kept != 1:
            at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            here = average + entry * stride + at
            old = tl.load(here, mask=inside)
            new = tl.load(total + entry * size + at, mask=inside)
            tl.store(here, kept * old + (1 - kept) / count * new, mask=inside)

    return fold
