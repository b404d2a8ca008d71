"""Scopes, conversions against simulated steps, exposure against a loop, the table."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decaylab.errors import DecaylabError
from decaylab.networks import build
from decaylab.optim.decay import (
    CONVENTIONS,
    DECAYS,
    OPTIMIZERS,
    add_decay,
    convert,
    decay_of,
    decay_rate,
    parameter_groups,
    steady_shrink,
)
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.kfac import KFAC
from decaylab.optim.schedules import step
from decaylab.optim.table import decay_table


def network():
    return build("vgg11", classes=4, width=1 / 32)


def names(groups):
    return {group["decay"]: group["names"] for group in groups}


def test_scope_all_takes_biases_too():
    model = network()
    (group,) = parameter_groups(model, weight_decay=0.1)
    assert (group["weight_decay"], group["decay"]) == (0.1, "decoupled")
    assert group["names"] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


@pytest.mark.parametrize("batch_norm", [True, False])
def test_scopes_conv_and_fc_split_the_model_at_the_head(batch_norm):
    model = build("resnet20", classes=4, width=1 / 32, batch_norm=batch_norm)
    conv = names(parameter_groups(model, weight_decay=0.1, decay="l2", scope="conv"))
    fc = names(parameter_groups(model, weight_decay=0.1, decay="l2", scope="fc"))
    assert fc["l2"] == ["head.weight", "head.bias"] == conv["none"]
    assert fc["none"] == conv["l2"]


def test_norm_parameters_are_in_all_only():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    scoped = {
        scope: names(parameter_groups(model, weight_decay=0.1, scope=scope)).get("decoupled")
        for scope in ("all", "conv", "fc")
    }
    assert scoped["all"] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert scoped["conv"] == ["0.weight", "0.bias"]
    assert scoped["fc"] == ["2.weight", "2.bias"]


def test_a_predicate_is_a_scope():
    found = names(
        parameter_groups(network(), weight_decay=0.1, scope=lambda role: role.role == "invariant")
    )
    assert len(found["decoupled"]) == 8
    assert all(name.endswith("weight") and "head" not in name for name in found["decoupled"])


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(5, 2), nn.Linear(3, 5)

    def forward(self, x):
        return self.last(self.first(x))


def test_inputs_find_the_last_layer_that_module_order_misses():
    model = Backwards()
    assert names(parameter_groups(model, weight_decay=1.0, scope="fc"))["decoupled"] == [
        "first.weight",
        "first.bias",
    ]
    found = parameter_groups(model, weight_decay=1.0, scope="fc", inputs=torch.randn(4, 3))
    assert names(found)["decoupled"] == ["last.weight", "last.bias"]


@pytest.mark.parametrize(("decay", "weight_decay"), [("none", 0.3), ("l2", 0.0)])
def test_no_decay_is_one_group_without_it(decay, weight_decay):
    (group,) = parameter_groups(network(), weight_decay=weight_decay, decay=decay, scope="conv")
    assert (group["decay"], group["weight_decay"]) == ("none", 0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decay": "L2"}, "none, l2, decoupled, independent"),
        ({"scope": "head"}, "all, conv, fc"),
        ({"weight_decay": -0.1}, "zero or more"),
        ({"weight_decay": math.nan}, "zero or more"),
        ({"weight_decay": math.inf}, "zero or more"),
        ({"scope": lambda role: False}, "takes no parameter"),
    ],
)
def test_bad_input_gets_a_sentence(options, words):
    with pytest.raises(DecaylabError, match=words):
        parameter_groups(network(), **{"weight_decay": 0.1, **options})


def test_a_model_that_ends_in_a_norm_has_no_fc():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    with pytest.raises(DecaylabError, match="takes no parameter"):
        parameter_groups(model, weight_decay=0.1, scope="fc")


def test_a_scope_without_parameters_matters_only_where_something_decays():
    (group,) = parameter_groups(network(), weight_decay=0.0, scope=lambda role: False)
    assert (group["decay"], group["weight_decay"]) == ("none", 0.0)


def test_the_term():
    directions = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    weights = [torch.randn_like(d) for d in directions]
    kept = [d.clone() for d in directions]
    for amount in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        for added, d, w in zip(
            add_decay(directions, weights, amount), directions, weights, strict=True
        ):
            # the product is rounded or not, which shows where the sum is next to nothing
            torch.testing.assert_close(added, d + 0.3 * w, rtol=1e-15, atol=1e-16)
    assert all(torch.equal(d, k) for d, k in zip(directions, kept, strict=True))
    assert add_decay([], [], 0.1) == []


def simulated_weights(weight_decay, convention, lr, momentum, steps):
    """A weight under decay alone, step by step, as its convention says."""
    where = CONVENTIONS[convention]
    amount = weight_decay * (lr if where.times_lr else 1.0)
    weight, velocity, weights = 1.0, 0.0, []
    for _ in range(steps):
        velocity = momentum * velocity + (amount * weight if where.inside_momentum else 0.0)
        weight -= velocity + (0.0 if where.inside_momentum else amount * weight)
        weights.append(weight)
    return weights


@pytest.mark.parametrize("source", CONVENTIONS)
@pytest.mark.parametrize("target", CONVENTIONS)
@pytest.mark.parametrize(("lr", "momentum"), [(0.1, 0.9), (0.02, 0.5), (0.3, 0.0)])
def test_conversion_keeps_the_shrink_of_a_step(source, target, lr, momentum):
    """Exact on the same side of the momentum from the first step, across it once settled."""
    weight_decay = 2e-3
    converted = convert(weight_decay, source, target, lr=lr, momentum=momentum)
    mine = simulated_weights(weight_decay, source, lr, momentum, 1000)
    theirs = simulated_weights(converted, target, lr, momentum, 1000)
    assert theirs[-1] / theirs[-2] == pytest.approx(mine[-1] / mine[-2], abs=1e-13)
    shrink = steady_shrink(weight_decay, source, lr=lr, momentum=momentum)
    assert 1 - mine[-1] / mine[-2] == pytest.approx(shrink, rel=1e-9)
    if CONVENTIONS[source].inside_momentum == CONVENTIONS[target].inside_momentum or momentum == 0:
        assert theirs == pytest.approx(mine, rel=1e-12)


def test_the_steps_are_those_of_the_optimizers():
    """SGD's l2 at 0.002 and decoupled at its converted value shrink a weight alike in the end."""
    ratios = {}
    for decay in ("l2", "decoupled"):
        value = convert(2e-3, "l2", decay, lr=0.1, momentum=0.9)
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = sgd(
            [{"params": [weight], "weight_decay": value, "decay": decay}], lr=0.1, momentum=0.9
        )
        before = 1.0
        for _ in range(400):
            before, weight.grad = weight.item(), torch.zeros_like(weight)
            optimizer.step()
        ratios[decay] = weight.item() / before
    assert ratios["l2"] == pytest.approx(ratios["decoupled"], abs=1e-13)
    assert 1 - ratios["l2"] == pytest.approx(2e-3, rel=0.02)  # to first order lr * wd / (1 - 0.9)


@given(
    weight_decay=st.floats(1e-8, 1e-3),
    lr=st.floats(1e-4, 1.0),
    momentum=st.floats(0.0, 0.95),
    source=st.sampled_from(sorted(CONVENTIONS)),
    target=st.sampled_from(sorted(CONVENTIONS)),
)
def test_there_and_back_is_the_same_value(weight_decay, lr, momentum, source, target):
    # Oscillating decay (more than momentum can follow) has no way back: kept out.
    if weight_decay < 0.5 * (1 - math.sqrt(momentum)) ** 2:
        there = convert(weight_decay, source, target, lr=lr, momentum=momentum)
        back = convert(there, target, source, lr=lr, momentum=momentum)
        assert back == pytest.approx(weight_decay, rel=1e-6)


def test_first_order_formula_holds_within_its_stated_error():
    for amount in (1e-6, 1e-5, 1e-4):
        first_order = amount / (1 - 0.9)
        error = steady_shrink(amount, "independent-momentum", lr=1.0, momentum=0.9) - first_order
        stated = first_order * 0.9 * amount / (1 - 0.9) ** 2
        assert error == pytest.approx(stated, rel=0.05)


def test_oscillating_decay_shrinks_by_the_root_of_the_momentum():
    weights = simulated_weights(0.5, "independent-momentum", 1.0, 0.81, 1000)
    measured = (max(map(abs, weights[900:])) / max(map(abs, weights[400:500]))) ** (1 / 500)
    shrink = steady_shrink(0.5, "independent-momentum", lr=1.0, momentum=0.81)
    assert 1 - shrink == pytest.approx(0.9)
    assert measured == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("adamw", "l2", 0.1, 0.9), "independent"),
        (("independent", "l2", 0.0, 0.9), "above 0"),
        (("decoupled", "l2", 0.1, 0.9), "the most is"),
    ],
)
def test_impossible_conversions_get_a_sentence(arguments, words):
    source, target, lr, momentum = arguments
    with pytest.raises(DecaylabError, match=words):
        convert(5.0, source, target, lr=lr, momentum=momentum)


def test_a_learning_rate_of_zero_decays_nothing():
    assert convert(0.1, "decoupled", "independent", lr=0.0) == 0.0


@pytest.mark.parametrize("law", sorted(set(OPTIMIZERS.values())))
@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_is_what_a_term_brings_in_the_end(decay, law):
    """A term in the gradient goes through torch's momentum (a sum) or Adam's mean of gradients."""
    lr, weight_decay, momentum = 0.05, 0.02, 0.9
    expected = {"none": 0.0, "independent": weight_decay}.get(decay, lr * weight_decay)
    if decay == "l2":
        weights = [momentum**k * (1 - momentum if law == "adam" else 1) for k in range(500)]
        expected *= sum(weights)
    found = decay_rate(weight_decay, decay, law=law, lr=lr, momentum=momentum)
    assert found == pytest.approx(expected, rel=1e-12)


def test_schedules():
    assert [step(60)(epoch, 0.1) for epoch in (0, 59, 60, 120)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.001], rel=1e-12
    )
    with pytest.raises(DecaylabError, match="every"):
        step(0)
    with pytest.raises(DecaylabError, match="factor"):
        step(10, factor=0.0)


def built(name, model, groups):
    if name == "sgd":
        return sgd(groups, lr=0.1, momentum=0.9)
    return adam(groups, lr=0.1) if name == "adam" else KFAC(model, 0.1, params=groups)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("decay", DECAYS)
def test_the_table_says_what_each_parameter_gets(optimizer, decay):
    model = network()
    groups = parameter_groups(model, weight_decay=0.02, decay=decay, scope="conv")
    rows = decay_table(model, built(optimizer, model, groups))
    assert [row.parameter for row in rows] == [name for name, _ in model.named_parameters()]
    for row in rows:
        if row.parameter.startswith("head") or decay == "none":
            assert (row.decay, row.weight_decay, row.factor, row.long_run) == (
                "none",
                0.0,
                1.0,
                1.0,
            )
            continue
        assert (row.decay, row.weight_decay) == (decay, 0.02)
        if decay == "l2" and optimizer != "sgd":
            assert (row.factor, row.long_run) == (None, None)
            assert "preconditioned" in row.how
            continue
        weights = simulated_weights(0.02, decay, 0.1, 0.9, 500)
        assert row.factor == pytest.approx(weights[0], rel=1e-12)
        assert row.long_run == pytest.approx(weights[-1] / weights[-2], rel=1e-12)


def test_the_table_reads_optimizers_of_any_make():
    model = network()
    groups = parameter_groups(model, weight_decay=0.02, decay="decoupled")
    ours = decay_table(model, adam(groups, lr=0.1))
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.02)
    assert decay_table(model, theirs) == ours
    assert decay_of(sgd(groups, lr=0.1).param_groups[0]) == ("decoupled", 0.02)
    assert decay_of(torch.optim.SGD(model.parameters(), weight_decay=0.5).param_groups[0]) == (
        "l2",
        0.5,
    )
    mixed = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    others = KFAC(mixed, 0.1, weight_decay=0.02, decay="l2", others="sgd", others_lr=0.5)
    weight, _, gamma, _ = decay_table(mixed, others)
    assert (weight.factor, weight.long_run) == (None, None)
    assert gamma.factor == pytest.approx(1 - 0.5 * 0.02, rel=1e-12)
    assert gamma.long_run < gamma.factor  # its momentum gathers it
    part = torch.optim.AdamW(list(model.parameters())[1:], lr=0.1, weight_decay=0.02)
    first, *others = decay_table(model, part)
    assert (first.decay, first.how, first.factor) == ("none", "not in this optimizer", 1.0)
    assert others == ours[1:]


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and "weight_decay" in inspect.signature(kind).parameters
    ],
)
def test_what_torch_decouples_is_known(kind):
    """Measured: two decoupled steps without a gradient multiply W by (1 - lr wd)^2."""
    lr, strength = 0.1, 0.3
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64))
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([weight], lr=lr, weight_decay=strength, **momentum)
    shrunk = weight.detach() * (1 - lr * strength) ** 2
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    decoupled = torch.allclose(weight.detach(), shrunk, rtol=1e-12, atol=0)
    expected = ("decoupled" if decoupled else "l2", strength)
    assert decay_of(optimizer.param_groups[0], optimizer) == expected


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgdw", {"momentum": 0.9}),
        ("accsgd", {}),  # L2 that no "momentum" describes
        ("aggmo", {}),
        ("lars", {"momentum": 0.9}),  # vectors do not decay
        ("mars", {}),
        ("adamp", {}),  # vectors decay at another rate
        ("lion", {}),
        ("adan", {}),
        ("schedulefreesgd", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:the weight decay of")
def test_the_table_is_what_optimizers_from_elsewhere_do(name, more):
    library = pytest.importorskip("pytorch_optimizer")
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).double()
    nn.init.normal_(model[1].bias)
    optimizer = library.load_optimizer(name)(
        model.parameters(), **{"lr": 0.01, "weight_decay": 0.2, **more}
    )
    rows, ratios = decay_table(model, optimizer), []
    for _ in range(500):
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        ratios.append([p.detach() / b for p, b in zip(model.parameters(), before, strict=True)])
    assert (name in ("sgd", "sgdw", "lion", "adan")) == all(row.factor for row in rows)
    for row, first, last in zip(rows, ratios[0], ratios[-1], strict=True):
        if row.factor is not None:
            assert 1 - first.mean().item() == pytest.approx(1 - row.factor, rel=5e-3)
            assert 1 - last.mean().item() == pytest.approx(1 - row.long_run, rel=5e-3)


def test_scope_conv_leaves_out_parameters_that_no_layer_owns():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    groups = parameter_groups(Scaled(), weight_decay=0.1, scope="conv")
    assert [group["names"] for group in groups] == [
        ["body.weight", "body.bias"],
        ["scale", "head.weight", "head.bias"],
    ]
