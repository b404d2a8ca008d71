"""What Adam remembers: the norms behind its second moment, against torch's own Adam."""

import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from decaylab import probes
from decaylab.cli import app
from decaylab.diagnosis.runs import read_run
from decaylab.optim.laws.memory import (
    effective_adam,
    gradient_squares,
    mean_between,
    moments_at,
    remembered_norms,
)
from decaylab.records import RunStore

BETAS = (0.9, 0.99)


def lengths(gradients, betas=BETAS):
    """How long torch's Adam's steps are, lr 1, and its |v| after each."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=betas, eps=1e-300)
    found, moments = [], []
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * gradient
        optimizer.step()
        found.append(float((weight.detach() - before).norm()))
        moments.append(float(optimizer.state[weight]["exp_avg_sq"].sum()))
    return found, moments


def series(values):
    return tuple(enumerate(values, start=1))


@pytest.mark.parametrize("measured", [True, False])
def test_steps_are_longer_by_what_adam_remembers(measured):
    """h = 1 all the time, |W| falls by 1 % a step. Records are of the norm after each step."""
    steps = 300
    norms = [0.99**k for k in range(steps + 1)]
    with_norms, moments = lengths([1 / norm for norm in norms[:-1]])
    without, _ = lengths([1.0] * steps)
    recorded = ((0, norms[0]), *series(norms[1:]))
    v = ((0, 0.0), *series(moments)) if measured else ()
    found = effective_adam(recorded, BETAS, v)
    for step in (2, 10, 100, 300):
        expected = with_norms[step - 1] / without[step - 1] / norms[step]
        assert found[step][1] == pytest.approx(expected, rel=1e-10)
    assert found[300][1] > 1.4 / norms[300]  # far from 1/|W|


def test_records_far_apart_say_the_same_of_geometric_norms():
    every, steps = 25, 300
    norms = [0.99**k for k in range(steps + 1)]
    often = remembered_norms(((0, 1.0), *series(norms[1:])), BETAS[1])
    seldom = remembered_norms(tuple((k, norms[k]) for k in range(0, steps + 1, every)), BETAS[1])
    assert seldom[-1][1] == pytest.approx(often[-1][1], rel=2e-2)
    assert often[-1][1] > 1.5 * norms[-1]


def test_without_memory_it_is_adams_law_and_with_all_of_it_sgds():
    norms = series([1.5**k for k in range(1, 8)])
    short = effective_adam(norms, (0.0, 0.0))
    # the last gradient was taken one record before
    for (_, value), (_, before), (_, norm) in zip(short[1:], norms, norms[1:], strict=False):
        assert value == pytest.approx(1 / norm)
        assert before < norm
    v = tuple((step, 1e12) for step, _ in norms)  # so much that nothing is added to it
    long = effective_adam(norms, (0.0, 1.0 - 1e-15), v)
    for (_, value), (_, before), (_, norm) in zip(long[1:], norms, norms[1:], strict=False):
        assert value == pytest.approx(norms[0][1] / (norm * before), rel=1e-6)


def test_moments_at_other_norms_are_those_of_the_other_run():
    sizes = [1 + 0.5 * math.sin(k) for k in range(200)]  # h
    mine, other = ([rate**k for k in range(201)] for rate in (0.995, 1.003))
    moments = [
        lengths([h / n for h, n in zip(sizes, norms, strict=False)])[1] for norms in (mine, other)
    ]
    found = moments_at(*(series(of[1:]) for of in (mine, other)), BETAS[1], series(moments[0]))
    # the first record stands for the norm of its step's beginning
    assert found[-1][1] == pytest.approx(moments[1][-1], rel=1e-2)
    assert moments_at(series(mine), series(other), BETAS[1], ()) == ()


def test_gradient_squares_are_read_off_v():
    sizes = [1.0, 2.0, 0.5, 3.0, 1.0]
    _, moments = lengths(sizes)
    found = gradient_squares(series(moments), BETAS[1])
    square = 1 + 4 + 0.25
    for step, size in enumerate(sizes, start=1):
        assert found(step) == pytest.approx(size**2 * square, rel=1e-10)


@pytest.mark.parametrize("growth", [0.5, 0.9, 1.0, 1.1])
def test_mean_between(growth):
    values = [growth**k for k in range(7)]
    weights = [0.9 ** (6 - k) for k in range(7)]
    expected = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert mean_between(1.0, growth**7, 7, 0.9) == pytest.approx(expected, rel=1e-9)


def test_watch_records_v_of_adam_and_nothing_of_sgd():
    torch.manual_seed(0)
    inputs = torch.randn(8, 4)
    for build in (torch.optim.AdamW, torch.optim.SGD):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizer = build(model.parameters(), lr=0.01)
        with probes.watch(model, optimizer, every=1) as watched:
            for _ in range(3):
                model(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        names = {name for name in watched.records.names() if name.startswith("second_moment")}
        if build is torch.optim.SGD:
            assert names == set()
            continue
        assert names == {"second_moment/0", "second_moment/2"}
        v = optimizer.state[model[0].weight]["exp_avg_sq"]
        assert watched.records.last("second_moment/0") == pytest.approx(float(v.sum()), rel=1e-6)


def test_our_own_runs_of_adam_record_it(tmp_path):
    words = ["--hidden", "16", "--batch-norm", "--optimizer", "adam", "--epochs", "3"]
    words += ["--decay", "decoupled", "--weight-decay", "1", "--lr", "0.003", "--device", "cpu"]
    done = CliRunner().invoke(app, ["train", *words, "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (folder,) = RunStore(tmp_path).runs()
    layer = read_run(folder).layers["features.0"]
    assert [step for step, _ in layer.series["second_moment"]] == [
        step for step, _ in layer.norms if step
    ]
    measured, assumed = (
        layer.law.effective_per_lr(layer.norms, moments)
        for moments in (layer.series["second_moment"], ())
    )
    assert layer.effective[-1][1] == pytest.approx(0.003 * measured[-1][1])
    assert measured[-1][1] != pytest.approx(assumed[-1][1], rel=1e-3)
