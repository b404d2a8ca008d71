"""Measuring Kronecker factors of a model: plan its blocks, capture passes, sums become factors.

    estimator = KroneckerEstimator(model, curvature="gauss-newton", outputs="exact")
    factors = estimator.measure([inputs])           # or: estimator.add_batch(inputs), update()

There is no learning rate here, no step and no inverse: `KFAC` adds them. An observed forward pass
costs one extra backward pass (`outputs="sampled"`) or one per class (`"exact"`). The empirical
Fisher costs none: it listens to the loss's own backward pass.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decaylab.curvature import guards
from decaylab.curvature.blocks import plan_blocks
from decaylab.curvature.capture import (
    BackPropagation,
    Call,
    Capture,
    Pass,
    frozen_batch_norm,
    innermost,
    logits_of,
)
from decaylab.curvature.distribution import Alone, Distribution
from decaylab.curvature.factors import KroneckerFactors, RunningFactors, Sums
from decaylab.curvature.kinds.rows import Sharing
from decaylab.curvature.outputs import Curvature, Likelihood, check_names, exact, of_whole, sampled
from decaylab.errors import POSITIVE, check_name
from decaylab.networks.sharded import is_sharded

CountedRows = Callable[[Mapping[str, Any], Tensor], Tensor | None]
"""From the model's keyword arguments and its logits [..., C], which rows count; None: all."""


@dataclass(frozen=True)
class Measurement:
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
            loop hands them to `add_batch`.
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
        check_name("outputs", self.outputs, ("sampled", "exact"))
        check_name("reduction", self.reduction, ("mean", "sum"))
        check_name("sharing", self.sharing, ("expand", "reduce"))
        check_name("logits", self.logits, ("output", "observed"))
        POSITIVE.check("curvature_scale", self.scale)


class KroneckerEstimator:
    """The Kronecker factors of every layer that has them, measured on forward passes.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> estimator = KroneckerEstimator(model, curvature="gauss-newton")
    >>> estimator.add_batch(torch.randn(16, 4))
    >>> estimator.update()
    >>> estimator.factors()["0"].A.shape
    torch.Size([5, 5])

    Scaling: see `curvature.factors`; the curvature is that of the loss averaged over the rows of
    the logits [..., C], whatever the loss does.

    Args:
        model: the model; or `torch.compile(model)`, or a DistributedDataParallel.
        parameters: those to cover; None is all that are trained.
        curvature, likelihood, outputs, curvature_scale, reduction, sharing, logits: see
            `Measurement`.
        exclude: layers, as `named_modules` names them, to leave out.
        max_factor_dim: a side longer than this is its diagonal only.
        counted_rows: called with the model's keyword arguments and its logits [..., C], returns the
            mask of the rows that count, or None for all.
        seed: of the generator of sampled outputs; None takes torch's initial seed.
        due: whether passes are to be observed now, asked in each: those in train mode are. None:
            those inside `listening()` are, in whatever mode.
        distribution: with whom the rows of a batch are shared.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        parameters: Iterable[Tensor] | None = None,
        curvature: Curvature = "fisher",
        likelihood: Likelihood = "categorical",
        outputs: Literal["sampled", "exact"] = "sampled",
        curvature_scale: float = 1.0,
        reduction: Literal["mean", "sum"] = "mean",
        sharing: Sharing = "expand",
        logits: Literal["output", "observed"] = "output",
        exclude: Sequence[str] = (),
        max_factor_dim: int = 8192,
        counted_rows: CountedRows | None = None,
        seed: int | None = None,
        due: Callable[[], bool] | None = None,
        distribution: Distribution = Alone(),  # noqa: B008 - frozen
    ) -> None:
        self.measurement = Measurement(
            curvature, likelihood, outputs, curvature_scale, reduction, sharing, logits
        )
        inner = innermost(model)
        if parameters is None:
            parameters = [p for p in inner.parameters() if p.requires_grad]
        chosen = list(parameters)
        planned = plan_blocks(inner, chosen, exclude=exclude, max_factor_dim=max_factor_dim)
        self.blocks, self.placements = planned.by_name, planned.placements
        self.device = guards.one_device(chosen)
        self.running = RunningFactors(self.blocks, self.device)
        self.sums: dict[str, Sums] = {}
        self.seed = torch.initial_seed() if seed is None else seed
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self._counted_rows, self._distribution = counted_rows, distribution
        self._loss_gradients: dict[Call, Tensor] = {}
        self._classes: tuple[int, ...] | None = None
        self._listening = False
        self._through_the_graph = BackPropagation()
        self.sites = {site.name: site for block in self.blocks.values() for site in block.sites}
        empirical = curvature == "empirical-fisher"
        # nothing refers back to self: its memory and hooks go with the last reference to it
        weak_self = weakref.ref(self)
        self.capture = Capture(
            model,
            self.sites,
            due if due is not None else lambda: (me := weak_self()) is not None and me._listening,
            partial(_forwarded, weak_self, KroneckerEstimator._model_returned),
            partial(_forwarded, weak_self, KroneckerEstimator._loss_gradient)
            if empirical
            else None,
            in_training=due is not None,
        )
        self.capture.arm(due is not None)
        weakref.finalize(self, self.capture.detach).atexit = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Forward passes with grad in here are observed, where `due` was not given."""
        before, self._listening = self._listening, True
        self.capture.arm()
        try:
            yield
        finally:
            self._listening = before
            self.capture.arm(before)

    def add_batch(self, inputs: Any) -> None:
        """Observe a forward pass on `inputs`: a tensor, or a mapping of keyword arguments."""
        with self.listening(), torch.enable_grad():
            self._forward(inputs)

    def update(self, factor_decay: float = 0.0) -> None:
        """Make what was observed into factors: F <- decay F + (1 - decay) mean; at first, mean."""
        with torch.no_grad():
            self.running.update(self.gather(self.take), factor_decay)

    def measure(
        self, batches: Iterable[Any], *, forward: Callable[[Any], Any] | None = None
    ) -> dict[str, KroneckerFactors]:
        """The factors' means over `batches`, in the mode that the model is in."""
        with self.listening(), torch.enable_grad():
            sums = self.gather(partial(self.measured, batches, forward, None, []))
        guards.check_initial(sums)
        with torch.no_grad():
            self.running.forget()
            self.running.update(sums, 0.0)
        return self.factors()

    def factors(self) -> dict[str, KroneckerFactors]:
        """A, S and T of every covered layer, by name, copied."""
        return self.running.factors()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        self.capture.detach()

    def gather(self, measure: Callable[[], dict[str, Sums]], step: int = 0) -> dict[str, Sums]:
        """The sums that `measure` returns; of several ranks, those of all of them together."""
        return self._distribution.gather(measure, self.sites, step, self.device)

    @property
    def observed(self) -> bool:
        """Whether a forward pass was observed that `take` has not handed over yet."""
        return bool(self.sums or self.capture.calls or self._loss_gradients)

    def take(self) -> dict[str, Sums]:
        """Hand over what was summed; complain about passes whose logits were never seen."""
        self.add_loss_gradients()
        pending = self.capture.take()
        # in the model's order, whatever order they came in
        sums = {name: self.sums[name] for name in self.sites if name in self.sums}
        self.sums = {}
        if pending and not sums:
            guards.refuse_without_logits(self.capture.model)
        return sums

    def take_logits(self, logits: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Back-propagate curvature vectors from `logits` [..., C], or from those of several heads.

        Does nothing when no pass is observed. `mask` (the shape of the rows, true for those that
        count) leaves out padded rows. Several heads stand for losses that are added.
        """
        if not self.capture.acts():
            return
        heads = [logits] if isinstance(logits, Tensor) else list(logits)
        guards.check_heads(heads, mask, self.generator.device, self.measurement)
        self._classes = guards.check_classes(heads, self._classes)
        guards.refuse_reentrant_checkpoints(heads[0], self.capture.without_grad)
        calls = self.capture.take()
        if not calls:
            own_output = mask is None and len(heads) == 1 and self.measurement.logits == "output"
            if own_output or not self.capture.trained():  # seen already, or nothing to see
                return
            guards.refuse_logits_without_calls()
        guards.check_graph(heads, {c.edge.node: c.site for c in calls if c.edge}, self.measurement)
        if not heads[0].numel():  # a batch without rows
            guards.refuse_to_stay_away(self.capture.model)
            return
        observed = Pass(_rows(heads[0], mask), mask)
        for call in calls:
            call.observed = observed
        if self.measurement.curvature != "empirical-fisher":  # waits for the loss's gradients
            guards.refuse_static_graph(heads)
            with self._measuring():
                self._back_propagate(heads, calls, observed)

    def measured(
        self,
        batches: Iterable[Any],
        forward: Callable[[Any], Any] | None,
        loss: Callable[[Any, Any], Tensor] | None,
        trained: Sequence[Tensor],
    ) -> dict[str, Sums]:
        """The sums of forward passes on `batches`, as `KFAC.initialize` takes them."""
        guards.refuse_single_batch(batches)
        for batch in batches:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            output = self._forward(inputs) if forward is None else forward(batch)
            if forward is not None or self.measurement.logits == "observed":
                self.take_logits(output)
            if loss is not None and self.measurement.curvature == "empirical-fisher":
                value = loss(output, batch[1])
                guards.refuse_static_graph([value])
                self._back_propagate_loss(value, trained)
                self.add_loss_gradients()  # a mean over this batch alone
        return self.take()

    def _back_propagate_loss(self, loss: Tensor, trained: Sequence[Tensor]) -> None:
        """Go back to all that is trained, whose gradients stay as they are."""
        if not any(map(is_sharded, trained)):
            torch.autograd.grad(loss, trained, allow_unused=True)
            return
        gradients = [parameter.grad for parameter in trained]  # shards are not in the graph
        try:
            for parameter in trained:
                parameter.grad = None
            loss.backward()
        finally:
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient

    def _forward(self, inputs: Any) -> Any:
        model = self.capture.model
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

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
        if self.measurement.logits != "output" or logits is None:
            return
        if not self.capture.calls:  # no covered layer is trained now, or they are hidden
            guards.refuse_reentrant_checkpoints(logits, self.capture.without_grad)
            return
        count = self._counted_rows
        self.take_logits(logits, None if count is None else count(kwargs, logits))

    def _back_propagate(self, heads: list[Tensor], calls: list[Call], observed: Pass) -> None:
        reached: dict[Call, None] = {}
        uses = Counter(call.name for call in calls)
        for vectors in self._vectors(heads, observed):
            waiting: dict[str, list[tuple[Call, Tensor]]] = {}

            def use(call: Call, gradient: Tensor, waiting: Any = waiting) -> None:
                """Add a site's gradients as soon as those of all its calls are there."""
                site_pairs = waiting.setdefault(call.name, [])
                site_pairs.append((call, gradient))
                if len(site_pairs) == uses[call.name]:
                    self._add_gradients(waiting.pop(call.name), self.measurement.scale)
                reached[call] = None

            with torch.enable_grad(), frozen_batch_norm(self.capture.model):
                self._through_the_graph(heads, vectors, calls, use)
            for site_pairs in waiting.values():  # of sites with calls that the logits ignore
                self._add_gradients(site_pairs, self.measurement.scale)
        guards.refuse_unreached(reached)
        self._add_inputs([call for call in calls if call in reached], observed)

    def _add_gradients(self, pairs: list[tuple[Call, Tensor]], scale: Tensor | float) -> None:
        by_site: dict[str, list[tuple[Call, Tensor]]] = {}
        for call, gradient in pairs:
            call.count(gradient)
            by_site.setdefault(call.name, []).append((call, gradient))
        for name, site_pairs in by_site.items():
            calls = [call for call, _ in site_pairs]
            gradients = [gradient for _, gradient in site_pairs]
            sharing = self.measurement.sharing
            self._sums_of(name).add_gradients(self.sites[name], [*calls], gradients, sharing, scale)

    def _add_inputs(self, calls: list[Call], observed: Pass) -> None:
        by_site: dict[str, list[Call]] = {}
        for call in calls:
            if call.overwritten and call.site.trains_weight:
                guards.refuse_overwritten(call.name)
            by_site.setdefault(call.name, []).append(call)
        for name, site_calls in by_site.items():
            sums = self._sums_of(name)
            sums.add_inputs(self.sites[name], [*site_calls], self.measurement.sharing)
            sums.add_rows(observed.rows)

    def _sums_of(self, site: str) -> Sums:
        """Those of a site: what was summed before, or nothing yet."""
        if site not in self.sums:
            self.sums[site] = Sums(room=self.running.room(site))
        return self.sums[site]

    def _vectors(self, heads: list[Tensor], observed: Pass) -> Iterator[list[Tensor]]:
        """One list of vectors, a head each, per backward pass."""
        kind = (self.measurement.curvature, self.measurement.likelihood)
        mask = observed.mask

        def weighted(head: Tensor, vector: Tensor) -> Tensor:
            if mask is not None:
                return vector * mask.to(vector.dtype)[..., None]
            # each head's loss is averaged over its own rows, G over those of the first
            ratio = observed.rows / _rows(head, None)
            return vector if ratio == 1 else vector * ratio**0.5

        if self.measurement.outputs == "sampled":
            draws = self.generator, self._distribution.share_of_batch
            yield [weighted(head, sampled(head, *kind, *draws)) for head in heads]
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
        whole, part = of_whole(shape, self._distribution.share_of_batch)
        draws = torch.rand(whole, device=vectors.device, generator=self.generator)[part]
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
        per_row = total**2 if self.measurement.reduction == "mean" else 1.0
        with self._measuring():
            for observed, pairs in by_pass.items():
                self._add_gradients(pairs, per_row * self.measurement.scale)
                self._add_inputs([call for call, _ in pairs], observed)


def _forwarded(
    weak_estimator: "weakref.ref[KroneckerEstimator]", method: Callable[..., None], *event: Any
) -> None:
    """Call a method of an estimator that is still there."""
    estimator = weak_estimator()
    if estimator is not None:
        method(estimator, *event)


def _rows(logits: Tensor, mask: Tensor | None) -> Tensor | float:
    """How many rows of the logits count."""
    if mask is not None:
        return mask.sum().to(torch.promote_types(logits.dtype, torch.float32))
    return float(logits.shape[:-1].numel())
