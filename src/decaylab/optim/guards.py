"""What K-FAC refuses: arguments, param groups, refreshes and state dicts that make no sense."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.factors import RunningFactors, Sums
from decaylab.curvature.shards import own
from decaylab.errors import (
    FRACTION,
    NOT_NEGATIVE,
    BadValue,
    Conflict,
    Lacks,
    Mismatch,
    WrongType,
    warn_user,
)
from decaylab.networks.sharded import is_sharded
from decaylab.optim.decay import check_decay
from decaylab.optim.update import skipped_when_fused


def check_arguments(model: Any, lr: Any) -> None:
    """Refuse what torch's optimizers take first: K-FAC takes the model."""
    if not isinstance(model, nn.Module):
        remedy = "KFAC(model, lr=...); parameters or param groups go to params=..."
        raise WrongType("model", model, "the model itself, whose layers KFAC observes", remedy)
    if not isinstance(lr, Real | Tensor | None):
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
                name = f"the numbers of a parameter of shape {list(p.shape)}"
                remedy = (
                    "build KFAC with params=[p for p in model.parameters() if not p.is_complex()]"
                    " and step the others with a torch optimizer"
                )
                raise BadValue(name, p.dtype, "real", remedy)
            if group["law"] != "kfac" and p.requires_grad and has_gaps(p):
                name = f"the strides of a parameter of shape {list(p.shape)}"
                remedy = (
                    "torch's fused steps do not handle gaps; build it as nn.Parameter(part.clone())"
                )
                raise BadValue(name, p.stride(), "without gaps in memory", remedy)
        if group["law"] == "sgd" and any(map(skipped_when_fused, group["params"])):
            raise Conflict(
                ["others='sgd'", "half-precision parameters on a CPU"],
                "torch's fused SGD does not update them",
                "use others='adam', or float32 parameters under torch.autocast",
            )


def check_measured(factors: RunningFactors, sums: Mapping[str, Sums]) -> None:
    """Refuse a refresh that saw nothing, and trained layers that were never observed."""
    blocks = factors.blocks
    if not sums and any(block.site.trained for block in blocks.values()):
        if not factors.seen:
            raise Lacks(
                "the first step",
                "observed forward pass before it",
                "run the model that KFAC was built with, in train mode, with grad enabled and "
                "outside torch.func (a "
                "compiled model: build KFAC with what torch.compile returned, or after "
                "model.compile(); a compiled function that calls the model: compile the model "
                "instead)",
            )
        warn_user(
            "a refresh was due, but no forward pass in train mode was observed: "
            "the factors are unchanged"
        )
    unseen = [
        name
        for name in sorted(blocks.keys() - factors.seen)
        if not any(site.name in sums for site in blocks[name].sites)
        and any(part.grad is not None for part in blocks[name].site.parts)
    ]
    if unseen:
        names = ", ".join(map(repr, unseen))
        layers = f"layer {names}" if len(unseen) == 1 else f"layers {names}"
        raise Lacks(
            "this step",
            f"measured curvature for the gradient of {layers}",
            "its weight is used without calling it, or a compiled function calls it (compile "
            "modules instead), or its output does not lead to the logits; to leave it to the "
            f"first-order method, use options=KFACOptions(exclude=({names},))",
        )


def has_gaps(tensor: Tensor) -> bool:
    """Whether it is a part of a larger tensor that does not lie there in one piece."""
    tensor = own(tensor)
    return tensor.stride() != torch.empty_like(tensor, device="meta").stride()


def check_saved(
    state: Mapping[str, Any],
    curvature: Mapping[str, Any],
    groups: list[dict[str, Any]],
    names: list[str],
) -> None:
    """Refuse a state that torch, which goes by position alone, would load into wrong places."""
    saved = curvature.get("parameters", names)
    if saved != names and sorted(saved) == sorted(names):
        i = next(i for i, name in enumerate(names) if saved[i] != name)
        values = {"this state dict": f"{saved[i]!r} at {i}", "KFAC": f"{names[i]!r} at {i}"}
        remedy = "build KFAC with the param groups it was saved with"
        raise Mismatch("the order of parameters", values, remedy)
    for group, other in zip(groups, state["param_groups"], strict=False):  # torch counts them
        if group["law"] != other["law"] and "kfac" not in (group["law"], other["law"]):
            values = {"this state dict": other["law"], "KFAC": group["law"]}
            remedy = f"build KFAC with others={other['law']!r}"
            raise Mismatch("the method for parameters outside the blocks", values, remedy)


def check_saved_shards(state: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Refuse parts of tensors that are not those of this rank. Whole tensors can be divided."""
    pairs = [
        (state["state"].get(number, {}), parameter)
        for group, saved in zip(groups, state["param_groups"], strict=False)
        for parameter, number in zip(group["params"], saved["params"], strict=False)
    ]
    for entry, parameter in pairs:
        for value in filter(is_sharded, entry.values()):
            parts = {"this state dict": _part(value), "the model": _part(parameter)}
            if parts["this state dict"] != parts["the model"]:
                remedy = (
                    "load the state that this same rank saved, or go through "
                    "torch.distributed.checkpoint, which divides anew"
                )
                raise Mismatch("which parts of tensors this rank holds", parts, remedy)


def _part(tensor: Any) -> str:
    """Which part of a tensor a rank holds."""
    if not is_sharded(tensor):
        return "all"
    mesh = tensor.device_mesh
    return f"{mesh.get_coordinate()} of {tuple(mesh.shape)}, {tensor.placements}"


def check_saved_steps(saved: Mapping[str, Any], step_scaling: str, *, momentum_first: bool) -> None:
    """Refuse roots where inverses are wanted, and a momentum of gradients where one of steps is."""
    remedy = "build KFAC with the step_scaling and momentum_first it was saved with"
    saved_scaling = saved.get("step_scaling")
    if (saved_scaling == "spectral") != (step_scaling == "spectral"):
        values = {"this state dict": saved_scaling, "KFAC": step_scaling}
        raise Mismatch("step_scaling", values, remedy)
    saved_first = bool(saved.get("momentum_first", False))
    if saved_first != momentum_first:
        values = {"this state dict": saved_first, "KFAC": momentum_first}
        raise Mismatch("momentum_first", values, remedy)
