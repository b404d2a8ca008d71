"""A K-FAC update after the curvature is known: precondition, KL clip, momentum, decay.

Nothing here looks at a tensor's value on the host. A step that must not happen (its gradient or its
direction is not finite) is left out on the device: nothing decays, and torch's fused kernels return
at once, which leaves weights and velocities as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decaylab.curvature.blocks import Blocks
from decaylab.errors import DecaylabError
from decaylab.optim.decay import add_decay

Group = dict[str, Any]


@dataclass(frozen=True)
class LossScale:
    """What a GradScaler has to say: what to divide gradients by, and whether to skip the step."""

    scale: Tensor | None = None
    skip: Tensor | None = None


@dataclass(frozen=True)
class Updater:
    """Moves parameters: those in blocks by K-FAC, the others by `first_order`.

    Attributes:
        blocks: the covered layers.
        first_order: torch's fused Adam or SGD; it is lent param groups and state for each step,
            velocities included.
    """

    blocks: Blocks
    first_order: torch.optim.Optimizer

    def __call__(
        self, groups: Sequence[Group], kl_clip: float | None, loss_scale: LossScale
    ) -> Tensor:
        """Update every parameter that has a gradient; returns whether all was finite, as a tensor.

        (l2: gradient += wd W) -> precondition -> KL clip -> momentum -> (decoupled: + wd W).
        """
        slots = self.blocks.slots
        covered = [_with_gradient(g) for g in groups if g["law"] == "kfac"]
        others = [_with_gradient(g) for g in groups if g["law"] != "kfac"]
        for group in groups:
            if group["law"] == "kfac":
                self._gather(group, loss_scale)
        # frozen for the moment; a bias that is trained but not used (before a norm) counts as zero
        self.blocks.hold({p for p in slots if p.grad is None and not p.requires_grad})
        self.blocks.precondition()
        other_gradients: list[Tensor] = [p.grad for group in others for p in group["params"]]
        if any(gradient.is_sparse for gradient in other_gradients):
            raise DecaylabError(
                "a parameter has a sparse gradient, which the first-order step does not take: "
                "build its nn.Embedding with sparse=False"
            )
        finite = _all_finite([*self.blocks.steps, *other_gradients])
        move = finite if loss_scale.skip is None else finite & (loss_scale.skip == 0)
        if kl_clip is not None:
            scale = self._kl_scale(covered, kl_clip)
            for step in self.blocks.steps:
                step.mul_(scale.to(step.dtype))
        for group in covered:
            for dtype in dict.fromkeys(p.dtype for p in group["params"]):  # one at a time, on CUDA
                params = [p for p in group["params"] if p.dtype == dtype]
                steps = [slots[p].step for p in params]
                velocities = [_velocity(self.first_order.state[p], p) for p in params]
                _move({**group, "params": params}, velocities, steps, move)
        self._step_others([group for group in others if group["params"]], move, loss_scale)
        return finite

    def _gather(self, group: Group, loss_scale: LossScale) -> None:
        """Copy a group's gradients, with L2's term, to their places in the blocks."""
        slots = self.blocks.slots
        for p in group["params"]:
            if p.grad is None:
                slots[p].gradient.zero_()
        params = _with_gradient(group)["params"]
        if not params:
            return
        gradients: Any = [p.grad for p in params]
        if loss_scale.scale is not None:
            gradients = torch._foreach_mul(gradients, 1 / loss_scale.scale)
        if group["decay"] == "l2" and group["weight_decay"]:
            gradients = add_decay(gradients, params, group["weight_decay"])
        torch._foreach_copy_([slots[p].gradient for p in params], gradients)

    def _kl_scale(self, groups: list[Group], kl_clip: float) -> Tensor:
        """What the KL clip multiplies the step with: min(1, sqrt(c / sum lr^2 g.v))."""
        decreases = self.blocks.decreases()
        terms = [
            group["lr"] ** 2 * torch.stack([decreases[p] for p in group["params"]]).sum()
            for group in groups
            if group["params"]
        ]
        if not terms:
            return torch.ones((), dtype=torch.float64, device=self.blocks.steps[0].device)
        quadratic = torch.stack(terms).sum().clamp(min=torch.finfo(torch.float64).tiny)
        return (kl_clip / quadratic).sqrt().clamp(max=1.0)

    def _step_others(self, groups: list[Group], move: Tensor, loss_scale: LossScale) -> None:
        """Decay as inside the blocks, then torch's own step; L2 is what torch's decay is."""
        if not groups:
            return
        served = []
        for group in groups:
            params, weight_decay = group["params"], group["weight_decay"]
            for p in params:
                if not _same_order(p, p.grad):  # the fused kernels run through memory
                    p.grad = _laid_out_like(p, p.grad)
            if group.get("momentum") and group["law"] == "sgd":
                # torch would make velocities, and leave them unwritten where nothing may move
                for p in params:
                    _velocity(self.first_order.state[p], p)
            l2 = weight_decay if group["decay"] == "l2" else 0.0
            served.append({**group, "weight_decay": l2})
            if group["decay"] in ("decoupled", "independent") and weight_decay:
                one = params[0].new_ones(())
                rate = one * (group["lr"] if group["decay"] == "decoupled" else 1.0)
                amount = torch.where(move, -weight_decay * rate, 0 * one)
                torch._foreach_copy_(params, add_decay(params, params, amount))
        first_order: Any = self.first_order
        first_order.param_groups = served
        first_order.found_inf = (~move).float()
        first_order.grad_scale = loss_scale.scale
        first_order.step()


def _velocity(state: dict[str, Any], parameter: Tensor) -> Tensor:
    """A parameter's momentum, zero at first."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state["momentum_buffer"]


def _with_gradient(group: Group) -> Group:
    """The group with only those of its parameters that have a gradient."""
    return {**group, "params": [p for p in group["params"] if p.grad is not None]}


def _all_finite(tensors: list[Tensor]) -> Tensor:
    """Whether every entry of every tensor is finite: a scalar bool on the device."""
    largest = torch._foreach_norm([t for t in tensors if t.numel()], float("inf"))
    return torch.stack([norm.double() for norm in largest]).isfinite().all()


def _move(group: Group, velocities: list[Tensor], steps: list[Tensor], move: Tensor) -> None:
    """Advance velocities and parameters of one param group, in place.

    velocity <- momentum velocity + step
    W <- (1 - lr wd [decoupled], or - wd [independent]) W - lr velocity
    """
    params, weight_decay = group["params"], group["weight_decay"]
    # the fused kernel runs through memory: what lies there in another order is copied first
    moved = [v.float() if skipped_when_fused(v) else v for v in velocities]
    weights = [_laid_out_like(v, p) for p, v in zip(params, moved, strict=True)]
    if group["decay"] in ("decoupled", "independent") and weight_decay:
        one = torch.ones((), dtype=moved[0].dtype, device=moved[0].device)
        rate = weight_decay * (group["lr"] if group["decay"] == "decoupled" else 1.0)
        torch._foreach_mul_(weights, torch.where(move, one - rate, one))
    torch._fused_sgd_(
        weights,
        [_laid_out_like(v, step) for step, v in zip(steps, moved, strict=True)],
        moved if group["momentum"] else [],
        weight_decay=0.0,
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=(~move).float(),
    )
    for kept, new in zip([*params, *velocities], [*weights, *moved], strict=True):
        if new is not kept:
            kept.copy_(new)


def skipped_when_fused(tensor: Tensor) -> bool:
    """Whether torch's fused SGD leaves most of it where it is: pytorch/pytorch issue 191763."""
    return not tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def _same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory in the same order."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(a == b for length, a, b in strides if length > 1)


def _laid_out_like(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in another's dtype and order in memory: itself, where it has them."""
    if tensor.dtype == like.dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)
