"""What K-FAC refuses: arguments, param groups, refreshes and state dicts that make no sense."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.factors import RunningFactors, Sums
from decaylab.errors import FRACTION, NOT_NEGATIVE, DecaylabError, WrongType, warn_user
from decaylab.optim.decay import check_decay
from decaylab.optim.update import skipped_when_fused


def check_arguments(model: Any, lr: Any) -> None:
    """Refuse what torch's optimizers take first: K-FAC takes the model."""
    if not isinstance(model, nn.Module):
        remedy = "KFAC(model, lr=...); parameters or param groups go to params=..."
        raise WrongType("model", model, "the model itself, whose layers KFAC observes", remedy)
    if not isinstance(lr, Real | Tensor):
        remedy = "KFAC(model, lr=0.03, params=groups) takes param groups"
        raise WrongType("lr", lr, "a number or a tensor", remedy)


def check_groups(groups: list[dict[str, Any]]) -> None:
    """Refuse param groups whose numbers or kind of decay make no sense, or that would not move."""
    for group in groups:
        check_decay(group["decay"], group["weight_decay"])
        if not isinstance(group["lr"], Tensor):  # a tensor's value is not read: it would wait
            NOT_NEGATIVE.check("lr", group["lr"])
        FRACTION.check("momentum", group["momentum"])
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
                "KFAC with what torch.compile returned, or after model.compile(); a compiled "
                "function that calls the model: compile the model instead)"
            )
        warn_user(
            "a refresh was due, but no forward pass in train mode was observed: "
            "the factors stay as they are"
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


def check_saved(
    state: Mapping[str, Any],
    curvature: Mapping[str, Any],
    groups: list[dict[str, Any]],
    names: list[str],
) -> None:
    """Refuse what torch, which goes by place alone, would load into the wrong one."""
    saved = curvature.get("parameters", names)
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
