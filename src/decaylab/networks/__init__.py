"""The paper's networks, and what each parameter of any network is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from decaylab.errors import DecaylabError
from decaylab.networks import resnet, vgg
from decaylab.networks.layers import BATCH_NORM_EPS, Style, initialize_, scaled
from decaylab.networks.mlp import MLP
from decaylab.networks.resnet import ResNet
from decaylab.networks.roles import INVARIANCE_THRESHOLD, ParameterRole, invariance, roles
from decaylab.networks.vgg import VGG

NETWORKS: tuple[str, ...] = ("mlp", *vgg.DEPTHS, *resnet.BLOCKS)

__all__ = [
    "INVARIANCE_THRESHOLD",
    "MLP",
    "NETWORKS",
    "VGG",
    "ParameterRole",
    "ResNet",
    "build",
    "initialize_",
    "invariance",
    "roles",
]


def build(
    name: str,
    *,
    classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    batch_norm: bool | None = None,
    width: float = 1.0,
    hidden: Sequence[int] = (128, 128),
    bias: bool = True,
    activation: str = "relu",
    batch_norm_eps: float = BATCH_NORM_EPS,
) -> nn.Module:
    """A network by name, with Glorot-uniform weights and zero biases (Appendix A; recipe 10-12).

    [N, in_channels, image_size, image_size] -> [N, classes]. Every layer has a bias, also under
    batch normalisation (no gamma, no beta), which stands behind every layer but the last; it is on
    unless told otherwise, for `mlp` off. `width` scales all channel counts (an MLP's hidden sizes).
    `hidden` (default two layers of 128) and `activation` (relu or linear) are for `mlp`; the others
    have no use for `hidden`.
    Weights come from torch's global generator: call `torch.manual_seed` first.

    >>> sum(p.numel() for p in build("mlp", classes=10, in_channels=1, image_size=8).parameters())
    26122
    """
    if name not in NETWORKS:
        raise DecaylabError(f"unknown network {name!r}: choose one of {', '.join(NETWORKS)}")
    for what, value in (("classes", classes), ("channels", in_channels), ("size", image_size)):
        if value < 1:
            raise DecaylabError(f"a network needs at least one of its {what}, not {value}")
    if not batch_norm_eps > 0:
        raise DecaylabError(f"batch_norm_eps must be above zero, and it is {batch_norm_eps}")
    scaled(
        1, width
    )  # a wrong width is an error for every network, also for one without hidden layers
    style = Style(name != "mlp" if batch_norm is None else batch_norm, bias, batch_norm_eps)
    if name == "mlp":
        if any(size < 1 for size in hidden):
            raise DecaylabError(f"hidden sizes must be at least 1, and they are {tuple(hidden)}")
        return initialize_(
            MLP(
                in_channels * image_size**2,
                [scaled(size, width) for size in hidden],
                classes,
                style,
                activation,
            )
        )
    if activation != "relu":
        raise DecaylabError(f"{name} has ReLUs only: leave activation out, or take mlp")
    if name in vgg.DEPTHS:
        return initialize_(VGG(name, in_channels, image_size, classes, width, style))
    return initialize_(ResNet(name, in_channels, classes, width, style))
