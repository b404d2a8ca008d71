"""Loss and accuracy of a model on a split."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from decaylab.data import DataSet, Split, evaluation_batches
from decaylab.networks.preserve import preserved_modes
from decaylab.optim.graphs import Captured, CudaGraphs

BATCH_SIZE = 1000


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropy in nats and accuracy in [0, 1], both means over the images.

    `correct` [N], on the model's device: whether the largest logit of an image is its label's.
    """

    loss: float
    accuracy: float
    correct: Tensor = field(compare=False, repr=False)


def evaluate(
    model: nn.Module, split: Split, data: DataSet, *, batch_size: int = BATCH_SIZE
) -> Evaluation:
    """Mean loss and accuracy over all images of `split`, normalised as `data` says.

    In eval mode: batch norm uses its running statistics. The model's mode is restored. Cost: one
    forward pass, one host synchronisation at the end.
    """
    return Evaluator(model, data, batch_size=batch_size)(split)


class Evaluator:
    """`evaluate` for a model that is evaluated again and again: on CUDA by replayed graphs.

    A graph (one for each size of batch) reads parameters and running statistics where they lie, so
    that it stays valid as they change; when one lies elsewhere than at the capture (`.to()`,
    `load_state_dict(assign=True)`), graphs are captured again. The sums are added up on the device.
    Same result as without graphs, bit for bit.

    Args:
        model: the bare model, not a compiled one: training has compiled another mode of it.
        data: says how images are normalised.
        batch_size: images in a batch; the last one may be smaller.
        autocast: makes the context of a forward pass. It must not be entered outside, too: the
            weights that an outer one has cast and kept would become part of the graph.
        graphs: capture, where the images are on CUDA.
        pool: memory shared with other graphs that never run at the same time; None makes one.
        mode: `train` takes each batch's own statistics under batch norm (and draws dropout's
            masks), as training does, and leaves the running ones as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        data: DataSet,
        *,
        batch_size: int = BATCH_SIZE,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        graphs: bool = False,
        pool: Any = None,
        mode: Literal["eval", "train"] = "eval",
    ) -> None:
        self._model, self._data, self._mode = model, data, mode
        self._batch_size, self._autocast = batch_size, autocast
        device = data.train.images.device
        self._graphs = CudaGraphs(pool=pool) if graphs and device.type == "cuda" else None
        # by size of batch: images, labels, what is correct, and the work
        self._captured: dict[int, tuple[Tensor, Tensor, Tensor, Captured[None]]] = {}
        self._places: list[int] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, split: Split) -> Evaluation:
        """Evaluate on all images of `split`; one host synchronisation, at the end."""
        return self.launch(split)()

    def launch(
        self, split: Split, between: Callable[[], None] = lambda: None
    ) -> Callable[[], Evaluation]:
        """Ask the device to evaluate; what is returned waits for it and reads the result.

        `between` is called between batches; what it raises ends the evaluation.
        """
        mean, std = self._data.mean, self._data.std
        batches = evaluation_batches(split, batch_size=self._batch_size, mean=mean, std=std)
        return self.launch_batches(batches, len(split.labels), between)

    def launch_batches(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        count: int,
        between: Callable[[], None] = lambda: None,
    ) -> Callable[[], Evaluation]:
        """`launch` on batches of normalised images with labels, `count` images in all."""
        self._loss.zero_()
        self._forget_graphs_of_moved_tensors()
        add = self._add if self._graphs is None else self._replay
        begin = 0
        correct = torch.empty(count, dtype=torch.bool, device=self._loss.device)
        with _in_mode(self._model, self._mode), torch.no_grad():
            for images, labels in batches:
                between()
                end = begin + len(labels)
                add(images, labels, correct[begin:end])
                begin = end
        sums = torch.stack([self._loss, correct.sum().double()])

        def read() -> Evaluation:
            loss, hits = sums.tolist()
            return Evaluation(loss / count, hits / count, correct)

        return read

    def _add(self, images: Tensor, labels: Tensor, correct: Tensor) -> None:
        with self._autocast():
            logits = self._model(images).float()
            self._loss += F.cross_entropy(logits, labels, reduction="sum")
        correct.copy_(is_hit(logits, labels))

    def _replay(self, images: Tensor, labels: Tensor, correct: Tensor) -> None:
        assert self._graphs is not None
        size = len(labels)
        if size not in self._captured:
            fixed = images.clone(), labels.clone(), correct.clone()
            self._captured[size] = (*fixed, Captured(lambda: self._add(*fixed), self._graphs))
        fixed_images, fixed_labels, fixed_correct, add = self._captured[size]
        fixed_images.copy_(images)
        fixed_labels.copy_(labels)
        add()
        correct.copy_(fixed_correct)

    def _forget_graphs_of_moved_tensors(self) -> None:
        tensors = (*self._model.parameters(), *self._model.buffers())
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._captured.clear()
            if self._graphs is not None:
                self._graphs.forget()
            self._places = places


@contextmanager
def _in_mode(model: nn.Module, mode: Literal["eval", "train"]) -> Iterator[None]:
    """The model in a mode, its running statistics neither read in train mode nor changed."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    tracking = [(norm, norm.track_running_stats) for norm in norms]
    with preserved_modes(model):
        model.train(mode == "train")
        try:
            for norm, tracks in tracking:
                norm.track_running_stats = tracks and mode == "eval"
            yield
        finally:
            for norm, tracks in tracking:
                norm.track_running_stats = tracks


def is_hit(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest entry of a row of logits [B, C] is the label's: booleans [B]."""
    return logits.argmax(dim=1) == labels
