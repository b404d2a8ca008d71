"""Audit of an optimizer's weight decay: which operator it is, and whether it fully takes effect.

An optimizer that forgets its decay, applies it once per number format or drops the settings of its
param groups still trains, with another decay than it was given. Here optimizers are built anew and
step small parameters with and without decay (`decaylab.optim.decay_operator`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from decaylab.audits.building import build, build_optimizer
from decaylab.audits.report import AuditCheck, DecayAudit, DecayReason
from decaylab.errors import WrongType, check_name
from decaylab.optim.decay_operator import (
    LR,
    NEARLY_NONE,
    TOLERANCE,
    UNKNOWN,
    WEIGHT_DECAY,
    DecayOperator,
    OperatorKind,
    Place,
    decay_operator,
    restore,
    take_step,
    times_among,
)
from decaylab.optim.optimizer_behaviour import undisturbed
from decaylab.optim.table import Problem, decay_table, repeated

Factory = Callable[..., Any]
SHAPE = (8, 6)
STEPS = 7  # some begin otherwise
PARAMETER_NAMES = ("params", "parameters", "param_groups", "groups", "params_or_groups")
DECOUPLED_FLAGS = ("decoupled_weight_decay", "weight_decouple", "decoupled_decay", "decoupled")
DECOUPLED_NAMES = ("lion", "adamw", "sgdw", "muon")
"""Classes with one of these in their names are defined with decoupled decay."""


def audit_decay(factory: Factory, *, expect: str | None = None) -> DecayAudit:
    """Name the operator of an optimizer's weight decay, and check that all of it arrives.

    Args:
        factory: one of three. An optimizer class, or a function whose first argument is called
            `params` (or `parameters`, `groups`), or that builds one of param groups: it is given
            these. A function of a model: it is given a small one. A function without arguments: it
            returns an optimizer, a list of them, or a model and either.
        expect: the operator that it must be ("l2", "decoupled", "independent", ...). Without it,
            decoupled is expected where a flag of the optimizer or its name says so (AdamW, Lion).

    Your model is left alone: optimizers are rebuilt on tiny parameters. Cost: a few hundred steps
    of these.
    """
    if expect is not None:
        check_name("operator", expect, get_args(OperatorKind))
    if _takes_parameters(factory):
        return _of_class(factory, expect)
    return _of_model(factory, expect)


def _takes_parameters(factory: Factory) -> bool:
    names = list(inspect.signature(factory).parameters)
    if isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer):
        return not names or names[0] != "model"
    if not names or names[0] in PARAMETER_NAMES:
        return bool(names)
    build: Callable[..., Any] = factory
    try:  # an argument of another name is a model, or param groups
        with undisturbed():
            built = build([{"params": [nn.Parameter(torch.ones(SHAPE))]}])
    except Exception:  # whatever a function of a model raises, or one that needs more
        return False
    return hasattr(built, "param_groups")


# ---------------------------------------------------------------- built from param groups


def _of_class(factory: Factory, expect: str | None) -> DecayAudit:
    optimizer = _build(factory, [{"params": [nn.Parameter(torch.ones(SHAPE))]}], WEIGHT_DECAY)
    name = type(optimizer).__name__
    settings = optimizer.param_groups[0]
    if "weight_decay" not in settings:
        check = AuditCheck("operator", None, DecayReason.NO_DECAY)
        return DecayAudit(name, DecayOperator("none"), (check,))
    make = partial(_make, factory)
    operator, error = _tried(make, SHAPE)
    checks = [_kind_check(operator, error, name, settings, expect)]
    checks += _times_checks(operator)
    if operator.kind not in ("unknown", "ignored"):
        checks += _formats_check(make, operator)
        checks += _groups_check(factory, operator)
        checks += _vectors_check(make, operator)
    if operator.unasked:
        data = {"strength": operator.unasked}
        checks.append(AuditCheck("without decay", None, DecayReason.UNASKED, data))
    else:
        checks.append(AuditCheck("without decay", True, DecayReason.NOTHING_UNASKED))
    return DecayAudit(name, operator, tuple(checks))


def _build(factory: Factory, groups: list[dict[str, Any]], weight_decay: float) -> Any:
    settings = {"lr": LR, "weight_decay": weight_decay}
    parameters = inspect.signature(factory).parameters
    accepted = {name: value for name, value in settings.items() if name in parameters}
    with undisturbed():
        optimizer = build_optimizer(
            lambda: factory(groups, **accepted),
            "wrap it in a function of `params` alone that sets the rest",
        )
    if callable(train := getattr(optimizer, "train", None)):
        train()  # schedule-free ones step in this mode alone
    return optimizer


def _make(factory: Factory, weights: Sequence[Tensor], weight_decay: float) -> Any:
    group = {"params": list(weights), "lr": LR, "weight_decay": weight_decay}
    return _build(factory, [group], weight_decay)


def _tried(make: Any, shape: tuple[int, ...]) -> tuple[DecayOperator, str | None]:
    """The operator, in double precision if it can be, and why it could not be tried."""
    problem = None
    for dtype in (torch.float64, torch.float32):
        try:
            with undisturbed():
                return decay_operator(make, Place(shape, torch.device("cpu"), dtype)), None
        except Exception as error:  # whatever somebody's optimizer may raise
            problem = f"{type(error).__name__}: {error}"
    return UNKNOWN, problem


def _kind_check(
    operator: DecayOperator,
    error: str | None,
    name: str,
    settings: Mapping[str, Any],
    expect: str | None,
) -> AuditCheck:
    if error is not None:
        return AuditCheck("operator", None, DecayReason.NOT_TRIED, {"error": error})
    if operator.kind == "ignored" and expect != "ignored":
        return AuditCheck("operator", False, DecayReason.IGNORED)
    flags = {flag: settings.get(flag) for flag in DECOUPLED_FLAGS}
    why = next((flag for flag, value in flags.items() if value is True), "")
    if not why and False not in flags.values():
        why = "name" if any(part in name.lower() for part in DECOUPLED_NAMES) else ""
    wrong = operator.kind == "l2" and bool(why)
    if expect is not None:
        wrong, why = operator.kind != expect, "asked"
    if wrong:
        data = {"kind": operator.kind, "expected": expect or "decoupled", "why": why}
        return AuditCheck("operator", False, DecayReason.OTHER_KIND, data)
    if operator.kind == "unknown" and math.isnan(operator.along):
        return AuditCheck("operator", None, DecayReason.NOTHING_SEEN)
    if operator.kind == "unknown":
        numbers = {"along": operator.along, "across": operator.across}
        return AuditCheck("operator", None, DecayReason.UNKNOWN, numbers)
    return AuditCheck("operator", True, DecayReason.NAMED, {"operator": operator})


def _times_checks(operator: DecayOperator) -> Iterator[AuditCheck]:
    if operator.times is None:
        return
    if times := repeated(operator):
        yield AuditCheck("times", False, DecayReason.REPEATED, {"times": times})
    elif operator.factor is not None and abs(operator.factor - 1) < TOLERANCE:
        yield AuditCheck("times", True, DecayReason.ONCE)
    else:
        data = {"least": operator.times[0], "most": operator.times[1]}
        yield AuditCheck("times", None, DecayReason.SCALED, data)


def _formats_check(make: Any, operator: DecayOperator) -> Iterator[AuditCheck]:
    """Parameters of two number formats in one group."""
    if operator.kind not in ("decoupled", "independent") or operator.factor is None:
        return
    places = [Place(SHAPE, torch.device("cpu"), t) for t in (torch.float32, torch.float64)]
    try:
        with undisturbed():
            together = times_among(make, places)
            alone = [times_among(make, [place]) for place in places]
    except Exception:  # it need not take both
        return
    once = max((k for k in alone if k is not None), default=0.0)
    if together is None or not once > 0:
        return
    times = together / once
    if times > 1.5:
        data = {"times": round(times)}
        yield AuditCheck("number formats", False, DecayReason.FORMATS_REPEATED, data)
    else:
        yield AuditCheck("number formats", True, DecayReason.FORMATS_RIGHT)


def _groups_check(factory: Factory, operator: DecayOperator) -> Iterator[AuditCheck]:
    """Three groups of their own weight decays, none of them that of the constructor."""
    if operator.kind == "masked":
        return
    requested = (WEIGHT_DECAY, 0.0, 3 * WEIGHT_DECAY)
    place = Place(SHAPE, torch.device("cpu"), torch.float64)
    try:
        with undisturbed():
            terms, weights = _terms_of_groups(factory, requested, place)
    except Exception:  # some need other groups
        return
    pairs = list(zip(terms, weights, strict=True))
    moved = [float(term.norm() / weight.norm()) for term, weight in pairs]
    if not max(moved) > 0:
        return
    # what is shared by all groups, as a mean over them, may carry a little from one to another
    wrong = [
        value < 1e-2 * max(moved) if wd > 0 else value > 0.3 * max(moved)
        for value, wd in zip(moved, requested, strict=True)
    ]
    if operator.kind in ("decoupled", "independent", "lr-squared") and operator.factor is not None:
        unit = operator.factor * WEIGHT_DECAY * (1 / LR if operator.kind == "independent" else 1)
        unit *= 1 if operator.over_first_lr else LR
        along = [float((term * weight).sum() / weight.square().sum()) for term, weight in pairs]
        sizes = [size / (LR * WEIGHT_DECAY) for size in along]
        expected = [wd / WEIGHT_DECAY**2 * unit for wd in requested]
        wrong = [abs(a - b) > 0.15 * max(expected) for a, b in zip(sizes, expected, strict=True)]
        scale = unit / WEIGHT_DECAY
        applied = [round(size / scale * WEIGHT_DECAY, 4) + 0.0 for size in sizes]
    else:
        applied = [round(value / max(moved), 4) for value in moved]
    if any(wrong):
        data = {"asked": list(requested), "got": applied}
        yield AuditCheck("param groups", False, DecayReason.GROUPS_LOST, data)
    else:
        yield AuditCheck("param groups", True, DecayReason.GROUPS_RIGHT)


def _terms_of_groups(
    factory: Factory, requested: Sequence[float], place: Place
) -> tuple[list[Tensor], list[Tensor]]:
    """By group, what decay takes off in a step, and the weights."""
    generator = torch.Generator().manual_seed(0)
    starts, weights = (
        [torch.randn(place.shape, generator=generator, dtype=place.dtype) for _ in requested]
        for _ in range(2)
    )
    gradients = [
        [0.1 * torch.randn(place.shape, generator=generator, dtype=place.dtype) for _ in requested]
        for _ in range(STEPS)
    ]
    ends = []
    for decays in ([NEARLY_NONE] * len(requested), requested):
        torch.default_generator.manual_seed(0)
        parameters = [nn.Parameter(start.clone()) for start in starts]
        groups = [
            {"params": [parameter], "lr": LR, "weight_decay": wd}
            for parameter, wd in zip(parameters, decays, strict=True)
        ]
        default = NEARLY_NONE if decays[0] == NEARLY_NONE else WEIGHT_DECAY / 2
        optimizer = _build(factory, groups, default)
        for index, step in enumerate(gradients):
            if index > 0:
                restore(parameters, weights)
            take_step(optimizer, parameters, step)
        ends.append([parameter.detach().clone() for parameter in parameters])
    return [plain - decayed for plain, decayed in zip(*ends, strict=True)], weights


def _vectors_check(make: Any, operator: DecayOperator) -> Iterator[AuditCheck]:
    """Some treat vectors otherwise, or refuse them."""
    vectors, error = _tried(make, (SHAPE[0] * SHAPE[1],))
    if error is not None:
        return
    if vectors.kind == operator.kind:
        yield AuditCheck("vectors", True, DecayReason.VECTORS_ALIKE)
    else:
        data = {"operator": vectors}
        yield AuditCheck("vectors", None, DecayReason.VECTORS_OTHERWISE, data)


# ---------------------------------------------------------------- built from a model


def _of_model(factory: Factory, expect: str | None) -> DecayAudit:
    model, optimizers = _setup(factory)
    table = decay_table(model, optimizers)
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    decayed = [row for row in table if row.decay != "none"]
    first = decayed[0].operator if decayed else DecayOperator("none")
    checks = []
    for row in {(row.optimizer, row.decay): row for row in decayed}.values():
        settings = _settings_of(model, optimizers, row.parameter)
        who = str(row.optimizer)
        check = _kind_check(row.operator, None, who, settings, expect)
        checks.append(AuditCheck(f"{who}: operator", check.passed, check.reason, check.data))
    if not decayed:
        checks.append(AuditCheck("operator", None, DecayReason.NO_DECAY))
    worst = (Problem.SHARED, Problem.UNSTEPPED, Problem.IGNORED, Problem.LOST, Problem.REPEATED)
    for problem in table.problems:
        passed = False if problem.problem in worst else None
        name = problem.problem.value
        checks.append(AuditCheck(name, passed, DecayReason.TABLE_PROBLEM, {"problem": problem}))
    return DecayAudit(names, first, tuple(checks), table)


def _settings_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], parameter: str
) -> Mapping[str, Any]:
    target = model.get_parameter(parameter)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return next(group for group in groups if any(p is target for p in group["params"]))


def _setup(factory: Factory) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model and its optimizers, from a function of a model, or of nothing."""
    parameters = inspect.signature(factory).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_model = any(p.kind in positional and p.default is p.empty for p in parameters)
    model: nn.Module | None = None
    if takes_model:
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    built = build(
        lambda: factory(model) if takes_model else factory(),
        "give a function of `params`, of a model, or of nothing",
    )
    parts = list(built) if isinstance(built, tuple | list) else [built]
    if parts and isinstance(parts[0], nn.Module):
        model = parts.pop(0)
        if len(parts) == 1 and isinstance(parts[0], tuple | list):
            parts = list(parts[0])
    for part in parts or [None]:
        if not hasattr(part, "param_groups"):
            wanted = "an optimizer, a list of them, or a model and its optimizers"
            raise WrongType("what the function returns", part, wanted)
    if model is None:
        model = _holder(parts)
    return model, parts


def _holder(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """A module that holds the parameters of optimizers, by group."""
    holder = nn.Module()
    seen: set[int] = set()
    for optimizer in optimizers:
        for at, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"group{at}_{i}" for i in range(10**6)]
            for name, parameter in zip(names, group["params"], strict=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    holder.register_parameter(str(name).replace(".", "_"), parameter)
    return holder
