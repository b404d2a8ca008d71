"""The least time that the parts of a K-FAC step can take on a GPU, from its data sheet.

Work is counted in operations and in bytes of memory traffic, layer by layer; the least time is that
of the larger of the two. A layer with an input side of a and an output side of s (the bias counted
in a), R rows (examples times positions) in a batch:

    preconditioning    2 s a (a + s) operations; both inverses and the gradient read, the step
                       written
    sampled backward   2 R s a operations (without the bias; none in the first layer); of the
                       outputs, gradient and activation read, a gradient written (bfloat16)
    factor products    2 R (a^2 + s^2) operations; the factors written
    fold               new and old factors read, the average written
    inversion          a^3 + s^3 operations (Cholesky, triangular inverse and its square, a third
                       each); the factors read, the inverses written

No part that can overlap with another is taken to do so, and neither launches nor the sequential
panels of a Cholesky factorisation are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from decaylab.curvature.preconditioner import LARGEST_PRECISE
from decaylab.networks import build


@dataclass(frozen=True)
class Rates:
    """What a data sheet promises: operations a second without sparsity, and bytes a second."""

    bf16: float
    tf32: float
    fp32: float
    memory: float


RATES = {"NVIDIA H200": Rates(bf16=989.5e12, tf32=494.7e12, fp32=67e12, memory=4.8e12)}
# How many steps share a part: factors are refreshed every 10 steps, inverted every 100.
EVERY = {
    "preconditioning": 1,
    "sampled backward": 10,
    "factor products": 10,
    "fold": 10,
    "inversion": 100,
}


@dataclass(frozen=True)
class Sides:
    """A layer's input and output side, and the rows that a batch gives it.

    `back` is the length of the input that a gradient goes back to: none in the first layer.
    """

    a: int
    s: int
    rows: int
    back: int

    @property
    def small(self) -> bool:
        """Whether it is preconditioned without TF32."""
        return max(self.a, self.s) <= LARGEST_PRECISE


def sides(model: nn.Module, batch_size: int) -> list[Sides]:
    """Of a network for CIFAR's images."""
    model = model.to("meta").eval()
    layers: list[Sides] = []

    def note(layer: Any, _: Any, output: torch.Tensor) -> None:
        rows = batch_size * output[0, 0].numel()
        fan_in = layer.weight[0].numel()
        a = fan_in + (layer.bias is not None)
        layers.append(Sides(a, len(layer.weight), rows, 0 if not layers else fan_in))

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(note)
    model(torch.empty(1, 3, 32, 32, device="meta"))
    return layers


def seconds(layer: Sides, rates: Rates) -> dict[str, float]:
    """The least time of each part for one layer, float32 in memory but for activations."""
    a, s, rows = layer.a, layer.s, layer.rows
    precise = rates.fp32 if layer.small else rates.tf32
    work: dict[str, tuple[float, float]] = {
        "preconditioning": (
            2 * s * a * (a + s) / precise,
            4 * (a * a + s * s + 2 * s * a) / rates.memory,
        ),
        "sampled backward": (
            2 * rows * s * layer.back / rates.bf16,
            3 * 2 * rows * s / rates.memory,
        ),
        "factor products": (
            2 * rows * (a * a + s * s) / rates.bf16,
            4 * (a * a + s * s) / rates.memory,
        ),
        "fold": (0, 3 * 4 * (a * a + s * s) / rates.memory),
        "inversion": ((a**3 + s**3) / rates.fp32, 2 * 4 * (a * a + s * s) / rates.memory),
    }
    return {part: max(limits) for part, limits in work.items()}


def least_ms(network: str, device: str, batch_size: int) -> dict[str, float] | None:
    """Milliseconds of each part, each time it is done; None if the device is not known."""
    if device not in RATES:
        return None
    model = build(network, classes=10, batch_norm=True)
    layers = [seconds(layer, RATES[device]) for layer in sides(model, batch_size)]
    return {part: 1e3 * sum(layer[part] for layer in layers) for part in EVERY}


def per_step(parts: Mapping[str, float]) -> float:
    """What the parts add to a step on average, from what each takes when it is done."""
    return sum(parts[part] / every for part, every in EVERY.items())
