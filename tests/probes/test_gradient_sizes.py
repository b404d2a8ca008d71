"""What shows a clip of gradients, against gradients written by hand."""

import math

import pytest
import torch
from torch import nn

from decaylab import watch
from decaylab.probes.gradients import gradient_sizes
from decaylab.probes.weights import layers_of


def test_norm_largest_entry_and_the_part_that_is_as_large():
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2, bias=False)).double()
    model[0].weight.grad = torch.tensor([[4.0, -4.0, 2.0]], dtype=torch.float64)
    model[0].bias.grad = torch.tensor([4.0], dtype=torch.float64)  # is no weight
    model[1].weight.grad = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gradient_sizes(optimizer, layers_of(model)) == pytest.approx(
        {
            "gradient_norm": math.sqrt(36 + 16 + 10),
            "gradient_max": 4.0,
            "gradient_at_max/0": 32 / 36,
        },
        rel=1e-12,
    )
    model.zero_grad()
    assert gradient_sizes(optimizer, layers_of(model)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_clip_by_value_is_seen_in_any_precision(dtype):
    torch.manual_seed(0)
    model = nn.Linear(50, 4, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, every=1) as watched:
        for _ in range(3):
            model.weight.grad = torch.randn_like(model.weight)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            cut = int((model.weight.grad.abs() >= model.weight.grad.abs().max()).sum())
            optimizer.step()
    assert cut > 150
    sizes = {row.value for row in watched.records.series("gradient_max")}
    assert sizes == {float(torch.tensor(0.1, dtype=dtype))}
    assert all(row.value > 0.9 for row in watched.records.series("gradient_at_max/model"))
