"""The paper's networks, and what each parameter of any network is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from decaylab.errors import AT_LEAST_ONE, POSITIVE, Misplaced, NameTaken, check_name
from decaylab.networks import resnet, vgg
from decaylab.networks.layers import BATCH_NORM_EPS, Style, initialize_, scaled
from decaylab.networks.mlp import MLP
from decaylab.networks.rescaling import INVARIANCE_THRESHOLD, invariance
from decaylab.networks.resnet import ResNet
from decaylab.networks.roles import ParameterRole, roles
from decaylab.networks.scale_invariance import (
    Invariance,
    ScaleGroup,
    SizeResponse,
    measure_invariance,
)
from decaylab.networks.vgg import VGG


@dataclass(frozen=True)
class Blueprint:
    """What a network is built from; `hidden` and `activation` are for `mlp`."""

    name: str
    classes: int
    in_channels: int
    image_size: int
    width: float
    style: Style
    hidden: Sequence[int] = (128, 128)
    activation: str = "relu"


Builder = Callable[[Blueprint], nn.Module]


def _mlp(plan: Blueprint) -> nn.Module:
    for size in plan.hidden:
        AT_LEAST_ONE.check("hidden", size)
    features = plan.in_channels * plan.image_size**2
    hidden = [scaled(size, plan.width) for size in plan.hidden]
    return MLP(features, hidden, plan.classes, plan.style, plan.activation)


def _vgg(plan: Blueprint) -> nn.Module:
    sizes = (plan.in_channels, plan.image_size, plan.classes)
    return VGG(plan.name, *sizes, plan.width, plan.style)


def _resnet(plan: Blueprint) -> nn.Module:
    return ResNet(plan.name, plan.in_channels, plan.classes, plan.width, plan.style)


NETWORKS: dict[str, Builder] = {
    "mlp": _mlp,
    **dict.fromkeys(vgg.DEPTHS, _vgg),
    **dict.fromkeys(resnet.BLOCKS, _resnet),
}


def register(name: str, build: Builder) -> None:
    """Make `name` a network that `build`, run specs and the command line know.

    `build` takes a `Blueprint` and returns the module, logits [N, classes] last; its `style` makes
    the layers, with or without batch normalisation. The weights are drawn afterwards. Call this
    wherever runs of that network are trained or read.
    """
    if name in NETWORKS:
        raise NameTaken("network", name)
    NETWORKS[name] = build


__all__ = [
    "INVARIANCE_THRESHOLD",
    "MLP",
    "NETWORKS",
    "VGG",
    "Blueprint",
    "Invariance",
    "ParameterRole",
    "ResNet",
    "ScaleGroup",
    "SizeResponse",
    "build",
    "initialize_",
    "invariance",
    "measure_invariance",
    "register",
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
    batch normalisation (no gamma, no beta), which follows every layer but the last; it is on by
    default, except for `mlp`. `width` scales all channel counts (an MLP's hidden sizes).
    `hidden` (default two layers of 128) and `activation` (relu or linear) are for `mlp`; other
    networks ignore `hidden`.
    Weights come from torch's global generator: call `torch.manual_seed` first.

    >>> sum(p.numel() for p in build("mlp", classes=10, in_channels=1, image_size=8).parameters())
    26122
    """
    check_name("network", name, NETWORKS)
    AT_LEAST_ONE.check("classes", classes)
    AT_LEAST_ONE.check("in_channels", in_channels)
    AT_LEAST_ONE.check("image_size", image_size)
    POSITIVE.check("batch_norm_eps", batch_norm_eps)
    scaled(1, width)  # refuses a wrong width, also of an MLP without hidden layers
    style = Style(name != "mlp" if batch_norm is None else batch_norm, bias, batch_norm_eps)
    if name != "mlp" and activation != "relu":
        raise Misplaced(["activation"], "mlp")
    sizes = (classes, in_channels, image_size)
    return initialize_(NETWORKS[name](Blueprint(name, *sizes, width, style, hidden, activation)))
