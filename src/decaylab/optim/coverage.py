"""Which parameters K-FAC preconditions, layer by layer, and what steps the others."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from decaylab.curvature.blocks import Placement
from decaylab.curvature.kinds.kind import Reason
from decaylab.errors import BadValue, Lacks, Misplaced, UnknownName, warn_user

# Arguments of KFAC that a param group cannot have for itself.
OF_ALL_GROUPS = {
    *("curvature", "curvature_scale", "damping", "damping_scaling", "factor_decay"),
    *("invert_every", "kl_clip", "likelihood", "logits", "max_factor_dim", "options"),
    *("others", "outputs", "reduction", "refresh_every", "sharing", "step_rms", "step_scaling"),
}

# Settings that it can have.
OF_A_GROUP = ("betas", "decay", "eps", "lr", "momentum", "others_lr", "weight_decay")

# The sentence of each reason; {0}, {1} and {all} are what the reason is about.
WORDS = {
    Reason.COVERED: "{all}",
    Reason.FROZEN: "frozen when the optimizer was built",
    Reason.TIED: "tied: shared by {all}",
    Reason.EXCLUDED: "excluded by name",
    Reason.OWN_CODE: "{0} is a {1} with its own forward",
    Reason.NO_BLOCK: "{0} has no Kronecker-factored block",
    Reason.NO_PART: "{0!r} is not part of a {1}'s block",
    Reason.COMPUTED: "its weight is computed (parametrized)",
    Reason.SPARSE: "{0} has sparse gradients",
    Reason.RENORMALISED: "{0} renormalises its weight in every pass (max_norm)",
    Reason.BY_FREQUENCY: "{0} scales its gradient by the frequency of tokens",
    Reason.SHARED_BIAS: "its weight shares a block with others, which has no room for a bias",
    Reason.OTHER_PRODUCT: "{0} multiplies its experts in a function that K-FAC cannot observe: "
    'model.set_experts_implementation("grouped_mm") covers them',
}


@dataclass(frozen=True)
class Coverage:
    """Where one parameter's step comes from.

    Attributes:
        block: the layer whose Kronecker-factored block it is in, or None.
        method: "kfac", or the first-order method that steps it: "adam" or "sgd".
        reason: why.
        about: the names that belong to the reason: classes of layers, places of a tied parameter.
        size: number of entries of the parameter.
    """

    block: str | None
    method: str
    reason: Reason
    about: tuple[str, ...] = ()
    size: int = 0

    @property
    def explanation(self) -> str:
        """The reason in words."""
        return WORDS[self.reason].format(*self.about, all=", ".join(self.about))


def coverage_of(
    placements: Mapping[Tensor, Placement], names: Mapping[Tensor, str], others: str
) -> dict[str, Coverage]:
    """The coverage by parameter name; warns if less than half of what is trained is in blocks."""
    coverage = {
        names[p]: Coverage(
            placement.block,
            others if placement.block is None else "kfac",
            placement.reason,
            placement.about,
            p.numel(),
        )
        for p, placement in placements.items()
    }
    trained = [c for c in coverage.values() if c.reason not in (Reason.FROZEN, Reason.EXCLUDED)]
    inside = sum(c.size for c in trained if c.block is not None)
    total = sum(c.size for c in trained)
    if 2 * inside < total:
        largest = max((c for c in trained if c.block is None), key=lambda c: c.size)
        name = next(name for name, c in coverage.items() if c is largest)
        warn_user(
            f"K-FAC covers {inside / total:.0%} of the parameters, and {others} steps the rest: "
            f"the largest is {name!r} ({largest.explanation}); coverage() lists them all"
        )
    return coverage


def checked_groups(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Param groups from what torch's optimizers take (parameters, named ones, or dicts).

    None is every parameter of the model.
    """
    groups = _as_groups(model.parameters() if params is None else params)
    _refuse_without_effect(groups)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    _check_parameters([p for group in groups for p in group["params"]], names)
    return groups


def split_groups(
    groups: Iterable[dict[str, Any]],
    placements: Mapping[Tensor, Placement],
    others: dict[str, Any],
) -> list[dict[str, Any]]:
    """Split each group into covered parameters and the others, if it has both.

    `others` holds the options of the groups that first-order steps serve.
    """
    covered = {p for p, placement in placements.items() if placement.block is not None}
    return [part for group in groups for part in _split(group, covered, others)]


def _split(
    group: dict[str, Any], covered: set[Tensor], others: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A param group as one of covered parameters and one of the others, where it has them."""
    inside = [p for p in group["params"] if p in covered]
    rest = [p for p in group["params"] if p not in covered]
    group_names: Any = group.get("names")  # by `parameter_groups`
    named = isinstance(group_names, list) and len(group_names) == len(group["params"])
    names = dict(zip(group["params"], group_names, strict=True)) if named else {}

    def part(params: list[Tensor]) -> dict[str, Any]:
        part_names = {"names": [names[p] for p in params]} if named else {}
        return {**group, "params": params, **part_names}

    if inside:
        yield {**part(inside), "law": "kfac"}
    if rest:
        # in a group with both kinds its lr is K-FAC's
        default_lr = others["lr"] if inside else group.get("lr", others["lr"])
        lr = group.get("others_lr", default_lr)
        yield {**others, **part(rest), "lr": lr, "law": others["law"]}


def _check_parameters(chosen: list[Tensor], names: dict[Tensor, str]) -> None:
    """Refuse parameters that are not the model's, or have no shape yet."""
    strangers = sum(p not in names for p in chosen)
    if strangers:
        remedy = "pass KFAC the model that owns them, or step them with a separate optimizer"
        raise BadValue("the number of given parameters of another model", strangers, 0, remedy)
    for parameter in chosen:
        if isinstance(parameter, UninitializedParameter):
            remedy = "run one batch through the model before building KFAC"
            raise Lacks(f"parameter {names[parameter]!r}", "shape yet", remedy)


def _refuse_without_effect(groups: list[dict[str, Any]]) -> None:
    """Refuse in a param group what would be passed over in silence."""
    for group in groups:
        for name in sorted(group.keys() & OF_ALL_GROUPS):
            raise Misplaced([name], "KFAC as a whole", "pass it to KFAC itself")
        for name in ("dampening", "maximize", "nesterov"):
            if group.get(name):
                raise Misplaced([name], "torch's SGD, not KFAC's param groups")
        for name in group.keys() - {*OF_A_GROUP}:
            if get_close_matches(name.lower(), OF_A_GROUP, cutoff=0.85):  # else the user's own
                raise UnknownName("setting of a param group", name, OF_A_GROUP)


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Param groups from whatever torch accepts, as dicts of their own with lists of parameters."""
    items = list(params)
    if not items:
        raise Lacks("params", "parameters", "give KFAC those that it steps")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = []
    for group in items:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        members = [p[1] if isinstance(p, tuple) else p for p in members]
        groups.append({**group, "params": members})
    return groups
