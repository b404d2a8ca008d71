"""What the training benchmarks learn: Python's own sources as bytes, and images."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decaylab.data import load

Batch = tuple[Tensor, Tensor]
# Every tenth source file is held out.
HELD_OUT = 10


def python_sources(device: torch.device, most: int = 2**25) -> tuple[Tensor, Tensor]:
    """Bytes of the installation's own modules: to train on, and held out, by whole files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % HELD_OUT == 0].append(path.read_bytes())
    train, test = (np.frombuffer(b"\n".join(part)[:most], dtype=np.uint8) for part in parts)
    return torch.tensor(train, device=device), torch.tensor(test, device=device)


def text_batches(text: Tensor, size: int, length: int, seed: int) -> Callable[[], Batch]:
    """Draws windows of a text and the same windows one byte on, on its device."""
    generator = torch.Generator(text.device).manual_seed(seed)
    within = torch.arange(length + 1, device=text.device)
    places = len(text) - length - 1

    def draw() -> Batch:
        starts = torch.randint(places, (size, 1), generator=generator, device=text.device)
        window = text[starts + within].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return draw


def templates(count: int, device: torch.device, size: int = 32, classes: int = 10) -> Batch:
    """Noisy templates, one per class: images that need no file."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, 3, size, size, generator=generator)
    labels = torch.arange(count) % classes
    noise = torch.randn(count, 3, size, size, generator=generator)
    return (means[labels] + 3 * noise).to(device), labels.to(device)


def cifar10(count: int, device: torch.device, data_dir: Path | None = None) -> Batch:
    """The first of CIFAR-10's training images, normalised."""
    split = load("cifar10", data_dir).train
    normal = (split.images[:count].to(device).float() - 120) / 64
    return normal, split.labels[:count].to(device).long()


def image_batches(data: Batch, size: int, seed: int) -> Callable[[], Batch]:
    """Draws images with their labels, on their device."""
    x, y = data
    generator = torch.Generator(x.device).manual_seed(seed)

    def draw() -> Batch:
        chosen = torch.randint(len(y), (size,), generator=generator, device=x.device)
        return x[chosen], y[chosen]

    return draw
