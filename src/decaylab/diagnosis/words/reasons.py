"""Reasons in words: each datum is written by its kind, into the sentence of the reason."""

import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from decaylab.diagnosis import commands
from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.mechanisms import SecondOrderShares
from decaylab.diagnosis.reasons import Because
from decaylab.diagnosis.words.phrases import (
    change_words,
    effect_range,
    layer_name,
    names,
    outputs_per_percent,
    outputs_percent,
    percent,
    range_of,
    step_count,
    three_digits,
    times,
)


def _not_finite(rows: Sequence[str]) -> str:
    were, are = ("values were", "are") if len(rows) > 1 else ("value was", "is")
    return f"{len(rows)} {were} not finite ({', '.join(sorted({*rows})[:3])}) and {are} left out"


def _damaged(lines: Sequence[str]) -> str:
    several = f"{len(lines)} lines are damaged and left out, the first: " * (len(lines) > 1)
    return f"{several}{lines[0]}"


def _shares(shares: SecondOrderShares) -> str:
    estimated = " (a rough estimate)" if shares.estimated else ""
    with_decay, without = (percent(share or 0.0) for share in (shares.run, shares.baseline))
    return f"{with_decay} with decay, {without} without{estimated}"


def _removed(taken: float) -> str:
    return f"{100 * -math.expm1(-taken):.2g} %"


def _responses(responses: Mapping[str, float]) -> str:
    return range_of(list(responses.values()), outputs_percent)


def _counting(counting: tuple[list[str], bool]) -> str:
    layers, gains = counting
    return names([*layers, *(["the gains of normalisations"] if gains else [])])


def _more_like_it(others: int) -> str:
    return f" There {'is' if others == 1 else 'are'} {others} more like it." if others else ""


def _value(setting: Any) -> str:
    return "not set" if setting is None else str(setting)


def _watched_in(*addresses: commands.Address) -> str:
    return "recorded with " + " and ".join(f'folder="{x.folder}"' for x in addresses)


def _give_baseline(places: Places) -> str:
    run = places.run
    if places.left_baselines:
        there = "compare it with its run without decay in the same folder"
        return f"{there}: `{commands.diagnose_all_seeds(run)}`"
    if places.all_ours:
        again = commands.train_again(run, decay=False)
        return f"train it without decay (`{again}`), then `{commands.diagnose_all_seeds(run)}`"
    if not run.folder:
        return f"train the same without decay, then `{commands.diagnose([run], [run])}`"
    other = run.beside("no-decay")
    command = commands.diagnose(places.runs, [other])
    return f"train the same without decay, {_watched_in(other)}, then `{command}`"


def _more_seeds(places: Places) -> str:
    run, baselines = places.run, places.baselines
    if places.left_runs or places.left_baselines:
        there = "compare the other seeds in the same folder too"
        return f"{there}: `{commands.diagnose_all_seeds(run)}`"
    again = f"train another seed{' of each' if baselines else ''}"
    if places.all_ours:
        seed = 1 + max(address.seed or 0 for address in (*places.runs, *baselines))
        commands_ = [commands.train_again(each, seed=seed) for each in (run, *baselines[:1])]
        return f"{again} ({_typed(commands_)}), then `{commands.diagnose_all_seeds(run)}`"
    if not all(address.folder for address in (*places.runs, *baselines)):
        return f"{again}, then `{commands.diagnose([commands.Address()] * 2)}`"
    new = [address.beside(f"seed-{1 + len(places.runs)}") for address in (run, *baselines[:1])]
    command = commands.diagnose([*places.runs, new[0]], [*baselines, *new[1:]])
    return f"{again}, {_watched_in(*new)}, then `{command}`"


def _record(places: Places) -> str:
    if not places.all_ours:
        return ' in all runs, with probes="diagnosis" and inputs=batch'
    runs = [run for run in (*places.runs, *places.baselines) if run.status != "diverged"]
    if any(run.status == "finished" and not run.kept for run in runs):
        trained = _typed(commands.train_again(run, runs=run.again.runs) for run in runs)
        check = commands.diagnose_all_seeds(places.run.again)
        return f" by training once more, since no checkpoint was kept: {trained}, then `{check}`"
    finished = {True: commands.probe, False: commands.train_again}  # training records it at its end
    return ": " * bool(runs) + _typed(finished[run.status == "finished"](run) for run in runs)


def _typed(lines: Iterable[str]) -> str:
    return " and ".join(f"`{line}`" for line in lines)


def _attribute(places: Places) -> str:
    command, where = "decaylab.attribute", ", in your own loop (docs/attribution.md)"
    if places.run.ours and places.run.folder:
        command, where = commands.attribute(places.run), ""
    return f"`{command}` separates the mechanisms by experiment{where}"


def _by_layers(groups: Sequence[tuple[Because, Sequence[str]]]) -> list[str]:
    """What is said of layers; of which ones, if it is not the same of all."""
    if len(groups) == 1:
        return [sentence(why) for why, _ in groups]
    return [f"{sentence(why)} ({names(layers)})" for why, layers in groups]


KINDS: dict[str, Callable[[Any], str]] = {
    # numbers
    "times": times,
    "digits": three_digits,
    "step count": step_count,
    "percent": percent,
    "taken": lambda exposure: f"{100 * exposure:.2g} %",
    "removed": _removed,
    "effect": effect_range,
    "change": change_words,
    "shares": _shares,
    "responses": _responses,
    "per percent": lambda x: "" if x is None else f" ({outputs_per_percent(x)})",
    # names and counts
    "names": names,
    "layer": layer_name,
    "counting": _counting,
    "these layers": lambda some: (
        f"the scale-invariant ones ({names(some)})" if some else "these layers"
    ),
    "and the": " and the ".join,
    "counts": lambda counts: ", ".join(f"{kind} in {count}" for kind, count in counts.items()),
    "value": _value,
    "settings": lambda pairs: ", ".join(
        f"{key} {_value(a)} and {_value(b)}" for key, (a, b) in pairs.items()
    ),
    "steps": lambda x: f"steps {x[0]} to {x[1]}" if x[0] > 1 else f"the {x[1]} steps of the run",
    "lengths": lambda x: f"{x[0]} and {x[1]} steps, " if x[0] != x[1] else "",
    "damaged": _damaged,
    "not finite": _not_finite,
    "more like it": _more_like_it,
    # what is added to a sentence under a condition
    "at": lambda step: "" if step is None else f" at step {step}",
    "enough steps": lambda x: (
        f" At this rate it takes about {step_count(x)} steps, or proportionally more decay."
        if x
        else ""
    ),
    "clip": lambda x: f", under a KL clip that cuts them to {times(x)} on average" if x else "",
    # Adam's law is SGD's as long as it remembers the norms of the start (`laws.memory`)
    "at least": lambda remembers: "at least " if remembers else "about ",
    "or scale-free": lambda x: ', or use damping_scaling="scale-free"' if x else "",
    "turned by decay": lambda by_lr: (
        "" if by_lr else " It sets how far each step turns their weights."
    ),
    # other reasons
    "sentence": lambda why: sentence(why),
    "by layers": lambda groups: "; ".join(_by_layers(groups)),
    "and then": lambda reasons: "".join(f" {sentence(why)}" for why in reasons),
    # where the runs are
    "give baseline": _give_baseline,
    "more seeds": _more_seeds,
    "record": _record,
    "record the same": lambda places: "" if places.all_ours else "record the same probes there",
    "attribute": _attribute,
    "schedule": lambda places: commands.schedule(places.run),
}


class _Formatter(string.Formatter):
    """`{data:kind}` as `KINDS` has it, else as Python does."""

    def format_field(self, value: Any, format_spec: str) -> str:
        kind = KINDS.get(format_spec)
        return format(value, format_spec) if kind is None else kind(value)


def sentence(why: Because, places: Places | None = None) -> str:
    """A reason in words: a sentence or, for layers and remedies, part of one.

    `places`: where the runs are, for commands that use them.
    """
    return _Formatter().format(why.reason.value, places=places or Places(), **why.data)
