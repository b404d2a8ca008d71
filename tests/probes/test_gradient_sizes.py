"""What shows a clip of gradients, and whether they point along the weights: written by hand."""

import math
import sys

import pytest
import torch
from torch import nn

from decaylab import watch
from decaylab.networks.sharded import Parts
from decaylab.probes.gradients import gradient_sizes, radial_gradients
from decaylab.probes.layers import layers_of


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


def test_sparse_gradients_are_left_out():
    """Their entries need not be unique: neither a norm nor a largest entry can be read off."""
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False)).double()
    gradient = torch.zeros(5, 2, dtype=torch.float64)
    gradient[3] = 9.0
    model[0].weight.grad = gradient.to_sparse(1)
    model[1].weight.grad = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = layers_of(model)
    assert list(layers.weights) == ["0", "1"]
    assert gradient_sizes(optimizer, layers) == pytest.approx(
        {"gradient_norm": 5.0, "gradient_max": 4.0, "gradient_at_max/1": 16 / 25}, rel=1e-12
    )


def test_the_gradients_of_all_groups_count_in_whatever_precision():
    """A bound of 0.7 is 0.69921875 in 16 bits: entries there are at it too."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].bfloat16().weight.grad = torch.tensor([[0.7]], dtype=torch.bfloat16)
    model[1].double().weight.grad = torch.tensor([[0.7]], dtype=torch.float64)
    groups = [{"params": layer.parameters()} for layer in model]
    found = gradient_sizes(torch.optim.SGD(groups, lr=0.1), layers_of(model))
    parts = {"gradient_at_max/0": (0.7 / 0.69921875) ** 2, "gradient_at_max/1": 1.0}
    sizes = {"gradient_norm": math.hypot(0.7, 0.69921875), "gradient_max": 0.7}
    assert found == pytest.approx(sizes | parts, rel=1e-12)


def test_norms_that_are_over_the_range_of_float16():
    model = nn.Sequential(nn.Linear(80, 60, bias=False), nn.Linear(60, 1)).half()
    model[0].weight.grad = torch.full_like(model[0].weight, -1000.0)
    model[1].bias.grad = torch.full_like(model[1].bias, 1000.0)
    found = gradient_sizes(torch.optim.SGD(model.parameters(), lr=0.1), layers_of(model))
    sizes = {"gradient_norm": 1000 * math.sqrt(4801), "gradient_max": 1000.0}
    assert found == pytest.approx({**sizes, "gradient_at_max/0": 1.0}, rel=1e-6)


def test_norms_of_several_precisions_stand_in_the_order_of_their_tensors():
    kinds = [torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16]
    tensors = [torch.full((n,), 512.0 * n, dtype=kind) for n, kind in enumerate(kinds, start=1)]
    tensors[4] = torch.full((10_000,), 1024.0, dtype=torch.float16)
    parts = Parts.of(tensors)
    expected = [512.0 * n**1.5 for n in range(1, 5)] + [102_400.0]
    assert [float(norm) for norm in parts.norms()] == pytest.approx(expected, rel=1e-6)
    dots = parts.dots(parts.tensors, parts.tensors)
    assert [float(dot) for dot in dots] == pytest.approx([n**2 for n in expected], rel=1e-6)
    assert {norm.dtype for norm in parts.norms(dtype=torch.float64)} == {torch.float64}


def test_gradients_of_zero_have_a_size_and_those_that_are_not_finite_have_none():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.zeros(1, 2)
    none = {"gradient_norm": 0.0, "gradient_max": 0.0}
    assert gradient_sizes(optimizer, layers_of(model)) == none
    model.weight.grad = torch.tensor([[1.0, math.inf]])
    assert gradient_sizes(optimizer, layers_of(model)) == {}


RADIAL = 13 / (7 * 3) * math.sqrt(3)  # |<g, W>| / (|g| |W|), of three numbers


def normalized(dtype=torch.float64, size=0.1):
    """A layer of three numbers before a normalisation, its gradient, and W at another time."""
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=False)).to(dtype)
    model[0].weight.grad = size * torch.tensor([[2.0, 3.0]], dtype=dtype)
    model[0].bias.grad = size * torch.tensor([-6.0], dtype=dtype)
    before = {"0": [torch.tensor(of, dtype=dtype) for of in ([[-2.0, 1.0]], [2.0])]}
    return model, before


def test_the_part_of_the_gradient_along_weight_and_bias():
    model, before = normalized()
    layers = layers_of(model)
    expected = {"radial_gradient/0": RADIAL}
    assert radial_gradients(layers, before) == pytest.approx(expected, rel=1e-14)
    model[0].bias.grad = None  # then <g, W> is not known
    assert radial_gradients(layers, before) == {}
    model[0].bias.grad = torch.tensor([-0.6], dtype=torch.float64).to_sparse()  # nor then
    assert radial_gradients(layers, before) == {}
    model, before = normalized(size=0.0)  # no direction
    assert radial_gradients(layers_of(model), before) == {}


@pytest.mark.parametrize(
    ("dtype", "size", "other"), [(torch.float16, 512.0, 1.0), (torch.float32, 2.0**-64, 2.0**-12)]
)
def test_squares_out_of_the_range_of_the_gradients_own_precision(dtype, size, other):
    """Squares of float16 over 65,504, and the products of float32 below 2^-149."""
    model, before = normalized(dtype, size)
    before = {"0": [w * other for w in before["0"]]}
    assert radial_gradients(layers_of(model), before) == pytest.approx(
        {"radial_gradient/0": RADIAL}, rel=1e-6
    )


def test_a_step_whose_gradients_cannot_be_measured_has_none(monkeypatch):
    """Not those of the record before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def trained():
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()

    def broken(*_):
        raise RuntimeError("no gradients today")

    with watch(model, optimizer, every=1) as watched:
        trained()
        with monkeypatch.context() as patched:
            # the module, which shares its name with the function
            patched.setattr(sys.modules["decaylab.probes.watching"], "radial_gradients", broken)
            with pytest.warns(UserWarning, match="no gradients"):
                trained()
        trained()
    steps = {row.step for row in watched.records.rows if row.name.startswith("radial_gradient/")}
    assert steps == {1, 3}
    assert {row.step for row in watched.records.series("gradient_norm")} == {1, 3}


def test_radial_gradients_of_layers_in_several_precisions():
    """Those of 16 bits are taken in 32, beside others in 32 and 64."""
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    model = nn.Sequential(*(normalized(kind)[0] for kind in kinds))
    before = {}
    for i, kind in enumerate(kinds):
        part, values = normalized(kind, 512.0)
        for mine, parameter in zip(model[i][0].parameters(), part[0].parameters(), strict=True):
            mine.grad = parameter.grad
        before[f"{i}.0"] = values["0"]
    expected = {f"radial_gradient/{i}.0": RADIAL for i in range(len(kinds))}
    assert radial_gradients(layers_of(model), before) == pytest.approx(expected, rel=1e-6)
