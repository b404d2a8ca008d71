"""Calling a model from outside its training, and leaving it exactly as it was.

Everything that measures a model (exact products, probes, theory) calls it through this module: one
context manager that restores all it had to change, and one set of checks that turn wrong input into
one sentence.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from decaylab.curvature.capture import _Hook, innermost, logits_of
from decaylab.errors import AT_LEAST_ONE, BadValue, Lacks, Mismatch, WrongType, check_name
from decaylab.networks.calling import call_with
from decaylab.networks.preserve import preserved
from decaylab.networks.sharded import device_of, passing, team_of

BatchNormMode = Literal["eval", "train"]


def bare(model: nn.Module) -> nn.Module:
    """The eager module behind `torch.compile` and data-parallel wrappers: names without prefix."""
    inner = innermost(model)
    return bare(inner.module) if isinstance(inner, nn.DataParallel) else inner


@contextlib.contextmanager
def untouched(model: nn.Module, *, batch_norm: BatchNormMode = "eval") -> Iterator[nn.Module]:
    """Yield the bare model in a fixed mode; then restore modes, gradients, buffers and RNG.

    Inside, gradients are enabled, autocast is off and every module is in eval mode (dropout is
    off), except that with `batch_norm="train"` normalisation layers use the batch's own statistics,
    without updating the running ones. A K-FAC attached to the model is paused. Attention uses its
    plain kernel, the one with forward-mode rules, and recurrent layers do without cuDNN, which goes
    backward in train mode only.
    """
    check_name("batch_norm mode", batch_norm, get_args(BatchNormMode))
    model = bare(model)
    modules = list(model.modules())
    tracking = [(m, m.track_running_stats) for m in modules if isinstance(m, _NormBase)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with contextlib.ExitStack() as stack:
        for pause in _pauses([model.__dict__.get("viewed", model), *modules]):
            stack.enter_context(pause())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in modules):
            stack.enter_context(_without_cudnn())
        for kind in {parameter.device.type for parameter in model.parameters()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(preserved(model))
        stack.enter_context(passing(model))
        try:
            model.eval()
            for parameter, _ in gradients:
                parameter.grad = None  # put aside: a backward pass in here would add to it in place
            if batch_norm == "train":
                for norm, _ in tracking:
                    # without tracking it neither reads nor writes its running statistics
                    norm.training, norm.track_running_stats = True, False
            yield model
        finally:
            for norm, was in tracking:
                norm.track_running_stats = was
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def _pauses(modules: list[nn.Module]) -> list[Callable[[], Any]]:
    """The `paused` methods of the captures that listen to these modules, each once."""
    hooks = [h for m in modules for h in [*m._forward_pre_hooks.values()] if isinstance(h, _Hook)]
    captures = [hook._owner() for hook in dict.fromkeys(hooks) if hook._owner is not None]
    return [capture.paused for capture in captures if capture is not None]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that training moves, by name, shared tensors once; never empty."""
    parameters = dict(bare(model).named_parameters())
    if not parameters:
        raise Lacks("the model", "weights", "give a model with parameters")
    chosen: dict[str, Tensor] = {name: p for name, p in parameters.items() if p.requires_grad}
    if not chosen:
        remedy = "call model.requires_grad_(True) before measuring its weights"
        raise Lacks("the model", "parameter that is not frozen", remedy)
    return chosen


def layer_of(parameter: str) -> str:
    """The module that owns a parameter; behind a parametrization, the outer one.

    >>> layer_of("features.0.weight"), layer_of("fc.parametrizations.weight.original1")
    ('features.0', 'fc')
    """
    outer, parametrized, _ = parameter.partition(".parametrizations.")
    return outer if parametrized else parameter.rpartition(".")[0]


def layer_names(parameters: dict[str, Tensor]) -> dict[str, list[str]]:
    """Which parameters each layer owns, in the model's order: layer name -> parameter names."""
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(layer_of(name), []).append(name)
    return layers


def check_inputs(model: nn.Module, inputs: Tensor) -> None:
    """Refuse what cannot be fed to this model, in one sentence each."""
    if not isinstance(inputs, Tensor):
        remedy = "give the tensor that the model takes as its first argument"
        raise WrongType("inputs", inputs, "one tensor of examples", remedy)
    if inputs.ndim == 0 or inputs.numel() == 0:
        raise Lacks("the batch", "examples", "give inputs with at least one")
    weight = next(iter(bare(model).parameters()), None)
    if weight is None:
        raise Lacks("the model", "weights", "give a model with parameters")
    device = device_of(bare(model))
    if inputs.device.type != device.type or device.index not in (None, inputs.device.index):
        devices = {"the inputs": inputs.device, "the model": device}
        raise Mismatch("device", devices, "move one of them")
    if inputs.is_floating_point() and inputs.dtype != weight.dtype:
        dtypes = {"the inputs": inputs.dtype, "the model": weight.dtype}
        raise Mismatch("dtype", dtypes, "convert one of them")


def check_logits(output: Any) -> Tensor:
    """The logits [..., C], at least one leading axis, that a model returns bare or as `.logits`."""
    logits = logits_of(output)
    if logits is None:
        remedy = "wrap the model so that it returns its logits"
        raise WrongType("the model's output", output, "a tensor [..., classes]", remedy)
    if logits.ndim < 2 or not logits.is_floating_point():
        given = (logits.dtype, list(logits.shape))
        raise BadValue("the model's output", given, "floating-point logits [..., classes]")
    return logits


def as_function(model: nn.Module, inputs: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    """Logits as a function of the named parameters; the others are constants, without a graph."""
    if team_of(model) is not None:
        remedy = "measure this quantity in one process, on a checkpoint, or leave it out"
        raise Lacks("the sharded model", "whole parameters to differentiate by", remedy)
    constants = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def logits(parameters: dict[str, Tensor]) -> Tensor:
        return check_logits(call_with(model, constants | parameters, (inputs,)))

    return logits


def tied(model: nn.Module, batch_norm: BatchNormMode) -> bool:
    """Whether the examples of a batch depend on each other: batch normalisation by the batch."""
    return any(
        isinstance(module, _BatchNorm) and (batch_norm == "train" or module.running_mean is None)
        for module in model.modules()
    )


def chunks(
    model: nn.Module, inputs: Tensor, size: int | None, batch_norm: BatchNormMode
) -> tuple[Tensor, ...]:
    """The batch in pieces of at most `size` examples; one piece where the examples are tied."""
    if size is not None:
        AT_LEAST_ONE.check("chunk", size)
    if size is None or tied(model, batch_norm):
        return (inputs,)
    return inputs.split(size)
