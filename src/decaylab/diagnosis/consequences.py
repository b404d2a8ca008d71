"""What follows from a diagnosis: which decay matters, and what would replace it."""

import math
from collections.abc import Iterator, Sequence

from decaylab.diagnosis.bursts import bursts
from decaylab.diagnosis.layers import RecordedLayer
from decaylab.diagnosis.mechanisms import Finding, last_share, second_order_shares
from decaylab.diagnosis.reasons import Because, Reason, Verdict, because
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import Comparison, Run

ACTS, DOES_NOT_ACT, CANNOT_TELL = Verdict.ACTS, Verdict.DOES_NOT_ACT, Verdict.CANNOT_TELL
FUNCTION = {
    ACTS: Reason.REACTS_LESS,
    DOES_NOT_ACT: Reason.REACTS_ALIKE,
    CANNOT_TELL: Reason.REACTS_OPEN,
}


def consequences(compared: Comparison, findings: Sequence[Finding]) -> tuple[Because, ...]:
    """Which decay matters, what would replace it, and what went wrong."""
    run, jacobian = compared.run, findings[1]
    follows = [*_of_direction(compared, findings), *_of_function(run, jacobian)]
    undecided = any(finding.verdict is CANNOT_TELL for finding in findings)
    if (follows and undecided) or jacobian.because_of(Reason.THROUGH_OTHERS) is not None:
        follows.append(because(Reason.ATTRIBUTE))
    if not follows:
        unsure = run.decays or not run.has_settings or run.unwatched
        follows.append(because(Reason.NOTHING_YET if unsure else Reason.NOTHING_TO_DROP))
    return (*follows, *_mishaps(run))


def _of_direction(compared: Comparison, findings: Sequence[Finding]) -> Iterator[Because]:
    """Of the layers whose size hardly matters: what decay does there."""
    run, turned, (lr, _, damping) = compared.run, compared.run.turned_layers, findings
    if not turned:
        return
    names = [name for layer in turned for name in layer.members or (layer.name,)]
    exact = all(layer.invariant for layer in turned)
    by_lr = all(layer.natural and not layer.preconditioned for layer in turned)
    direction = Reason.DIRECTION_ONLY if exact else Reason.NEARLY_DIRECTION_ONLY
    yield because(direction, layers=names, by_lr=by_lr)
    if lr.verdict is ACTS:
        yield because(Reason.RAISES_LR)
    if damping.verdict is ACTS:
        same = lr.verdict is not ACTS and second_order_shares(compared).same
        yield because(Reason.NO_MORE_SECOND_ORDER if same else Reason.LOWERS_DAMPING)
    if not lr.verdict is damping.verdict is DOES_NOT_ACT:
        yield from _schedule([layer for layer in turned if layer.invariant], names)
    elif not (lr.opposite or damping.opposite or run.diverged):
        taken = max(layer.total_exposure or 0.0 for layer in turned)
        yield because(Reason.NO_EFFECT_YET if taken < 1 else Reason.NO_EFFECT)


def _schedule(layers: list[RecordedLayer], said: list[str]) -> Iterator[Because]:
    """By how much lr would have to grow without decay (`advise schedule` writes it out).

    `said`: the layers that the sentence before is about.
    """
    if not layers:
        return
    first = max(layers, key=lambda layer: layer.total_exposure or 0.0)  # one may be frozen early
    exposure, power = first.total_exposure, first.law.norm_power
    if not (exposure and power) or any(layer.stepping != first.stepping for layer in layers):
        return  # one schedule is for layers that are stepped alike
    factor = math.exp(min(power * exposure, 700))
    if factor <= RULES.raised_at_most:
        names = [name for layer in layers for name in layer.members or (layer.name,)]
        some = [] if names == said else names
        how = {"exposure": exposure, "factor": factor}
        remembers = first.law.adam_betas is not None
        yield because(Reason.SCHEDULE, some=some, remembers=remembers, **how)


def _of_function(run: Run, jacobian: Finding) -> Iterator[Because]:
    """Of the layers whose size counts, or may."""
    counting = [layer for layer in run.decayed_layers if layer.size_counts]
    layers = [layer.name for layer in counting if layer.role not in ("gain", "adapter")]
    gains = bool(run.gains) and bool(run.decayed_layers)  # said as one
    if layers or gains:
        reacts = Reason.REACTS_MORE if jacobian.opposite else FUNCTION[jacobian.verdict]
        yield because(reacts, counting=(layers, gains))
    if unknown := [layer.name for layer in run.decayed_layers if layer.size_counts is None]:
        yield because(Reason.SIZES_UNKNOWN, layers=unknown)
    if adapters := [layer.name for layer in counting if layer.role == "adapter"]:
        yield because(Reason.ADAPTERS, layers=adapters)


def _mishaps(run: Run) -> Iterator[Because]:
    """Bursts, and a damping that has taken over."""
    burst_list = [b for layer in run.turned_layers if layer.invariant for b in bursts(layer)]
    if burst_list:
        worst = min(burst_list, key=lambda burst: burst.before / burst.after)
        settings, remedy = run.layers[worst.layer].first, Reason.SHORTER_STEPS
        if settings.damping is not None:
            remedy = Reason.LARGER_DAMPING if settings.scale_free else Reason.SCALE_FREE_DAMPING
        others = len(burst_list) - 1
        yield because(Reason.BURST, burst=worst, others=others, remedy=because(remedy))
    kfac = [x for x in run.layers.values() if x.invariant and x.preconditioned]
    fixed = [x for x in kfac if x.norms and not x.first.scale_free]
    # a damping relative to the curvature, with steps of a set length, is meant to be this large
    share = last_share([x for x in kfac if x.natural] or fixed)
    if share is not None and share < RULES.damping_dominates:
        grown = sum(math.log(x.norms[-1][1] / x.norms[0][1]) for x in fixed) > 0
        remedies = [] if burst_list else [because(Reason.LOWER_DAMPING, grown=grown)]
        yield because(Reason.DAMPING_DOMINATES, share=share, remedies=remedies)
