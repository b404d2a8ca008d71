"""The decay audit names operators written out by hand, and finds public bugs."""

import copy
import inspect
import json

import pytest
import torch
from audits import decay_bugs as bugs
from refusals import refuses
from torch import nn
from typer.testing import CliRunner

from decaylab import audit_decay, decay_table
from decaylab.audits import DecayReason
from decaylab.cli import app
from decaylab.errors import Failed, UnknownName, WrongType
from decaylab.optim.decay import decay_of
from decaylab.optim.table import Problem


def named(factory, **options):
    audited = audit_decay(factory, **options)
    return audited.operator.kind, audited.operator.factor


def failed(audited):
    return {check.name: check.reason for check in audited.checks if check.passed is False}


@pytest.mark.parametrize(
    ("kind", "operator", "times"),
    [
        (bugs.Cautious, "masked", 1),
        (bugs.LrSquared, "lr-squared", 1),
        (bugs.LrTwice, "lr-squared", 1),
        (bugs.Twice, "decoupled", 2),
        (bugs.Independent, "independent", 1),
        (bugs.TowardsStart, "towards-start", 1),
        (bugs.InMomentum, "in-momentum", 5),
        (bugs.TwiceInTheGradient, "l2", 2),
        (bugs.MasterCopy, "decoupled", 1),
        (bugs.TimmSGDW, "decoupled", 1),
        (bugs.BitsandbytesLion, "l2", 1),
    ],
)
def test_operators_by_their_formulas(kind, operator, times):
    kind_found, factor = named(kind)
    assert kind_found == operator
    assert factor == pytest.approx(times, rel=1e-2)


def test_decay_times_lr_squared_is_little_and_not_ignored():
    audited = audit_decay(bugs.LrTwice)
    assert audited.passed
    assert not audited.operator.over_first_lr
    weight = nn.Parameter(torch.ones(6, 4))
    optimizer = bugs.LrTwice([weight], lr=1e-2, weight_decay=0.1)
    (row,) = decay_table(nn.ParameterList([weight]), optimizer)
    assert 1 - row.factor == pytest.approx(1e-2**2 * 0.1, rel=1e-6)
    assert decay_of(optimizer.param_groups[0], optimizer) == ("decoupled", pytest.approx(1e-3))


def test_a_function_of_parameters_may_call_them_anything():
    assert named(lambda p: torch.optim.AdamW(p, weight_decay=0.1)) == (
        "decoupled",
        pytest.approx(1.0),
    )
    of_model = audit_decay(lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1))
    assert of_model.passed


def test_what_fits_none_is_unknown_and_measured():
    audited = audit_decay(bugs.Odd)
    assert audited.operator.kind == "unknown"
    check = audited["operator"]
    assert (check.passed, check.reason) == (None, DecayReason.UNKNOWN)
    weights = torch.rand(10**5, dtype=torch.float64) + 0.5  # as the trial's, of either sign
    expected = weights.pow(4).mean() / weights.square().mean()
    assert check.data["along"] == pytest.approx(expected.item(), rel=0.3)
    assert check.data["across"] > 0.1


def test_torchs_own():
    expected = {
        **dict.fromkeys(("Adam", "Adamax", "NAdam", "RAdam", "RMSprop"), "l2"),
        **dict.fromkeys(("Adagrad", "Adadelta"), "l2"),
        **dict.fromkeys(("AdamW", "Muon", "Adafactor"), "decoupled"),
        **dict.fromkeys(("SGD", "ASGD"), "decoupled"),  # without momentum it is the same as L2
        **dict.fromkeys(("Rprop", "LBFGS", "SparseAdam"), "none"),
    }
    classes = [k for k in vars(torch.optim).values() if inspect.isclass(k)]
    kinds = [k for k in classes if issubclass(k, torch.optim.Optimizer)]
    assert expected.keys() == {k.__name__ for k in kinds} - {"Optimizer"}
    for kind in kinds:
        if kind is not torch.optim.Optimizer:
            audited = audit_decay(kind)
            assert (kind.__name__, audited.operator.kind) == (
                kind.__name__,
                expected[kind.__name__],
            )
            assert audited.passed
    assert named(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1)) == (
        "l2",
        1.0,
    )


def test_torchs_asgd_decays_by_lambd_without_being_asked():
    audited = audit_decay(torch.optim.ASGD)
    assert audited["without decay"].reason is DecayReason.UNASKED
    assert audited["without decay"].data["strength"] == pytest.approx(1e-4, rel=1e-3)
    model = nn.Linear(3, 2)
    table = decay_table(model, torch.optim.ASGD(model.parameters(), lr=0.1, lambd=0.5))
    assert [problem.problem for problem in table.problems] == [Problem.UNASKED]
    assert table[0].factor == pytest.approx(1 - 0.1 * 0.5)
    assert "not decayed" not in table[0].how


@pytest.mark.parametrize("lambd", [0.0, 0.5])
def test_asgds_factor_is_what_its_first_step_does(lambd):
    model = nn.Linear(3, 2, bias=False).double()
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, lambd=lambd, weight_decay=0.2)
    (row,) = decay_table(model, optimizer)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(before)
    optimizer.step()
    assert row.factor is not None
    torch.testing.assert_close(model.weight.detach(), row.factor * before)
    assert (row.long_run is None) == (lambd > 0)  # with lambd, its lr falls


def test_a_model_whose_decay_is_lost_to_rounding_fails():
    def setup():
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    assert failed(audit_decay(setup)) == {"lost": DecayReason.TABLE_PROBLEM}


def test_timm_2750_decays_once_per_number_format():
    audited = audit_decay(bugs.TimmSGDW)
    assert failed(audited) == {"number formats": DecayReason.FORMATS_REPEATED}
    assert audited["number formats"].data == {"times": 2}
    weights = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3).double())]
    model = nn.ParameterList(weights)
    table = decay_table(model, bugs.TimmSGDW(weights, lr=0.1, weight_decay=0.01))
    assert [problem.problem for problem in table.problems] == [Problem.REPEATED]
    assert [row.factor for row in table] == pytest.approx([1 - 2e-3] * 2, rel=1e-5)
    alone = decay_table(model[:1], bugs.TimmSGDW(weights[:1], lr=0.1, weight_decay=0.01))
    assert not alone.problems
    assert audit_decay(torch.optim.AdamW)["number formats"].passed


def test_bitsandbytes_1992_is_no_lion():
    audited = audit_decay(bugs.BitsandbytesLion)
    assert failed(audited) == {"operator": DecayReason.OTHER_KIND}
    assert audited["operator"].data == {"kind": "l2", "expected": "decoupled", "why": "name"}
    library = pytest.importorskip("pytorch_optimizer")
    assert audit_decay(library.load_optimizer("lion")).passed


def test_deepspeed_8440_drops_the_groups_settings():
    audited = audit_decay(bugs.DeepSpeedGroups)
    assert failed(audited) == {"param groups": DecayReason.GROUPS_LOST}
    assert audited["param groups"].data["asked"] == pytest.approx([0.1, 0.0, 0.3])
    assert audited["param groups"].data["got"] == pytest.approx([0.05] * 3, rel=0.02)


def test_tinygrad_17709_never_decays():
    audited = audit_decay(bugs.TinygradMuon)
    assert failed(audited) == {"operator": DecayReason.IGNORED}
    model = nn.Linear(3, 2, bias=False)
    optimizer = bugs.TinygradMuon(model.parameters(), weight_decay=0.1)
    table = decay_table(model, optimizer)
    assert [problem.problem for problem in table.problems] == [Problem.IGNORED]
    assert table[0].factor == 1.0
    assert decay_of(optimizer.param_groups[0], optimizer) == ("none", 0.0)


class SilentSignSGD(torch.optim.Optimizer):
    """pytorch_optimizer 3.10.1's SignSGD: takes a weight decay, checks it, never uses it."""

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0, weight_decouple=True):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "weight_decouple": weight_decouple})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = (1 - group["momentum"]) * p.grad
                p.sub_(group["lr"] * buffer.sign())


def test_a_sign_that_never_decays_is_told_from_one_that_does():
    assert failed(audit_decay(SilentSignSGD)) == {"operator": DecayReason.IGNORED}
    library = pytest.importorskip("pytorch_optimizer")
    sign = library.load_optimizer("signsgd")
    assert audit_decay(sign).passed
    assert named(lambda params: sign(params, 1e-3, weight_decay=0.1, weight_decouple=False))[0] == (
        "l2"
    )


def test_an_independent_librarys_operators():
    library = pytest.importorskip("pytorch_optimizer")
    expected = {"adamp": "decoupled", "stableadamw": "decoupled", "schedulefreeadamw": "averaged"}
    expected |= {"novograd": "in-momentum", "adashift": "none", "adamc": "decoupled"}
    for name, operator in expected.items():
        assert (name, named(library.load_optimizer(name))[0]) == (name, operator)
    shift = library.load_optimizer("adashift")  # takes any keyword, and stores it
    assert named(lambda params: shift(params, weight_decay=0.1))[0] == "ignored"
    adamp = audit_decay(library.load_optimizer("adamp")).operator
    assert adamp.times == pytest.approx((0.1, 1.0), rel=1e-3)  # its wd_ratio, across the weight
    normalised = {"normalized": True}
    adamc = library.load_optimizer("adamc")

    def corrected(params):
        return adamc([group | normalised for group in params], lr=1e-3, weight_decay=0.1)

    assert named(corrected)[0] == "lr-squared"


def test_schedule_free():
    schedulefree = pytest.importorskip("schedulefree")
    audited = audit_decay(schedulefree.AdamWScheduleFree)
    assert (audited.operator.kind, audited.operator.factor) == ("averaged", pytest.approx(1.0))
    assert audited.passed
    model = nn.Linear(3, 2)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), weight_decay=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    assert {row.decay for row in decay_table(model, optimizer)} == {"averaged"}
    assert optimizer.state_dict() == before
    assert decay_of(optimizer.param_groups[0], optimizer) == ("decoupled", 0.1)


def test_what_is_expected_counts():
    assert failed(audit_decay(torch.optim.Adam, expect="decoupled")) == {
        "operator": DecayReason.OTHER_KIND
    }
    assert audit_decay(torch.optim.Adam, expect="l2").passed
    with refuses(UnknownName, name="l3"):
        audit_decay(torch.optim.Adam, expect="l3")

    class Flagged(torch.optim.Adam):
        def __init__(self, params, lr=1e-3, weight_decay=0.0):
            super().__init__(params, lr, weight_decay=weight_decay)
            for group in self.param_groups:
                group["weight_decouple"] = True  # and nobody reads it

    assert audit_decay(Flagged)["operator"].data["why"] == "weight_decouple"


def test_a_function_of_a_model_or_of_nothing():
    def split(model):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        return [
            torch.optim.Muon(matrices, weight_decay=0.1),
            torch.optim.AdamW(vectors, weight_decay=0.0),
        ]

    audited = audit_decay(split)
    assert audited.passed
    assert audited.optimizer == "Muon and AdamW"
    assert {row.decay for row in audited.table if row.role == "norm"} == {"none"}

    def partly(model):
        return torch.optim.AdamW([model[0].weight], weight_decay=0.1)

    assert failed(audit_decay(partly)) == {"unstepped": DecayReason.TABLE_PROBLEM}

    def shared(model):
        parameters = list(model.parameters())
        return [torch.optim.SGD(parameters, 0.1), torch.optim.AdamW(parameters[:1])]

    assert failed(audit_decay(shared)) == {"shared": DecayReason.TABLE_PROBLEM}
    model = nn.Linear(3, 2)
    own = audit_decay(lambda: (model, bugs.TinygradMuon([model.weight], weight_decay=0.1)))
    assert set(failed(own)) == {"TinygradMuon: operator", "unstepped", "ignored"}
    alone = audit_decay(lambda: torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], 0.1))
    assert alone.checks[0].reason is DecayReason.NO_DECAY


def test_bad_input_gets_a_sentence():
    with refuses(WrongType, value=3):
        audit_decay(lambda params: 3)
    with refuses(WrongType, value=3):
        audit_decay(lambda: 3)
    with pytest.raises(Failed):
        audit_decay(lambda params: 1 / 0)
    with pytest.raises(Failed):
        audit_decay(lambda model: model.layers)
    with refuses(WrongType, value=3):
        decay_table(nn.Linear(2, 2), [3])


class Closing(bugs.Decaying):
    """Cannot do without a closure."""

    def step(self, closure):
        closure()
        return super().step()

    def decay(self, lr, group, p, grad, state):
        return lr * group["weight_decay"] * p


class Failing(bugs.Decaying):
    def step(self, closure=None):
        raise RuntimeError("needs a GPU")


def test_closures_and_steps_that_fail():
    assert named(Closing) == ("decoupled", pytest.approx(1.0))
    audited = audit_decay(Failing)
    assert audited.operator.kind == "unknown"
    assert audited["operator"].reason is DecayReason.NOT_TRIED
    model = nn.Linear(3, 2)
    table = decay_table(model, Failing(model.parameters(), weight_decay=0.1))
    assert [problem.problem for problem in table.problems] == [Problem.UNKNOWN]
    assert "could not be tested" in str(table)
    embedding = nn.Embedding(5, 3, sparse=True)
    assert decay_table(embedding, torch.optim.SparseAdam(embedding.parameters()))[0].factor == 1.0
    lbfgs = torch.optim.LBFGS(model.parameters())
    assert [row.factor for row in decay_table(model, lbfgs)] == [1.0, 1.0]


def test_an_optimizer_in_training_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = bugs.Cautious(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    table = decay_table(model, optimizer)
    assert {row.decay for row in table} == {"masked"}
    assert optimizer.state_dict() == state
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_printed_table_fits_eighty_columns():
    block = nn.ModuleDict({f"a_rather_long_name_of_a_layer_{i}": nn.Linear(2, 2) for i in "xy"})
    model = nn.ModuleDict({"transformer_of_somebody": nn.ModuleList([block, nn.Linear(2, 2)])})
    parameters = list(model.parameters())
    optimizers = [
        bugs.Twice(parameters[:2], weight_decay=0.1),
        bugs.Odd(parameters[1:4], weight_decay=0.1),
        nn_sgd(parameters[4:]),
    ]
    text = str(decay_table(model, optimizers))
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0].startswith("! stepped and decayed more than once")
    assert "Twice applies its weight decay 2 times per step" in text


def nn_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def test_the_command(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(inspect.getsource(bugs), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    good = runner.invoke(app, ["audit-decay", "mine:Cautious", "--json"], catch_exceptions=False)
    assert good.exit_code == 0
    assert json.loads(good.stdout)["operator"]["kind"] == "masked"
    bad = runner.invoke(app, ["audit-decay", "mine:TinygradMuon"], catch_exceptions=False)
    assert bad.exit_code == 1
    assert bad.stdout.splitlines()[-1] == "it does not pass"
    asked = ["audit-decay", "mine:Twice", "--expect", "independent"]
    assert runner.invoke(app, asked, catch_exceptions=False).exit_code == 1
