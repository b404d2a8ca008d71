"""Networks that people train, in plain torch, for benchmarks: no layer of ours in them."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(inputs: int, classes: int, hidden: int = 256) -> nn.Module:
    """Three hidden layers."""
    sizes = [inputs, hidden, hidden, hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


def lenet(channels: int, classes: int, size: int) -> nn.Module:
    """pytorch/examples' MNIST net: two convolutions, dropout, two linear layers."""
    left = (size - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * left**2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def vgg(channels: int, classes: int, *, batch_norm: bool, width: int = 64) -> nn.Module:
    """VGG11 for small images."""
    layers: list[nn.Module] = []
    plan = [width, 0, 2 * width, 0, 4 * width, 4 * width, 0, 8 * width, 8 * width, 0]
    for wide in plan:
        if not wide:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
            continue
        layers.append(nn.Conv2d(channels, wide, 3, padding=1))
        layers += [nn.BatchNorm2d(wide)] if batch_norm else []
        layers.append(nn.ReLU(inplace=True))
        channels = wide
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class Residual(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of three, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            kinds = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            kinds = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for fan_in, fan_out, kernel, step in kinds:
            layers += [
                nn.Conv2d(fan_in, fan_out, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(fan_out),
                nn.ReLU(inplace=True),
            ]
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the sum."""
        return F.relu(self.branch(x) + self.shortcut(x))


def resnet(
    channels: int, classes: int, depths: tuple[int, ...], *, width: int = 64, large: bool = False
) -> nn.Module:
    """ResNet18 (2, 2, 2, 2) for small images; with `large`, bottlenecks and ImageNet's stem."""
    expansion = 4 if large else 1
    stem: list[nn.Module] = [
        nn.Conv2d(channels, width, 7 if large else 3, 1 + large, 3 if large else 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    if large:
        stem.append(nn.MaxPool2d(3, 2, 1))
    blocks, inputs = [], width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            stride = 2 if i == 0 and stage else 1
            blocks.append(Residual(inputs, width * 2**stage, stride, expansion))
            inputs = width * 2**stage * expansion
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
    )


class Attention(nn.Module):
    """Self-attention with one projection for query, key and value."""

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A transformer's layer, normalised before each branch."""

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal=causal)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Both branches, each added."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer that averages its tokens."""

    def __init__(
        self, channels: int, classes: int, size: int, patch: int, dim: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, dim))
        self.layers = nn.Sequential(*(Layer(dim, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(tokens)).mean(1))


class GPT(nn.Module):
    """nanoGPT's architecture and initialisation."""

    def __init__(
        self, vocabulary: int, length: int, dim: int, depth: int, heads: int, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.layers = nn.Sequential(*(Layer(dim, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                branch_end = name.endswith((".down", ".out"))
                nn.init.normal_(module.weight, 0, 0.02 / ((2 * depth) ** 0.5 if branch_end else 1))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] to logits [B, T, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.places(places))))
