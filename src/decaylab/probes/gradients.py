"""Whether a step's gradients point along the weights, and whether they are clipped."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decaylab.networks.sharded import Parts, local, real
from decaylab.probes.layers import Layers
from decaylab.probes.reading import numbers, row_name


def gradient_sizes(optimizer: torch.optim.Optimizer, layers: Layers) -> dict[str, float]:
    """By row name, what shows a clip of the gradients: it makes one number of many steps.

    `gradient_norm`, the Euclidean norm of all the gradients of this optimizer together, and
    `gradient_max`, the largest of their entries by size; `gradient_at_max/layer`, the part of the
    layer's |g|^2 that is in entries of that size, where it is more than a hundredth. Nothing where
    there are no gradients. Both are without the scale that a GradScaler left to the optimizer to
    take away (fused ones, K-FAC). No pass; one host synchronisation.
    """
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    gradients = [g for g in held if g is not None and g.layout == torch.strided]
    if not gradients:
        return {}
    parts = Parts.of(gradients)
    largest = _stacked(parts.largest()).max()
    norm = torch.linalg.vector_norm(_stacked(parts.norms()))
    values = {"gradient_norm": norm, "gradient_max": largest}
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        values = {name: value / scale.squeeze() for name, value in values.items()}
    by_layer: dict[str, list[Tensor]] = {}
    for layer, weights in layers.weights.items():
        layer_gradients = [w.grad for w in weights.values() if w.grad is not None]
        if all(g.layout == torch.strided for g in layer_gradients):
            by_layer[layer] = layer_gradients
    parts = Parts.of(gradient for several in by_layer.values() for gradient in several)
    at = iter(parts.sums([(g.abs() >= largest.to(g.dtype)).sum() for g in parts.tensors]))
    norms = iter(parts.norms())
    for layer, several in by_layer.items():
        if several:
            count = _stacked([next(at) for _ in several]).sum()
            squares = _stacked([next(norms) for _ in several]).square().sum()
            values[row_name("gradient_at_max", layer)] = count * largest**2 / squares
    least = {"gradient_norm": -1.0, "gradient_max": -1.0}
    known = numbers(values)
    return {k: v for k, v in known.items() if math.isfinite(v) and v > least.get(k, 0.01)}


Scaled = Mapping[str, Sequence[Tensor]]
"""Of each layer, what Eq. 8 multiplies, as it was at one moment."""


def radial_gradients(layers: Layers, before: Scaled) -> dict[str, float]:
    """By row name, |<g, W>| sqrt(n) / (|g| |W|) of the layers that module order calls invariant.

    g is the gradient and W what Eq. 8 multiplies (weight and bias), n numbers in all; `before` is W
    where the gradient was taken. <g, W> is the derivative of the loss as W is scaled: 0 where the
    layer is invariant, whatever the batch. A random direction gives about 1. No pass through the
    model; a layer without a gradient has none, nor has one whose invariance was measured.
    """
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for layer, parameters in layers.scaled.items():
        values_before = zip(parameters, before[layer], strict=True)
        several = [(p.grad, w) for p, w in values_before if p.grad is not None]
        if len(several) == len(parameters) and all(g.layout == torch.strided for g, _ in several):
            pairs[layer] = several
    with torch.no_grad():
        parts = Parts.of(w for several in pairs.values() for _, w in several)
        w = parts.tensors
        g = [local(g) for several in pairs.values() for g, _ in several]
        columns = [
            iter(column) for column in (parts.dots(g, w), parts.dots(g, g), parts.dots(w, w))
        ]
        ratios: dict[str, Tensor] = {}
        for layer, several in pairs.items():
            dot, g2, w2 = (_stacked([next(column) for _ in several]).sum() for column in columns)
            size = sum(real(weight).numel() for _, weight in several)
            ratios[layer] = dot.abs() * math.sqrt(size) / (g2 * w2).sqrt()
    values = numbers(ratios)
    return {row_name("radial_gradient", k): v for k, v in values.items() if math.isfinite(v)}


def _stacked(numbers_of_tensors: Sequence[Tensor]) -> Tensor:
    """In double."""
    return torch.stack([number.double() for number in numbers_of_tensors])
