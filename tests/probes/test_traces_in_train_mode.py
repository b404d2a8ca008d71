"""Traces in train mode: Eq. 13 holds there, whatever the running statistics."""

import copy
import math

import pytest
import torch
from torch import nn

from decaylab.probes import curvature_traces


def normalised_net() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6, eps=1e-12, affine=False), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    return model, torch.randn(10, 5, dtype=torch.float64)


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_normalised_traces_do_not_depend_on_the_scale_in_train_mode(curvature):
    model, inputs = normalised_net()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other[0].parameters():
            parameter.mul_(3.0)
    kind = {"curvature": curvature, "batch_norm": "train"}
    traces, scaled = (curvature_traces(net, inputs, **kind) for net in (model, other))
    assert scaled.normalised["0"] == pytest.approx(traces.normalised["0"], rel=1e-9)
    assert scaled.layers["0"] == pytest.approx(traces.layers["0"] / 9, rel=1e-9)
    running = model[1].running_mean, model[1].running_var
    assert all(torch.equal(a, b) for a, b in zip(running, other[1].buffers(), strict=False))
    in_eval = [curvature_traces(net, inputs, curvature=curvature) for net in (model, other)]
    assert in_eval[1].normalised["0"] != pytest.approx(in_eval[0].normalised["0"], rel=0.5)


def test_batches_are_fixed_and_of_one_size():
    model, inputs = normalised_net()
    whole = curvature_traces(model, inputs, batch_norm="train", chunk=4)
    parts = [curvature_traces(model, inputs[i : i + 4], batch_norm="train") for i in (0, 4)]
    mean = sum(part.total for part in parts) / 2
    assert whole.total == pytest.approx(mean, rel=1e-12)
    sampled = curvature_traces(model, inputs, batch_norm="train", chunk=4, samples=400)
    assert abs(sampled.total - mean) < 4 * sampled.total_error


def test_the_modes_have_names_of_their_own():
    model, inputs = normalised_net()
    names = {
        mode: {
            name.split("/")[0] for name in curvature_traces(model, inputs, batch_norm=mode).rows()
        }
        for mode in ("eval", "train")
    }
    assert names["eval"] == {"fisher_trace", "fisher_trace_normalised"}
    assert names["train"] == {"fisher_trace_train", "fisher_trace_normalised_train"}
    assert math.isfinite(curvature_traces(model, inputs, batch_norm="train").total)
