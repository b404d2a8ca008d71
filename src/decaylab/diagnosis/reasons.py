"""Every reason that a diagnosis or advice can give, with its words and its data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, unique
from typing import Any


class Verdict(StrEnum):
    """On one mechanism or one layer."""

    ACTS = "acts"
    DOES_NOT_ACT = "does not act"
    CANNOT_TELL = "cannot tell"


class Mechanism(StrEnum):
    """The paper's three, in its order."""

    EFFECTIVE_LR = "effective learning rate"
    JACOBIAN = "Jacobian norm"
    DAMPING = "effective damping"


@unique
class Reason(Enum):
    """The name identifies a reason; the value is its words. Grouped by what they are about.

    `{layers:names}` is the data `layers`, written by `words.reasons.KINDS["names"]`;
    `{places:...}` is where the runs are. No code depends on these words.
    """

    # the records as a whole, printed first
    DAMAGED = "{damaged:damaged}"
    DIVERGED = "it diverged at step {step}: only the steps before are judged"
    RUN_DIVERGED = "it diverged ({message})"
    NOT_FINITE = "{bad:not finite}"
    PROBABLY_DIVERGED = "{bad:not finite}, {lasting} to the end: it has probably diverged"
    UNFINISHED = "it is not finished ({status}): {epochs} of {of} epochs are judged"
    NOTHING_RECORDED = "nothing was recorded: train inside `with watch(model, optimizer):`"
    BEGINS_LATE = (
        "its records begin at step {step}, so what decay did before that is not judged (with"
        " folder=..., a run that is resumed keeps its records)"
    )
    STEPPED_BEFORE = (
        "its optimizer had taken steps before it was watched: steps are counted from there, and"
        " what decay did before is not judged"
    )
    OPTIMIZER_CHANGED = "its optimizer changed at step {step}; the run is still judged as a whole"
    OPTIMIZER_JOINED = (
        "{optimizer} was not passed to watch, so it is watched only from its first step, after step"
        " {step}: pass watch all optimizers"
    )
    SHARED_PARAMETERS = (
        "two optimizers step {parameters:names}: only the first one's settings are used"
    )
    UNSTEPPED_PARAMETERS = (
        "no watched optimizer steps {parameters:names}: if another one does, pass watch both"
    )
    NO_SETTINGS = "the optimizer's settings are not in these records: record them again"
    TOO_FEW_NORMS = (
        "it has fewer than two records of the norms, so no layer can be judged: keep `weight_norm`"
        " among the probes, and lower `every`"
    )
    TOO_FEW_EPOCHS = (
        "it has fewer than two records of the norms, which are recorded after each epoch, so no"
        " layer can be judged"
    )
    GRADIENTS_ALONG = (
        "{layers:names}: a normalisation comes next in the model, but the gradients point along the"
        " weights, so they do not count as scale-invariant. To measure it, pass inputs=batch to"
        " watch"
    )
    EPS_COUNTS = (
        "{layers:names}: the optimizer's eps is more than a tenth of what it is added to, so its"
        " steps are neither Adam's nor SGD's. Lower it"
    )
    COLLAPSED = (
        "decay has removed nearly all of {layers:names}: it is too strong. Weights that small are"
        " no longer scale-invariant, and the factors below mean little"
    )
    NO_DECAY = (
        "no layer has weight decay in its optimizer (a penalty in the loss, or decay that the loop"
        " does itself, is not seen)"
    )
    LOST_TO_ROUNDING = (
        "rounding undoes all weight decay of {layers:names}: W (1 - lr x decay) is W in the number"
        " format of these weights. Keep them in float32, with autocast if need be"
    )
    SWAPPED = "no layer has weight decay, but the baseline has it: did you swap the two?"
    UNWATCHED = (
        "{layers:names}: stepped by an optimizer that is not watched, so their decay is unknown"
    )
    # runs that do not belong together
    BASELINE_DECAYS = "the baseline has weight decay: judged without the baseline"
    OTHER_SPEC = "the runs are not comparable ({fields:settings})"
    OTHER_LAYERS = "the runs are not comparable (they have different layers)"
    OTHER_OPTIMIZER = "the runs are not comparable (layer {layer} has another optimizer)"
    OTHER_SIZE = "the runs are not comparable (layer {layer}: {pair[0]} and {pair[1]} weights)"
    OTHER_START = (
        "the runs are not comparable (layer {layer}: norms {pair[0]:.3g} and {pair[1]:.3g} at step"
        " {step}, before decay can act)"
    )
    OTHER_SETTING = (
        "the runs are not comparable (layer {layer}: {name} {pair[0]:value} and"
        " {pair[1]:value}{step:at})"
    )
    OTHER_LR = (
        "the runs are not comparable ({lengths:lengths}lr {pair[0]:digits} and {pair[1]:digits} at"
        " step {step})"
    )
    OTHER_GROWTH = (
        "the runs are not comparable (at step {step} the baseline's scale-invariant layers have"
        " {seen:digits} times this run's |W|^2, where start and decay explain {least:digits} to"
        " {largest:digits}: use the same data, batch size and seed)"
    )
    SEED_LEFT_OUT = "left out: {why:sentence}"
    DIFFERS = "{name} differs: {pair[0]:value} and {pair[1]:value}"
    STEPS_DIFFER = "steps differ: {pair[0]} and {pair[1]}; only those in both are compared"
    OTHER_CLIPPING = (
        "the gradients of {name} are clipped to a norm of {bound:digits}, those of the other run"
        " reach {largest:digits}: what differs may be due to that, not to decay. Clip both alike"
    )
    # layers that cannot be judged: one, or several for the same reason
    FROZEN = "frozen: not trained"
    NOT_STEPPED = "stepped by no watched optimizer"
    NO_LAYER_SETTINGS = "the optimizer's settings are not in the records"
    RECORDED_ONCE = "fewer than two records of the norm"
    ZEROS = "weights of zero, which have no direction"
    NEVER_MOVED = "moved by no step: no gradient, a learning rate of 0, or steps lost in rounding"
    # how much decay removes from a layer is not known
    L2_RESCALED = "the optimizer rescales L2"
    KIND_UNKNOWN = "its decay is {kind!r}, which removes no fixed fraction of the weights"
    OWN_LR = "its optimizer finds its learning rate itself"
    ROUNDED_AWAY = "its weights have 16 bits, and rounding may undo the decay"
    TAKES_ALL = "decay is strong enough to remove all of the weights in one step"
    # a layer's part in a mechanism
    SIZE_COUNTS = "its size is part of the function{response:per percent}"
    GAIN = "a normalisation's gain: part of the function"
    ADAPTER = "an adapter: what it adds to the frozen network depends on its size"
    INVARIANCE_UNKNOWN = (
        "How much the size of {layers:names} counts is not known: it was not measured, a gain of"
        " zero hides it, or the measured outputs do not depend on it"
    )
    SIZE_IN_DOUBT = (
        "The verdict depends on whether the size of {responses:names} counts, which is a close"
        " call: the outputs change by {responses:responses} % per percent, and {limit:g} % is the"
        " limit."
    )
    INVARIANT = "scale-invariant: its norm does not change the function"
    NOT_DECAYED = "not decayed"
    NOT_KFAC = "not preconditioned by K-FAC"
    NO_COMMON_STEP = "no records at a common step"
    NEEDS_BASELINE = "needs a baseline"
    GRADIENTS_CLIPPED = "its gradients are clipped"
    NO_SHARES = "its second-order share is not recorded"
    FEW_SHARES = "its second-order share is recorded too rarely"
    OLD_FACTORS = "K-FAC measured its factors at norms that decay has since changed a lot"
    LAW_UNKNOWN = "how its step depends on its norm is not known"
    PUSHES_UNKNOWN = (
        "its steps are as long as its gradients, and a single run does not show how long those"
        " would be without decay"
    )
    # a mechanism
    ALL_FROZEN = "Every layer is frozen, so decay changes nothing."
    NONE_JUDGEABLE = "No layer is recorded well enough to be judged."
    NO_LAYER_DECAYS = "No layer has weight decay."
    ALL_LOST = "Rounding undoes all weight decay."
    TOO_LITTLE = (
        "Over {steps:steps}, decay removed {taken:taken} of the weights: too little to"
        " act.{enough:enough steps}"
    )
    NO_INVARIANT_DECAYS = (
        "No scale-invariant layer has decay. This mechanism acts on layers whose size does not"
        " count."
    )
    NO_INVARIANT = (
        "The size of every trained layer is part of the function. This mechanism acts on layers"
        " whose size does not count."
    )
    CLIPPED = (
        "The gradients are clipped at {share:percent} of the records. How far such steps would turn"
        " weights of another norm is not known."
    )
    OLD_CURVATURE = (
        "Without damping, K-FAC's step turns the weights by lr, whatever their norm (Eq. 13). But"
        " here it divides by the curvature of earlier weights, which decay has since shrunk: steps"
        " are {longer:times} longer{clip:clip}."
    )
    OLD_CURVATURE_TURNS = (
        "Without damping, K-FAC's step turns the weights by lr, whatever their norm (Eq. 13). But"
        " here it divides by the curvature of earlier weights, which decay has since shrunk: steps"
        " turn them {turned:effect} as far, as recorded."
    )
    UNDAMPED_BY_LR = (
        "Without damping, K-FAC's step turns the weights by lr, whatever their norm (Eq. 13). The"
        " norm acts through the damping, see below."
    )
    BY_LR = "This optimizer turns the weights equally far, whatever their norm."
    ONLY_KFAC_DAMPS = "Only K-FAC has a damping, and this optimizer is not K-FAC."
    NO_KFAC_LAYER = "K-FAC preconditions no scale-invariant layer that has decay."
    SCALE_FREE = (
        "The damping is scaled along with each layer's curvature, so decay does not change its"
        " effect."
    )
    SHARE_UNKNOWN = (
        "The second-order share is not recorded, so it is not known whether damping matters."
    )
    DAMPING_NEGLIGIBLE = "Damping hardly matters: the second-order share is {shares:shares}."
    SHARES = "The second-order share is {shares:shares}."
    SAME_SHARES = "That is no change: the curvature of the normalised weights is lower too."
    ALL_INVARIANT = (
        "Every decayed layer is scale-invariant, so decay does not change the function by itself."
        " Any change of the Jacobian comes through the other two mechanisms."
    )
    JACOBIAN_ALONE = "A single run does not show what the Jacobian would be without decay."
    NO_SENSITIVITY = (
        "Neither a Jacobian nor a Gauss-Newton norm is recorded in both runs at a common step."
    )
    SENSITIVITY_FAILED = "`{probe}` could not be measured: {error}."
    OTHER_INPUTS = (
        "{change:change}. But the runs measured it on other inputs, of root mean square"
        " {pair[0]:digits} and {pair[1]:digits}."
    )
    THROUGH_OTHERS = "Part of it may come through the {mechanisms:and the} of the other layers."
    NOTHING_TO_COMPARE = "There is nothing to compare with: {why:by layers}."
    CHANGED = "{change:change}."
    LOWER_ESTIMATE = (
        "This is a lower estimate: after so much decay, SGD's gradients are no longer those of a"
        " run without it. In all pairs of such runs in our records, comparing with the baseline"
        " gave a larger factor (docs/diagnosis.md)."
    )
    LONGER_STEPS = (
        "Smaller norms account for {smaller:times} of this. The steps are also {longer:times} as"
        " long as without decay, which can happen once only one of the runs fits its data."
    )
    HARDLY_CHANGED = "{change:change}, too little to matter."
    SCATTERS = "{change:change}, but the records scatter too widely to tell."
    MAY_SHOW_MORE = (
        "Decay has removed {taken:removed} of the initial weights so far and needs about"
        " {full:step count} steps to take full effect: a longer run may show more."
    )
    OPPOSITE = "{change:change}. The mechanism predicts the opposite."
    SOME_LAYERS_MORE = "But in some layers it changes more: {layers:names}."
    BETWEEN = (
        "Up to {nothing:g}x counts as no effect, and {acts:g}x or more as one; this is in between."
    )
    TOO_EARLY = (
        "Both runs are recorded only up to step {step}, when decay had removed {taken:taken} of the"
        " weights: too early to tell."
    )
    MORE_THAN_DECAY = (
        "{change:change}. Decay has removed {taken:removed} of the initial weights, which explains"
        " {most:times} at most. Something else differs too: data, batch size, or how well the runs"
        " fit their data."
    )
    SEEDS_DISAGREE = "The seeds disagree: {counts:counts}."
    # what would decide it
    GIVE_BASELINE = "{places:give baseline}"
    RECORD_IN_BOTH = "record the Jacobian norm{places:record}"
    RECORD_DENSELY = "record it more often, or on a larger batch (every= and inputs= of watch)"
    RECORD_ANOTHER = (
        "record another of jacobian_norm, gn_norm and kfac_gn_norm in all runs, with"
        " probes=[...] and inputs=batch"
    )
    RECORD_SAME_WAY = "{places:record the same}"
    RECORD_SAME_INPUTS = "give watch the same inputs= in both runs"
    RECORD_SHARE = "record it{places:record}"
    SAME_STEPS = "record both runs at the same steps (the same every=)"
    RECORD_FURTHER = "record both runs further into training"
    SAME_DATA = "give a baseline with the same data, batch size and seed"
    MORE_SEEDS = "{places:more seeds}"
    ATTRIBUTE = "{places:attribute}"
    NAME_THE_LAW = (
        'state its law in its param groups, as group["law"] (docs/extend.md), or train with SGD,'
        " K-FAC or Adam without amsgrad"
    )
    NO_CLIPPING = "train without clipping, or with Adam"
    RENEW_CURVATURE = "refresh the curvature more often (KFAC's refresh_every, invert_every)"
    RECORD_MORE = "train inside `with watch(model, optimizer, every=...)`, for several records"
    TRAIN_LONGER = "train it for a few epochs, at a learning rate where it does not diverge"
    GIVE_INPUTS = (
        'pass probes="diagnosis" and inputs=batch to watch, which then measures how the outputs'
        " respond to each layer's size (logits= says which outputs)"
    )
    GIVE_SETTINGS = (
        "give the watch itself or its folder, which say how the layers are stepped, or record the"
        " run again"
    )
    WATCH_ALL = "watch all optimizers: watch(model, [first, second])"
    # what follows
    DIRECTION_ONLY = (
        "Decay of the scale-invariant layers ({layers:names}) does not change the function by"
        " itself.{by_lr:turned by decay}"
    )
    NEARLY_DIRECTION_ONLY = (
        "Decay of the layers whose size hardly matters ({layers:names}) hardly changes the function"
        " by itself.{by_lr:turned by decay}"
    )
    RAISES_LR = (
        "In this run decay keeps the effective learning rate high: each step turns these layers"
        " further."
    )
    LOWERS_DAMPING = "In this run decay keeps K-FAC's effective damping low."
    NO_MORE_SECOND_ORDER = (
        "In this run decay keeps the effective damping low, but K-FAC's steps are no more"
        " second-order than without it."
    )
    NO_EFFECT = "In this run decay of these layers has no effect: it could be left out."
    NO_EFFECT_YET = "So far, decay of these layers has no effect."
    SCHEDULE = (
        "To move {some:these layers} as far without decay, raise their learning rate over the run,"
        " to {remembers:at least}{factor:times} at the end: `{places:schedule}` writes the"
        " schedule."
    )
    REACTS_LESS = (
        "Decay of the layers whose size counts ({counting:counting}) changes the function: the"
        " outputs react less to the inputs."
    )
    REACTS_ALIKE = (
        "Decay of the layers whose size counts ({counting:counting}) hardly changes how the outputs"
        " react to the inputs."
    )
    SIZES_UNKNOWN = (
        "What decay of {layers:names} does is open: how much size counts there was not measured, a"
        " gain of zero hides it, or the measured outputs do not depend on it."
    )
    REACTS_MORE = (
        "Decay of the layers whose size counts ({counting:counting}) comes with outputs that react"
        " more."
    )
    REACTS_OPEN = (
        "Decay of the layers whose size counts ({counting:counting}) changes the function; whether"
        " that matters is still open."
    )
    ADAPTERS = (
        "Decay of the adapters ({layers:names}) pulls the network back towards the frozen one."
    )
    NOTHING_YET = "Nothing yet: no layer with decay could be judged."
    NOTHING_TO_DROP = "There is no weight decay to keep or to drop."
    BURST = (
        "A burst: after step {burst.step} the norm of {burst.layer:layer} grew from"
        " {burst.before:.3g} to {burst.after:.3g} by the next record.{others:more like it} Decay"
        " had shrunk these weights, so each step turned them further, until one went too far. What"
        " helps at that stage: {remedy:sentence}."
    )
    SHORTER_STEPS = "a smaller lr or less decay"
    LARGER_DAMPING = "a larger damping, a smaller lr or less decay"
    SCALE_FREE_DAMPING = 'damping_scaling="scale-free", a smaller lr or less decay'
    DAMPING_DOMINATES = (
        "Damping has come to dominate K-FAC: the second-order share of the scale-invariant layers"
        " is {share:percent} at the end. In the remaining directions K-FAC steps like"
        " SGD.{remedies:and then}"
    )
    LOWER_DAMPING = (
        "Lower the damping{grown:or scale-free}, unless this is K-FAC-F on data that it has fitted,"
        " where the Fisher matrix vanishes."
    )
    # advice on a layer
    CHOOSE_BY_OUTCOME = "{counts:sentence}; choose its decay by the outcome"
    DAMPENED_OUT = "its dampening of 1 keeps gradients and L2 out of the momentum"
    NO_LR = "its learning rate is 0"
    TAKEN = "decay has removed nearly all of it: suggest from a run with less decay"
    DOES_NOT_GROW = "its norm does not grow, so no decay is needed to hold it"
    NO_ROTATION = "how far its steps turn it is not recorded: keep `movement` among watch's probes"
    ASK_FOR_LESS = (
        "to turn it that far, decay would have to remove half of it or more in a step: ask for less"
    )
    NOTHING_HOLDS = (
        "at the target norm a step adds {growth:digits} times |W|^2, which no decay can hold: lower"
        " the learning rate"
    )
    TURNS_BY_LR = "the weights turn by lr, whatever their norm"
    ROUGH = "rough: up to {factor:times} too {way}; suggest from a run nearer to the target"
    MIXED = "rough: decay removes much of the weights while steps still agree"
    ON_ITS_WAY = (
        "still on its way from {norm:.3g} to {balance:.3g}; a third of the way is left after"
        " {steps:digits} more steps"
    )
    FAR_SMALLER = "the present decay would take it from {norm:.3g} to less than a tenth of that"
    FAR_LARGER = "the present decay would take it from {norm:.3g} to more than ten times that"
    FOR_THE_BUDGET = (
        "chosen to act within {budget} steps; {holding:times} as much would hold the initial norm,"
        " but too slowly"
    )
    # advice on all of them
    NO_ONE_VALUE = (
        "no single value fits all of these layers: they differ in optimizer, learning rate,"
        " momentum or kind of decay, so give each group its own"
    )
    NO_SUGGESTION = "no suggestion for any layer whose size does not count; the notes say why"
    NO_CANDIDATE = "no suggestion: the size of every layer counts"


@dataclass(frozen=True)
class Because:
    """One reason, with the numbers and names that belong to it."""

    reason: Reason
    data: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]


def because(reason: Reason, **data: Any) -> Because:
    """`Because`, written short."""
    return Because(reason, data)


def has(reasons: Iterable[Because], reason: Reason) -> bool:
    """Whether one of them is this."""
    return any(item.reason is reason for item in reasons)
