"""Adam's law of the effective learning rate, for every optimizer that is said to follow it."""

import math

import pytest
import torch
from torch import nn

from decaylab.probes import effective_learning_rate

FREE_OF_SCALE = (
    *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Muon"),
)


def moved(name: str, scale: float) -> torch.Tensor:
    """What ten steps of torch's optimizer change, on gradients multiplied by `scale`.

    After six others: the first five of RAdam are steps of plain momentum. Powers of two are no
    rounding for Muon, which orthogonalises in bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([weight], lr=0.01)
    for k in range(16):
        if k == 6:
            before = weight.detach().clone()
        weight.grad = scale * torch.randn(5, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
    return weight.detach() - before


@pytest.mark.parametrize("name", FREE_OF_SCALE)
def test_steps_that_ignore_the_gradients_scale_turn_with_lr_over_the_norm(name):
    torch.testing.assert_close(moved(name, 2.0**24), moved(name, 2.0**17), rtol=1e-4, atol=0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.ndim == 2], lr=0.3)
    reading = effective_learning_rate(model, optimizer)
    norm = math.sqrt(float(model[0].weight.detach().square().sum()))
    assert reading.law == ("muon" if isinstance(optimizer, torch.optim.Muon) else "adam")
    assert reading.layers == pytest.approx({"0": 0.3 / norm}, rel=1e-12)


def test_sgd_does_not_ignore_it():
    torch.testing.assert_close(moved("SGD", 2.0**24), 2**7 * moved("SGD", 2.0**17))
