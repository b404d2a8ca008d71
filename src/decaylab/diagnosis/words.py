"""The words of diagnosis and advice: reasons with their data, and texts about a whole result.

Nothing is decided here, and nothing reads what is written here.
"""

import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from decaylab.diagnosis import commands
from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.effects import Change, ComparedWith, Effect, Motion
from decaylab.diagnosis.mechanisms import Finding, LayerRow, SecondOrderShares
from decaylab.diagnosis.outcome import Helped, Outcome
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.records.files import without_nan
from decaylab.records.settings import VECTORS

if TYPE_CHECKING:
    from decaylab.diagnosis.advice import GroupAdvice

QUANTITIES = {
    "effective_lr": "effective learning rate",
    "rotation": "angle per step",
    "jacobian_norm": "squared Jacobian norm",
    "kfac_gn_norm": "K-FAC Gauss-Newton norm",
    "gn_norm": "Gauss-Newton norm",
    "effective_damping": "effective damping",
    "weight_norm": "layer's own norm",
}
LARGER = {"effective_lr", "rotation"}  # decay makes these grow and the others shrink
USUAL = {
    Mechanism.EFFECTIVE_LR: "effective_lr",
    Mechanism.JACOBIAN: "jacobian_norm",
    Mechanism.DAMPING: "effective_damping",
}
MOST_NAMES = 4


# ---------------------------------------------------------------- numbers and names


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent below a million.

    >>> [three_digits(x) for x in (1.854, 0.012345, 1574.2, 2.3e7)]
    ['1.85', '0.0123', '1570', '2.3e+07']
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if 1000 <= rounded < 1e6 else f"{rounded:.3g}"


def _steps(value: float) -> str:
    """About how many steps: a whole number, at least one."""
    return three_digits(max(round(value), 1))


def factor(value: float) -> str:
    """A factor without its x; near one with two decimals, which count there.

    >>> [factor(x) for x in (0.0123, 0.84, 1.0412, 3.97, 12.4, 1574.2)]
    ['0.012', '0.84', '1.04', '4.0', '12', '1570']
    """
    if value < 0.0995:
        return f"{value:.2g}"
    if value < 9.95:
        return f"{value:.{2 if value < 1.995 else 1}f}"
    return f"{value:.0f}" if value < 999.5 else three_digits(value)


def times(value: float) -> str:
    """A factor: 1.60x, 0.62x, 4.0x."""
    return f"{factor(value)}x"


def names(layers: Iterable[str]) -> str:
    """Some of them, and how many more."""
    shown = list(layers)
    rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + rest


def _layer(name: str) -> str:
    """A layer in a sentence; the number that is its whole name in an nn.Sequential needs a word."""
    return f"layer {name}" if name.isdigit() else name


def effect_range(effect: Effect) -> str:
    """The factor and its range: 1.85x (1.80 to 1.91 over layers)."""
    return f"{times(effect.value)}{_spread(effect)}"


def _least(effect: Effect) -> str:
    """The factor, and whether it is a lower estimate: "22x", "at least 22x"."""
    return f"at least {times(effect.value)}" if effect.least else times(effect.value)


def _range(values: Sequence[float], written: Callable[[float], str]) -> str:
    """From the smallest to the largest; one value if both are written alike."""
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low} to {high}"


def _spread(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return ""
    low, high = factor(effect.low), factor(effect.high)
    return f" ({low} to {high} over {effect.spread})" if low != high else ""


def _percent(share: float) -> str:
    return f"{100 * share:z.0f} %"


def _responded(percent: float) -> str:
    """Percent of the outputs; 0 for what rounding and eps leave of exact invariance."""
    return "0" if percent < 5e-4 else f"{percent:.2g}"


def _per_percent(response: float) -> str:
    return f"outputs change {_responded(response)} % per percent"


def _removed(taken: float) -> str:
    return f"{100 * -math.expm1(-taken):.2g} %"


def _ended(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _change(change: Change, *, spread: bool = True) -> str:
    """What a quantity is with decay: "The angle per step is 1.54x larger with decay"."""
    effect, grows = change.effect, change.quantity in LARGER
    if effect.value < 1:
        effect, grows = effect.inverse(), not grows
    kind = "larger" if grows else "smaller"
    alone = effect.source is not ComparedWith.BASELINE
    than = " than a reconstruction without it" if alone else ""
    quantity = QUANTITIES[change.quantity]
    text = f"The {quantity} is {times(effect.value)} {kind} with decay{than}"
    return f"{text}{_spread(effect)}" if spread else text


# ---------------------------------------------------------------- reasons and their data


def _not_finite(rows: Sequence[str]) -> str:
    were, are = ("values were", "are") if len(rows) > 1 else ("value was", "is")
    return f"{len(rows)} {were} not finite ({', '.join(sorted({*rows})[:3])}) and {are} left out"


def _damaged(lines: Sequence[str]) -> str:
    several = f"{len(lines)} lines are damaged and left out, the first: " * (len(lines) > 1)
    return f"{several}{lines[0]}"


def _shares(shares: SecondOrderShares) -> str:
    estimated = " (a rough estimate)" if shares.estimated else ""
    with_decay, without = (_percent(share or 0.0) for share in (shares.run, shares.baseline))
    return f"{with_decay} with decay, {without} without{estimated}"


def _responses(responses: Mapping[str, float]) -> str:
    return _range(list(responses.values()), _responded)


def _counting(counting: tuple[list[str], bool]) -> str:
    layers, gains = counting
    return names([*layers, *(["the gains of normalisations"] if gains else [])])


def _more_like_it(others: int) -> str:
    return f" There {'is' if others == 1 else 'are'} {others} more like it." if others else ""


def _value(setting: Any) -> str:
    return "not set" if setting is None else str(setting)


def _watched_in(*addresses: commands.Address) -> str:
    return "recorded by " + " and ".join(f'watch(..., folder="{x.folder}")' for x in addresses)


def _give_baseline(places: Places) -> str:
    run = places.run
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
    again = f"train another seed{' of each' if baselines else ''}"
    if places.all_ours:
        seed = 1 + max(address.seed or 0 for address in (*places.runs, *baselines))
        commands_ = [commands.train_again(each, seed=seed) for each in (run, *baselines[:1])]
        trained = " and ".join(f"`{command}`" for command in commands_)
        return f"{again} ({trained}), then `{commands.diagnose_all_seeds(run)}`"
    if not all(address.folder for address in (*places.runs, *baselines)):
        return f"{again}, then `{commands.diagnose([run, run], [run, run])}`"
    new = [address.beside(f"seed-{1 + len(places.runs)}") for address in (run, *baselines[:1])]
    command = commands.diagnose([*places.runs, new[0]], [*baselines, *new[1:]])
    return f"{again}, {_watched_in(*new)}, then `{command}`"


def _record(places: Places) -> str:
    if not places.all_ours:
        return ' in all runs, with watch(..., probes="diagnosis", inputs=batch)'
    probes = [commands.probe(run) for run in (*places.runs, *places.baselines)]
    return ": " + " and ".join(f"`{probe}`" for probe in probes)


def _attribute(places: Places) -> str:
    command, where = "decaylab.attribute", ", in your own loop (docs/attribution.md)"
    if places.run.ours and places.run.folder:
        command, where = commands.attribute(places.run), ""
    return f"`{command}` separates the mechanisms by experiment{where}"


KINDS: dict[str, Callable[[Any], str]] = {
    # numbers
    "times": times,
    "digits": three_digits,
    "percent": _percent,
    "taken": lambda exposure: f"{100 * exposure:.2g} %",
    "removed": _removed,
    "effect": effect_range,
    "change": _change,
    "shares": _shares,
    "responses": _responses,
    "per percent": lambda x: "" if x is None else f" ({_per_percent(x)})",
    # names and counts
    "names": names,
    "layer": _layer,
    "counting": _counting,
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
        f" At this rate it takes about {three_digits(x)} steps, or proportionally more decay."
        if x
        else ""
    ),
    "clip": lambda x: f", under a KL clip that cuts them to {times(x)} on average" if x else "",
    # Adam's law is SGD's as long as it remembers the norms of the start (`laws.memory`)
    "at least": lambda power: "at least " if power == 1 else "about ",
    "or scale-free": lambda x: ', or use damping_scaling="scale-free"' if x else "",
    "turned by decay": lambda by_lr: (
        "" if by_lr else " It sets how far each step turns their weights."
    ),
    # other reasons
    "sentence": lambda why: sentence(why),
    "sentences": lambda reasons: "; ".join(map(sentence, reasons)),
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


# ---------------------------------------------------------------- the one sentence


def headline(diagnosis: Diagnosis) -> str:
    """Whether decay helped, through what, and what to try next."""
    outcome, acts = diagnosis.outcome, " and ".join(_ways(diagnosis))
    if not diagnosis.decays:
        what = "This run has no weight decay"
        if _troubled(diagnosis, Reason.LOST_TO_ROUNDING):
            what = "Rounding undoes all weight decay of this run"
        elif _troubled(diagnosis, Reason.NOTHING_RECORDED):
            what = "There is nothing to judge"
        return f"{what}. {_next(diagnosis)}."
    if outcome.verdict in (Helped.UNKNOWN, Helped.NOT_COMPARED) and not any(outcome.diverged):
        missing = "no loss or score was logged"
        if outcome.name:
            missing = f"the name {outcome.name!r} does not say whether larger is better"
        if outcome.verdict is Helped.NOT_COMPARED:
            missing = "there is no comparable run without decay"
        mechanisms = f"Decay {acts}" if acts else _no_way(diagnosis)
        return f"{mechanisms}. Whether it helped is unknown: {missing}. {_next(diagnosis)}."
    if not acts or all(outcome.diverged):
        way = "" if any(outcome.diverged) else f" {_no_way(diagnosis)}."
        return f"{_outcome(outcome)}.{way} {_next(diagnosis)}."
    same = outcome.verdict is Helped.UNDECIDED
    mechanisms = f", though decay {acts}" if same else f": decay {acts}"
    return f"{_outcome(outcome)}{mechanisms}. {_next(diagnosis)}."


def _outcome(outcome: Outcome) -> str:
    if any(outcome.diverged):
        return _diverged(outcome)
    name = outcome.name.replace("_", " ").replace("/", " ")
    ends = _told_apart(outcome.run, outcome.baseline)
    numbers = f"{name} {ends[0]} with decay, {ends[1]} without"
    seeds = "one seed"
    if outcome.interval is not None:
        count = f"{outcome.seeds[0]} and {outcome.seeds[1]} seeds"
        seeds = f"{_better(*outcome.interval)}, 95 % interval, {count}"
    elif outcome.seeds != (1, 1):
        seeds = f"{outcome.seeds[0]} against {outcome.seeds[1]} seeds"
    words = {
        Helped.YES: "Decay helped",
        Helped.NO: "Decay hurt",
        Helped.UNDECIDED: "Decay made no clear difference",
        Helped.BETTER: "The run with decay ended{} better",
        Helped.WORSE: "The run with decay ended{} worse",
    }
    slight = abs(outcome.gain) < RULES.slight * abs(outcome.baseline)
    slightly = " slightly" if slight and outcome.interval is None else ""
    return f"{words[outcome.verdict].format(slightly)} ({numbers}; {seeds})"


def _told_apart(*values: float) -> list[str]:
    """Numbers of four digits, or of as many as tell them apart."""
    written: list[str] = []
    for digits in range(4, 10):
        written = [f"{value:#.{digits}g}".rstrip(".") for value in values]
        if len(set(written)) == len(set(values)):
            break
    return written


def _diverged(outcome: Outcome) -> str:
    (with_decay, without), (runs, baselines) = outcome.diverged, outcome.seeds
    if not baselines:
        return "The run diverged" if runs == 1 else f"{with_decay} of {runs} runs diverged"
    if runs == baselines == 1:
        if with_decay and without:
            return "Both runs diverged, with decay and without"
        which, other = ("with", "without") if with_decay else ("without", "with")
        return f"The run {which} decay diverged, and the one {other} did not (one seed)"
    return (
        f"{with_decay} of {runs} runs with decay diverged, and {without} of {baselines} runs"
        " without"
    )


def _better(low: float, high: float) -> str:
    if low >= 0:
        return f"better by {low:.3g} to {high:.3g}"
    if high <= 0:
        return f"worse by {-high:.3g} to {-low:.3g}"
    return f"between {-low:.3g} worse and {high:.3g} better"


def _ways(diagnosis: Diagnosis) -> list[str]:
    """What decay does, for each mechanism through which it acts."""
    ways = []
    for finding in diagnosis.findings:
        if finding.verdict is not Verdict.ACTS or finding.effect is None:
            continue
        changed = _least(finding.effect)
        raises = f"raises the effective learning rate {changed}"
        if finding.quantity == "rotation":
            raises = f"makes each step turn {_turned_layers(finding, diagnosis)} {changed} as far"
        ways.append(
            {
                Mechanism.EFFECTIVE_LR: raises,
                Mechanism.JACOBIAN: f"shrinks the {QUANTITIES[finding.quantity]} {changed}",
                Mechanism.DAMPING: f"lowers K-FAC's effective damping {changed}",
            }[finding.mechanism]
        )
    return ways


def _turned_layers(finding: Finding, diagnosis: Diagnosis) -> str:
    """The layers of a finding, among those with decay, in few words."""
    turned = [row.layer for row in finding.layers if row.effect]
    decayed = {m.layer for m in _moved(diagnosis)} | set(turned)
    if len(turned) == len(decayed):
        return "the weights"
    if len(turned) > 2:
        return f"the {len(turned)} of {len(decayed)} layers whose size hardly matters"
    return " and ".join(map(_layer, turned))


def _no_way(diagnosis: Diagnosis) -> str:
    undecided = [f.mechanism for f in diagnosis.findings if f.verdict is Verdict.CANNOT_TELL]
    text = "Decay acts through none of the three mechanisms"
    if undecided:
        text = f"What decay does is still open ({', '.join(undecided)})"
    if other_way := [f for f in diagnosis.findings if f.opposite]:
        return "; ".join([text, *map(_other_way, other_way)])
    moved = _moved(diagnosis)
    turned = [m for m in moved if _turned(m) >= RULES.acts]
    if not turned:
        return text
    who = _layer(turned[0].layer) if len(turned) == 1 else f"{_count(turned, moved)} layers"
    text += f", but it makes {who} turn {times(geometric_mean(map(_turned, turned)))} as far"
    norms = [m.by_decay for m in turned if m.by_decay is not None]
    return text + (f", at {times(geometric_mean(norms))} the norm" if norms else "")


def _other_way(finding: Finding) -> str:
    """What changed, without its range: "the angle per step is 2.9x smaller with decay"."""
    text = effect_words(finding, spread=False)
    return text[0].lower() + text[1:]


def _troubled(diagnosis: Diagnosis, reason: Reason) -> bool:
    """Whether this is said of a run with decay, before all else."""
    return any(name in diagnosis.runs and why.reason is reason for name, why in diagnosis.first)


def next_reason(diagnosis: Diagnosis) -> Reason | None:
    """What to try next, if a finding may ask for the same."""
    outcome = diagnosis.outcome
    if not diagnosis.decays or outcome.diverged[0]:
        return None
    if (first := diagnosis.findings[0]).because_of(Reason.NONE_JUDGEABLE) is not None:
        return first.remedies[0].reason
    if outcome.verdict is Helped.NOT_COMPARED:
        return Reason.GIVE_BASELINE
    unsure = (Helped.BETTER, Helped.WORSE, Helped.UNDECIDED)
    return Reason.MORE_SEEDS if outcome.verdict in unsure else None


def _next(diagnosis: Diagnosis) -> str:
    """What to try next: something to type or do."""
    places, outcome = diagnosis.places, diagnosis.outcome
    if _troubled(diagnosis, Reason.NOTHING_RECORDED):
        return f"Next: {sentence(Because(Reason.RECORD_MORE))}"
    if not diagnosis.decays:
        lost = _troubled(diagnosis, Reason.LOST_TO_ROUNDING)
        precise = " and float32 weights" if lost else ""
        return f"Next: train the same with decay{precise}, and compare"
    if outcome.verdict is Helped.UNKNOWN and not any(outcome.diverged):
        named = "under a name with loss or score in it " if outcome.name else ""
        log = f"log the outcome {named}(`watched.log(test_loss=...)`)"
        return f"Next: {log} in runs with and without decay"
    if (reason := next_reason(diagnosis)) is not None:
        return f"Next: {sentence(Because(reason), places)}"
    if outcome.diverged[0]:
        lower = "a lower learning rate"
        return f"Next: {lower}, in both" if outcome.diverged[1] else f"Next: less decay, or {lower}"
    if outcome.verdict is Helped.NO:
        return "Next: try less decay, about a third as much"
    if diagnosis.findings[0].verdict is Verdict.ACTS:
        return f"Next: `{commands.suggest(places.run)}` finds the decay that acts in this budget"
    return "Next: try half and twice the decay"


# ---------------------------------------------------------------- parts of a page


def finding_text(finding: Finding) -> str:
    """Why, in sentences."""
    return " ".join(_ended(sentence(why)) for why in finding.reasons)


def remedy_text(finding: Finding, places: Places, above: Reason | None = None) -> str:
    """What would decide it; "" if it is decided. The reason `above` is not repeated."""
    texts = [
        'see "Next" above' if why.reason is above else sentence(why, places)
        for why in finding.remedies
    ]
    return "; ".join(dict.fromkeys(text for text in texts if text))


def first_text(name: str, why: Because) -> str:
    """What to know first, with the run it is about."""
    return f"{name}: {sentence(why)}" if name else sentence(why)


def verdict_title(finding: Finding) -> str:
    """What decay does to the mechanism: "Decay shrinks the Jacobian norm"."""
    name = str(finding.mechanism)
    if finding.verdict is Verdict.CANNOT_TELL:
        return f"{name[0].upper()}{name[1:]}: cannot tell yet"
    if finding.because_of(Reason.ONLY_KFAC_DAMPS) is not None:
        return "No effective damping"
    if finding.verdict is Verdict.DOES_NOT_ACT:
        if finding.opposite and finding.quantity == "rotation":
            return "Each step turns the weights less far with decay"
        if finding.opposite:
            return f"The {name} changes the other way"
        verb = "does not act on" if finding.effect is None else "hardly changes"
        return f"Decay {verb} the {name}"
    if finding.quantity == "rotation":
        return "Decay makes each step turn the weights further"
    verbs = {Mechanism.JACOBIAN: "shrinks", Mechanism.DAMPING: "lowers"}
    return f"Decay {verbs.get(finding.mechanism, 'raises')} the {name}"


def layer_heading(finding: Finding) -> str:
    """The heading of the factors by layer."""
    key = finding.layer_quantity or finding.quantity or USUAL[finding.mechanism]
    return f"{QUANTITIES[key]}: how much {'larger' if key in LARGER else 'smaller'}"


def effect_words(finding: Finding, *, spread: bool = True) -> str:
    """What changed, in which direction and by what factor; "" if nothing was compared."""
    if finding.effect is None:
        return ""
    quantity = finding.quantity or USUAL[finding.mechanism]
    return _change(Change(quantity, finding.effect), spread=spread)


def records_words(finding: Finding) -> str:
    """Which rows, how many, over which steps."""
    effect = finding.effect
    if effect is None:
        return ""
    how = "a reconstruction"
    if effect.source is ComparedWith.BASELINE:
        how = "the baseline"
    counted = "1 record" if effect.records == 1 else f"{effect.records} records"
    steps = f"steps {effect.steps[0]} to {effect.steps[1]}"
    if effect.steps[0] == effect.steps[1]:
        steps = f"step {effect.steps[0]}"
    return f"from {', '.join(effect.probes)}: {counted}, {steps}, compared with {how}"


def layer_text(row: LayerRow) -> str:
    """The effect on a layer, or why there is none."""
    if row.effect is not None:
        return effect_range(row.effect)
    return sentence(row.why) if row.why is not None else ""


def layer_table(finding: Finding) -> list[tuple[str, str, str]]:
    """(layer, verdict, effect or reason); layers without effect share a row per reason."""
    rows: list[tuple[str, str, str]] = []
    for row in finding.layers:
        verdict, text = str(row.verdict or "-"), layer_text(row)
        if rows and row.effect is None and rows[-1][1:] == (verdict, text):
            rows[-1] = (f"{rows[-1][0]}, {row.layer}", verdict, text)
        else:
            rows.append((row.layer, verdict, text))
    return rows


def left_out(diagnosis: Diagnosis) -> dict[str, str]:
    """The skipped layers by reason, as one string each."""
    by_reason: dict[str, list[str]] = {}
    for layer, why in diagnosis.skipped.items():
        by_reason.setdefault(sentence(why), []).append(layer)
    return {reason: ", ".join(layers) for reason, layers in by_reason.items()}


# ---------------------------------------------------------------- how layers turn


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
        "decay time": column((m.timescale if differ else None for m in motions), _steps),
        "turns": column((m.turned.value if m.turned else None for m in motions), times),
        "norm": column((m.by_decay for m in motions), times),
        "size": column((m.size_response for m in motions), _responded),
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


def _moved(diagnosis: Diagnosis) -> list[Motion]:
    """The layers with decay, except gains and other vectors."""
    return [m for m in diagnosis.motions if m.role not in VECTORS and m.decayed]


def insight(diagnosis: Diagnosis) -> list[str]:
    """What the motions show, each checkable in the table."""
    moved = _moved(diagnosis)
    known_turns = [m for m in moved if m.turned is not None]
    turned = [m for m in known_turns if _turned(m) >= RULES.acts]
    sentences = []
    if known_turns and not turned:
        most = max(known_turns, key=_turned)
        who = "Decay" if len(known_turns) == len(moved) else "Where it is known, decay"
        sentences.append(
            f"{who} makes no layer turn {times(RULES.acts)} as far per step: it is"
            f" {times(_turned(most))} at most ({_layer(most.layer)})."
        )
    if turned:
        most = max(turned, key=_turned)
        further = _least(most.turned) if most.turned is not None else ""
        text = f"Decay makes {_layer(most.layer)} turn {further} as far per step"
        text += "" if diagnosis.baselines else " as the same gradients would without it"
        if most.by_decay is not None:
            text += f", at {times(most.by_decay)} the norm"
        if most.role == "adapter":
            text += "; what it adds to the frozen network depends on its size"
        elif most.size_response is not None:
            little = most.size_response <= RULES.size_little
            matters = "hardly matters" if little else "matters too"
            text += f"; its size itself {matters} ({_per_percent(most.size_response)})"
        sentences.append(f"{text}.")
    if len(turned) > 1:
        all_turned = geometric_mean(_turned(m) for m in turned)
        sentences.append(
            f"{_count(turned, moved).capitalize()} layers with decay turn at least"
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
    off = _range([m.foretold for m in known if m.foretold is not None], times)
    return [
        f"Estimated from this run alone, decay's {factors} on the"
        f" {' or the '.join(sorted(quantities, reverse=True))} would be {off} as large."
    ]


def _count(some: Sequence[Motion], every: Sequence[Motion]) -> str:
    """How many of all: "3 of 7", "both", "all 7"."""
    if len(some) < len(every):
        return f"{len(some)} of {len(every)}"
    return "both" if len(every) == 2 else f"all {len(every)}"


def _turned(m: Motion) -> float:
    return m.turned.value if m.turned is not None else 1.0


def _decay_time(moved: Sequence[Motion]) -> str:
    needs = _range([m.timescale for m in moved if m.timescale], _steps)
    epochs = [m.epochs for m in moved if m.epochs]
    in_epochs = f" ({three_digits(max(epochs))} epochs)" if epochs else ""
    return (
        f"Decay needs about {needs} steps{in_epochs} to take full effect at the mean lr; the run"
        f" has {moved[0].steps}."
    )


def _balance(motions: Sequence[Motion]) -> str:
    apart = [(m.rotation or 1.0) / (m.expected or 1.0) for m in motions if not m.settled]
    near = _percent(RULES.settled - 1)
    if not apart:
        return f"Every layer with decay turns as far as at its balance, within {near}."
    factors = _range(apart, times)
    if len(motions) == 1:
        return f"At its balance {_layer(motions[0].layer)} would turn {times(1 / apart[0])} as far."
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


# ---------------------------------------------------------------- all of it


def compared(diagnosis: Diagnosis) -> str:
    """The runs, and what they are compared with."""
    sides = [", ".join(names) for names in (diagnosis.runs, diagnosis.baselines) if names]
    return " against ".join(sides)


def follow_texts(diagnosis: Diagnosis) -> list[str]:
    """What follows, a sentence or more each."""
    return [_ended(sentence(why, diagnosis.places)) for why in diagnosis.follows]


def plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, for JSON: the data, and the words for them."""

    def written(reasons: Iterable[Because]) -> list[dict[str, str]]:
        codes = [why.reason.name.lower().replace("_", "-") for why in reasons]
        texts = [sentence(why, diagnosis.places) for why in reasons]
        return [{"reason": a, "text": b} for a, b in zip(codes, texts, strict=True)]

    findings = [
        asdict(replace(f, layers=(), reasons=(), remedies=()))
        | {
            "title": verdict_title(f),
            "text": finding_text(f),
            "reasons": written(f.reasons),
            "remedies": written(f.remedies),
            "layers": [
                asdict(replace(row, why=None)) | {"why": sentence(row.why) if row.why else ""}
                for row in f.layers
            ],
        }
        for f in diagnosis.findings
    ]
    values: dict[str, Any] = {
        "headline": headline(diagnosis),
        "runs": list(diagnosis.runs),
        "baselines": list(diagnosis.baselines),
        "outcome": asdict(diagnosis.outcome),
        "first": [first_text(*item) for item in diagnosis.first],
        "findings": findings,
        "motions": [asdict(m) for m in diagnosis.motions],
        "insights": insight(diagnosis),
        "follows": follow_texts(diagnosis),
        "skipped": {layer: sentence(why) for layer, why in diagnosis.skipped.items()},
    }
    return dict(without_nan(values))


def group_text(group: "GroupAdvice", budget: int) -> str:
    """The suggestion for a group of layers that are stepped alike."""
    low, high = group.spread
    spread = f" ({low:.3g} to {high:.3g} over layers)" if low != high else ""
    who = f"{group.optimizer}: " if group.optimizer else ""
    text = (
        f"suggested for {names(group.layers)}: {who}{group.decay} weight decay of"
        f" {group.weight_decay:.3g}{spread} at lr {group.lr:.3g}"
    )
    if group.steps is None or RULES.timescales * group.steps < RULES.alike * budget:
        return f"{text}, to act within {budget} steps"
    needed = three_digits(RULES.timescales * group.steps)
    return f"{text}. It needs about {needed} steps to act, more than the {budget} of the budget"


def note_texts(notes: Iterable[Because]) -> str:
    """Notes on a suggestion, as one string."""
    return "; ".join(sentence(note) for note in notes)
