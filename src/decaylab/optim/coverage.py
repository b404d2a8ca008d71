"""Which parameters K-FAC preconditions, layer by layer, and who steps the others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from decaylab.curvature.factors import Block
from decaylab.curvature.layers import LAYER_TYPES
from decaylab.errors import DecaylabError

# Arguments of KFAC that a param group cannot have for itself.
OF_ALL_GROUPS = {
    *("curvature", "curvature_scale", "damping", "damping_scaling", "factor_decay"),
    *("invert_every", "kl_clip", "likelihood", "logits", "max_factor_dim", "options"),
    *("others", "outputs", "reduction", "refresh_every", "sharing"),
}


@dataclass(frozen=True)
class Coverage:
    """Where one parameter's step comes from.

    Attributes:
        block: the layer whose Kronecker-factored block it is in, or None.
        method: "kfac", or the first-order method that steps it: "adam" or "sgd".
        reason: in words.
    """

    block: str | None
    method: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The blocks by layer name, the coverage by parameter name, and the param groups by method."""

    blocks: dict[str, Block]
    coverage: dict[str, Coverage]
    groups: list[dict[str, Any]]


def plan(
    model: nn.Module,
    params: Iterable[Any] | None,
    *,
    exclude: Iterable[str],
    max_factor_dim: int,
    others: dict[str, Any],
) -> Plan:
    """Sort a model's parameters into blocks and others, and split each param group accordingly.

    `params` is what torch's optimizers take (parameters, named ones, or dicts); None is every
    parameter. A group with both kinds becomes two; `others` holds the options of the groups that
    first-order steps serve.
    """
    groups = _as_groups(model.parameters() if params is None else params)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    layers: dict[str, Any] = dict(model.named_modules())
    _refuse_without_effect(groups)
    chosen = [p for group in groups for p in group["params"]]
    _check_parameters(chosen, names)
    _check_excluded(layers, exclude)
    owners = _owners(model)
    coverage: dict[str, Coverage] = {}
    members: dict[str, set[str]] = {}  # of each block: "weight", "bias" or both
    for parameter in chosen:
        home, attribute = owners[parameter][0]
        reason = _why_not(parameter, layers[home], owners[parameter], exclude)
        if reason is None:
            coverage[names[parameter]] = Coverage(home, "kfac", type(layers[home]).__name__)
            members.setdefault(home, set()).add(attribute)
        else:
            coverage[names[parameter]] = Coverage(None, others["law"], reason)
    if not members:
        raise DecaylabError(
            "K-FAC covers no layer of this model: it needs a trainable Linear or Conv1d/2d/3d "
            "layer; use torch.optim for a model without one"
        )
    blocks = {
        name: Block.of(
            name,
            layers[name],
            weight="weight" in own,
            bias="bias" in own,
            max_factor_dim=max_factor_dim,
        )
        for name, own in members.items()
    }
    covered = {p for p in chosen if coverage[names[p]].block is not None}
    return Plan(blocks, coverage, [part for g in groups for part in _split(g, covered, others)])


def _split(
    group: dict[str, Any], covered: set[Tensor], others: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A param group as one of covered parameters and one of the others, where it has them."""
    inside = [p for p in group["params"] if p in covered]
    rest = [p for p in group["params"] if p not in covered]
    given: Any = group.get("names")  # by `parameter_groups`
    named = isinstance(given, list) and len(given) == len(group["params"])
    names = dict(zip(group["params"], given, strict=True)) if named else {}

    def part(params: list[Tensor]) -> dict[str, Any]:
        own = {"names": [names[p] for p in params]} if named else {}
        return {**group, "params": params, **own}

    if inside:
        yield {**part(inside), "law": "kfac"}
    if rest:
        # in a group with both kinds its lr is K-FAC's
        own = others["lr"] if inside else group.get("lr", others["lr"])
        lr = group.get("others_lr", own)
        yield {**others, **part(rest), "lr": lr, "law": others["law"]}


def _why_not(
    parameter: Tensor, module: nn.Module, owners: list[tuple[str, str]], exclude: Iterable[str]
) -> str | None:
    """Why a parameter of `module` is in no block; None if it is in its layer's."""
    name, attribute = owners[0]
    if not parameter.requires_grad:
        return "frozen when the optimizer was built"
    if len(owners) > 1:
        return f"tied: shared by {', '.join(f'{home}.{a}' for home, a in owners)}"
    if name in exclude:
        return "excluded by name"
    if type(module) not in LAYER_TYPES:
        for known in LAYER_TYPES:
            if isinstance(module, known):
                return f"{type(module).__name__} is a {known.__name__} with code of its own"
        return f"{type(module).__name__} has no Kronecker-factored block"
    if attribute not in ("weight", "bias"):
        return f"{attribute!r} is no weight or bias of a {type(module).__name__}"
    if not isinstance(module._parameters.get("weight"), Tensor):
        return "its weight is computed (parametrized)"
    return None


def _owners(model: nn.Module) -> dict[Tensor, list[tuple[str, str]]]:
    """For each parameter, its places (module name, attribute); a module met twice counts once."""
    owners: dict[Tensor, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((name, attribute))
    return owners


def _check_parameters(chosen: list[Tensor], names: dict[Tensor, str]) -> None:
    """Refuse parameters that are not the model's, or have no shape yet."""
    strangers = sum(p not in names for p in chosen)
    if strangers:
        raise DecaylabError(
            f"{strangers} of the given parameters do not belong to the model: "
            "give KFAC the model that owns them, or step them with an optimizer of their own"
        )
    for parameter in chosen:
        if isinstance(parameter, UninitializedParameter):
            raise DecaylabError(
                f"parameter {names[parameter]!r} has no shape yet: "
                "run one batch through the model before building KFAC"
            )


def _check_excluded(layers: dict[str, nn.Module], exclude: Iterable[str]) -> None:
    """Refuse names of no module, and of modules that hold layers instead of being one."""
    unknown = sorted(set(exclude) - layers.keys())
    if unknown:
        raise DecaylabError(f"exclude names no layer of the model: {', '.join(unknown)}")
    for name in exclude:
        inside = [
            f"{name}.{child}".removeprefix(".")
            for child, module in layers[name].named_modules()
            if child and type(module) in LAYER_TYPES
        ]
        if inside:
            raise DecaylabError(
                f"exclude: {name!r} is not a layer, it has some in it: name these, as {inside[0]!r}"
            )


def _refuse_without_effect(groups: list[dict[str, Any]]) -> None:
    """Refuse in a param group what would be passed over in silence."""
    for group in groups:
        for name in sorted(group.keys() & OF_ALL_GROUPS):
            raise DecaylabError(
                f"a param group has {name!r}, which is one for all groups: give it to KFAC itself"
            )
        for name in ("dampening", "maximize", "nesterov"):
            if group.get(name):
                raise DecaylabError(
                    f"a param group has {name!r}, which K-FAC's steps do not know: leave it out"
                )


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Param groups from whatever torch accepts, as dicts of their own with lists of parameters."""
    given = list(params)
    if not given:
        raise DecaylabError("KFAC got an empty list of parameters")
    if not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        members = [p[1] if isinstance(p, tuple) else p for p in members]
        groups.append({**group, "params": members})
    return groups
