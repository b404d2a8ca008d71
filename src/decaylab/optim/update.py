"""The pieces of a K-FAC update: decay, KL clip, momentum, and a mask for what is not finite.

Nothing here looks at a tensor's value on the host. A step that must not happen is masked on the
device: its direction is zeroed, its learning rate is 0 and its momentum 1, which leaves weights
and velocities as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decaylab.optim.decay import add_decay

Tensors = list[Tensor] | tuple[Tensor, ...]


def all_finite(tensors: Tensors) -> Tensor:
    """Whether every entry of every tensor is finite: a scalar bool on the device."""
    largest = torch._foreach_norm(tensors, float("inf"))
    return torch.stack([norm.double() for norm in largest]).isfinite().all()


def kl_scale(terms: Sequence[tuple[float | Tensor, Tensor, Tensor]], kl_clip: float) -> Tensor:
    """What the KL clip multiplies the step with: min(1, sqrt(c / sum lr^2 g.v)) (recipe line 9).

    `terms` are (lr, gradient, step) for each parameter.
    """
    quadratic = torch.stack([lr**2 * (g * v).sum(dtype=torch.float64) for lr, g, v in terms]).sum()
    return (kl_clip / quadratic.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().clamp(max=1.0)


def move(
    params: Tensors,
    velocities: Tensors,
    steps: Tensors,
    group: dict[str, Any],
    finite: Tensor,
) -> None:
    """Advance velocities and parameters of one param group, in place.

    velocity <- momentum velocity + step
    W <- W - lr (velocity + [decoupled] wd W) - [independent] wd W
    """
    one = torch.ones((), dtype=params[0].dtype, device=params[0].device)
    torch._foreach_mul_(velocities, torch.where(finite, group["momentum"] * one, one))
    torch._foreach_add_(velocities, steps)
    weight_decay, rate = group["weight_decay"], one * group["lr"]
    directions: Tensors = velocities
    if group["decay"] == "decoupled" and weight_decay:
        directions = add_decay(directions, params, weight_decay)
    directions = torch._foreach_mul(directions, rate)
    if group["decay"] == "independent" and weight_decay:
        directions = add_decay(directions, params, weight_decay)
    torch._foreach_mul_(directions, torch.where(finite, one, 0 * one))
    torch._foreach_sub_(params, directions)


def step_others(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], finite: Tensor
) -> None:
    """Let torch's own fused Adam or SGD step the parameters outside the blocks, unless masked.

    The decay is ours, so that it means the same as inside the blocks: decoupled and independent
    shrink the weights here, L2 is what torch's `weight_decay` is.
    """
    served = []
    for group in groups:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            continue
        l2 = group["weight_decay"] if group["decay"] == "l2" else 0.0
        served.append({**group, "params": params, "weight_decay": l2})
        if group["decay"] in ("decoupled", "independent") and group["weight_decay"]:
            one = torch.ones((), dtype=params[0].dtype, device=params[0].device)
            rate = one * (group["lr"] if group["decay"] == "decoupled" else 1.0)
            shrink = 1 - torch.where(finite, rate * group["weight_decay"], 0 * one)
            torch._foreach_mul_(params, shrink)
    if served:
        optimizer.param_groups = served
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
