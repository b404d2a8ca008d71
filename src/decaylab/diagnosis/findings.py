"""The parts that verdicts are made of: thresholds, rows by layer, and the words."""

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from decaylab.diagnosis.bursts import burst_words, bursts
from decaylab.diagnosis.evidence import (
    Effect,
    effect_of,
    ratio,
    remembers_too_much,
    three_digits,
    too_few_shares,
)
from decaylab.diagnosis.layers import TOO_LITTLE_EXPOSURE, LayerRecord
from decaylab.diagnosis.observed import Observed
from decaylab.diagnosis.result import MECHANISMS, Finding, LayerEvidence, Verdict

# A learning rate is searched by factors of about three and a factor of 1.25 in it is the least that
# anybody would notice; two seeds of one run differ by a few per cent, so 1.1 is none.
ACTS, NOTHING = 1.25, 1.1
# |J|^2 of two seeds differs by tens of per cent, and the paper's effects are 3 to 30 (Table 2).
JACOBIAN_ACTS, JACOBIAN_NOTHING = 1.5, 1.2
# Where so little is left of a norm, decay has won over the gradients.
COLLAPSED = 1e-3
# Nine tenths of the directions are second-order: what damping does to the rest changes little.
DAMPING_NEGLIGIBLE = 0.9
# Second-order shares of two seeds differ by so much (results/demo): decay has not raised it.
SAME_SHARE = 0.02
# Less than half of the directions are second-order: K-FAC steps as SGD does in most of them.
DAMPING_DOMINATES = 0.5
# Which row stands for the function's sensitivity, best first (Sec. 4.2, Table 2, Fig. 5).
SENSITIVITY = {
    "jacobian_norm": "squared Jacobian norm",
    "kfac_gn_norm": "K-FAC Gauss-Newton norm",
    "gn_norm": "Gauss-Newton norm",
}

Rows = tuple[LayerEvidence, ...]
LARGER, SMALLER = ", larger by", ", smaller by"
NO_COMMON_STEP = "no records at a common step"
SAME_STEPS = "record both runs at the same steps (the same every=)"
GIVE_BASELINE = "give a baseline, the same run without decay (`decaylab diagnose RUN BASELINE`)"


def judged(effect: Effect | None, acts: float = ACTS, nothing: float = NOTHING) -> Verdict:
    """The verdict on one factor."""
    if effect is None:
        return "cannot tell"
    if effect.value >= acts:
        return "acts"
    return "does not act" if effect.value <= nothing else "cannot tell"


def decayed_layers(run: Observed) -> list[LayerRecord]:
    """Those with a decay term that are not skipped."""
    return [x for x in run.layers.values() if x.decayed and not x.skipped]


def judgeable(run: Observed) -> list[LayerRecord]:
    """The scale-invariant ones among the decayed layers."""
    return [layer for layer in decayed_layers(run) if layer.invariant]


def collapsed(run: Observed) -> str:
    """The decayed layers of whose norm hardly anything is left, by name."""
    return _names([layer.name for layer in decayed_layers(run) if has_collapsed(layer)])


def has_collapsed(layer: LayerRecord) -> bool:
    """Whether hardly anything is left of its norm."""
    return layer.norms[-1][1] < COLLAPSED * layer.norms[0][1]


def by_kfac(layer: LayerRecord) -> bool:
    """Whether K-FAC steps it: its law is lr/|W|^0."""
    return layer.setting is not None and layer.setting.power == 0


def no_decay(run: Observed, name: str, quantity: str, *, joint: bool = False) -> Finding | None:
    """Where the records show nothing, where nothing decays, or too little.

    `joint`: what decay takes of each layer adds up, as in the Jacobian, a product over layers.
    """
    decayed = decayed_layers(run)
    skipped = [layer.skipped for layer in run.layers.values()]
    if skipped and all(reason.startswith("frozen") for reason in skipped):
        reason = "Every layer is frozen, so decay changes none."
        return Finding(name, quantity, "does not act", reason)
    if all(skipped):
        would = "train inside `with watch(model, optimizer, every=...)`, for several records"
        if run.own:
            would = "train it for some epochs, with a learning rate at which it does not diverge"
        return Finding(
            *(name, quantity, "cannot tell"),
            "No layer is recorded well enough to be judged.",
            would_decide=would,
        )
    if not decayed:
        return Finding(name, quantity, "does not act", "No layer has weight decay.")
    return _too_little(run, name, quantity, decayed, sum if joint else max)


def _too_little(
    run: Observed,
    name: str,
    quantity: str,
    layers: list[LayerRecord],
    together: Callable[[list[float]], float] = max,
) -> Finding | None:
    """Where decay took next to nothing of any of these layers, or of all of them together."""
    exposures = [layer.total_exposure for layer in layers if layer.total_exposure is not None]
    if len(exposures) < len(layers) or together(exposures) >= TOO_LITTLE_EXPOSURE:
        return None
    first = min(step for layer in layers for step, _ in layer.norms)
    over = f"steps {first} to {run.steps}" if first > 1 else f"the {run.steps} steps of the run"
    reason = (
        f"Over {over}, decay removed {100 * max(exposures):.2g} % of the weights: too little to"
        " act."
    )
    return Finding(name, quantity, "does not act", reason)


def at_once(run: Observed, name: str, quantity: str) -> Finding | None:
    """As `no_decay`, for what acts on scale-invariant layers only: where none decays, too."""
    early = no_decay(run, name, quantity)
    if early is not None:
        return early
    if of := judgeable(run):
        return _too_little(run, name, quantity, of)
    if any(layer.invariant for layer in run.layers.values()):
        reason = "No scale-invariant layer has decay. This mechanism acts on such layers only."
    else:
        reason = (
            "No trained layer is scale-invariant: rescaling its weights changes the output. This"
            " mechanism acts on scale-invariant layers only."
        )
    rows = layer_rows(run, None, lambda layer, other: None)
    return Finding(name, quantity, "does not act", reason, layers=rows)


def layer_rows(
    run: Observed,
    baseline: Observed | None,
    effect_on: Callable[[LayerRecord, LayerRecord | None], Effect | None],
    *,
    kfac_only: bool = False,
) -> Rows:
    """A row for every layer; `effect_on` is asked of those that the mechanism can act on.

    It is given the layer, and the same one in the baseline.
    """
    rows = []
    for layer in run.layers.values():
        apart = layer.skipped or _why_apart(layer)
        if not apart and kfac_only and not by_kfac(layer):
            apart = "not preconditioned by K-FAC"
        if apart:
            rows.append(LayerEvidence(layer.name, None, None, apart))
            continue
        effect = effect_on(layer, same(layer, baseline))
        reason = ""
        if effect is None:
            reason = _no_effect(layer) if baseline is None else NO_COMMON_STEP
        rows.append(LayerEvidence(layer.name, judged(effect), effect, reason))
    return tuple(rows)


def _why_apart(layer: LayerRecord) -> str:
    if not layer.invariant:
        return "not scale-invariant: its norm is part of the function"
    return "" if layer.decayed else "not decayed"


def _no_effect(layer: LayerRecord) -> str:
    """Why one run shows no effect on a layer that the mechanism can act on."""
    if layer.unknown:
        return f"{layer.unknown}, so one run does not show what it removes: needs a baseline"
    if layer.kfac_clipped:
        return "its gradients are clipped: needs a baseline"
    if by_kfac(layer) and "second_order_share" not in layer.series:
        return "its second-order share is not recorded"
    if by_kfac(layer) and too_few_shares(layer):
        return "its second-order share is recorded too seldom: needs a baseline"
    if remembers_too_much(layer):
        return "K-FAC's factors remember norms that decay has since changed much: needs a baseline"
    return "how its step depends on its norm is not known: needs a baseline"


def function_row(layer: LayerRecord, baseline: Observed | None) -> LayerEvidence:
    """A layer's part in the Jacobian: its norm (or its K-FAC norm), against the baseline."""
    if layer.skipped or not layer.decayed:
        return LayerEvidence(layer.name, None, None, layer.skipped or "not decayed")
    if layer.invariant:
        reason = "scale-invariant: its norm does not change the function"
        return LayerEvidence(layer.name, None, None, reason)
    other = same(layer, baseline)
    if other is None:
        return LayerEvidence(layer.name, None, None, "needs a baseline")
    own, others = (of.series.get("kfac_gn_norm", ()) for of in (layer, other))
    probe = "kfac_gn_norm" if ratio(others, own) else "weight_norm"
    ratios = ratio(others, own) or ratio(other.norms, layer.norms)
    effect = effect_of(ratios, (probe,), "baseline")
    return LayerEvidence(layer.name, None, effect, "" if effect else NO_COMMON_STEP)


def same(layer: LayerRecord, baseline: Observed | None) -> LayerRecord | None:
    """The same layer in the baseline, if there is one."""
    return baseline.layers.get(layer.name) if baseline is not None else None


def last_share(layers: Iterable[LayerRecord]) -> float | None:
    """The second-order share at the end: the mean over the given layers."""
    last = [
        x.series["second_order_share"][-1][1] for x in layers if "second_order_share" in x.series
    ]
    return fmean(last) if last else None


def found_by(
    name: str,
    quantity: str,
    effect: Effect | None,
    rows: Rows,
    run: Observed,
    thresholds: tuple[float, float] = (ACTS, NOTHING),
    *,
    joint: bool = False,
) -> Finding:
    """The finding on a measured factor, with its words; `joint`: as in `no_decay`."""
    words = quantity.removesuffix(LARGER).removesuffix(SMALLER)
    verdict = judged(effect, *thresholds)
    if effect is None:
        needs = ": needs a baseline"  # that is said behind it
        reasons = dict.fromkeys(row.reason.removesuffix(needs) for row in rows if row.verdict)
        return Finding(
            *(name, quantity, verdict),
            f"There is nothing to compare with: {'; '.join(reasons)}.",
            layers=rows,
            would_decide=SAME_STEPS if NO_COMMON_STEP in reasons else GIVE_BASELINE,
        )
    compared = [run.layers[row.layer] for row in rows if row.effect]
    exposures = _exposures_at(compared or run.layers.values(), effect.steps[1])
    if (early := _implausible(name, quantity, effect, rows, exposures, joint=joint)) is not None:
        return early
    reached = max(exposures, default=None)
    change = "raises" if quantity.endswith(LARGER) else "lowers"
    against = ""
    if effect.source != "baseline":
        against = ", compared with a reconstruction of this run without decay"
    changed = f"The {words} changes by a factor of {effect.words()}{against}."
    said = f"Decay {change} the {words} by a factor of {effect.words()}{against}."
    if effect.value < 1 / thresholds[0]:
        opposite = "lowers" if change == "raises" else "raises"
        said = (
            f"Decay {opposite} the {words} by a factor of {effect.inverse().words()}{against}. The"
            " mechanism predicts the opposite."
        )
    elif verdict != "acts":
        said = f"{changed} That is too little to matter."
        if reached is not None and reached < 1:
            part = 100 * -math.expm1(-reached)
            said += f" Decay has removed {part:.2g} % of the initial weights; a longer run may"
            said += " show more."
    would = ""
    acting = [row.layer for row in rows if row.verdict == "acts"]
    if verdict == "does not act" and acting and not joint:
        said = f"{changed} But in single layers it changes by more: {_names(acting)}."
        would = "train more seeds, and see whether it is the same layers again"
        return Finding(name, quantity, "cannot tell", said, effect, rows, would)
    if verdict == "cannot tell":
        nothing, acts = thresholds[1], thresholds[0]
        said = f'{changed} "Does not act" ends at {nothing:g}, and "acts" begins at {acts:g}.'
        would = "train more seeds, or longer; or " + (
            GIVE_BASELINE
            if effect.source != "baseline"
            else "give a second baseline of another seed"
        )
    return Finding(name, quantity, verdict, said, effect, rows, would)


def _implausible(
    name: str, quantity: str, effect: Effect, rows: Rows, exposures: list[float], *, joint: bool
) -> Finding | None:
    """Where decay cannot have changed so much by then: 1/|W|^2 by exp(2 x exposure) at most."""
    if not exposures:
        return None
    reached = max(exposures)
    if (sum(exposures) if joint else reached) < TOO_LITTLE_EXPOSURE:
        return Finding(
            *(name, quantity, "cannot tell"),
            f"Both runs are recorded only up to step {effect.steps[1]}, when decay had removed"
            f" {100 * reached:.2g} % of the weights: too early to tell.",
            *(effect, rows),
            would_decide="record both runs further into training",
        )
    most = math.exp(min(2 * reached, 700))
    if joint or effect.source != "baseline" or effect.value <= ACTS * most:
        return None
    words = quantity.removesuffix(LARGER).removesuffix(SMALLER)
    return Finding(
        *(name, quantity, "cannot tell"),
        f"The {words} changes by a factor of {effect.words()}. Decay has removed"
        f" {100 * -math.expm1(-reached):.2g} % of the initial weights, which makes"
        f" {three_digits(most)} at most: the two runs differ in something else too.",
        *(effect, rows),
        would_decide="give a baseline with the same data, batch size and seed",
    )


def _exposures_at(layers: Iterable[LayerRecord], step: int) -> list[float]:
    """The decay exposure of each layer at a step, where it is recorded."""
    known = [layer for layer in layers if layer.total_exposure is not None]
    reached = [[value for s, value in layer.exposure if s <= step] for layer in known]
    return [values[-1] for values in reached if values]


def record(run: Observed, *, both: bool = False) -> str:
    """How to have what is lacking recorded, in the run's own way."""
    if run.own:
        what = "the Jacobian norm of both runs" if both else "it"
        return f"record {what} with `decaylab probe RUN --record`"
    of = "both runs" if both else "it"
    return f'record {of} with watch(..., probes="diagnosis", inputs=batch)'


def same_share(shares: Mapping[str, float | None]) -> bool:
    """Whether two measured runs are as much second-order with decay as without."""
    mine, other = shares.get("with decay"), shares.get("without")
    return mine is not None and other is not None and abs(mine - other) < SAME_SHARE


def what_follows(
    run: Observed, findings: tuple[Finding, ...], shares: Mapping[str, float | None]
) -> list[str]:
    """Plain words on which decay matters, and what would replace it."""
    lr, jacobian, damping = findings
    invariant = judgeable(run)
    others = [layer.name for layer in decayed_layers(run) if not layer.invariant]
    others += ["the gains of normalisations"] * (run.decayed_gains and bool(decayed_layers(run)))
    said = []
    if invariant:
        names = _names([layer.name for layer in invariant])
        said.append(
            f"Decay of the scale-invariant layers ({names}) does not change the function by itself."
            " It only sets how far each step turns their weights."
        )
        if lr.verdict != "acts" and damping.verdict == "acts" and same_share(shares):
            said.append(
                "In this run decay keeps the effective damping low, but K-FAC's steps are no more"
                " second-order for it."
            )
        elif "acts" in (lr.verdict, damping.verdict):
            said.append("In this run that matters: decay " + _through(lr, damping) + ".")
        if lr.verdict == damping.verdict == "does not act":
            if not (_opposite(lr) or _opposite(damping) or run.diverged):
                said.append(
                    "In this run decay of these layers has no effect: it could be left out."
                )
        else:
            said += _schedule_words(invariant)
    if others:
        verb = {
            "acts": "matters: it makes the Jacobian smaller",
            "does not act": "has little effect on the Jacobian",
        }
        words = verb.get(
            jacobian.verdict, "changes the function. Whether that matters is not decided"
        )
        if _opposite(jacobian):
            words = "goes with a larger Jacobian"
        said.append(f"Decay of what is not scale-invariant ({_names(others)}) {words}.")
    if not said:
        said.append(
            "Nothing yet: no layer with decay could be judged."
            if run.decays or not run.settled
            else "This run has no weight decay to keep or to drop."
        )
    burst = [one for layer in invariant for one in bursts(layer)]
    if burst:
        burst.sort(key=lambda one: one.before / one.after)  # the largest first
        said.append(burst_words(burst, run.layers[burst[0].layer].setting))
    preconditioned = [x for x in run.layers.values() if x.invariant and by_kfac(x)]
    share = last_share(preconditioned)
    if share is not None and share < DAMPING_DOMINATES:
        said.append(
            "Damping has come to dominate K-FAC: the second-order share of the scale-invariant"
            f" layers is {100 * share:.0f} % at the end. In the remaining directions K-FAC steps"
            f" like SGD.{'' if burst else _lower_damping(preconditioned)}"
        )
    return said


def _lower_damping(layers: list[LayerRecord]) -> str:
    """What helps against it, and where nothing should be done.

    Scale-free damping falls where weights have grown, and there alone. The Fisher matrix vanishes
    once the data are fitted; with less damping, steps grow then until one is too long (a burst).
    """
    fixed = [x for x in layers if x.norms and x.setting and not x.setting.scale_free]
    grown = sum(math.log(x.norms[-1][1] / x.norms[0][1]) for x in fixed) > 0
    remedy = "Lower the damping" + (', or use damping_scaling="scale-free"' if grown else "")
    return f" {remedy}, unless this is K-FAC-F that has fitted its data (no Fisher matrix is left)."


def _opposite(finding: Finding) -> bool:
    """Whether the change is as large as that of a mechanism that acts, but the other way."""
    acts = JACOBIAN_ACTS if finding.mechanism == MECHANISMS[1] else ACTS
    return finding.effect is not None and finding.effect.value < 1 / acts


def _through(lr: Finding, damping: Finding) -> str:
    ways = ["keeps the effective learning rate high"] * (lr.verdict == "acts")
    ways += ["keeps the effective damping low"] * (damping.verdict == "acts")
    return " and ".join(ways)


def _schedule_words(layers: list[LayerRecord]) -> list[str]:
    """By how much lr would have to grow without decay (`advise schedule` writes it out)."""
    first = max(layers, key=lambda layer: layer.total_exposure or 0.0)  # one may be frozen early
    exposure, power = first.total_exposure, first.setting.power if first.setting else None
    if not (exposure and power) or any(layer.settings != first.settings for layer in layers):
        return []  # one schedule is for layers that are stepped alike
    # Adam's law is SGD's as long as it remembers the norms of the start (`memory`)
    least, growth = ("at least ", "exposure") if power == 1 else ("about ", f"{power} x exposure")
    return [
        "Without decay, the same motion needs a learning rate that is higher than this run's, by a"
        f" factor that grows to {least}exp({growth}) ="
        f" {three_digits(math.exp(min(power * exposure, 700)))}, for these layers only. (The"
        " exposure is the fraction of the weights that decay removes per step, summed over the"
        f" steps: {exposure:.3g}.) `decaylab advise schedule RUN --out schedule.csv` writes such a"
        " schedule."
    ]


def _names(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
