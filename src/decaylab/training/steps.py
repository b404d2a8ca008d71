"""Training steps: as they are on the CPU, as replayed CUDA graphs on a GPU."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.data import Batches
from decaylab.optim.captured import CapturedStep, captured
from decaylab.training.evaluate import is_hit


class Steps:
    """Takes the steps of a run and adds up their losses and hits on the device.

    On CUDA its steps (batch, forward, backward, update, sums) are `captured`; position and learning
    rates are tensors that the graphs read.

    Args:
        forward: images to logits, in train mode.
        optimizer: its learning rates are set by `begin_epoch`.
        batches: drawn for the epoch before `begin_epoch`.
        autocast: makes the context of a forward pass.
        graphs: on CUDA; False runs every step as it is there too.
    """

    def __init__(
        self,
        forward: nn.Module,
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
        self.captured: CapturedStep[Tensor] | None = None
        if graphs and self.device.type == "cuda":
            self.captured = captured(self._step, forward, optimizer, on_failure="eager")
        self.take: Callable[[], Tensor] = self.captured or self._step
        """One step; the mean loss of its batch, still on the device. No host synchronisation."""

    @property
    def pool(self) -> Any:
        """The graphs' memory, for others that run in between; None where there are no graphs."""
        return None if self.captured is None else getattr(self.captured.graphs, "pool", None)

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

    def _step(self) -> Tensor:
        images, labels = self._batches.batch(self._position)
        with self._autocast():
            logits = self._forward(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss_sum += loss.detach()
        self.correct += is_hit(logits.detach(), labels).sum()
        self._position += 1
        return loss.detach()
