"""Leaving a model's buffers as they were: running statistics, power iterations, counters."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards every buffer is the tensor that it was, or None, with the values that it had."""
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                # unseen by autograd: a graph that waits for its backward may have saved it
                buffer.data.copy_(values)
