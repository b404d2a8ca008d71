"""The words of diagnosis and advice: the only place where reasons become English.

Nothing is decided here, and nothing reads what is written here.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from decaylab.diagnosis.effects import Effect, Evidence, Motion
from decaylab.diagnosis.outcome import Helped, Outcome
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.verdict import Diagnosis, Finding, opposite

QUANTITIES = {
    "effective_lr": "effective learning rate",
    "rotation": "angle per step",
    "jacobian_norm": "squared Jacobian norm",
    "kfac_gn_norm": "K-FAC Gauss-Newton norm",
    "gn_norm": "Gauss-Newton norm",
    "effective_damping": "effective damping",
    "weight_norm": "layer's own norm",
}
LARGER = {"effective_lr", "rotation"}  # these grow by decay, the others shrink
USUAL = {
    Mechanism.EFFECTIVE_LR: "effective_lr",
    Mechanism.JACOBIAN: "jacobian_norm",
    Mechanism.DAMPING: "effective_damping",
}
SETTING_WORDS = {"momentum": "momentum", "beta1": "beta1"}
MOST_NAMES = 4


def three_digits(value: float) -> str:
    """Three digits that count, without an exponent below a million.

    >>> [three_digits(x) for x in (1.854, 0.012345, 1574.2, 2.3e7)]
    ['1.85', '0.0123', '1570', '2.3e+07']
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if 1000 <= rounded < 1e6 else f"{rounded:.3g}"


def times(value: float) -> str:
    """A factor: 1.6x, 0.62x, 12x."""
    return f"{three_digits(float(f'{value:.2g}') if value < 10 else value)}x"


def names(layers: Sequence[str], most: int = MOST_NAMES) -> str:
    """Some of them, and how many more."""
    more = f" and {len(layers) - most} more" if len(layers) > most else ""
    return ", ".join(layers[:most]) + more


def effect_range(effect: Effect) -> str:
    """The factor and its range: 1.85x (1.80 to 1.91)."""
    if effect.low is None or effect.high is None:
        return times(effect.value)
    return f"{times(effect.value)} ({three_digits(effect.low)} to {three_digits(effect.high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _removed(taken: float) -> str:
    return f"{100 * -math.expm1(-taken):.2g} %"


def _same_or_both(name: str) -> str:
    return QUANTITIES.get(name, name)


# ---------------------------------------------------------------- one sentence per reason


def _differing(why: Because) -> str:
    pairs = ", ".join(f"{key} {mine} and {its}" for key, (mine, its) in why["fields"].items())
    return f"the runs are not comparable ({pairs})"


def _changed(why: Because) -> str:
    effect: Effect = why["effect"]
    quantity = QUANTITIES[why["quantity"]]
    verb = "larger" if why["quantity"] in LARGER else "smaller"
    against = "" if effect.source is Evidence.BASELINE else ", by a reconstruction without decay"
    if why["verdict"] is Verdict.ACTS:
        return f"With decay the {quantity} is {effect_range(effect)} {verb}{against}."
    text = f"The {quantity} changes by {effect_range(effect)}{against}."
    if why["verdict"] is Verdict.CANNOT_TELL:
        return text
    text += " That is too little to matter."
    taken = why["taken"]
    if taken is not None and taken < 1:
        text += f" Decay has removed {_removed(taken)} of the initial weights; a longer run may"
        text += " show more."
    return text


def _opposite_words(why: Because) -> str:
    effect, quantity = why["effect"], QUANTITIES[why["quantity"]]
    verb = "smaller" if why["quantity"] in LARGER else "larger"
    words = effect_range(effect.inverse())
    return f"With decay the {quantity} is {words} {verb}. The mechanism predicts the opposite."


def _shares(why: Because) -> str:
    other = "without (a rough estimate)" if why["estimated"] else "without"
    return f"{_percent(why['run'])} with decay, {_percent(why['baseline'])} {other}"


def _too_little(why: Because) -> str:
    over = f"the {why['last']} steps of the run"
    if why["first"] > 1:
        over = f"steps {why['first']} to {why['last']}"
    return (
        f"Over {over}, decay removed {100 * why['taken']:.2g} % of the weights: too little to act."
    )


def _old_curvature(why: Because) -> str:
    text = (
        "Without damping, K-FAC's step turns the weights by lr, whatever their norm (Eq. 13). But"
        " here it divides by the curvature of earlier weights, and decay has shortened these since:"
    )
    turned = why["turned"]
    if turned is not None:
        return f"{text} steps turn them {effect_range(turned)} as far, as recorded."
    return f"{text} steps are {times(why['longer'])} longer."


def _function(why: Because) -> str:
    what = [*why["layers"], *(["the gains of normalisations"] if why["gains"] else [])]
    verbs = {
        Verdict.ACTS: "changes the function: it makes the Jacobian smaller",
        Verdict.DOES_NOT_ACT: "has little effect on the Jacobian",
        Verdict.CANNOT_TELL: "changes the function. Whether that matters is not decided",
    }
    verb = "goes with a larger Jacobian" if why["opposite"] else verbs[why["verdict"]]
    return f"Decay of the layers whose size counts ({names(what)}) {verb}."


def _schedule(why: Because) -> str:
    # Adam's law is SGD's as long as it remembers the norms of the start (`laws.memory`)
    adam = why["power"] == 1
    least = "at least " if adam else "about "
    growth = "exposure" if adam else f"{why['power']} x exposure"
    return (
        "Without decay, the same motion needs a learning rate that is higher than this run's, by a"
        f" factor that grows to {least}exp({growth}) = {three_digits(why['factor'])}, for these"
        " layers only. (The exposure is the fraction of the weights that decay removes per step,"
        f" summed over the steps: {why['exposure']:.3g}.) `decaylab advise schedule"
        f" {why['run']} --out schedule.csv` writes such a schedule."
    )


def _burst(why: Because) -> str:
    burst, others = why["burst"], why["others"]
    remedy = "a smaller lr or less decay"
    if why["damped"]:
        free = "a larger damping" if why["scale_free"] else 'damping_scaling="scale-free"'
        remedy = f"{free}, {remedy}"
    more = f" There {'is' if others == 1 else 'are'} {others} more like it." if others else ""
    return (
        f"A burst: after step {burst.step} the norm of {burst.layer} grew from {burst.before:.3g}"
        f" to {burst.after:.3g} by the next record.{more} Decay had shortened these weights, which"
        f" makes each step turn them further, until one was too long. What helps: {remedy}, at that"
        " stage."
    )


def _dominates(why: Because) -> str:
    text = (
        "Damping has come to dominate K-FAC: the second-order share of the scale-invariant layers"
        f" is {_percent(why['share'])} at the end. In the remaining directions K-FAC steps like"
        " SGD."
    )
    if why["burst"]:
        return text
    remedy = "Lower the damping" + (', or use damping_scaling="scale-free"' if why["grown"] else "")
    unless = "unless this is K-FAC-F that has fitted its data (no Fisher matrix is left)"
    return f"{text} {remedy}, {unless}."


def _not_finite(why: Because) -> str:
    text = f"{why['count']} values were not finite ({', '.join(why['names'])}) and are left out"
    lasting = why["lasting"]
    return f"{text}, {lasting[0]} to the end: it has probably diverged" if lasting else text


def _damaged(why: Because) -> str:
    if why["count"] == 1:
        return str(why["first"])
    return f"{why['count']} lines are damaged and left out, the first: {why['first']}"


def _record(why: Because) -> str:
    if why["own"]:
        return "record the Jacobian norm of both runs with `decaylab probe RUN --record`"
    return 'record both runs with watch(..., probes="diagnosis", inputs=batch)'


def _setting(why: Because) -> str:
    when = f" at step {why['step']}" if why["step"] is not None else ""
    mine, its = why["pair"]
    return (
        f"the runs are not comparable (layer {why['layer']}: {why['name']} {mine} and {its}{when})"
    )


def _growth(why: Because) -> str:
    seen, least, largest = (three_digits(why[key]) for key in ("seen", "least", "largest"))
    return (
        f"the runs are not comparable (the baseline's scale-invariant layers have {seen} times this"
        f" run's |W|^2 at step {why['step']}, and start and decay explain {least} to {largest}: use"
        " the same data, batch size and seed)"
    )


def _matters(why: Because) -> str:
    ways = {
        Mechanism.EFFECTIVE_LR: "keeps the effective learning rate high: it turns these layers"
        " further per step",
        Mechanism.DAMPING: "keeps the effective damping low",
    }
    return "In this run decay " + " and ".join(ways[way] for way in why["mechanisms"]) + "."


def _direction(why: Because) -> str:
    kind = "scale-invariant layers" if why["exact"] else "layers whose size hardly matters"
    does = "does not change" if why["exact"] else "hardly changes"
    return (
        f"Decay of the {kind} ({names(why['layers'])}) {does} the function by itself. It sets how"
        " far each step turns their weights."
    )


def _response(why: Because) -> str:
    response = why["response"]
    if response is None:
        return "not scale-invariant: its size is part of the function"
    return f"its size is part of the function ({response:.2g} % per percent)"


TEXTS: dict[Reason, str | Callable[[Because], str]] = {
    Reason.DAMAGED: _damaged,
    Reason.DIVERGED: "it diverged at step {step}: only the steps before are judged",
    Reason.RUN_DIVERGED: "it diverged ({message})",
    Reason.NOT_FINITE: _not_finite,
    Reason.PROBABLY_DIVERGED: _not_finite,
    Reason.UNFINISHED: "it is not finished ({status}): {epochs} of {of} epochs are judged",
    Reason.NOTHING_RECORDED: "nothing was recorded: train inside `with watch(model, optimizer):`",
    Reason.BEGINS_LATE: "its records begin at step {step}, so what decay did before is not judged"
    " (with watch(folder=...), a run that is resumed keeps its records)",
    Reason.OPTIMIZER_CHANGED: "its optimizer changed at step {step}: what was before and after is"
    " judged as one",
    Reason.SHARED_PARAMETERS: lambda why: (
        f"two optimizers step {names(why['parameters'])}: what is said of these is of the first"
    ),
    Reason.UNSTEPPED_PARAMETERS: lambda why: (
        f"no watched optimizer steps {names(why['parameters'])}: give watch all of them"
    ),
    Reason.NO_SETTINGS: "the optimizer's settings are not in these records: record them again",
    Reason.TOO_FEW_NORMS: "it has fewer than two records of the norms, so no layer can be judged:"
    " keep `weight_norm` among the probes, and lower `every`",
    Reason.GRADIENTS_ALONG: lambda why: (
        f"{names(why['layers'])}: a normalisation comes next in the model, but the gradients point"
        " along the weights, so they do not count as scale-invariant. To measure it, give"
        " watch(..., inputs=batch)"
    ),
    Reason.EPS_COUNTS: lambda why: (
        f"{names(why['layers'])}: the optimizer's eps is more than a tenth of what it is added to,"
        " so that its steps are neither Adam's nor SGD's. Lower it"
    ),
    Reason.COLLAPSED: lambda why: (
        f"decay has taken nearly all of {names(why['layers'])}: it is too strong. Weights as small"
        " as that are no more scale-invariant, and the factors below mean little"
    ),
    Reason.NO_DECAY: "no layer has weight decay",
    Reason.SWAPPED: "no layer has weight decay, but the baseline has it: did you swap the two?",
    Reason.UNWATCHED: lambda why: (
        f"{names(why['layers'])}: stepped by an optimizer that is not watched, so their decay is"
        " not known"
    ),
    Reason.BASELINE_DECAYS: lambda why: (
        f"the baseline has weight decay{' too' if why['too'] else ''}: judged without the baseline"
    ),
    Reason.OTHER_SPEC: _differing,
    Reason.OTHER_LAYERS: "the runs are not comparable (they have different layers)",
    Reason.OTHER_OPTIMIZER: "the runs are not comparable (layer {layer} has another optimizer)",
    Reason.OTHER_SIZE: lambda why: (
        f"the runs are not comparable (layer {why['layer']}: {why['pair'][0]} and"
        f" {why['pair'][1]} weights)"
    ),
    Reason.OTHER_START: lambda why: (
        f"the runs are not comparable (layer {why['layer']}: norms {why['pair'][0]:.3g} and"
        f" {why['pair'][1]:.3g} at step {why['step']}, before decay can act)"
    ),
    Reason.OTHER_SETTING: _setting,
    Reason.OTHER_LR: lambda why: (
        f"the runs are not comparable (lr {why['pair'][0]:g} and {why['pair'][1]:g} at step"
        f" {why['step']})"
    ),
    Reason.OTHER_GROWTH: _growth,
    Reason.SEED_LEFT_OUT: lambda why: f"left out: {sentence(why['why'])}",
    Reason.DIFFERS: lambda why: f"{why['name']} differs: {why['pair'][0]} and {why['pair'][1]}",
    Reason.STEPS_DIFFER: lambda why: (
        f"steps differ: {why['pair'][0]} and {why['pair'][1]}; only those of both are compared"
    ),
    Reason.FROZEN: "frozen: it is not trained",
    Reason.NOT_STEPPED: "no watched optimizer steps it",
    Reason.NO_LAYER_SETTINGS: "its optimizer's settings are not in the records",
    Reason.RECORDED_ONCE: "its norm was recorded less than twice: record weight_norm more often",
    Reason.ZEROS: "its weights are zero: it has no direction",
    Reason.NEVER_MOVED: "no step has moved it: it has no gradient, or a learning rate of 0",
    Reason.L2_RESCALED: "the optimizer rescales L2",
    Reason.KIND_UNKNOWN: "its decay is of the kind {kind!r}, which takes no fixed fraction",
    Reason.ROUNDED_AWAY: "the weights have 16 bits, in which rounding may undo the decay",
    Reason.TAKES_ALL: "decay is so strong that it takes all of the weights in a step",
    Reason.SIZE_COUNTS: _response,
    Reason.GAIN: "a gain of a normalisation: part of the function",
    Reason.INVARIANCE_UNKNOWN: lambda why: (
        f"How much the size of {names(why['layers'])} counts is not known: it was not measured, or"
        " a gain of zero hides it"
    ),
    Reason.INVARIANT: "scale-invariant: its norm does not change the function",
    Reason.NOT_DECAYED: "not decayed",
    Reason.NOT_KFAC: "not preconditioned by K-FAC",
    Reason.NO_COMMON_STEP: "no records at a common step",
    Reason.NEEDS_BASELINE: "needs a baseline",
    Reason.GRADIENTS_CLIPPED: "its gradients are clipped",
    Reason.NO_SHARES: "its second-order share is not recorded",
    Reason.FEW_SHARES: "its second-order share is recorded too seldom",
    Reason.OLD_FACTORS: "K-FAC's factors remember norms that decay has since changed much",
    Reason.LAW_UNKNOWN: "how its step depends on its norm is not known",
    Reason.ALL_FROZEN: "Every layer is frozen, so decay changes none.",
    Reason.NONE_JUDGEABLE: "No layer is recorded well enough to be judged.",
    Reason.NO_LAYER_DECAYS: "No layer has weight decay.",
    Reason.TOO_LITTLE: _too_little,
    Reason.NO_INVARIANT_DECAYS: "No scale-invariant layer has decay. This mechanism acts on layers"
    " whose size does not count.",
    Reason.NO_INVARIANT: "The size of every trained layer is part of the function. This mechanism"
    " acts on layers whose size does not count.",
    Reason.CLIPPED: lambda why: (
        f"The gradients are clipped at {_percent(why['share'])} of the records. How far such steps"
        " turn weights of another norm is not known."
    ),
    Reason.OLD_CURVATURE: _old_curvature,
    Reason.UNDAMPED_BY_LR: "Without damping, K-FAC's step turns the weights by lr, whatever their"
    " norm (Eq. 13). The norm acts through the damping, see below.",
    Reason.BY_LR: "This optimizer's step turns the weights as far, whatever their norm.",
    Reason.ONLY_KFAC_DAMPS: "Only K-FAC has a damping, and this optimizer is not K-FAC.",
    Reason.NO_KFAC_LAYER: "K-FAC preconditions no scale-invariant layer that has decay.",
    Reason.SCALE_FREE: "The damping is scale-free: it follows the norms, so decay does not change"
    " its effect.",
    Reason.SHARE_UNKNOWN: "The second-order share is not recorded, so it is not known whether"
    " damping matters.",
    Reason.DAMPING_NEGLIGIBLE: lambda why: (
        f"Damping hardly matters: the second-order share is {_shares(why)}."
    ),
    Reason.SHARES: lambda why: f"The second-order share is {_shares(why)}.",
    Reason.SAME_SHARES: "It is the same: the curvature of the normalised weights is lower, too.",
    Reason.ALL_INVARIANT: "Every decayed layer is scale-invariant, so decay does not change the"
    " function by itself. A change of the Jacobian comes through the other two mechanisms.",
    Reason.JACOBIAN_ALONE: "One run does not show what the Jacobian would be without decay.",
    Reason.NO_SENSITIVITY: "Neither a Jacobian nor a Gauss-Newton norm is recorded in both runs at"
    " a common step.",
    Reason.THROUGH_OTHERS: lambda why: (
        f"Part of it may come through the {' and the '.join(why['mechanisms'])} of the"
        " scale-invariant layers."
    ),
    Reason.NOTHING_TO_COMPARE: lambda why: (
        f"There is nothing to compare with: {'; '.join(sentence(x) for x in why['why'])}."
    ),
    Reason.CHANGED: _changed,
    Reason.OPPOSITE: _opposite_words,
    Reason.SOME_LAYERS_MORE: lambda why: (
        f"But in single layers it changes by more: {names(why['layers'])}."
    ),
    Reason.BETWEEN: '"Does not act" ends at {nothing:g}x, and "acts" begins at {acts:g}x.',
    Reason.TOO_EARLY: lambda why: (
        f"Both runs are recorded only up to step {why['step']}, when decay had removed"
        f" {100 * why['taken']:.2g} % of the weights: too early to tell."
    ),
    Reason.MORE_THAN_DECAY: lambda why: (
        f"The {QUANTITIES[why['quantity']]} changes by {effect_range(why['effect'])}. Decay has"
        f" removed {_removed(why['taken'])} of the initial weights, which makes"
        f" {times(why['most'])} at most: the two runs differ in something else too."
    ),
    Reason.SEEDS_DISAGREE: lambda why: (
        "The seeds disagree: "
        + ", ".join(f"{verdict} in {count}" for verdict, count in why["counts"].items())
        + "."
    ),
    Reason.GIVE_BASELINE: "give a baseline, the same run without decay (`decaylab diagnose {run}"
    " --against BASELINE`)",
    Reason.RECORD_IN_BOTH: _record,
    Reason.RECORD_SAME_WAY: "record it in the same way",
    Reason.RECORD_SHARE: lambda why: (
        "record it with `decaylab probe RUN --record`"
        if why["own"]
        else 'record it with watch(..., probes="diagnosis", inputs=batch)'
    ),
    Reason.SAME_STEPS: "record both runs at the same steps (the same every=)",
    Reason.RECORD_FURTHER: "record both runs further into training",
    Reason.SAME_DATA: "give a baseline with the same data, batch size and seed",
    Reason.MORE_SEEDS: lambda why: (
        "train more seeds of both, and give them all (`decaylab diagnose RUN RUN --against BASE"
        " BASE`)"
        if why["baseline"]
        else "train more seeds, or longer"
    ),
    Reason.ATTRIBUTE: lambda why: (
        f"separate the mechanisms by experiment (`decaylab attribute {why['run']}`)"
        if why["own"]
        else "separate the mechanisms by experiment (decaylab.attribute, docs/attribution.md)"
    ),
    Reason.NAME_THE_LAW: 'name its law in its param groups, as group["law"] (docs/extend.md), or'
    " train with SGD, K-FAC or Adam without amsgrad",
    Reason.NO_CLIPPING: "train without clipping, or with Adam",
    Reason.RENEW_CURVATURE: "renew the curvature more often (KFAC's refresh_every, invert_every)",
    Reason.RECORD_MORE: "train inside `with watch(model, optimizer, every=...)`, for several"
    " records",
    Reason.TRAIN_LONGER: "train it for some epochs, with a learning rate at which it does not"
    " diverge",
    Reason.GIVE_INPUTS: 'give watch(..., probes="diagnosis", inputs=batch), which measures how the'
    " outputs answer to each layer's size",
    Reason.WATCH_ALL: "watch all optimizers: watch(model, [first, second])",
    Reason.DIRECTION_ONLY: _direction,
    Reason.MATTERS: _matters,
    Reason.NO_MORE_SECOND_ORDER: "In this run decay keeps the effective damping low, but K-FAC's"
    " steps are no more second-order for it.",
    Reason.NO_EFFECT: "In this run decay of these layers has no effect: it could be left out.",
    Reason.SCHEDULE: _schedule,
    Reason.FUNCTION: _function,
    Reason.NOTHING_YET: "Nothing yet: no layer with decay could be judged.",
    Reason.NOTHING_TO_DROP: "This run has no weight decay to keep or to drop.",
    Reason.BURST: _burst,
    Reason.DAMPING_DOMINATES: _dominates,
    Reason.CHOOSE_BY_OUTCOME: lambda why: f"{_response(why)}: choose its decay by the outcome",
    Reason.DAMPENED_OUT: "its dampening of 1 keeps gradients and L2 out of the momentum",
    Reason.NO_LR: "its learning rate is 0",
    Reason.TAKEN: "decay has taken nearly all of it: suggest from a run with less decay",
    Reason.DOES_NOT_GROW: "its norm does not grow, so no decay is needed to hold it",
    Reason.NO_ROTATION: "how far its steps turn it is not recorded: keep `movement` among watch's"
    " probes",
    Reason.ASK_FOR_LESS: "to turn it so far, decay would take half of it or more a step: ask for"
    " less",
    Reason.NOTHING_HOLDS: lambda why: (
        f"a step adds {three_digits(why['growth'])} of |W|^2 at the target: no decay holds it."
        " Lower the learning rate"
    ),
    Reason.TURNS_BY_LR: "the weights turn by lr, whatever their norm",
    Reason.ROUGH: lambda why: (
        f"rough: up to {why['factor']:.2g} times too {why['way']}; suggest from a run nearer to the"
        " target"
    ),
    Reason.MIXED: "rough: decay takes much of the weights while steps still agree",
    Reason.ON_ITS_WAY: lambda why: (
        f"still on its way from {why['norm']:.3g} to {why['balance']:.3g}, a third of which is left"
        f" after {three_digits(why['steps'])} more steps"
    ),
    Reason.FAR_BALANCE: lambda why: (
        f"the present decay leads from {why['norm']:.3g} to "
        + ("less than a tenth of it" if why["less"] else "more than ten times that")
    ),
    Reason.FOR_THE_BUDGET: lambda why: (
        f"to act within {why['budget']} steps; {times(why['holding'])} as much would hold the first"
        " norm, too slowly"
    ),
    Reason.NO_ONE_VALUE: "no one value is for all of these layers, which differ in optimizer,"
    " learning rate, momentum or kind of decay: give each group its own",
    Reason.NO_SUGGESTION: "no suggestion for any layer whose size does not count; beside each"
    " stands why",
    Reason.NO_CANDIDATE: "no suggestion: the size of every layer counts",
}


def sentence(why: Because) -> str:
    """A reason in words; a sentence or, of layers and remedies, a part of one."""
    text = TEXTS[why.reason]
    return text.format(**why.data) if isinstance(text, str) else text(why)


# ---------------------------------------------------------------- the one sentence


def headline(diagnosis: Diagnosis) -> str:
    """Whether decay helped, through what, and what to try next."""
    return f"{_helped(diagnosis.outcome, diagnosis)}{_through(diagnosis)}. {_next(diagnosis)}."


def _value(value: float) -> str:
    return f"{value:.4g}"


def _helped(outcome: Outcome, diagnosis: Diagnosis) -> str:
    if outcome.verdict is Helped.UNKNOWN:
        return "Whether decay helped is not recorded"
    if outcome.verdict is Helped.NOT_COMPARED:
        return "Whether decay helped cannot be told without a baseline"
    name = outcome.name.replace("_", " ").replace("/", " ")
    numbers = f"{name} {_value(outcome.run)} with decay, {_value(outcome.baseline)} without"
    seeds = "one seed"
    if outcome.interval is not None:
        low, high = outcome.interval
        count = f"{outcome.seeds[0]} and {outcome.seeds[1]} seeds"
        seeds = f"better by {low:+.3g} to {high:+.3g}, 95 % interval, {count}"
    elif outcome.seeds != (1, 1):
        seeds = f"{outcome.seeds[0]} against {outcome.seeds[1]} seeds"
    words = {
        Helped.YES: "Decay helped",
        Helped.NO: "Decay hurt",
        Helped.UNDECIDED: "Decay made no difference that these runs show",
        Helped.BETTER: "The run with decay ended better",
        Helped.WORSE: "The run with decay ended worse",
    }
    return f"{words[outcome.verdict]} ({numbers}; {seeds})"


def _through(diagnosis: Diagnosis) -> str:
    if not diagnosis.decays:
        return "; it has no weight decay"
    ways = []
    for finding in diagnosis.findings:
        if finding.verdict is not Verdict.ACTS or finding.effect is None:
            continue
        factor = times(finding.effect.value)
        raises = f"it raises the effective learning rate {factor}"
        if finding.quantity == "rotation":
            raises = f"it makes steps turn the weights {factor} as far"
        ways.append(
            {
                Mechanism.EFFECTIVE_LR: raises,
                Mechanism.JACOBIAN: f"it makes the {QUANTITIES[finding.quantity]} {factor} smaller",
                Mechanism.DAMPING: f"it lowers the effective damping {factor}",
            }[finding.mechanism]
        )
    if ways:
        return ": " + " and ".join(ways)
    undecided = [f.mechanism for f in diagnosis.findings if f.verdict is Verdict.CANNOT_TELL]
    if undecided:
        return f"; through what is not decided ({', '.join(undecided)})"
    return "; it acts through none of the three mechanisms"


def _next(diagnosis: Diagnosis) -> str:
    """What to try next, as something that can be typed or done."""
    run, outcome = diagnosis.address, diagnosis.outcome
    if not diagnosis.decays:
        return "Next: train the same with decay, and compare"
    if outcome.verdict is Helped.UNKNOWN:
        return "Next: log the outcome (`watched.log(test_loss=...)`) in runs with and without decay"
    if outcome.verdict is Helped.NOT_COMPARED:
        return f"Next: train the same without decay, then `decaylab diagnose {run} --against BASE`"
    if outcome.verdict in (Helped.BETTER, Helped.WORSE, Helped.UNDECIDED):
        more = "two more seeds of each" if outcome.interval is None else "more seeds of each"
        return f"Next: train {more}, and give them all to `decaylab diagnose`"
    acts = any(f.verdict is Verdict.ACTS for f in diagnosis.findings[:1])
    if outcome.verdict is Helped.NO:
        return f"Next: less decay (`decaylab advise suggest {run}`)" if acts else "Next: less decay"
    if acts:
        return f"Next: `decaylab advise suggest {run}` for the value that acts within this budget"
    return "Next: twice and half the decay"


# ---------------------------------------------------------------- parts of a page


def finding_text(finding: Finding) -> str:
    """Why, in sentences."""
    return " ".join(_ended(sentence(why)) for why in finding.reasons)


def remedy_text(finding: Finding) -> str:
    """What would decide it; "" where it is decided."""
    return "; ".join(sentence(why) for why in finding.remedies)


def _ended(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def first_text(name: str, why: Because) -> str:
    """What is to be known first, with the run it is said of."""
    return f"{name}: {sentence(why)}" if name else sentence(why)


def verdict_title(finding: Finding) -> str:
    """What decay does to the mechanism: "Decay shrinks the Jacobian norm"."""
    if finding.verdict is Verdict.CANNOT_TELL:
        return f"{finding.mechanism}: cannot tell"
    if finding.verdict is Verdict.DOES_NOT_ACT:
        verb = "moves the other way" if opposite(finding) else "does not act"
        return f"{finding.mechanism}: {verb}"
    return {
        Mechanism.EFFECTIVE_LR: "effective learning rate: decay keeps it high",
        Mechanism.JACOBIAN: "Jacobian norm: decay shrinks it",
        Mechanism.DAMPING: "effective damping: decay keeps it low",
    }[finding.mechanism]


def quantity_words(finding: Finding) -> str:
    """What the finding's factor is of."""
    return QUANTITIES[finding.quantity or USUAL[finding.mechanism]]


def layer_heading(finding: Finding) -> str:
    """What the factors by layer are of."""
    key = finding.layer_quantity or finding.quantity or USUAL[finding.mechanism]
    return f"{QUANTITIES[key]}, {'larger' if key in LARGER else 'smaller'} by"


def effect_words(finding: Finding) -> str:
    """What changed, which way and by which factor; "" where nothing was compared."""
    if finding.effect is None:
        return ""
    key = finding.quantity or USUAL[finding.mechanism]
    verb = "larger" if key in LARGER else "smaller"
    return f"{QUANTITIES[key]} {effect_range(finding.effect)} {verb}"


def records_words(finding: Finding) -> str:
    """Which rows, how many, over which steps."""
    effect = finding.effect
    if effect is None:
        return ""
    how = "the baseline" if effect.source is Evidence.BASELINE else "a reconstruction"
    counted = "1 record" if effect.records == 1 else f"{effect.records} records"
    steps = f"steps {effect.steps[0]} to {effect.steps[1]}"
    if effect.steps[0] == effect.steps[1]:
        steps = f"step {effect.steps[0]}"
    return f"from {', '.join(effect.probes)}: {counted}, {steps}, compared with {how}"


def layer_table(finding: Finding) -> list[tuple[str, str, str]]:
    """(layer, verdict, effect or reason); layers without effect, for one reason, share a row."""
    rows: list[tuple[str, str, str]] = []
    for row in finding.layers:
        text = effect_range(row.effect) if row.effect else sentence(row.why) if row.why else ""
        verdict = str(row.verdict) if row.verdict else "-"
        if rows and row.effect is None and rows[-1][1:] == (verdict, text):
            rows[-1] = (f"{rows[-1][0]}, {row.layer}", verdict, text)
        else:
            rows.append((row.layer, verdict, text))
    return rows


def left_out(diagnosis: Diagnosis) -> dict[str, str]:
    """The skipped layers by their reason, as one string each."""
    by_reason: dict[str, list[str]] = {}
    for layer, why in diagnosis.skipped.items():
        by_reason.setdefault(sentence(why), []).append(layer)
    return {reason: ", ".join(layers) for reason, layers in by_reason.items()}


MOTION_HEADINGS = (
    *("layer", "turns/step", "at balance", "timescale", "by decay: turns", "norm", "size counts"),
)


def motion_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """A row per layer: angle, the law's, timescale, decay's part in turns and norm, response."""
    return [
        (
            m.layer if m.role in ("weight", "") else f"{m.layer} ({m.role})",
            "-" if m.rotation is None else f"{m.rotation:.2g}",
            "-" if m.expected is None else f"{m.expected:.2g}",
            _timescale(m),
            "-" if m.turned is None else times(m.turned.value),
            "-" if m.by_decay is None else times(m.by_decay),
            "-" if m.size_response is None else f"{m.size_response:.2g}",
        )
        for m in diagnosis.motions
    ]


def _timescale(m: Motion) -> str:
    return "-" if m.timescale is None else three_digits(m.timescale)


def motion_legend(diagnosis: Diagnosis) -> str:
    """What the columns of `motion_rows` are."""
    moves = diagnosis.motions
    steps = moves[0].steps if moves else 0
    baseline = "the baseline" if diagnosis.baselines else "a reconstruction without decay"
    epochs = [m.epochs for m in moves if m.epochs]
    in_epochs = ""
    if epochs:
        low, high = three_digits(min(epochs)), three_digits(max(epochs))
        in_epochs = f" ({low if low == high else f'{low} to {high}'} epochs)"
    return (
        "turns/step: recorded radians per step; at balance: the law's for lr and decay, if the"
        " layer were scale-invariant and gradients independent; timescale: steps in which decay"
        f" alone takes weights to 1/e{in_epochs}, the run has {steps}; by decay: how much further"
        f" it turns and what is left of its norm, against {baseline}; size counts: per cent by"
        " which the outputs change per per cent of its size."
    )


def insight(diagnosis: Diagnosis) -> list[str]:
    """What the motions show, each checkable in the table."""
    turned = [m for m in diagnosis.motions if m.turned is not None and m.timescale]
    if not turned:
        return []
    said = []
    most = max(turned, key=lambda m: m.turned.value if m.turned else 0.0)
    if most.turned is not None and most.turned.value >= RULES.acts:
        text = f"Decay makes {most.layer} turn {times(most.turned.value)} as far per step"
        if most.size_response is not None:
            counts = "matters little" if most.size_response <= RULES.size_little else "matters"
            text += f"; its size itself {counts} ({most.size_response:.2g} % per percent)"
        said.append(f"{text}.")
    scales = [m.timescale for m in turned if m.timescale]
    longest, steps = max(scales), turned[0].steps
    if longest > steps:
        said.append(
            f"Decay needs {three_digits(longest)} steps to replace the weights of the start once;"
            f" the run has {steps}."
        )
    known = [m for m in turned if m.settled is not None]
    rest = [m for m in known if m.settled]
    if known:
        apart = [(m.rotation or 1.0) / (m.expected or 1.0) for m in known]
        said.append(
            f"{len(rest)} of {len(known)} layers turn as their law says at balance (within"
            f" {_percent(RULES.settled - 1)}); the others by {times(min(apart))} to"
            f" {times(max(apart))} of it."
            if len(rest) < len(known)
            else f"All {len(known)} layers turn as their law says at balance (within"
            f" {_percent(RULES.settled - 1)})."
        )
    return said


def markdown(diagnosis: Diagnosis) -> str:
    """The whole result as Markdown."""
    against = f" against {', '.join(diagnosis.baselines)}" if diagnosis.baselines else ""
    lines = [f"# What weight decay does in {', '.join(diagnosis.runs)}{against}", ""]
    lines += [f"**{headline(diagnosis)}**", ""]
    lines += [f"- **{first_text(*item)}**" for item in diagnosis.first]
    lines += [""] * bool(diagnosis.first)
    lines += ["| mechanism | verdict | effect | records |", "| --- | --- | --- | --- |"]
    for f in diagnosis.findings:
        cells = (f.mechanism, f"**{f.verdict}**", effect_words(f), records_words(f))
        lines.append(f"| {' | '.join(cells)} |")
    for f in diagnosis.findings:
        title = verdict_title(f)
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", finding_text(f)]
        if f.remedies:
            lines += ["", f"To decide it: {remedy_text(f)}."]
        if any(row.effect for row in f.layers):
            lines += ["", f"| layer | verdict | {layer_heading(f)} |", "| --- | --- | --- |"]
            lines += [f"| {' | '.join(row)} |" for row in layer_table(f)]
    if diagnosis.motions:
        lines += ["", "## How far each layer turns", "", *insight(diagnosis), ""]
        lines += [f"| {' | '.join(MOTION_HEADINGS)} |", "| --- " * len(MOTION_HEADINGS) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in motion_rows(diagnosis)]
        lines += ["", motion_legend(diagnosis)]
    if diagnosis.skipped:
        lines += ["", "## Layers left out", ""]
        lines += [f"- {layers}: {reason}" for reason, layers in left_out(diagnosis).items()]
    lines += ["", "## What follows", "", *(f"- {x}" for x in follow_texts(diagnosis))]
    return "\n".join(lines) + "\n"


def follow_texts(diagnosis: Diagnosis) -> list[str]:
    """What follows, a sentence or more each."""
    return [sentence(why) for why in diagnosis.follows]


def plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, for JSON: the data, and the words beside them."""
    return {
        "headline": headline(diagnosis),
        "runs": list(diagnosis.runs),
        "baselines": list(diagnosis.baselines),
        "outcome": asdict(diagnosis.outcome),
        "first": [first_text(*item) for item in diagnosis.first],
        "findings": [
            {
                "mechanism": f.mechanism,
                "verdict": f.verdict,
                "reasons": [_plain(why) for why in f.reasons],
                "remedies": [_plain(why) for why in f.remedies],
                "text": finding_text(f),
                "effect": asdict(f.effect) if f.effect else None,
                "layers": [
                    {
                        "layer": row.layer,
                        "verdict": row.verdict,
                        "effect": asdict(row.effect) if row.effect else None,
                        "why": sentence(row.why) if row.why else "",
                    }
                    for row in f.layers
                ],
            }
            for f in diagnosis.findings
        ],
        "motions": [asdict(m) for m in diagnosis.motions],
        "insights": insight(diagnosis),
        "follows": follow_texts(diagnosis),
        "skipped": {layer: sentence(why) for layer, why in diagnosis.skipped.items()},
    }


def _plain(why: Because) -> dict[str, str]:
    return {"reason": why.reason.name.lower().replace("_", "-"), "text": sentence(why)}


def note_texts(notes: Iterable[Because]) -> str:
    """Notes beside a suggestion, as one string."""
    return "; ".join(sentence(note) for note in notes)
