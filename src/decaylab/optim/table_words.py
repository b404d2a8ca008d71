"""All sentences about decay operators, and the printed table of which parameters decay."""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from decaylab.notebook import html_table
from decaylab.optim.decay_operator import TOLERANCE, DecayOperator
from decaylab.text_table import Column, TextTable

WIDTH = 80
HEADING = ("parameter", "role", "decay", "a step", "long run")
KINDS = {
    "none": "not decayed",
    "l2": "in the gradient, inside the momentum",
    "decoupled": "outside the step, times lr",
    "independent": "outside the step, whatever the lr",
    "lr-squared": "outside the step, times lr squared over the first lr",
    "masked": "outside the step, at some entries at a time",
    "towards-start": "towards the weights at the start, not zero",
    "averaged": "outside the step of an iterate that the weights average",
    "in-momentum": "after the preconditioner, inside the momentum",
    "rescaled": "inside a step whose length is set afterwards",
    "ignored": "set, but nothing decays",
    "unknown": "none of the known kinds",
}
LR_SQUARED = "outside the step, times lr squared"
PRECONDITIONED = "in the gradient, then preconditioned"
NOT_STEPPED = "not in this optimizer"
BY_ORDER = "a normalisation comes next in the model; decay_table(..., inputs=batch) measures it"


def explain_operator(
    operator: DecayOperator, stepped: bool = True, preconditioned: bool = False
) -> str:
    """What a decay does, in a few words."""
    if not stepped:
        return NOT_STEPPED
    words = PRECONDITIONED if preconditioned and operator.kind == "l2" else KINDS[operator.kind]
    if not operator.over_first_lr:
        words = LR_SQUARED
    if operator.kind == "masked":
        words += f" ({operator.share:.0%} of them)"
    if operator.times is not None:
        least, most = operator.times
        if operator.factor is None:
            words += f", {least:.2g} to {most:.2g} times, depending on step, gradients or shape"
        elif abs(operator.factor - 1) > TOLERANCE:
            words += f", {operator.factor:.3g} times"
    if operator.kind == "unknown" and not math.isnan(operator.along):
        words += f" ({operator.along:.2g} lr wd |W| along the weight, {operator.across:.2g} across)"
    if operator.unasked:
        unasked = f"decays by {operator.unasked:.2g} lr without weight decay"
        words = unasked if operator.kind == "none" else f"{words}; {unasked}"
    return words


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def explain_problem(problem: str, parameters: Sequence[str], data: Mapping[str, Any]) -> str:
    """What looks wrong, with what to do about it."""
    names = listed(parameters)
    who = data.get("optimizer")
    if problem == "SHARED":
        return f"stepped and decayed more than once: {names}; give each to one optimizer"
    if problem == "UNSTEPPED":
        return f"trainable and in no optimizer: {names}; add them, or freeze them"
    if problem == "MISSED":
        return (
            f"decayed, unlike most parameters of normalisations: {names}; if those are left out by"
            " name, the list misses some"
        )
    if problem == "FOREIGN":
        return f"the optimizers step {data['count']} parameters that are not the model's"
    if problem == "IGNORED":
        return f"{who} ignores its weight decay: {names}"
    if problem == "LOST":
        return (
            f"{who}'s decay is lost to rounding, because W (1 - lr x decay) is W in"
            f" {data['format']}: {names}; keep the weights in float32, with autocast if need be"
        )
    if problem == "REPEATED":
        return f"{who} applies its weight decay {data['times']} times per step: {names}"
    if problem == "UNASKED":
        return f"{who} decays without weight decay, by {data['strength']:.2g} lr per step: {names}"
    if math.isnan(data["along"]):
        return f"{who} could not be tested, so its decay is unknown: {names}"
    return (
        f"{who} decays in none of the known ways ({data['along']:.2g} lr wd |W| along the weight,"
        f" {data['across']:.2g} across): {names}"
    )


Cells = tuple[str, str, str, float, float | None, float | None]
"""Parameter, role, kind, weight decay, factor, long run."""


def table_text(cells: Iterable[Cells], meanings: Mapping[str, str], problems: Sequence[str]) -> str:
    """Problems, rows and what the kinds mean, at most `WIDTH` columns wide."""
    lines = []
    for words in problems:
        lines += textwrap.wrap(words, WIDTH, initial_indent="! ", subsequent_indent="  ")
    columns = [
        Column(HEADING[0], words=True, path=True),
        Column(HEADING[1], drop=1),
        *map(Column, HEADING[2:]),
    ]
    lines.append(TextTable(columns, [_row(*cell) for cell in _merged(cells)]).text(WIDTH))
    for kind, words in meanings.items():
        lines += textwrap.wrap(f"{kind}: {words}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def table_html(cells: Iterable[Cells], meanings: Mapping[str, str], problems: Sequence[str]) -> str:
    """The same for a notebook."""
    warnings = "".join(f'<p style="color:#b03000">{escape(words)}</p>' for words in problems)
    table = html_table(HEADING, [_row(*cell) for cell in _merged(cells)], words=3)
    kinds = [f"{escape(kind)}: {escape(words)}" for kind, words in meanings.items()]
    return f"{warnings}{table}<p><small>{'<br>'.join(kinds)}</small></p>"


def _merged(cells: Iterable[Cells]) -> list[Cells]:
    """Merge parameters whose names differ only in numbers: `blocks.*.mlp.0.weight (12)`."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, *rest in cells:
        alike.setdefault((re.sub(r"\d+", "*", name), *rest), []).append(name)
    merged: list[Cells] = []
    for (_, *rest), names in alike.items():
        pieces = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
        name = "".join(piece[0] if len({*piece}) == 1 else "*" for piece in pieces)
        name += f" ({len(names)})" if len(names) > 1 else ""
        merged.append((name, *rest))  # type: ignore[arg-type]
    return merged


def _row(
    name: str, role: str, kind: str, weight_decay: float, factor: float | None, late: float | None
) -> tuple[str, ...]:
    decay = kind if kind == "none" else f"{kind} {weight_decay:g}"
    numbers = ["-" if value is None else f"{value:.7g}" for value in (factor, late)]
    return (name, role, decay, *numbers)
