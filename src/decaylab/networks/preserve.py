"""Leaving a model as it was: its modes, its buffers, and the generators that it draws from."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Afterwards modes, buffers and torch's generators are as they were.

    Inside, modules compiled in place run uncompiled: passes in other modes and with other tensors
    would use up what torch.compile allows of recompilations.
    """
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    with (
        torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        preserved_modes(model),
        preserved_buffers(model),
        torch.random.fork_rng(cuda_devices(model)),
    ):
        yield


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in train or eval mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards every buffer is the tensor that it was, or None, with the values that it had.

    Running statistics, power iterations, counters.
    """
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


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """The GPUs that hold a part of the model."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return sorted((device for device in devices if device.type == "cuda"), key=str)
