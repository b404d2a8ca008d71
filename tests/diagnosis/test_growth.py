"""How a layer is pushed outwards, against paths whose pushes are known in closed form."""

import math
from itertools import pairwise

import numpy
import pytest

from decaylab.diagnosis.growth import (
    growth_over,
    late,
    longest_stretch,
    seen_correlation,
    seen_elasticity,
)
from decaylab.diagnosis.layers import RecordedLayer
from decaylab.optim.laws.law import momentum_correlation
from decaylab.records import LayerSettings

SHRINK, PUSH, MEMORY = 0.01, 0.3, 0.6
STEPS = (0, 10, 25, 60, 70)


def layer(norms, rates=((0, 0.1),), *, exposure=(), turns=(), **setting):
    """`norms`, `exposure` and `turns`: (step, value); `rates`: (from step, lr)."""
    given = {"decay": "decoupled", "weight_decay": 0.1, "law": "sgd", **setting}
    settings = tuple((step, LayerSettings(lr=lr, **given)) for step, lr in rates)
    series = {"rotation": tuple(turns)} if turns else {}
    return RecordedLayer("a", settings, tuple(norms), tuple(exposure), series, invariant=True)


def at_rates(*rates, every=10):
    """Records every 10 steps, from 0, and the learning rate of the steps up to each."""
    norms = [(every * k, 1.0) for k in range(len(rates) + 1)]
    return layer(norms, [(every * k + 1, lr) for k, lr in enumerate(rates)])


@pytest.mark.parametrize(
    ("rates", "stretch"),
    [
        ((0.1, 0.1, 0.01, 0.01, 0.01), (20, 30, 40, 50)),
        ((0.1, 0.1, 0.1, 0.01, 0.01), (0, 10, 20, 30)),
        ((0.1, 0.08, 0.067, 0.066, 0.05), (0, 10, 20, 30)),  # by the first one's factor of 1.5
        ((0.04, 0.05, 0.059, 0.061, 0.07), (0, 10, 20, 30)),
        ((0.0, 0.0, 0.0, 0.1, 0.1), (30, 40, 50)),  # where it moves at all
        ((0.0, 0.0), (0, 10, 20)),
    ],
)
def test_the_longest_time_with_nearly_one_learning_rate(rates, stretch):
    assert tuple(longest_stretch(at_rates(*rates))) == stretch


def test_the_longest_time_is_one_of_steps_not_of_records():
    norms = [(step, 1.0) for step in (0, 1, 2, 3, 4, 100, 200)]
    assert list(longest_stretch(layer(norms, [(0, 0.1), (5, 0.01)]))) == [4, 100, 200]


@pytest.mark.parametrize(("length", "first"), [(2, 0), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_the_second_half_has_two_records_at_least(length, first):
    assert list(late(range(length))) == list(range(first, length))


def path(pushes, shrink=SHRINK, steps=STEPS, start=1.5):
    """SGD: d(N^2) = 2 (c - 2 s N^2) dt, solved with a c and an s that are constant in between."""
    norms = [(steps[0], math.sqrt(start))]
    for (a, b), c in zip(pairwise(steps), pushes, strict=True):
        left = math.exp(-4 * shrink * (b - a))
        added = c * (1 - left) / (2 * shrink) if shrink else 2 * c * (b - a)
        norms.append((b, (norms[-1][1] ** 4 * left + added) ** 0.25))
    return norms, [(step, shrink * step) for step in steps]


def test_growth_is_brought_to_the_mean_norm():
    """G = c / N; the path begins before what is asked for, and records are not evenly spaced."""
    norms, exposure = path([0.7, *[PUSH] * 3])
    growth, norm = growth_over(layer(norms, exposure=exposure), STEPS[1:], -1.0)
    assert norm == pytest.approx(math.prod(n for _, n in norms[1:]) ** 0.25, rel=1e-14)
    assert growth == pytest.approx(PUSH / norm**2, rel=1e-12)


@pytest.mark.parametrize("memory", [MEMORY, 0.0, -0.5])
def test_the_momentum_by_which_steps_turn_as_far_as_recorded(memory):
    """|d|^2 = G (1 - m) / (1 + m), |d| = rotation |W|. Below 0: steps that undo each other."""
    norms, exposure = path([PUSH] * 4)
    lengths = {step: PUSH / norm**2 * (1 - memory) / (1 + memory) for step, norm in norms}
    turns = {step: math.sqrt(lengths[step]) / norm for step, norm in norms}
    turns |= {STEPS[0]: 9.0, STEPS[2]: 0.0}  # of a step before, and not known
    found = layer(norms, exposure=exposure, turns=turns.items(), momentum=0.9)
    expected = (1 + memory) / (1 - memory)
    assert seen_correlation(found, STEPS, -1.0) == pytest.approx(expected, rel=1e-12)


def test_the_momentum_is_the_optimizers_where_steps_do_not_show_it():
    still = [(step, 2.0) for step in STEPS]
    turns = [(step, 0.1) for step in STEPS]
    own = momentum_correlation(0.9)
    assert seen_correlation(layer(still, turns=turns, momentum=0.9), STEPS, -1.0) == own
    assert seen_correlation(layer(path([PUSH] * 4)[0], momentum=0.9), STEPS, -1.0) == own


def test_adams_longer_steps_are_brought_to_those_at_rest():
    """Gradients at W/|W| of size 1: v is a mean of 1/|W|^2, and a step goes with N_v / |W|.

    A norm is recorded after a step, whose gradient was of the one before.
    """
    beta2, length = 0.8, 0.02
    norms = {step: 2.0 - 0.1 * step + 0.03 * step**2 for step in range(1, 7)}
    longer, v, squares = {}, 0.0, 0.0
    for step in norms:
        before = norms[max(step - 1, 1)]
        v = beta2 * v + (1 - beta2) / before**2
        squares = beta2 * squares + (1 - beta2)
        longer[step] = math.sqrt(squares / v) / before
    exposure = {step: 0.05 * step for step in norms}
    expected = 0.0
    for a, b in pairwise(norms):  # at e = 0: d N = (c - 2 s N) dt
        left = math.exp(-2 * 0.05)
        c = (norms[b] ** 2 - norms[a] ** 2 * left) * 2 * 0.05 / (1 - left)
        expected += c / (longer[a] * longer[b]) / 5
    turns = {step: math.sqrt(length) * longer[step] / norm for step, norm in norms.items()}
    given = {"exposure": exposure.items(), "turns": turns.items(), "law": "adam", "beta2": beta2}
    found = layer(norms.items(), **given)
    assert min(longer.values()) < 0.95
    assert growth_over(found, [*norms], 0.0)[0] == pytest.approx(expected, rel=1e-12)
    assert seen_correlation(found, [*norms], 0.0) == pytest.approx(expected / length, rel=1e-12)


SCATTER = (0.31, 0.24, 0.35, 0.2, 0.28, 0.33, 0.22)


@pytest.mark.parametrize("shrink", [0.0, 0.002])
@pytest.mark.parametrize("start", [0.5, 2.0])
def test_the_elasticity_is_drawn_to_the_middle_by_ten_records_of_the_scatter(shrink, start):
    """Least squares with one more point, which says half of the law's e."""
    steps = (0, 30, 60, 80, 110, 120, 160, 190)
    norms, exposure = path(SCATTER, shrink, steps, start)
    squared = [norm**2 for _, norm in norms][1:]
    x = numpy.log([math.sqrt(a * b) for a, b in pairwise(squared)])
    y = numpy.log(SCATTER[1:]) - x  # G = c / N
    x, y = x - x.mean(), y - y.mean()
    _, (residual, *_), *_ = numpy.linalg.lstsq(x[:, None], y, rcond=None)
    weight = 10 * residual / (len(x) - 2) * (1 + shrink * 160)
    rows, said = numpy.append(x, math.sqrt(weight)), numpy.append(y, -0.5 * math.sqrt(weight))
    expected = numpy.linalg.lstsq(rows[:, None], said, rcond=None)[0].item()
    assert -0.95 < expected < -0.3
    found = seen_elasticity(layer(norms, exposure=exposure), steps[1:], -1.0)
    assert found == pytest.approx(expected, rel=1e-10)


def test_an_elasticity_that_nothing_hides_is_seen():
    """N grows by 0.02 a step whatever it is: e = 0; by 0.02 N: more than 0, which none is."""
    steps = range(0, 101, 2)
    for norms in ([1 + 0.02 * s for s in steps], [math.exp(0.02 * s) for s in steps]):
        recorded = [(step, math.sqrt(n)) for step, n in zip(steps, norms, strict=True)]
        assert seen_elasticity(layer(recorded), steps, -1.0) == pytest.approx(0.0, abs=2e-3)
        assert seen_elasticity(layer(recorded), steps, -1.0) <= 0
    norms, exposure = path([PUSH] * 4)
    found = seen_elasticity(layer(norms, exposure=exposure), STEPS, -1.0)
    assert found == pytest.approx(-1.0, rel=1e-9)
    steep = [(s, (1 + 0.04 * s) ** (1 / 8)) for s in steps]  # dN = c / N^3
    assert seen_elasticity(layer(steep), steps, -1.0) == -1.0


def test_without_enough_to_see_the_elasticity_is_the_laws():
    norms, exposure = path(SCATTER[:4])
    found = layer(norms, exposure=exposure)
    assert seen_elasticity(found, STEPS[:3], -1.0) == -1.0
    assert -1 < seen_elasticity(found, STEPS[:4], -1.0) < -0.1  # three pushes
    for law in (0.0, 0.4):  # that of Adam, and of K-FAC
        assert seen_elasticity(found, STEPS, law) == law
    still, exposure = (
        [(step, 2.0) for step in (0, 8, 16, 24)],
        [(k, k / 64) for k in (0, 8, 16, 24)],
    )
    assert seen_elasticity(layer(still), (0, 8, 16, 24), -1.0) == -1.0  # no push at all
    assert -1 <= seen_elasticity(layer(still, exposure=exposure), (0, 8, 16, 24), -1.0) <= 0
