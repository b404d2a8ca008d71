"""K-FAC-F and K-FAC-G (Martens & Grosse 2015; Zhang et al. 2019) as an ordinary torch optimizer."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decaylab.curvature.capture import eager_module, frozen_batch_norm
from decaylab.curvature.factors import Bank, KroneckerFactors, Sums
from decaylab.curvature.layers import Sharing
from decaylab.curvature.observer import Measure, Observer
from decaylab.curvature.outputs import Curvature, Likelihood
from decaylab.errors import DecaylabError
from decaylab.networks import roles
from decaylab.optim.coverage import Coverage, plan
from decaylab.optim.update import add_decay, all_finite, kl_scale, move, step_others

Decay = Literal["none", "l2", "decoupled", "independent"]
DECAYS = ("none", "l2", "decoupled", "independent")
# So many steps in a row without a finite gradient are no accident.
TOLERATED_SKIPS = 10


@dataclass(frozen=True)
class KFACOptions:
    """What is rarely changed.

    Attributes:
        exclude: layers, as `named_modules` names them, that are left to the first-order method.
        invariant: the scale-invariant layers for `damping_scaling="scale-free"`; None finds those followed by a
            normalisation, in module order.
        seed: of the optimizer's own generator; None takes torch's initial seed.
        others_betas: Adam's coefficients for parameters outside the blocks.
        others_eps: Adam's epsilon for them.
    """

    exclude: tuple[str, ...] = ()
    invariant: tuple[str, ...] | None = None
    seed: int | None = None
    others_betas: tuple[float, float] = (0.9, 0.999)
    others_eps: float = 1e-8


@dataclass(frozen=True)
class Health:
    """What `KFAC.check` found.

    Attributes:
        steps: steps taken, the skipped ones included.
        skipped: steps whose gradient or update was not finite, and which changed nothing.
        skipped_in_a_row: such steps since the last good one.
        failed_inversions: by layer, how often its Cholesky factorisation failed and the old inverse stayed.
    """

    steps: int
    skipped: int
    skipped_in_a_row: int
    failed_inversions: dict[str, int]


@dataclass(frozen=True)
class _Slot:
    """A covered parameter's place in its bank: views, shaped like it, of the stacked gradient and step."""

    gradient: Tensor
    step: Tensor


class KFAC(torch.optim.Optimizer):
    r"""Preconditioned descent with a Kronecker-factored Fisher or Gauss-Newton matrix (Sec. 2; Eq. 6 and 7).

    For each Linear and convolution layer with gradient :math:`g`, weight :math:`W` and curvature block
    :math:`T A \otimes S`:

    .. math::
        v &= (A + \pi\sqrt{\lambda/T})^{-1} (g + [\text{l2}]\,\beta W) (S + \sqrt{\lambda/T}/\pi)^{-1} / T \\
        m &\leftarrow \mu m + \min(1, \sqrt{c / \textstyle\sum \eta^2 g \cdot v})\, v \\
        W &\leftarrow W - \eta\,(m + [\text{decoupled}]\,\beta W) - [\text{independent}]\,\beta W

    The loop is the one of SGD: curvature is observed through hooks on forward passes in train mode.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = KFAC(model, lr=0.1, curvature="gauss-newton", weight_decay=0.01)
    >>> for _ in range(3):
    ...     inputs, labels = torch.randn(16, 4), torch.randint(3, (16,))
    ...     loss = nn.functional.cross_entropy(model(inputs), labels)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> optimizer.factors()["0"].A.shape
    torch.Size([5, 5])

    Scaling: the curvature is that of the loss averaged over the rows of the logits [..., C], whatever the loss does; with a
    summed loss over N rows, lr / N gives the same step. Cost: at a refresh one extra backward pass and the factor products;
    every `invert_every` steps the inverses; at every step two matrix products per layer.

    Args:
        model: the model whose training-mode forward passes are observed; or `torch.compile(model)`.
        lr: learning rate, a number or a scalar tensor.
        params: parameters or param groups as in torch (`lr`, `weight_decay`, `decay`, `momentum` per group; weight and bias
            of a layer may be in different groups); None is all of the model's.
        curvature: "fisher" (K-FAC-F), "gauss-newton" (K-FAC-G: E[J'J], Eq. 3) or "empirical-fisher".
        likelihood: the predictive distribution whose Fisher is meant: "categorical" (cross entropy), "bernoulli" (binary
            cross entropy), "gaussian" (unit variance: |z - y|^2 / 2).
        outputs: "sampled", or "exact" with one backward pass per class.
        curvature_scale: multiplies the curvature; 2 is the published K-FAC-G.
        weight_decay: the coefficient beta.
        decay: where it enters: "l2", "decoupled", "independent" or "none".
        momentum: mu.
        damping: lambda.
        damping_scaling: "fixed", or "scale-free": lambda |W_l(0)|^2 / |W_l|^2 for scale-invariant layers, W_l(0) being the
            weight when the optimizer was built, which keeps the effective damping (Eq. 14) where it was asked to be.
        kl_clip: c, or None.
        refresh_every: steps between two measurements of the factors.
        invert_every: steps between two inversions.
        factor_decay: coefficient of the factors' running average.
        reduction: "mean" or "sum", what the loss does with rows.
        sharing: "expand" or "reduce", for layers that meet several positions per example.
        logits: "output" if the model returns them, "observed" if the loop calls `observe`.
        others: "adam" or "sgd", for parameters outside the blocks.
        others_lr: their learning rate; by default 1e-3 for Adam, `lr` for SGD.
        max_factor_dim: a side longer than this is treated as diagonal.
        options: see `KFACOptions`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor,
        *,
        params: Iterable[Any] | None = None,
        curvature: Curvature = "fisher",
        likelihood: Likelihood = "categorical",
        outputs: Literal["sampled", "exact"] = "sampled",
        curvature_scale: float = 1.0,
        weight_decay: float = 0.0,
        decay: Decay = "decoupled",
        momentum: float = 0.9,
        damping: float = 1e-3,
        damping_scaling: Literal["fixed", "scale-free"] = "fixed",
        kl_clip: float | None = None,
        refresh_every: int = 10,
        invert_every: int = 100,
        factor_decay: float = 0.95,
        reduction: Literal["mean", "sum"] = "mean",
        sharing: Sharing = "expand",
        logits: Literal["output", "observed"] = "output",
        others: Literal["adam", "sgd"] = "adam",
        others_lr: float | None = None,
        max_factor_dim: int = 8192,
        options: KFACOptions = KFACOptions(),  # noqa: B008 - frozen
    ) -> None:
        measure = Measure(
            curvature, likelihood, outputs, curvature_scale, reduction, sharing, logits
        )
        _check_numbers(
            damping=(damping, damping > 0),
            kl_clip=(kl_clip, kl_clip is None or kl_clip > 0),
            refresh_every=(refresh_every, refresh_every >= 1),
            invert_every=(invert_every, invert_every >= 1),
            factor_decay=(factor_decay, 0 <= factor_decay < 1),
            max_factor_dim=(max_factor_dim, max_factor_dim >= 1),
        )
        if damping_scaling not in ("fixed", "scale-free"):
            raise DecaylabError(f"damping_scaling is {damping_scaling!r}: use fixed or scale-free")
        self.model = eager_module(model)
        if others_lr is None:
            others_lr = 1e-3 if others == "adam" else float(lr)
        self._others = _first_order(others, others_lr, momentum, options)
        planned = plan(
            self.model,
            params,
            exclude=options.exclude,
            max_factor_dim=max_factor_dim,
            others={**self._others.defaults, "method": others},
        )
        self.damping, self.kl_clip = damping, kl_clip
        self.refresh_every, self.invert_every = refresh_every, invert_every
        self.factor_decay, self.steps = factor_decay, 0
        self._initializing = False
        self._seen: set[str] = set()  # layers that have shown their factors
        self._blocks, self._coverage = planned.blocks, planned.coverage
        self._scale_free = damping_scaling == "scale-free"
        defaults = {"lr": lr, "weight_decay": weight_decay, "decay": decay, "momentum": momentum}
        self._frozen_groups = False
        super().__init__(planned.groups, defaults)
        self._frozen_groups = True
        self._check_groups()
        self.device = self._one_device()
        seed = torch.initial_seed() if options.seed is None else options.seed
        generator = torch.Generator(self.device).manual_seed(seed % 2**63)
        self._banks, self._home, self._slots = self._allocate()
        self._invariant = self._invariant_layers(options)
        self._reference = {name: self._weight_norm(name) for name in sorted(self._invariant)}
        self._skips = torch.zeros(2, dtype=torch.int64, device=self.device)  # in total, in a row
        self._observer = Observer(model, self._blocks, measure, self._refresh_due, generator)

    # ---------------------------------------------------------------- what a user calls

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Refresh the factors if due, invert if due, then update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._refresh_due():
            self._refresh(self._observer.take())
        if self.steps % self.invert_every == 0:
            self._invert()
        self._update()
        self.steps += 1
        return loss

    def observe(self, logits: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Hand over the logits of the last forward pass, where the model's output is not (just) them.

        Needed for models that return a dict or a tuple, have several heads (give a list: their losses add up) or padded
        rows (`mask`, true for rows that count; then build KFAC with `logits="observed"`). Free when no refresh is due.
        """
        self._observer.observe(logits, mask)

    def paused(self) -> AbstractContextManager[None]:
        """Silence the hooks: forward passes in here are not observed."""
        return self._observer.capture.paused()

    def initialize(
        self,
        batches: Iterable[Any],
        *,
        forward: Callable[[Any], Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        """Set the factors to their mean over `batches` and invert once, before training (recipe line 8).

        A batch is the model's input, or a tuple that starts with it. Batch norm's running statistics, the global random
        state, gradients and parameters are left alone.

        Args:
            batches: what to average over; one pass of the training data, or a hundred batches.
            forward: called with each batch, returns the logits; for models that need more than one input.
            loss: (output, labels) -> loss, for the empirical Fisher; a batch is then (inputs, labels).
        """
        empirical = self._observer.measure.curvature == "empirical-fisher"
        if empirical and loss is None:
            raise DecaylabError(
                "the empirical Fisher is made of the loss's gradients: call initialize(batches, loss=...)"
            )
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        with self._initialization(), torch.enable_grad():
            for batch in batches:
                inputs = batch[0] if isinstance(batch, tuple | list) else batch
                output = forward(batch) if forward is not None else self.model(inputs)
                if forward is not None or self._observer.measure.logits == "observed":
                    self._observer.observe(output)
                if loss is not None and empirical:
                    torch.autograd.grad(loss(output, batch[1]), trained, allow_unused=True)
            sums = self._observer.take()
        if not sums:
            raise DecaylabError("initialize got no batch to measure the curvature on")
        for bank in self._banks:
            bank.forget()
        with torch.no_grad():
            self._fold(sums)
            self._invert()

    def factors(self) -> dict[str, KroneckerFactors]:
        """The running averages A, S and T of every covered layer, by name, copied."""
        return {name: self._home[name].factors(name) for name in self._blocks}

    def coverage(self) -> dict[str, Coverage]:
        """For every parameter, by name: which block it is in, or why it is in none and who steps it."""
        return dict(self._coverage)

    def check(self) -> Health:
        """Read the counters (one host synchronisation); raise if ten steps in a row had no finite gradient."""
        skipped, in_a_row = self._skips.tolist()
        failed = {}
        for bank in self._banks:
            failures = bank.failures.tolist()
            failed.update({n: sum(failures[here]) for n, here in bank.slices.items()})
        if in_a_row >= TOLERATED_SKIPS:
            raise DecaylabError(
                f"the last {in_a_row} steps had no finite gradient and changed nothing: "
                "lower the learning rate, raise the damping or set kl_clip"
            )
        return Health(self.steps, skipped, in_a_row, {n: c for n, c in failed.items() if c})

    def detach(self) -> None:
        """Remove the hooks from the model; the optimizer is not to be stepped afterwards."""
        self._observer.capture.detach()

    def state_dict(self) -> dict[str, Any]:
        """Torch's state dict with, under "kfac", the factors, inverses, counters and the generator's state."""
        state = super().state_dict()
        layers = {}
        for name in self._blocks:
            bank = self._home[name]
            here = bank.slices[name]
            layers[name] = {key: value[here].clone() for key, value in bank.state().items()}
        state["kfac"] = {
            "steps": self.steps,
            "damping": self.damping,
            "skips": self._skips.clone(),
            "generator": self._observer.generator.get_state(),
            "reference": {name: value.clone() for name, value in self._reference.items()},
            "layers": layers,
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where `state_dict` left off, bit for bit."""
        mine = state_dict.get("kfac")
        if mine is None:
            raise DecaylabError("this state dict holds no K-FAC factors: it is another optimizer's")
        if set(mine["layers"]) != set(self._blocks):
            differ = sorted(set(mine["layers"]) ^ set(self._blocks))
            raise DecaylabError(
                f"this state dict covers other layers than the model ({', '.join(differ[:3])} ...): "
                "build KFAC with the options it was saved with"
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
        self.steps, self.damping = int(mine["steps"]), float(mine["damping"])
        self._skips.copy_(mine["skips"])
        self._observer.generator.set_state(mine["generator"].cpu())
        for name, value in mine["reference"].items():
            if name in self._reference:
                self._reference[name].copy_(value)
        for name, tensors in mine["layers"].items():
            here = self._home[name].slices[name]
            for key, buffer in self._home[name].state().items():
                buffer[here] = tensors[key].to(buffer.device)
            if tensors["ready"].any():
                self._seen.add(name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: blocks are laid out once."""
        if self._frozen_groups:
            raise DecaylabError("KFAC lays its blocks out once: build a new one with all param groups")
        super().add_param_group(param_group)

    # ---------------------------------------------------------------- one step

    def _refresh_due(self) -> bool:
        return self._initializing or self.steps % self.refresh_every == 0

    def _refresh(self, sums: dict[str, Sums]) -> None:
        """Fold what was observed into the factors; say so if nothing was, or if a layer hides."""
        if not sums:
            if not self._seen:
                raise DecaylabError(
                    "no forward pass was observed before the first step: run the model that KFAC was built with in train "
                    "mode and with grad enabled (a compiled model: build KFAC with what torch.compile returned), or "
                    "call opt.observe(logits)"
                )
            warnings.warn(
                "a refresh was due, but no forward pass in train mode was observed: the factors stay as they are",
                stacklevel=4,
            )
        for name, block in self._blocks.items():
            if name not in self._seen and name not in sums and block.layer.weight.grad is not None:
                raise DecaylabError(
                    f"layer {name!r} has a gradient but its forward was never called (its weight is used directly): "
                    f"leave it to the first-order method with options=KFACOptions(exclude=({name!r},))"
                )
        self._fold(sums)

    def _fold(self, sums: dict[str, Sums]) -> None:
        for name, layer_sums in sums.items():
            if layer_sums.A is not None and layer_sums.G is not None:
                self._home[name].update(name, layer_sums, self.factor_decay)
                self._seen.add(name)

    def _invert(self) -> None:
        for bank in self._banks:
            damping = torch.full_like(bank.boost, self.damping)
            for name in self._invariant & bank.slices.keys():
                ratio = self._reference[name] / self._weight_norm(name)
                damping[bank.slices[name]] *= ratio.square()
            bank.invert(damping)

    def _update(self) -> None:
        """Precondition, clip, and move every parameter that has a gradient (recipe line 3)."""
        blocks = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
            if group["method"] == "kfac"
        ]
        others = [group for group in self.param_groups if group["method"] != "kfac"]
        for group, params in blocks:
            for p in group["params"]:
                if p.grad is None:
                    self._slots[p].gradient.zero_()
            if params:
                gradients: Any = [p.grad for p in params]
                if group["decay"] == "l2" and group["weight_decay"]:
                    gradients = add_decay(gradients, params, group["weight_decay"])
                torch._foreach_copy_([self._slots[p].gradient for p in params], gradients)
        for bank in self._banks:
            bank.precondition()
        other_gradients = [p.grad for g in others for p in g["params"] if p.grad is not None]
        finite = all_finite([*(bank.step for bank in self._banks), *other_gradients])
        for bank in self._banks:
            bank.step.masked_fill_(~finite, 0.0)
        if self.kl_clip is not None:
            self._clip(blocks, self.kl_clip)
        for group, params in blocks:
            if params:
                velocities = [self._velocity(p) for p in params]
                move(params, velocities, [self._slots[p].step for p in params], group, finite)
        if others:
            self._others.state = self.state
            step_others(self._others, others, finite)
        self._skips += 1 - finite.long()
        self._skips[1].mul_(1 - finite.long())

    def _clip(self, blocks: list[tuple[dict[str, Any], list[Tensor]]], kl_clip: float) -> None:
        terms = [
            (group["lr"], self._slots[p].gradient, self._slots[p].step)
            for group, params in blocks
            for p in params
        ]
        if terms:
            scale = kl_scale(terms, kl_clip)
            for bank in self._banks:
                bank.step.mul_(scale.to(bank.step.dtype))

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]

    # ---------------------------------------------------------------- setting up

    def _check_groups(self) -> None:
        for group in self.param_groups:
            _check_numbers(
                lr=(group["lr"], isinstance(group["lr"], Tensor) or group["lr"] >= 0),
                weight_decay=(group["weight_decay"], group["weight_decay"] >= 0),
                momentum=(group["momentum"], 0 <= group["momentum"] < 1),
            )
            if group["decay"] not in DECAYS:
                raise DecaylabError(
                    f"unknown decay {group['decay']!r}: use one of {', '.join(DECAYS)}"
                )

    def _one_device(self) -> torch.device:
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            raise DecaylabError(
                f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}): "
                "move the model to one before building KFAC"
            )
        return devices.pop()

    def _allocate(self) -> tuple[list[Bank], dict[str, Bank], dict[Tensor, _Slot]]:
        """Stack the blocks by shape, and give each covered parameter its views of the stacks."""
        banks: dict[Any, Bank] = {}
        home = {}
        for name, block in self._blocks.items():
            home[name] = banks.setdefault(block.shape, Bank(block.shape, self.device))
            home[name].add(block)
        for bank in banks.values():
            bank.allocate()
        slots = {}
        for name, block in self._blocks.items():
            here, stacks = home[name].slices[name], (home[name].gradient, home[name].step)
            weight, bias = block.layer.weight, block.layer.bias
            if block.weight:
                width = weight[0].numel()
                slots[weight] = _Slot(*(s[here, :, :width].view(weight.shape) for s in stacks))
            if block.bias and bias is not None:
                slots[bias] = _Slot(*(s[here, :, -1].view(bias.shape) for s in stacks))
        return list(banks.values()), home, slots

    def _invariant_layers(self, options: KFACOptions) -> set[str]:
        """The covered layers whose damping follows their norm."""
        if not self._scale_free:
            return set()
        if options.invariant is not None:
            named = set(options.invariant)
            if not named <= self._blocks.keys():
                unknown = ", ".join(sorted(named - self._blocks.keys()))
                raise DecaylabError(f"options.invariant names layers without a block: {unknown}")
        else:
            named = {r.module for r in roles(self.model).values() if r.role == "invariant"}
        return {name for name in named & self._blocks.keys() if self._blocks[name].weight}

    def _weight_norm(self, name: str) -> Tensor:
        weight = self._blocks[name].layer.weight.detach()
        return torch.linalg.vector_norm(weight.to(self._blocks[name].shape.dtype))

    @contextmanager
    def _initialization(self) -> Iterator[None]:
        """Every forward pass is observed; mode, random state and batch norm's statistics are put back."""
        devices = [self.device] if self.device.type == "cuda" else []
        modes = [(module, module.training) for module in self.model.modules()]
        self._initializing = True
        try:
            with torch.random.fork_rng(devices), frozen_batch_norm(self.model):
                self.model.train()
                yield
        finally:
            self._initializing = False
            for module, mode in modes:
                module.training = mode


def _first_order(
    method: str, lr: float, momentum: float, options: KFACOptions
) -> torch.optim.Optimizer:
    """Torch's fused Adam or SGD; it owns no parameter of its own and is lent groups and state for each step."""
    placeholder = [torch.zeros(())]
    if method == "adam":
        betas, eps = options.others_betas, options.others_eps
        return torch.optim.Adam(placeholder, lr=lr, betas=betas, eps=eps, fused=True)
    if method == "sgd":
        return torch.optim.SGD(placeholder, lr=lr, momentum=momentum, fused=True)
    raise DecaylabError(f"others is {method!r}: use adam or sgd")


def _check_numbers(**checks: tuple[Any, bool]) -> None:
    for name, (value, sound) in checks.items():
        if not sound or (isinstance(value, float) and math.isnan(value)):
            raise DecaylabError(f"{name} is {value}: see the range in KFAC's documentation")
