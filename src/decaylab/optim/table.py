"""A table of which parameters decay, how, and by what factor per step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, overload

import torch
from torch import nn

from decaylab.errors import WrongType, needed
from decaylab.networks import ParameterRole, roles
from decaylab.networks.calling import Inputs
from decaylab.optim.decay import (
    first_lr,
    learning_rate,
    lost_to_rounding,
    operator_of,
    strength,
)
from decaylab.optim.decay_operator import NONE, TOLERANCE, DecayOperator
from decaylab.optim.laws import sums_up
from decaylab.optim.optimizer_behaviour import unwrapped
from decaylab.optim.table_words import (
    BY_ORDER,
    Cells,
    explain_operator,
    explain_problem,
    table_html,
    table_text,
)


class Problem(Enum):
    """What may be wrong with which parameters decay; the data are in parentheses."""

    SHARED = "shared"  # several optimizers or groups step it
    UNSTEPPED = "unstepped"  # trainable, and in no optimizer
    FOREIGN = "foreign"  # an optimizer steps parameters that are not the model's (count)
    IGNORED = "ignored"  # a weight decay is set and does nothing (optimizer)
    REPEATED = "repeated"  # the decay is applied more than once a step (optimizer, times)
    LOST = "lost"  # rounding undoes the decay (optimizer, format)
    MISSED = "missed"  # of a normalisation and decayed, though most of those are not
    UNASKED = "unasked"  # decays without weight decay (optimizer, strength)
    UNKNOWN = "unknown"  # (optimizer, along, across), not numbers where it could not be tried


@dataclass(frozen=True)
class DecayProblem:
    """One thing to look at, and the parameters that it is about."""

    problem: Problem
    parameters: tuple[str, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """As a sentence."""
        return explain_problem(self.problem.name, self.parameters, self.data)


@dataclass(frozen=True)
class DecayRow:
    """How one parameter decays; `factor` and `long_run` multiply it per step, None: not fixed.

    `optimizer` is None if none steps it. `preconditioned`: L2 that goes through more than a
    momentum. `lost`: the number format of a parameter whose decay rounding undoes, else "".
    """

    parameter: str
    role: str
    decay: str
    weight_decay: float
    factor: float | None
    long_run: float | None
    operator: DecayOperator = field(default=NONE, compare=False)
    preconditioned: bool = False
    optimizer: str | None = field(default=None, compare=False)
    lost: str = ""

    @property
    def how(self) -> str:
        """In words."""
        stepped = self.optimizer is not None
        return explain_operator(self.operator, stepped, self.preconditioned)


@dataclass(frozen=True, repr=False)
class DecayTable(Sequence[DecayRow]):
    """One row per parameter and optimizer that steps it, in model order, and what looks wrong.

    Printed, it is 80 columns wide; parameters whose names differ only in a number share a line. A
    notebook shows it as a table, and `to_pandas` gives a frame.
    """

    rows: tuple[DecayRow, ...]
    problems: tuple[DecayProblem, ...] = ()
    measured: bool = False  # which layers are invariant, not read from the order of modules

    @overload
    def __getitem__(self, index: int) -> DecayRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[DecayRow]: ...
    def __getitem__(self, index: int | slice) -> DecayRow | list[DecayRow]:
        return list(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DecayRow]:
        return iter(self.rows)

    def _cells(self) -> list[Cells]:
        return [
            (row.parameter, row.role, row.decay, row.weight_decay, row.factor, row.long_run)
            for row in self.rows
        ]

    def _meanings(self) -> dict[str, str]:
        """Of roles and kinds; of one kind that is scaled in some parameters alone, by what."""
        meanings: dict[str, list[str]] = {}
        if not self.measured and any(row.role == "invariant" for row in self.rows):
            meanings["invariant"] = [BY_ORDER]
        for row in self.rows:
            how = f"{row.how} (0 now)" if row.factor == 1 and row.how.endswith(" lr") else row.how
            if row.decay != "none" and how not in meanings.setdefault(row.decay, []):
                meanings[row.decay].append(how)
        return {kind: "; or ".join(words) for kind, words in meanings.items()}

    def __str__(self) -> str:
        problems = [problem.words for problem in self.problems]
        return table_text(self._cells(), self._meanings(), problems)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        problems = [problem.words for problem in self.problems]
        return table_html(self._cells(), self._meanings(), problems)

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a line per parameter. Needs pandas."""
        pandas = needed("pandas", extra="notebook", what="to_pandas()")
        columns = ["parameter", "role", "decay", "weight_decay", "factor", "long_run", "how"]
        cells = zip(self._cells(), self.rows, strict=True)
        return pandas.DataFrame([(*values, row.how) for values, row in cells], columns=columns)


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def decay_table(model: nn.Module, optimizers: Optimizers, *, inputs: Inputs = None) -> DecayTable:
    """What decays, how, and by what factor per step: one row per parameter, in model order.

    Takes any torch optimizer, or several. Optimizers that are not torch's are tested (`behaviour`)
    on parameters made for the test.

    inputs: a batch, as for `watch`. With it, the role `invariant` is measured; without, it goes by
    the order of modules, which does not show a residual sum in front of a normalisation.

    factor: what the decay term alone multiplies W by in one step, from rest;
    long_run: the same once the momentum has settled (`steady_shrink`). Both are None for L2 behind
    a preconditioner (Adam, K-FAC), for L2 in an optimizer that is not torch's and does not step
    like torch's SGD, and if no single factor applies to all of a weight.
    """
    stepping = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    for optimizer in stepping:
        if not hasattr(optimizer, "param_groups"):
            raise WrongType("the optimizer", optimizer, "one with param_groups, or a list of them")
    owners: dict[int, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {}
    for optimizer in stepping:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append((unwrapped(optimizer), group))
    known = roles(model, inputs)
    rows: list[DecayRow] = []
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if id(parameter) not in owners:
            rows.append(_row(known[name], None, None))
        for optimizer, group in owners.get(id(parameter), ()):
            alone = {**group, "params": [parameter]}  # some step vectors otherwise than matrices
            rows.append(_row(known[name], optimizer, alone))
    problems = tuple(_problems(rows, parameters, owners))
    return DecayTable(tuple(rows), problems, measured=inputs is not None)


def _row(
    role: ParameterRole, optimizer: torch.optim.Optimizer | None, group: Mapping[str, Any] | None
) -> DecayRow:
    who = (role.parameter, role.role)
    if group is None or optimizer is None:
        return DecayRow(*who, "none", 0.0, 1.0, 1.0)
    operator = operator_of(group, optimizer)
    name = type(optimizer).__name__
    if operator.kind == "none":
        factors = _factors(operator, 0.0, group, optimizer)
        return DecayRow(*who, "none", 0.0, *factors, operator, optimizer=name)
    weight_decay = float(strength(group, optimizer))
    plain = isinstance(optimizer, torch.optim.ASGD) or sums_up(optimizer, group)
    through = operator.kind == "l2" and (group.get("law") == "kfac" or not plain)
    factors = (None, None) if through else _factors(operator, weight_decay, group, optimizer)
    (parameter,) = group["params"]
    lost = ""
    if lost_to_rounding(parameter, group, optimizer):
        factors, lost = (1.0, 1.0), str(parameter.dtype).removeprefix("torch.")
    return DecayRow(*who, operator.kind, weight_decay, *factors, operator, through, name, lost)


def _factors(
    operator: DecayOperator,
    weight_decay: float,
    group: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> tuple[float | None, float | None]:
    """What the first step and a late one multiply the weight by."""
    lr, momentum = float(group.get("lr") or 0.0), float(group.get("momentum") or 0.0)
    if isinstance(optimizer, torch.optim.ASGD):  # its lr falls, the faster the larger lambd is
        first = 1 - lr * (weight_decay + operator.unasked)
        return first, None if operator.unasked else first
    if operator.kind in ("none", "ignored"):
        return 1 - lr * operator.unasked, 1 - lr * operator.unasked
    k = operator.factor
    own_lr = learning_rate(group, optimizer) is None and operator.kind != "independent"
    if k is None or own_lr:
        return None, None
    k = 1.0 if abs(k - 1) < TOLERANCE else k
    amount = k * weight_decay * lr
    if operator.kind == "independent":
        return 1 - k * weight_decay, 1 - k * weight_decay
    if operator.kind == "decoupled":
        return 1 - amount - lr * operator.unasked, 1 - amount - lr * operator.unasked
    if operator.unasked:
        return None, None
    if operator.kind == "lr-squared":
        first = first_lr(operator, group, optimizer)
        factor = 1 - amount * lr / first if first else None
        return factor, factor
    if operator.kind == "in-momentum":
        return 1 - weight_decay * lr, 1 - amount
    if operator.kind != "l2":
        return None, None
    if group.get("nesterov"):
        return 1 - amount * (1 + momentum), _nesterov(amount, momentum)
    later = amount * (1 - group.get("dampening", 0.0) if momentum else 1)
    return 1 - amount, 1 - steady_shrink(later, momentum)


def _problems(
    rows: Sequence[DecayRow],
    parameters: Mapping[str, nn.Parameter],
    owners: Mapping[int, Sequence[tuple[torch.optim.Optimizer, Mapping[str, Any]]]],
) -> Iterator[DecayProblem]:
    shared = [name for name, p in parameters.items() if len(owners.get(id(p), ())) > 1]
    if shared:
        yield DecayProblem(Problem.SHARED, tuple(shared))
    alone = [name for name, p in parameters.items() if id(p) not in owners and p.requires_grad]
    if alone:
        yield DecayProblem(Problem.UNSTEPPED, tuple(alone))
    model_parameters = {id(parameter) for parameter in parameters.values()}
    if foreign := len(owners.keys() - model_parameters):
        yield DecayProblem(Problem.FOREIGN, (), {"count": foreign})
    names_by_problem: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        for problem in _problems_of(row):
            names_by_problem.setdefault(problem, []).append(row.parameter)
    for (problem, *data), names in names_by_problem.items():
        yield DecayProblem(problem, tuple(names), dict(data))
    norms = [row for row in rows if row.role == "norm" and row.optimizer]
    decayed = [row.parameter for row in norms if row.decay != "none"]
    if 0 < len(decayed) < len(norms) / 2:
        yield DecayProblem(Problem.MISSED, tuple(decayed))


def _problems_of(row: DecayRow) -> Iterator[tuple[Any, ...]]:
    operator, who = row.operator, ("optimizer", row.optimizer)
    if operator.kind == "ignored":
        yield Problem.IGNORED, who
    elif operator.kind in ("unknown", "rescaled"):
        yield Problem.UNKNOWN, who, ("along", operator.along), ("across", operator.across)
    if row.lost:
        yield Problem.LOST, who, ("format", row.lost)
    if times := repeated(operator):
        yield Problem.REPEATED, who, ("times", times)
    if operator.unasked:
        yield Problem.UNASKED, who, ("strength", operator.unasked)


def repeated(operator: DecayOperator) -> int | None:
    """How often decay is applied per step, if that is a whole number above 1."""
    k = operator.factor
    if operator.kind not in ("l2", "decoupled", "independent", "masked") or k is None:
        return None
    return round(k) if k > 1.5 and abs(k - round(k)) < TOLERANCE else None


def steady_shrink(amount: float, momentum: float) -> float:
    """The fraction by which L2 alone shrinks a weight per step in the long run.

    With a = lr * weight_decay, v' = momentum * v + a W, W' = W - v' has the rates
    r^2 - (1 + momentum - a) r + momentum = 0, and the larger |r| wins: 1 - |r|, which is
    a / (1 - momentum) up to a fraction momentum * a / (1 - momentum)^2 of it. From
    a = (1 - sqrt(momentum))^2 on W oscillates and the result is 1 - sqrt(momentum). Holds for a
    constant lr without preconditioner and without gradient.

    >>> round(steady_shrink(5e-5, 0.9), 7)
    0.0005023
    """
    if momentum == 0:
        return amount
    half = (1 + momentum - amount) / 2
    discriminant = half * half - momentum
    if discriminant <= 0:
        return 1 - math.sqrt(momentum)
    if half < 0:
        return 1 + half - math.sqrt(discriminant)
    # 1 - half - sqrt(discriminant), without the cancellation at a small amount
    return amount / ((1 - momentum + amount) / 2 + math.sqrt(discriminant))


def _nesterov(amount: float, momentum: float) -> float:
    """The larger |r| of v' = m v + a W, W' = W - a W - m v': r^2 - (1 + m)(1 - a) r + m (1 - a)."""
    half, product = (1 + momentum) * (1 - amount) / 2, momentum * (1 - amount)
    inside = half * half - product
    return math.sqrt(abs(product)) if inside <= 0 else abs(half) + math.sqrt(inside)
