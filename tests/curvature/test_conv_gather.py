"""Input factors of convolutions against those of torch's unfolded rows."""

import pytest
import torch
from oracle.kfac_runs import EXACT, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn import functional as F

CASES = {
    "plain": {"padding": 1},
    "stride": {"padding": 1, "stride": 2},
    "groups": {"padding": 1, "groups": 2},
    "dilation": {"padding": 2, "dilation": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "no bias": {"bias": False},
}


def patches(layer, x):
    """[groups, rows, in / groups * 9 (+ 1)], by torch's unfold."""
    if layer.padding_mode == "circular":
        x, padding = F.pad(x, (1, 1, 1, 1), mode="circular"), 0
    else:
        padding = layer.padding
    found = []
    for part in x.chunk(layer.groups, 1):
        columns = F.unfold(part, 3, layer.dilation, padding, layer.stride)
        found.append(columns.transpose(1, 2).flatten(0, 1))
    rows = torch.stack(found)
    ones = rows.new_ones(*rows.shape[:2], 1)
    return torch.cat([rows, ones], -1) if layer.bias is not None else rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_factors_are_those_of_unfolded_rows(case, diagonal, device):
    layer = nn.Conv2d(16, 4, 3, **CASES[case])
    size = layer(torch.zeros(1, 16, 12, 12)).numel()
    model = seeded(lambda: nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 3))).to(device)
    opt = KFAC(model, 0.01, **EXACT, **({"max_factor_dim": 20} if diagonal else {}))
    x = random(12, 16, 12, 12).to(device)
    rows = patches(layer, x)
    train_step(opt, model, x, labels_for(12, classes=3).to(device))
    wanted = rows.mT @ rows / rows.shape[1]
    if diagonal:
        wanted = wanted.diagonal(dim1=1, dim2=2)
    A = opt.factors()["0"].A
    assert torch.allclose(A if layer.groups > 1 else A[None], wanted, atol=1e-12)
