"""All sentences of the audits."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from decaylab.optim.table_words import explain_operator

MARKS = {True: "ok", False: "WRONG", None: "not checked"}
DECAY_MARKS = {True: "ok", False: "WRONG", None: "note"}
SYMBOLS = {"batch size B": "B", "positions T": "T"}
MEANINGS: dict[tuple[str, float], str] = {
    ("batch size B", 1): " (a sum over the batch where a mean is meant)",
    ("batch size B", -1): " (divided by the batch once too often)",
    ("positions T", 1): " (positions counted once too often)",
    ("positions T", -1): " (a mean over positions where a sum is meant: the factor T is missing)",
}


def _power_off(axis: str, power: float, plain: bool, known: bool) -> str:
    words = f"the curvature is off by {SYMBOLS.get(axis, axis)}^{power:.3g}"
    return words + (MEANINGS.get((axis, power), "") if plain and known else "")


def _damping(kind: str, damping: float, error: float, others: Iterable[str]) -> str:
    words = f"nearest to {kind}, lambda {damping:g}: the step is off by {error:.2g} of its length"
    return words + (f" ({', '.join(others)} would pass too)" if others else "")


def _bias_off(weight_error: float, bias_error: float, factor: float) -> str:
    return (
        f"with a bias the weight's step is off by {weight_error:.2g} and the bias's by"
        f" {bias_error:.2g} of its length (it is {factor:.3g}x the block's)"
    )


SENTENCES: dict[str, str | Callable[..., str]] = {
    "NEAREST_BLOCK": "nearest to the {curvature} block, {sharing}",
    "NO_KNOWN_BLOCK": "no known block; the nearest is the {curvature} block, {sharing}",
    "OTHER_CURVATURE": "it is the {curvature} matrix, not the {asked} one that was asked for",
    "PLAIN_GRADIENTS": "the steps are plain gradients: no curvature is used",
    "UPHILL": "the steps go up the loss: their sign is wrong",
    "DIRECTION": "sine of the angle to the block's step {sine:.2g}",
    "UNKNOWN_DIRECTION": "sine of the angle to the block's step {sine:.2g}: no known block gives"
    " these directions",
    "POWER_RIGHT": "right at every size",
    "POWER_OFF": _power_off,
    "NO_POWER_LAW": "the ratios are not powers of the sizes (off by {off:.0%})",
    "CONSTANT_RIGHT": "right",
    "CONSTANT_OFF": "the curvature is {factor:.3g}x what it should be",
    "PATCHES": "kernel 2, stride 2: sine of the angle {sine:.2g}",
    "MEND_FIRST": "not checked: fix the above first",
    "MEND_DAMPING_FIRST": "not checked: fix the damping first, which is part of it",
    "DAMPING_UNKNOWN": "the damping is not known: pass audit(..., damping=...)",
    "DAMPING": _damping,
    "JOINT_BIAS": "weight and bias are one block",
    "BIAS_OFF": _bias_off,
}
"""By the name of a `Reason`."""


def explain(reason: str, data: Mapping[str, Any]) -> str:
    """A reason with its data as a sentence."""
    sentence = SENTENCES[reason]
    return sentence.format(**data) if isinstance(sentence, str) else sentence(**data)


def _other_kind(kind: str, expected: str, why: str) -> str:
    because = {"asked": "which was asked for", "name": "as its name says"}
    return f"it is {kind}, not {expected}, {because.get(why, f'as its {why}=True says')}"


def _groups_lost(asked: Iterable[float], got: Iterable[float]) -> str:
    wanted, arrived = (", ".join(f"{value:g}" for value in values) for values in (asked, got))
    return f"groups that ask for {wanted} get {arrived}"


DECAY_SENTENCES: dict[str, str | Callable[..., str]] = {
    "NAMED": lambda operator: f"{operator.kind}: {explain_operator(operator)}",
    "IGNORED": "a weight decay is set, but nothing decays",
    "UNKNOWN": "no known operator: it removes {along:.2g} lr wd |W| along the weight and"
    " {across:.2g} across",
    "NOT_TRIED": "it could not be tested ({error})",
    "NOTHING_SEEN": "no known operator: its steps are not finite, or do not depend on the gradient",
    "OTHER_KIND": _other_kind,
    "ONCE": "applied once per step",
    "REPEATED": "applied {times} times per step",
    "SCALED": "scaled by {least:.2g} to {most:.2g}, depending on the step and on the gradients",
    "FORMATS_RIGHT": "the same if parameters differ in number format",
    "FORMATS_REPEATED": "applied {times} times per step if parameters differ in number format",
    "GROUPS_RIGHT": "each param group has its own weight decay",
    "GROUPS_LOST": _groups_lost,
    "VECTORS_ALIKE": "vectors decay like matrices",
    "VECTORS_OTHERWISE": lambda operator: f"{operator.kind}: {explain_operator(operator)}",
    "NOTHING_UNASKED": "nothing decays with weight decay 0",
    "UNASKED": "with weight decay 0 it still decays, by {strength:.2g} lr per step",
    "NO_DECAY": "no weight decay is set",
    "TABLE_PROBLEM": lambda problem: problem.words,
}
"""By the name of a `DecayReason`."""


def explain_decay(reason: str, data: Mapping[str, Any]) -> str:
    """A reason with its data as a sentence."""
    sentence = DECAY_SENTENCES[reason]
    return sentence.format(**data) if isinstance(sentence, str) else sentence(**data)


def title_of(optimizer: str, curvature: str, sharing: str, sampled: bool, known: bool) -> str:
    """The optimizer and its block."""
    if not known:
        return f"{optimizer}: no known curvature block"
    how = "estimated from samples" if sampled else "not sampled"
    return f"{optimizer}: {curvature} block, {sharing}, {how}"


def joined(
    title: str,
    checks: Iterable[tuple[bool | None, str, str]],
    marks: Mapping[bool | None, str] = MARKS,
) -> str:
    """The title and a line per check."""
    width = max(map(len, marks.values()))
    return "\n".join(
        [title, *(f"  {marks[ok]:{width}} {name}: {words}" for ok, name, words in checks)]
    )


def summary(passed: bool, made: int, unmade: int) -> str:
    """The verdict in one line."""
    if not passed:
        return "it does not pass"
    but = f", but {unmade} of {made + unmade} checks could not be made" if unmade else ""
    return f"it passes{but}"
