"""The pieces that all networks share: a layer with its normalisation, widths, initial weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.errors import POSITIVE

BATCH_NORM_EPS = 1e-3
BATCH_NORM_MOMENTUM = 0.01  # torch's convention; a running average of 0.99 in the usual one


class NormalisedConv2d(nn.Conv2d):
    """A convolution in front of batch normalisation, which would take its bias away again.

    So the bias is there (recipe line 10; it is the 1 in K-FAC's input factor) but is not added, and
    has no gradient: the same function, without a pass over the activations and one over their
    gradients. (DistributedDataParallel needs `find_unused_parameters=True` for it.)
    """

    def forward(self, images: Tensor) -> Tensor:
        """The convolution without its bias."""
        return self._conv_forward(images, self.weight, None)


class NormalisedLinear(nn.Linear):
    """A linear layer in front of batch normalisation: its bias is there but is not added."""

    def forward(self, vectors: Tensor) -> Tensor:
        """The product without the bias."""
        return F.linear(vectors, self.weight)


@dataclass(frozen=True)
class Style:
    """What every layer of a network has in common: batch normalisation, its eps, a bias."""

    batch_norm: bool = True
    bias: bool = True
    eps: float = BATCH_NORM_EPS

    def conv(
        self, in_channels: int, out_channels: int, size: int, stride: int = 1
    ) -> nn.Sequential:
        """A convolution that keeps the image size at stride 1, then batch normalisation if any."""
        kind = NormalisedConv2d if self.batch_norm else nn.Conv2d
        conv = kind(
            in_channels, out_channels, size, stride=stride, padding=size // 2, bias=self.bias
        )
        return self._normalised(conv, nn.BatchNorm2d, out_channels)

    def linear(self, in_features: int, out_features: int) -> nn.Sequential:
        """A linear layer, then batch normalisation if any."""
        kind = NormalisedLinear if self.batch_norm else nn.Linear
        linear = kind(in_features, out_features, bias=self.bias)
        return self._normalised(linear, nn.BatchNorm1d, out_features)

    def _normalised(
        self, layer: nn.Module, kind: type[nn.BatchNorm1d | nn.BatchNorm2d], size: int
    ) -> nn.Sequential:
        if not self.batch_norm:
            return nn.Sequential(layer)
        norm = kind(size, eps=self.eps, momentum=BATCH_NORM_MOMENTUM, affine=False)
        return nn.Sequential(layer, norm)


def scaled(channels: int, width: float) -> int:
    """Channels at a width factor: rounded, and never below one.

    >>> scaled(64, 1 / 8), scaled(64, 1.0), scaled(4, 0.01)
    (8, 64, 1)
    """
    POSITIVE.check("width", width, "try 1.0 or 0.125")
    return max(1, round(channels * width))


def initialize_(model: nn.Module) -> nn.Module:
    """Draw all conv and linear weights Glorot-uniform and set their biases to zero, in place.

    W ~ U(-b, b) with b = sqrt(6 / (fan_in + fan_out)); a fan counts channels times kernel area.
    Draws from torch's global generator: call `torch.manual_seed` first. Other layers stay.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
