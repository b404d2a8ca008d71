"""The words of an attribution; besides errors, the only English in this package."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from decaylab.attribution.reasons import LIMIT, Doubt, Fault, Unused
from decaylab.attribution.shares import Estimate, Shares, in_points
from decaylab.text_table import Column, TextTable
from decaylab.training.held_layers import WHY_NOT_HELD, LayerNote

if TYPE_CHECKING:
    from decaylab.attribution.arms import ArmResult
    from decaylab.attribution.matching import Match

NAMES = {
    "rotation": "rotation",
    "size": "size",
    "damping": "damping",
    "interaction": "(interaction)",
    "others": "other parameters",
    "direction": "step direction",
}


SHORT_NAMES = {"others": "others", "direction": "direction", "interaction": "(together)"}
PATHS_TEXT = (
    "What a layer went through in each arm. An arm takes each path either from the run with decay"
    " or from the run without it: if lines coincide, it followed its path."
)
METHOD = (
    "Arms of a seed share weights and batches. Size, rotation and damping of every held layer each"
    " follow the run with decay or the run without, independently. Alone: how much of the total is"
    " recovered if only this path is as with decay. Share: Shapley's, the mean over the orders in"
    " which paths are switched on, so shares include the interaction. Intervals are 95 %: Student's"
    " t over paired seeds, Fieller's for fractions."
)


def note_sentence(layer: str, note: LayerNote) -> str:
    """What to say about one layer."""
    if note is LayerNote.TIED:
        return f"{layer} is tied to another layer: both are one weight, held once."
    return f"{layer} is not held: {WHY_NOT_HELD[note]}."


def others_sentence(others: Sequence[str]) -> str:
    """Which parameters decay besides the weights that are held."""
    named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return f"Other parameters that decay and are not held: {len(others)} ({named})."


def unused_sentences(unused: Sequence[Unused]) -> list[str]:
    """Which arms are not used, why, and what to do about those that missed their paths."""
    sentences = [
        f"Seed {each.seed}, arm “{each.arm}”, is not used: it missed the {each.path} of"
        f" {each.layer} by {percent(each.error)} (more than {percent(LIMIT)})."
        for each in unused
        if each.fault is Fault.MISSED
    ]
    if sentences:
        sentences.append(
            "Paths are followed if only optimizer.step() changes the weights: leave out what else"
            " does (clamping, averaging), or leave these layers out by `only`."
        )
    for fault, what in ((Fault.DIVERGED, "diverged"), (Fault.NO_NUMBER, "gave no finite number")):
        seeds: dict[str, list[int]] = {}
        for each in unused:
            if each.fault is fault:
                seeds.setdefault(each.arm, []).append(each.seed)
        if seeds:
            named = "; ".join(f"{arm} ({_seeds(each)})" for arm, each in seeds.items())
            sentences.append(f"Not used, since they {what}: {named}.")
    return sentences


DECAY_LOST = (
    "Decay changed no weight that is held: in bfloat16, a small decay is lost in rounding, so keep"
    " the weights in float32 (autocast may stay); otherwise `decaylab audit-decay` says whether the"
    " optimizer uses its weight_decay."
)


def outcome(metric: str, value: float) -> str:
    """The result of an arm, for a progress line."""
    return (
        f"{metric} {100 * value:.4g} %" if in_points(metric, [value]) else f"{metric} {value:.4g}"
    )


def doubt_sentence(doubt: Doubt, metric: str, seeds: int | None = None) -> str:
    """Why shares have no value or no interval; `seeds`: how many would be enough."""
    enough = "many more seeds" if seeds is None else f"about {seeds} seeds, at this spread"
    return {
        Doubt.NO_SEED: f"No seed can use every arm for {metric}, so there are no shares.",
        Doubt.ONE_SEED: "One seed gives no intervals: use more seeds.",
        Doubt.NO_SPREAD: f"All seeds give the same total of {metric}, so intervals are too narrow:"
        " use more seeds, or a less coarse metric.",
        Doubt.TOTAL_UNCLEAR: "The total effect cannot be told apart from zero, so it has no"
        f" shares: use {enough}, or a stronger decay.",
    }[doubt]


def sentence(shares: Shares) -> str:
    """The answer for one metric."""
    if not shares.total.seeds:
        return f"What decay does to {shares.metric} is unknown: no seed has it with and without."
    total = f"Decay changes {shares.metric} by {amount(shares.total, shares.in_points)}"
    if shares.doubt is Doubt.TOTAL_UNCLEAR or 0.0 in shares.total:
        return f"{total}, which cannot be told apart from zero."
    if not shares.alone_shares:
        return f"{total}."
    ranked = sorted(shares.alone_shares.items(), key=lambda item: -item[1].value)
    first, share = ranked[0]
    parts = [f"{fraction(share)} of it is recovered by the {first} alone"]
    parts += [f"{fraction(share)} by the {path} alone" for path, share in ranked[1:]]
    for name in ("others", "direction"):
        if name in shares.shares:
            parts.append(f"{fraction(shares.shares[name])} is due to the {NAMES[name]}")
    return f"{total}; {', '.join(parts)}."


def share_rows(shares: Shares) -> list[list[str]]:
    """A row per share: name, alone, Shapley share, effect in the metric's unit."""
    unclear = shares.doubt is Doubt.TOTAL_UNCLEAR

    def told(share: Estimate | None) -> str:
        return "" if share is None or unclear else fraction(share)

    rows = [
        ["total", "", "", margin(shares.total, shares.in_points) if shares.total.seeds else "?"]
    ]
    for name, effect in shares.effects.items():
        share = None if name == "interaction" else shares.shares[name]
        alone = told(shares.alone_shares.get(name))
        rows.append([NAMES[name], alone, told(share), margin(effect, shares.in_points)])
    rows += [[name, told(share), "", ""] for name, share in shares.extra.items()]
    return rows


def share_header(shares: Shares) -> list[str]:
    """The header of `share_rows`."""
    return ["path", "alone", "share", "effect, points" if shares.in_points else "effect"]


def arm_rows(results: Sequence["ArmResult"], shares: Shares) -> list[list[str]]:
    """A row per arm: a metric over the seeds, and how well it held."""
    metric = shares.metric
    by_arm: dict[str, list[ArmResult]] = {}
    for result in results:
        by_arm.setdefault(result.arm, []).append(result)
    rows = []
    for arm, seeds in by_arm.items():
        finite = [result for result in seeds if result.finite]
        values = [v for r in finite if math.isfinite(v := r.metrics.get(metric, math.nan))]
        misses = [
            (error, path)
            for result in seeds
            for path, layers in result.errors.items()
            for error in layers.values()
        ]
        worst, path = max(misses, default=(0.0, ""))
        rows.append(
            [
                arm,
                spread(values, shares.in_points) or ("no number" if finite else "diverged"),
                f"{percent(worst)}, {path}" if path else "",
            ]
        )
    return rows


ARM_HEADER = ["arm", "mean ± sd", "missed by at most"]


MATCH_HEADER = ["metric", "A - B", "left when matched", "gone"]


def match_sentence(match: "Match") -> str:
    """What a match did to the difference of the first metric."""
    if not match.differences:
        return "No seed has all three runs, so there is nothing to compare."
    metric = next(iter(match.differences))
    points = in_points(metric, [])
    total, left = match.differences[metric], match.left[metric]
    text = f"A and B differ in {metric} by {amount(total, points)}"
    if total.seeds > 1 and 0.0 in total:
        return f"{text}, which cannot be told apart from zero."
    gone = f"{fraction(match.gone[metric])} of the difference is gone"
    if match.gone[metric].value < 0:
        gone = "the difference is no smaller"
    return f"{text}; if B follows A's {match.path}, by {amount(left, points)}: {gone}."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text."""
    return TextTable([Column(header[0], words=True), *map(Column, header[1:])], rows).text(80)


def counted(number: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _seeds(numbers: Sequence[int]) -> str:
    """`seed 4`, `seeds 0, 1 and 4`."""
    *others, last = map(str, numbers)
    return f"seeds {', '.join(others)} and {last}" if others else f"seed {last}"


def folded(text: str) -> str:
    """A sentence in lines of at most 80 columns."""
    return textwrap.fill(text, 80)


# ---------------------------------------------------------------- numbers


def amount(value: Estimate, points: bool) -> str:
    """A difference with its interval: `+1.9 [+1.2, +2.6] points`."""
    factor, unit = (100, " points") if points else (1, "")
    bounds = _bounds(f"{factor * value.low:+z.3g}", f"{factor * value.high:+z.3g}", value)
    return f"{factor * value.value:+z.3g}{bounds}{unit}"


def margin(value: Estimate, points: bool) -> str:
    """A difference with half its interval: `+1.9 ± 0.7`."""
    factor = 100 if points else 1
    half = factor * (value.high - value.low) / 2
    return f"{factor * value.value:+z.3g}" + ("" if math.isnan(half) else f" ± {half:.2g}")


def fraction(share: Estimate) -> str:
    """A fraction with its interval: `92 % [80, 104]`."""
    if math.isnan(share.value):
        return "?"
    bounds = _bounds(f"{100 * share.low:z.0f}", f"{100 * share.high:z.0f}", share)
    return f"{100 * share.value:z.0f} %{bounds}"


def _bounds(low: str, high: str, value: Estimate) -> str:
    return f" [{low}, {high}]" if math.isfinite(value.low) else ""


def spread(values: Sequence[float], points: bool) -> str:
    """Mean and standard deviation over seeds; empty if there is no seed."""
    if not values:
        return ""
    factor = 100 if points else 1
    mean = sum(values) / len(values)
    text = f"{factor * mean:.4g}"
    if len(values) > 1:
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        text += f" ± {factor * math.sqrt(variance):.2g}"
    return text


def percent(error: float) -> str:
    """A relative error: `0.3 %`."""
    return "< 0.001 %" if error < 1e-5 else f"{100 * error:.2g} %"
