"""What to do about it: a decay from the measured dynamics, and one decay in other words."""

import math
from dataclasses import asdict, dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any

from decaylab.diagnosis.balance import (
    Equilibrium,
    elasticity,
    equilibrium,
    rotation_per_step,
    shrink_for_norm,
    shrink_for_rotation,
)
from decaylab.diagnosis.evidence import three_digits
from decaylab.diagnosis.findings import has_collapsed
from decaylab.diagnosis.growth import (
    growth_over,
    late,
    longest_stretch,
    seen_elasticity,
    seen_memory,
)
from decaylab.diagnosis.layers import LayerRecord, Setting
from decaylab.diagnosis.observed import Source, observe
from decaylab.errors import DecaylabError
from decaylab.optim.decay import OPTIMIZERS, check_decay, check_optimizer, decay_rate

# From such a factor on it is said that a suggestion may be off.
ROUGH = 2.0
# A weight cannot be held that a step lengthens by itself and more: G >= N, so that s >= 1/2.
TOO_STRONG = 0.5
# Steps agree over some (1 + m) / (1 - m) of them. Where decay (beside the momentum) takes this part
# of the weights in that time, Lion turned them 20 % further than was said.
MIXED = 0.25
# A norm farther from its balance has not come to rest.
TRAVELLING = 1.25
# The same decay takes as much of layers whose rates are as near as this.
ALIKE = 1.05
# So far from the norms that were seen, the growth seen there says little.
FAR = 10.0
NO_ROTATION = "how far its steps turn it is not recorded: keep `movement` among watch's probes"


@dataclass(frozen=True)
class Stepping:
    """An optimizer with its learning rate, kind of decay and momentum (Adam: beta1)."""

    optimizer: str
    lr: float
    decay: str = "decoupled"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_decay(self.decay, 0.0)
        check_optimizer(self.optimizer)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise DecaylabError(f"the learning rate must be above zero, and it is {self.lr}")
        if not 0 <= self.momentum < 1:
            raise DecaylabError(
                f"momentum must be at least 0 and below 1, and it is {self.momentum}"
            )
        if self.decay == "none":
            raise DecaylabError("decay none has no value: choose l2, decoupled or independent")
        if self.decay == "l2" and OPTIMIZERS[self.optimizer] != "sgd":
            raise DecaylabError(
                f"{self.optimizer} rescales L2, so it removes no fixed fraction of the weights per"
                " step and no value corresponds to it: choose decoupled or independent"
            )

    def rate(self, weight_decay: float) -> float:
        """The part of W that this decay takes a step (`decay_rate`)."""
        law = OPTIMIZERS[self.optimizer]
        return decay_rate(weight_decay, self.decay, law=law, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True)
class Conversion:
    """A decay and its counterpart: the same `shrink` per step, so the same effective lr.

    `rotations`: radians per step at equilibrium, before and after; they differ where the momentum
    does, which spreads the same motion over more or fewer steps.
    """

    weight_decay: float
    shrink: float
    rotations: tuple[float, float]
    steps: float


def convert_decay(weight_decay: float, source: Stepping, target: Stepping) -> Conversion:
    """The weight decay under `target` that keeps the effective learning rate it had under `source`.

    At equilibrium the direction of a scale-invariant layer moves, over many steps, by 2 s a step in
    squared angle, whatever the optimizer (`dynamics.equilibrium`): s, the part of W that decay
    takes a step, is kept, and with it the 1/s steps that decay needs to act. s is `decay_rate`: lr
    wd / (1 - momentum) for SGD's L2, lr wd decoupled, wd independent. (Without gradients, strong L2
    inside a momentum shrinks W faster, `steady_shrink`; against them it holds what s says.)

    >>> sgd = Stepping("sgd", lr=0.1, decay="l2", momentum=0.9)
    >>> adamw = Stepping("adam", lr=1e-3)
    >>> round(convert_decay(5e-4, sgd, adamw).weight_decay, 4)
    0.5
    """
    check_decay(source.decay, weight_decay)
    shrink = 0.0
    if weight_decay:
        shrink = source.rate(weight_decay)
        if not 0 < shrink < 1:
            raise DecaylabError(
                f"a weight decay of {weight_decay:g} at lr {source.lr:g} is too strong: each step"
                " removes more than the weights themselves"
            )
    found = shrink / target.rate(1.0)
    turns = tuple(rotation_per_step(shrink, of.momentum) for of in (source, target))
    steps = 1 / shrink if shrink else math.inf
    return Conversion(found, shrink, (turns[0], turns[1]), steps)


@dataclass(frozen=True)
class LayerAdvice:
    """What the dynamics of one layer say; `reason`: why there are no numbers, or rough ones.

    Attributes:
        weight_decay: now (the latest at the learning rate that the suggestion is for).
        suggested: the one asked for, in the run's own kind (decoupled if none).
        norm: now. target: the norm to be held. equilibrium: where the present decay leads, None
            where no balance is near. rotation: radians per step at the suggested decay's balance.
        steps: until the suggested decay has brought |W|^2 to within 1/e of its distance.
    """

    layer: str
    weight_decay: float
    suggested: float | None = None
    norm: float | None = None
    target: float | None = None
    equilibrium: float | None = None
    rotation: float | None = None
    steps: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Suggestion:
    """Advice by layer, and one value for the group of scale-invariant layers: `weight_decay`.

    None where there is none, or where it would not mean the same in all of them (`notes`).
    """

    run: str
    decay: str
    lr: float
    weight_decay: float | None
    layers: tuple[LayerAdvice, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def suggest(
    run: Source, *, rotation: float | None = None, norm_at: int | None = None
) -> Suggestion:
    """A weight decay for a run's scale-invariant layers, from how their norms moved.

    The growth G of |W|^2 by gradients, how it depends on the norm and how far steps turn the weight
    are read off the records (`growth`), over the longest stretch with nearly one learning rate. The
    suggested decay holds each layer at the norm it had at step `norm_at` (the first record, unless
    told otherwise), so that its effective learning rate stays what it was there: s = G(norm) / (2
    norm^2). s is `decay_rate`, lr wd / (1 - momentum) for L2: that balances G exactly, also where
    decay is so strong that without gradients W would shrink faster (`steady_shrink`). With
    `rotation`, it is the decay whose equilibrium turns weights by that many radians a step. Layers
    whose norm is part of the function get a reason instead: their decay acts on the Jacobian, and
    is a matter of search.
    """
    observed = observe(run)
    if norm_at is not None and rotation is not None:
        raise DecaylabError("a rotation sets the norms, too: give a rotation or a step, not both")
    if norm_at is not None and norm_at > observed.steps:
        raise DecaylabError(
            f"nothing is recorded at step {norm_at}: the last record is of step {observed.steps}"
        )
    advice = [_advice(layer, rotation, norm_at) for layer in observed.layers.values()]
    found = {row.layer: row.suggested for row in advice if row.suggested is not None}
    notes = list(observed.troubles)
    invariant = [layer.setting for layer in observed.layers.values() if layer.invariant]
    setting = next((_in_kind(of) for of in invariant if of is not None), None)
    value = None
    if found:  # the learning rate that the suggestion is for
        each = [_at_longest_stretch(observed.layers[layer]) for layer in found]
        setting, rates = each[0], [of.rate_at(1.0) for of in each]
        if {of.decay for of in each} == {setting.decay} and max(rates) < ALIKE * min(rates):
            value = geometric_mean(found.values())
        else:
            notes.append(
                "no one value is for all of the scale-invariant layers, which differ in learning"
                " rate, momentum or kind of decay: give each its own"
            )
    elif invariant:
        notes.append("no suggestion for any scale-invariant layer; beside each stands why")
    else:
        notes.append("no suggestion: no layer is scale-invariant")
    return Suggestion(
        observed.name,
        setting.decay if setting else "decoupled",
        setting.lr if setting else math.nan,
        value,
        tuple(advice),
        tuple(notes),
    )


def _in_kind(setting: Setting) -> Setting:
    """With the run's own kind of decay; without decay the usual one: torch's SGD has L2."""
    if setting.decays and not setting.unknown:
        return setting
    return replace(setting, decay="l2" if setting.power == 2 else "decoupled")


def _advice(layer: LayerRecord, rotation: float | None, norm_at: int | None) -> LayerAdvice:
    setting = layer.setting
    now = layer.settings[-1][1].weight_decay if setting else 0.0
    if reason := _why_none(layer):
        return LayerAdvice(layer.name, now, reason=reason)
    assert setting is not None
    assert setting.power is not None
    at = _at_longest_stretch(layer)
    now = at.weight_decay
    stretch = longest_stretch(layer)
    shares = layer.series.get("second_order_share", ())
    law = elasticity(setting.power, shares[-1][1] if shares else None)
    e = seen_elasticity(layer, stretch, law)
    growth, norm = growth_over(layer, late(stretch), e)
    if growth <= 0:
        reason = "its norm does not grow, so no decay is needed to hold it"
        return LayerAdvice(layer.name, now, norm=norm, reason=reason)
    memory = seen_memory(layer, late(stretch), e)
    target = _norm_at(layer, norm_at)
    shrink = shrink_for_norm(growth, norm, target, e=e)
    if rotation is not None:
        if memory is None:
            return LayerAdvice(layer.name, now, norm=norm, reason=NO_ROTATION)
        shrink = shrink_for_rotation(rotation, memory)
    balance = equilibrium(growth, norm, shrink, e=e, memory=memory or 0.0)
    if rotation is not None:
        target = balance.norm if balance else norm
    if shrink >= TOO_STRONG:
        reason = _too_strong(shrink, rotation)
        return LayerAdvice(layer.name, now, norm=norm, target=target, reason=reason)
    present = equilibrium(growth, norm, at.rate, e=e)
    last = dict(layer.norms)[stretch[-1]]
    doubts = [
        "" if balance else "the weights turn by lr, whatever their norm",
        _rough(norm, target, e, law) if rotation is None else "",
        _mixed(shrink, at, memory or 0.0),
        _travelling(last, present),
        _slow(layer, target, balance) if rotation is None else "",
    ]
    reason = "; ".join(doubt for doubt in doubts if doubt)
    return LayerAdvice(
        layer.name,
        now,
        shrink / at.rate_at(1.0),
        norm,
        target,
        present.norm if present and not _far(last, present) else None,
        balance.rotation if balance and memory is not None else None,
        balance.steps if balance else None,
        reason,
    )


def _too_strong(shrink: float, rotation: float | None) -> str:
    if rotation is not None:
        return "to turn it so far, decay would take half of it or more a step: ask for less"
    return (
        f"a step adds {three_digits(2 * shrink)} of |W|^2 at the target: no decay holds it. Lower"
        " the learning rate"
    )


def _mixed(shrink: float, setting: Setting, memory: float) -> str:
    """L2 inside a momentum is summed up as the gradients are, and balances them exactly."""
    if setting.decay == "l2" or shrink <= MIXED * (1 - memory) / (1 + memory):
        return ""
    return "rough: decay takes much of the weights while steps still agree"


def _travelling(norm: float, present: Equilibrium | None) -> str:
    """That the norm is far from where its present decay leads, and how long that takes."""
    if present is None or 1 / TRAVELLING < norm / present.norm < TRAVELLING:
        return ""
    if _far(norm, present):
        where = "less than a tenth of it" if present.norm < norm else "more than ten times that"
        return f"the present decay leads from {norm:.3g} to {where}"
    return (
        f"still on its way from {norm:.3g} to {present.norm:.3g}, a third of which is left after"
        f" {three_digits(present.steps)} more steps"
    )


def _slow(layer: LayerRecord, target: float, balance: Equilibrium | None) -> str:
    """That early pushes took the norm away, and the decay needs more than the run to undo it."""
    steps, norm = layer.norms[-1]
    near = 1 / TRAVELLING < norm / target < TRAVELLING
    if balance is None or near or balance.steps <= steps:
        return ""
    return f"slow: it needs {three_digits(balance.steps)} steps, and the run has {steps}"


def _far(norm: float, present: Equilibrium) -> bool:
    return not 1 / FAR < norm / present.norm < FAR


def _rough(norm: float, target: float, e: float, law: float) -> str:
    """How far a decay may be off that holds another norm than the recorded one; "" if not far.

    The elasticity of a stationary state was seen between the law's and 0 (`seen_elasticity`).
    """
    larger, smaller = (max(of / other, 1.0) for of, other in ((norm, target), (target, norm)))
    low, high = min(e, law), max(e, 0.0)
    strong = max(larger ** (2 * (high - e)), smaller ** (2 * (e - low)))
    weak = max(smaller ** (2 * (high - e)), larger ** (2 * (e - low)))
    doubt, way = max((strong, "strong"), (weak, "weak"))
    if doubt < ROUGH:
        return ""
    return f"rough: up to {doubt:.2g} times too {way}; suggest from a run nearer to the target"


def _why_none(layer: LayerRecord) -> str:
    """Why no decay can be suggested for a layer; "" where one can."""
    if layer.skipped:
        return layer.skipped
    if not layer.invariant:
        return "not scale-invariant: choose its decay by accuracy"
    if layer.setting is None or layer.setting.power is None or layer.kfac_clipped:
        return "how its step depends on its norm is not known"
    if layer.unknown:
        return f"{layer.unknown}: what it removes per step is not known"
    if _in_kind(layer.setting).intake == 0:
        return "its dampening of 1 keeps gradients and L2 out of the momentum"
    if not _at_longest_stretch(layer).lr:
        return "its learning rate is 0"
    if has_collapsed(layer):
        return "decay has taken nearly all of it: suggest from a run with less decay"
    return ""


def _norm_at(layer: LayerRecord, step: int | None) -> float:
    norms = [norm for s, norm in layer.norms if step is None or s <= step]
    if not norms:
        raise DecaylabError(
            f"nothing is recorded up to step {step}: the first record is of step"
            f" {layer.norms[0][0]}"
        )
    return norms[0] if step is None else norms[-1]


def _at_longest_stretch(layer: LayerRecord) -> Setting:
    """The setting in its second half, with the mean learning rate there."""
    steps = late(longest_stretch(layer))
    lr = fmean(layer.setting_at(step).lr for step in steps[1:])
    return _in_kind(replace(layer.setting_at(steps[-1]), lr=lr))
