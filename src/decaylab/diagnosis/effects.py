"""The factor by which decay changed a quantity, from records, and how certain it is."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, geometric_mean, stdev
from typing import NamedTuple

from decaylab.diagnosis.layers import RecordedLayer, ratio
from decaylab.diagnosis.rules import RULES
from decaylab.optim.laws import Sgd
from decaylab.optim.laws.dynamics import Series
from decaylab.optim.laws.memory import interpolated

LR_PROBES = ("weight_norm", "lr")


class ComparedWith(StrEnum):
    """What a run was compared with."""

    BASELINE = "baseline"
    RECONSTRUCTION = "reconstruction"


class Spread(StrEnum):
    """What the range of an effect is over."""

    RECORDS = "records"
    LAYERS = "layers"
    SEEDS = "seeds"


@dataclass(frozen=True)
class Effect:
    """By which factor decay changed a quantity, the way the mechanism says being above one.

    Attributes:
        value: geometric mean over the judged records (of a total: over layers, then seeds).
        low, high: the smallest and largest of them; None if there is one only. spread: of what.
        probes: the rows it was read from. steps: first and last judged step. records: how many.
        source: what it was compared with.
        least: whether it is a lower estimate (`Rules.lower_estimate`).
        error: the standard error of its logarithm, over records; 0 where it is not over records.
    """

    value: float
    low: float | None
    high: float | None
    probes: tuple[str, ...]
    steps: tuple[int, int]
    records: int
    source: ComparedWith
    spread: Spread = Spread.RECORDS
    least: bool = False
    error: float = 0.0

    def inverse(self) -> "Effect":
        """The same change, as a factor the other way."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return replace(self, value=1 / self.value, low=low, high=high, least=False)


class Change(NamedTuple):
    """An effect, and the quantity that it is on."""

    quantity: str
    effect: Effect


def judged_part(series: Series) -> Series:
    """The last part of a series, which is judged."""
    return series[int(len(series) * RULES.judged_share) :]


def effect_of(ratios: Series, probes: Sequence[str], source: ComparedWith) -> Effect | None:
    """The judged part of a series of ratios as one effect; None if there is no positive one."""
    sound = [(step, value) for step, value in judged_part(ratios) if value > 0]
    if not sound:
        return None
    values = [value for _, value in sound]
    several = len(values) > 1
    return Effect(
        geometric_mean(values),
        min(values) if several else None,
        max(values) if several else None,
        tuple(probes),
        (sound[0][0], sound[-1][0]),
        len(values),
        source,
        error=stdev(map(math.log, values)) / math.sqrt(len(values)) if several else 0.0,
    )


def pooled(effects: Iterable[Effect | None], spread: Spread = Spread.LAYERS) -> Effect | None:
    """Geometric mean over layers or seeds, with the range over them."""
    known = [effect for effect in effects if effect is not None]
    if not known:
        return None
    values = [effect.value for effect in known]
    several = len(values) > 1
    return Effect(
        geometric_mean(values),
        min(values) if several else known[0].low,
        max(values) if several else known[0].high,
        tuple(dict.fromkeys(probe for effect in known for probe in effect.probes)),
        (min(e.steps[0] for e in known), max(e.steps[1] for e in known)),
        min(e.records for e in known),
        known[0].source,
        spread if several else known[0].spread,
        any(effect.least for effect in known),
    )


def _squared(series: Series) -> Series:
    return tuple((step, value**2) for step, value in series)


def effective_lr_effect(layer: RecordedLayer, baseline: RecordedLayer | None) -> Effect | None:
    """The factor on how far a step turns a layer: against the baseline's, else reconstructed.

    Of scale-invariant layers by their law, lr/|W|^p (Eq. 9). Of others, and where the law is not
    known, two runs are compared by their recorded rotations; one run by its norms
    (`turned_further`).
    """
    if not layer.invariant or layer.law.norm_power is None:
        return rotation_effect(layer, baseline)
    if baseline is None:
        return _turned_more(layer)
    if not (layer.moments and baseline.moments):
        # Adam's law with the moments is compared with none without
        layer, baseline = _without_moments(layer), _without_moments(baseline)
    ratios = ratio(layer.effective, baseline.effective)
    return effect_of(ratios, _lr_probes(layer), ComparedWith.BASELINE)


def _lr_probes(layer: RecordedLayer) -> tuple[str, ...]:
    return (*LR_PROBES, *(["second_moment"] if layer.moments else []))


def rotation_effect(layer: RecordedLayer, baseline: RecordedLayer | None) -> Effect | None:
    """The factor on the recorded angle per step; from one run, what its norms make of it.

    A scale-invariant layer turns by its effective learning rate. One whose size hardly matters is
    pushed as far whatever its norm, by optimizers whose steps have a length of their own (Adam and
    its kin; of SGD nothing is said, `pushes_unknown`): it turns by |d| / |W|, and the norm without
    decay is reconstructed for pushes that do not depend on it (e = 0). On the GPT of
    examples/gpt.py, three seeds, the angles that this foretold were 1 to 9 % too small, most of it
    because pushes were 3 to 8 % longer without decay.
    """
    if baseline is not None:
        recorded = (x.series.get("rotation", ()) for x in (layer, baseline))
        return effect_of(ratio(*recorded), ("rotation",), ComparedWith.BASELINE)
    return None if layer.natural else _turned_more(layer)


def norm_effect(layer: RecordedLayer, baseline: RecordedLayer | None) -> Effect | None:
    """The factor by which its norm is smaller than the baseline's."""
    if baseline is None:
        return None
    ratios = ratio(baseline.norms, layer.norms)
    return effect_of(ratios, ("weight_norm",), ComparedWith.BASELINE)


def _turned_more(layer: RecordedLayer) -> Effect | None:
    """The factor on how far a step turns a layer, against the reconstruction without decay."""
    probes = _lr_probes(layer) if layer.invariant else ("weight_norm",)
    probes = (*probes, "decay_exposure")
    effect = effect_of(layer.turned_further, probes, ComparedWith.RECONSTRUCTION)
    if effect is None or not isinstance(layer.law, Sgd):
        return effect
    exposure = max(total for step, total in layer.exposure if step <= effect.steps[1])
    return replace(effect, least=exposure >= RULES.lower_estimate)


def _without_moments(layer: RecordedLayer) -> RecordedLayer:
    return replace(layer, series={k: v for k, v in layer.series.items() if k != "second_moment"})


def damping_effect(layer: RecordedLayer, baseline: RecordedLayer | None) -> Effect | None:
    """The factor by which decay lowers lambda |W|^2 (Eq. 14).

    Two runs with one lambda: their norms tell it too, and are often recorded more densely.
    """
    if baseline is not None:
        mine, other = (x.series.get("effective_damping", ()) for x in (layer, baseline))
        measured = effect_of(ratio(other, mine), ("effective_damping",), ComparedWith.BASELINE)
        if measured is not None and layer.first.scale_free:
            return measured
        norms = _squared(ratio(baseline.norms, layer.norms))
        by_norm = effect_of(norms, ("weight_norm",), ComparedWith.BASELINE)
        known = [effect for effect in (measured, by_norm) if effect is not None]
        return max(known, key=lambda effect: effect.records, default=None)
    ratios = _squared(ratio(layer.without_decay, layer.norms))
    probes = ("weight_norm", "decay_exposure", "second_order_share")
    return effect_of(ratios, probes, ComparedWith.RECONSTRUCTION)


# ---------------------------------------------------------------- one run


def longer_by_memory(
    layer: RecordedLayer, baseline: RecordedLayer | None, clip: float = 1.0
) -> float:
    """By which factor decay makes K-FAC's steps longer, since it divides by old curvature.

    Two runs with recorded rotations show it themselves. Else: curvature goes with 1/|W|^2, so a
    step is (old norm / norm)^2 times as long in the directions that are second-order; all are
    taken to be, if their share is not recorded. Against the baseline's, or norms that stand still.
    `clip`: the factor that the KL clip brings.
    """
    longer = clip * _longer(layer) / (_longer(baseline) if baseline is not None else 1.0)
    if baseline is not None and (recorded := rotation_effect(layer, baseline)) is not None:
        return min(recorded.value, longer)
    return longer


def _longer(layer: RecordedLayer) -> float:
    late = judged_part(layer.norms)
    if not layer.natural or not late:
        return 1.0
    recorded = layer.series.get("second_order_share", ())
    shares = [share for step, share in recorded if step >= late[0][0]] or [1.0]
    age = round(layer.curvature_age)
    grown = [interpolated(layer.norms, step - age) / norm for step, norm in late]
    return geometric_mean(grown) ** (2 * fmean(shares))


def share_without_decay(layer: RecordedLayer) -> float | None:
    """The second-order share at the end, had the norm grown without decay.

    With one eigenvalue for all, share / (1 - share) = eig / (lambda |W|^2): the odds go with
    1/|W|^2. An estimate, for a spread spectrum a rough one.
    """
    shares, without = layer.series.get("second_order_share", ()), dict(layer.without_decay)
    common = [(step, share) for step, share in shares if step in without]
    if not common:
        return None
    step, share = common[-1]
    odds = share / max(1 - share, 1e-12) * (dict(layer.norms)[step] / without[step]) ** 2
    return odds / (1 + odds)


# ---------------------------------------------------------------- how a layer moves


@dataclass(frozen=True)
class Motion:
    """How far steps turn one layer, and what decay has to do with it. None: not known.

    Attributes:
        members: the layers, where it is several that are scale-invariant together.
        decayed: whether decay acts on it at all.
        rotation: recorded angle per step in radians, over the judged part of the run.
        expected: the law's at equilibrium, for the settings at these steps (root mean square).
        timescale: steps in which decay alone takes the weights to 1/e, at the mean lr and decay of
            the steps with decay: 1/(lr wd), decoupled.
        steps: of the run. epochs: the timescale in epochs.
        turned: by which factor decay makes it turn further (`rotation_effect`).
        invariant: whether it is scale-invariant.
        foretold: decay's factor on its effective learning rate, or on its angle if it is not
            scale-invariant, as the run alone has it, over what it is against the baseline.
        size_response: per cent by which the logits change per per cent of its size.
        norm: |W| at the end over that at the first record. by_decay: the part of it that decay
            made: the end norm over that without decay (of the baseline, or reconstructed).
    """

    layer: str
    role: str
    members: tuple[str, ...]
    decayed: bool
    rotation: float | None
    expected: float | None
    timescale: float | None
    steps: int
    epochs: float | None
    turned: Effect | None
    invariant: bool
    foretold: float | None
    size_response: float | None
    norm: float
    by_decay: float | None

    @property
    def settled(self) -> bool | None:
        """Whether the rotation is that of the equilibrium."""
        if not self.rotation or not self.expected:
            return None
        return 1 / RULES.settled <= self.rotation / self.expected <= RULES.settled


def motion(
    layer: RecordedLayer, baseline: RecordedLayer | None, steps: int, per_epoch: int | None
) -> Motion:
    """How this layer moves (`Motion`)."""
    rate = layer.mean_rate
    judged = layer.decayed and not (baseline is not None and _too_early(layer, baseline))
    without = baseline.norms if baseline is not None else layer.without_decay
    return Motion(
        layer.name,
        layer.role if layer.is_vector or not layer.members else "",
        layer.members,
        layer.decayed,
        _root_mean_square([angle for _, angle in _judged_angles(layer) if angle > 0]),
        _expected_rotation(layer) if layer.decayed else None,
        1 / rate if rate else None,
        steps,
        1 / rate / per_epoch if rate and per_epoch else None,
        rotation_effect(layer, baseline) if judged else None,
        bool(layer.invariant),
        _foretold(layer, baseline) if judged and baseline is not None else None,
        layer.size_response,
        layer.norms[-1][1] / layer.norms[0][1],
        _mean(judged_part(ratio(layer.norms, without))) if judged else None,
    )


def _too_early(layer: RecordedLayer, baseline: RecordedLayer) -> bool:
    """Whether both are only recorded while decay had done next to nothing, though it did later."""
    common = dict(ratio(layer.norms, baseline.norms))
    taken = max((total for step, total in layer.exposure if step in common), default=0.0)
    return taken < RULES.too_little_exposure <= (layer.total_exposure or 0.0)


def _foretold(layer: RecordedLayer, baseline: RecordedLayer) -> float | None:
    """One run's estimate over two runs' factor, of one quantity and steps; 1: it says what they do.

    Not over the recorded angles where a law says the effective learning rate: angles go with the
    gradients too, which are others where decay changes the course of training (on a ConvNeXt the
    effective learning rate changed 3.7x, the angle 8.9x).
    """
    both = None if layer.natural else effective_lr_effect(layer, baseline)
    if both is None:
        return None
    first, last = both.steps
    alone = _mean([item for item in layer.turned_further if first <= item[0] <= last])
    return None if alone is None else alone / both.value


def _judged_angles(layer: RecordedLayer) -> Series:
    return judged_part(layer.series.get("rotation", ()))


def _expected_rotation(layer: RecordedLayer) -> float | None:
    """The law's angle per step at equilibrium, over the judged records; None if there is none."""
    if (layer.law.elasticity() or 0.0) >= 1:
        return None
    steps = [step for step, _ in _judged_angles(layer) or judged_part(layer.norms)]
    rates = [rate for step in steps if (rate := layer.rate_at(step))]
    angles = [layer.law.rotation(rate) for rate in rates]
    return _root_mean_square([angle for angle in angles if angle is not None])


def _root_mean_square(values: Sequence[float]) -> float | None:
    return math.sqrt(fmean(value**2 for value in values)) if values else None


def _mean(series: Sequence[tuple[int, float]]) -> float | None:
    return geometric_mean([value for _, value in series]) if series else None
