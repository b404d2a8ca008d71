"""Kernels for CUDA where torch would run through memory several times.

Each has a version in plain torch, which is what runs on a CPU or without Triton, and what the
kernel is tested against.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096


def fold_(average: Tensor, total: Tensor, keep: Tensor, share: Tensor) -> None:
    """average[i] <- keep[i] average[i] + share[i] total[i], in place; where keep[i] is 1, nothing.

    average and total are [n, ...], keep and share [n]. What is left out may be anything: a total
    that is not finite does not spread. On CUDA one pass over the memory.
    """
    if _kernel() is not None and average.is_cuda and total.is_contiguous():
        count, size = len(average), average[0].numel()
        grid = (count, -(-size // BLOCK))
        arguments = (average, total, keep, share, average.stride(0), size)
        with torch.cuda.device(average.device):
            _kernel()[grid](*arguments, BLOCK=BLOCK)
        return
    entries = (-1,) + (1,) * (total.dim() - 1)
    kept = keep.view(entries)
    mixed = torch.where(kept == 1, average, kept * average + share.view(entries) * total)
    average.copy_(mixed)


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
        average, total, keep, share, stride, size, BLOCK: tl.constexpr
    ):
        entry = tl.program_id(0).to(tl.int64)
        kept = tl.load(keep + entry)
        if kept != 1:
            at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            here = average + entry * stride + at
            old = tl.load(here, mask=inside)
            new = tl.load(total + entry * size + at, mask=inside)
            tl.store(here, kept * old + tl.load(share + entry) * new, mask=inside)

    return fold
