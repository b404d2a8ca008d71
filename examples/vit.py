"""What weight decay does to a small vision transformer on scikit-learn's digits.

    python examples/vit.py                         # AdamW, half a minute on two cores
    python examples/vit.py --optimizer kfac-f      # or kfac-g, sgd

It trains once with and once without decay, both watched; then it says what decay did.
"""

import torch
import torch.nn.functional as F
from on_digits import OPTIMIZERS, main
from torch import Tensor, nn

# Learning rate and weight decay, where none is asked for: decay acts over 1 / (lr * wd) steps, and
# a run is short.
DEFAULTS = {"adamw": (5e-3, 0.5), "sgd": (0.05, 5e-3), "kfac-f": (0.03, 0.1), "kfac-g": (0.03, 0.1)}


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, patches, width] to the same."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class ViT(nn.Module):
    """Images [batch, 1, 8, 8], in 16 patches, to logits [batch, 10]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of an image's class."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


if __name__ == "__main__":
    assert set(OPTIMIZERS) == set(DEFAULTS)
    main(
        "ViT",
        ViT,
        DEFAULTS,
        {"damping": 0.03, "kl_clip": 1e-2, "invert_every": 20, "others_lr": 0.01},
        optimizer="adamw",
        width=32,
    )
