"""What weight decay does to a ResNet whose batch norm has scales and shifts, on digits.

    python examples/resnet_affine.py                         # SGD, half a minute on two cores
    python examples/resnet_affine.py --optimizer kfac-g      # or kfac-f, adamw

It trains once with and once without decay, both watched; then it says what decay did. The learnt
scales do not matter to invariance: a batch norm's output still does not depend on the scale of the
convolution before it.
"""

import torch.nn.functional as F
from on_digits import OPTIMIZERS, main
from torch import Tensor, nn

# Learning rate and weight decay, where none is asked for: decay acts over 1 / (lr * wd) steps, and
# a run is short.
DEFAULTS = {"adamw": (3e-3, 1.0), "sgd": (0.1, 5e-3), "kfac-f": (0.03, 0.1), "kfac-g": (0.03, 0.1)}


class Block(nn.Module):
    """Two convolutions, each behind it a batch norm, beside a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 10]; `depth` blocks at each of two resolutions."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks = [Block(width, width, 1) for _ in range(depth)]
        blocks += [Block(width, 2 * width, 2)]
        blocks += [Block(2 * width, 2 * width, 1) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of an image's class."""
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.head(x.mean((2, 3)))


if __name__ == "__main__":
    assert set(OPTIMIZERS) == set(DEFAULTS)
    main(
        "ResNet",
        ResNet,
        DEFAULTS,
        {"damping": 1e-2, "kl_clip": 1e-2, "invert_every": 20},
        optimizer="sgd",
        width=16,
    )
