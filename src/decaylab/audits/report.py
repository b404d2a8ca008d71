"""What audits find: checks with their reasons, each with its sentence."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from decaylab.optim.decay_operator import DecayOperator
from decaylab.optim.table import DecayTable
from decaylab.optim.table_words import explain_operator
from decaylab.records.files import without_nan


class Explained(Enum):
    """A reason: its name for JSON, and the sentence to fill in with data, or its function."""

    @property
    def code(self) -> str:
        """The name for JSON."""
        return str(self.value[0])

    def words(self, data: Mapping[str, Any]) -> str:
        """The sentence, filled in."""
        sentence = self.value[1]
        return str(sentence.format(**data) if isinstance(sentence, str) else sentence(**data))


# ---------------------------------------------------------------- of a K-FAC's steps


def _power_off(axis: str, power: float, plain: bool, known: bool) -> str:
    symbol = {"batch size B": "B", "positions T": "T"}.get(axis, axis)
    meanings: dict[tuple[str, float], str] = {
        ("B", 1): " (a sum over the batch where a mean is meant)",
        ("B", -1): " (divided by the batch once too often)",
        ("T", 1): " (positions counted once too often)",
        ("T", -1): " (a mean over positions where a sum is meant: the factor T is missing)",
    }
    meaning = meanings.get((symbol, power), "") if plain and known else ""
    return f"the curvature is off by {symbol}^{power:.3g}{meaning}"


def _damping(kind: str, damping: float, error: float, others: Iterable[str]) -> str:
    words = f"nearest to {kind}, lambda {damping:g}: the step is off by {error:.2g} of its length"
    return words + (f" ({', '.join(others)} would pass too)" if others else "")


class Reason(Explained):
    """Why a check of a K-FAC passed, failed or was not made."""

    NEAREST_BLOCK = "nearest-block", "nearest to the {curvature} block, {sharing}"
    NO_KNOWN_BLOCK = (
        "no-known-block",
        "no known block; the nearest is the {curvature} block, {sharing}",
    )
    OTHER_CURVATURE = (
        "other-curvature",
        "it is the {curvature} matrix, not the {asked} one that was asked for",
    )
    PLAIN_GRADIENTS = "plain-gradients", "the steps are plain gradients: no curvature is used"
    UPHILL = "uphill", "the steps go up the loss: their sign is wrong"
    DIRECTION = "direction", "sine of the angle to the block's step {sine:.2g}"
    UNKNOWN_DIRECTION = (
        "unknown-direction",
        "sine of the angle to the block's step {sine:.2g}: no known block gives these directions",
    )
    POWER_RIGHT = "power-right", "right at every size"
    POWER_OFF = "power-off", _power_off
    NO_POWER_LAW = "no-power-law", "the ratios are not powers of the sizes (off by {off:.0%})"
    CONSTANT_RIGHT = "constant-right", "right"
    CONSTANT_OFF = "constant-off", "the curvature is {factor:.3g}x what it should be"
    PATCHES = "patches", "kernel 2, stride 2: sine of the angle {sine:.2g}"
    MEND_FIRST = "mend-first", "not checked: fix the above first"
    MEND_DAMPING_FIRST = (
        "mend-damping-first",
        "not checked: fix the damping first, which is part of it",
    )
    DAMPING_UNKNOWN = "damping-unknown", "the damping is not known: pass audit(..., damping=...)"
    DAMPING = "damping", _damping
    JOINT_BIAS = "joint-bias", "weight and bias are one block"
    BIAS_OFF = (
        "bias-off",
        "with a bias the weight's step is off by {weight_error:.2g} and the bias's by"
        " {bias_error:.2g} of its length (it is {factor:.3g}x the block's)",
    )


# ---------------------------------------------------------------- of weight decay


def _operator(operator: DecayOperator) -> str:
    return f"{operator.kind}: {explain_operator(operator)}"


def _other_kind(kind: str, expected: str, why: str) -> str:
    because = {"asked": "which was asked for", "name": "as its name says"}
    return f"it is {kind}, not {expected}, {because.get(why, f'as its {why}=True says')}"


def _groups_lost(asked: Iterable[float], got: Iterable[float]) -> str:
    wanted, arrived = (", ".join(f"{value:g}" for value in values) for values in (asked, got))
    return f"groups that ask for {wanted} get {arrived}"


class DecayReason(Explained):
    """Why a check of an optimizer's decay passed or failed."""

    NAMED = "named", _operator
    IGNORED = "ignored", "a weight decay is set, but nothing decays"
    UNKNOWN = (
        "unknown",
        "no known operator: it removes {along:.2g} lr wd |W| along the weight and {across:.2g}"
        " across",
    )
    NOT_TRIED = "not-tried", "it could not be tested ({error})"
    NOTHING_SEEN = (
        "nothing-seen",
        "no known operator: its steps are not finite, or do not depend on the gradient",
    )
    OTHER_KIND = "other-kind", _other_kind
    ONCE = "once", "applied once per step"
    REPEATED = "repeated", "applied {times} times per step"
    SCALED = (
        "scaled",
        "scaled by {least:.2g} to {most:.2g}, depending on the step and on the gradients",
    )
    FORMATS_RIGHT = "formats-right", "the same if parameters differ in number format"
    FORMATS_REPEATED = (
        "formats-repeated",
        "applied {times} times per step if parameters differ in number format",
    )
    GROUPS_RIGHT = "groups-right", "each param group has its own weight decay"
    GROUPS_LOST = "groups-lost", _groups_lost
    VECTORS_ALIKE = "vectors-alike", "vectors decay like matrices"
    VECTORS_OTHERWISE = "vectors-otherwise", _operator
    NOTHING_UNASKED = "nothing-unasked", "nothing decays with weight decay 0"
    UNASKED = "unasked", "with weight decay 0 it still decays, by {strength:.2g} lr per step"
    NO_DECAY = "no-decay", "no weight decay is set"
    TABLE_PROBLEM = "table-problem", "{problem.words}"


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class AuditCheck:
    """One thing checked. `passed` is None if it could not be, or is no mistake: see `reason`."""

    name: str
    passed: bool | None
    reason: Explained
    data: Mapping[str, Any] = field(default_factory=dict)
    measured: float | None = None

    @property
    def words(self) -> str:
        """The reason as a sentence."""
        return self.reason.words(self.data)


class _Checked:
    """An optimizer that was checked."""

    checks: tuple[AuditCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def __getitem__(self, name: str) -> AuditCheck:
        return next(check for check in self.checks if check.name == name)

    def _lines(self, title: str, neither: str) -> str:
        """The title and a line per check; `neither` marks those that did not pass or fail."""
        marks = {True: "ok", False: "WRONG", None: neither}
        width = max(map(len, marks.values()))
        lines = (f"  {marks[c.passed]:{width}} {c.name}: {c.words}" for c in self.checks)
        return "\n".join([title, *lines])

    def _plain(self, *names: str) -> list[dict[str, Any]]:
        """The checks as plain values."""
        checks = [{name: getattr(check, name) for name in names} for check in self.checks]
        return [check | {"reason": check["reason"].code} for check in checks]


@dataclass(frozen=True)
class Audit(_Checked):
    """What an audit found. `curvature`, `sharing`: the block that the steps are nearest to."""

    optimizer: str
    curvature: str
    sharing: str
    sampled: bool
    checks: tuple[AuditCheck, ...]

    @property
    def known(self) -> bool:
        """Whether the steps have the directions of a known block, for some kind of layer."""
        directions = (Reason.DIRECTION, Reason.UNKNOWN_DIRECTION)
        return any(check.passed for check in self.checks if check.reason in directions)

    @property
    def title(self) -> str:
        """The optimizer and its block, in words."""
        if not self.known:
            return f"{self.optimizer}: no known curvature block"
        how = "estimated from samples" if self.sampled else "not sampled"
        return f"{self.optimizer}: {self.curvature} block, {self.sharing}, {how}"

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if not self.passed:
            return "it does not pass"
        unmade = sum(check.passed is None for check in self.checks)
        but = f", but {unmade} of {len(self.checks)} checks could not be made" if unmade else ""
        return f"it passes{but}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        checks = self._plain("name", "passed", "measured", "reason", "data", "words")
        return dict(without_nan({"passed": self.passed, **vars(self), "checks": checks}))

    def __str__(self) -> str:
        return self._lines(self.title, "not checked")


@dataclass(frozen=True)
class DecayAudit(_Checked):
    """What an audit of weight decay found; `table` if there is a model to look at."""

    optimizer: str
    operator: DecayOperator
    checks: tuple[AuditCheck, ...]
    table: DecayTable | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {
            "passed": self.passed,
            "optimizer": self.optimizer,
            "operator": asdict(self.operator),
            "checks": self._plain("name", "passed", "reason", "words"),
            "rows": None if self.table is None else [asdict(row) for row in self.table],
        }
        return dict(without_nan(values))

    def __str__(self) -> str:
        title = f"{self.optimizer}: {self.operator.kind}, {explain_operator(self.operator)}"
        text = self._lines(title, "note")
        return text if self.table is None else f"{text}\n{self.table}"
