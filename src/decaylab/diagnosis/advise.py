"""What to do about it: a decay from the measured dynamics, and one decay in other words."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import Any

from decaylab.diagnosis.dynamics import (
    elasticity,
    equilibrium,
    pushes,
    rotation_per_step,
    shrink_for_norm,
    shrink_for_rotation,
)
from decaylab.diagnosis.layers import LayerRecord, Setting
from decaylab.diagnosis.observed import Source, observe
from decaylab.errors import DecaylabError
from decaylab.optim.decay import OPTIMIZERS, check_decay, check_optimizer, convert, steady_shrink

# Learning rates within such a factor of the first count as one: those around the top of a cosine.
ONE_RATE = 1.5
# From such a factor on it is said that a suggestion may be off.
ROUGH = 2.0


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
    takes a step, is kept, and with it the 1/s steps that decay needs to act. s is
    `steady_shrink`: lr wd / (1 - momentum) for SGD's L2 (exactly), lr wd decoupled, wd independent.

    >>> sgd = Stepping("sgd", lr=0.1, decay="l2", momentum=0.9)
    >>> adamw = Stepping("adam", lr=1e-3)
    >>> round(convert_decay(5e-4, sgd, adamw).weight_decay, 4)
    0.5023
    """
    check_decay(source.decay, weight_decay)
    shrink = 0.0
    if weight_decay:
        shrink = steady_shrink(weight_decay, source.decay, lr=source.lr, momentum=source.momentum)
        if not 0 < shrink < 1:
            raise DecaylabError(
                f"a weight decay of {weight_decay:g} at lr {source.lr:g} is too strong: each step"
                " removes more than the weights themselves"
            )
    found = convert(shrink, "independent", target.decay, lr=target.lr, momentum=target.momentum)
    turns = tuple(rotation_per_step(shrink, of.momentum) for of in (source, target))
    steps = 1 / shrink if shrink else math.inf
    return Conversion(found, shrink, (turns[0], turns[1]), steps)


@dataclass(frozen=True)
class LayerAdvice:
    """What the dynamics of one layer say; `reason`: why there are no numbers, or rough ones.

    Attributes:
        weight_decay: now. suggested: the one asked for, in the run's own kind (decoupled if none).
        norm: now. target: the norm to be held. equilibrium: where the present decay leads, None
            where there is no balance. rotation: radians per step at the suggested decay's balance.
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
    """Advice by layer, and one value for the group of scale-invariant layers: `weight_decay`."""

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

    The growth G of |W|^2 by gradients is read off the records (`dynamics.pushes`), over the second
    half of the longest stretch with nearly one learning rate (`ONE_RATE`). The suggested decay
    holds each layer at the norm it had at step `norm_at` (the first record, unless told otherwise),
    so that its effective learning rate stays what it was there: s = G(norm) / (2 norm^2). With
    `rotation`, it is the decay whose equilibrium turns weights by that many radians a step. Layers
    whose norm is part of the function get a reason instead: their decay acts on the Jacobian, and
    is a matter of search.
    """
    observed = observe(run)
    advice = [_advice(layer, rotation, norm_at) for layer in observed.layers.values()]
    found = {row.layer: row.suggested for row in advice if row.suggested is not None}
    notes = list(observed.troubles)
    invariant = [layer.setting for layer in observed.layers.values() if layer.invariant]
    setting = next((_in_kind(of) for of in invariant if of is not None), None)
    if found:  # the learning rate that the suggestion is for
        setting = _at_longest_stretch(observed.layers[next(iter(found))])
    else:
        notes.append("no suggestion: no scale-invariant layer is recorded well enough")
    return Suggestion(
        observed.name,
        setting.decay if setting else "decoupled",
        setting.lr if setting else math.nan,
        geometric_mean(found.values()) if found else None,
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
    now = setting.weight_decay if setting else 0.0
    if reason := _why_none(layer):
        return LayerAdvice(layer.name, now, reason=reason)
    assert setting is not None
    assert setting.power is not None
    at = _at_longest_stretch(layer)
    shares = layer.series.get("second_order_share", ())
    e = elasticity(setting.power, shares[-1][1] if shares else None)
    growth, norm = _growth(layer, _longest_stretch(layer), e)
    if growth <= 0:
        return LayerAdvice(
            layer.name,
            now,
            norm=norm,
            reason="its norm does not grow, so no decay is needed to hold it",
        )
    target = _norm_at(layer, norm_at)
    shrink = shrink_for_norm(growth, norm, target, e=e)
    if rotation is not None:
        shrink = shrink_for_rotation(rotation, at.memory)
    balance = equilibrium(growth, norm, shrink, e=e, memory=at.memory)
    if rotation is not None:
        target = balance.norm if balance else norm
    try:
        suggested = convert(shrink, "independent", at.decay, lr=at.lr, momentum=at.memory)
    except DecaylabError as error:  # of this layer: the others have theirs
        return LayerAdvice(layer.name, now, norm=norm, target=target, reason=str(error))
    present = equilibrium(growth, norm, at.shrink, e=e)
    reason = "" if balance else "undamped K-FAC: the weights turn by lr, whatever their norm"
    if rotation is None:
        reason = reason or _rough(norm, target, e)
    return LayerAdvice(
        layer.name,
        now,
        suggested / at.intake,
        norm,
        target,
        present.norm if present else None,
        balance.rotation if balance else None,
        balance.steps if balance else None,
        reason,
    )


def _rough(norm: float, target: float, e: float) -> str:
    """How far a decay may be off that holds another norm than the recorded one; "" if not far.

    G = c N^e takes |grad L(u)| to be the same at both norms. Under SGD it was seen to fall with the
    norm, so that G hardly depended on it: e = 0 at the other end.
    """
    doubt = max(norm / target, target / norm) ** (-2 * min(e, 0.0))
    if doubt < ROUGH:
        return ""
    way = "strong" if norm > target else "weak"
    return f"rough: up to {doubt:.2g} times too {way}; suggest from a run nearer to the target"


def _why_none(layer: LayerRecord) -> str:
    """Why no decay can be suggested for a layer; "" where one can."""
    if layer.skipped:
        return layer.skipped
    if not layer.invariant:
        return "not scale-invariant: its norm is part of the function. Search for its decay"
    if layer.setting is None or layer.setting.power is None:
        return "how its step depends on its norm is not known"
    if layer.unknown:
        return f"{layer.unknown}: what it removes per step is not known"
    if _in_kind(layer.setting).intake == 0:
        return "its dampening of 1 keeps gradients and L2 out of the momentum"
    return ""


def _norm_at(layer: LayerRecord, step: int | None) -> float:
    norms = [norm for s, norm in layer.norms if step is None or s <= step]
    if not norms:
        raise DecaylabError(
            f"nothing is recorded up to step {step}: the first record is of step"
            f" {layer.norms[0][0]}"
        )
    return norms[0] if step is None else norms[-1]


def _longest_stretch(layer: LayerRecord) -> Sequence[int]:
    """The recorded steps of the longest time with nearly one learning rate, at least two."""
    stretches: list[list[int]] = []
    rate = math.nan
    for (before, _), (step, _) in pairwise(layer.norms):
        lr = layer.setting_at(step).lr
        if not rate / ONE_RATE <= lr <= rate * ONE_RATE:
            stretches.append([before])
            rate = lr
        stretches[-1].append(step)
    return max(stretches, key=lambda of: (layer.setting_at(of[-1]).lr > 0, of[-1] - of[0]))


def _late(stretch: Sequence[int]) -> Sequence[int]:
    """Its second half."""
    return stretch[min(len(stretch) // 2, len(stretch) - 2) :]


def _at_longest_stretch(layer: LayerRecord) -> Setting:
    """The setting in its second half, with the mean learning rate there."""
    steps = _late(_longest_stretch(layer))
    lr = fmean(layer.setting_at(step).lr for step in steps[1:])
    return _in_kind(replace(layer.setting_at(steps[-1]), lr=lr))


def _growth(layer: LayerRecord, stretch: Sequence[int], e: float) -> tuple[float, float]:
    """G per step over the second half of a stretch, brought to one norm (the mean) by G = c N^e."""
    late = _late(stretch)
    norms, exposure = dict(layer.norms), dict(layer.exposure)
    norm = geometric_mean(norms[step] for step in late)
    c = sum(
        pushes(norms[a] ** 2, norms[b] ** 2, exposure.get(b, 0.0) - exposure.get(a, 0.0), e)
        for a, b in pairwise(late)
    )
    return c * norm ** (2 * e) / (late[-1] - late[0]), norm
