"""What a data set is here: two splits of uint8 images, and the numbers that normalise them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images as they were stored, uint8 [N, C, H, W], and their labels, int64 [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device | str) -> Split:
        """The same split on `device`."""
        return Split(self.images.to(device), self.labels.to(device))

    def take(self, indices: Tensor) -> Split:
        """The images and labels at `indices` (int64 [M]), in that order."""
        indices = indices.to(self.images.device)
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class DataSet:
    """A data set in memory; a network sees (pixel / 255 - mean) / std, per channel."""

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to(self, device: torch.device | str) -> DataSet:
        """The same data set with both splits on `device`."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self) -> DataSet:
        """For search: a random tenth of the training images becomes the test split.

        Recipe 15: 5,000 of CIFAR's 50,000 training images. The real test images are not used.
        The choice is the same each time and on each device; both parts keep the file's order.
        """
        count = len(self.train) // 10
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        return replace(
            self,
            train=self.train.take(order[count:].sort().values),
            test=self.train.take(order[:count].sort().values),
        )
