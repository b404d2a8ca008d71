"""A model on whatever its inputs are, as a function of one tensor that returns logits."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.preserve import bare, check_inputs
from decaylab.errors import Lacks, WrongType
from decaylab.networks import sharded
from decaylab.networks.calling import Inputs, LogitsRule, call, find_logits
from decaylab.networks.sharded import device_of, original_class


def applied(
    model: nn.Module, inputs: Inputs, logits: LogitsRule = None
) -> tuple[nn.Module, Tensor]:
    """A module with the model's parameters that takes one tensor and returns logits [..., C].

    The tensor is the first of the inputs (the others stay as they are), or, where the inputs are a
    function of the model, a placeholder that is not read. Of an output that is not a tensor, the
    logits are what `logits` says, what it calls `logits`, or the first floating-point tensor of two
    or more axes: nanoGPT's (logits, loss), a recurrent layer's (output, state). One number for each
    example, [N], is taken as [N, 1].
    """
    model = bare(model)
    if isinstance(inputs, Tensor):
        return _view(model, lambda x: x, logits), inputs
    if isinstance(inputs, Mapping):
        key, tensor = _first(inputs.items())
        return _view(model, lambda x: {**inputs, key: x}, logits), tensor
    if isinstance(inputs, tuple | list):
        at, tensor = _first(enumerate(inputs))
        return _view(model, lambda x: (*inputs[:at], x, *inputs[at + 1 :]), logits), tensor
    dtype = next(model.parameters()).dtype
    placeholder = torch.zeros(1, 1, dtype=dtype, device=device_of(model))
    return _view(model, lambda _: inputs, logits), placeholder


def whole(inputs: Inputs) -> bool:
    """Whether a batch cannot be cut into chunks: more than one tensor belongs to it."""
    return not isinstance(inputs, Tensor)


def floating(inputs: Inputs) -> bool:
    """Whether there is a tensor of numbers, not tokens, that a Jacobian can be taken at."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, tuple | list):
        inputs = next((part for part in inputs if isinstance(part, Tensor)), None)
    return isinstance(inputs, Tensor) and inputs.is_floating_point()


def moved(inputs: Inputs, device: torch.device | str) -> Inputs:
    """The inputs with every tensor on a device."""
    return changed(inputs, lambda tensor: tensor.to(device))


def changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with a function of every tensor in its place."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: changed(value, change) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(changed(value, change) for value in inputs)
    return inputs


def input_sizes(inputs: Inputs) -> list[float]:
    """The root mean square of each tensor of numbers among the inputs, in their order."""
    sizes: list[float] = []

    def note(tensor: Tensor) -> Tensor:
        dense = tensor.layout is torch.strided and not tensor.is_nested
        if dense and tensor.is_floating_point() and tensor.numel():
            sizes.append(float(sharded.whole(tensor.detach()).float().square().mean().sqrt()))
        return tensor

    changed(inputs, note)
    return sizes


def check_call(model: nn.Module, inputs: Inputs) -> None:
    """Refuse a tensor that cannot be fed to this model, in one sentence."""
    if isinstance(inputs, Tensor):
        check_inputs(model, inputs)
    elif not (callable(inputs) or isinstance(inputs, tuple | list | Mapping)):
        wanted = "a tensor, a tuple of arguments, a mapping of keyword arguments or a function"
        raise WrongType("inputs", inputs, wanted, "a function calls the model itself")


def _first(items: Any) -> tuple[Any, Tensor]:
    for key, value in items:
        if isinstance(value, Tensor):
            return key, value
    raise Lacks("inputs", "tensor", "give the batch that the model takes")


def _view(model: nn.Module, arguments: Any, logits: LogitsRule) -> nn.Module:
    """The model with another forward: same modules and parameters, under the same names."""
    view: nn.Module = object.__new__(original_class(model))
    hooks = [name for name in model.__dict__ if "hooks" in name]  # the model's own pass calls them
    view.__dict__ = {**model.__dict__, **{name: OrderedDict() for name in hooks}, "viewed": model}

    def forward(tensor: Tensor) -> Tensor:
        mode = model.training
        model.training = view.training
        try:
            tensors = find_logits(call(model, arguments(tensor)), logits)
        finally:
            model.training = mode
        outputs = next((t for t in tensors if t.ndim > 1), tensors[0])
        return outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs

    view.forward = forward
    return view
