"""Which runs belong together: a run and its baseline, and the seeds of one setting."""

import math
from collections.abc import Sequence
from statistics import fmean

from decaylab.diagnosis.layers import RecordedLayer, ratio
from decaylab.diagnosis.reasons import Because, Reason, because
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import Run
from decaylab.optim.laws import Adam, Lion, Muon, Sgd

# What may differ between a run and its baseline: the decay, and what leaves the same training.
FREE_TO_DIFFER = {"decay", "weight_decay", "decay_scope", "norm_source"}
NOTED = {"seed", "precision", "deterministic", "epochs"}
# What must be the same of a layer in two watched runs, beside the learning rate.
SAME_SETTINGS = ("momentum", "beta1", "dampening", "beta2", "damping")


def comparable(run: Run, baseline: Run) -> tuple[Because | None, list[Because]]:
    """Why a run and a baseline cannot be compared (None: they can), and what differs so."""
    if baseline.decays:
        return because(Reason.BASELINE_DECAYS), []
    return same_training(run, baseline, free=FREE_TO_DIFFER)


def same_training(run: Run, other: Run, *, free: set[str]) -> tuple[Because | None, list[Because]]:
    """Why two runs are not the same training, but for `free` fields (None: they are), and notes."""
    if run.spec is not None and other.spec is not None:
        keys = list(dict.fromkeys([*run.spec, *other.spec]))
        pairs = {key: (run.spec.get(key), other.spec.get(key)) for key in keys}
        differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        wrong = [key for key in differing if key not in free | NOTED]
        if wrong:
            # of another optimizer, the settings that only one of them has say nothing
            shown = [key for key in wrong if None not in differing[key]] or wrong
            pairs = {key: differing[key] for key in shown[:3]}
            return because(Reason.OTHER_SPEC, fields=pairs), []
        noted = {key: pair for key, pair in differing.items() if key in NOTED}
        notes = [because(Reason.DIFFERS, name=k, pair=pair) for k, pair in noted.items()]
        return None, notes
    decay = [name for name in ("decay", "weight_decay") if name not in free]
    why_not = _same_layers(run, other, decay) or grown_otherwise(run, other)
    if why_not is not None and why_not.reason is Reason.OTHER_LR:  # schedules of another length?
        why_not = because(Reason.OTHER_LR, **why_not.data, lengths=(run.steps, other.steps))
    shorter, longer = sorted((run.steps, other.steps))
    differs = because(Reason.STEPS_DIFFER, pair=(run.steps, other.steps))
    if why_not is not None:
        return why_not, []
    notes = [differs] if shorter < RULES.same_length * longer else []
    clipping = clipped_otherwise(run, other)
    return None, [*notes, clipping] if clipping is not None else notes


def _same_layers(run: Run, other: Run, decay: Sequence[str]) -> Because | None:
    if run.layers.keys() != other.layers.keys() and not _split(run, other):
        return because(Reason.OTHER_LAYERS)
    if why_not := _frozen_otherwise(run, other):
        return why_not
    for name, layer in run.layers.items():
        counterpart = other.layers.get(name)
        if counterpart is None or not layer.settings or not counterpart.settings:
            continue
        powers = (layer.law.norm_power, counterpart.law.norm_power)
        known = None not in powers
        other_law = (type(layer.law), powers[0]) != (type(counterpart.law), powers[1])
        if (known and other_law) or layer.own_lr != counterpart.own_lr:
            return because(Reason.OTHER_OPTIMIZER, layer=name)
        norms = ratio(layer.norms, counterpart.norms)
        # settings first: another lr alone makes other norms by the first record
        why_not = _stepped_otherwise(
            layer, counterpart, [step for step, _ in norms], (*SAME_SETTINGS, *decay)
        )
        if why_not is None and norms:
            why_not = _starts_otherwise(layer, counterpart, norms[0])
        if why_not is not None:
            return why_not
    return None


def clipped_otherwise(run: Run, other: Run) -> Because | None:
    """That gradients of one are clipped to a norm that those of the other exceed."""
    for clipped, free in ((run, other), (other, run)):
        largest = max((size for _, size in free.totals.get("gradient_norm", ())), default=0.0)
        if largest > RULES.same_bound * clipped.norm_bound:
            bound = clipped.norm_bound
            return because(Reason.OTHER_CLIPPING, name=clipped.name, bound=bound, largest=largest)
    return None


def _frozen_otherwise(run: Run, other: Run) -> Because | None:
    """The first layer that is trained in only one of them at a step that both have recorded."""
    mine, its = ({s for x in each.layers.values() for s, _ in x.norms} for each in (run, other))
    for step in sorted(mine & its):
        for name, layer in run.layers.items():
            pair = layer.frozen_at(step), other.layers.get(name, layer).frozen_at(step)
            if pair[0] != pair[1]:
                return because(
                    Reason.OTHER_SETTING, layer=name, name="frozen", pair=pair, step=step
                )
    return None


def _split(run: Run, other: Run) -> bool:
    """Whether they differ only in that one decays a group of layers together."""
    names = [
        {m for x in compared.layers.values() for m in (x.members or (x.name,))}
        for compared in (run, other)
    ]
    return names[0] == names[1]


def grown_otherwise(run: Run, baseline: Run) -> Because | None:
    """What early norms say of the batches, which are not recorded: whether they grew by the same.

    Pushes lengthen larger weights by a smaller part (`dynamics`: e <= 0 for SGD and Adam), so that
    the baseline's |W|^2 is 1 to exp(2 x exposure) times the run's, if nothing but decay differs.
    Of another seed, the small layers begin apart, and what they begin with is explained as well.
    """
    logs: dict[int, list[tuple[float, float]]] = {}
    for name, layer in run.layers.items():
        if not layer.invariant or not layer.decayed or layer.skipped or layer.unknown:
            continue
        if not isinstance(layer.law, Sgd | Adam | Lion | Muon) or name not in baseline.layers:
            continue
        exposure = dict(layer.exposure)
        for step, apart in ratio(baseline.layers[name].norms, layer.norms):
            if step in exposure and exposure[step] < RULES.early:
                logs.setdefault(step, []).append((2 * math.log(apart), 2 * exposure[step]))
    start = None
    for step, pairs in sorted(logs.items()):
        apart, most = (fmean(values) for values in zip(*pairs, strict=True))
        if start is None:
            start = apart if most < 2 * RULES.too_little_exposure else 0.0
        low, high = min(start, 0.0), max(start, 0.0) + most
        margin = math.log(RULES.same_growth)
        if not low - margin < apart < high + margin:
            measured, least, largest = (math.exp(min(x, 700.0)) for x in (apart, low, high))
            return because(
                Reason.OTHER_GROWTH, step=step, seen=measured, least=least, largest=largest
            )
    return None


def _stepped_otherwise(
    layer: RecordedLayer, other: RecordedLayer, steps: Sequence[int], names: Sequence[str]
) -> Because | None:
    """The first of the settings `names` that differs, from the first record on or at `steps`."""
    margin = RULES.same_lr * max((layer.settings_at(step).lr or 0.0 for step in steps), default=0.0)
    for step in (0, *steps):
        mine, theirs = layer.settings_at(step), other.settings_at(step)
        for name in names:
            pair = getattr(mine, name), getattr(theirs, name)
            if pair[0] != pair[1]:
                later = step if step > layer.settings[0][0] else None
                return because(
                    Reason.OTHER_SETTING, layer=layer.name, name=name, pair=pair, step=later
                )
        if step and abs((mine.lr or 0.0) - (theirs.lr or 0.0)) > margin:
            return because(Reason.OTHER_LR, pair=(mine.lr or 0.0, theirs.lr or 0.0), step=step)
    return None


def _starts_otherwise(
    layer: RecordedLayer, other: RecordedLayer, first: tuple[int, float]
) -> Because | None:
    """What differs before decay can act; `first`: the first common step, the ratio of the norms."""
    sizes = layer.first.size, other.first.size
    if sizes[0] != sizes[1] and all(sizes):
        return because(Reason.OTHER_SIZE, layer=layer.name, pair=sizes)
    step, apart = first
    late = layer.unknown or dict(layer.exposure).get(step, 0.0) >= RULES.too_little_exposure
    if late or not layer.invariant or 1 / RULES.same_start < apart < RULES.same_start:
        return None
    pair = tuple(dict(x.norms)[step] for x in (layer, other))
    return because(Reason.OTHER_START, layer=layer.name, pair=pair, step=step)
