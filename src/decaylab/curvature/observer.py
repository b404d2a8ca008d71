"""Measuring Kronecker factors in a training loop: hooks capture, vectors go back, sums add up.

An observed forward pass costs one extra backward pass (`outputs="sampled"`) or one per class
(`"exact"`). The empirical Fisher costs none: it listens to the loss's own backward pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from decaylab.curvature.capture import (
    Call,
    Capture,
    Pass,
    back_propagate,
    frozen_batch_norm,
    logits_of,
    nodes_behind,
)
from decaylab.curvature.factors import Block, Sums
from decaylab.curvature.layers import Sharing
from decaylab.curvature.outputs import Curvature, Likelihood, check_names, exact, sampled
from decaylab.curvature.ranks import refuse_static_graph, refuse_to_stay_away
from decaylab.errors import DecaylabError

CountedRows = Callable[[Mapping[str, Any], Tensor], Tensor | None]
"""From the model's keyword arguments and its logits [..., C], which rows count; None: all."""


@dataclass(frozen=True)
class Measure:
    """Which curvature is measured, and how.

    Attributes:
        curvature: Fisher (Eq. 2), Gauss-Newton (Eq. 3) or empirical Fisher.
        likelihood: the predictive distribution behind the loss; the Gauss-Newton matrix ignores it.
        outputs: "sampled", one random vector per row, or "exact", one backward pass per class:
            exact where rows do not see each other; where they do (batch norm in train mode,
            attention between rows) each class's vector has a random sign per row and the result is
            unbiased, like a sampled one.
        scale: the curvature is multiplied by it; 2 is the published K-FAC-G.
        reduction: how the loss adds up rows; only the empirical Fisher reads the loss.
        sharing: "expand" or "reduce", for layers that meet several positions per example.
        logits: "output": they are what the model returns, or the `.logits` of it; "observed": the
            loop hands them to `observe`.
    """

    curvature: Curvature = "fisher"
    likelihood: Likelihood = "categorical"
    outputs: Literal["sampled", "exact"] = "sampled"
    scale: float = 1.0
    reduction: Literal["mean", "sum"] = "mean"
    sharing: Sharing = "expand"
    logits: Literal["output", "observed"] = "output"

    def __post_init__(self) -> None:
        check_names(self.curvature, self.likelihood)
        for name, known in (
            ("outputs", ("sampled", "exact")),
            ("reduction", ("mean", "sum")),
            ("sharing", ("expand", "reduce")),
            ("logits", ("output", "observed")),
        ):
            if getattr(self, name) not in known:
                raise DecaylabError(
                    f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(known)}"
                )
        if not self.scale > 0:
            raise DecaylabError(f"curvature_scale is {self.scale}: it must be positive")


class Observer:
    """Sums of curvature statistics per layer, gathered from forward passes that are due."""

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[str, Block],
        measure: Measure,
        due: Callable[[], bool],
        generator: torch.Generator,
        counted_rows: CountedRows | None = None,
    ) -> None:
        self.measure = measure
        self._counted_rows = counted_rows
        self.sums: dict[str, Sums] = {}
        self.generator = generator
        self._blocks = blocks
        self._loss_gradients: dict[Call, Tensor] = {}
        self._classes: tuple[int, ...] | None = None
        empirical = measure.curvature == "empirical-fisher"
        self.capture = Capture(
            model,
            {name: block.layer for name, block in blocks.items()},
            due,
            self._model_returned,
            self._loss_gradient if empirical else None,
        )

    def take(self) -> dict[str, Sums]:
        """Hand over what was summed; complain about passes whose logits were never seen."""
        self.add_loss_gradients()
        pending = self.capture.take()
        sums, self.sums = self.sums, {}
        if pending and not sums:
            raise DecaylabError(
                f"a refresh was due, but {type(self.capture.model).__name__} was not called itself,"
                " or did not return logits as one tensor [..., C]: build KFAC with the module that"
                " does, or call opt.observe(logits) after the forward pass"
            )
        return sums

    def observe(self, logits: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Back-propagate curvature vectors from `logits` [..., C], or from those of several heads.

        Does nothing when no refresh is due. `mask` (the shape of the rows, true for those that
        count) leaves out padded rows. Several heads stand for losses that are added.
        """
        if not self.capture.acts():
            return
        heads = [logits] if isinstance(logits, Tensor) else list(logits)
        self._check(heads, mask)
        self._refuse_reentrant_checkpoints(heads[0])
        calls = self.capture.take()
        if not calls:
            if mask is None and len(heads) == 1 and self.measure.logits == "output":
                return  # the model's own output, seen already
            if not self.capture.trained():
                return
            raise DecaylabError(
                "opt.observe(logits) found nothing to observe: call it once, right after the "
                "forward pass, and build KFAC with logits='observed' if the model returns a tensor"
            )
        self._check_graph(heads, calls)
        if not heads[0].numel():  # a batch without rows
            refuse_to_stay_away(self.capture.model)
            return
        observed = Pass(_rows(heads[0], mask), mask)
        for call in calls:
            call.observed = observed
        if self.measure.curvature != "empirical-fisher":  # that one waits for the loss's gradients
            refuse_static_graph(heads)
            with self._measuring():
                self._back_propagate(heads, calls, observed)

    def measured(
        self,
        batches: Iterable[Any],
        forward: Callable[[Any], Any] | None,
        loss: Callable[[Any, Any], Tensor] | None,
        trained: list[Tensor],
    ) -> dict[str, Sums]:
        """The sums of forward passes on `batches`, as `KFAC.initialize` takes them."""
        if isinstance(batches, Tensor):
            raise DecaylabError(
                "initialize takes an iterable of batches, and a tensor is one batch: give [batch]"
            )
        for batch in batches:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            if forward is not None:
                output = forward(batch)
            else:
                keywords, model = isinstance(inputs, Mapping), self.capture.model
                output = model(**inputs) if keywords else model(inputs)
            if forward is not None or self.measure.logits == "observed":
                self.observe(output)
            if loss is not None and self.measure.curvature == "empirical-fisher":
                value = loss(output, batch[1])
                refuse_static_graph([value])
                torch.autograd.grad(value, trained, allow_unused=True)
                self.add_loss_gradients()  # a mean over this batch alone
        return self.take()

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Without grad, and without the forward pass's autocast, which would round the factors.

        An error in here (out of memory, say) leaves no half of a pass in the sums.
        """
        try:
            with torch.no_grad(), torch.autocast(self.generator.device.type, enabled=False):
                yield
        except BaseException:
            self.sums = {}
            raise

    def _model_returned(self, output: Any, kwargs: Mapping[str, Any]) -> None:
        logits = logits_of(output)
        if self.measure.logits != "output" or logits is None:
            return
        if not self.capture.calls:  # no covered layer is trained now, or they are hidden
            self._refuse_reentrant_checkpoints(logits)
            return
        count = self._counted_rows
        self.observe(logits, None if count is None else count(kwargs, logits))

    def _back_propagate(self, heads: list[Tensor], calls: list[Call], observed: Pass) -> None:
        reached: dict[Call, None] = {}
        for vectors in self._vectors(heads, observed):
            with torch.enable_grad(), frozen_batch_norm(self.capture.model):
                gradients = back_propagate(heads, vectors, calls)
            pairs = [(c, g) for c, g in zip(calls, gradients, strict=True) if g is not None]
            self._add_gradients(pairs, self.measure.scale)
            reached.update(dict.fromkeys(call for call, _ in pairs))
        if not reached:
            raise DecaylabError(
                "the logits do not depend on the last forward pass of any covered layer: "
                "call opt.observe(logits) right after the forward pass that made them"
            )
        self._add_inputs(list(reached), observed)

    def _add_gradients(self, pairs: list[tuple[Call, Tensor]], scale: Tensor | float) -> None:
        by_layer: dict[str, list[Tensor]] = {}
        for call, gradient in pairs:
            call.count(gradient)
            by_layer.setdefault(call.name, []).append(gradient)
        for name, gradients in by_layer.items():
            sums = self.sums.setdefault(name, Sums())
            sums.add_gradients(self._blocks[name], gradients, self.measure.sharing, scale)

    def _add_inputs(self, calls: list[Call], observed: Pass) -> None:
        by_layer: dict[str, list[Call]] = {}
        for call in calls:
            if call.overwritten and self._blocks[call.name].weight:
                raise DecaylabError(
                    f"the input of layer {call.name!r} was changed in place after the layer saw "
                    "it: write x = x + y instead of x += y, and give each batch a new tensor"
                )
            by_layer.setdefault(call.name, []).append(call)
        for name, own in by_layer.items():
            sums, block = self.sums.setdefault(name, Sums()), self._blocks[name]
            counted = [call.counted for call in own if call.counted is not None]
            masked = len(counted) == len(own) and isinstance(block.layer, nn.Linear)
            inputs = [call.inputs for call in own]
            sums.add_inputs(block, inputs, self.measure.sharing, counted if masked else None)
            sums.add_rows(observed.rows)

    def _vectors(self, heads: list[Tensor], observed: Pass) -> Iterator[list[Tensor]]:
        """One list of vectors, a head each, per backward pass."""
        kind = (self.measure.curvature, self.measure.likelihood)
        mask = observed.mask

        def weighted(head: Tensor, vector: Tensor) -> Tensor:
            if mask is not None:
                return vector * mask.to(vector.dtype)[..., None]
            # each head's loss is averaged over its own rows, G over those of the first
            return vector * (observed.rows / _rows(head, None)) ** 0.5

        if self.measure.outputs == "sampled":
            yield [weighted(head, sampled(head, *kind, self.generator)) for head in heads]
            return
        for head in heads:
            for vector in exact(head, *kind):
                vector = vector * self._signs(vector)
                yield [
                    weighted(other, vector if other is head else torch.zeros_like(other))
                    for other in heads
                ]

    def _signs(self, vectors: Tensor) -> Tensor:
        """A random sign per row: it cancels what rows that see each other would add."""
        shape = (*vectors.shape[:-1], 1)
        draws = torch.rand(shape, device=vectors.device, generator=self.generator)
        return (draws < 0.5).to(vectors.dtype) * 2 - 1

    def _loss_gradient(self, call: Call, gradient: Tensor) -> None:
        if call.observed is not None:
            before = self._loss_gradients.get(call)  # of a loss that went back earlier
            new = gradient.detach().reshape(call.shape)
            self._loss_gradients[call] = new if before is None else before + new

    def forget_loss_gradients(self) -> None:
        """Leave out what was heard: the gradients were thrown away, and the batch with them."""
        self._loss_gradients = {}

    def add_loss_gradients(self) -> None:
        """Empirical Fisher: a mean loss has divided each row's gradient by the number of rows.

        Of all rows since the last call: several passes are taken to share one mean, as in gradient
        accumulation.
        """
        by_pass: dict[Pass, list[tuple[Call, Tensor]]] = {}
        for call, gradient in self._loss_gradients.items():
            assert call.observed is not None
            by_pass.setdefault(call.observed, []).append((call, gradient))
        self._loss_gradients = {}
        total = sum((observed.rows for observed in by_pass), start=0.0)
        per_row = total**2 if self.measure.reduction == "mean" else 1.0
        with self._measuring():
            for observed, pairs in by_pass.items():
                self._add_gradients(pairs, per_row * self.measure.scale)
                self._add_inputs([call for call, _ in pairs], observed)

    def _check(self, heads: list[Tensor], mask: Tensor | None) -> None:
        for head in heads:
            if not isinstance(head, Tensor) or head.dim() < 2 or not head.is_floating_point():
                what = list(head.shape) if isinstance(head, Tensor) else type(head).__name__
                raise DecaylabError(
                    f"K-FAC needs logits of shape [..., C] and got {what}: "
                    "pass them with opt.observe(logits) and logits='observed' (a single output "
                    "per row as logits[..., None])"
                )
            if not head.requires_grad:
                raise DecaylabError(
                    "the logits have no graph: call opt.observe before detaching them"
                )
            if head.device.type != self.generator.device.type:
                raise DecaylabError(
                    f"the logits are on {head.device} and KFAC was built on "
                    f"{self.generator.device}: move the model before building KFAC"
                )
        classes = tuple(head.shape[-1] for head in heads)
        if self._classes is not None and classes != self._classes:
            raise DecaylabError(
                f"the class axis of the logits was {self._classes} long and is now {classes}: "
                "put the classes last and keep their number, and build KFAC with logits='observed' "
                "if what the model returns is not the logits"
            )
        self._classes = classes
        measure = self.measure
        if (measure.curvature, measure.likelihood) == ("fisher", "categorical") and 1 in classes:
            raise DecaylabError(
                "a categorical likelihood over one class has no curvature: "
                "use likelihood='bernoulli' or 'gaussian'"
            )
        for head in heads:
            if mask is not None and mask.shape != head.shape[:-1]:
                raise DecaylabError(
                    f"the mask has shape {list(mask.shape)} and the rows of the logits "
                    f"{list(head.shape[:-1])}: give one entry per row"
                )

    def _check_graph(self, heads: list[Tensor], calls: list[Call]) -> None:
        """Refuse logits with the classes in axis 1, and heads of an earlier pass."""
        outputs = {c.edge.node: self._blocks[c.name].layer for c in calls if c.edge is not None}
        categorical = self.measure.likelihood == "categorical"
        for head in heads:
            node: Any = get_gradient_edge(head).node
            while node.name().startswith("Upsample"):  # segmentation nets enlarge their logits
                node = node.next_functions[0][0]
            last = outputs.get(node)
            convolved = last is not None and not isinstance(last, nn.Linear)
            if convolved and categorical and self.measure.curvature == "fisher":
                raise DecaylabError(
                    "the logits are a convolution's output, whose classes are not the last axis: "
                    "build KFAC with logits='observed' and call "
                    "opt.observe(logits.movedim(1, -1))"
                )
            if outputs and len(heads) > 1 and outputs.keys().isdisjoint(nodes_behind(head)):
                raise DecaylabError(
                    "some of the logits do not depend on the last forward pass of any covered "
                    "layer: call opt.observe after each forward pass, with its logits"
                )

    def _refuse_reentrant_checkpoints(self, logits: Tensor) -> None:
        hidden = self.capture.without_grad
        if hidden and any("CheckpointFunction" in node.name() for node in nodes_behind(logits)):
            raise DecaylabError(
                f"layer {min(hidden)!r} runs under reentrant activation checkpointing, which hides "
                "it from K-FAC: "
                "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )


def _rows(logits: Tensor, mask: Tensor | None) -> Tensor | float:
    """How many rows of the logits count."""
    if mask is not None:
        return mask.sum().to(torch.promote_types(logits.dtype, torch.float32))
    return float(logits[..., 0].numel())
