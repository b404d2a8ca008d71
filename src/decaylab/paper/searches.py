"""The searches behind cells: base, space and name (recipe lines 15, 18 and 19)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from decaylab.errors import POSITIVE, BadValue, Lacks, UnknownName, check_name
from decaylab.paper.epoch_probes import epoch_probe
from decaylab.paper.settings import ROW
from decaylab.paper.suite import Cell, searched_cell, spec_for
from decaylab.paper.tiers import tier_of
from decaylab.sweeps.plan import EpochProbe
from decaylab.sweeps.search import ACCURACY, FACTOR, SearchPlan, rounded
from decaylab.training import RunSpec

PASS_LOSS = "train/pass_loss"
CONSTANT_LR_EPOCHS = 10  # Fig. 9: K-FAC-G comes to its end by then
KL_CLIPS = (1e-4, 1e-3, 1e-2)


def default_space(spec: RunSpec, scheme: str, on_digits: bool = False) -> dict[str, list[float]]:
    """Recipe line 15: lr x {1/3, 1, 3}; L2 from 1e-6 to 1e-2 by sqrt(10); weight decay around it.

    On digits, whose runs are short, L2 from 1e-4 to 1e-1 by 10.
    """
    lr = spec.resolved().lr or 0.0
    space = {"lr": [rounded(lr / 3), lr, rounded(3 * lr)]}
    if scheme == "l2":
        strong = [10.0**power for power in range(-4, 0)]
        space["weight_decay"] = (
            strong if on_digits else [rounded(10 ** (n / 2)) for n in range(-12, -3)]
        )
    elif spec.decay != "none":
        POSITIVE.check("weight_decay", spec.weight_decay, "give values, --weight-decay A,B,...")
        around = (spec.weight_decay / FACTOR, spec.weight_decay, spec.weight_decay * FACTOR)
        space["weight_decay"] = [rounded(value) for value in around]
    return space


def cell_plan(
    conditions: Sequence[str], scheme: str, tier: str, space: Mapping[str, Any], **limits: Any
) -> SearchPlan:
    """The search of a cell of Table 1, given as key=value.

    With `constant_lr=1` (Fig. 9): by the training loss after ten epochs, at every tier; without BN,
    where K-FAC's clip decides how far a step goes, over clips too.
    """
    if scheme not in (searched := ("l2", "wd", "none")):
        remedy = "choose l2, wd or none, or give a spec with its decay by --config"
        raise UnknownName("scheme to search", scheme, searched, remedy)
    size, key = tier_of(tier), _key(conditions)
    spec = spec_for(key, scheme, tier)
    where = searched_cell(key, size)
    where = {**{name: where[name] for name in ROW}, "batch_size": key.get("batch_size", 128)}
    constant = bool(key.get("constant_lr"))
    words = [tier, where["dataset"], where["network"]]
    words += [name for name in ("batch_norm", "augment") if int(where[name])]
    words += [where["optimizer"], scheme]
    words += [str(key["batch_size"])] if "batch_size" in key else []
    words += ["constant_lr"] if constant else []
    default = default_space(spec, scheme, size.on_digits)
    if constant:
        spec = replace(spec, epochs=CONSTANT_LR_EPOCHS, lr_drop_every=CONSTANT_LR_EPOCHS)
        if not spec.batch_norm and spec.optimizer.startswith("kfac"):
            default["kl_clip"] = list(KL_CLIPS)
    return SearchPlan(
        name="-".join(words),
        base=spec,
        space={**default, **space},
        cell={**where, "scheme": scheme} | ({"constant_lr": 1} if constant else {}),
        tier=tier,
        by=PASS_LOSS if constant else ACCURACY,
        **limits,
    )


def search_probe(plan: SearchPlan) -> EpochProbe | None:
    """What a search's runs must record beyond what every run does."""
    return epoch_probe(["train_pass"]) if plan.by == PASS_LOSS else None


def missing_searches(chosen: Iterable[Cell], tier: str) -> list[SearchPlan]:
    """The searches (of L2, by lines) that cells wait for, each once."""
    plans = {}
    for cell in chosen:
        if cell.missing:
            where = searched_cell(cell.key, tier_of(tier))
            names = [name for name in (*ROW, "batch_size") if name in where]
            conditions = [f"{name}={where[name]}" for name in names]
            plan = cell_plan(conditions, "l2", tier, {}, method="lines")
            plans[plan.name] = plan
    return list(plans.values())


def _key(conditions: Iterable[str]) -> dict[str, Any]:
    """The columns of a cell, from key=value."""
    key: dict[str, Any] = {}
    known = (*ROW, "batch_size", "constant_lr")
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise BadValue("a column of the cell", condition, "key=value")
        check_name("key", name, known)
        key[name] = int(value) if value.isdecimal() else value
    if key.get("constant_lr", 0) not in (0, 1):
        raise BadValue("constant_lr", key["constant_lr"], "0 or 1")
    if missing := [name for name in ROW if name not in key]:
        remedy = f"give {' '.join(f'{name}=...' for name in missing)}"
        raise Lacks("the cell", " or ".join(missing), remedy)
    return key
