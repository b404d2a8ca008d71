"""Batches of which no row counts (a batch of nothing but padding) leave no trace in the factors."""

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Tokens(nn.Module):
    """Logits [examples, 4, 5] by Linear layers over the tokens and a convolution along them."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(3, 3, 3, padding=1)
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.along(x.mT).mT
        return self.last(self.first(mixed).tanh())


def optimizer(sharing: str, curvature: str) -> KFAC:
    torch.manual_seed(0)
    outputs = "sampled" if sharing == "reduce" else "exact"
    return KFAC(
        Tokens().double(),
        0.0,
        curvature=curvature,
        reduction="sum",
        sharing=sharing,
        outputs=outputs,
        logits="observed",
        refresh_every=1,
        invert_every=1,
        factor_decay=0.5,
    )


def passed(opt: KFAC, mask: Tensor, seed: int) -> None:
    """One forward and backward pass, over the rows that count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (2, 4), generator=generator)
    logits = opt.model(x)
    opt.observe(logits, mask=mask)
    cross_entropy(logits[mask], labels[mask], reduction="sum").backward()


SOME = torch.tensor([[True, True, False, True], [False, True, False, False]])
NONE = torch.zeros_like(SOME)


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_refresh_without_any_row_changes_no_factor(sharing, curvature):
    opt = optimizer(sharing, curvature)
    passed(opt, SOME, seed=1)
    opt.step()
    before = opt.factors()
    passed(opt, NONE, seed=2)
    opt.step()
    for name, found in opt.factors().items():
        for part in ("A", "S", "T"):
            assert torch.equal(getattr(found, part), getattr(before[name], part)), (name, part)
    passed(opt, SOME, seed=3)
    opt.step()
    assert opt.check().failed_inversions == {}
    assert all(f.A.isfinite().all() and f.S.isfinite().all() for f in opt.factors().values())


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
def test_an_accumulated_pass_without_any_row_counts_for_nothing(curvature):
    """Layers whose inputs the mask fits see the same rows with it and without it."""
    alone, accumulated = optimizer("expand", curvature), optimizer("expand", curvature)
    passed(accumulated, NONE, seed=2)
    for opt in (accumulated, alone):
        passed(opt, SOME, seed=1)
        opt.step()
    for name in ("first", "last"):
        found, want = accumulated.factors()[name], alone.factors()[name]
        for part in ("A", "S", "T"):
            torch.testing.assert_close(
                getattr(found, part), getattr(want, part), rtol=1e-12, atol=1e-14
            )
