"""Inverses of the kinds that are rare: diagonal sides, a single factor, factors one by one."""

import pytest
import torch

from decaylab.curvature import inverses


def positive_definite(count: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    random = torch.randn(count, size, 2 * size, generator=generator, dtype=torch.float64)
    return random @ random.mT / size


def test_a_diagonal_is_sound_where_every_entry_has_an_inverse():
    tiny = 1e-320  # above zero, and its reciprocal is not finite
    sides = torch.tensor(
        [[2.0, 4.0], [2.0, -0.5], [0.0, 4.0], [2.0, float("nan")], [2.0, tiny], [-2.0, -0.5]],
        dtype=torch.float64,
    )
    assert inverses.invert_(sides).tolist() == [True, False, False, False, False, False]
    assert sides[0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_large_factors(monkeypatch, count, one_by_one):
    """Split into blocks, alone or stacked, factorised in a batch or one by one."""
    monkeypatch.setattr(inverses, "BLOCK", 4)
    monkeypatch.setattr(inverses, "LARGEST_BATCHED", 8 if one_by_one else 100)
    sides = positive_definite(count, 21)
    inverse = sides.clone()
    assert inverses.invert_(inverse).tolist() == [True] * count
    torch.testing.assert_close(inverse, torch.linalg.inv(sides), rtol=1e-9, atol=1e-9)


def test_one_by_one_a_bad_factor_is_found_and_stays_alone(monkeypatch):
    monkeypatch.setattr(inverses, "LARGEST_BATCHED", 8)
    sides = positive_definite(3, 21)
    sides[1, 20, 20] = -1.0
    wanted = torch.linalg.inv(sides[[0, 2]])
    assert inverses.invert_(sides).tolist() == [True, False, True]
    torch.testing.assert_close(sides[[0, 2]], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dead", ["A", "G"])
def test_a_dead_side_gets_the_root_of_the_damping(dead):
    """Where one trace is zero pi is 1; the other layers of the stack keep theirs."""
    A, G = positive_definite(2, 5), positive_definite(2, 3)
    (A if dead == "A" else G)[0] = 0
    means = map(inverses.mean_diagonal, (A, G))
    extra_A, extra_G = inverses.factored_damping(*means, torch.tensor([0.04, 0.09]).double())
    pi = (A[1].trace() / 5 / (G[1].trace() / 3)).sqrt()
    torch.testing.assert_close(extra_A, torch.stack([torch.tensor(0.2).double(), 0.3 * pi]))
    torch.testing.assert_close(extra_G, torch.stack([torch.tensor(0.2).double(), 0.3 / pi]))


@pytest.mark.parametrize("largest_batched", [1200, 1])
def test_a_matrix_is_sound_where_its_inverse_is_finite(monkeypatch, largest_batched):
    """Positive definite, indefinite, not finite, and one whose Cholesky factor exists alone."""
    monkeypatch.setattr(inverses, "LARGEST_BATCHED", largest_batched)
    diagonals = [[1.0, 2.0], [1.0, -1.0], [1.0, torch.nan], [1.0, 1e-310], [4.0, 0.5]]
    sides = torch.stack([torch.tensor(d, dtype=torch.float64).diag() for d in diagonals])
    assert inverses.invert_(sides).tolist() == [True, False, False, False, True]
    for i, diagonal in ((0, [1.0, 0.5]), (4, [0.25, 2.0])):
        wanted = torch.tensor(diagonal, dtype=torch.float64).diag()
        torch.testing.assert_close(sides[i], wanted, rtol=1e-14, atol=0)
