"""Data and networks of `independent.py`, which uses nothing of decaylab."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def decode(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """uint8 images [N, 32, 32, 3] and labels [N] of one split, in file order."""
    import numpy
    import pyarrow.parquet as parquet
    from PIL import Image

    images, labels = [], []
    files = sorted(folder.glob(f"{split}-*.parquet"))
    assert files, f"no {split}-*.parquet in {folder}"
    for file in files:
        table = parquet.read_table(file, columns=["img", "label"])
        for row in table.column("img").to_pylist():
            image = Image.open(io.BytesIO(row["bytes"]))
            images.append(numpy.array(image.convert("RGB")))
        labels += table.column("label").to_pylist()
    return torch.from_numpy(numpy.stack(images)), torch.tensor(labels)


def load(folder: Path, cache: Path | None) -> dict[str, Tensor]:
    if cache is not None and cache.exists():
        return torch.load(cache, weights_only=True)
    train, test = decode(folder, "train"), decode(folder, "test")
    assert train[0].shape == (50000, 32, 32, 3)
    assert test[0].shape == (10000, 32, 32, 3)
    assert train[1].bincount().tolist() == [5000] * 10
    assert test[1].bincount().tolist() == [1000] * 10
    data = {"train_x": train[0], "train_y": train[1], "test_x": test[0], "test_y": test[1]}
    if cache is not None:
        torch.save(data, cache)
    return data


def split(
    data: dict[str, Tensor], options: argparse.Namespace, device: torch.device
) -> tuple[Tensor, ...]:
    """(train x, y, test x, y); --held-out: 5,000 training images are the test set instead."""
    names = ("train_x", "train_y", "test_x", "test_y")
    train_x, train_y, test_x, test_y = (data[name] for name in names)
    if options.held_out:
        generator = torch.Generator().manual_seed(options.split_seed)
        order = torch.randperm(len(train_x), generator=generator)
        training, held = order[:-5000], order[-5000:]
        test_x, test_y = train_x[held], train_y[held]
        train_x, train_y = train_x[training], train_y[training]
    if options.limit:
        train_x, train_y = train_x[: options.limit], train_y[: options.limit]
        test_x, test_y = test_x[: options.limit], test_y[: options.limit]
    return tuple(t.to(device) for t in (train_x, train_y, test_x, test_y))


def shuffled(
    x: Tensor, y: Tensor, augment: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One epoch in a fresh order, each image with its own crop (zero-padded, uint8) and flip."""
    n, device = len(x), x.device
    order = torch.randperm(n, generator=generator, device=device)
    if not augment:
        return x[order], y[order]
    # channels last: pads width and height with black, before normalisation
    padded = F.pad(x, (0, 0, 4, 4, 4, 4))
    grid = torch.arange(32, device=device)
    top = torch.randint(0, 9, (n, 1), generator=generator, device=device)
    left = torch.randint(0, 9, (n, 1), generator=generator, device=device)
    flip = torch.randint(0, 2, (n, 1), generator=generator, device=device).bool()
    rows = top + grid
    columns = left + torch.where(flip, grid.flip(0), grid)
    return padded[order[:, None, None], rows[:, :, None], columns[:, None, :]], y[order]


class Normalise(nn.Module):
    """uint8 [B, 32, 32, 3] -> standardised float [B, 3, 32, 32] in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return (x.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std


def norm(channels: int, options: argparse.Namespace) -> nn.Module:
    if not options.bn:
        return nn.Identity()
    return nn.BatchNorm2d(
        channels, eps=options.bn_eps, momentum=options.bn_momentum, affine=options.affine
    )


def vgg16(options: argparse.Namespace) -> nn.Module:
    layers: list[nn.Module] = [Normalise()]
    inputs = 3
    for group in GROUPS:
        for width in group:
            width = max(1, round(width * options.width))
            layers += [nn.Conv2d(inputs, width, 3, padding=1), norm(width, options), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, 10))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the stride is 2."""

    def __init__(self, inputs: int, outputs: int, stride: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1),
            norm(outputs, options),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1),
            norm(outputs, options),
        )
        self.skip: nn.Module = nn.Identity()
        if stride == 2:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), norm(outputs, options))

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return F.relu(self.main(x) + self.skip(x))


def resnet32(options: argparse.Namespace) -> nn.Module:
    widths = [max(1, round(w * options.width)) for w in (64, 128, 256)]
    layers: list[nn.Module] = [
        Normalise(),
        nn.Conv2d(3, widths[0], 3, padding=1),
        norm(widths[0], options),
        nn.ReLU(),
    ]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(5):
            layers.append(Block(inputs, width, 2 if stage and not block else 1, options))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def initialise(model: nn.Module, kind: str) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if kind == "glorot":
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
