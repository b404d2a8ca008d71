"""Batches made on the device that holds the images: shuffle, crop, flip, normalise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from decaylab.data.sets import Split
from decaylab.errors import AT_LEAST_ONE, Lacks, Mismatch, Range

PADDING = 4


class Batches:
    """Training batches: every image once an epoch in random order; every batch full, unless asked.

    Recipe 13. With `augment`, each image gets 4 rows and columns of zeros on every side, a random
    crop of its own size (one of 9 x 9 corners) and, with probability one half, a horizontal flip.
    The zeros are raw pixels, put there before normalisation (the order of the usual pipelines), so
    that a network sees -mean / std in the border. Then (pixel / 255 - mean) / std per channel.

    Cost: one gather from the padded uint8 images (kept on the device), a flip and two
    elementwise passes a batch; no host synchronisation, no branch on a value.

    Args:
        split: images uint8 [N, C, H, W] and labels int64 [N]; batches live on their device.
        batch_size: images in every batch; the N % batch_size left over are dropped, others each
            epoch, or kept as a smaller last batch.
        mean: per channel, of pixels / 255.
        std: per channel, of pixels / 255.
        augment: crop and flip.
        seed: of the generator (on that device) behind every draw.
        dtype: of the images given out; None is torch's default.
        keep_last: keep that smaller batch.
        share: (which, of how many) equal part of every batch is given out.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        keep_last: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        images = Range(at_least=1, at_most=len(split))
        images.check("batch_size", batch_size, "there are no more training images")
        self.batch_size, self.device = batch_size, split.images.device
        self._share = share
        left_over = len(split) % batch_size
        self.ends_short = keep_last and left_over > 0
        self.steps_per_epoch = len(split) // batch_size + self.ends_short
        self.images_per_epoch = len(split) - (0 if self.ends_short else left_over)
        self._images, self._labels = split.images, split.labels
        self._normalise = _Normalise(split.images, mean, std, dtype)
        self._generator = torch.Generator(split.images.device).manual_seed(seed)
        self._before = self._generator.get_state()
        # of a whole epoch: which image, and with augmentation its crop's top, left, and flip
        self._draws: tuple[Tensor, ...] = ()
        self._crops: Tensor | None = None
        if augment:
            height, width = split.images.shape[2:]
            padded = F.pad(split.images, (PADDING,) * 4)
            # A view [N, 9, 9, C, H, W]: a crop is one index per image.
            corners = padded.unfold(2, height, 1).unfold(3, width, 1)
            self._crops = corners.permute(0, 2, 3, 1, 4, 5)

    def begin_epoch(self) -> None:
        """Draw the order, and with augmentation the crops and flips, of the whole next epoch."""
        self._before = self._generator.get_state()
        device, generator, total = self._images.device, self._generator, len(self._images)
        drawn = [torch.randperm(total, generator=generator, device=device)]
        if self._crops is not None:
            corners = 2 * PADDING + 1
            drawn += torch.randint(corners, (2, total), generator=generator, device=device)
            flips = torch.randint(2, (total, 1, 1, 1), generator=generator, device=device)
            drawn.append(flips == 1)
        if not self._draws:
            self._draws = tuple(drawn)
            return
        for place, new in zip(self._draws, drawn, strict=True):
            place.copy_(new)  # in its place: CUDA graphs read it

    def batch(self, i: int | Tensor) -> tuple[Tensor, Tensor]:
        """Batch i of this epoch: images [B, C, H, W], normalised, and labels [B]. Draws nothing.

        As a tensor on the device (a scalar, for CUDA graphs), i is not checked; a smaller last
        batch is to be asked for by its number.
        """
        if not self._draws:
            remedy = "call begin_epoch(), which draws it, before batch()"
            raise Lacks("this epoch", "order of the images", remedy)
        part: slice | Tensor
        rank, size = self._share
        rows = self.batch_size // size
        if isinstance(i, Tensor):
            first = i * self.batch_size + rank * rows
            part = torch.arange(rows, device=self.device) + first
        elif 0 <= i < self.steps_per_epoch:
            begin, end = i * self.batch_size, min((i + 1) * self.batch_size, len(self._images))
            rows = (end - begin) // size
            part = slice(begin + rank * rows, begin + (rank + 1) * rows)
        else:
            raise IndexError(f"batch {i} of {self.steps_per_epoch}")
        chosen = self._draws[0][part]
        if self._crops is None:
            images = self._images[chosen]
        else:
            _, top, left, flip = self._draws
            images = self._crops[chosen, top[part], left[part]]
            images = torch.where(flip[part], images.flip(-1), images)
        return self._normalise(images), self._labels[chosen]

    def state_dict(self) -> dict[str, Tensor]:
        """The generator as it was before this epoch's draws (uint8, CPU).

        After `load_state_dict`, `begin_epoch` draws this epoch again.
        """
        return {"generator": self._before.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to where `state_dict` was taken; call `begin_epoch` next."""
        self._generator.set_state(state["generator"].cpu())
        self._before = self._generator.get_state()


def evaluation_batches(
    split: Split,
    *,
    batch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """All images in order, normalised, with their labels; the last batch may be short.

    >>> split = Split(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.arange(5))
    >>> [len(y) for _, y in evaluation_batches(split, batch_size=2, mean=(0,), std=(1,))]
    [2, 2, 1]
    """
    AT_LEAST_ONE.check("batch_size", batch_size)
    normalise = _Normalise(split.images, mean, std, dtype)
    for start in range(0, len(split), batch_size):
        part = slice(start, start + batch_size)
        yield normalise(split.images[part]), split.labels[part]


class _Normalise:
    """(pixel / 255 - mean) / std as one multiplication and one addition per pixel."""

    def __init__(
        self, images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype | None
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        channels = images.shape[1]
        if len(mean) != channels or len(std) != channels:
            counts = {"the images": channels, "the means": len(mean), "the stds": len(std)}
            raise Mismatch("number of channels", counts, "give a mean and a std for each")
        # In double precision first, so that only the result is rounded.
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(mean, dtype=torch.float64) * 255 * scale
        self._scale = scale.view(-1, 1, 1).to(images.device, dtype)
        self._shift = shift.view(-1, 1, 1).to(images.device, dtype)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self._shift, images.to(self._scale.dtype), self._scale)
