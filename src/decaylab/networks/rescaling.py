"""Running a model again and again with some of its layers rescaled, from the same state each time.

The model is left as it was: parameters bit for bit, buffers, modes, gradients and torch's
generators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.errors import Failed
from decaylab.networks.calling import Inputs, LogitsRule, call, find_logits
from decaylab.networks.parameters import find_layers
from decaylab.networks.preserve import cuda_devices, preserved, preserved_buffers
from decaylab.networks.sharded import local, passing, team_of

INVARIANCE_THRESHOLD = 0.05
CONTRAST = 5.0  # a layer counts as invariant if removing it changes this times what doubling does


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Train mode without gradients; afterwards mode, buffers and generators are as they were."""
    try:
        with preserved(model), torch.no_grad():
            model.train()
            yield
    finally:
        torch.clear_autocast_cache()  # of weights that were rescaled


class RepeatedForward:
    """f(inputs) again and again, each time from the same state.

    Of the generators, for dropout, and of the buffers: a power iteration (spectral normalisation)
    goes on from its last one. Autocast, the caller's or one in the model's own forward, stays on;
    what it has cached are weights as they were before they were rescaled. Of a sharded model all
    processes get the distances of the first one, so that all decide alike.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, logits: LogitsRule = None):
        self.model, self.inputs, self.logits = model, inputs, logits
        self.team = team_of(model)
        self.cpu = torch.get_rng_state()
        self.devices = cuda_devices(model)
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    def __call__(self) -> list[Tensor]:
        """The logits of the model as it is."""
        return self.output_of(self.model, self.inputs)

    def output_of(self, model: nn.Module, inputs: Inputs) -> list[Tensor]:
        """The logits of a model that shares this one's buffers and generators."""
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        torch.clear_autocast_cache()
        with passing(self.model), preserved_buffers(self.model):
            return find_logits(checked_call(model, inputs), self.logits)

    def rescaled(self, factors: Sequence[tuple[Tensor, float]]) -> list[Tensor]:
        """The logits with some parameters times a factor; they are then restored bit for bit.

        Through `.data`: a graph that still waits for its backward pass stays valid, and modules
        that keep their own lists of weights (LSTM) see the change.
        """
        parts = [(local(parameter.data), factor) for parameter, factor in factors]
        values = [part.clone() for part, _ in parts]
        try:
            for part, factor in parts:
                part.mul_(factor)
            return self()
        finally:
            for (part, _), value in zip(parts, values, strict=True):
                part.copy_(value)

    def distance(self, outputs: list[Tensor], reference: list[Tensor]) -> float:
        """Euclidean, over all tensors."""
        squares = [
            torch.linalg.vector_norm(a.double() - b.double()) ** 2
            for a, b in zip(outputs, reference, strict=True)
        ]
        length = float(torch.stack(squares).sum().sqrt())
        return length if self.team is None else self.team.agreed(length)

    def size(self, outputs: list[Tensor]) -> float:
        """The Euclidean norm over all tensors."""
        return self.distance(outputs, [torch.zeros_like(tensor) for tensor in outputs])


def checked_call(model: nn.Module, inputs: Inputs) -> Any:
    """`call`, where a failure is one sentence."""
    try:
        return call(model, inputs)
    except Exception as error:
        remedy = (
            "give what the model is called with in training, without labels that it does not take,"
            " and two or more examples for batch norm"
        )
        raise Failed("the model's pass over these inputs", error, remedy) from error


def invariance(
    model: nn.Module, inputs: Inputs, *, logits: LogitsRule = None
) -> Mapping[str, float]:
    """How far the output is from not depending on the scale of each layer (Eq. 8, Sec. 4.1).

    defect_l = |f(2 W_l) - f(W_l)| / |f(W_l)|, f in train mode (batch statistics), Euclidean norm
    over the whole output, nothing averaged; invariant is a layer below `INVARIANCE_THRESHOLD`. W_l
    is the layer's weight *and* bias, as in Eq. 8: batch normalisation cancels the bias, but layer
    and group normalisation cancel only the scale of both together. Where the weight is
    parametrised (weight or spectral normalisation), W_l is what it is computed from, without bias
    and learnt gain.

    A small defect proves nothing where the output hardly depends on the layer at all: unused,
    zero, or one weak branch of many. Such a layer, whose removal (W_l = 0) changes the output by
    less than five times what doubling does, gets `nan`, which is not below the threshold.

    `inputs`: a tensor, a tuple of arguments, a mapping of keyword arguments or a function of the
    model; a batch of at least two under batch normalisation. `logits`: name, index or function
    where the output holds more than them. Key: module name. Cost: one forward pass, and one per
    layer, two where the defect is below the threshold. Parameters, buffers, gradients, modes and
    torch's generators are left bit for bit as they were. Does not cover randomness from other
    generators. One layer at a time: `measure_invariance` finds layers that are invariant together.
    """
    layers = find_layers(model)
    if not layers:
        return {}
    with undisturbed(model):
        evaluate = RepeatedForward(model, inputs, logits)
        reference = evaluate()
        length = evaluate.size(reference)
        defects = {}
        for name, layer in layers.items():
            doubled = evaluate.rescaled([(p, 2.0) for p in layer.scaled])
            change = evaluate.distance(doubled, reference)
            defect = change / length if length else math.nan
            if defect < INVARIANCE_THRESHOLD:
                removed = evaluate.rescaled([(p, 0.0) for p in layer.scaled])
                removal = evaluate.distance(removed, reference)
                weak = removal < CONTRAST * change or removal == 0.0
                defect = math.nan if weak else defect
            defects[name] = defect
    return defects


def run_order(model: nn.Module, inputs: Inputs) -> list[str]:
    """Module names in the order in which they run, or without inputs are registered."""
    names = {module: name for name, module in model.named_modules()}
    if inputs is None:
        return list(names.values())
    order: list[str] = []

    def record(module: nn.Module, _: Any) -> None:
        order.append(names[module])
        if isinstance(module, nn.MultiheadAttention):  # uses this layer without calling it
            order.append(names[module.out_proj])

    handles = [module.register_forward_pre_hook(record) for module in names]
    try:
        with undisturbed(model), passing(model):
            checked_call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return order
