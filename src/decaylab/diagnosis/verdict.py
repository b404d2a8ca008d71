"""Verdicts: which of the three mechanisms decay acts through, from records alone."""

from dataclasses import replace
from statistics import fmean, geometric_mean

from decaylab.diagnosis.evidence import (
    comparable,
    damping_effect,
    effect_of,
    effective_lr_effect,
    longer_by_memory,
    over_layers,
    ratio,
    share_without_decay,
    three_digits,
)
from decaylab.diagnosis.findings import (
    ACTS,
    DAMPING_NEGLIGIBLE,
    GIVE_BASELINE,
    JACOBIAN_ACTS,
    JACOBIAN_NOTHING,
    LARGER,
    SENSITIVITY,
    SMALLER,
    at_once,
    by_kfac,
    collapsed,
    decayed_layers,
    found_by,
    function_row,
    judgeable,
    last_share,
    layer_rows,
    no_decay,
    record,
    same,
    same_share,
    what_follows,
)
from decaylab.diagnosis.layers import LayerRecord
from decaylab.diagnosis.observed import Observed, Source, observe
from decaylab.diagnosis.result import MECHANISMS, Diagnosis, Finding


def diagnose(run: Source, baseline: Source | None = None) -> Diagnosis:
    """Which of the paper's three mechanisms weight decay acts through in a run.

    `run` and `baseline` (the same training without decay): a run folder, a folder that
    `watch(folder=...)` wrote, a `Watch`, or its records. Reads records only; measures nothing.

    With a baseline, effective learning rates, Jacobian norms and effective dampings are compared.
    Without one, the first and the third are compared with a reconstruction of the norms without
    decay (`dynamics.norms_without_decay`); the second cannot be told. Thresholds: the
    constants of `findings`.
    """
    mine = observe(run)
    given = other = observe(baseline, "the baseline") if baseline is not None else None
    first = [f"{mine.name}: {trouble}" for trouble in mine.troubles]
    if other is not None:
        called = other.name if other.name == "the baseline" else f"the baseline ({other.name})"
        first += [f"{called}: {trouble}" for trouble in other.troubles]
        why_not, differs = comparable(mine, other)
        first += differs
        if why_not:
            first.append(f"{why_not}: judged without the baseline")
            other = None
    if lost := collapsed(mine):
        first.append(
            f"{mine.name}: decay has taken nearly all of {lost}: it is too strong. Weights as small"
            " as that are no more scale-invariant, and the factors below mean little"
        )
    if not mine.decays and mine.settled:
        swapped = given is not None and given.decays
        hint = ", but the baseline has it: did you swap the two?" if swapped else ""
        first.append(f"no layer of {mine.name} has weight decay{hint}")
    findings = (
        _effective_learning_rate(mine, other),
        replace(_jacobian(mine, other), layer_quantity=f"the layer's own norm{SMALLER}"),
        _damping(mine, other),
    )
    return Diagnosis(
        mine.name,
        other.name if other is not None else None,
        tuple(first),
        findings,
        tuple(what_follows(mine, findings, _shares(mine, other))),
        {name: layer.skipped for name, layer in mine.layers.items() if layer.skipped},
    )


def _effective_learning_rate(run: Observed, baseline: Observed | None) -> Finding:
    name, quantity = MECHANISMS[0], f"effective learning rate{LARGER}"
    early = at_once(run, name, quantity)
    if early is not None:
        return early
    of = judgeable(run)
    others = [other for layer in of if (other := same(layer, baseline)) is not None]
    powers = {layer.setting.power for layer in [*of, *others] if layer.setting}
    clipped = max(run.clipped, baseline.clipped if baseline is not None else 0.0)
    if clipped and (None in powers or any(layer.kfac_clipped for layer in [*of, *others])):
        return Finding(
            *(name, quantity, "cannot tell"),
            f"The gradients are clipped at {100 * clipped:.0f} % of the records. How far such"
            " steps turn weights of another norm is not known.",
            would_decide="train without clipping, or with Adam",
        )
    if None in powers:
        return Finding(
            *(name, quantity, "cannot tell"),
            "How this optimizer's step depends on the norm of the weights is not known.",
            would_decide='name its law in its param groups, as group["law"] (docs/extend.md), or'
            " train with SGD, K-FAC or Adam without amsgrad",
        )
    if powers == {0}:
        damped = any(layer.setting.damping is not None for layer in of if layer.setting)
        longer = geometric_mean(longer_by_memory(layer, same(layer, baseline)) for layer in of)
        if damped and longer >= ACTS:
            return Finding(
                *(name, quantity, "cannot tell"),
                "Without damping, K-FAC's step turns the weights by lr, whatever their norm (Eq."
                " 13). But here it divides by the curvature of earlier weights, and decay has"
                f" shortened these since: steps are {three_digits(longer)} times longer.",
                would_decide="renew the curvature more often (KFAC's refresh_every, invert_every)",
            )
        return Finding(
            *(name, quantity, "does not act"),
            "Without damping, K-FAC's step turns the weights by lr, whatever their norm (Eq. 13)."
            " The norm acts through the damping, see below."
            if damped
            else "This optimizer's step turns the weights as far, whatever their norm.",
        )
    rows = layer_rows(run, baseline, effective_lr_effect)
    effect = over_layers(row.effect for row in rows if row.effect)
    return found_by(name, quantity, effect, rows, run)


def _damping(run: Observed, baseline: Observed | None) -> Finding:
    name, quantity = MECHANISMS[2], f"effective damping{SMALLER}"
    if run.settled and not any(map(by_kfac, run.layers.values())):
        reason = "Only K-FAC has a damping, and this optimizer is not K-FAC."
        return Finding(name, quantity, "does not act", reason)
    early = at_once(run, name, quantity)
    if early is not None:
        return early
    of = _damped(run)
    if not of:
        reason = "K-FAC preconditions no scale-invariant layer that has decay."
        return Finding(name, quantity, "does not act", reason)
    if all(layer.setting and layer.setting.scale_free for layer in of):
        reason = (
            "The damping is scale-free: it follows the norms, so decay does not change its effect."
        )
        return Finding(name, quantity, "does not act", reason)
    rows = layer_rows(run, baseline, damping_effect, kfac_only=True)
    effect = over_layers(row.effect for row in rows if row.effect)
    shares = _shares(run, baseline)
    if effect is None and shares["with decay"] is not None:
        return found_by(name, quantity, effect, rows, run)
    known = {key: value for key, value in shares.items() if value is not None}
    if len(known) < len(shares):
        return Finding(
            *(name, quantity, "cannot tell"),
            "The second-order share is not recorded, so it is not known whether damping matters.",
            effect,
            rows,
            would_decide=record(run),
        )
    said = ", ".join(f"{100 * value:.0f} % {key}" for key, value in known.items())
    if min(known.values()) >= DAMPING_NEGLIGIBLE:
        # whatever the factor of a damping that does not matter
        rows = tuple(replace(x, verdict="does not act") if x.verdict else x for x in rows)
        return Finding(
            *(name, quantity, "does not act"),
            f"Damping hardly matters: the second-order share is {said}.",
            effect,
            rows,
        )
    found = found_by(name, quantity, effect, rows, run)
    reason = f"{found.reason} The second-order share is {said}."
    if found.verdict == "acts" and same_share(shares):
        reason += " It is the same: the curvature of the normalised weights is lower, too."
    return replace(found, reason=reason)


def _damped(run: Observed) -> list[LayerRecord]:
    return [layer for layer in judgeable(run) if by_kfac(layer)]


def _shares(run: Observed, baseline: Observed | None) -> dict[str, float | None]:
    """The second-order share at the end, with decay and without; None where not recorded."""
    of = _damped(run)
    shares = {"with decay": last_share(of)}
    if baseline is not None:
        others = [other for x in of if (other := same(x, baseline)) is not None]
        return {**shares, "without": last_share(others)}
    estimates = [s for layer in of if (s := share_without_decay(layer)) is not None]
    return {**shares, "without (a rough estimate)": fmean(estimates) if estimates else None}


def _jacobian(run: Observed, baseline: Observed | None) -> Finding:
    name, quantity = MECHANISMS[1], f"squared Jacobian norm{SMALLER}"
    early = no_decay(run, name, quantity, joint=True)
    if early is not None:
        return early
    rows = tuple(function_row(layer, baseline) for layer in run.layers.values())
    if all(layer.invariant for layer in decayed_layers(run)) and not run.decayed_gains:
        reason = (
            "Every decayed layer is scale-invariant, so decay does not change the function by"
            " itself. A change of the Jacobian comes through the other two mechanisms."
        )
        return Finding(name, quantity, "does not act", reason, layers=rows)
    if baseline is None:
        return Finding(
            *(name, quantity, "cannot tell"),
            "One run does not show what the Jacobian would be without decay.",
            layers=rows,
            would_decide=f"{GIVE_BASELINE}. {_recorded_too(run)}",
        )
    effects = {
        row: effect_of(
            ratio(baseline.totals.get(row, ()), run.totals.get(row, ())), (row,), "baseline"
        )
        for row in SENSITIVITY
    }
    row = next((row for row, effect in effects.items() if effect is not None), None)
    if row is None:
        return Finding(
            *(name, quantity, "cannot tell"),
            "Neither a Jacobian nor a Gauss-Newton norm is recorded in both runs at a common step.",
            layers=rows,
            would_decide=record(run, both=True),
        )
    quantity, thresholds = f"{SENSITIVITY[row]}{SMALLER}", (JACOBIAN_ACTS, JACOBIAN_NOTHING)
    found = found_by(name, quantity, effects[row], rows, run, thresholds, joint=True)
    # a scale-free damping leaves decay of these layers no way to act
    others = [x for x in judgeable(run) if not (x.setting and x.setting.scale_free)]
    if found.verdict == "acts" and others:
        kinds = dict.fromkeys(MECHANISMS[2 if by_kfac(x) else 0] for x in others)
        through = " and the ".join(kinds)
        note = f"Part of it may come through the {through} of the scale-invariant layers."
        found = replace(found, reason=f"{found.reason} {note}")
    return found


def _recorded_too(run: Observed) -> str:
    """What a baseline must have recorded for the Jacobian, and this run where it has not."""
    if any(row in run.totals for row in SENSITIVITY):
        return "Record it in the same way"
    said = record(run, both=True)
    return said[0].upper() + said[1:]
