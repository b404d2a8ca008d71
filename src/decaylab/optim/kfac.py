"""K-FAC-F and K-FAC-G (Martens & Grosse 2015; Zhang et al. 2019) as an ordinary torch optimizer."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decaylab.curvature import guards
from decaylab.curvature.capture import as_in_training, innermost
from decaylab.curvature.distribution import distribution_of
from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.factors import KroneckerFactors, Sums
from decaylab.curvature.kinds.rows import Sharing
from decaylab.curvature.outputs import Curvature, Likelihood
from decaylab.curvature.preconditioner import LARGEST_KEPT, Preconditioner
from decaylab.curvature.shards import shards_of
from decaylab.errors import (
    AT_LEAST_ONE,
    FRACTION,
    POSITIVE,
    BadValue,
    Conflict,
    Lacks,
    Misplaced,
    Range,
)
from decaylab.optim.coverage import Coverage, checked_groups, coverage_of, split_groups
from decaylab.optim.decay import Decay
from decaylab.optim.first_order import lay_out_state
from decaylab.optim.graphs import Captured, CudaGraphs
from decaylab.optim.guards import (
    check_arguments,
    check_groups,
    check_measured,
    check_saved,
    check_saved_shards,
    check_saved_steps,
)
from decaylab.optim.health import Health, Skips
from decaylab.optim.kfac_state import add_curvature, curvature_state, without_curvature
from decaylab.optim.options import (
    LEARNING_RATES,
    KFACOptions,
    chosen_steps,
    first_order,
)
from decaylab.optim.scale_free import ScaleFree, invariant_layers
from decaylab.optim.update import LossScale, StepRule, Updater


class KFAC(torch.optim.Optimizer):
    """Preconditioned descent with a Kronecker-factored Fisher or Gauss-Newton matrix.

    For each layer that it covers, with gradient g, weight W and curvature block T A (x) S:

        h  = g + [l2] beta W
        v  = (S + sqrt(lambda / T) / pi)^-1 h (A + pi sqrt(lambda / T))^-1 / T
        m <- mu m + v times its scale: step_rms / rms(v), or min(1, sqrt(c / (lr^2 sum g.v)))
        W <- W - lr (m + [decoupled] beta W) - [independent] beta W

    With `step_scaling="spectral"`, R and Q being roots of the two inverses above (R'R and Q'Q):

        m <- mu m + h
        v  = R' polar(R (h + mu m) Q') Q,    polar(U D V') = U V'
        W <- W - lr (v step_rms / rms(v) + [decoupled] beta W) - [independent] beta W

    Use it in the same loop as SGD: hooks observe the curvature on training-mode forward passes.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = KFAC(model, weight_decay=0.01)
    >>> for _ in range(3):
    ...     inputs, labels = torch.randn(16, 4), torch.randint(3, (16,))
    ...     loss = nn.functional.cross_entropy(model(inputs), labels)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> optimizer.factors()["0"].A.shape
    torch.Size([5, 5])

    Scaling: the curvature is that of the loss averaged over the rows of the logits [..., C],
    whatever the loss does; with a summed loss over N rows, lr / N gives the same step. Cost: at a
    refresh one extra backward pass and the factor products; every `invert_every` steps the
    inverses; at every step two matrix products per layer.

    Data-parallel training: give it `DistributedDataParallel(model)`, or name the process group in
    `KFACOptions`; see `decaylab.curvature.distribution`. Sharded parameters: give it the model
    behind `fully_shard`; see `decaylab.curvature.shards`.

    Args:
        model: the model whose training-mode forward passes are observed; or `torch.compile(model)`.
        lr: learning rate, a number or a scalar tensor; by default 1e-3, or 1e-2 for spectral steps.
        params: parameters or param groups as in torch (`lr`, `weight_decay`, `decay`, `momentum`
            per group; weight and bias of a layer may be in different groups); None takes all of
            the model's.
        curvature: "fisher" (K-FAC-F), "gauss-newton" (K-FAC-G: E[J'J], Eq. 3) or
            "empirical-fisher".
        likelihood: the predictive distribution that defines the Fisher: "categorical" (cross
            entropy), "bernoulli" (binary cross entropy), "gaussian" (unit variance: |z - y|^2 /
            2).
        outputs: "sampled", or "exact" with one backward pass per class.
        curvature_scale: multiplies the curvature; 2 is the published K-FAC-G.
        weight_decay: the coefficient beta.
        decay: where it enters: "l2", "decoupled", "independent" or "none".
        momentum: mu.
        damping: lambda; by default 1e-3, and with `damping_scaling="trace"` 1 (0.1 for spectral
            steps).
        damping_scaling: "fixed", or "scale-free": lambda |W_l(0)|^2 / |W_l|^2 for scale-invariant
            layers, W_l(0) being the weight when the optimizer was built, which keeps the effective
            damping (Eq. 14) constant. Steps then leave |W_l| unchanged. "trace":
            lambda (tr A / dim A) (tr G / dim G), so that it does not depend on the scale of the
            loss: the default if neither damping nor kl_clip is given.
        kl_clip: c, or None; 1e-3 is a good first try, with lr 0.03.
        step_scaling: "rms" (the default without a KL clip) gives each layer's step v the root mean
            square `step_rms`, so that lr and decay mean what they mean in AdamW and Muon.
            "spectral" does too, and makes the step as large in every direction in which it goes at
            all, as measured by the curvature: Muon's step is the one without curvature. Its
            momentum is that of gradients, and Nesterov's, as Muon's is. "none" does not rescale
            it; without a KL clip, most nets then diverge.
        step_rms: that root mean square.
        refresh_every: steps between two measurements of the factors.
        invert_every: steps between two inversions. During the first `invert_every` steps every
            refresh also inverts, because early factors are noisy; not after `initialize`.
        factor_decay: coefficient of the factors' running average.
        reduction: "mean" or "sum": how the loss combines rows.
        sharing: "expand" or "reduce", for layers applied at several positions per example (axis 0).
        logits: "output" if the model returns them, bare or as `.logits`; "observed" if the loop
            calls `observe`.
        others: "adam" or "sgd", for parameters outside the blocks.
        others_lr: their learning rate; by default 1e-3 for Adam, `lr` for SGD. It is the `lr` of
            their param groups: schedulers that set absolute values (OneCycleLR) overwrite it,
            those that multiply keep the ratio.
        max_factor_dim: a side longer than this is treated as diagonal.
        options: see `KFACOptions`.
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves unscaling and skipping to `step`
    steps = 0
    _initializing = _initialized = _inverted = _laid_out = False
    _begun: int | None = None  # the step at which the pending inversion began
    _begins = False  # whether one begins behind the step that `before_step` opened
    _host_part_outside = False
    _device_steps = 0

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        *,
        params: Iterable[Any] | None = None,
        curvature: Curvature = "fisher",
        likelihood: Likelihood = "categorical",
        outputs: Literal["sampled", "exact"] = "sampled",
        curvature_scale: float = 1.0,
        weight_decay: float = 0.0,
        decay: Decay = "decoupled",
        momentum: float = 0.9,
        damping: float | None = None,
        damping_scaling: Literal["fixed", "scale-free", "trace"] | None = None,
        kl_clip: float | None = None,
        step_scaling: Literal["none", "rms", "spectral"] | None = None,
        step_rms: float = 0.2,
        refresh_every: int = 10,
        invert_every: int = 100,
        factor_decay: float = 0.95,
        reduction: Literal["mean", "sum"] = "mean",
        sharing: Sharing = "expand",
        logits: Literal["output", "observed"] = "output",
        others: Literal["adam", "sgd"] = "adam",
        others_lr: float | Tensor | None = None,
        max_factor_dim: int = 8192,
        options: KFACOptions = KFACOptions(),  # noqa: B008 - frozen
    ) -> None:
        check_arguments(model, lr)
        lag = options.inversion_lag
        scaling, damping, scaled_damping = chosen_steps(
            kl_clip, step_scaling, damping, damping_scaling
        )
        if lr is None:
            lr = LEARNING_RATES[scaling]
        POSITIVE.check("damping", damping)
        POSITIVE.check("step_rms", step_rms)
        if kl_clip is not None:
            POSITIVE.check("kl_clip", kl_clip)
        AT_LEAST_ONE.check("refresh_every", refresh_every)
        AT_LEAST_ONE.check("invert_every", invert_every)
        AT_LEAST_ONE.check("max_factor_dim", max_factor_dim)
        FRACTION.check("factor_decay", factor_decay)
        Range(at_least=0, below=invert_every).check("inversion_lag", lag, "see invert_every")
        if scaling != "none" and kl_clip is not None:
            raise Conflict([f"step_scaling={scaling!r}", "kl_clip"], "both set how long steps are")
        self.model = innermost(model)
        self.damping, self.kl_clip, self.factor_decay = damping, kl_clip, factor_decay
        self.step_rms = None if scaling == "none" else step_rms
        self.step_scaling = scaling
        self.momentum_first = options.momentum_first or scaling == "spectral"
        self.nesterov = scaling == "spectral"
        self.damping_scaling = scaled_damping
        self.refresh_every, self.invert_every = refresh_every, invert_every
        groups = checked_groups(self.model, params)
        shards = shards_of(self.model, [p for group in groups for p in group["params"]])
        self._distribution = distribution_of(
            model, options.process_group, mesh=shards.mesh, equal_shares=options.equal_shares
        )
        self._inversion_lag = lag
        if others_lr is None:
            others_lr = 1e-3 if others == "adam" else lr
        cuda = any(p.is_cuda for p in self.model.parameters())
        self._first_order = first_order(others, others_lr, momentum, options, cuda=cuda)
        # nothing here refers back to self: its memory and hooks go with the last reference to it
        weak_self = weakref.ref(self)
        self.estimator = KroneckerEstimator(
            model,
            parameters=[p for group in groups for p in group["params"]],
            curvature=curvature,
            likelihood=likelihood,
            outputs=outputs,
            curvature_scale=curvature_scale,
            reduction=reduction,
            sharing=sharing,
            logits=logits,
            exclude=options.exclude,
            max_factor_dim=max_factor_dim,
            counted_rows=options.counted_rows,
            seed=options.seed,
            due=lambda: (kfac := weak_self()) is not None and kfac.refresh_due,
            distribution=self._distribution,
        )
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        stepped = {names[p]: p for p in self.estimator.placements}
        watched = {name: site.module for name, site in self.estimator.sites.items()}
        self._model_guard = guards.Held(self.model, stepped, watched)
        self._coverage = coverage_of(self.estimator.placements, names, others)
        first = {**self._first_order.defaults, "law": others, "weight_decay": weight_decay}
        defaults = {"lr": lr, "weight_decay": weight_decay, "decay": decay, "momentum": momentum}
        super().__init__(split_groups(groups, self.estimator.placements, first), defaults)
        self._laid_out = True
        check_groups(self.param_groups)
        self.device, blocks = self.estimator.device, self.estimator.blocks
        self._preconditioner = Preconditioner(
            self.estimator.running,
            self._distribution,
            shards,
            half=options.half_inverses,
            roots=scaling == "spectral",
        )
        is_scale_free = scaled_damping == "scale-free"
        layers = invariant_layers(self.model, blocks, options.invariant) if is_scale_free else []
        self.scale_free = ScaleFree(blocks, layers, shards)
        self._skips = Skips(self.device)
        # a graph reads learning rates from tensors, which torch's fused kernels take as float32
        double = any(p.dtype == torch.float64 for p in self.model.parameters())
        # and it has its gradients and steps in one place
        replayed = cuda and options.replay and not double and self._preconditioner.keeps_room
        graphs = CudaGraphs(self.device) if replayed else None
        update_graphs = None if shards.exist else graphs  # ranks meet in an update of shards
        self._updater = Updater(self._preconditioner, self._first_order, self._skips, update_graphs)
        # in the memory of the update's graph, which never runs at the same time
        self._fold: Captured[None] | None = None
        self._inversion: Captured[None] | None = None
        if graphs is not None:
            captured = partial(Captured, graphs=graphs, eager_runs=1)
            running = self.estimator.running
            running.keeps_totals = running.may_keep_totals
            if running.keeps_totals:
                self._fold = captured(running.fold, name="K-FAC's running average")
            if self._preconditioner.inversion_room <= LARGEST_KEPT:
                invert = self._preconditioner.invert_damped
                self._inversion = captured(invert, name="K-FAC's inversion")
        self._seed = self._distribution.together(
            self.estimator.seed, self.scale_free.norms, self.generator
        )

    @torch._disable_dynamo  # in a function that is compiled it runs as it is
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refresh if due, invert if due, then update every parameter that has a gradient."""
        if self._host_part_outside:
            self._device_steps += 1
            if self._device_steps == 1:
                self.device_step()
            return None
        if self._capturing:
            raise Conflict(
                ["KFAC.step()", "a CUDA graph"],
                "each replay would be the same kind of step",
                "use decaylab.captured(step, model, optimizer), which captures each kind apart, or "
                "capture device_step() and call before_step() and after_step() around a replay",
            )
        loss = None
        if closure is None and self._lays_out_only():
            self._updater.lay_out(self.param_groups, self.state)
            return None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before_step()
        self.device_step()
        self.after_step()
        return loss

    @contextmanager
    def host_part_outside(self) -> Iterator[None]:
        """In here `step` is its device part alone, which a graph can capture.

        The caller makes `before_step` and `after_step` around it. A second `step` is refused.
        """
        self._host_part_outside, self._device_steps = True, 0
        try:
            yield
        finally:
            self._host_part_outside = False
        if self._device_steps != 1:
            raise BadValue("calls of KFAC.step() in a captured step", self._device_steps, 1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. The empirical Fisher forgets these gradients too, if no step used them."""
        self.estimator.forget_loss_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def before_step(self) -> None:
        """The part of `step` that precedes its device work: pending inverses come into use."""
        if self.refresh_due:
            self._model_guard.check()
        if self._begun is not None and self.steps - self._begun >= self._inversion_lag:
            self._preconditioner.end_inversion()
            self._begun = None
        # asked before the step's own inversion, which a replayed graph makes without this object
        self._begins = self._inversion_due and not self.inverts_now

    @torch.no_grad()
    def device_step(self) -> None:
        """The part of `step` that a CUDA graph can capture.

        Capture a forward and backward pass with it, once for each pair of `refresh_due` and
        `inverts_now`, after one such step was taken as it is, and call `before_step` and
        `after_step` around each replay. Register `generator` with the graph. A learning rate that
        changes must be a tensor on the device, in every param group; all other numbers (damping,
        KL clip, weight decay) stay as captured, and `load_state_dict` asks for a new capture.
        """
        self._distribution.check_step(self.device)
        with torch.autocast(self.device.type, enabled=False):
            if self.refresh_due:
                self._refresh(self.estimator.gather(self.estimator.take, self.steps))
            if self.inverts_now:
                self._invert()
            self._update()

    @torch.no_grad()
    def after_step(self) -> None:
        """The part of `step` that follows: an inversion that is due begins or goes on."""
        if self._begins:
            self._preconditioner.begin_inversion(self.damping, self._ratios())
            self._begun = self.steps
        if self._begun is not None:
            self._preconditioner.advance_inversion(self._inversion_lag)
        if self.refresh_due:
            self._skips.look()
        self.steps += 1
        self.estimator.capture.arm(self.refresh_due)
        if self.refresh_due:
            self._distribution.seed(self.generator, self._seed, self.steps)

    def captured_settings(self) -> tuple[Any, ...]:
        """The numbers that a graph of the coming step has built in, beside the param groups'."""
        return (
            self.kl_clip,
            self.step_rms,
            self.factor_decay,
            self.damping if self.inverts_now else None,
        )

    @property
    def curvature(self) -> Curvature:
        """Whose curvature it is."""
        return self.estimator.measurement.curvature

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step measures the factors."""
        return self._initializing or self.steps % self.refresh_every == 0

    @property
    def inverts_now(self) -> bool:
        """Whether the coming step inverts and uses the inverses at once."""
        return self._inversion_due and not (self._inversion_lag and self._inverted)

    @property
    def clip_coefficient(self) -> Tensor | None:
        """What the KL clip multiplied the last step with, at most 1; None without a clip.

        One scalar on the device, which each step overwrites, replays of graphs included.
        """
        return None if self.kl_clip is None else self._updater.clip_coefficient

    @property
    def generator(self) -> torch.Generator:
        """The optimizer's own generator, which a CUDA graph of a refresh must be told about."""
        return self.estimator.generator

    def observe(self, logits: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Hand over the logits of the last forward pass, where the model's output is not them.

        Needed for models that return a dict or a tuple, have several heads (give a list: their
        losses add up) or padded rows (`mask`, true for rows that count; then build KFAC with
        `logits="observed"`). Free when no refresh is due.
        """
        self.estimator.take_logits(logits, mask)

    def paused(self) -> AbstractContextManager[None]:
        """Silence the hooks: forward passes in here are not observed."""
        return self.estimator.capture.paused()

    def initialize(
        self,
        batches: Iterable[Any],
        *,
        forward: Callable[[Any], Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        """Set the factors to their mean over `batches` and invert once, before training.

        A batch is the model's input, a tuple that starts with it, or a mapping of its keyword
        arguments. Buffers (batch norm's running statistics), the global random state, gradients and
        parameters are left alone. A model in eval mode is put into train mode for it.

        Args:
            batches: what to average over; one pass of the training data, or a hundred batches.
            forward: called with each batch, returns the logits; for models with several inputs.
            loss: (output, labels) -> loss, for the empirical Fisher; a batch is then (inputs,
                labels).
        """
        sums = self._gather(batches, "initialize", forward, loss)
        guards.check_initial(sums)
        with torch.no_grad():
            self.estimator.running.forget()
            self._take_in(sums)
            self._invert()
        self._initialized = True

    def refresh(
        self,
        batches: Iterable[Any],
        *,
        invert: bool = False,
        forward: Callable[[Any], Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        """Take `batches` into the running averages now, beside what steps do, and invert if asked.

        Batches, `forward` and `loss` are as in `initialize`; it leaves the same things alone.
        """
        sums = self._gather(batches, "refresh", forward, loss)
        with torch.no_grad():
            self._take_in(sums)
            if invert:
                self._invert()

    def _gather(
        self,
        batches: Iterable[Any],
        caller: str,
        forward: Callable[[Any], Any] | None,
        loss: Callable[[Any, Any], Tensor] | None,
    ) -> dict[str, Sums]:
        """What the estimator sums up over some batches, outside of a step."""
        if loss is None and self.estimator.measurement.curvature == "empirical-fisher":
            remedy = f"it is made of the loss's gradients; call {caller}(batches, loss=...)"
            raise Lacks("the empirical Fisher", "loss", remedy)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with self._initialization():
            passes = partial(self.estimator.measured, batches, forward, loss, trained)
            return self.estimator.gather(passes, self.steps)

    def factors(self) -> dict[str, KroneckerFactors]:
        """The running averages A, S and T of every covered layer, by name, copied."""
        return self.estimator.factors()

    def dampings(self) -> dict[str, Tensor]:
        """Each block's lambda as an inversion now would use it: scale-free and raised ones too."""
        ratios = self._ratios()
        return {
            n: self.damping * ratios.get(n, 1.0) * b
            for n, b in self._preconditioner.boosts().items()
        }

    def coverage(self) -> dict[str, Coverage]:
        """For every parameter: which block it is in, or why it is in none and who steps it."""
        return dict(self._coverage)

    def check(self) -> Health:
        """Read the counters (one host sync); raise if the last ten steps were skipped."""
        return Health(self.steps, *self._skips.read(), self._preconditioner.failures())

    def detach(self) -> None:
        """Remove the hooks from the model; the optimizer is not to be stepped afterwards."""
        self.estimator.capture.detach()

    def state_dict(self) -> dict[str, Any]:
        """Torch's state dict, with factors, inverses and counters per parameter: `kfac_state`."""
        state = super().state_dict()
        common = {
            "steps": self.steps,
            "parameters": list(self._coverage),
            "begun": self._begun,
            "inverted": self._inverted,
            "initialized": self._initialized,
            "damping": self.damping,
            "step_scaling": self.step_scaling,
            "momentum_first": self.momentum_first,
            "skips": self._skips.counts.clone(),
            "seed": self._seed,
            # beside the rest: torch.distributed.checkpoint refuses a state on several devices
            "generator": self.generator.get_state().to(self.device),
            "initial_norms": {name: norm.clone() for name, norm in self.scale_free.norms.items()},
        }
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = {p: number for number, p in enumerate(parameters)}
        homes = {n: numbers[block.site.parts[0]] for n, block in self.estimator.blocks.items()}
        add_curvature(state, common, self._preconditioner.state_dict(), homes)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where `state_dict` left off, bit for bit.

        Through torch.distributed.checkpoint, whose reader takes only what a fresh KFAC has too, an
        inversion that was on its way (`inversion_lag`) begins again from the factors.
        """
        mine = curvature_state(state_dict)
        check_saved(state_dict, mine, self.param_groups, list(self._coverage))
        check_saved_shards(state_dict, self.param_groups)
        check_saved_steps(mine, self.step_scaling, momentum_first=self.momentum_first)
        self._preconditioner.load_state_dict(mine["layers"])
        super().load_state_dict(without_curvature(state_dict))
        lay_out_state(self)
        self._updater.forget()
        self.steps, self.damping = int(mine["steps"]), float(mine["damping"])
        self._begun, self._inverted = mine["begun"], bool(mine["inverted"])
        self._initialized = bool(mine.get("initialized", True))  # older states did not hurry
        self._skips.counts.copy_(mine["skips"])
        self.generator.set_state(mine["generator"].cpu())
        self._seed = int(mine.get("seed", self._seed))
        self._distribution.seed(self.generator, self._seed, self.steps)
        self.estimator.capture.arm(self.refresh_due)
        for name, norm in self.scale_free.norms.items():
            norm.copy_(mine.get("initial_norms", {}).get(name, norm))
        if self._begun is not None and not self._preconditioner.inverting:
            self._preconditioner.begin_inversion(self.damping, self._ratios())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: hooks tie it to its model, and torch would copy or pickle a part of it."""
        remedy = "copy or save its state_dict(), and load that into a KFAC built for another model"
        raise Lacks("a KFAC that is copied or pickled by itself", "model", remedy)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: blocks are laid out once."""
        if self._laid_out:
            remedy = "KFAC lays its blocks out once; build a new one with all param groups"
            raise Misplaced(["add_param_group"], "other optimizers", remedy)
        super().add_param_group(param_group)

    def _lays_out_only(self) -> bool:
        """Whether a step is there to make room for a state, as torch.distributed.checkpoint's is.

        Before anything was observed, with learning rates of zero.
        """
        if self.state or self.estimator.observed:
            return False
        return all(float(group["lr"]) == 0 for group in self.param_groups)

    def _refresh(self, sums: dict[str, Sums]) -> None:
        """Fold what was observed into the factors."""
        running = self.estimator.running
        check_measured(running, sums)
        before = len(running.seen)
        self._take_in(sums)
        if len(running.seen) > before and self._inverted and not self._inversion_due:
            self._invert()  # for layers that show themselves late: they would not move until then

    def _take_in(self, sums: dict[str, Sums]) -> None:
        """Take sums into the running averages."""
        replay = self._fold if self._replays else None
        self.estimator.running.update(sums, self.factor_decay, replay)

    @property
    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def _replays(self) -> bool:
        """Whether a step may replay graphs: not inside one that is being captured."""
        return not (self._host_part_outside or self._capturing)

    @property
    def _inversion_due(self) -> bool:
        if self.steps % self.invert_every == 0:
            return True
        hurried = not self._initialized and self.refresh_due and self._begun is None
        return hurried and self.steps + self._inversion_lag <= self.invert_every

    def _ratios(self) -> dict[str, Tensor]:
        """What each layer's damping is multiplied by, for those where it is not 1."""
        if self.damping_scaling == "trace":
            return self.estimator.running.mean_eigenvalues()
        return self.scale_free.ratios()

    def _invert(self) -> None:
        replay = self._inversion if self._replays else None
        self._preconditioner.invert(self.damping, self._ratios(), replay)
        self._begun, self._inverted = None, True

    def _update(self) -> None:
        skip = getattr(self, "found_inf", None)  # set by a GradScaler around its step
        if skip is not None and self.estimator.measurement.curvature == "empirical-fisher":
            raise Conflict(
                ["the empirical Fisher", "a GradScaler"],
                "the first is measured on the loss's gradients, which the second scales",
                "use bfloat16 autocast without one, or curvature='fisher'",
            )
        scale = LossScale(getattr(self, "grad_scale", None), skip)
        rule = StepRule(self.kl_clip, self.step_rms, self.momentum_first, self.nesterov)
        arguments = self.param_groups, self.state, rule, self.scale_free, scale
        self._updater(*arguments, replay=self._replays)

    @contextmanager
    def _initialization(self) -> Iterator[None]:
        self._initializing = True
        self.estimator.capture.arm()
        self._distribution.seed(self.generator, self._seed, -1 - self.steps)
        try:
            with as_in_training(self.model):
                yield
        finally:
            self._initializing = False
            self.estimator.capture.arm(self.refresh_due)
            self._distribution.seed(self.generator, self._seed, self.steps)
