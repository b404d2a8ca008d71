"""Calling a model with other parameters: against `torch.func.functional_call`."""

import torch
from torch import nn

from decaylab.networks.calling import call_with


class Sum(nn.Module):
    """Of a parameter and one that may be the same."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))
        self.b = self.a
        self.register_parameter("none", None)

    def forward(self, x):
        return x * (self.a + self.b)


def test_a_parameter_with_two_names_in_one_module_is_replaced_under_both():
    model, ten, one = Sum(), {"a": torch.tensor(10.0)}, torch.tensor(1.0)
    assert call_with(model, ten, (one,)) == torch.func.functional_call(model, ten, (one,)) == 20
    assert model.b is model.a


def test_so_is_one_that_two_modules_share():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    other, x = {"0.weight": torch.randn(3, 3)}, torch.randn(5, 3)
    expected = torch.func.functional_call(model, other, (x,))
    torch.testing.assert_close(call_with(model, other, (x,)), expected, rtol=0, atol=0)
