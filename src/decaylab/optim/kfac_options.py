"""Rare options of K-FAC, checks of what it is given, and the optimizer of all other parameters."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.estimator import CountedRows
from decaylab.curvature.factors import RunningFactors, Sums
from decaylab.errors import DecaylabError
from decaylab.optim.decay import check_decay
from decaylab.optim.update import skipped_when_fused


@dataclass(frozen=True)
class KFACOptions:
    """What is rarely changed.

    Attributes:
        exclude: layers, as `named_modules` names them, that are left to the first-order method.
        invariant: the scale-invariant layers for `damping_scaling="scale-free"`; None finds those
            followed by a normalisation, in module order. That takes a layer before a residual sum
            for one (where it may, you are warned): name them there, as `roles(model, inputs)`
            measures them.
        inversion_lag: an inversion begun at step k is used from step k + lag on; meanwhile, on
            CUDA, it runs on a stream beside the training. 0 inverts and uses at once.
        counted_rows: called with the model's keyword arguments and its logits [..., C], returns the
            mask of the rows that count, or None for all; for padded rows, as `observe` takes them.
        seed: of the optimizer's own generator; None takes torch's initial seed.
        process_group: of the ranks whose rows make up one batch; None takes it from a
            DistributedDataParallel. Needed where KFAC is given the module inside one.
        replay: on CUDA, replay what `step` does with gathered gradients as a graph; False launches
            it anew each time.
        rms_behind_momentum: with `step_scaling="rms"`, the velocity has the set root mean square,
            instead of what enters it.
        others_betas: Adam's coefficients for parameters outside the blocks.
        others_eps: Adam's epsilon for them.
    """

    exclude: tuple[str, ...] = ()
    invariant: tuple[str, ...] | None = None
    inversion_lag: int = 0
    counted_rows: CountedRows | None = None
    seed: int | None = None
    process_group: Any = None
    replay: bool = True
    rms_behind_momentum: bool = False
    others_betas: tuple[float, float] = (0.9, 0.999)
    others_eps: float = 1e-8


def first_order(
    method: str, lr: float | Tensor, momentum: float, options: KFACOptions, *, cuda: bool
) -> torch.optim.Optimizer:
    """Torch's fused Adam or SGD; it is lent param groups and state for each step."""
    placeholder = [torch.zeros(())]
    if method == "adam":
        betas, eps = options.others_betas, options.others_eps
        return torch.optim.Adam(
            placeholder, lr=lr, betas=betas, eps=eps, fused=True, capturable=cuda
        )
    if method == "sgd":
        return torch.optim.SGD(placeholder, lr=lr, momentum=momentum, fused=True)
    raise DecaylabError(f"others is {method!r}: use adam or sgd")


DAMPING_SCALINGS = ("fixed", "scale-free", "trace")
# Where nothing is given: of lambda, and of lambda relative to a block's mean eigenvalue.
DAMPING, RELATIVE_DAMPING = 1e-3, 1.0


def chosen_steps(
    kl_clip: float | None,
    step_scaling: str | None,
    damping: float | None,
    damping_scaling: str | None,
) -> tuple[str, float, str]:
    """Step scaling, damping and its scaling, with what is left out.

    Without a KL clip steps have a set size, which trains nets of all kinds at one learning rate;
    with them damping is relative to the trace, unless one is given (docs/kfac.md).
    """
    step_scaling = step_scaling or ("rms" if kl_clip is None else "none")
    if damping_scaling is None:
        relative = step_scaling == "rms" and damping is None
        damping_scaling = "trace" if relative else "fixed"
    if damping is None:
        damping = RELATIVE_DAMPING if damping_scaling == "trace" else DAMPING
    return step_scaling, damping, damping_scaling


RANGES = {
    "damping": "> 0",
    "damping_scaling": "fixed, scale-free or trace",
    "step_scaling": "none or rms",
    "step_rms": "> 0",
    "kl_clip": "> 0, or None",
    "refresh_every": ">= 1",
    "invert_every": ">= 1",
    "factor_decay": ">= 0 and < 1",
    "max_factor_dim": ">= 1",
    "inversion_lag": ">= 0 and < invert_every",
    "lr": ">= 0",
    "momentum": ">= 0 and < 1",
}


def check_arguments(model: Any, lr: Any) -> None:
    """Refuse what torch's optimizers take first: K-FAC takes the model."""
    if not isinstance(model, nn.Module):
        raise DecaylabError(
            "KFAC takes the model itself, whose layers it observes: KFAC(model, lr=...); "
            "parameters or param groups go to params=..."
        )
    if not isinstance(lr, Real | Tensor):
        raise DecaylabError(
            f"lr is a {type(lr).__name__}: KFAC(model, lr=0.03, params=groups) takes param groups"
        )


def check_numbers(**checks: tuple[Any, bool]) -> None:
    """Refuse values that are out of range; each is given with the result of its test."""
    for name, (value, sound) in checks.items():
        if not sound:
            raise DecaylabError(f"{name} is {value}: use a value that is {RANGES[name]}")


def check_groups(groups: list[dict[str, Any]]) -> None:
    """Refuse param groups whose numbers or kind of decay make no sense, or that would not move."""
    for group in groups:
        check_decay(group["decay"], group["weight_decay"])
        check_numbers(
            lr=(group["lr"], isinstance(group["lr"], Tensor) or group["lr"] >= 0),
            momentum=(group["momentum"], 0 <= group["momentum"] < 1),
        )
        for p in group["params"]:
            if p.is_complex():
                raise DecaylabError(
                    f"a parameter of shape {list(p.shape)} is complex, which K-FAC's steps are "
                    "not: step such parameters with an optimizer of their own"
                )
            if group["law"] != "kfac" and p.requires_grad and has_gaps(p):
                raise DecaylabError(
                    f"a parameter of shape {list(p.shape)} has gaps in memory, over which torch's "
                    "fused steps stumble: build it as nn.Parameter(part.clone())"
                )
        if group["law"] == "sgd" and any(map(skipped_when_fused, group["params"])):
            raise DecaylabError(
                "torch's fused SGD leaves half-precision parameters on a CPU where they are: "
                "use others='adam', or float32 parameters under torch.autocast"
            )


def check_measured(factors: RunningFactors, sums: Mapping[str, Sums]) -> None:
    """Refuse a refresh that saw nothing, and layers that learn but do not show themselves."""
    blocks = factors.blocks
    if not sums and any(block.site.trained for block in blocks.values()):
        if not factors.seen:
            raise DecaylabError(
                "no forward pass was observed before the first step: run the model that KFAC "
                "was built with, in train mode and with grad enabled (a compiled model: build "
                "KFAC with what torch.compile returned, or after model.compile())"
            )
        warnings.warn(
            "a refresh was due, but no forward pass in train mode was observed: "
            "the factors stay as they are",
            stacklevel=5,
        )
    unseen = [
        name
        for name in sorted(blocks.keys() - factors.seen)
        if not any(site.name in sums for site in blocks[name].sites)
        and any(part.grad is not None for part in blocks[name].site.parts)
    ]
    if unseen:
        names = ", ".join(map(repr, unseen))
        subject = f"layer {names} has" if len(unseen) == 1 else f"layers {names} have"
        raise DecaylabError(
            f"{subject} a gradient but was never measured: the weight is used "
            "without the layer being called, a compiled function calls it (compile modules "
            "instead), or its output does not lead to the logits. Leave it to the "
            f"first-order method with options=KFACOptions(exclude=({names},))"
        )


def has_gaps(tensor: Tensor) -> bool:
    """Whether it is a part of a larger tensor that does not lie there in one piece."""
    return tensor.stride() != torch.empty_like(tensor, device="meta").stride()


def check_saved(state: dict[str, Any], groups: list[dict[str, Any]], names: list[str]) -> None:
    """Refuse what torch, which goes by place alone, would load into the wrong one."""
    saved = state["kfac"].get("parameters", names)
    if saved != names and sorted(saved) == sorted(names):
        raise DecaylabError(
            "this state dict lists the parameters in another order: "
            "build KFAC with the param groups it was saved with"
        )
    for group, other in zip(groups, state["param_groups"], strict=False):  # torch counts them
        if group["law"] != other["law"] and "kfac" not in (group["law"], other["law"]):
            raise DecaylabError(
                f"this state dict has a state of {other['law']} for parameters outside the "
                f"blocks: build KFAC with others={other['law']!r}"
            )
