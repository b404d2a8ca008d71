"""Whether a step's gradients point along the weights, and whether they are clipped."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decaylab.probes.layers import Layers, real
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
    gradients = [real(g.detach()) for g in held if g is not None and g.layout == torch.strided]
    if not gradients:
        return {}
    largest = _norms(gradients, math.inf).max()
    parts = {"gradient_norm": torch.linalg.vector_norm(_norms(gradients)), "gradient_max": largest}
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        parts = {name: value / scale.squeeze() for name, value in parts.items()}
    for layer, weights in layers.weights.items():
        layer_gradients = [real(w.grad.detach()) for w in weights.values() if w.grad is not None]
        if layer_gradients and all(g.layout == torch.strided for g in layer_gradients):
            at = torch.stack(
                [(g.abs() >= largest.to(g.dtype)).sum() for g in layer_gradients]
            ).sum()
            squares = _norms(layer_gradients).square().sum()
            parts[row_name("gradient_at_max", layer)] = at * largest**2 / squares
    least = {"gradient_norm": -1.0, "gradient_max": -1.0}
    values = numbers(parts)
    return {k: v for k, v in values.items() if math.isfinite(v) and v > least.get(k, 0.01)}


def _norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Of each, in double; those of 16 bits are summed in 32, as float16 ends at 65,504."""
    short = [tensor for tensor in tensors if tensor.element_size() < 4]
    others = [tensor for tensor in tensors if tensor.element_size() >= 4]
    norms = [*torch._foreach_norm(short, order, torch.float32)] if short else []
    norms += torch._foreach_norm(others, order) if others else ()
    return torch.stack([norm.double() for norm in norms])


Scaled = Mapping[str, Sequence[Tensor]]
"""Of each layer, what Eq. 8 multiplies, as it was at one moment."""


def radial_gradients(layers: Layers, before: Scaled) -> dict[str, float]:
    """By row name, |<g, W>| sqrt(n) / (|g| |W|) of the layers that module order calls invariant.

    g is the gradient and W what Eq. 8 multiplies (weight and bias), n numbers in all; `before` is W
    where the gradient was taken. <g, W> is the derivative of the loss as W is scaled: 0 where the
    layer is invariant, whatever the batch. A random direction gives about 1. No pass through the
    model; a layer without a gradient has none, nor has one whose invariance was measured.
    """
    ratios: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer, parameters in layers.scaled.items():
            values_before = zip(parameters, before[layer], strict=True)
            pairs = [(p.grad, w) for p, w in values_before if p.grad is not None]
            if len(pairs) < len(parameters) or any(g.layout != torch.strided for g, _ in pairs):
                continue
            flat = [(_precise(g), _precise(w)) for g, w in pairs]
            dot, g2, w2 = (
                torch.stack([torch.dot(*factors).double() for factors in products]).sum()
                for products in (flat, [(g, g) for g, _ in flat], [(w, w) for _, w in flat])
            )
            size = sum(w.numel() for _, w in flat)
            ratios[layer] = dot.abs() * math.sqrt(size) / (g2 * w2).sqrt()
    values = numbers(ratios)
    return {row_name("radial_gradient", k): v for k, v in values.items() if math.isfinite(v)}


def _precise(tensor: Tensor) -> Tensor:
    """Flat and real, in at least 32 bits."""
    flat = real(tensor.detach()).flatten()
    return flat.float() if flat.element_size() < 4 else flat
