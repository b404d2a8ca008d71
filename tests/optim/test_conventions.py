"""What each kind of weight decay takes from a weight, as the optimizers do it."""

import pytest
import torch
from refusals import refuses
from torch import nn

from decaylab.errors import UnknownName
from decaylab.optim.decay import decay_of, decay_rate, parameter_groups
from decaylab.optim.first_order import sgd
from decaylab.optim.table import decay_table, steady_shrink

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 2e-3


def ours(model, decay):
    groups = parameter_groups(model, weight_decay=WEIGHT_DECAY, decay=decay)
    return sgd(groups, lr=LR, momentum=MOMENTUM)


def torchs(model, **more):
    settings = {"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.02, **more}
    return torch.optim.SGD(model.parameters(), **settings)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((ours, {"decay": decay}) for decay in ("l2", "decoupled", "independent")),
        (torchs, {"dampening": 0.25}),
        (torchs, {"nesterov": True}),
    ],
)
def test_the_table_is_what_sgd_does(make, settings):
    """Rows of `decay_table` against SGD's own steps on weights without a gradient of the loss."""
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = make(model, **settings)
    (row,) = decay_table(model, optimizer)
    ratios = []
    for _ in range(700):
        before = model.weight.detach().clone()
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        ratios.append((model.weight.detach() / before).mean().item())
    assert row.factor == pytest.approx(ratios[0], rel=1e-12)
    assert row.long_run == pytest.approx(ratios[-1], rel=1e-12)


@pytest.mark.parametrize("said", ["l2", "decoupled", "independent", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: torch.optim.Adam(groups, lr=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=0.1),
    ],
)
def test_torchs_own_do_not_know_what_a_group_says(make, said):
    """torch decays in its own way whatever stands under "decay", as `parameter_groups` has it."""
    model = nn.Linear(2, 1, bias=False).double()
    told, plain = ({"params": [model.weight], "weight_decay": 0.02} for _ in range(2))
    (row,) = decay_table(model, make([told | {"decay": said}]))
    (expected,) = decay_table(model, make([plain]))
    assert row == expected
    optimizer = make([told | {"decay": said}])
    model.weight.grad = torch.zeros_like(model.weight)
    before = model.weight.detach().clone()
    optimizer.step()
    if row.factor is not None:  # Adam's own L2 has none
        torch.testing.assert_close(model.weight.detach(), row.factor * before)


def simulated(amount, momentum, steps):
    """A weight under L2 alone, step by step."""
    weight, velocity, weights = 1.0, 0.0, []
    for _ in range(steps):
        velocity = momentum * velocity + amount * weight
        weight -= velocity
        weights.append(weight)
    return weights


@pytest.mark.parametrize(
    ("amount", "momentum"),
    [(2e-4, 0.9), (4e-5, 0.5), (6e-4, 0.0), (2.95, 0.5)],  # the last one flips the weight's sign
)
def test_the_long_run_of_l2(amount, momentum):
    weights = simulated(amount, momentum, 60 if amount > 1 else 1000)
    shrink = steady_shrink(amount, momentum)
    assert 1 - abs(weights[-1] / weights[-2]) == pytest.approx(shrink, rel=1e-9)


def test_first_order_formula_holds_within_its_stated_error():
    for amount in (1e-6, 1e-5, 1e-4):
        first_order = amount / (1 - 0.9)
        stated = first_order * 0.9 * amount / (1 - 0.9) ** 2
        assert steady_shrink(amount, 0.9) - first_order == pytest.approx(stated, rel=0.05)


def test_oscillating_decay_shrinks_by_the_root_of_the_momentum():
    weights = simulated(0.5, 0.81, 1000)
    measured = (max(map(abs, weights[900:])) / max(map(abs, weights[400:500]))) ** (1 / 500)
    assert 1 - steady_shrink(0.5, 0.81) == pytest.approx(0.9)
    assert measured == pytest.approx(0.9, rel=1e-3)


def test_without_a_word_there_is_no_momentum():
    model = nn.Linear(2, 1, bias=False)
    groups = parameter_groups(model, weight_decay=0.02, decay="l2")
    (row,) = decay_table(model, torch.optim.SGD(groups, lr=0.1))
    assert row.factor == row.long_run == pytest.approx(1 - 0.002, rel=1e-12)
    assert decay_rate(0.02, "l2", law="sgd", lr=0.1) == pytest.approx(0.002, rel=1e-12)


def test_a_rate_of_an_unknown_kind_is_refused():
    with refuses(UnknownName, kind="decay", name="decoupled-l2"):
        decay_rate(0.02, "decoupled-l2", law="sgd", lr=0.1)


@pytest.mark.parametrize("group", [{}, {"weight_decay": 0.0}, {"weight_decay": 0, "decay": "l2"}])
def test_a_group_without_decay_has_none(group):
    assert decay_of(group) == ("none", 0.0)
