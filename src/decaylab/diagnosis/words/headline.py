"""The one sentence above everything: whether decay helped, through what, and what to try next."""

from statistics import geometric_mean

from decaylab.diagnosis import commands
from decaylab.diagnosis.mechanisms import Finding
from decaylab.diagnosis.outcome import Helped, Outcome
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.diagnosis.words.findings import effect_words
from decaylab.diagnosis.words.motions import counted, decayed_motions, turn_factor
from decaylab.diagnosis.words.phrases import QUANTITIES, effect_times, layer_name, times
from decaylab.diagnosis.words.reasons import sentence


def headline(diagnosis: Diagnosis) -> str:
    """Whether decay helped, through what, and what to try next."""
    outcome, (*ways, last) = diagnosis.outcome, _ways(diagnosis) or [""]
    acts = f"{', '.join(ways)} and {last}" if ways else last
    if not diagnosis.decays:
        what = "This run has no weight decay"
        if len(diagnosis.runs) > 1:
            what = "These runs have no weight decay"
        if _troubled(diagnosis, Reason.LOST_TO_ROUNDING):
            what = "Rounding undoes all weight decay of this run"
        elif _troubled(diagnosis, Reason.NOTHING_RECORDED):
            what = "There is nothing to judge"
        elif _unknown_decay(diagnosis) is not None:
            what = "Whether this run has weight decay is not known"
        return f"{what}. {_next(diagnosis)}."
    if outcome.verdict in (Helped.UNKNOWN, Helped.NOT_COMPARED) and not any(outcome.diverged):
        missing = "no loss or score was logged"
        if outcome.step is not None:
            missing += f" in all runs by step {outcome.step}, where the shortest ends"
        if outcome.name:
            missing = f"the name {outcome.name!r} does not say whether larger is better"
        if outcome.verdict is Helped.NOT_COMPARED:
            missing = "it was not compared with a run without decay"
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
    at = "" if outcome.step is None else f" at step {outcome.step}"
    numbers = f"{name} {ends[0]} with decay, {ends[1]} without{at}"
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
        Helped.BETTER: "The run with decay {}{} better",
        Helped.WORSE: "The run with decay {}{} worse",
    }
    slight = abs(outcome.gain) < RULES.slight * abs(outcome.baseline)
    state = "ended" if outcome.step is None else "was"
    slightly = " slightly" if slight and outcome.interval is None else ""
    return f"{words[outcome.verdict].format(state, slightly)} ({numbers}; {seeds})"


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
        changed = effect_times(finding.effect)
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
    decayed = {m.layer for m in decayed_motions(diagnosis)} | set(turned)
    if len(turned) == len(decayed):
        return "the weights"
    if len(turned) > 2:
        return f"the {len(turned)} of {len(decayed)} layers whose size hardly matters"
    return " and ".join(map(layer_name, turned))


def _no_way(diagnosis: Diagnosis) -> str:
    undecided = [f.mechanism for f in diagnosis.findings if f.verdict is Verdict.CANNOT_TELL]
    text = "Decay acts through none of the three mechanisms"
    if undecided:
        text = f"What decay does is still open ({', '.join(undecided)})"
    if other_way := [f for f in diagnosis.findings if f.opposite]:
        return "; ".join([text, *map(_other_way, other_way)])
    moved = decayed_motions(diagnosis)
    turned = [m for m in moved if turn_factor(m) >= RULES.acts]
    if not turned:
        return text
    who = layer_name(turned[0].layer) if len(turned) == 1 else f"{counted(turned, moved)} layers"
    text += f", but it makes {who} turn {times(geometric_mean(map(turn_factor, turned)))} as far"
    norms = [m.by_decay for m in turned if m.by_decay is not None]
    return text + (f", at {times(geometric_mean(norms))} the norm" if norms else "")


def _other_way(finding: Finding) -> str:
    """What changed, without its range: "the angle per step is 2.9x smaller with decay"."""
    text = effect_words(finding, spread=False)
    return text[0].lower() + text[1:]


def _troubled(diagnosis: Diagnosis, reason: Reason) -> bool:
    """Whether this is said of a run with decay, before all else."""
    return any(name in diagnosis.runs and why.reason is reason for name, why in diagnosis.first)


def _unknown_decay(diagnosis: Diagnosis) -> Reason | None:
    """What to do where it is not known whether anything decays; None where that is known."""
    remedies = {Reason.NO_SETTINGS: Reason.GIVE_SETTINGS, Reason.UNWATCHED: Reason.WATCH_ALL}
    return next((do for why, do in remedies.items() if _troubled(diagnosis, why)), None)


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
    if not diagnosis.decays and (remedy := _unknown_decay(diagnosis)) is not None:
        return f"Next: {sentence(Because(remedy))}"
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
