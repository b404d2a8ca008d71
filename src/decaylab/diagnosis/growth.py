"""How fast gradients lengthen a recorded layer, and how that depends on its norm.

G = c N^e (`laws.dynamics`), N = |W|^2. Here c, e and how far single steps turn the weight are
measured.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean

from decaylab.diagnosis.layers import RecordedLayer
from decaylab.diagnosis.rules import RULES
from decaylab.optim.laws import Adam
from decaylab.optim.laws.dynamics import pushes


def longest_stretch(layer: RecordedLayer) -> Sequence[int]:
    """The recorded steps of the longest time with nearly one learning rate, at least two."""
    stretches: list[list[int]] = []
    rate = math.nan
    for (before, _), (step, _) in pairwise(layer.norms):
        lr = layer.settings_at(step).lr or 0.0
        if not rate / RULES.one_rate <= lr <= rate * RULES.one_rate:
            stretches.append([before])
            rate = lr
        stretches[-1].append(step)
    return max(
        stretches,
        key=lambda stretch: (
            (layer.settings_at(stretch[-1]).lr or 0.0) > 0,
            stretch[-1] - stretch[0],
        ),
    )


def late(stretch: Sequence[int]) -> Sequence[int]:
    """Its second half."""
    return stretch[min(len(stretch) // 2, len(stretch) - 2) :]


def growth_over(layer: RecordedLayer, steps: Sequence[int], e: float) -> tuple[float, float]:
    """G per step between these records, brought to one norm by G = c N^e, and that norm: the mean.

    Where Adam remembers other norms, its steps are longer or shorter than at rest (`memory`): G is
    what it would be there.
    """
    norms = dict(layer.norms)
    norm = geometric_mean(norms[step] for step in steps)
    return sum(_pushed(layer, steps, e)) * norm ** (2 * e) / (steps[-1] - steps[0]), norm


def _pushed(layer: RecordedLayer, steps: Sequence[int], e: float) -> list[float]:
    """The sum of c between each two of these records."""
    norms, exposure, longer = dict(layer.norms), dict(layer.exposure), _longer(layer)
    return [
        pushes(norms[a] ** 2, norms[b] ** 2, exposure.get(b, 0.0) - exposure.get(a, 0.0), e)
        / (longer.get(a, 1.0) * longer.get(b, 1.0))
        for a, b in pairwise(steps)
    ]


def _longer(layer: RecordedLayer) -> dict[int, float]:
    """By step, N_v / N_m (`memory`): how much longer Adam's steps are than at norms at rest."""
    if layer.law.adam_betas is None or not layer.invariant:
        return {}
    norms = dict(layer.norms)
    effective = layer.law.effective_per_lr(layer.norms, layer.moments)
    return {step: value * norms[step] for step, value in effective}


def seen_elasticity(layer: RecordedLayer, stretch: Sequence[int], law: float) -> float:
    """The e of G = c N^e that the run's own norms show, between the law's e and 0.

    The law takes |grad L(u)| to be constant. Under SGD it falls with the norm, as smaller steps
    find a lower loss, so that G may hardly depend on it. With an e too low, whoever follows a
    suggestion, and then that of the new run, swings between a decay too strong and one too weak.
    Where norms move, e shows: the slope of log G over log N between the records, by least squares.
    The less the scatter of G leaves to see of it, the nearer to the middle. (Norms at rest move by
    that scatter alone: the squares of log N add up to about scatter x exposure, and the slope is
    about 1.)
    """
    if law >= 0:
        return law
    norms = dict(layer.norms)
    logs = [
        (math.log(n), math.log(c / (b - a)) + law * math.log(n))
        for (a, b), c in zip(pairwise(stretch), _pushed(layer, stretch, law), strict=True)
        if c > 0 and (n := norms[a] * norms[b])
    ]
    if len(logs) < 3:
        return law
    centre = [fmean(coordinates) for coordinates in zip(*logs, strict=True)]
    moved = [(x - centre[0], y - centre[1]) for x, y in logs]
    squares, product = sum(x * x for x, _ in moved), sum(x * y for x, y in moved)
    slope = product / squares if squares else 0.0
    scatter = sum((y - slope * x) ** 2 for x, y in moved) / (len(moved) - 2)
    exposure = dict(layer.exposure)
    decayed = exposure.get(stretch[-1], 0.0) - exposure.get(stretch[0], 0.0)
    weight = RULES.scattered * scatter * (1 + decayed)
    if not squares + weight:
        return law
    return min(max((product + weight * law / 2) / (squares + weight), law), 0.0)


def seen_correlation(layer: RecordedLayer, steps: Sequence[int], e: float) -> float | None:
    """The C of `laws.law` by which single steps turn a weight as far as was recorded.

    |d|^2 = G / C, and |d| = rotation |W|. It stands for all that makes steps agree or not: NAdam's
    own schedule, Lion's signs, Nesterov's momentum, gradients that are not independent. Without
    records of the rotation it is the law's; None if that does not say it, or nothing grows.
    """
    norms, turns, longer = dict(layer.norms), dict(layer.series.get("rotation", ())), _longer(layer)
    growth, norm = growth_over(layer, steps, e)
    lengths = [
        (turns[step] * norms[step] / longer.get(step, 1.0)) ** 2 * (norm / norms[step]) ** (2 * e)
        for step in steps[1:]
        if turns.get(step)
    ]
    if lengths and growth > 0:
        return growth / fmean(lengths)
    averages = isinstance(layer.law, Adam) and layer.law.beta2 is None  # of other kinds than Adam's
    return None if averages else layer.law.correlation()
