"""Advice: a decay that acts within the budget, its conversion to other optimizers, and scaling.

Sources of the rules for other batch sizes, lengths and widths: Wang and Aitchison 2025
(arXiv:2405.13698), Bergsma et al. 2025 (Power Lines, arXiv:2505.13738), Kosson et al. 2024
(arXiv:2305.17212).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any

from decaylab.diagnosis.growth import (
    growth_over,
    late,
    longest_stretch,
    seen_correlation,
    seen_elasticity,
)
from decaylab.diagnosis.layers import RecordedLayer, decay_rate, known_rate, shrink_under
from decaylab.diagnosis.reasons import Because, Reason, because
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import Run, read_run
from decaylab.diagnosis.words.reasons import sentence
from decaylab.errors import AT_LEAST_ONE, POSITIVE, Conflict, Lacks, Range
from decaylab.optim.decay import check_decay
from decaylab.optim.laws import Law, Sgd, balance, law_for, law_named, shrink_for_norm
from decaylab.records.files import without_nan
from decaylab.records.settings import LayerSettings
from decaylab.records.sources import Source

# ---------------------------------------------------------------- one decay in other words


@dataclass(frozen=True)
class Stepping:
    """An optimizer with its learning rate, kind of decay and momentum (Adam, Lion: beta1).

    `momentum` None: the usual one of that optimizer.
    """

    optimizer: str
    lr: float
    decay: str = "decoupled"
    momentum: float | None = None

    def __post_init__(self) -> None:
        check_decay(self.decay, 0.0)
        POSITIVE.check("lr", self.lr)
        if self.decay == "none":
            raise Lacks("decay none", "value", "choose l2, decoupled or independent")
        law = self.law  # refuses unknown names
        if self.decay == "l2" and not law.sums_l2:
            what = f"L2 under {self.optimizer}, which rescales it,"
            remedy = "choose decoupled or independent"
            raise Lacks(what, "fixed fraction of the weights that a step removes", remedy)

    @property
    def law(self) -> Law:
        """The law of this optimizer with this momentum."""
        return law_named(self.optimizer, self.momentum)


@dataclass(frozen=True)
class Conversion:
    """A decay and its counterpart: the same `shrink` per step, so the same effective lr.

    `rotations`: radians per step at equilibrium, before and after (None: not known). They differ if
    steps correlate differently, which spreads the same motion over more or fewer of them.
    """

    weight_decay: float
    shrink: float
    rotations: tuple[float | None, float | None]
    steps: float


def convert_decay(weight_decay: float, source: Stepping, target: Stepping) -> Conversion:
    """The weight decay under `target` that keeps the effective learning rate it had under `source`.

    At equilibrium the direction of a scale-invariant layer moves, over many steps, by 2 s a step in
    squared angle, whatever the optimizer (`laws.law`): s, the fraction of W that decay removes per
    step (`Law.shrink`), is kept, and with it the 1/s steps that decay needs to act.

    >>> sgd = Stepping("sgd", lr=0.1, decay="l2", momentum=0.9)
    >>> adamw = Stepping("adamw", lr=1e-3)
    >>> round(convert_decay(5e-4, sgd, adamw).weight_decay, 4)
    0.5
    """
    check_decay(source.decay, weight_decay)
    shrink = source.law.shrink(weight_decay, source.decay, source.lr)
    if weight_decay:
        what = f"the fraction of the weights that a step removes at decay {weight_decay:g}"
        Range(above=0, below=1).check(f"{what} and lr {source.lr:g}", shrink, "weaken the decay")
    converted = target.law.weight_decay_for(shrink, target.decay, target.lr)
    rotations = source.law.rotation(shrink), target.law.rotation(shrink)
    return Conversion(converted, shrink, rotations, 1 / shrink if shrink else math.inf)


# ---------------------------------------------------------------- another batch, length or width


@dataclass(frozen=True)
class ScaledDecay:
    """A decay for another training by one rule; `lr`: the learning rate to use with it.

    `rule`: "epochs" (the averaging time in epochs), "run" (as a fraction of it) or "rotation" (the
    angle per step); `timescale`: 1/(lr wd) in steps, now and there.
    """

    rule: str
    weight_decay: float
    lr: float
    timescales: tuple[float, float]


def tokens_per_parameter(batch: float, steps: float, width: float) -> float:
    """The factor by which it changes, if parameters grow with the width squared.

    >>> tokens_per_parameter(batch=2, steps=2, width=2)
    1.0
    """
    return batch * steps / width**2


def scale_decay(
    weight_decay: float, lr: float, *, batch: float = 1.0, steps: float = 1.0, width: float = 1.0
) -> tuple[ScaledDecay, ...]:
    """AdamW's decay when batch size, number of steps and width are multiplied by these factors.

    AdamW's weights average the updates of the last tau = 1/(lr wd) steps.

    - "epochs": keeps tau in epochs (Wang and Aitchison 2025), so tau in steps scales as 1/batch. At
      another width with muP's lr / width, lr wd stays, so wd scales with the width.
    - "run": keeps tau as a fraction of the run, so lr wd scales as 1/steps. Bergsma et al. 2025
      find this at a fixed number of parameters and tokens (wd scales with the batch), and that the
      best fraction falls as a power of tokens per parameter, if that changes
      (`tokens_per_parameter`).
    - "rotation": keeps the angle sqrt(2 lr wd) by which a step turns the weights, per root of the
      batch, so lr wd scales with the batch; the length does not matter. The equilibrium is that of
      Kosson et al. 2024; the root of the batch is for noise that averages, which they do not check.
    """
    numbers = {"weight_decay": weight_decay, "lr": lr}
    for name, value in (numbers | {"batch": batch, "steps": steps, "width": width}).items():
        POSITIVE.check(name, value)
    scaled_lr = lr / width
    rates = {"epochs": batch, "run": 1 / steps, "rotation": batch}
    return tuple(
        ScaledDecay(
            rule,
            weight_decay * lr * factor / scaled_lr,
            scaled_lr,
            (1 / (lr * weight_decay), 1 / (lr * weight_decay * factor)),
        )
        for rule, factor in rates.items()
    )


# ---------------------------------------------------------------- from the dynamics of a run


@dataclass(frozen=True)
class LayerAdvice:
    """What the dynamics of one layer say; `notes`: why there are no numbers, or rough ones.

    Attributes:
        weight_decay: now (the latest at the learning rate that the suggestion is for).
        suggested: the one asked for, in the run's own kind (decoupled if none).
        norm: now. target: the norm to which the suggested decay leads. equilibrium: where the
            present decay leads, None if no balance is near. rotation: radians per step at the
            suggested decay's balance.
        steps: until the suggested decay has reduced the distance of |W|^2 to its target to 1/e.
        least: the weakest decay that acts within the budget; None if none was asked for.
    """

    layer: str
    weight_decay: float
    suggested: float | None = None
    norm: float | None = None
    target: float | None = None
    equilibrium: float | None = None
    rotation: float | None = None
    steps: float | None = None
    notes: tuple[Because, ...] = ()
    least: float | None = None


@dataclass(frozen=True)
class GroupAdvice:
    """One value for layers that are stepped alike; `spread`: the smallest and largest of theirs.

    `steps`: until the value, not what each layer asked for, has acted, in the mean over layers. The
    value is the geometric mean of layers that nearly agree (`Rules.rough`). Otherwise it is the
    weakest that acts within the budget, kept within their range: layers that start tiny, such as
    the last ones of a transformer's branches, would need far more to stay so, and had better grow.
    """

    layers: tuple[str, ...]
    optimizer: str
    decay: str
    lr: float
    weight_decay: float
    spread: tuple[float, float]
    steps: float | None


@dataclass(frozen=True)
class Suggestion:
    """Advice by layer and by group; `weight_decay`: the value, where there is one group only.

    `budget`: the steps within which the suggested decay acts.
    """

    run: str
    decay: str
    lr: float
    weight_decay: float | None
    budget: int
    groups: tuple[GroupAdvice, ...]
    layers: tuple[LayerAdvice, ...]
    notes: tuple[Because, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; None where a number is not known."""
        layers = [
            {**asdict(replace(row, notes=())), "notes": [sentence(note) for note in row.notes]}
            for row in self.layers
        ]
        rest = asdict(replace(self, layers=(), notes=()))
        notes = [sentence(note) for note in self.notes]
        return dict(without_nan({**rest, "layers": layers, "notes": notes}))


def suggest(
    run: Source,
    *,
    rotation: float | None = None,
    norm_at: int | None = None,
    steps: int | None = None,
) -> Suggestion:
    """A weight decay that acts within `steps` (by default the run's own), from how norms changed.

    The growth G of |W|^2 by gradients, how it depends on the norm and how far steps turn the weight
    are read off the records (`growth`), over the longest stretch with nearly one learning rate. The
    decay that holds each layer at the norm it had at step `norm_at` (the first record, unless told
    otherwise) keeps its effective learning rate what it was there: s = G(norm) / (2 norm^2). Where
    that needs more than the budget to act, the suggestion is the weakest decay that does: two of
    its timescales 1/(2 s (1 - e)) in the budget. With `rotation`, it is the decay whose equilibrium
    turns weights by that many radians a step, whatever the budget. Layers whose size is part of
    the function get a reason instead: choose their decay by the outcome.
    """
    watched = read_run(run, "the watched run")
    if norm_at is not None and rotation is not None:
        raise Conflict(["rotation", "norm_at"], "a rotation sets the norms too")
    if norm_at is not None:
        last = Range(at_most=watched.steps)
        last.check("norm_at", norm_at, "nothing is recorded after that step")
    if steps is not None:
        AT_LEAST_ONE.check("steps", steps)
    budget = watched.steps if steps is None else steps
    layers = [x for x in watched.layers.values() if not x.is_vector]
    advice = [_advice(layer, rotation, norm_at, budget) for layer in layers]
    groups = _groups(watched, advice)
    candidates = [x for x in watched.layers.values() if x.size_counts is False]
    notes = list(watched.troubles)
    if len(groups) > 1:
        notes.append(because(Reason.NO_ONE_VALUE))
    elif not groups:
        judged = any(not x.skipped for x in watched.layers.values())
        counting = judged and not candidates
        notes.append(because(Reason.NO_CANDIDATE if counting else Reason.NO_SUGGESTION))
    first = next((_in_kind(layer.first) for layer in candidates if layer.settings), None)
    only_group = groups[0] if len(groups) == 1 else None
    return Suggestion(
        watched.name,
        only_group.decay if only_group else first.decay if first else "decoupled",
        only_group.lr if only_group else (first.lr or math.nan) if first else math.nan,
        only_group.weight_decay if only_group else None,
        budget,
        tuple(groups),
        tuple(advice),
        tuple(notes),
    )


def _groups(run: Run, advice: Sequence[LayerAdvice]) -> list[GroupAdvice]:
    """Layers with a suggestion, by how they are stepped: one value each."""
    by_stepping: dict[tuple[Any, ...], list[tuple[LayerAdvice, LayerSettings]]] = {}
    for row in advice:
        if row.suggested is None:
            continue
        layer = run.layers[row.layer]
        settings = _at_longest_stretch(layer)
        unit = shrink_under(settings, 1.0)
        key = (settings.optimizer, settings.decay, round(math.log(unit) / math.log(RULES.alike)))
        by_stepping.setdefault(key, []).append((row, settings))
    groups = []
    for (optimizer, decay, _), rows in by_stepping.items():
        values = [row.suggested or 0.0 for row, _ in rows]
        value = _one_value(values, [row.least for row, _ in rows if row.least])
        # a timescale goes with 1 / decay, and layers may have asked for others
        waits = [row.steps * (row.suggested or 0.0) / value for row, _ in rows if row.steps]
        names = tuple(
            name for row, _ in rows for name in run.layers[row.layer].members or (row.layer,)
        )
        groups.append(
            GroupAdvice(
                names,
                optimizer,
                decay,
                rows[0][1].lr or math.nan,
                value,
                (min(values), max(values)),
                geometric_mean(waits) if waits else None,
            )
        )
    return groups


def _one_value(values: Sequence[float], least: Sequence[float]) -> float:
    """For layers that ask for these, of which the weakest that act are `least` (`GroupAdvice`)."""
    if not least or max(values) < RULES.rough * min(values):
        return geometric_mean(values)
    return min(max(geometric_mean(least), min(values)), max(values))


def _in_kind(settings: LayerSettings) -> LayerSettings:
    """With the run's own kind of decay; without decay the usual one: torch's SGD has L2."""
    if settings.decays and not isinstance(decay_rate(settings), Because):
        return settings
    return replace(settings, decay="l2" if isinstance(law_for(settings), Sgd) else "decoupled")


def _advice(
    layer: RecordedLayer, rotation: float | None, norm_at: int | None, budget: int
) -> LayerAdvice:
    weight_decay = layer.settings[-1][1].weight_decay if layer.settings else 0.0
    if (reason := _why_none(layer)) is not None:
        return LayerAdvice(layer.name, weight_decay, notes=(reason,))
    settings = _at_longest_stretch(layer)
    weight_decay, stretch = settings.weight_decay, longest_stretch(layer)
    law = layer.law.elasticity(layer.last("second_order_share")) or 0.0
    if not layer.invariant:
        law = max(law, 0.0)  # how pushes depend on a size that hardly matters is not SGD's law
    e = seen_elasticity(layer, stretch, law)
    growth, norm = growth_over(layer, late(stretch), e)
    if growth <= 0:
        return LayerAdvice(
            layer.name, weight_decay, norm=norm, notes=(because(Reason.DOES_NOT_GROW),)
        )
    correlation = seen_correlation(layer, late(stretch), e)
    target, least = _norm_at(layer, norm_at), None
    shrink, doubts = shrink_for_norm(growth, norm, target, e), []
    if rotation is not None:
        layer.law.shrink_for_rotation(rotation)  # refuses what is not an angle
        if correlation is None:
            return LayerAdvice(
                layer.name, weight_decay, norm=norm, notes=(because(Reason.NO_ROTATION),)
            )
        shrink = rotation**2 * correlation / 2
    elif e <= 0 and norm_at is None:
        least = RULES.timescales / (2 * (1 - e) * budget)
        last = layer.norms[-1][1]
        near = 1 / RULES.travelling < last / target < RULES.travelling
        if shrink < least and not near:
            doubts.append(because(Reason.FOR_THE_BUDGET, budget=budget, holding=shrink / least))
            shrink = least
    rested = balance(growth, norm, shrink, e)
    if rotation is not None or doubts:
        target = rested[0] if rested else norm
    if shrink >= RULES.too_strong:
        kind = Reason.NOTHING_HOLDS if rotation is None else Reason.ASK_FOR_LESS
        reason = because(kind, growth=2 * shrink)
        return LayerAdvice(layer.name, weight_decay, norm=norm, target=target, notes=(reason,))
    if shrink < settings.rounding:
        return LayerAdvice(
            layer.name, weight_decay, norm=norm, notes=(because(Reason.ROUNDED_AWAY),)
        )
    present = balance(growth, norm, known_rate(settings), e)
    last = dict(layer.norms)[stretch[-1]]
    doubts += [] if rested else [because(Reason.TURNS_BY_LR)]
    doubts += _rough(norm, target, e, law) if rotation is None else []
    doubts += _mixed(shrink, settings, correlation)
    doubts += _travelling(last, present)
    unit = shrink_under(settings, 1.0)
    return LayerAdvice(
        layer.name,
        weight_decay,
        shrink / unit,
        norm,
        target,
        present[0] if present and not _far(last, present[0]) else None,
        math.sqrt(2 * shrink / correlation) if rested and correlation is not None else None,
        rested[1] if rested else None,
        tuple(doubts),
        None if least is None else least / unit,
    )


def _mixed(shrink: float, settings: LayerSettings, correlation: float | None) -> list[Because]:
    """L2 inside a momentum is summed up as the gradients are, and balances them exactly."""
    if settings.decay == "l2" or shrink <= RULES.mixed / (correlation or 1.0):
        return []
    return [because(Reason.MIXED)]


def _travelling(norm: float, present: tuple[float, float] | None) -> list[Because]:
    """That the norm is far from where its present decay leads, and how long that takes."""
    if present is None or 1 / RULES.travelling < norm / present[0] < RULES.travelling:
        return []
    if _far(norm, present[0]):
        far = Reason.FAR_SMALLER if present[0] < norm else Reason.FAR_LARGER
        return [because(far, norm=norm)]
    return [because(Reason.ON_ITS_WAY, norm=norm, balance=present[0], steps=present[1])]


def _far(norm: float, at: float) -> bool:
    return not 1 / RULES.far < norm / at < RULES.far


def _rough(norm: float, target: float, e: float, law: float) -> list[Because]:
    """How far a decay may be off that holds another norm than the recorded one.

    The elasticity of a stationary state was seen between the law's and 0 (`seen_elasticity`).
    """
    larger, smaller = (max(a / b, 1.0) for a, b in ((norm, target), (target, norm)))
    low, high = min(e, law), max(e, 0.0)
    strong = max(larger ** (2 * (high - e)), smaller ** (2 * (e - low)))
    weak = max(smaller ** (2 * (high - e)), larger ** (2 * (e - low)))
    doubt, way = max((strong, "strong"), (weak, "weak"))
    return [because(Reason.ROUGH, factor=doubt, way=way)] if doubt >= RULES.rough else []


def _why_none(layer: RecordedLayer) -> Because | None:
    """Why no decay can be suggested for a layer; None if one can."""
    if layer.skipped is not None:
        return layer.skipped
    if layer.size_counts is None:
        return layer.why_size_counts
    if layer.size_counts:
        return because(Reason.CHOOSE_BY_OUTCOME, counts=layer.why_size_counts)
    if layer.law.norm_power is None or (layer.natural and layer.clipped):
        return because(Reason.LAW_UNKNOWN)
    if layer.lost:
        return because(Reason.LOST_TO_ROUNDING, layers=[layer.name])
    if (unknown := layer.unknown) is not None:
        return unknown
    settings = _at_longest_stretch(layer)
    if not settings.lr:
        return because(Reason.NO_LR)
    if not shrink_under(settings, 1.0):
        return because(Reason.DAMPENED_OUT)
    return because(Reason.TAKEN) if layer.collapsed else None


def _norm_at(layer: RecordedLayer, step: int | None) -> float:
    norms = [norm for s, norm in layer.norms if step is None or s <= step]
    if step is not None:
        first = Range(at_least=layer.norms[0][0])
        first.check("norm_at", step, "nothing is recorded before that step")
    return norms[0] if step is None else norms[-1]


def _at_longest_stretch(layer: RecordedLayer) -> LayerSettings:
    """The settings in its second half, with the mean learning rate there."""
    steps = late(longest_stretch(layer))
    lr = fmean(layer.settings_at(step).lr or 0.0 for step in steps[1:])
    return _in_kind(replace(layer.settings_at(steps[-1]), lr=lr))
