"""Torch's SGD and Adam with decay by group, including the kinds that torch lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decaylab.curvature.shards import own, own_part
from decaylab.errors import FRACTION, NOT_NEGATIVE
from decaylab.networks.sharded import is_sharded
from decaylab.optim.decay import OUTSIDE, add_decay, check_decay


def _decay_outside(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step pre-hook: the weights shrink when their gradient is there, before torch uses it.

    A closure (Lightning gives one) computes the gradient inside the step: then they shrink at its
    end, so that it sees the weights as they were.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        _begin_momentum(optimizer)
    closure = next((given for given in (*args[1:], *kwargs.values()) if given is not None), None)
    if closure is None:
        _shrink(optimizer)
        return None

    def closure_then_decay() -> Any:
        loss = closure()
        _shrink(optimizer)
        return loss

    return (optimizer, closure_then_decay), {}


_decay_outside.capturable = True  # type: ignore[attr-defined]  # it works on the device alone


def _begin_momentum(optimizer: Optimizer) -> None:
    """Zero velocities where there are none, for a GradScaler that may skip the first step.

    Torch's fused SGD would make them, and then leave in them whatever was in memory.
    """
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("fused"):
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _shrink(optimizer: Optimizer) -> None:
    """W -= lr * weight_decay * W (decoupled) or W -= weight_decay * W (independent).

    Before torch's step or after it is the same to W. As in torch, parameters without a gradient are
    left alone, and all are where a GradScaler has found that the gradient overflowed (it tells the
    fused steps; the others it does not call).
    """
    overflow = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        weight_decay = group.get(OUTSIDE, 0.0)
        parameters = [p for p in group["params"] if p.grad is not None]
        if weight_decay and parameters:
            rate = group["lr"] if group["decay"] == "decoupled" else 1.0
            if overflow is not None:
                rate = rate * (overflow == 0).float()
            with torch.no_grad():
                shrunk = add_decay(parameters, parameters, -rate * weight_decay)
                torch._foreach_copy_(parameters, shrunk)


def _torch_groups(
    groups: Iterable[dict[str, Any]], by_torch: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Copies of the groups in which torch sees only the kinds of decay that are its own."""
    prepared = []
    for group in groups:
        decay, weight_decay = group.get("decay", "none"), float(group.get("weight_decay", 0.0))
        check_decay(decay, weight_decay)
        prepared.append(
            {
                **group,
                "decay": decay,
                "weight_decay": weight_decay if decay in by_torch else 0.0,
                OUTSIDE: 0.0 if decay in (*by_torch, "none") else weight_decay,
            }
        )
    return prepared


def _on_cuda(groups: list[dict[str, Any]]) -> bool | None:
    """True where torch's fused step, which takes a tensor lr and CUDA graphs, is the one to use."""
    return all(p.is_cuda for group in groups for p in group["params"]) or None


def _check(lr: float | Tensor, **fractions: float) -> None:
    if not isinstance(lr, Tensor):
        NOT_NEGATIVE.check("lr", lr)
    for name, value in fractions.items():
        FRACTION.check(name, value)


class _Decaying(Optimizer):
    """Decays by a hook, which torch leaves out of copies and pickles: they get it anew."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if _decay_outside not in self._optimizer_step_pre_hooks.values():
            self.register_step_pre_hook(_decay_outside)


class SGD(_Decaying, torch.optim.SGD):
    """What `sgd` returns."""


class Adam(_Decaying, torch.optim.Adam):
    """What `adam` returns."""


def sgd(groups: Iterable[dict[str, Any]], *, lr: float | Tensor, momentum: float = 0.9) -> SGD:
    """torch.optim.SGD with the decay that each group of `parameter_groups` asks for.

    v' = momentum * v + gradient (l2: + weight_decay * W), W' = W - lr * v' (decoupled:
    - lr * weight_decay * W; independent: - weight_decay * W). The paper's SGD decays inside the
    momentum (recipe 1): that is `l2`. Without momentum, l2 and decoupled are the same.
    """
    _check(lr, momentum=momentum)
    prepared = _torch_groups(groups, ("l2",))
    optimizer = SGD(prepared, lr=lr, momentum=momentum, fused=_on_cuda(prepared))
    optimizer.register_step_pre_hook(_decay_outside)
    return optimizer


def adam(
    groups: Iterable[dict[str, Any]],
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Adam:
    """torch.optim.Adam with the decay that each group of `parameter_groups` asks for.

    l2: as torch.optim.Adam, decoupled: as torch.optim.AdamW, by group (recipe 2); independent:
    - weight_decay * W outside the step.
    """
    _check(lr, beta1=betas[0], beta2=betas[1])
    prepared = _torch_groups(groups, ("l2", "decoupled"))
    for group in prepared:
        group["decoupled_weight_decay"] = group["decay"] == "decoupled"
    cuda = _on_cuda(prepared)
    optimizer = Adam(prepared, lr=lr, betas=betas, eps=eps, fused=cuda, capturable=bool(cuda))
    optimizer.register_step_pre_hook(_decay_outside)
    return optimizer


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give loaded buffers their parameters' order in memory, through which torch's fused steps run.

    A saved one may be contiguous where the parameter is channels-last; a step would silently mix
    them up. Of whole ones, sharded parameters get this rank's part.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                part = own(value) if is_sharded(value) else own_part(parameter, value)
                state[name] = torch.empty_like(parameter, dtype=value.dtype)
                own(state[name]).copy_(part)
