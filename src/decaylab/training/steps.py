"""Training steps: as they are on the CPU, as replayed CUDA graphs on a GPU."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decaylab.data import Batches
from decaylab.optim.kfac import KFAC
from decaylab.training.evaluate import is_hit
from decaylab.training.graphs import Captured


class Steps:
    """Takes the steps of a run and adds up their losses and hits on the device.

    On CUDA a step's device work (batch, forward, backward, update, sums) is captured once for plain
    steps, once for K-FAC's refreshes and once for its inversions; position and learning rates are
    tensors that the graphs read.

    Args:
        forward: images to logits, in train mode.
        optimizer: its learning rates are set by `begin_epoch`.
        batches: drawn for the epoch before `begin_epoch`.
        autocast: makes the context of a forward pass.
        graphs: on CUDA; False runs every step as it is there too.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        autocast: Callable[[], AbstractContextManager[object]],
        *,
        graphs: bool,
    ) -> None:
        self._forward, self._optimizer, self._batches = forward, optimizer, batches
        self._autocast = autocast
        self.device = batches.device
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self._position = torch.zeros((), dtype=torch.int64, device=self.device)
        self._captured: dict[tuple[bool, bool], Captured[Tensor]] = {}  # by what a K-FAC step does
        self.pool: Any = None  # the graphs' memory, for others that run in between
        if graphs and self.device.type == "cuda":
            drawn_from = (optimizer.generator,) if isinstance(optimizer, KFAC) else ()
            self.pool = torch.cuda.graph_pool_handle()
            self._captured = {
                (refresh, invert): Captured(self._work, generators=drawn_from, pool=self.pool)
                for refresh in (False, True)
                for invert in (False, True)
            }

    def begin_epoch(self, position: int, learning_rates: Sequence[float]) -> None:
        """Start at a step of the drawn epoch, with a learning rate for each param group."""
        self._position.fill_(position)
        for group, lr in zip(self._optimizer.param_groups, learning_rates, strict=True):
            if self.device.type == "cpu":
                group["lr"] = lr
                continue
            # a loaded one lies on the host, from where a graph would read it once and for all
            if not isinstance(group["lr"], Tensor) or group["lr"].device != self.device:
                group["lr"] = torch.zeros((), device=self.device)
            group["lr"].fill_(lr)

    def take(self) -> Tensor:
        """One step; the mean loss of its batch, still on the device. No host synchronisation."""
        optimizer = self._optimizer
        if not isinstance(optimizer, KFAC):
            return self._captured.get((False, False), self._work)()
        optimizer.before_step()
        loss = self._captured.get((optimizer.refresh_due, optimizer.inverts_now), self._work)()
        optimizer.after_step()
        return loss

    def _work(self) -> Tensor:
        images, labels = self._batches.batch(self._position)
        with self._autocast():
            logits = self._forward(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        if isinstance(self._optimizer, KFAC):
            self._optimizer.device_step()
        else:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss_sum += loss.detach()
        self.correct += is_hit(logits.detach(), labels).sum()
        self._position += 1
        return loss.detach()
