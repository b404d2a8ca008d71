"""Damped inverses, against inverses in a higher precision."""

import pytest
import torch

from decaylab.curvature import inverses


def spectrum(kind: str, size: int, condition: float) -> torch.Tensor:
    if kind == "even":
        return torch.logspace(0, -torch.log10(torch.tensor(condition)), size, dtype=torch.float64)
    small = torch.full((size - 5,), 1 / condition, dtype=torch.float64)
    return torch.cat([torch.ones(5, dtype=torch.float64), small])


def positive_definite(kind: str, size: int, condition: float, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    random = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(random)[0]
    return basis * spectrum(kind, size, condition) @ basis.mT


@pytest.mark.parametrize("size", [1, 7, 8, 9, 33, 70])
@pytest.mark.parametrize("kind", ["even", "few large"])
def test_splitting_is_exact(monkeypatch, size, kind):
    monkeypatch.setattr(inverses, "BLOCK", 8)
    sides = positive_definite(kind, max(size, 6), 1e3)[:, :size, :size].contiguous()
    inverse = sides.clone()
    assert inverses.invert_(inverse).all()
    identity = torch.eye(size, dtype=torch.float64).expand_as(sides)
    torch.testing.assert_close(sides @ inverse, identity, rtol=0, atol=1e-11)


@pytest.mark.parametrize("condition", [1e3, 1e5, 1e6])
@pytest.mark.parametrize("kind", ["even", "few large"])
def test_splitting_costs_no_accuracy(monkeypatch, condition, kind):
    monkeypatch.setattr(inverses, "BLOCK", 16)
    sides = positive_definite(kind, 120, condition).float()
    exact = torch.linalg.inv(sides.double())
    inverse = sides.clone()
    assert inverses.invert_(inverse).all()
    by_solve = torch.cholesky_inverse(torch.linalg.cholesky(sides))

    def error(result: torch.Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    assert error(inverse) < 2 * error(by_solve)
    assert error(inverse) < 1e-7 * condition


def test_one_bad_factor_does_not_touch_the_others(monkeypatch):
    monkeypatch.setattr(inverses, "BLOCK", 8)
    sides = positive_definite("even", 40, 10.0, count=3)
    sides[1, 20, 20] = -1.0
    wanted = torch.linalg.inv(sides[[0, 2]])
    assert inverses.invert_(sides).tolist() == [True, False, True]
    torch.testing.assert_close(sides[[0, 2]], wanted)


def test_an_inversion_under_autocast_is_not_rounded(monkeypatch):
    monkeypatch.setattr(inverses, "BLOCK", 8)
    sides = positive_definite("even", 40, 10.0).float()
    wanted = sides.clone()
    inverses.invert_(wanted)
    with torch.autocast("cpu", torch.bfloat16):
        inverses.invert_(sides)
    assert torch.equal(sides, wanted)
