"""Loss and accuracy of a model on a split, in a stated batch-norm mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.data import DataSet, Split, evaluation_batches

BatchNormMode = Literal["running", "batch"]


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropy in nats and accuracy in [0, 1], both means over `count` images."""

    loss: float
    accuracy: float
    count: int
    batch_norm: BatchNormMode


def evaluate(
    model: nn.Module,
    split: Split,
    data: DataSet,
    *,
    batch_norm: BatchNormMode = "running",
    batch_size: int = 1000,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Mean loss and accuracy over all images of `split`, normalised as `data` says.

    `batch_norm="running"` is eval mode (running statistics); `"batch"` uses the statistics of each
    evaluation batch, as in training, and leaves the running ones untouched. The model's mode is
    restored. Cost: one forward pass, one host synchronisation at the end. `between` is called
    between batches; what it raises ends the evaluation.
    """
    device = split.images.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    batches = evaluation_batches(split, batch_size=batch_size, mean=data.mean, std=data.std)
    with _mode(model, batch_norm), torch.no_grad():
        for images, labels in batches:
            between()
            logits = model(images).float()
            loss += F.cross_entropy(logits, labels, reduction="sum")
            correct += hits(logits, labels)
    count = len(split.labels)
    return Evaluation(loss.item() / count, correct.item() / count, count, batch_norm)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of rows of logits [B, C] whose largest entry is the label's, as a tensor."""
    return (logits.argmax(dim=1) == labels).sum()


@contextmanager
def _mode(model: nn.Module, batch_norm: BatchNormMode) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    touched = dict(model.named_buffers()) if batch_norm == "batch" else {}
    before = {name: buffer.clone() for name, buffer in touched.items()}
    model.train(batch_norm == "batch")
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for name, buffer in touched.items():
            buffer.copy_(before[name])
