"""Pooled spreads, pairs on the same images, corrections: against scipy and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from decaylab.paper.statistics import Noise, Pool, correlation, holm, image_p_value


def test_two_cells_of_one_pool_are_the_two_sample_t_test():
    """With both cells in the pool and nothing else, it is Student's test of equal variances."""
    one, other = [88.1, 88.4, 87.9], [88.9, 89.3, 88.8, 89.0]
    pool = Pool.over("adam", [one, other])
    effect = np.mean(other) - np.mean(one)
    noise = Noise.of_terms([(1.0, pool, len(other)), (-1.0, pool, len(one))])
    expected = stats.ttest_ind(other, one)
    assert pool.degrees == 5
    assert noise.degrees == pytest.approx(5)
    assert noise.p_value(effect) == pytest.approx(expected.pvalue, rel=1e-12)


def test_a_cell_of_its_own_pool_each_is_welchs_test():
    one, other = [88.1, 88.4, 87.9], [88.9, 89.9, 88.0, 90.0]
    pools = Pool.over("a", [one]), Pool.over("b", [other])
    noise = Noise.of_terms([(-1.0, pools[0], len(one)), (1.0, pools[1], len(other))])
    expected = stats.ttest_ind(other, one, equal_var=False)
    assert noise.degrees == pytest.approx(expected.df)
    effect = np.mean(other) - np.mean(one)
    assert noise.p_value(effect) == pytest.approx(expected.pvalue, rel=1e-12)


def test_cells_of_one_seed_add_nothing_to_a_pool():
    assert Pool.over("a", [[88.0], [88.0, 89.0]]) == Pool.over("a", [[88.0, 89.0]])
    assert math.isnan(Pool.over("a", [[88.0], []]).deviation)


def test_noise_that_is_known_is_normal():
    noise = Noise.of_terms([(1.0, Pool("images", 3.0), 9)])
    assert noise.error == pytest.approx(1.0)
    assert noise.p_value(1.96) == pytest.approx(0.05, abs=1e-4)
    assert noise.p_value(0.0) == 1.0


def test_no_spread_at_all_leaves_no_doubt():
    noise = Noise.of_terms([(1.0, Pool("same", 0.0, 4), 2)])
    assert (noise.p_value(0.1), noise.p_value(0.0)) == (0.0, 1.0)


def test_the_noise_of_a_mean_has_the_degrees_of_its_parts():
    pools = [Pool(str(n), 0.6, 2) for n in range(4)]
    apart = Noise.of_mean([Noise.of_terms([(1.0, pool, 1)]) for pool in pools])
    assert (apart.error, apart.degrees) == (pytest.approx(0.3), pytest.approx(8))
    shared = Noise.of_mean([Noise.of_terms([(1.0, pools[0], 1)])] * 4)
    assert (shared.error, shared.degrees) == (pytest.approx(0.3), pytest.approx(2))


def hits(gained, lost, both, neither):
    with_decay = [True] * gained + [False] * lost + [True] * both + [False] * neither
    without = [False] * gained + [True] * lost + [True] * both + [False] * neither
    return np.array(with_decay), np.array(without)


@pytest.mark.parametrize(("gained", "lost"), [(40, 20), (20, 40), (30, 30), (5, 0)])
def test_one_pair_is_mcnemars_exact_test(gained, lost):
    """Only the images on which the two differ count: a fair coin's chances."""
    decayed, without = hits(gained, lost, both=500, neither=100)
    chances = [math.comb(gained + lost, k) for k in range(gained + lost + 1)]
    as_rare = sum(c for c in chances if c <= chances[gained]) / 2 ** (gained + lost)
    found = image_p_value([(1.0, [decayed]), (-1.0, [without])])
    assert found == pytest.approx(as_rare, rel=1e-9)


def test_several_runs_are_compared_by_their_mean_hits_on_an_image():
    rng = np.random.default_rng(0)
    ones, others = rng.random((3, 400)) < 0.9, rng.random((2, 400)) < 0.85
    found = image_p_value([(1.0, list(ones)), (-1.0, list(others))])
    expected = stats.ttest_rel(ones.mean(0), others.mean(0)).pvalue
    assert found == pytest.approx(expected, rel=1e-9)


def test_two_nets_that_hit_the_same_images_do_not_differ():
    same = hits(0, 0, both=90, neither=10)
    assert image_p_value([(1.0, [same[0]]), (-1.0, [same[1]])]) == 1.0
    assert image_p_value([(1.0, [same[0]]), (-1.0, [same[1]])], expected=0.01) == 0.0


def test_holm_rejects_by_steps():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.6]) == [1.0, 1.0]


def test_correlation_and_what_of_it_is_within_groups():
    rng = np.random.default_rng(1)
    xs, ys = rng.random(20), rng.random(20)
    found = correlation(xs, ys, ["a"] * 20)
    expected = stats.spearmanr(xs, ys)
    assert (found.rank, found.p) == pytest.approx((expected.statistic, expected.pvalue))
    assert found.within == pytest.approx(found.rank)  # one group: all of it is within
    assert found.share_within == pytest.approx(1.0)
    half = 1.96 / math.sqrt(17)
    assert found.low == pytest.approx(math.tanh(math.atanh(found.rank) - half), abs=1e-3)


def test_groups_that_differ_and_nothing_within_them():
    """Two optimizers far apart in both; within each, the one falls as the other grows."""
    xs = [1.0, 2, 3, 4, 11, 12, 13, 14]
    ys = [4.0, 3, 2, 1, 14, 13, 12, 11]
    found = correlation(xs, ys, ["sgd"] * 4 + ["adam"] * 4)
    assert found.rank > 0.5
    assert found.within == pytest.approx(-1.0)
    assert found.share_within == pytest.approx(-10 / 22)  # of ranks: 32 between, -10 within
