"""What each convention of weight decay means, written out by name and done by the optimizers.

The recurrences here are spelled out, not read off `CONVENTIONS`: a wrong entry in that table must
show.
"""

import pytest
import torch
from torch import nn

from decaylab.errors import DecaylabError
from decaylab.optim.decay import (
    CONVENTIONS,
    convert,
    decay_of,
    decay_rate,
    parameter_groups,
    steady_shrink,
)
from decaylab.optim.first_order import sgd
from decaylab.optim.table import decay_table

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 2e-3


def l2(weight, velocity):
    velocity = MOMENTUM * velocity + WEIGHT_DECAY * weight
    return weight - LR * velocity, velocity


def decoupled(weight, velocity):
    return weight - LR * WEIGHT_DECAY * weight, velocity


def independent(weight, velocity):
    return weight - WEIGHT_DECAY * weight, velocity


def independent_momentum(weight, velocity):
    velocity = MOMENTUM * velocity + WEIGHT_DECAY * weight
    return weight - velocity, velocity


WRITTEN_OUT = {
    "l2": l2,
    "decoupled": decoupled,
    "independent": independent,
    "independent-momentum": independent_momentum,
}


def test_every_convention_is_written_out():
    assert WRITTEN_OUT.keys() == CONVENTIONS.keys()


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_the_long_run_of_each_convention(name):
    weight, velocity = 1.0, 0.0
    for _ in range(600):
        before = weight
        weight, velocity = WRITTEN_OUT[name](weight, velocity)
    shrink = steady_shrink(WEIGHT_DECAY, name, lr=LR, momentum=MOMENTUM)
    assert shrink == pytest.approx(1 - weight / before, rel=1e-10)
    # and through convert, from the one convention without lr and momentum
    assert convert(shrink, "independent", name, lr=LR, momentum=MOMENTUM) == pytest.approx(
        WEIGHT_DECAY, rel=1e-9
    )


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


@pytest.mark.parametrize("amount", [1e-3, 0.5, 5.0])
def test_on_one_side_of_the_momentum_only_the_learning_rate_differs(amount):
    """Also where the decay is so strong that weights oscillate, and the long run forgets it."""
    for inside, outside in (("l2", "independent-momentum"), ("decoupled", "independent")):
        there = convert(amount, inside, outside, lr=LR, momentum=MOMENTUM)
        assert there == pytest.approx(LR * amount, rel=1e-12)
        back = convert(there, outside, inside, lr=LR, momentum=MOMENTUM)
        assert back == pytest.approx(amount, rel=1e-12)


def test_decay_so_strong_that_the_weight_flips_its_sign():
    """Inside a momentum, beyond the oscillation: each step multiplies by a negative number."""
    momentum, amount = 0.5, 2.95
    weight, velocity = 1.0, 0.0
    for _ in range(60):
        before = weight
        velocity = momentum * velocity + amount * weight
        weight -= velocity
    assert weight / before < 0
    shrink = steady_shrink(amount, "independent-momentum", lr=1.0, momentum=momentum)
    assert shrink == pytest.approx(1 - abs(weight / before), rel=1e-9)


def test_without_a_word_there_is_no_momentum():
    model = nn.Linear(2, 1, bias=False)
    groups = parameter_groups(model, weight_decay=0.02, decay="l2")
    (row,) = decay_table(model, torch.optim.SGD(groups, lr=0.1))
    assert row.factor == row.long_run == pytest.approx(1 - 0.002, rel=1e-12)
    assert decay_rate(0.02, "l2", law="sgd", lr=0.1) == pytest.approx(0.002, rel=1e-12)
    assert steady_shrink(0.02, "l2", lr=0.1) == pytest.approx(0.002, rel=1e-12)
    assert convert(0.02, "l2", "decoupled", lr=0.1) == pytest.approx(0.02, rel=1e-12)


def test_a_rate_of_an_unknown_kind_is_refused():
    with pytest.raises(DecaylabError, match="unknown decay"):
        decay_rate(0.02, "decoupled-l2", law="sgd", lr=0.1)


@pytest.mark.parametrize("group", [{}, {"weight_decay": 0.0}, {"weight_decay": 0, "decay": "l2"}])
def test_a_group_without_decay_has_none(group):
    assert decay_of(group) == ("none", 0.0)
