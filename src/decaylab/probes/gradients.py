"""Of a step's gradients: whether they point along the weights, and whether they are clipped."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decaylab.probes.reading import numbers, row_name
from decaylab.probes.weights import Layers


def gradient_norm(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """`gradient_norm`: Euclidean norm of all the gradients of this optimizer together, if any.

    Where it is the same number at many steps, somebody clips it.
    """
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    found = [g.detach() for g in held if g is not None and g.layout == torch.strided]
    if not found:
        return {}
    norms = [norm.double() for norm in torch._foreach_norm(found)]
    total = float(torch.linalg.vector_norm(torch.stack(norms)))
    return {"gradient_norm": total} if math.isfinite(total) else {}


Scaled = Mapping[str, Sequence[Tensor]]
"""Of each layer, what Eq. 8 multiplies, as it was at one moment."""


def radial_gradients(layers: Layers, before: Scaled) -> dict[str, float]:
    """By row name, |<g, W>| sqrt(n) / (|g| |W|) of the layers that module order calls invariant.

    g is the gradient and W what Eq. 8 multiplies (weight and bias), n numbers in all; `before` is W
    where the gradient was taken. <g, W> is the derivative of the loss as W is scaled: 0 where the
    layer is invariant, whatever the batch. A random direction gives about 1. No pass through the
    model; a layer without a gradient has none, nor has one whose invariance was measured.
    """
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer, parameters in layers.scaled.items():
            own = zip(parameters, before[layer], strict=True)
            pairs = [(p.grad, w) for p, w in own if p.grad is not None]
            if len(pairs) < len(parameters) or any(g.layout != torch.strided for g, _ in pairs):
                continue
            flat = [(_precise(g), _precise(w)) for g, w in pairs]
            dot, g2, w2 = (
                torch.stack([torch.dot(*of).double() for of in products]).sum()
                for products in (flat, [(g, g) for g, _ in flat], [(w, w) for _, w in flat])
            )
            size = sum(w.numel() for _, w in flat)
            found[layer] = dot.abs() * math.sqrt(size) / (g2 * w2).sqrt()
    values = numbers(found)
    return {row_name("radial_gradient", k): v for k, v in values.items() if math.isfinite(v)}


def _precise(tensor: Tensor) -> Tensor:
    """Flat, in at least 32 bits."""
    flat = tensor.detach().flatten()
    return flat.float() if flat.element_size() < 4 else flat
