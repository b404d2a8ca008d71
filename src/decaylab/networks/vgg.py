"""VGG11/13/16/19 as the paper trains them: one linear layer behind the convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from decaylab.networks.layers import Style, scaled

CHANNELS = (64, 128, 256, 512, 512)
DEPTHS = {  # convolutions per group
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


class VGG(nn.Module):
    """Five groups of 3x3 convolutions, a 2x2 max-pool after each, then one linear layer.

    [N, in_channels, H, H] -> [N, classes]. A pool is left out where the image is one pixel already
    (8x8 inputs: after the third group; 28x28: after the fourth); the head takes what remains, which
    is one pixel from 32x32 inputs. ReLUs are out of place, so captured outputs stay what they were.
    """

    def __init__(
        self, name: str, in_channels: int, image_size: int, classes: int, width: float, style: Style
    ):
        super().__init__()
        layers: list[nn.Module] = []
        channels, size = in_channels, image_size
        for group, depth in zip(CHANNELS, DEPTHS[name], strict=True):
            for _ in range(depth):
                layers += [*style.conv(channels, scaled(group, width), 3), nn.ReLU()]
                channels = scaled(group, width)
            if size > 1:
                layers.append(nn.MaxPool2d(2))
                size //= 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels * size * size, classes, bias=style.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes]."""
        return self.head(self.features(images).flatten(1))
