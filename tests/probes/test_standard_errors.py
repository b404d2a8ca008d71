"""Standard errors: against their formula over separate draws, and against a known variance."""

import math
import statistics

import pytest
import torch
from oracle.tiny_nets import tiny_net
from torch import nn

from decaylab import probes
from decaylab.curvature.products import sampled_traces

CLOSE = {"rel": 1e-9}


def mean_and_error(draws: list[float]) -> tuple[float, float]:
    return statistics.mean(draws), statistics.stdev(draws) / math.sqrt(len(draws))


def test_of_the_sampled_kfac_norm():
    """The draws differ by the seed alone, so that each can be taken by itself."""
    model, inputs, _ = tiny_net("conv")
    readings = [
        probes.kfac_norm(
            model, probes.measured_factors(model, [inputs], outputs="sampled", seed=seed)
        )
        for seed in range(5)
    ]
    got = probes.kfac_gauss_newton_norm(model, [inputs], outputs="sampled", draws=5)
    mean, error = mean_and_error([reading.total for reading in readings])
    assert got.total == pytest.approx(mean, **CLOSE)
    assert got.total_error == pytest.approx(error, **CLOSE)
    assert got.layers.keys() == got.errors.keys() == readings[0].layers.keys()
    for layer in got.layers:
        mean, error = mean_and_error([reading.layers[layer] for reading in readings])
        assert got.layers[layer] == pytest.approx(mean, **CLOSE)
        assert got.errors[layer] == pytest.approx(error, **CLOSE)


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_of_the_sampled_traces(curvature, chunk):
    """A draw is the mean over the examples, chunk by chunk; the error is over the draws."""
    model, inputs, _ = tiny_net("conv")
    kind = {"curvature": curvature, "samples": 6}
    generator = torch.Generator().manual_seed(0)
    draws: dict[str, list[float]] = {}
    for part in inputs.split(chunk or len(inputs)):
        for name, values in sampled_traces(model, part, generator=generator, **kind).items():
            old = draws.get(name, [0.0] * 6)
            share = len(part) / len(inputs)
            draws[name] = [a + share * b for a, b in zip(old, values.tolist(), strict=True)]
    got = probes.curvature_traces(model, inputs, chunk=chunk, **kind)
    totals = [0.0] * 6
    for layer in got.layers:
        own = [draws[name] for name in draws if name.rpartition(".")[0] == layer]
        sums = [sum(values) for values in zip(*own, strict=True)]
        totals = [a + b for a, b in zip(totals, sums, strict=True)]
        mean, error = mean_and_error(sums)
        assert got.layers[layer] == pytest.approx(mean, **CLOSE)
        assert got.errors[layer] == pytest.approx(error, **CLOSE)
        weight = model.get_submodule(layer).weight.detach()
        mean, error = mean_and_error(draws[f"{layer}.weight"])
        square = float(weight.square().sum())
        assert got.normalised[layer] == pytest.approx(square * mean, **CLOSE)
        assert got.normalised_errors[layer] == pytest.approx(square * error, **CLOSE)
    mean, error = mean_and_error(totals)
    assert got.total == pytest.approx(mean, **CLOSE)
    assert got.total_error == pytest.approx(error, **CLOSE)


@pytest.mark.parametrize("chunk", [None, 2])
def test_of_hutchinsons_jacobian_norm(chunk):
    """With signs v the variance of |W'v|^2 is 2 sum over i != j of (WW')_ij^2, for each example."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    samples, inputs = 2000, torch.randn(5, 4, dtype=torch.float64)
    got = probes.jacobian_norm(model, inputs, samples=samples, chunk=chunk)
    gram = (model.weight @ model.weight.T).detach()
    variance = 2 * float((gram - gram.diag().diag()).square().sum())
    want = math.sqrt(variance / samples / len(inputs))
    assert got.total_error == pytest.approx(want, rel=0.05)
    assert abs(got.total - float(gram.trace())) < 4 * want
