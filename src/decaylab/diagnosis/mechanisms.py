"""Whether decay acts through each of the paper's three mechanisms, and why.

Each mechanism is judged in three steps: where nothing can act, or nothing shows it, that is the
finding (`_nothing_acts`, `_nothing_turns`); else a factor is measured on each layer or on the whole
model; and that factor is judged (`_judged_factor`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any

from decaylab.diagnosis.comparable import clipped_otherwise
from decaylab.diagnosis.effects import (
    Change,
    ComparedWith,
    Effect,
    damping_effect,
    effect_of,
    effective_lr_effect,
    judged_part,
    longer_by_memory,
    norm_effect,
    pooled,
    rotation_effect,
    share_without_decay,
)
from decaylab.diagnosis.layers import RecordedLayer, ratio
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict, because, has
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import Comparison, Run

ACTS, DOES_NOT_ACT, CANNOT_TELL = Verdict.ACTS, Verdict.DOES_NOT_ACT, Verdict.CANNOT_TELL
# Which row stands for the function's sensitivity, best first (Sec. 4.2, Table 2, Fig. 5).
SENSITIVITY = ("jacobian_norm", "kfac_gn_norm", "gn_norm")

Effects = Callable[[RecordedLayer, RecordedLayer | None], Effect | None]


@dataclass(frozen=True)
class LayerRow:
    """One layer's part in a mechanism. Without an effect, `why` says why."""

    layer: str
    verdict: Verdict | None
    effect: Effect | None
    why: Because | None = None


@dataclass(frozen=True)
class Finding:
    """One mechanism: the verdict, why, and what would decide it.

    `quantity`: the row that the effect of the whole model is read from. `layer_quantity`: what the
    layers' effects are of. `remedies` are empty unless the verdict is "cannot tell".
    """

    mechanism: Mechanism
    verdict: Verdict
    reasons: tuple[Because, ...]
    effect: Effect | None = None
    layers: tuple[LayerRow, ...] = ()
    remedies: tuple[Because, ...] = ()
    quantity: str = ""
    layer_quantity: str = ""

    def because_of(self, reason: Reason) -> Because | None:
        """The reason with its data, if it is one of this finding's."""
        return next((item for item in self.reasons if item.reason is reason), None)

    @property
    def opposite(self) -> bool:
        """Whether the change is as large as that of a mechanism that acts, but the other way."""
        return self.effect is not None and self.effect.value < 1 / thresholds(self.mechanism)[0]

    @property
    def effect_alone(self) -> Verdict:
        """The verdict on the whole model's effect, whatever else the finding rests on."""
        return judged(self.effect, *thresholds(self.mechanism))


def findings(compared: Comparison) -> tuple[Finding, Finding, Finding]:
    """The three mechanisms, in the paper's order."""
    damping = _damping(compared)
    jacobian = replace(_jacobian(compared), layer_quantity="weight_norm")
    return _effective_learning_rate(compared, damping), jacobian, damping


def _no(mechanism: Mechanism, reason: Because, **fields: Any) -> Finding:
    return Finding(mechanism, DOES_NOT_ACT, (reason,), **fields)


def _cannot_tell(
    mechanism: Mechanism, reason: Because, *remedies: Reason, **fields: Any
) -> Finding:
    todo = tuple(map(because, remedies))
    return Finding(mechanism, CANNOT_TELL, (reason,), remedies=todo, **fields)


# ---------------------------------------------------------------- before anything is compared


def _nothing_acts(run: Run, mechanism: Mechanism, *, joint: bool = False) -> Finding | None:
    """Where the records show nothing, where nothing decays, or too little.

    `joint`: what decay takes of each layer adds up, as in the Jacobian, a product over layers.
    """
    skipped = [layer.skipped for layer in run.layers.values()]
    if skipped and all(why is not None and why.reason is Reason.FROZEN for why in skipped):
        return _no(mechanism, because(Reason.ALL_FROZEN))
    known = run.layers and all(layer.settings for layer in run.layers.values())
    if all(why is not None for why in skipped) and (run.decays or not known):
        remedy = Reason.TRAIN_LONGER if run.spec is not None else Reason.RECORD_MORE
        return _cannot_tell(mechanism, because(Reason.NONE_JUDGEABLE), remedy)
    if run.decayed_layers or run.gains:
        return _too_little(run, mechanism, run.decayed_layers, sum if joint else max)
    if run.unwatched:
        reason = because(Reason.UNWATCHED, layers=run.unwatched)
        return _cannot_tell(mechanism, reason, Reason.WATCH_ALL)
    lost = has(run.troubles, Reason.LOST_TO_ROUNDING)
    return _no(mechanism, because(Reason.ALL_LOST if lost else Reason.NO_LAYER_DECAYS))


def _too_little(
    run: Run,
    mechanism: Mechanism,
    layers: list[RecordedLayer],
    together: Callable[[list[float]], float] = max,
) -> Finding | None:
    """Where decay took next to nothing of any of these layers, or of all of them together."""
    exposures = [layer.total_exposure for layer in layers if layer.total_exposure is not None]
    if not exposures or len(exposures) < len(layers):
        return None
    if together(exposures) >= RULES.too_little_exposure:
        return None
    first, taken = min(step for layer in layers for step, _ in layer.norms), max(exposures)
    rate = max(layer.mean_rate for layer in layers)
    enough = math.log(RULES.acts) / rate if rate else None
    reason = because(Reason.TOO_LITTLE, taken=taken, steps=(first, run.steps), enough=enough)
    return _no(mechanism, reason)


def _nothing_turns(run: Run, mechanism: Mechanism) -> Finding | None:
    """As `_nothing_acts`, for what acts on layers whose size is not part of the function."""
    if (early := _nothing_acts(run, mechanism)) is not None:
        return early
    if run.turned_layers:
        return _too_little(run, mechanism, run.turned_layers)
    rows = _layer_rows(Comparison(run), lambda layer, other: None)
    if hidden := [x.name for x in run.decayed_layers if x.size_counts is None]:
        reason = because(Reason.INVARIANCE_UNKNOWN, layers=hidden)
        return _cannot_tell(mechanism, reason, Reason.GIVE_INPUTS, layers=rows)
    some = any(layer.invariant for layer in run.layers.values())
    reason = because(Reason.NO_INVARIANT_DECAYS if some else Reason.NO_INVARIANT)
    return _no(mechanism, reason, layers=rows)


# ---------------------------------------------------------------- layer by layer


def _layer_rows(
    compared: Comparison, effect_on: Effects, *, kfac_only: bool = False
) -> tuple[LayerRow, ...]:
    """A row for every layer; `effect_on` is asked of those that the mechanism can act on."""
    rows = []
    for layer in compared.run.layers.values():
        if (why := layer.skipped or _why_not_turned(layer, kfac_only=kfac_only)) is not None:
            rows.append(LayerRow(layer.name, None, None, why))
            continue
        other = compared.other(layer)
        effect = effect_on(layer, other)
        if effect is None:
            why = _why_no_effect(layer) if other is None else because(Reason.NO_COMMON_STEP)
        rows.append(LayerRow(layer.name, judged(effect), effect, why))
    return tuple(rows)


def _why_not_turned(layer: RecordedLayer, *, kfac_only: bool) -> Because | None:
    if layer.size_counts is not False:
        return layer.why_size_counts
    if not layer.decayed:
        return _why_not_decayed(layer)
    return because(Reason.NOT_KFAC) if kfac_only and not layer.preconditioned else None


def _why_not_decayed(layer: RecordedLayer) -> Because:
    lost = because(Reason.LOST_TO_ROUNDING, layers=[layer.name])
    return lost if layer.lost else because(Reason.NOT_DECAYED)


def _why_no_effect(layer: RecordedLayer) -> Because:
    """Why one run shows no effect on a layer that the mechanism can act on."""
    if layer.unknown is not None:
        return layer.unknown
    if layer.pushes_unknown:
        return because(Reason.PUSHES_UNKNOWN)
    if layer.natural and layer.clipped:
        return because(Reason.GRADIENTS_CLIPPED)
    if layer.natural and "second_order_share" not in layer.series:
        return because(Reason.NO_SHARES)
    if layer.too_few_shares:
        return because(Reason.FEW_SHARES)
    return because(Reason.OLD_FACTORS if layer.old_factors else Reason.LAW_UNKNOWN)


# ---------------------------------------------------------------- the effective learning rate


def _effective_learning_rate(compared: Comparison, damping: Finding) -> Finding:
    """What `_turned` says, unless it says the opposite at another limit of what a size counts."""
    finding, run = _turned(compared, damping), compared.run
    limits = (RULES.size_little / RULES.size_doubt, RULES.size_little * RULES.size_doubt)
    near = [
        layer
        for layer in run.decayed_layers
        if not (layer.invariant or layer.is_vector)
        and limits[0] < (layer.size_response or 0.0) <= limits[1]
    ]
    if not near:
        return finding
    verdicts = {finding.verdict}
    for limit in limits:
        layers = {name: replace(x, size_limit=limit) for name, x in run.layers.items()}
        moved = Comparison(replace(run, layers=layers), compared.baseline)
        verdicts.add(_turned(moved, damping).verdict)
    if not {ACTS, DOES_NOT_ACT} <= verdicts:
        return finding
    responses = {layer.name: layer.size_response for layer in near}
    reason = because(Reason.SIZE_IN_DOUBT, responses=responses, limit=RULES.size_little)
    return _cannot_tell(finding.mechanism, reason, Reason.ATTRIBUTE, layers=finding.layers)


def _turned(compared: Comparison, damping: Finding) -> Finding:
    mechanism, run, baseline = Mechanism.EFFECTIVE_LR, compared.run, compared.baseline
    if (early := _nothing_turns(run, mechanism)) is not None:
        return early
    layers = run.turned_layers
    others = [other for layer in layers if (other := compared.other(layer)) is not None]
    both = [*layers, *others]
    unknown = [layer for layer in both if layer.law.norm_power is None]
    kfac_clipped = any(layer.natural and layer.clipped for layer in both)
    recorded = baseline is not None and all(
        rotation_effect(layer, compared.other(layer)) is not None for layer in layers
    )
    clipped = max(run.clipped, baseline.clipped if baseline is not None else 0.0)
    invariant = any(layer.invariant for layer in layers)
    lawless = any(replace(layer, clipped=False).law.norm_power is None for layer in unknown)
    angles = baseline is None and all("rotation" in layer.series for layer in layers)
    alike = baseline is None or clipped_otherwise(run, baseline) is None
    shown = alike and not (kfac_clipped and invariant)  # by how far both runs turn
    remedies = [Reason.GIVE_BASELINE] if angles and shown else []
    if clipped and (unknown or kfac_clipped) and not lawless and not (shown and recorded):
        reason = because(Reason.CLIPPED, share=clipped)
        return _cannot_tell(mechanism, reason, *remedies, Reason.NO_CLIPPING)
    if unknown and not recorded:
        changed = any(layer.changed_law or layer.own_lr for layer in layers)
        remedies = [Reason.GIVE_BASELINE] if changed else [*remedies, Reason.NAME_THE_LAW]
        return _cannot_tell(mechanism, because(Reason.LAW_UNKNOWN), *remedies)
    if all(layer.natural for layer in both):
        return _turned_by_kfac(compared, layers, damping)
    # of two runs the angles, where the law does not say it of every layer: one quantity for all
    by_angle = recorded and (bool(unknown) or not all(layer.invariant for layer in layers))
    rows = _layer_rows(compared, rotation_effect if by_angle else effective_lr_effect)
    quantity = "rotation" if by_angle or not invariant else "effective_lr"
    effect = pooled(row.effect for row in rows)
    norms = pooled(norm_effect(layer, compared.other(layer)) for layer in layers)
    smaller = norms.value if norms is not None and by_angle else None
    return _unless_hidden(_judged_factor(mechanism, quantity, effect, rows, run, smaller), run)


def _unless_hidden(finding: Finding, run: Run) -> Finding:
    """That nothing acts is not said where layers are left out because it is not known of them."""
    hidden = [layer.name for layer in run.decayed_layers if layer.size_counts is None]
    if not hidden or finding.verdict is not DOES_NOT_ACT:
        return finding
    reason, remedy = because(Reason.INVARIANCE_UNKNOWN, layers=hidden), because(Reason.GIVE_INPUTS)
    reasons = (*finding.reasons, reason)
    return replace(finding, verdict=CANNOT_TELL, reasons=reasons, remedies=(remedy,))


def _turned_by_kfac(compared: Comparison, layers: list[RecordedLayer], damping: Finding) -> Finding:
    """K-FAC turns weights by lr, whatever their norm; but for its damping and old curvature."""
    mechanism, baseline = Mechanism.EFFECTIVE_LR, compared.baseline
    if not any(layer.first.damping is not None for layer in layers):
        return _no(mechanism, because(Reason.BY_LR))
    pairs = [(layer, compared.other(layer)) for layer in layers]
    clip = _mean_clip(compared.run)
    shortened = 1.0 if baseline is None else clip / _mean_clip(baseline)
    longer = geometric_mean(longer_by_memory(layer, other, shortened) for layer, other in pairs)
    if longer < RULES.acts:
        return _no(mechanism, because(Reason.UNDAMPED_BY_LR))
    turned = pooled(rotation_effect(layer, other) for layer, other in pairs if other is not None)
    kind = Reason.OLD_CURVATURE if turned is None else Reason.OLD_CURVATURE_TURNS
    reason = because(kind, longer=longer, turned=turned, clip=clip if clip < 1 else None)
    if turned is not None and damping.verdict is not ACTS:
        rows = _layer_rows(compared, rotation_effect)
        return Finding(mechanism, ACTS, (reason,), turned, rows, quantity="rotation")
    remedies = [Reason.GIVE_BASELINE] if baseline is None else []
    return _cannot_tell(mechanism, reason, *remedies, Reason.RENEW_CURVATURE, effect=turned)


def _mean_clip(run: Run) -> float:
    """What K-FAC's KL clip multiplies steps with, where they are judged."""
    recorded = [value for _, value in judged_part(run.totals.get("clip_coefficient", ())) if value]
    return geometric_mean(recorded) if recorded else 1.0


# ---------------------------------------------------------------- the Jacobian norm


def _jacobian(compared: Comparison) -> Finding:
    mechanism, run, baseline = Mechanism.JACOBIAN, compared.run, compared.baseline
    if (early := _nothing_acts(run, mechanism, joint=True)) is not None:
        return early
    rows = tuple(_function_row(layer, compared.other(layer)) for layer in run.layers.values())
    known = not run.unwatched and not run.gains
    if known and all(layer.invariant for layer in run.decayed_layers):
        return _no(mechanism, because(Reason.ALL_INVARIANT), layers=rows)
    runs = [run] if baseline is None else [run, baseline]
    failed = {name: error for each in runs for name, error in each.failed_probes.items()}
    probe = next((name for name in SENSITIVITY if name in failed), None)
    record = Reason.RECORD_IN_BOTH if probe is None else Reason.RECORD_ANOTHER
    if baseline is None:
        too = Reason.RECORD_SAME_WAY if any(row in run.totals for row in SENSITIVITY) else record
        reason = because(Reason.JACOBIAN_ALONE)
        return _cannot_tell(mechanism, reason, Reason.GIVE_BASELINE, too, layers=rows)
    for quantity in SENSITIVITY:
        ratios = ratio(baseline.totals.get(quantity, ()), run.totals.get(quantity, ()))
        effect = effect_of(ratios, (quantity,), ComparedWith.BASELINE)
        if effect is not None:
            break
    else:
        reason = because(Reason.NO_SENSITIVITY)
        if probe is not None:
            reason = because(Reason.SENSITIVITY_FAILED, probe=probe, error=failed[probe])
        return _cannot_tell(mechanism, reason, record, layers=rows)
    if (apart := _other_inputs(run, baseline)) is not None:
        reason = because(Reason.OTHER_INPUTS, change=Change(quantity, effect), pair=apart)
        how = {"effect": effect, "quantity": quantity, "layers": rows}
        return _cannot_tell(mechanism, reason, Reason.RECORD_SAME_INPUTS, **how)
    finding = _judged_factor(mechanism, quantity, effect, rows, run, joint=True)
    ways = list(dict.fromkeys(way for layer in run.turned_layers for way in _ways(layer)))
    if finding.verdict is ACTS and ways:
        through = because(Reason.THROUGH_OTHERS, mechanisms=ways)
        finding = replace(finding, reasons=(*finding.reasons, through))
    return finding


def _other_inputs(run: Run, baseline: Run) -> tuple[float, float] | None:
    """The sizes of two inputs that runs measured on, if they are not of one kind."""
    mine, its = run.recording.meta.inputs or (), baseline.recording.meta.inputs or ()
    for pair in zip(mine, its, strict=False):
        if max(pair) > RULES.same_inputs * min(pair):
            return pair
    return None


def _ways(layer: RecordedLayer) -> list[Mechanism]:
    """The mechanisms through which decay can act on a layer whose size hardly matters."""
    ways = [] if layer.natural else [Mechanism.EFFECTIVE_LR]
    damped = layer.preconditioned and not layer.first.scale_free
    return [*ways, *([Mechanism.DAMPING] if damped else [])]


def _function_row(layer: RecordedLayer, other: RecordedLayer | None) -> LayerRow:
    """A layer's part in the Jacobian: its norm (or its K-FAC norm), against the baseline."""
    if layer.skipped or not layer.decayed:
        return LayerRow(layer.name, None, None, layer.skipped or _why_not_decayed(layer))
    if layer.invariant or other is None:
        why = because(Reason.INVARIANT if layer.invariant else Reason.NEEDS_BASELINE)
        return LayerRow(layer.name, None, None, why)
    curvature = ratio(*(x.series.get("kfac_gn_norm", ()) for x in (other, layer)))
    by_curvature = effect_of(curvature, ("kfac_gn_norm",), ComparedWith.BASELINE)
    effect = by_curvature or norm_effect(layer, other)
    return LayerRow(layer.name, None, effect, None if effect else because(Reason.NO_COMMON_STEP))


# ---------------------------------------------------------------- the effective damping


def _damping(compared: Comparison) -> Finding:
    mechanism, run = Mechanism.DAMPING, compared.run
    if run.has_settings and not any(layer.preconditioned for layer in run.layers.values()):
        return _no(mechanism, because(Reason.ONLY_KFAC_DAMPS))
    if (early := _nothing_turns(run, mechanism)) is not None:
        return early
    layers = _damped(run)
    if not layers:
        return _no(mechanism, because(Reason.NO_KFAC_LAYER))
    if all(layer.first.scale_free for layer in layers):
        return _no(mechanism, because(Reason.SCALE_FREE))
    rows = _layer_rows(compared, damping_effect, kfac_only=True)
    effect = pooled(row.effect for row in rows)
    shares = second_order_shares(compared)
    if effect is None and shares.run is not None:
        return _judged_factor(mechanism, "effective_damping", effect, rows, run)
    if shares.run is None or shares.baseline is None:
        reason, remedy = because(Reason.SHARE_UNKNOWN), Reason.RECORD_SHARE
        return _cannot_tell(mechanism, reason, remedy, effect=effect, layers=rows)
    if min(shares.run, shares.baseline) >= RULES.damping_negligible:
        # whatever the factor of a damping that does not matter
        rows = tuple(replace(x, verdict=DOES_NOT_ACT) if x.verdict else x for x in rows)
        reason = because(Reason.DAMPING_NEGLIGIBLE, shares=shares)
        return _no(mechanism, reason, effect=effect, layers=rows)
    finding = _judged_factor(mechanism, "effective_damping", effect, rows, run)
    more = [because(Reason.SHARES, shares=shares)]
    if finding.verdict is ACTS and shares.same:
        more.append(because(Reason.SAME_SHARES))
    return replace(finding, reasons=(*finding.reasons, *more))


@dataclass(frozen=True)
class SecondOrderShares:
    """K-FAC's second-order share at the end; without decay measured, or `estimated`."""

    run: float | None
    baseline: float | None
    estimated: bool

    @property
    def same(self) -> bool:
        """Whether two measured runs are as much second-order with decay as without."""
        if self.run is None or self.baseline is None or self.estimated:
            return False
        return abs(self.run - self.baseline) < RULES.same_share


def second_order_shares(compared: Comparison) -> SecondOrderShares:
    """Of the layers that decay could keep second-order."""
    layers = _damped(compared.run)
    mine = last_share(layers)
    if compared.baseline is not None:
        others = [other for x in layers if (other := compared.other(x)) is not None]
        return SecondOrderShares(mine, last_share(others), estimated=False)
    estimates = [s for layer in layers if (s := share_without_decay(layer)) is not None]
    return SecondOrderShares(mine, fmean(estimates) if estimates else None, estimated=True)


def _damped(run: Run) -> list[RecordedLayer]:
    return [layer for layer in run.turned_layers if layer.preconditioned]


def last_share(layers: Iterable[RecordedLayer]) -> float | None:
    """The last recorded second-order share, in the mean over layers."""
    shares = [s for x in layers if (s := x.last("second_order_share")) is not None]
    return fmean(shares) if shares else None


# ---------------------------------------------------------------- a measured factor


def thresholds(mechanism: Mechanism) -> tuple[float, float]:
    """From which factor on a mechanism acts, and up to which it does not."""
    if mechanism is Mechanism.JACOBIAN:
        return RULES.jacobian_acts, RULES.jacobian_nothing
    return RULES.acts, RULES.nothing


def judged(
    effect: Effect | None, acts: float = RULES.acts, nothing: float = RULES.nothing
) -> Verdict:
    """The verdict on one factor."""
    if effect is None:
        return CANNOT_TELL
    if effect.value >= acts:
        return ACTS
    return DOES_NOT_ACT if effect.value <= nothing else CANNOT_TELL


def _judged_factor(
    mechanism: Mechanism,
    quantity: str,
    effect: Effect | None,
    rows: tuple[LayerRow, ...],
    run: Run,
    smaller: float | None = None,
    *,
    joint: bool = False,
) -> Finding:
    """The finding on a measured factor; `joint`: as in `_nothing_acts`.

    `smaller`: of angles, by which factor norms are smaller than the baseline's. An angle is the
    step's length over the norm, so the rest of its factor is in the steps: gradients differ, too.
    """
    if effect is None:
        why = distinct(row.why for row in rows if row.verdict and row.why)
        remedy = Reason.SAME_STEPS if has(why, Reason.NO_COMMON_STEP) else Reason.GIVE_BASELINE
        layers = [[row.layer for row in rows if row.verdict and row.why == each] for each in why]
        reason = because(Reason.NOTHING_TO_COMPARE, why=list(zip(why, layers, strict=True)))
        return _cannot_tell(mechanism, reason, remedy, layers=rows, quantity=quantity)
    limits = acts, nothing = thresholds(mechanism)
    change, verdict = Change(quantity, effect), judged(effect, *limits)
    finding = Finding(mechanism, verdict, (), effect, rows, quantity=quantity)
    judged_on = [run.layers[row.layer] for row in rows if row.effect] or [*run.layers.values()]
    taken = _exposures_at(judged_on, effect.steps[1])
    more = _more_to_come(judged_on, taken)
    by_norm = smaller is not None and smaller >= RULES.acts
    if (early := _implausible(finding, change, taken, joint=joint, by_norm=by_norm)) is not None:
        return early
    acting_layers = [row.layer for row in rows if row.effect and row.effect.value >= RULES.acts]
    against_baseline = effect.source is ComparedWith.BASELINE
    remedies = [because(Reason.MORE_SEEDS)]
    reasons = _said_of_change(change, verdict, acts, more)
    if effect.least:
        reasons.append(because(Reason.LOWER_ESTIMATE))
    if smaller is not None and effect.value >= RULES.acts * max(smaller, 1.0):
        longer = effect.value / smaller
        reasons.append(because(Reason.LONGER_STEPS, smaller=smaller, longer=longer))
    if verdict is DOES_NOT_ACT and acting_layers and not joint:
        verdict = CANNOT_TELL  # one layer of many is not lost in the mean
        reasons.append(because(Reason.SOME_LAYERS_MORE, layers=acting_layers))
    elif joint and _scatters(effect, verdict, limits):
        verdict = CANNOT_TELL
        reasons = [because(Reason.SCATTERS, change=change)]
        remedies.append(because(Reason.RECORD_DENSELY))
    elif verdict is CANNOT_TELL:
        reasons.append(because(Reason.BETWEEN, nothing=nothing, acts=acts))
        reasons += more
        further = Reason.ATTRIBUTE if against_baseline else Reason.GIVE_BASELINE
        remedies.append(because(further))
    else:
        remedies = []
    return replace(finding, verdict=verdict, reasons=tuple(reasons), remedies=tuple(remedies))


def _scatters(effect: Effect, verdict: Verdict, limits: tuple[float, float]) -> bool:
    """Whether the records scatter so widely that another verdict is as likely."""
    acts, nothing = limits
    off = math.exp(RULES.standard_errors * effect.error)
    if verdict is DOES_NOT_ACT:
        return effect.value * off >= acts
    return verdict is ACTS and effect.value / off <= nothing


def _said_of_change(
    change: Change, verdict: Verdict, acts: float, more: Sequence[Because]
) -> list[Because]:
    if change.effect.value < 1 / acts:
        return [because(Reason.OPPOSITE, change=change)]
    if verdict is not DOES_NOT_ACT:
        return [because(Reason.CHANGED, change=change)]
    return [because(Reason.HARDLY_CHANGED, change=change), *more]


def _more_to_come(layers: Sequence[RecordedLayer], taken: Sequence[float]) -> list[Because]:
    """That decay has not had the 1/(lr wd) steps that it needs, and how many these are.

    Nothing where it was switched off at the end.
    """
    rate = max((x.mean_rate for x in layers if x.settings and x.settings[-1][1].decays), default=0)
    if not rate or not taken or not 0 < max(taken) < 1:
        return []
    return [because(Reason.MAY_SHOW_MORE, taken=max(taken), full=1 / rate)]


def _implausible(
    finding: Finding, change: Change, taken: Sequence[float], *, joint: bool, by_norm: bool
) -> Finding | None:
    """Where decay cannot have changed so much by then: 1/|W|^2 by exp(2 x exposure) at most.

    `by_norm`: the norms alone have changed enough, so that it does not depend on the rest.
    """
    if not taken:
        return None
    effect, most = change.effect, math.exp(min(2 * max(taken), 700))
    beyond = effect.source is ComparedWith.BASELINE and effect.value > RULES.acts * most
    if (sum(taken) if joint else max(taken)) < RULES.too_little_exposure:
        reason = because(Reason.TOO_EARLY, step=effect.steps[1], taken=max(taken))
        remedy = because(Reason.RECORD_FURTHER)
    elif joint or by_norm or not beyond:
        return None
    else:
        reason = because(Reason.MORE_THAN_DECAY, change=change, taken=max(taken), most=most)
        remedy = because(Reason.SAME_DATA)
    return replace(finding, verdict=CANNOT_TELL, reasons=(reason,), remedies=(remedy,))


def _exposures_at(layers: Iterable[RecordedLayer], step: int) -> list[float]:
    """The decay exposure of each layer at a step, where it is recorded."""
    exposed = [layer for layer in layers if layer.total_exposure is not None]
    reached = [[value for s, value in layer.exposure if s <= step] for layer in exposed]
    return [values[-1] for values in reached if values]


def distinct(items: Iterable[Any]) -> list[Any]:
    """Each once, in their order; reasons have no hash, as their data may be lists."""
    return list({repr(item): item for item in items}.values())
