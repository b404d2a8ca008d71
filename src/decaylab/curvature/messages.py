"""Sending many tensors between ranks in a few messages."""

from collections.abc import Iterator, Sequence

from torch import Tensor

# Bytes sent at once: small tensors are sent together, and large ones need no second buffer.
SENT_AT_ONCE = 2**27


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, those of one dtype together, in pieces of no more than SENT_AT_ONCE."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        room = SENT_AT_ONCE
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and tensor.nbytes > room:
                yield bucket
                bucket, room = [], SENT_AT_ONCE
            bucket.append(tensor)
            room -= tensor.nbytes
        yield bucket
