"""CUDA streams that only one owner has."""

from weakref import WeakKeyDictionary

import torch

# How many streams of a priority torch makes; it hands them out in turn, again and again.
IN_TORCH = 32

# Their handles, by owner: torch leaves weak references to a stream dangling when it goes
# (pytorch/pytorch pull request 183403).
_owned: WeakKeyDictionary[object, set[int]] = WeakKeyDictionary()


def own_stream(owner: object, device: torch.device | None, priority: int = 0) -> torch.cuda.Stream:
    """A stream that nobody else owns now; one of all, if there is no such left.

    It is the owner's until the owner is gone.

    cuBLAS has one workspace for a stream, whose address becomes part of the graphs that are
    captured there: those of two owners would write to it at the same time, or one would free the
    other's (pytorch/pytorch issue 193402).
    """
    taken = set().union(*_owned.values())
    for _ in range(IN_TORCH):
        stream = torch.cuda.Stream(device, priority=priority)
        if stream.cuda_stream not in taken:
            break
    _owned.setdefault(owner, set()).add(stream.cuda_stream)
    return stream
