"""CUDA streams that only one owner has."""

from weakref import WeakValueDictionary

import torch

# How many streams of a priority torch makes; it hands them out in turn, again and again.
IN_TORCH = 32

# By their `id`: where there were no more, two objects have one stream, which both still own.
_owned: WeakValueDictionary[int, torch.cuda.Stream] = WeakValueDictionary()


def own_stream(device: torch.device | None, priority: int = 0) -> torch.cuda.Stream:
    """A stream that no other owner has now; one of all, if there is no such left.

    cuBLAS has one workspace for a stream, whose address becomes part of the graphs that are
    captured there: those of two owners would write to it at the same time, or one would free the
    other's (pytorch/pytorch issue 193402).
    """
    taken = {stream.cuda_stream for stream in _owned.values()}
    for _ in range(IN_TORCH):
        stream = torch.cuda.Stream(device, priority=priority)
        if stream.cuda_stream not in taken:
            break
    _owned[id(stream)] = stream
    return stream
