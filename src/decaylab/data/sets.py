"""What a data set is here: two splits of uint8 images, and the numbers that normalise them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decaylab.errors import DecaylabError


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

    def held_out(self, count: int | None = None, seed: int = 0) -> DataSet:
        """For search: `count` random training images become the test split.

        Recipe 15: 5,000 of CIFAR's 50,000 training images. The real test images are not used.
        The choice depends on `seed` alone, not on the device; both parts keep the file's order.

        Args:
            count: images held out; a tenth of the training images unless given.
            seed: of the generator that chooses them.
        """
        total = len(self.train)
        count = total // 10 if count is None else count
        if not 0 < count < total:
            raise DecaylabError(
                f"Cannot hold out {count} of {self.name}'s {total} training images: "
                f"choose between 1 and {total - 1}."
            )
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        return replace(
            self,
            train=self.train.take(order[count:].sort().values),
            test=self.train.take(order[:count].sort().values),
        )
