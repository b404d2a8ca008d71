"""ResNet20/32/44/56, four times as wide as the original, as the paper trains them."""

from __future__ import annotations

from torch import Tensor, nn

from decaylab.networks.layers import Style, scaled

CHANNELS = (64, 128, 256)
BLOCKS = {"resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9}  # per stage


class ResidualBlock(nn.Module):
    """relu(branch(x) + shortcut(x)), the branch being two 3x3 convolutions.

    The shortcut is the identity, and a 1x1 convolution (with batch normalisation if the net has it)
    where the stride is 2.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, style: Style):
        super().__init__()
        self.branch = nn.Sequential(
            *style.conv(in_channels, out_channels, 3, stride),
            nn.ReLU(),
            *style.conv(out_channels, out_channels, 3),
        )
        self.shortcut = (
            nn.Identity() if stride == 1 else style.conv(in_channels, out_channels, 1, stride)
        )
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """[N, in_channels, H, W] -> [N, out_channels, ceil(H / stride), ceil(W / stride)]."""
        return self.activation(self.branch(images) + self.shortcut(images))


class ResNet(nn.Module):
    """A 3x3 convolution, three stages of basic blocks, global average pool, one linear layer.

    [N, in_channels, H, W] -> [N, classes], for any H and W. Stages two and three start at stride 2.
    """

    def __init__(self, name: str, in_channels: int, classes: int, width: float, style: Style):
        super().__init__()
        channels = scaled(CHANNELS[0], width)
        self.stem = nn.Sequential(*style.conv(in_channels, channels, 3), nn.ReLU())
        blocks = []
        for stage, out in enumerate(scaled(group, width) for group in CHANNELS):
            for index in range(BLOCKS[name]):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(ResidualBlock(channels, out, stride, style))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes, bias=style.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes]."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
