"""Advice is followed: what a second run does is what the first one's records said it would."""

import math

import pytest
import torch
from diagnosis.invariant_runs import SIZE, angle, mean_square, random_run
from diagnosis.recorded import ScriptedLayer, reasons, records
from oracle.formulas import Lion
from torch import nn

from decaylab import watch
from decaylab.diagnosis import Reason, Stepping, convert_decay, suggest


def torch_nadam(groups, **settings):
    return torch.optim.NAdam(groups, decoupled_weight_decay=True, **settings)


def nesterov(groups, **settings):
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True, **settings)


def momentum(groups, **settings):
    return torch.optim.SGD(groups, momentum=0.9, **settings)


@pytest.mark.parametrize(
    ("build", "lr"), [(Lion, 0.001), (torch_nadam, 0.005), (torch.optim.AdamW, 0.005)]
)
def test_turns_of_steps_that_agree_in_other_ways_than_adams(build, lr):
    """The decay for the last norm, then run: as far a step as was said, within 5 %."""
    watched, norms, _ = random_run(build, 1000, start=6.0, lr=lr, weight_decay=0.0)
    (row,) = suggest(watched, norm_at=1000).layers
    _, held, turns = random_run(build, 1000, norms[-1], lr=lr, weight_decay=row.suggested)
    assert mean_square(held[500:]) == pytest.approx(row.target, rel=0.05)
    assert mean_square(turns[500:]) == pytest.approx(row.rotation, rel=0.05)


def test_turns_of_nesterovs_momentum():
    watched, _, turns = random_run(nesterov, 1000, lr=0.002, weight_decay=0.5)
    (row,) = suggest(watched, norm_at=1000).layers
    assert mean_square(turns[500:]) == pytest.approx(row.rotation, rel=0.03)


@pytest.mark.parametrize(
    ("build", "lr", "rotation"), [(Lion, 0.001, 0.004), (torch_nadam, 0.005, 0.03)]
)
def test_a_turn_that_was_asked_for_is_got(build, lr, rotation):
    watched, _, _ = random_run(build, 1000, start=6.0, lr=lr, weight_decay=0.0)
    (row,) = suggest(watched, rotation=rotation).layers
    assert row.notes == ()
    _, _, turns = random_run(build, 1000, row.target, lr=lr, weight_decay=row.suggested)
    assert mean_square(turns[500:]) == pytest.approx(rotation, rel=0.07)


def test_a_turn_that_mixes_decay_and_momentum_is_called_rough():
    """Lion's signs agree over a hundred steps; decay would take all of the weights in as many."""
    watched, _, _ = random_run(Lion, 1000, start=6.0, lr=0.001, weight_decay=0.0)
    (row,) = suggest(watched, rotation=0.03).layers
    _, _, turns = random_run(Lion, 1000, row.target, lr=0.001, weight_decay=row.suggested)
    assert mean_square(turns[500:]) > 1.5 * 0.03
    assert reasons(row) == {Reason.MIXED}


def test_without_records_of_turns_lions_is_not_known():
    layer = ScriptedLayer(growth=0.004, power=1, settings={"setting_beta1": 0.9})
    (row,) = suggest(records({"a": layer})).layers
    assert row.suggested is not None
    assert row.rotation is None
    (row,) = suggest(records({"a": layer}), rotation=0.01).layers
    assert row.suggested is None
    assert reasons(row) == {Reason.NO_ROTATION}


@pytest.mark.parametrize("weight_decay", [0.2, 1.0])
def test_strong_l2_inside_a_momentum(weight_decay):
    """At balance 2 lr wd / (1 - m) takes what gradients add, however fast W alone would shrink."""
    watched, norms, _ = random_run(momentum, 1000, 1.5, lr=0.01, weight_decay=weight_decay)
    found = suggest(watched, norm_at=1000)
    (row,) = found.layers
    assert row.equilibrium == pytest.approx(mean_square(norms[500:]), rel=0.02)
    growth = (0.01 / 0.1) ** 2 * SIZE / row.target**2
    exact = growth / (2 * row.target**2) / (0.01 / 0.1)
    assert row.suggested == pytest.approx(exact, rel=0.1)


def test_strong_l2_inside_a_momentum_is_converted_to_what_holds_the_same_norm():
    """An lr of 0.1 without momentum moves as far in the long run as 0.01 with one of 0.9."""
    _, norms, _ = random_run(momentum, 1000, 2.5, lr=0.01, weight_decay=0.3)
    found = convert_decay(0.3, Stepping("sgd", 0.01, "l2"), Stepping("sgd", 0.1, "l2", 0.0))
    _, others, _ = random_run(torch.optim.SGD, 1000, 2.5, lr=0.1, weight_decay=found.weight_decay)
    assert mean_square(others[500:]) == pytest.approx(mean_square(norms[500:]), rel=0.02)


def test_where_adams_norm_goes_is_known_while_it_moves():
    """|W|^2 = lr n / (2 wd) in the end; while it falls, steps are longer by what v remembers."""
    watched, norms, _ = random_run(torch.optim.AdamW, 600, 6.0, lr=2e-3, weight_decay=1.0)
    (row,) = suggest(watched).layers
    assert norms[-1] > 2 * math.sqrt(2e-3 * SIZE / 2)
    assert row.equilibrium == pytest.approx(math.sqrt(2e-3 * SIZE / 2), rel=0.1)


@pytest.mark.parametrize("e", [-1.0, -0.5, 0.0, 0.2])
def test_followed_again_and_again_advice_settles(e):
    """|grad L(u)| falls with the norm, so that G = c N^e has not the law's e of -1."""
    weight_decay = 0.0
    for _ in range(6):
        layer = ScriptedLayer(growth=0.02, e=e, weight_decay=weight_decay)
        said = suggest(records({"a": layer}, steps=2000), norm_at=1)
        before, weight_decay = weight_decay, said.weight_decay
    assert weight_decay == pytest.approx(before, rel=0.02)
    assert layer.norms(2000)[-1] == pytest.approx(said.layers[0].target, rel=0.02)


def trained(build, weight_decay, steps, **settings):
    """A small net whose first layer alone is decayed: a watch, and the turns of that layer."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 10)
    labels = (inputs @ torch.randn(10, 4) + torch.randn(256, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    first, others = [model[0].weight], [model[0].bias, *model[1].parameters()]
    groups = [{"params": first, "weight_decay": weight_decay}]
    optimizer = build([*groups, {"params": [*others, *model[3].parameters()]}], **settings)
    turns = []
    with watch(model, optimizer, every=20) as watched:
        for _ in range(steps):
            some, before = torch.randint(256, (16,)), model[0].weight.detach().clone()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[some]), labels[some]).backward()
            optimizer.step()
            turns.append(angle(before.double(), model[0].weight.detach().double()))
    return watched, turns


@pytest.mark.parametrize(("build", "lr"), [(Lion, 0.003), (torch_nadam, 0.01)])
def test_turns_in_a_net(build, lr):
    """Said of the run without decay at another norm, and held against the one that follows it."""
    watched, _ = trained(build, 0.0, 600, lr=lr)
    row = suggest(watched, norm_at=300).layers[0]
    _, turns = trained(build, row.suggested, 1000, lr=lr)
    assert mean_square(turns[500:]) == pytest.approx(row.rotation, rel=0.3)


def test_followed_in_a_net_advice_settles():
    """Without decay the norm grows fivefold, and the law's e asks for all of W a step."""
    said = [0.0]
    for _ in range(5):
        watched, _ = trained(momentum, said[-1], 500, lr=0.1)
        found = suggest(watched)
        said.append(found.weight_decay)
    assert said[4] == pytest.approx(said[3], rel=0.15)
    assert said[5] == pytest.approx(said[4], rel=0.15)
    assert found.layers[0].norm == pytest.approx(found.layers[0].target, rel=0.1)
