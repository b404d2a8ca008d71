"""How layers turn: the table of their motions, what its columns mean, what it shows."""

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean

from decaylab.diagnosis.effects import Motion
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.diagnosis.words.phrases import (
    effect_times,
    layer_name,
    outputs_per_percent,
    outputs_percent,
    percent,
    range_of,
    step_count,
    three_digits,
    times,
)
from decaylab.records.settings import VECTORS


def motion_table(diagnosis: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """Headings and a row per layer with decay, or per layer if none has decay.

    A column is shown only if something in it is known, or layers differ in it.
    """
    motions = [m for m in diagnosis.motions if m.decayed or not diagnosis.decays]
    scales = [m.timescale for m in motions if m.timescale is not None]
    differ = bool(scales) and max(scales) > RULES.alike * min(scales)

    def column(values: Iterable[float | None], written: Callable[[float], str]) -> list[str]:
        return ["-" if value is None else written(value) for value in values]

    columns = {
        "layer": [
            m.layer if m.role in ("weight", "") else f"{m.layer} ({m.role})" for m in motions
        ],
        "angle/step": column((m.rotation for m in motions), "{:.2g}".format),
        "balance": column(
            (None if m.role in VECTORS else m.expected for m in motions), "{:.2g}".format
        ),
        "decay time": column((m.timescale if differ else None for m in motions), step_count),
        "turns": column((m.turned.value if m.turned else None for m in motions), times),
        "norm": column((m.by_decay for m in motions), times),
        "size": column((m.size_response for m in motions), outputs_percent),
    }
    known = {heading: cells for heading, cells in columns.items() if {*cells} - {"-"}}
    return list(known), [list(row) for row in zip(*known.values(), strict=True)]


def motion_legend(diagnosis: Diagnosis) -> str:
    """What the columns of `motion_table` mean."""
    headings, _ = motion_table(diagnosis)
    baseline = (
        "the baseline"
        if diagnosis.baselines
        else "a reconstruction without decay, for the same gradients"
    )
    meanings = {
        ("angle/step",): "how far a step turns the weights, in radians, as recorded",
        ("balance",): "where the angle would settle with this lr and decay, if the layer were"
        " scale-invariant and its gradients independent",
        ("decay time",): "steps in which decay alone would shrink the weights to 1/e",
        ("turns", "norm"): f"as a multiple of {baseline}",
        ("size",): "percent by which the outputs change per percent of the layer's size; near 0"
        " only its direction counts",
    }
    sentences = [
        f"{', '.join(shown)}: {meaning}."
        for columns, meaning in meanings.items()
        if (shown := [heading for heading in columns if heading in headings])
    ]
    joint = [m for m in diagnosis.motions if m.members]
    if joint:
        more = [f"{m.layer} is {', '.join(m.members)}" for m in joint if len(m.members) > 2]
        text = "Layers joined by + are scale-invariant only together"
        sentences.append(f"{'; '.join([text, *more])}.")
    return " ".join(sentences)


def motion_title(diagnosis: Diagnosis) -> str:
    """Above `insight` and `motion_table`."""
    seeds = len(diagnosis.seeds)
    return "How far each layer turns" + (f" (the first of {seeds} seeds)" if seeds else "")


def decayed_motions(diagnosis: Diagnosis) -> list[Motion]:
    """The layers with decay, except gains and other vectors."""
    return [m for m in diagnosis.motions if m.role not in VECTORS and m.decayed]


def insight(diagnosis: Diagnosis) -> list[str]:
    """What the motions show, each checkable in the table."""
    moved = decayed_motions(diagnosis)
    known_turns = [m for m in moved if m.turned is not None]
    turned = [m for m in known_turns if turn_factor(m) >= RULES.acts]
    sentences = []
    if known_turns and not turned:
        most = max(known_turns, key=turn_factor)
        who = "Decay" if len(known_turns) == len(moved) else "Where it is known, decay"
        sentences.append(
            f"{who} makes no layer turn {times(RULES.acts)} as far per step: it is"
            f" {times(turn_factor(most))} at most ({layer_name(most.layer)})."
        )
    if turned:
        most = max(turned, key=turn_factor)
        further = effect_times(most.turned) if most.turned is not None else ""
        text = f"Decay makes {layer_name(most.layer)} turn {further} as far per step"
        text += "" if diagnosis.baselines else " as the same gradients would without it"
        if most.by_decay is not None:
            text += f", at {times(most.by_decay)} the norm"
        if most.role == "adapter":
            text += "; what it adds to the frozen network depends on its size"
        elif most.size_response is not None:
            little = most.size_response <= RULES.size_little
            matters = "hardly matters" if little else "matters too"
            text += f"; its size itself {matters} ({outputs_per_percent(most.size_response)})"
        sentences.append(f"{text}.")
    if len(turned) > 1:
        all_turned = geometric_mean(turn_factor(m) for m in turned)
        sentences.append(
            f"{counted(turned, moved).capitalize()} layers with decay turn at least"
            f" {times(RULES.acts)} as far, {times(all_turned)} on average."
        )
    sentences += _foretold(known_turns)
    if timed := [m for m in moved if m.timescale]:
        sentences.append(_decay_time(timed))
    known = [m for m in moved if m.settled is not None]
    if known:
        sentences.append(_balance(known))
    return sentences


def _foretold(motions: Sequence[Motion]) -> list[str]:
    """How far this run's own estimates are from what both runs say."""
    known = [m for m in motions if m.foretold is not None]
    if not known:
        return []
    quantities = {"effective learning rate" if m.invariant else "angle" for m in known}
    factors = "factor" if len(known) == 1 else "factors"
    off = range_of([m.foretold for m in known if m.foretold is not None], times)
    return [
        f"Estimated from this run alone, decay's {factors} on the"
        f" {' or the '.join(sorted(quantities, reverse=True))} would be {off} as large."
    ]


def counted(some: Sequence[Motion], every: Sequence[Motion]) -> str:
    """How many of all: "3 of 7", "both", "all 7"."""
    if len(some) < len(every):
        return f"{len(some)} of {len(every)}"
    return "both" if len(every) == 2 else f"all {len(every)}"


def turn_factor(m: Motion) -> float:
    """How much further decay makes the layer turn per step; 1 where it is not known."""
    return m.turned.value if m.turned is not None else 1.0


def _decay_time(moved: Sequence[Motion]) -> str:
    needs = range_of([m.timescale for m in moved if m.timescale], step_count)
    epochs = [m.epochs for m in moved if m.epochs]
    in_epochs = f" ({three_digits(max(epochs))} epochs)" if epochs else ""
    return (
        f"Decay needs about {needs} steps{in_epochs} to take full effect at the mean lr; the run"
        f" has {moved[0].steps}."
    )


def _balance(motions: Sequence[Motion]) -> str:
    apart = [(m.rotation or 1.0) / (m.expected or 1.0) for m in motions if not m.settled]
    near = percent(RULES.settled - 1)
    if not apart:
        return f"Every layer with decay turns as far as at its balance, within {near}."
    factors = range_of(apart, times)
    if len(motions) == 1:
        name = layer_name(motions[0].layer)
        return f"At its balance {name} would turn {times(1 / apart[0])} as far."
    if len(apart) == len(motions):
        return (
            f"No layer is within {near} of its balance yet: they turn {factors} as far as at"
            " balance."
        )
    others = "The other turns" if len(apart) == 1 else "The others turn"
    return (
        f"Within {near} of their balance: {len(motions) - len(apart)} of {len(motions)} layers."
        f" {others} {factors} as far as at balance."
    )
