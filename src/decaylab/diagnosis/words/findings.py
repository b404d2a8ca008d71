"""What was found: verdicts with their reasons, remedies and layers, and what was left out."""

from collections.abc import Iterable

from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.effects import Change, ComparedWith
from decaylab.diagnosis.mechanisms import Finding, LayerRow
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.diagnosis.words.phrases import (
    LARGER,
    QUANTITIES,
    as_sentence,
    change_words,
    effect_range,
)
from decaylab.diagnosis.words.reasons import sentence

USUAL = {
    Mechanism.EFFECTIVE_LR: "effective_lr",
    Mechanism.JACOBIAN: "jacobian_norm",
    Mechanism.DAMPING: "effective_damping",
}


def finding_text(finding: Finding) -> str:
    """Why, in sentences."""
    return " ".join(as_sentence(sentence(why)) for why in finding.reasons)


def remedy_text(finding: Finding, places: Places, above: Reason | None = None) -> str:
    """What would decide it; "" if it is decided. The reason `above` is not repeated."""
    texts = [
        'see "Next" above' if why.reason is above else sentence(why, places)
        for why in finding.remedies
    ]
    return "; ".join(dict.fromkeys(text for text in texts if text))


def first_texts(first: Iterable[tuple[str, Because]]) -> list[str]:
    """What to know first, each once, with the runs it is about."""
    about: dict[str, list[str]] = {}
    for name, why in first:
        about.setdefault(sentence(why), []).extend([name] if name else [])
    return [f"{', '.join(runs)}: {said}" if runs else said for said, runs in about.items()]


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
    return change_words(Change(quantity, finding.effect), spread=spread)


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


def compared(diagnosis: Diagnosis) -> str:
    """The runs, and what they are compared with."""
    sides = [", ".join(names) for names in (diagnosis.runs, diagnosis.baselines) if names]
    return " against ".join(sides)


def follow_texts(diagnosis: Diagnosis) -> list[str]:
    """What follows, a sentence or more each."""
    return [as_sentence(sentence(why, diagnosis.places)) for why in diagnosis.follows]
