"""Steps that K-FAC skips, counted on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decaylab.errors import Lacks, warn_user

# How many steps in a row without a finite gradient are tolerated.
TOLERATED = 10


@dataclass(frozen=True)
class Health:
    """What `KFAC.check` found.

    Attributes:
        steps: steps taken, the skipped ones included.
        skipped: steps whose gradient or update was not finite, and which changed nothing. Those
            that a GradScaler leaves out are not among them: its scale says that it does.
        skipped_in_a_row: skipped steps since the last good one.
        failed_inversions: by layer, how often its Cholesky factorisation failed and the old
            inverse was kept.
    """

    steps: int
    skipped: int
    skipped_in_a_row: int
    failed_inversions: dict[str, int]


class Skips:
    """How many steps had no finite gradient: `counts` [2], in total and in a row."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        # of some steps ago; not on the default device, which may be CUDA, where nothing is pinned
        self._host_counts = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None
        self._warned = False

    def count(self, finite: Tensor) -> None:
        """Take a step into account. On the device."""
        missed = (~finite).long()
        self.counts += missed
        self.counts[1].mul_(missed)

    def read(self) -> tuple[int, int]:
        """In total and in a row (one host sync); an error if the last ten were skipped."""
        total, in_a_row = self.counts.tolist()
        if in_a_row >= TOLERATED:
            raise _without_gradients(in_a_row)
        return total, in_a_row

    def look(self) -> None:
        """Warn, once, if the last ten were skipped. Does not wait: reads older counts."""
        if self._warned or not (self._copied is None or self._copied.query()):
            return
        if int(self._host_counts[1]) >= TOLERATED:
            self._warned = True
            warn_user(str(_without_gradients(int(self._host_counts[1]))))
            return
        self._host_counts.copy_(self.counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _without_gradients(in_a_row: int) -> Lacks:
    remedy = "they are skipped; lower the learning rate, raise the damping or set kl_clip"
    return Lacks(f"each of the last {in_a_row} steps", "finite gradient", remedy)
