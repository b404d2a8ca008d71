"""Adam's second moment by layer, against the sum its definition says."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.probes import second_moments
from decaylab.probes.moments import kept


def test_it_is_the_weighted_sum_of_squared_gradients():
    """v = (1 - beta2) sum_k beta2^k g_k^2, without correction for the start, of weights alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    beta2, steps = 0.9, 4
    groups = parameter_groups(model, weight_decay=0.0)
    optimizer = adam(groups, lr=0.1, betas=(0.8, beta2))
    assert second_moments(model, optimizer) == []
    want = {"0": 0.0, "2": 0.0}
    for k in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for layer in want:
            square = float(model.get_submodule(layer).weight.grad.square().sum())
            want[layer] += (1 - beta2) * beta2 ** (steps - 1 - k) * square
        optimizer.step()
    (reading,) = second_moments(model, optimizer)
    assert dict(reading.layers) == pytest.approx(want, rel=1e-12)


class Product(nn.Module):
    """A weight computed from two parameters."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight.clone(), torch.eye(weight.shape[1], dtype=weight.dtype)


def product() -> nn.Module:
    linear = nn.Linear(3, 2).double()
    return parametrize.register_parametrization(linear, "weight", Product())


def test_all_that_a_weight_is_computed_from_is_summed():
    torch.manual_seed(0)
    model = nn.Sequential(product())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.5))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    want = sum(0.5 * float(p.grad.square().sum()) for p in weights)
    assert len(weights) == 2
    optimizer.step()
    (reading,) = second_moments(model, optimizer)
    assert dict(reading.layers) == pytest.approx({"0": want}, rel=1e-12)


def test_a_layer_of_which_one_part_has_no_moment_is_left_out():
    model = nn.Sequential(product(), nn.Linear(2, 1).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.5))
    for weight in (model[0].parametrizations.weight.original0, model[1].weight):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    (reading,) = second_moments(model, optimizer)
    assert dict(reading.layers) == pytest.approx({"1": 0.5 * 2}, rel=1e-12)


def test_sgd_has_none():
    model = nn.Linear(2, 2)
    optimizer = sgd(parameter_groups(model, weight_decay=0.0), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert second_moments(model, optimizer) == []


def test_to_look_leaves_no_trace_in_the_optimizers_state():
    """It is a defaultdict, and an entry that was looked up would be saved with the others."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second_moments(model, optimizer)
    kept(optimizer, optimizer.param_groups[0], model.weight)
    assert optimizer.state_dict()["state"] == {}


def holding(name, value, size=2, **group):
    """A weight, and an optimizer of somebody's own that remembers `value` under this name."""
    weight = nn.Parameter(torch.ones(1, size))
    optimizer = torch.optim.SGD([{"params": [weight], **group}], lr=0.1)
    optimizer.state[weight] = {name: value}
    model = nn.Linear(size, 1, bias=False)
    model.weight = weight
    return model, optimizer


def test_it_is_summed_in_double_precision():
    """In 16 bits there is no 257."""
    moments = torch.ones(1, 257, dtype=torch.bfloat16)
    (reading,) = second_moments(*holding("exp_avg_sq", moments, 257))
    assert list(reading.layers.values()) == [257.0]


def test_what_only_has_the_name_of_a_second_moment_is_none():
    """Adafactor's is None if it is factored, and a count may be called a sum."""
    for name, value in (("exp_avg_sq", None), ("sum", 3)):
        model, optimizer = holding(name, value)
        assert second_moments(model, optimizer) == []
        assert kept(optimizer, optimizer.param_groups[0], model.weight) == 0.0


def test_what_a_step_keeps_of_it():
    """Not known where no setting says it; 0, as of Adam's beta2 = 0, is nothing."""
    for group, expected in (({}, math.nan), ({"betas": (0.9, 0)}, 0.0), ({"alpha": 1}, math.nan)):
        model, optimizer = holding("exp_avg_sq", torch.ones(1, 2), **group)
        found = kept(optimizer, optimizer.param_groups[0], model.weight)
        assert found == pytest.approx(expected, nan_ok=True)
    model, optimizer = holding("square_avg", torch.ones(1, 2), alpha=1)
    assert kept(optimizer, optimizer.param_groups[0], model.weight) == 1.0
