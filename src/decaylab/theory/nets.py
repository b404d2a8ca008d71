"""Random nets and inputs on which the statements are checked, all in float64.

`depth` is the paper's L, the number of hidden layers: a net of depth L has L + 1 weight layers.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.optim.kfac import KFAC

CLASSES = 3
INPUTS = 5
DEPTHS = (0, 1, 3)
WIDTHS = (4, 7)
SEEDS = (0, 1, 2, 3)
CASES = tuple(product(WIDTHS, SEEDS))
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "linear": nn.Identity, "tanh": nn.Tanh}
# torch refuses an eps of zero in training; this one does not change any float64 variance
NO_EPS = 1e-300


def mlp(
    depth: int, width: int, seed: int, *, activation: str = "relu", bias: bool = False
) -> nn.Module:
    """A fully connected net; its biases, if any, are random and not zero."""
    sizes = [INPUTS, *[width] * depth, CLASSES]
    layers: list[nn.Module] = []
    for i in range(depth + 1):
        if i:
            layers.append(ACTIVATIONS[activation]())
        layers.append(nn.Linear(sizes[i], sizes[i + 1], bias=bias))
    return _random(nn.Sequential(*layers), seed)


def convnet(depth: int, width: int, seed: int, *, activation: str = "relu") -> nn.Module:
    """`depth` convolutions with activation and max-pool, and a linear layer, on 8x8 images.

    No biases.
    """
    layers: list[nn.Module] = []
    channels, size = 2, 8
    for _ in range(depth):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), ACTIVATIONS[activation]()]
        layers.append(nn.MaxPool2d(2))
        channels, size = width, size // 2
    layers += [nn.Flatten(), nn.Linear(channels * size**2, CLASSES, bias=False)]
    return _random(nn.Sequential(*layers), seed)


def normalised_net(
    width: int, seed: int, *, kind: str = "linear", eps: float = NO_EPS, norm: bool = True
) -> nn.Module:
    """A layer (the one studied), batch normalisation (if `norm`), tanh and a classifier.

    tanh and not ReLU, so that the derivatives that T6 halves have no kinks.
    """
    batch_norm: dict[str, type[nn.Module]] = {"linear": nn.BatchNorm1d, "conv": nn.BatchNorm2d}
    layer = nn.Linear(INPUTS, width) if kind == "linear" else nn.Conv2d(2, width, 3)
    layers: list[nn.Module] = [layer]
    if norm:
        layers.append(batch_norm[kind](width, eps=eps, affine=False))
    rest = width if kind == "linear" else width * 4
    layers += [nn.Tanh(), nn.Flatten(), nn.Linear(rest, CLASSES)]
    return _random(nn.Sequential(*layers), seed)


def inputs_for(net: nn.Module, seed: int, examples: int = 12) -> Tensor:
    """Gaussian inputs, neither centred nor white, of the shape the net wants."""
    generator = torch.Generator().manual_seed(1000 + seed)
    first = next(m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    if isinstance(first, nn.Conv2d):
        side = 4 if isinstance(net.get_submodule("1"), nn.BatchNorm2d) else 8
        shape: tuple[int, ...] = (examples, first.in_channels, side, side)
    else:
        shape = (examples, first.in_features)
        if first.in_features > INPUTS:  # a convnet of depth 0: its images are flattened first
            shape = (examples, 2, 8, 8)
    draws = torch.randn(shape, generator=generator, dtype=torch.float64)
    return draws * torch.linspace(0.5, 2.0, shape[-1], dtype=torch.float64) + 0.3


def labels_for(seed: int, examples: int = 12) -> Tensor:
    """Random labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CLASSES, (examples,), generator=generator)


def kfac(net: nn.Module, curvature: str, lr: float, damping: float, params: Any = None) -> KFAC:
    """K-FAC as the paper writes it: no sampling, no momentum, no scaling of steps."""
    return KFAC(
        net,
        lr=lr,
        params=params,
        curvature=curvature,  # type: ignore[arg-type]
        outputs="exact",
        step_scaling="none",
        momentum=0.0,
        damping=damping,
    )


def whitened(inputs: Tensor) -> Tensor:
    """The same rows [N, d] with mean zero and second moment exactly the identity (N > d)."""
    centred = inputs - inputs.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(inputs))
    return centred @ vectors @ torch.diag(values.rsqrt()) @ vectors.T


def layer_count(net: nn.Module) -> int:
    """L + 1: how many layers with weights there are."""
    return sum(isinstance(module, nn.Linear | nn.Conv2d) for module in net.modules())


def _random(net: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    net = net.double()
    with torch.no_grad():
        for parameter in net.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1.5 * noise / fan_in**0.5)
    return net
