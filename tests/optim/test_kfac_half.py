"""Parameters in half precision: factors and steps are those of float32, rounded at the end."""

import copy

import pytest
import torch
from oracle.kfac_runs import cross_entropy, labels_for, random
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.errors import Conflict


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_those_of_float32(dtype, decay, momentum, memory):
    """Up to the rounding of weights and gradients to 8 bits; they move by 20 % and more."""
    half = net(dtype).to(memory_format=memory)
    full = copy.deepcopy(half).float()
    x, y = random(8, 2, 4, 4).to(dtype), labels_for(8, classes=3)
    for model in (half, full):
        opt = KFAC(
            *(model, 0.1),
            **{"damping": 0.1, "decay": decay, "weight_decay": 0.1, "momentum": momentum},
            outputs="exact",
        )
        for _ in range(2):
            opt.zero_grad()
            cross_entropy(model(x.to(model[0].weight.dtype)).float(), y).backward()
            opt.step()
    for i in (0, 4):
        error = (half[i].weight.float() - full[i].weight).norm() / full[i].weight.norm()
        assert error < 0.02


def test_torchs_sgd_for_the_others_is_refused():
    with refuses(Conflict, settings=["others='sgd'", "half-precision parameters on a CPU"]):
        KFAC(net(torch.bfloat16), 0.1, others="sgd")
    KFAC(nn.Sequential(nn.Linear(3, 2)).bfloat16(), 0.1, others="sgd")  # there are no others
