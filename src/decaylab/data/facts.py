"""What is known of each data set before a file is read, and the check against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from decaylab.errors import Damaged, check_name

# The values below have five digits. Files that were re-encoded with loss, test files under a
# training name (0.003 apart for CIFAR) and swapped channels are all further away than this.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class ImageFile:
    """What one file held: images uint8 [N, C, H, W] and labels [N] of any integer type."""

    path: Path
    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class SplitFacts:
    """Images per class, and mean and std (population) of the pixels / 255 per channel."""

    class_counts: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(self.class_counts)


@dataclass(frozen=True)
class Facts:
    """A data set as it is published; `mean` and `std` are what the recipe normalises with."""

    name: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: dict[str, SplitFacts] = field(repr=False)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.splits["train"].class_counts)

    @property
    def remedy(self) -> str:
        """What to do about a file that is not what it should be."""
        return f"replace it, or run `decaylab data fetch {self.name}`"


# Recipe 13 and 17. CIFAR-10's std of the recipe is the usual one of the field: the mean of the
# images' own stds. The std of all its pixels, which the check uses, is larger. Digits (0..16,
# stored times 15, split by us: see sources.py) is normalised with its training pixels' own values.
DATA_SETS: dict[str, Facts] = {
    "digits": Facts(
        "digits",
        (1, 8, 8),
        mean=(0.2876,),
        std=(0.3542,),
        splits={
            "train": SplitFacts(
                (151, 147, 141, 154, 151, 142, 137, 140, 135, 139), (0.28761,), (0.35416,)
            ),
            "test": SplitFacts((27, 35, 36, 29, 30, 40, 44, 39, 39, 41), (0.28608,), (0.35299,)),
        },
    ),
    "mnist": Facts(
        "mnist",
        (1, 28, 28),
        mean=(0.0,),
        std=(1.0,),
        splits={
            "train": SplitFacts(
                (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949), (0.13066,), (0.30811,)
            ),
            "test": SplitFacts(
                (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009), (0.13251,), (0.31048,)
            ),
        },
    ),
    "cifar10": Facts(
        "cifar10",
        (3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        splits={
            "train": SplitFacts(
                (5000,) * 10, (0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)
            ),
            "test": SplitFacts(
                (1000,) * 10, (0.49421, 0.48513, 0.45041), (0.24665, 0.24289, 0.26159)
            ),
        },
    ),
    "cifar100": Facts(
        "cifar100",
        (3, 32, 32),
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        splits={
            "train": SplitFacts(
                (500,) * 100, (0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)
            ),
            "test": SplitFacts(
                (100,) * 100, (0.50880, 0.48739, 0.44194), (0.26825, 0.25736, 0.27710)
            ),
        },
    ),
}


def facts_of(name: str) -> Facts:
    """The facts of the data set `name`; an error that lists the names if there is none."""
    check_name("data set", name, DATA_SETS)
    return DATA_SETS[name]


def channel_statistics(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population std of the pixels / 255 of uint8 images [N, C, H, W], per channel.

    Through histograms of 4,096 images at a time: exact, and without a float copy of the images.
    """
    channels = parts[0].shape[1]
    histogram = np.zeros((channels, 256), dtype=np.int64)
    for images in parts:
        for start in range(0, len(images), 4096):
            for channel in range(channels):
                pixels = images[start : start + 4096, channel].ravel()
                histogram[channel] += np.bincount(pixels, minlength=256)
    share = histogram / histogram.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(axis=1)
    return mean, np.sqrt(variance)


def check(facts: Facts, split: str, parts: Sequence[ImageFile]) -> None:
    """Compare what was read with what is known; raise an error naming the file and the reason.

    Checked: the shape of the images, labels in range, the number of images, images per class, and
    the mean and std of the pixels per channel within `TOLERANCE`.
    """
    known = facts.splits[split]
    for part in parts:
        if part.images.shape[1:] != facts.shape:
            shape, wanted = ("x".join(map(str, x)) for x in (part.images.shape[1:], facts.shape))
            reason = f"its images are {shape}, but {facts.name}'s are {wanted}"
            raise Damaged(part.path, reason, facts.remedy)
        wrong = (part.labels < 0) | (part.labels >= facts.classes)
        if wrong.any():
            label = f"label {part.labels[wrong][0]} at image {wrong.argmax()}"
            reason = f"it has {label}, but {facts.name}'s labels are 0..{facts.classes - 1}"
            raise Damaged(part.path, reason, facts.remedy)
    names = ", ".join(str(part.path) for part in parts)
    total = sum(len(part.labels) for part in parts)
    if total != known.count:
        each = ", ".join(f"{part.path} {len(part.labels)}" for part in parts)
        what = f"the {split} set of {facts.name}"
        raise Damaged(what, f"{total} images instead of {known.count}: {each}", facts.remedy)
    counts = np.bincount(np.concatenate([part.labels for part in parts]), minlength=facts.classes)
    if (counts != known.class_counts).any():
        worst = int(np.abs(counts - known.class_counts).argmax())
        numbers = f"{counts[worst]} images of class {worst} instead of {known.class_counts[worst]}"
        reason = f"{numbers}, so these are not {facts.name}'s {split} labels"
        raise Damaged(names, reason, facts.remedy)
    measured = channel_statistics([part.images for part in parts])
    for what, value, expected in zip(
        ("mean", "std"), measured, (known.mean, known.std), strict=True
    ):
        if np.abs(value - expected).max() > TOLERANCE:
            numbers = f"{_digits(value)} instead of {_digits(expected)}"
            which = f"so these are not {facts.name}'s {split} images"
            reason = f"the pixels' {what} per channel is {numbers}, {which}"
            raise Damaged(names, reason, facts.remedy)


def _digits(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.5f}" for value in values)
