"""The words of diagnosis and advice: the only place where reasons become English.

Nothing is decided here, and nothing reads what is written here.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from decaylab.diagnosis import commands
from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.effects import ComparedWith, Effect, Motion
from decaylab.diagnosis.outcome import Helped, Outcome
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.verdict import Diagnosis, Finding, LayerRow, opposite

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
LARGER = {"effective_lr", "rotation"}  # these grow by decay, the others shrink
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


def factor(value: float) -> str:
    """A factor without its x; near one with two digits behind the point, which count there.

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


def names(layers: Sequence[str], most: int = MOST_NAMES) -> str:
    """Some of them, and how many more."""
    rest = f" and {len(layers) - most} more" if len(layers) > most else ""
    return ", ".join(layers[:most]) + rest


def _layer(name: str) -> str:
    """A layer in a sentence; the number that is its whole name in an nn.Sequential needs a word."""
    return f"layer {name}" if name.isdigit() else name


def effect_range(effect: Effect) -> str:
    """The factor and its range: 1.85x (1.80 to 1.91 over layers)."""
    return f"{times(effect.value)}{_spread(effect)}"


def _range(values: Sequence[float], written: Callable[[float], str]) -> str:
    """From the smallest to the largest; one value where they are written alike."""
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low} to {high}"


def _spread(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return ""
    low, high = factor(effect.low), factor(effect.high)
    return f" ({low} to {high} over {effect.spread})" if low != high else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _responded(percent: float) -> str:
    """Per cent of the outputs; what is left of exact invariance by rounding and eps is 0."""
    return "0" if percent < 5e-4 else f"{percent:.2g}"


def _removed(taken: float) -> str:
    return f"{100 * -math.expm1(-taken):.2g} %"


def _ended(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _compared(quantity: str, effect: Effect) -> str:
    """What a quantity is with decay: "The angle per step is 1.54x larger with decay"."""
    grows = quantity in LARGER
    if effect.value < 1:
        effect, grows = effect.inverse(), not grows
    kind = "larger" if grows else "smaller"
    alone = effect.source is not ComparedWith.BASELINE
    with_decay = "with decay than a reconstruction without it" if alone else "with decay"
    return (
        f"The {QUANTITIES[quantity]} is {times(effect.value)} {kind} {with_decay}{_spread(effect)}"
    )


# ---------------------------------------------------------------- one sentence per reason


def _differing(why: Because) -> str:
    pairs = ", ".join(f"{key} {mine} and {theirs}" for key, (mine, theirs) in why["fields"].items())
    return f"the runs are not comparable ({pairs})"


def _changed(why: Because) -> str:
    text = _compared(why["quantity"], why["effect"])
    if why["verdict"] is not Verdict.DOES_NOT_ACT:
        return f"{text}."
    text += ", too little to matter."
    taken = why["taken"]
    if taken is not None and taken < 1:
        text += f" Decay has removed {_removed(taken)} of the initial weights, and a longer run may"
        text += " show more."
    return text


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
        " here it divides by the curvature of earlier weights, and decay has shrunk these since:"
    )
    turned = why["turned"]
    if turned is not None:
        return f"{text} steps turn them {effect_range(turned)} as far, as recorded."
    clip = why["clip"]
    cut = "" if clip is None else f", under a KL clip that cuts them to {times(clip)} in the mean"
    return f"{text} steps are {times(why['longer'])} longer{cut}."


def _function(why: Because) -> str:
    what = [*why["layers"], *(["the gains of normalisations"] if why["gains"] else [])]
    verbs = {
        Verdict.ACTS: "changes the function: the outputs react less to the inputs",
        Verdict.DOES_NOT_ACT: "hardly changes how the outputs react to the inputs",
        Verdict.CANNOT_TELL: "changes the function; whether that matters is still open",
    }
    verb = "goes with outputs that react more" if why["opposite"] else verbs[why["verdict"]]
    return f"Decay of the layers whose size counts ({names(what)}) {verb}."


def _doubtful_size(why: Because) -> str:
    values = [_responded(response) for response in why["responses"].values()]
    numbers = " to ".join(sorted({min(values, key=float), max(values, key=float)}, key=float))
    return (
        f"The verdict depends on whether the size of {names(list(why['responses']))} counts, which"
        f" is a close call: the outputs change by {numbers} % per percent, and {why['limit']:g} %"
        " is the limit."
    )


def _burst(why: Because) -> str:
    burst, others = why["burst"], why["others"]
    remedy = "a smaller lr or less decay"
    if why["damped"]:
        free = "a larger damping" if why["scale_free"] else 'damping_scaling="scale-free"'
        remedy = f"{free}, {remedy}"
    repeats = f" There {'is' if others == 1 else 'are'} {others} more like it." if others else ""
    return (
        f"A burst: after step {burst.step} the norm of {_layer(burst.layer)} grew from"
        f" {burst.before:.3g}"
        f" to {burst.after:.3g} by the next record.{repeats} Decay had shrunk these weights, so"
        " each step turned them further, until one went too far. What helps at that stage:"
        f" {remedy}."
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
    unless = "unless this is K-FAC-F and has fitted its data, where the Fisher matrix vanishes"
    return f"{text} {remedy}, {unless}."


def _not_finite(why: Because) -> str:
    were, are = ("values were", "are") if why["count"] > 1 else ("value was", "is")
    text = f"{why['count']} {were} not finite ({', '.join(why['names'])}) and {are} left out"
    lasting = why["lasting"]
    return f"{text}, {lasting[0]} to the end: it has probably diverged" if lasting else text


def _damaged(why: Because) -> str:
    if why["count"] == 1:
        return str(why["first"])
    return f"{why['count']} lines are damaged and left out, the first: {why['first']}"


def _setting(why: Because) -> str:
    when = f" at step {why['step']}" if why["step"] is not None else ""
    mine, theirs = why["pair"]
    return (
        f"the runs are not comparable (layer {why['layer']}:"
        f" {why['name']} {mine} and {theirs}{when})"
    )


def _other_lr(why: Because) -> str:
    mine, theirs = map(three_digits, why["pair"])
    steps = why["lengths"]
    lengths = f"of {steps[0]} and {steps[1]} steps: " if steps[0] != steps[1] else ""
    return f"the runs are not comparable ({lengths}lr {mine} and {theirs} at step {why['step']})"


def _growth(why: Because) -> str:
    measured, least, largest = (three_digits(why[key]) for key in ("seen", "least", "largest"))
    return (
        f"the runs are not comparable (at step {why['step']} the baseline's scale-invariant layers"
        f" have {measured} times this run's |W|^2, where start and decay explain {least} to"
        f" {largest}: use the same data, batch size and seed)"
    )


def _matters(why: Because) -> str:
    ways = {
        Mechanism.EFFECTIVE_LR: "keeps the effective learning rate high: each step turns these"
        " layers further",
        Mechanism.DAMPING: "keeps K-FAC's effective damping low",
    }
    return "In this run decay " + " and ".join(ways[way] for way in why["mechanisms"]) + "."


def _direction(why: Because) -> str:
    kind = "scale-invariant layers" if why["exact"] else "layers whose size hardly matters"
    does = "does not change" if why["exact"] else "hardly changes"
    text = f"Decay of the {kind} ({names(why['layers'])}) {does} the function by itself."
    return text if why["by_lr"] else f"{text} It sets how far each step turns their weights."


def _response(why: Because) -> str:
    response = why["response"]
    if response is None:
        return "its size is part of the function"
    return f"its size is part of the function ({_responded(response)} % per percent)"


TEXTS: dict[Reason, str | Callable[[Because], str]] = {
    Reason.DAMAGED: _damaged,
    Reason.DIVERGED: "it diverged at step {step}: only the steps before are judged",
    Reason.RUN_DIVERGED: "it diverged ({message})",
    Reason.NOT_FINITE: _not_finite,
    Reason.PROBABLY_DIVERGED: _not_finite,
    Reason.UNFINISHED: "it is not finished ({status}): {epochs} of {of} epochs are judged",
    Reason.NOTHING_RECORDED: "nothing was recorded: train inside `with watch(model, optimizer):`",
    Reason.BEGINS_LATE: "its records begin at step {step}, so what decay did before that is not"
    " judged (with watch(folder=...), a run that is resumed keeps its records)",
    Reason.OPTIMIZER_CHANGED: "its optimizer changed at step {step}: the run is judged as one all"
    " the same",
    Reason.OPTIMIZER_JOINED: "{optimizer} was not given to watch, so it is watched only from its"
    " first step, after step {step}: give watch all optimizers",
    Reason.SHARED_PARAMETERS: lambda why: (
        f"two optimizers step {names(why['parameters'])}: only the first one's settings are used"
    ),
    Reason.UNSTEPPED_PARAMETERS: lambda why: (
        f"no watched optimizer steps {names(why['parameters'])}: if another one does, give watch"
        " both"
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
        " so its steps are neither Adam's nor SGD's. Lower it"
    ),
    Reason.COLLAPSED: lambda why: (
        f"decay has removed nearly all of {names(why['layers'])}: it is too strong. Weights that"
        " small are no longer scale-invariant, and the factors below mean little"
    ),
    Reason.NO_DECAY: "no layer has weight decay",
    Reason.LOST_TO_ROUNDING: lambda why: (
        f"rounding undoes all weight decay of {names(why['layers'])}: W (1 - lr x decay) is W in"
        " the number format of these weights. Keep them in float32, with autocast if need be"
    ),
    Reason.SWAPPED: "no layer has weight decay, but the baseline has it: did you swap the two?",
    Reason.UNWATCHED: lambda why: (
        f"{names(why['layers'])}: stepped by an optimizer that is not watched, so their decay is"
        " unknown"
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
    Reason.OTHER_LR: _other_lr,
    Reason.OTHER_GROWTH: _growth,
    Reason.SEED_LEFT_OUT: lambda why: f"left out: {sentence(why['why'])}",
    Reason.DIFFERS: lambda why: f"{why['name']} differs: {why['pair'][0]} and {why['pair'][1]}",
    Reason.STEPS_DIFFER: lambda why: (
        f"steps differ: {why['pair'][0]} and {why['pair'][1]}; only those in both are compared"
    ),
    Reason.FROZEN: "frozen: it is not trained",
    Reason.NOT_STEPPED: "no watched optimizer steps it",
    Reason.NO_LAYER_SETTINGS: "its optimizer's settings are not in the records",
    Reason.RECORDED_ONCE: "its norm has fewer than two records: record weight_norm more often",
    Reason.ZEROS: "its weights are zero: it has no direction",
    Reason.NEVER_MOVED: "no step has moved it: it has no gradient, or a learning rate of 0",
    Reason.L2_RESCALED: "the optimizer rescales L2",
    Reason.KIND_UNKNOWN: "its decay is {kind!r}, which removes no fixed fraction of the weights",
    Reason.ROUNDED_AWAY: "its weights have 16 bits, and rounding may undo the decay",
    Reason.TAKES_ALL: "decay is strong enough to remove all of the weights in one step",
    Reason.SIZE_COUNTS: _response,
    Reason.GAIN: "a normalisation's gain: part of the function",
    Reason.ADAPTER: "an adapter: what it adds to the frozen network goes with its size",
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
    Reason.FEW_SHARES: "its second-order share is recorded too rarely",
    Reason.OLD_FACTORS: "K-FAC's factors are of norms that decay has since changed a lot",
    Reason.LAW_UNKNOWN: "how its step depends on its norm is not known",
    Reason.ALL_FROZEN: "Every layer is frozen, so decay changes nothing.",
    Reason.NONE_JUDGEABLE: "No layer is recorded well enough to be judged.",
    Reason.NO_LAYER_DECAYS: lambda why: (
        "Rounding undoes all weight decay." if why["lost"] else "No layer has weight decay."
    ),
    Reason.TOO_LITTLE: _too_little,
    Reason.NO_INVARIANT_DECAYS: "No scale-invariant layer has decay. This mechanism acts on layers"
    " whose size does not count.",
    Reason.NO_INVARIANT: "The size of every trained layer is part of the function. This mechanism"
    " acts on layers whose size does not count.",
    Reason.CLIPPED: lambda why: (
        f"The gradients are clipped at {_percent(why['share'])} of the records. How far such steps"
        " would turn weights of another norm is not known."
    ),
    Reason.OLD_CURVATURE: _old_curvature,
    Reason.UNDAMPED_BY_LR: "Without damping, K-FAC's step turns the weights by lr, whatever their"
    " norm (Eq. 13). The norm acts through the damping, see below.",
    Reason.BY_LR: "This optimizer turns the weights equally far, whatever their norm.",
    Reason.ONLY_KFAC_DAMPS: "Only K-FAC has a damping, and this optimizer is not K-FAC.",
    Reason.NO_KFAC_LAYER: "K-FAC preconditions no scale-invariant layer that has decay.",
    Reason.SCALE_FREE: "The damping is scaled along with each layer's curvature, so decay does not"
    " change its effect.",
    Reason.SHARE_UNKNOWN: "The second-order share is not recorded, so it is not known whether"
    " damping matters.",
    Reason.DAMPING_NEGLIGIBLE: lambda why: (
        f"Damping hardly matters: the second-order share is {_shares(why)}."
    ),
    Reason.SHARES: lambda why: f"The second-order share is {_shares(why)}.",
    Reason.SAME_SHARES: "That is no change: the curvature of the normalised weights is lower too.",
    Reason.ALL_INVARIANT: "Every decayed layer is scale-invariant, so decay does not change the"
    " function by itself. A change of the Jacobian comes through the other two mechanisms.",
    Reason.JACOBIAN_ALONE: "A single run does not show what the Jacobian would be without decay.",
    Reason.NO_SENSITIVITY: "Neither a Jacobian nor a Gauss-Newton norm is recorded in both runs at"
    " a common step.",
    Reason.THROUGH_OTHERS: lambda why: (
        f"Part of it may come through the {' and the '.join(why['mechanisms'])} of the other"
        " layers."
    ),
    Reason.NOTHING_TO_COMPARE: lambda why: (
        f"There is nothing to compare with: {'; '.join(sentence(x) for x in why['why'])}."
    ),
    Reason.CHANGED: _changed,
    Reason.OPPOSITE: lambda why: (
        f"{_compared(why['quantity'], why['effect'])}. The mechanism predicts the opposite."
    ),
    Reason.SOME_LAYERS_MORE: lambda why: (
        f"But in some layers it changes more: {names(why['layers'])}."
    ),
    Reason.BETWEEN: "Up to {nothing:g}x counts as no effect, and {acts:g}x or more as one; this is"
    " in between.",
    Reason.TOO_EARLY: lambda why: (
        f"Both runs are recorded only up to step {why['step']}, when decay had removed"
        f" {100 * why['taken']:.2g} % of the weights: too early to tell."
    ),
    Reason.MORE_THAN_DECAY: lambda why: (
        f"{_compared(why['quantity'], why['effect'])}. Decay has removed {_removed(why['taken'])}"
        f" of the initial weights, which explains {times(why['most'])} at most: the runs must"
        " differ in something else too."
    ),
    Reason.SIZE_IN_DOUBT: _doubtful_size,
    Reason.SEEDS_DISAGREE: lambda why: (
        "The seeds disagree: "
        + ", ".join(f"{verdict} in {count}" for verdict, count in why["counts"].items())
        + "."
    ),
    Reason.SAME_STEPS: "record both runs at the same steps (the same every=)",
    Reason.RECORD_FURTHER: "record both runs further into training",
    Reason.SAME_DATA: "give a baseline with the same data, batch size and seed",
    Reason.NAME_THE_LAW: 'name its law in its param groups, as group["law"] (docs/extend.md), or'
    " train with SGD, K-FAC or Adam without amsgrad",
    Reason.NO_CLIPPING: "train without clipping, or with Adam",
    Reason.RENEW_CURVATURE: "renew the curvature more often (KFAC's refresh_every, invert_every)",
    Reason.RECORD_MORE: "train inside `with watch(model, optimizer, every=...)`, for several"
    " records",
    Reason.TRAIN_LONGER: "train it for a few epochs, at a learning rate where it does not diverge",
    Reason.GIVE_INPUTS: 'give watch(..., probes="diagnosis", inputs=batch), which measures how the'
    " outputs respond to each layer's size",
    Reason.WATCH_ALL: "watch all optimizers: watch(model, [first, second])",
    Reason.DIRECTION_ONLY: _direction,
    Reason.MATTERS: _matters,
    Reason.NO_MORE_SECOND_ORDER: "In this run decay keeps the effective damping low, but K-FAC's"
    " steps are no more second-order than without it.",
    Reason.NO_EFFECT: lambda why: (
        "So far, decay of these layers has no effect."
        if why["taken"] < 1
        else "In this run decay of these layers has no effect: it could be left out."
    ),
    Reason.FUNCTION: _function,
    Reason.ADAPTERS: lambda why: (
        f"Decay of the adapters ({names(why['layers'])}) pulls the network back towards the frozen"
        " one."
    ),
    Reason.NOTHING_YET: "Nothing yet: no layer with decay could be judged.",
    Reason.NOTHING_TO_DROP: "This run has no weight decay to keep or to drop.",
    Reason.BURST: _burst,
    Reason.DAMPING_DOMINATES: _dominates,
    Reason.CHOOSE_BY_OUTCOME: lambda why: (
        f"{sentence(why['counts'])}; choose its decay by the outcome"
    ),
    Reason.DAMPENED_OUT: "its dampening of 1 keeps gradients and L2 out of the momentum",
    Reason.NO_LR: "its learning rate is 0",
    Reason.TAKEN: "decay has removed nearly all of it: suggest from a run with less decay",
    Reason.DOES_NOT_GROW: "its norm does not grow, so no decay is needed to hold it",
    Reason.NO_ROTATION: "how far its steps turn it is not recorded: keep `movement` among watch's"
    " probes",
    Reason.ASK_FOR_LESS: "to turn it that far, decay would have to remove half of it or more in a"
    " step: ask for less",
    Reason.NOTHING_HOLDS: lambda why: (
        f"at the target norm a step adds {three_digits(why['growth'])} times |W|^2, which no decay"
        " can hold: lower the learning rate"
    ),
    Reason.TURNS_BY_LR: "the weights turn by lr, whatever their norm",
    Reason.ROUGH: lambda why: (
        f"rough: up to {times(why['factor'])} too {why['way']}; suggest from a run nearer to the"
        " target"
    ),
    Reason.MIXED: "rough: decay removes much of the weights while steps still agree",
    Reason.ON_ITS_WAY: lambda why: (
        f"still on its way from {why['norm']:.3g} to {why['balance']:.3g}; a third of the way is"
        f" left after {three_digits(why['steps'])} more steps"
    ),
    Reason.FAR_BALANCE: lambda why: (
        f"the present decay would take it from {why['norm']:.3g} to "
        + ("less than a tenth of that" if why["less"] else "more than ten times that")
    ),
    Reason.FOR_THE_BUDGET: lambda why: (
        f"chosen to act within {why['budget']} steps; {times(why['holding'])} as much would hold"
        " the initial norm, but too slowly"
    ),
    Reason.NO_ONE_VALUE: "no single value fits all of these layers: they differ in optimizer,"
    " learning rate, momentum or kind of decay, so give each group its own",
    Reason.NO_SUGGESTION: "no suggestion for any layer whose size does not count; the notes"
    " say why",
    Reason.NO_CANDIDATE: "no suggestion: the size of every layer counts",
}


def sentence(why: Because) -> str:
    """A reason in words; a sentence or, of layers and remedies, a part of one."""
    text = TEXTS[why.reason]
    return text.format(**why.data) if isinstance(text, str) else text(why)


# ---------------------------------------------------------------- what to do, with real folders


def _watched_in(*addresses: commands.Address) -> str:
    return "recorded by " + " and ".join(f'watch(..., folder="{x.folder}")' for x in addresses)


def _give_baseline(why: Because, places: Places) -> str:
    run = places.run
    if places.all_ours:
        again = commands.train_again(run, decay=False)
        return f"train it without decay (`{again}`), then `{commands.diagnose_all_seeds(run)}`"
    if not run.folder:
        return f"train the same without decay, then `{commands.diagnose([run], [run])}`"
    other = run.beside("no-decay")
    command = commands.diagnose(places.runs, [other])
    return f"train the same without decay, {_watched_in(other)}, then `{command}`"


def _more_seeds(why: Because, places: Places) -> str:
    run, baselines = places.run, places.baselines
    each = " of each" if baselines else ""
    if places.all_ours:
        seed = 1 + max(address.seed or 0 for address in (*places.runs, *baselines))
        again = [commands.train_again(each, seed=seed) for each in (run, *baselines[:1])]
        trained = " and ".join(f"`{command}`" for command in again)
        return f"train another seed{each} ({trained}), then `{commands.diagnose_all_seeds(run)}`"
    if not all(address.folder for address in (*places.runs, *baselines)):
        both = [run, run]
        return f"train another seed{each}, then `{commands.diagnose(both, both)}`"
    number = 1 + len(places.runs)
    new = [address.beside(f"seed-{number}") for address in (run, *baselines[:1])]
    command = commands.diagnose([*places.runs, new[0]], [*baselines, *new[1:]])
    return f"train another seed{each}, {_watched_in(*new)}, then `{command}`"


def _record(why: Because, places: Places) -> str:
    what = "the Jacobian norm" if why.reason is Reason.RECORD_IN_BOTH else "it"
    if places.all_ours:
        probes = [commands.probe(run) for run in (*places.runs, *places.baselines)]
        return f"record {what}: " + " and ".join(f"`{probe}`" for probe in probes)
    return f'record {what} in all runs, with watch(..., probes="diagnosis", inputs=batch)'


def _attribute(why: Because, places: Places) -> str:
    if places.run.ours and places.run.folder:
        return f"`{commands.attribute(places.run)}` separates the mechanisms by experiment"
    return (
        "`decaylab.attribute` separates the mechanisms by experiment, in your own loop"
        " (docs/attribution.md)"
    )


def _schedule(why: Because, places: Places) -> str:
    # Adam's law is SGD's as long as it remembers the norms of the start (`laws.memory`)
    least = "at least " if why["power"] == 1 else "about "
    return (
        "To move these layers as far without decay, raise their learning rate over the run, to"
        f" {least}{times(why['factor'])} at the end: `{commands.schedule(places.run)}` writes the"
        " schedule."
    )


def _record_same(why: Because, places: Places) -> str:
    return "" if places.all_ours else "record the same probes there"  # our trainer does


ADVICE: dict[Reason, Callable[[Because, Places], str]] = {
    Reason.RECORD_SAME_WAY: _record_same,
    Reason.GIVE_BASELINE: _give_baseline,
    Reason.RECORD_IN_BOTH: _record,
    Reason.RECORD_SHARE: _record,
    Reason.MORE_SEEDS: _more_seeds,
    Reason.ATTRIBUTE: _attribute,
    Reason.SCHEDULE: _schedule,
}


def advice(why: Because, places: Places) -> str:
    """A reason in words, where it tells what to do with the folders to do it with."""
    write = ADVICE.get(why.reason)
    return sentence(why) if write is None else write(why, places)


# ---------------------------------------------------------------- the one sentence


def headline(diagnosis: Diagnosis) -> str:
    """Whether decay helped, through what, and what to try next."""
    outcome, acts = diagnosis.outcome, " and ".join(_ways(diagnosis))
    if not diagnosis.decays:
        what = "Rounding undoes all weight decay of this run"
        what = what if _lost(diagnosis) else "This run has no weight decay"
        return f"{what}. {_next(diagnosis)}."
    if outcome.verdict in (Helped.UNKNOWN, Helped.NOT_COMPARED):
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
    ends = [f"{value:#.4g}".rstrip(".") for value in (outcome.run, outcome.baseline)]
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
        Helped.BETTER: "The run with decay ended better",
        Helped.WORSE: "The run with decay ended worse",
    }
    return f"{words[outcome.verdict]} ({numbers}; {seeds})"


def _diverged(outcome: Outcome) -> str:
    (with_decay, without), (runs, baselines) = outcome.diverged, outcome.seeds
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
    """What decay does, of each mechanism through which it acts."""
    ways = []
    for finding in diagnosis.findings:
        if finding.verdict is not Verdict.ACTS or finding.effect is None:
            continue
        changed = times(finding.effect.value)
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
    """The layers of a finding among those with decay, as short as they can be said."""
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
    moved = _moved(diagnosis)
    turned = [m for m in moved if _turned(m) >= RULES.acts]
    if not turned:
        return text
    who = _layer(turned[0].layer) if len(turned) == 1 else f"{_count(turned, moved)} layers"
    text += f", but it makes {who} turn {times(geometric_mean(map(_turned, turned)))} as far"
    norms = [m.by_decay for m in turned if m.by_decay is not None]
    return text + (f", at {times(geometric_mean(norms))} the norm" if norms else "")


def _lost(diagnosis: Diagnosis) -> bool:
    """Whether a run that could have decay has none for its number format."""
    return any(
        name in diagnosis.runs and why.reason is Reason.LOST_TO_ROUNDING
        for name, why in diagnosis.first
    )


def next_reason(diagnosis: Diagnosis) -> Reason | None:
    """What is to be tried next, where a finding may ask for the same."""
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
    """What to try next, as something that can be typed or done."""
    places, outcome = diagnosis.places, diagnosis.outcome
    if not diagnosis.decays:
        precise = " and float32 weights" if _lost(diagnosis) else ""
        return f"Next: train the same with decay{precise}, and compare"
    if outcome.verdict is Helped.UNKNOWN:
        named = "under a name with loss or score in it " if outcome.name else ""
        log = f"log the outcome {named}(`watched.log(test_loss=...)`)"
        return f"Next: {log} in runs with and without decay"
    if (reason := next_reason(diagnosis)) is not None:
        return f"Next: {advice(Because(reason), places)}"
    if outcome.diverged[0]:
        lower = "a lower learning rate"
        return f"Next: {lower}, in both" if outcome.diverged[1] else f"Next: less decay, or {lower}"
    if outcome.verdict is Helped.NO:
        return "Next: try less decay, about a third of it"
    if diagnosis.findings[0].verdict is Verdict.ACTS:
        return f"Next: `{commands.suggest(places.run)}`, for the decay that acts within this budget"
    return "Next: try twice and half the decay"


# ---------------------------------------------------------------- parts of a page


def finding_text(finding: Finding) -> str:
    """Why, in sentences."""
    return " ".join(_ended(sentence(why)) for why in finding.reasons)


def remedy_text(finding: Finding, places: Places, above: Reason | None = None) -> str:
    """What would decide it; "" if it is decided. What was said `above` is not said again."""
    texts = [
        'see "Next" above' if why.reason is above else advice(why, places)
        for why in finding.remedies
    ]
    return "; ".join(dict.fromkeys(text for text in texts if text))


def first_text(name: str, why: Because) -> str:
    """What is to be known first, with the run it is said of."""
    return f"{name}: {sentence(why)}" if name else sentence(why)


def verdict_title(finding: Finding) -> str:
    """What decay does to the mechanism: "Decay shrinks the Jacobian norm"."""
    name = str(finding.mechanism)
    if finding.verdict is Verdict.CANNOT_TELL:
        return f"{name[0].upper()}{name[1:]}: cannot tell yet"
    if finding.because_of(Reason.ONLY_KFAC_DAMPS) is not None:
        return "No effective damping"
    if finding.verdict is Verdict.DOES_NOT_ACT:
        if opposite(finding):
            return f"The {name} changes the other way"
        verb = "does not act on" if finding.effect is None else "hardly changes"
        return f"Decay {verb} the {name}"
    if finding.quantity == "rotation":
        return "Decay makes each step turn the weights further"
    verbs = {Mechanism.JACOBIAN: "shrinks", Mechanism.DAMPING: "lowers"}
    return f"Decay {verbs.get(finding.mechanism, 'raises')} the {name}"


def layer_heading(finding: Finding) -> str:
    """What the factors by layer are of."""
    key = finding.layer_quantity or finding.quantity or USUAL[finding.mechanism]
    return f"{QUANTITIES[key]}: how much {'larger' if key in LARGER else 'smaller'}"


def effect_words(finding: Finding) -> str:
    """What changed, which way and by which factor; "" if nothing was compared."""
    if finding.effect is None:
        return ""
    return _compared(finding.quantity or USUAL[finding.mechanism], finding.effect)


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
    """(layer, verdict, effect or reason); layers without effect, for one reason, share a row."""
    rows: list[tuple[str, str, str]] = []
    for row in finding.layers:
        verdict, text = str(row.verdict or "-"), layer_text(row)
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


# ---------------------------------------------------------------- how layers turn


def motion_table(diagnosis: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """Headings and a row per layer with decay; of a run without any, of every layer.

    A column only if something is known, or layers differ in it.
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
            (None if m.role == "gain" else m.expected for m in motions), "{:.2g}".format
        ),
        "decay time": column((m.timescale if differ else None for m in motions), three_digits),
        "turns": column((m.turned.value if m.turned else None for m in motions), times),
        "norm": column((m.by_decay for m in motions), times),
        "size": column((m.size_response for m in motions), _responded),
    }
    known = {heading: cells for heading, cells in columns.items() if {*cells} - {"-"}}
    return list(known), [list(row) for row in zip(*known.values(), strict=True)]


def motion_legend(diagnosis: Diagnosis) -> str:
    """What the columns of `motion_table` are."""
    headings, _ = motion_table(diagnosis)
    baseline = "the baseline" if diagnosis.baselines else "a reconstruction without decay"
    meanings = {
        ("angle/step",): "how far a step turns the weights, in radians, as recorded",
        ("balance",): "where the angle would settle with this lr and decay, if the layer were"
        " scale-invariant and its gradients independent",
        ("decay time",): "steps in which decay alone takes the weights to 1/e",
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
    """The layers with decay, but for gains."""
    return [m for m in diagnosis.motions if m.role != "gain" and m.timescale]


def insight(diagnosis: Diagnosis) -> list[str]:
    """What the motions show, each checkable in the table."""
    moved = _moved(diagnosis)
    known_turns = [m for m in moved if m.turned is not None]
    turned = [m for m in known_turns if _turned(m) >= RULES.acts]
    sentences = []
    if known_turns and not turned:
        most = max(known_turns, key=_turned)
        sentences.append(
            f"Decay makes no layer turn {times(RULES.acts)} as far per step: it is"
            f" {times(_turned(most))} at most ({_layer(most.layer)})."
        )
    if turned:
        most = max(turned, key=_turned)
        text = f"Decay makes {_layer(most.layer)} turn {times(_turned(most))} as far per step"
        if most.by_decay is not None:
            text += f", at {times(most.by_decay)} the norm"
        if most.role == "adapter":
            text += "; what it adds to the frozen network goes with its size"
        elif most.size_response is not None:
            little = most.size_response <= RULES.size_little
            matters = "hardly matters" if little else "matters too"
            text += f"; its size itself {matters} ({_responded(most.size_response)} % per percent)"
        sentences.append(f"{text}.")
    if len(turned) > 1:
        all_turned = geometric_mean(_turned(m) for m in turned)
        sentences.append(
            f"{_count(turned, moved).capitalize()} layers with decay turn at least"
            f" {times(RULES.acts)} as far, {times(all_turned)} on average."
        )
    foretold = [m.foretold.value / _turned(m) for m in known_turns if m.foretold is not None]
    if foretold:
        factors = "the factor" if len(foretold) == 1 else "these factors"
        off = _range(foretold, times)
        sentences.append(f"Estimated from this run alone, {factors} would be {off} as large.")
    if moved:
        sentences.append(_decay_time(moved))
    known = [m for m in moved if m.settled is not None]
    if known:
        sentences.append(_balance(known))
    return sentences


def _count(some: Sequence[Motion], every: Sequence[Motion]) -> str:
    """How many of all: "3 of 7", "both", "all 7"."""
    if len(some) < len(every):
        return f"{len(some)} of {len(every)}"
    return "both" if len(every) == 2 else f"all {len(every)}"


def _turned(m: Motion) -> float:
    return m.turned.value if m.turned is not None else 1.0


def _decay_time(moved: Sequence[Motion]) -> str:
    needs = _range([m.timescale for m in moved if m.timescale], three_digits)
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
    return [_ended(advice(why, diagnosis.places)) for why in diagnosis.follows]


def plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, for JSON: the data, and the words beside them."""

    def told(why: Because) -> dict[str, str]:
        return {"reason": _code(why.reason), "text": advice(why, diagnosis.places)}

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
                "title": verdict_title(f),
                "reasons": [told(why) for why in f.reasons],
                "remedies": [told(why) for why in f.remedies],
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


def _code(reason: Reason) -> str:
    return reason.name.lower().replace("_", "-")


def group_text(group: "GroupAdvice", budget: int) -> str:
    """What is suggested for layers that are stepped alike."""
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
    """Notes beside a suggestion, as one string."""
    return "; ".join(sentence(note) for note in notes)
