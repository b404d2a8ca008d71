"""Scopes, the term and its rate, schedules, the table."""

import inspect
import math

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.errors import Lacks, OutOfRange, UnknownName
from decaylab.networks import build
from decaylab.optim.decay import (
    DECAYS,
    OPTIMIZERS,
    add_decay,
    decay_of,
    decay_rate,
    lost_to_rounding,
    parameter_groups,
)
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.schedules import step
from decaylab.optim.table import Problem, decay_table


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
    ("options", "refused"),
    [
        ({"decay": "L2"}, UnknownName),
        ({"scope": "head"}, UnknownName),
        ({"weight_decay": -0.1}, OutOfRange),
        ({"weight_decay": math.nan}, OutOfRange),
        ({"weight_decay": math.inf}, OutOfRange),
        ({"scope": lambda role: False}, Lacks),
    ],
)
def test_bad_input_gets_a_sentence(options, refused):
    with pytest.raises(refused):
        parameter_groups(network(), **{"weight_decay": 0.1, **options})


def test_a_model_that_ends_in_a_norm_has_no_fc():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    with refuses(Lacks, what="parameter of this model"):
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
    with refuses(OutOfRange, name="every"):
        step(0)
    with refuses(OutOfRange, name="factor"):
        step(10, factor=0.0)


def built(name, model, groups):
    if name == "sgd":
        return sgd(groups, lr=0.1, momentum=0.9)
    return adam(groups, lr=0.1) if name == "adam" else KFAC(model, 0.1, params=groups)


def weights_under(decay):
    """A weight at lr 0.1 and momentum 0.9 under a decay of 0.02 alone, step by step."""
    weight, velocity, weights = 1.0, 0.0, []
    beside = {"decoupled": 0.1 * 0.02, "independent": 0.02}.get(decay, 0.0)
    for _ in range(500):
        velocity = 0.9 * velocity + (0.02 * weight if decay == "l2" else 0.0)
        weight -= 0.1 * velocity + beside * weight
        weights.append(weight)
    return weights


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
        weights = weights_under(decay)
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
        ("mars", {}),  # vectors ignore weight_decay and have one of their own
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
    assert (name in ("sgd", "sgdw", "lion", "adan", "mars")) == all(row.factor for row in rows)
    for row, first, last in zip(rows, ratios[0], ratios[-1], strict=True):
        if row.factor is not None:
            assert 1 - first.mean().item() == pytest.approx(1 - row.factor, rel=5e-3)
            assert 1 - last.mean().item() == pytest.approx(1 - row.long_run, rel=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.NAdam, {"decoupled_weight_decay": True}),
        (torch.optim.RAdam, {"decoupled_weight_decay": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Muon, {}),
        (torch.optim.SGD, {}),
    ],
)
def test_a_decay_is_lost_where_steps_are_the_same_without_it(kind, more, dtype):
    """Up to eps / 4 of the weights a step, where nothing else is rounded with it."""
    fraction = torch.finfo(dtype).eps / 4
    lr = 64 * fraction  # so that a step is not below the spacing of numbers, too

    def stepped(strength):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 32).to(dtype))
        optimizer = kind([weight], lr=lr, weight_decay=strength / lr, **more)
        lost = lost_to_rounding(weight, optimizer.param_groups[0], optimizer)
        for _ in range(3):
            weight.grad = torch.randn(64, 32).to(dtype)
            optimizer.step()
        return weight.detach(), lost

    plain, nothing_lost = stepped(0.0)
    assert not nothing_lost
    fused = more.get("fused") and dtype is not torch.float32
    apart = kind is not torch.optim.SGD and not fused
    for strength in (0.99 * fraction, 1.01 * fraction):
        weight, lost = stepped(strength)
        assert lost == torch.equal(weight, plain) == (apart and strength < fraction)


def test_the_table_says_which_decay_is_lost_to_rounding():
    model = nn.Sequential(nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3))
    table = decay_table(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5))
    (problem,) = table.problems
    assert (problem.problem, problem.parameters) == (Problem.LOST, ("0.weight", "0.bias"))
    assert [row.factor for row in table] == [1.0, 1.0, 1 - 5e-4, 1 - 5e-4]
    late = decay_table(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.5))
    assert not late.problems
    assert str(late).splitlines()[-1] == "decoupled: outside the step, times lr (0 now)"


def test_the_table_measures_what_the_order_of_modules_does_not_show():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.back = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(x + self.back(self.wide(x).relu())))

    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    by_order = decay_table(model, optimizer)
    measured = decay_table(model, optimizer, inputs=torch.randn(6, 4))
    for table, role in ((by_order, "invariant"), (measured, "weight")):
        assert {row.parameter: row.role for row in table}["back.weight"] == role
        assert ("inputs=batch" in str(table)) == (table is by_order)


def test_names_that_share_a_line_keep_the_numbers_they_share():
    pairs = [[nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)] for _ in range(3)]
    blocks = nn.ModuleList(map(nn.ModuleList, pairs))
    weights = [[pair[i].weight for pair in pairs] for i in (0, 1)]
    groups = [{"params": weights[0]}, {"params": weights[1], "weight_decay": 0.0}]
    table = str(decay_table(blocks, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)))
    names = [line.partition(")")[0] + ")" for line in table.splitlines() if "*" in line]
    assert names == ["*.0.weight (3)", "*.1.weight (2)"]  # the last of all is the head


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


def test_a_normalisation_that_a_list_of_names_misses_is_pointed_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for number in range(2):
        model.add_module(f"norm{number}", nn.LayerNorm(4))
    left_out = ("bias", "norm")
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[any(part in name for part in left_out)]["params"].append(parameter)
    (problem,) = decay_table(model, torch.optim.AdamW(groups)).problems
    assert (problem.problem, problem.parameters) == (Problem.MISSED, ("1.weight",))
    assert not decay_table(model, torch.optim.AdamW(model.parameters())).problems
