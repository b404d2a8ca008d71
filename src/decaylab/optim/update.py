"""A K-FAC update after the curvature is known: precondition, step size, momentum, decay.

Nothing here looks at a tensor's value on the host. A step that must not happen (its gradient or its
direction is not finite) is left out on the device: nothing decays, and torch's fused kernels return
at once, which leaves weights and velocities as they are.

Launches do not grow with the number of layers: gradients are gathered in one go, blocks of one
shape are preconditioned together, and everything behind is one multi-tensor kernel per param group.
On CUDA all that follows the gather is captured as a graph and replayed.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from decaylab.curvature.preconditioner import Preconditioner, norms_of
from decaylab.curvature.shards import own
from decaylab.errors import BadValue
from decaylab.optim.decay import add_decay, check_decay
from decaylab.optim.graphs import Captured, Graphs
from decaylab.optim.health import Skips
from decaylab.optim.scale_free import ScaleFree

Group = dict[str, Any]
State = dict[Tensor, dict[str, Any]]
Rate = float | Tensor
# So many patterns of which parameters have a gradient, at which settings, are remembered at once.
PATTERNS = 8
# What a param group holds besides its settings.
NO_SETTINGS = frozenset({"params", "names", "lr", "initial_lr", "max_lr", "min_lr"})


@dataclass(frozen=True)
class LossScale:
    """What a GradScaler has to say: what to divide gradients by, and whether to skip the step."""

    scale: Tensor | None = None
    skip: Tensor | None = None

    def allows(self, finite: Tensor) -> Tensor:
        """Whether parameters may move, given whether all numbers are finite."""
        return finite if self.skip is None else finite & (self.skip == 0)


@dataclass(frozen=True)
class StepRule:
    """How long a preconditioned step is made, by at most one of two numbers, and its momentum.

    Attributes:
        kl_clip: c in min(1, sqrt(c / sum lr^2 g.v)), one factor for all layers.
        rms: the root mean square of each layer's step.
        momentum_first: whether the momentum is that of gradients, and is preconditioned, instead of
            that of preconditioned steps.
        nesterov: whether what is preconditioned is gradient + mu momentum; with `momentum_first`.
    """

    kl_clip: float | None = None
    rms: float | None = None
    momentum_first: bool = False
    nesterov: bool = False


@dataclass(frozen=True)
class _Members:
    """Parameters of one param group and dtype that move together."""

    group: int
    params: list[Tensor]
    steps: list[Tensor]
    velocities: list[Tensor]

    @property
    def alike(self) -> bool:
        """Whether parameter, step and velocity lie in memory in the same order."""
        triples = zip(self.params, self.steps, self.velocities, strict=True)
        return all(
            not skipped_when_fused(v)
            and p.dtype == s.dtype == v.dtype
            and p.stride() == s.stride() == v.stride()
            for p, s, v in triples
        )


class _Pattern:
    """What a step touches when certain parameters have a gradient, in lists that are made once."""

    def __init__(self, blocks: Preconditioner, groups: Sequence[Group], state: State) -> None:
        slots, places = blocks.slots, blocks.places()
        self.gathered: list[tuple[list[Tensor], list[Tensor]]] = []  # parameters, their places
        self.covered: list[Tensor] = []  # all of these
        self.members: list[_Members] = []
        self.alike: list[bool] = []
        self.l2: list[tuple[float, list[Tensor], list[Tensor]]] = []
        self.clipped: list[tuple[int, Tensor | None]] = []  # group, its entries of the decreases
        self.others: list[tuple[int, list[Tensor]]] = []
        every = sum(map(len, places.values()))
        for index, group in enumerate(groups):
            check_decay(group["decay"], group["weight_decay"])  # they may have been set since
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if group["law"] != "kfac":
                self.others.append((index, params))
                continue
            for dtype in dict.fromkeys(p.dtype for p in params):  # one at a time, on CUDA
                same = [p for p in params if p.dtype == dtype]
                steps = [slots[p].own for p in same]
                velocities = [own(state[p]["momentum_buffer"]) for p in same]
                self.members.append(_Members(index, [*map(own, same)], steps, velocities))
                self.gathered.append((same, steps))
            self.covered += params
            if group["decay"] == "l2" and group["weight_decay"]:
                steps = [slots[p].own for p in params]
                self.l2.append((group["weight_decay"], steps, [*map(own, params)]))
            entries = [entry for p in params for entry in places[p]]
            whole = len(entries) == every
            self.clipped.append((index, None if whole else blocks.vector(entries, torch.int64)))
        self.alike = [members.alike for members in self.members]
        self.missing = [slot.step for p, slot in slots.items() if p.grad is None]
        self.sizes = blocks.sizes({p for p in slots if p.grad is not None})
        # frozen for the moment; a bias that is trained but not used (before a norm) counts as zero
        self.held = {p for p in slots if p.grad is None and not p.requires_grad}
        # for replays: where gradients of the others and learning rates lie
        self.other_gradients: list[Tensor] = []
        self.rates: list[Tensor] = []
        self.filled: list[float | None] = []


class Updater:
    """Moves parameters: those in blocks by K-FAC, the others by `first_order`.

    Args:
        blocks: the covered layers.
        first_order: torch's fused Adam or SGD; it is lent param groups and state for each step,
            velocities included.
        skips: counts the steps that were left out.
        graphs: captures what follows the gather; None runs it as it is.
    """

    def __init__(
        self,
        blocks: Preconditioner,
        first_order: torch.optim.Optimizer,
        skips: Skips,
        graphs: Graphs | None = None,
    ) -> None:
        self.blocks, self.first_order = blocks, first_order
        self._skips, self._graphs = skips, graphs
        # what the KL clip has multiplied the last step with, where there is one
        self.clip_coefficient = torch.ones((), dtype=torch.float64, device=blocks.device)
        self._patterns: dict[Any, _Pattern] = {}
        self._captured: dict[_Pattern, Captured[None]] = {}

    def __call__(
        self,
        groups: Sequence[Group],
        state: State,
        rule: StepRule,
        scale_free: ScaleFree,
        loss_scale: LossScale,
        *,
        replay: bool = True,
    ) -> None:
        """Update every parameter that has a gradient.

        (l2: gradient += wd W) -> precondition -> step size -> momentum -> (decoupled: + wd W); or
        momentum before preconditioning, as `rule` says.
        `scale_free` holds the norms of the layers it knows. `replay`: by a graph, where there can
        be one.
        """
        first_order: Any = self.first_order
        first_order.state = state
        replay = replay and self._graphs is not None and loss_scale == LossScale()
        pattern = self._pattern(groups, state, (rule, scale_free), replay)
        if any(g.is_sparse for _, params in pattern.others for g in _gradients_of(params)):
            remedy = "the first-order step takes no other; build its nn.Embedding with sparse=False"
            raise BadValue("the gradient of a parameter", "sparse", "dense", remedy)
        with self.blocks.room():
            for params, places in pattern.gathered:
                torch._foreach_copy_(places, _gradients_of(params))
            if replay:
                self._replay(pattern, groups, rule, scale_free)
            else:
                rates = [group["lr"] for group in groups]
                self._apply(pattern, groups, rates, rule, scale_free, loss_scale)

    def forget(self) -> None:
        """Drop what was remembered of earlier steps, graphs included."""
        self._patterns.clear()
        self._captured.clear()

    def _pattern(
        self, groups: Sequence[Group], state: State, ways: tuple[Any, ...], replay: bool
    ) -> _Pattern:
        """The pattern of this step: a known one, or a new one."""
        params = [p for group in groups for p in group["params"]]
        there = [p.grad is not None for p in params]
        moved = [p for group in groups if group["law"] == "kfac" for p in group["params"]]
        velocities = [
            _velocity(state[p], p) if p.grad is not None else p.requires_grad for p in moved
        ]
        key: tuple[Any, ...] = (
            *there,
            *ways,
            *(settings_of(group) for group in groups),
            *(v if isinstance(v, bool) else id(v) for v in velocities),
        )
        if replay or self.blocks.shards.exist:  # what a graph, or a list of shards, has built in
            key = (*key, *(own(p).data_ptr() for p in params))
        if replay:
            rates = (group["lr"] for group in groups)
            key = (*key, id(state), *(id(lr) for lr in rates if isinstance(lr, Tensor)))
        pattern = self._patterns.get(key)
        if pattern is None:
            if len(self._patterns) >= PATTERNS:
                self.forget()
            pattern = self._patterns[key] = _Pattern(self.blocks, groups, state)
        return pattern

    def _replay(
        self, pattern: _Pattern, groups: Sequence[Group], rule: StepRule, scale_free: ScaleFree
    ) -> None:
        """What follows the gather, by a graph."""
        others = [p for _, params in pattern.others for p in params]
        if pattern not in self._captured:
            pattern.other_gradients = [torch.empty_like(p) for p in others]
            device = self.blocks.device
            pattern.rates = [
                lr
                if isinstance(lr := group["lr"], Tensor) and lr.device == device
                else torch.zeros((), device=device)
                for group in groups
            ]
            pattern.filled = [None] * len(groups)
            self._captured[pattern] = self._capture(pattern, groups, others, rule, scale_free)
        for index, group in enumerate(groups):
            lr, rate = group["lr"], pattern.rates[index]
            if lr is not rate and (value := float(lr)) != pattern.filled[index]:
                rate.fill_(value)
                pattern.filled[index] = value
        if others:
            torch._foreach_copy_(pattern.other_gradients, _gradients_of(others))
        self._captured[pattern]()

    def _capture(
        self,
        pattern: _Pattern,
        groups: Sequence[Group],
        others: list[Tensor],
        rule: StepRule,
        scale_free: ScaleFree,
    ) -> Captured[None]:
        lent = [{**group, "params": list(group["params"])} for group in groups]
        weak_self = weakref.ref(
            self
        )  # without a cycle: graphs and their memory go with the updater

        def work() -> None:
            updater = weak_self()
            assert updater is not None
            with _gradients(others, pattern.other_gradients):
                updater._apply(pattern, lent, pattern.rates, rule, scale_free, LossScale())

        assert self._graphs is not None
        return Captured(work, self._graphs)

    def _apply(
        self,
        pattern: _Pattern,
        groups: Sequence[Group],
        rates: Sequence[Rate],
        rule: StepRule,
        scale_free: ScaleFree,
        loss_scale: LossScale,
    ) -> None:
        """All that follows the gather, by numbers that are on the device."""
        # a momentum of gradients is one at the norms that are held: it stays as it is
        with scale_free.held({} if rule.momentum_first else self.first_order.state):
            finite = self._move(pattern, groups, rates, rule, loss_scale)
        if loss_scale.skip is None:  # a GradScaler looks for its scale by steps that overflow
            self._skips.count(finite)

    def _move(
        self,
        pattern: _Pattern,
        groups: Sequence[Group],
        rates: Sequence[Rate],
        rule: StepRule,
        loss_scale: LossScale,
    ) -> Tensor:
        """Update; returns whether all was finite, as a tensor."""
        blocks = self.blocks
        if pattern.missing:
            torch._foreach_zero_(pattern.missing)
        if loss_scale.scale is not None:
            _scale(blocks.own_steps, 1 / loss_scale.scale)
        for weight_decay, steps, params in pattern.l2:
            torch._foreach_copy_(steps, add_decay(steps, params, weight_decay))
        other_gradients = [g for _, params in pattern.others for g in _gradients_of(params)]
        finite: Tensor | None = None
        if rule.momentum_first:  # only finite gradients get into it
            own_finite = _all_finite(_norms([*blocks.own_steps, *other_gradients]))
            finite = blocks.shards.on_all(own_finite)
            move = loss_scale.allows(finite)
            stay = (~move).float()
            for members, alike in zip(pattern.members, pattern.alike, strict=True):
                momentum = groups[members.group]["momentum"]
                _accumulate(members, momentum, move, stay, alike=alike, nesterov=rule.nesterov)
        blocks.complete(pattern.covered)
        blocks.hold(pattern.held)
        clips = rule.kl_clip is not None and bool(pattern.clipped)
        blocks.precondition(decreases=clips)
        if pattern.missing:  # no part of how long their layer's step is
            torch._foreach_zero_(pattern.missing)
        norms = blocks.norms()
        finite_steps = _all_finite([norms, *_norms(other_gradients)])
        finite = blocks.shards.on_all(finite_steps) if finite is None else finite & finite_steps
        move = loss_scale.allows(finite)
        if rule.rms is not None:
            blocks.scale_steps(rule.rms, pattern.sizes, norms)
        elif rule.kl_clip is not None and clips:
            self.clip_coefficient.copy_(self._kl_scale(pattern, rates, rule.kl_clip))
            _scale(blocks.steps, self.clip_coefficient)
        elif rule.kl_clip is not None:  # no block has a gradient
            self.clip_coefficient.fill_(1.0)
        stay = (~move).float()
        for members, alike in zip(pattern.members, pattern.alike, strict=True):
            group, rate = groups[members.group], rates[members.group]
            momentum = 0.0 if rule.momentum_first else group["momentum"]
            _advance(group, rate, momentum, members, move, stay, alike=alike)
        self._step_others(pattern, groups, rates, move, stay, loss_scale)
        return finite

    def lay_out(self, groups: Sequence[Group], state: State) -> None:
        """Make the state of every parameter that has a gradient, as a first step does; move none.

        Velocities and moments are zero, and Adam has counted no step.
        """
        first_order: Any = self.first_order
        first_order.state = state
        pattern = self._pattern(groups, state, (), False)
        stay = torch.ones((), device=self.blocks.device)
        self._step_others(pattern, groups, [0.0] * len(groups), stay == 0, stay, LossScale())

    def _kl_scale(self, pattern: _Pattern, rates: Sequence[Rate], kl_clip: float) -> Tensor:
        """What the KL clip multiplies the step with: min(1, sqrt(c / sum lr^2 g.v))."""
        decreases = self.blocks.decreases()
        terms = [
            rates[index] ** 2 * (decreases if entries is None else decreases[entries]).sum()
            for index, entries in pattern.clipped
        ]
        quadratic = torch.stack(terms).sum().clamp(min=torch.finfo(torch.float64).tiny)
        return (kl_clip / quadratic).sqrt().clamp(max=1.0)

    def _step_others(
        self,
        pattern: _Pattern,
        groups: Sequence[Group],
        rates: Sequence[Rate],
        move: Tensor,
        stay: Tensor,
        loss_scale: LossScale,
    ) -> None:
        """Decay as inside the blocks, then torch's own step; L2 is what torch's decay is.

        Torch's Adam takes shards as they are, its SGD only what this rank has of them.
        """
        if not pattern.others:
            return
        served = []
        for index, params in pattern.others:
            group, lr = groups[index], rates[index]
            weight_decay = group["weight_decay"]
            for p, gradient in zip(params, _gradients_of(params), strict=True):
                if not _same_order(own(p), gradient):  # fused kernels run through memory
                    p.grad = _laid_out_like(p, gradient)
            l2 = weight_decay if group["decay"] == "l2" else 0.0
            weights = [*map(own, params)]
            if group["decay"] in ("decoupled", "independent") and weight_decay:
                one = weights[0].new_ones(())
                rate = one * (lr if group["decay"] == "decoupled" else 1.0)
                amount = torch.where(move, -weight_decay * rate, 0 * one)
                torch._foreach_copy_(weights, add_decay(weights, weights, amount))
            if group["law"] == "adam":
                served.append({**group, "params": params, "lr": lr, "weight_decay": l2})
                continue
            momentum, state = group["momentum"], self.first_order.state
            sgd(
                weights,
                _gradients_of(params),
                [own(_velocity(state[p], p)) if momentum else None for p in params],
                fused=True,
                grad_scale=loss_scale.scale,
                found_inf=stay,
                weight_decay=l2,
                momentum=momentum,
                lr=lr,  # type: ignore[arg-type]  # the fused step takes a tensor too
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        first_order: Any = self.first_order
        first_order.param_groups = served
        first_order.found_inf = stay
        first_order.grad_scale = loss_scale.scale
        first_order.step()


def _velocity(state: dict[str, Any], parameter: Tensor) -> Tensor:
    """A parameter's momentum, zero at first."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state["momentum_buffer"]


def settings_of(group: Group) -> tuple[Any, ...]:
    """The numbers and kinds of a param group, which a step has built in; tensors by their place."""
    return tuple(
        id(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in NO_SETTINGS and not isinstance(value, list | dict)
    )


@contextmanager
def _gradients(params: list[Tensor], gradients: list[Tensor]) -> Iterator[None]:
    """Let parameters have other gradients in here."""
    before = _gradients_of(params)
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    try:
        yield
    finally:
        for p, gradient in zip(params, before, strict=True):
            p.grad = gradient


def _gradients_of(params: list[Tensor]) -> list[Any]:
    """Gradients of parameters that have one; of shards, this rank's own."""
    return [own(p.grad) for p in params]


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield [tensor for tensor in tensors if tensor.dtype == dtype]


def _scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a scalar, in place."""
    for same_dtype in _by_dtype(tensors):
        torch._foreach_mul_(same_dtype, factor.to(same_dtype[0].dtype))


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norms of tensors, in float64: a vector for each dtype."""
    return [norms_of(same_dtype) for same_dtype in _by_dtype(tensors)]


def _all_finite(norms: list[Tensor]) -> Tensor:
    """Whether what has these norms is finite throughout: a scalar bool on the device."""
    return torch.cat(norms).sum() < torch.inf


def _accumulate(
    members: _Members, momentum: float, move: Tensor, stay: Tensor, *, alike: bool, nesterov: bool
) -> None:
    """Velocity <- momentum velocity + step, and let the step be the velocity.

    Nesterov: let it be step + momentum velocity, in the same memory. Where nothing may move, the
    velocity stays, and the step is of no use.
    """
    steps, velocities = members.steps, members.velocities
    if not momentum:
        return
    if alike:  # W stays where it is
        _fused_sgd(members.params, steps, velocities, momentum, 0.0, stay)
    else:
        for velocity, step in zip(velocities, steps, strict=True):
            new = momentum * velocity + step.to(velocity.dtype)
            velocity.copy_(torch.where(move, new, velocity))
    if nesterov:
        torch._foreach_add_(steps, velocities, alpha=momentum)
    else:
        torch._foreach_copy_(steps, velocities)


def _fused_sgd(
    params: list[Tensor],
    steps: list[Tensor],
    velocities: list[Tensor],
    momentum: float,
    lr: Rate,
    stay: Tensor,
) -> None:
    """Velocity <- momentum velocity + step; W <- W - lr velocity. Nothing, where `stay` is 1."""
    torch._fused_sgd_(
        params,
        steps,
        velocities if momentum else [],
        weight_decay=0.0,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=stay,
    )


def _advance(
    group: Group,
    lr: Rate,
    momentum: float,
    members: _Members,
    move: Tensor,
    stay: Tensor,
    *,
    alike: bool,
) -> None:
    """Advance velocities and parameters of one param group, in place.

    velocity <- momentum velocity + step
    W <- (1 - lr wd [decoupled], or - wd [independent]) W - lr velocity
    """
    params, steps, velocities = members.params, members.steps, members.velocities
    weight_decay = group["weight_decay"]
    moved, weights = velocities, params
    if not alike:
        # the fused kernel runs through memory: what lies there in another order is copied first
        moved = [v.float() if skipped_when_fused(v) else v for v in velocities]
        weights = [_laid_out_like(v, p) for p, v in zip(params, moved, strict=True)]
        steps = [_laid_out_like(v, step) for step, v in zip(steps, moved, strict=True)]
    if group["decay"] in ("decoupled", "independent") and weight_decay:
        one = torch.ones((), dtype=moved[0].dtype, device=moved[0].device)
        rate = weight_decay * (lr if group["decay"] == "decoupled" else 1.0)
        torch._foreach_mul_(weights, torch.where(move, one - rate, one))
    _fused_sgd(weights, steps, moved, momentum, lr, stay)
    for stored, new in zip([*params, *velocities], [*weights, *moved], strict=True):
        if new is not stored:
            stored.copy_(new)


def skipped_when_fused(tensor: Tensor) -> bool:
    """Whether torch's fused SGD leaves most of it where it is: pytorch/pytorch issue 191763."""
    return not tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def _same_order(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory in the same order."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(a == b for length, a, b in strides if length > 1)


def _laid_out_like(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in another's dtype and order in memory: itself, where it has them."""
    if tensor.dtype == like.dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)
