"""Training steps: eager on the CPU, replayed as CUDA graphs on a GPU."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.data import Batches
from decaylab.optim.captured import CapturedStep, captured
from decaylab.optim.kfac import KFAC
from decaylab.training.evaluate import is_hit
from decaylab.training.world import World


class Steps:
    """Takes the steps of a run and adds up their losses and hits on the device.

    On CUDA its steps (batch, forward, backward, update, sums) are `captured`; position and learning
    rates are tensors that the graphs read.

    Args:
        forward: images to logits, in train mode.
        optimizer: its learning rates are set by `begin_epoch`.
        batches: drawn for the epoch before `begin_epoch`.
        autocast: makes the context of a forward pass.
        world: the processes that take each step together.
        graphs: whether to use CUDA graphs; False runs every step eagerly on CUDA too.
        refresh_after: intervals in steps at which K-FAC's factors are measured and inverted after
            a step, on its batch and with its new weights; None: within steps, K-FAC's own way.
    """

    def __init__(
        self,
        forward: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        autocast: Callable[[], AbstractContextManager[object]],
        world: World = World(),  # noqa: B008 - frozen
        *,
        graphs: bool,
        refresh_after: tuple[int, int] | None = None,
    ) -> None:
        self._forward, self._optimizer, self._batches = forward, optimizer, batches
        self._autocast, self._refresh_after, self._world = autocast, refresh_after, world
        self._index = 0  # of the next batch, as `_position` says on the device
        self.device = batches.device
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self._position = torch.zeros((), dtype=torch.int64, device=self.device)
        self.captured: CapturedStep[Tensor] | None = None
        if graphs and self.device.type == "cuda":
            self.captured = captured(self._step, forward, optimizer, on_failure="eager")
        self._take: Callable[..., Tensor] = self.captured or self._step

    def take(self) -> Tensor:
        """One step; the mean loss of its batch, still on the device. No host synchronisation."""
        index, batches = self._index, self._batches
        self._index += 1
        if batches.ends_short and self._index == batches.steps_per_epoch:
            loss = self._take(short=True)
        else:
            loss = self._take()
        if self._refresh_after is not None:
            self._refresh(index, *self._refresh_after)
        return loss

    def _refresh(self, index: int, refresh_every: int, invert_every: int) -> None:
        assert isinstance(self._optimizer, KFAC)
        done = self._optimizer.steps - 1  # steps before this one
        if done % refresh_every == 0:
            with self._autocast(), self._world.whole_batch():
                images, _ = self._batches.batch(index)
                self._optimizer.refresh([images], invert=done % invert_every == 0)

    @property
    def pool(self) -> Any:
        """The graphs' memory, for others that run in between; None if there are no graphs."""
        return None if self.captured is None else getattr(self.captured.graphs, "pool", None)

    def begin_epoch(self, position: int, learning_rates: Sequence[float]) -> None:
        """Start at a step of the drawn epoch, with a learning rate for each param group."""
        self._position.fill_(position)
        self._index = position
        self.set_learning_rates(learning_rates)

    def set_learning_rates(self, learning_rates: Sequence[float]) -> None:
        """Set that of each param group, where graphs read it."""
        for group, lr in zip(self._optimizer.param_groups, learning_rates, strict=True):
            if self.device.type == "cpu":
                group["lr"] = lr
                continue
            # a loaded one lies on the host, from where a graph would read it once and for all
            if not isinstance(group["lr"], Tensor) or group["lr"].device != self.device:
                group["lr"] = torch.zeros((), device=self.device)
            group["lr"].fill_(lr)

    def _step(self, short: bool = False) -> Tensor:
        # a smaller last batch has a number of its own: no tensor says how many images there are
        last = self._batches.steps_per_epoch - 1
        images, labels = self._batches.batch(last if short else self._position)
        with self._autocast(), self._world.whole_batch():
            logits = self._forward(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        self._world.average_gradients(self._forward.parameters())
        self._optimizer.step()
        self._optimizer.zero_grad()
        hits = is_hit(logits.detach(), labels).sum()
        whole_loss, hits = self._world.step_sums(loss.detach(), hits)
        self.loss_sum += whole_loss
        self.correct += hits
        self._position += 1
        return whole_loss
