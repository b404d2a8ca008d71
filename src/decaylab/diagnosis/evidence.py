"""Evidence: by which factor decay changed a quantity, from records, and how sure that is."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from decaylab.diagnosis.balance import elasticity
from decaylab.diagnosis.layers import TOO_LITTLE_EXPOSURE, LayerRecord, Setting
from decaylab.diagnosis.observed import Observed
from decaylab.optim.laws.dynamics import Series, norms_without_decay
from decaylab.optim.laws.memory import interpolated, moments_at

# Decay works over 1/(lr wd) steps and the early records show the start, not the decay: the second
# half of the records is judged.
JUDGED_SHARE = 0.5
# What Adam remembers depends on the norms that it makes: rounds until both agree (to 1e-3).
REMEMBERED_ROUNDS = 4
# What decay takes of the weights while K-FAC's factors remember them, times its second-order share.
# How far a reconstruction is off below it and above it, and on what it was chosen:
# benchmarks/schedules.py, part one-run.
REMEMBERED_TOO_MUCH = 0.7
# How K-FAC's pushes depend on the norm hangs on its second-order share, which falls from one to a
# few per cent. From its two ends alone, reconstructions were up to 160 times off: as many of the
# records of a norm must have it.
SHARES_NEEDED = 0.5

# What may differ between a run and its baseline: the decay, and what leaves the same training.
FREE_TO_DIFFER = {"decay", "weight_decay", "decay_scope", "norm_source"}
NOTED = {"seed", "precision", "deterministic", "epochs"}
# Watched runs whose last records are nearer than this are of one length.
SAME_LENGTH = 0.9
# What must be the same of a layer in two watched runs, beside the learning rate.
SAME_SETTINGS = {
    "momentum or beta1": "memory",
    "dampening": "dampening",
    "beta2": "beta2",
    "damping": "damping",
}
# Two seeds of one layer begin with norms that are nearer than this.
SAME_START = 1.25
# While the exposure is below the second, the squared norms of true pairs leave the range that decay
# explains by less than the first (those of results/ do, tests/diagnosis/test_known_truths.py).
SAME_GROWTH, EARLY = 1.25, 1.0

LR_PROBES = ("weight_norm", "lr")


@dataclass(frozen=True)
class Effect:
    """By which factor decay changed a quantity, the way the mechanism says being above one.

    Attributes:
        value: geometric mean over the judged records (of a total: over layers).
        low, high: the smallest and largest of them; None where there is one only.
        probes: the rows it was read from. steps: first and last judged step. records: how many.
        source: "baseline" (two runs compared) or "this run" (reconstructed from one).
    """

    value: float
    low: float | None
    high: float | None
    probes: tuple[str, ...]
    steps: tuple[int, int]
    records: int
    source: str

    def words(self) -> str:
        """The factor and its range: 1.85 (1.80 to 1.91)."""
        if self.low is None or self.high is None:
            return three_digits(self.value)
        return f"{three_digits(self.value)} ({three_digits(self.low)} to {three_digits(self.high)})"

    def inverse(self) -> "Effect":
        """The same change, as a factor the other way."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return replace(self, value=1 / self.value, low=low, high=high)


def three_digits(value: float) -> str:
    """Three digits that count, without an exponent below a million.

    >>> [three_digits(x) for x in (1.854, 0.012345, 1574.2, 2.3e7)]
    ['1.85', '0.0123', '1570', '2.3e+07']
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if 1000 <= rounded < 1e6 else f"{rounded:.3g}"


def effect_of(ratios: Series, probes: Sequence[str], source: str) -> Effect | None:
    """The second half of a series of ratios as one effect; None where there is no positive one."""
    late = ratios[int(len(ratios) * JUDGED_SHARE) :]
    sound = [(step, value) for step, value in late if value > 0]
    if not sound:
        return None
    values = [value for _, value in sound]
    several = len(values) > 1
    return Effect(
        statistics.geometric_mean(values),
        min(values) if several else None,
        max(values) if several else None,
        tuple(probes),
        (sound[0][0], sound[-1][0]),
        len(values),
        source,
    )


def over_layers(effects: Iterable[Effect]) -> Effect | None:
    """Geometric mean over layers; the range is over layers."""
    found = list(effects)
    if not found:
        return None
    values = [effect.value for effect in found]
    several = len(values) > 1
    return Effect(
        statistics.geometric_mean(values),
        min(values) if several else found[0].low,
        max(values) if several else found[0].high,
        found[0].probes,
        (min(e.steps[0] for e in found), max(e.steps[1] for e in found)),
        min(e.records for e in found),
        found[0].source,
    )


def ratio(numerator: Series, denominator: Series) -> Series:
    """At the steps that both have."""
    below = dict(denominator)
    return tuple((step, value / below[step]) for step, value in numerator if below.get(step))


def squared(series: Series) -> Series:
    """Each value squared."""
    return tuple((step, value**2) for step, value in series)


def effective_lr_effect(layer: LayerRecord, baseline: LayerRecord | None) -> Effect | None:
    """The factor on the effective lr: against the baseline's layer, else the reconstruction."""
    if baseline is not None and not (layer.moments and baseline.moments):
        # Adam's law with the moments is compared with none without
        layer, baseline = _without_moments(layer), _without_moments(baseline)
    probes = (*LR_PROBES, *(["second_moment"] if layer.moments else []))
    if baseline is not None:
        return effect_of(ratio(layer.effective, baseline.effective), probes, "baseline")
    without = reconstructed(layer)
    if not without:
        return None
    ratios = ratio(*_effective_both(layer, without))
    stepped = tuple(of for of in ratios if layer.setting_at(of[0]).lr)  # at lr 0 nothing turns
    return effect_of(stepped, (*probes, "decay_exposure"), "this run")


def _without_moments(layer: LayerRecord) -> LayerRecord:
    return replace(layer, series={k: v for k, v in layer.series.items() if k != "second_moment"})


def damping_effect(layer: LayerRecord, baseline: LayerRecord | None) -> Effect | None:
    """The factor by which decay lowers lambda |W|^2 (Eq. 14).

    Two runs with one lambda: their norms tell it too, and are often recorded more densely.
    """
    if baseline is not None:
        mine, other = (of.series.get("effective_damping", ()) for of in (layer, baseline))
        measured = effect_of(ratio(other, mine), ("effective_damping",), "baseline")
        if measured is not None and layer.setting is not None and layer.setting.scale_free:
            return measured
        norms = squared(ratio(baseline.norms, layer.norms))
        by_norm = effect_of(norms, ("weight_norm",), "baseline")
        known = [effect for effect in (measured, by_norm) if effect is not None]
        return max(known, key=lambda effect: effect.records, default=None)
    ratios = squared(ratio(reconstructed(layer), layer.norms))
    return effect_of(ratios, ("weight_norm", "decay_exposure", "second_order_share"), "this run")


def reconstructed(layer: LayerRecord) -> Series:
    """`norms_without_decay` of a layer, nothing where its decay per step is not known."""
    setting = layer.setting
    if setting is None or setting.power is None or layer.unknown or layer.kfac_clipped:
        return ()
    shares = dict(layer.series.get("second_order_share", ()))
    if setting.power == 0 and (too_few_shares(layer) or remembers_too_much(layer)):
        return ()
    known, e = next(iter(shares.values()), None), []
    for step, _ in layer.norms:
        known = shares.get(step, known)
        e.append(elasticity(setting.power, known))
    exposures = [value for _, value in layer.exposure]
    found = norms_without_decay(layer.norms, exposures, e)
    if setting.remembered is not None:
        for _ in range(REMEMBERED_ROUNDS):
            factors = _push_factors(layer, found)
            found = norms_without_decay(layer.norms, exposures, e, factors)
    return found


def too_few_shares(layer: LayerRecord) -> bool:
    """Whether the second-order share is not recorded, or too seldom to go by."""
    steps = {step for step, _ in layer.norms}
    known = steps & {step for step, _ in layer.series.get("second_order_share", ())}
    return len(known) < max(1.0, SHARES_NEEDED * len(steps))


def remembers_too_much(layer: LayerRecord) -> bool:
    """Whether K-FAC divides by the curvature at norms that decay has changed much since."""
    shares = [share for _, share in layer.series.get("second_order_share", ())]
    setting = layer.setting
    if setting is None or setting.power != 0 or not shares:
        return False
    shrink = max(of.rate for _, of in layer.settings)  # of the highest learning rate
    return shrink * _remembered_steps(setting) * statistics.fmean(shares) > REMEMBERED_TOO_MUCH


def longer_by_memory(layer: LayerRecord, baseline: LayerRecord | None) -> float:
    """By which factor decay makes K-FAC's steps longer, since it divides by old curvature.

    Curvature goes with 1/|W|^2, so a step is (old norm / norm)^2 times as long in the directions
    that are second-order; all are taken to be, if their share is not recorded. Over the second
    half of the records; against the baseline's, or against norms that stand still.
    """
    other = _longer(baseline) if baseline is not None else 1.0
    return _longer(layer) / other


def _longer(layer: LayerRecord) -> float:
    late = layer.norms[int(len(layer.norms) * JUDGED_SHARE) :]
    if layer.setting is None or layer.setting.power != 0 or not late:
        return 1.0
    known = layer.series.get("second_order_share", ())
    shares = [share for step, share in known if step >= late[0][0]] or [1.0]
    age = _remembered_steps(layer.setting)
    grown = [interpolated(layer.norms, step - round(age)) / norm for step, norm in late]
    return statistics.geometric_mean(grown) ** (2 * statistics.fmean(shares))


def _remembered_steps(setting: Setting) -> float:
    """How old the curvature is that K-FAC divides by."""
    return setting.refresh_every / (1 - setting.factor_decay) + setting.invert_every / 2


def _push_factors(layer: LayerRecord, others: Series) -> list[float]:
    """How much more Adam's steps add to |W|^2 at other norms, for what it remembers of them.

    A step's length is |W| times the effective learning rate, lr N_v / N_m (`memory`).
    """
    here, there = _effective_both(layer, others)
    turns, lengths = dict(ratio(there, here)), dict(ratio(others, layer.norms))
    return [(turns[step] * lengths[step]) ** 2 for step, _ in layer.norms]


def _effective_both(layer: LayerRecord, others: Series) -> tuple[Series, Series]:
    """The effective learning rate, over lr, at the layer's norms and had they been `others`."""
    moments = layer.moments
    beta2 = layer.setting.remembered if layer.setting else None
    changed = moments_at(layer.norms, others, beta2, moments) if beta2 is not None else ()
    return layer.effective_per_lr(layer.norms, moments), layer.effective_per_lr(others, changed)


def share_without_decay(layer: LayerRecord) -> float | None:
    """The second-order share at the end, had the norm grown without decay.

    With one eigenvalue for all, share / (1 - share) = eig / (lambda |W|^2): the odds go with
    1/|W|^2. An estimate, for a spread spectrum a rough one.
    """
    shares, without = layer.series.get("second_order_share", ()), dict(reconstructed(layer))
    at = [(step, share) for step, share in shares if step in without]
    if not at:
        return None
    step, share = at[-1]
    odds = share / max(1 - share, 1e-12) * (dict(layer.norms)[step] / without[step]) ** 2
    return odds / (1 + odds)


def comparable(run: Observed, baseline: Observed) -> tuple[str, list[str]]:
    """Why the two cannot be compared ("" if they can), and what differs without harm."""
    if baseline.decays:
        return "the baseline has weight decay" + (" too" if run.decays else ""), []
    if run.spec is not None and baseline.spec is not None:
        pairs = {
            item.name: (getattr(run.spec, item.name), getattr(baseline.spec, item.name))
            for item in fields(run.spec)
        }
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        wrong = [name for name in differing if name not in FREE_TO_DIFFER | NOTED]
        if wrong:
            # of another optimizer, the settings that only one of them has say nothing
            shown = [name for name in wrong if None not in differing[name]] or wrong
            said = ", ".join(f"{n} {differing[n][0]} and {differing[n][1]}" for n in shown[:3])
            return f"the runs are not comparable ({said})", []
        noted = {name: pair for name, pair in differing.items() if name in NOTED}
        return "", [f"{name} differs: {mine} and {its}" for name, (mine, its) in noted.items()]
    longer, shorter = max(run.steps, baseline.steps), min(run.steps, baseline.steps)
    said = f"steps differ: {run.steps} and {baseline.steps}; only those of both are compared"
    why_not = _same_training(run, baseline)
    return why_not, [said] if not why_not and shorter < SAME_LENGTH * longer else []


def _same_training(run: Observed, baseline: Observed) -> str:
    if run.layers.keys() != baseline.layers.keys():
        return "the runs are not comparable (they have different layers)"
    for name, layer in run.layers.items():
        mine, other = layer.setting, baseline.layers[name].setting
        if mine is None or other is None:
            continue
        if None not in (mine.power, other.power) and mine.power != other.power:
            return f"the runs are not comparable (layer {name} has another optimizer)"
        norms = ratio(layer.norms, baseline.layers[name].norms)
        if norms and (differs := _starts_otherwise(layer, baseline.layers[name], norms[0])):
            return f"the runs are not comparable (layer {name}: {differs})"
        if differs := _stepped_otherwise(layer, baseline.layers[name], [step for step, _ in norms]):
            return f"the runs are not comparable ({differs})"
    if differs := grown_otherwise(run, baseline):
        return f"the runs are not comparable ({differs})"
    return ""


def grown_otherwise(run: Observed, baseline: Observed) -> str:
    """What early norms say of the batches, which are not recorded: whether they grew by the same.

    Pushes lengthen larger weights by a smaller part (`dynamics`: e <= 0 for SGD and Adam), so that
    the baseline's |W|^2 is 1 to exp(2 x exposure) times the run's, if nothing but decay differs.
    Of another seed, the small layers begin apart, and what they begin with is explained as well.
    """
    logs: dict[int, list[tuple[float, float]]] = {}
    for name, layer in run.layers.items():
        setting = layer.setting
        if not layer.invariant or not layer.decayed or layer.skipped or layer.unknown:
            continue
        if setting is None or setting.power not in (1, 2):
            continue
        exposure = dict(layer.exposure)
        for step, apart in ratio(baseline.layers[name].norms, layer.norms):
            if step in exposure and exposure[step] < EARLY:
                logs.setdefault(step, []).append((2 * math.log(apart), 2 * exposure[step]))
    start = None
    for step, found in sorted(logs.items()):
        apart, most = (statistics.fmean(of) for of in zip(*found, strict=True))
        if start is None:
            start = apart if most < 2 * TOO_LITTLE_EXPOSURE else 0.0
        low, high = min(start, 0.0), max(start, 0.0) + most
        if not low - math.log(SAME_GROWTH) < apart < high + math.log(SAME_GROWTH):
            said = [three_digits(math.exp(min(of, 700.0))) for of in (apart, low, high)]
            return (
                f"the baseline's scale-invariant layers have {said[0]} times this run's |W|^2 at"
                f" step {step}, and start and decay explain {said[1]} to {said[2]}: use the same"
                " data, batch size and seed"
            )
    return ""


def _stepped_otherwise(layer: LayerRecord, other: LayerRecord, steps: Sequence[int]) -> str:
    """The first of the settings that differs, from the first record on or at one of `steps`."""
    for step in (0, *steps):
        mine, its = layer.setting_at(step), other.setting_at(step)
        for word, field in SAME_SETTINGS.items():
            values = getattr(mine, field), getattr(its, field)
            if values[0] != values[1]:
                when = f" at step {step}" if step > layer.settings[0][0] else ""
                return f"layer {layer.name}: {word} {values[0]} and {values[1]}{when}"
        if step and not math.isclose(mine.lr, its.lr, rel_tol=1e-3):
            return f"lr {mine.lr:g} and {its.lr:g} at step {step}"
    return ""


def _starts_otherwise(layer: LayerRecord, other: LayerRecord, first: tuple[int, float]) -> str:
    """What differs before decay can act; `first`: the first common step, the ratio of the norms."""
    if layer.size != other.size and layer.size and other.size:
        return f"{layer.size} and {other.size} weights"
    step, apart = first
    late = dict(layer.exposure).get(step, 0.0) >= TOO_LITTLE_EXPOSURE
    if late or not layer.invariant or 1 / SAME_START < apart < SAME_START:
        return ""
    both = [dict(of.norms)[step] for of in (layer, other)]
    return f"norms {both[0]:.3g} and {both[1]:.3g} at step {step}, before decay can act"
