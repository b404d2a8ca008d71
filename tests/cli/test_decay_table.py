"""`decaylab decay-table`: the numbers, the scopes, and bad input."""

import json

import pytest
import typer
from refusals import refuses
from typer.testing import CliRunner

from decaylab.cli.decay import decay_table_command
from decaylab.errors import Lacks, Misplaced, OutOfRange, UnknownName
from decaylab.optim.decay import OPTIMIZERS
from decaylab.optim.first_order import sgd
from decaylab.training.build import BUILDERS
from decaylab.training.spec import PUBLISHED

app = typer.Typer()
app.command()(decay_table_command)
runner = CliRunner()


def rows(*arguments):
    result = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return {row["parameter"]: row for row in json.loads(result.stdout)}


def test_adam_with_decoupled_decay_on_the_convolutions():
    table = rows(
        *["vgg16", "--optimizer", "adam", "--decay", "decoupled", "--weight-decay", "0.3"],
        *["--scope", "conv", "--lr", "0.001", "--batch-norm", "--width", "0.125"],
    )
    assert len(table) == 28
    first, head = table["features.0.weight"], table["head.weight"]
    assert (first["role"], first["decay"], head["role"], head["decay"]) == (
        *("invariant", "decoupled"),
        *("head", "none"),
    )
    assert first["factor"] == first["long_run"] == pytest.approx(1 - 0.3 * 0.001, abs=1e-15)
    assert head["factor"] == head["long_run"] == 1.0


def test_sgd_with_l2_decays_more_in_the_long_run():
    table = rows("mlp", "--decay", "l2", "--weight-decay", "1e-3", "--lr", "0.1")
    row = table["head.weight"]
    assert row["factor"] == pytest.approx(1 - 1e-4, abs=1e-15)
    assert 1 - row["long_run"] == pytest.approx(1e-3, rel=0.02)


def test_a_registered_optimizer_is_built_as_its_runs_are(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "own", "sgd")
    monkeypatch.setitem(PUBLISHED, "own", {"lr": 0.5, "epochs": 1, "lr_drop_every": 1})
    monkeypatch.setitem(
        BUILDERS, "own", lambda spec, _, groups: sgd(groups, lr=spec.lr, momentum=0)
    )
    row = rows("mlp", "--optimizer", "own", "--decay", "l2", "--weight-decay", "0.1")["head.weight"]
    assert row["factor"] == row["long_run"] == pytest.approx(1 - 0.1 * 0.5, abs=1e-15)


def test_without_decay_nothing_shrinks():
    assert {row["factor"] for row in rows("mlp", "--decay", "none").values()} == {1.0}


def test_the_printed_table_has_a_line_for_parameters_of_one_kind():
    result = runner.invoke(
        app, ["mlp", "--optimizer", "kfac-g", "--decay", "l2"], catch_exceptions=False
    )
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [
        *("features.*.weight", "features.*.bias", "head.weight", "head.bias")
    ]
    assert lines[-2] == "l2: in the gradient, then preconditioned"
    assert max(map(len, lines)) <= 80
    assert lines[0] == "mlp, kfac-g at lr 0.03, l2 decay of 0.0005 on all"
    assert lines[-1] == "6 of 6 parameters decay"


@pytest.mark.parametrize(
    ("arguments", "kind", "fields"),
    [
        (["vgg17"], UnknownName, {"kind": "network"}),
        (["mlp", "--optimizer", "lion"], UnknownName, {"kind": "optimizer"}),
        (["mlp", "--decay", "L1"], UnknownName, {"kind": "decay"}),
        (["mlp", "--scope", "head"], UnknownName, {"kind": "decay_scope"}),
        (["mlp", "--weight-decay", "-1"], OutOfRange, {"name": "weight_decay"}),
        (["mlp", "--lr", "-1"], OutOfRange, {"name": "lr"}),
        (["mlp", "--momentum", "1"], OutOfRange, {"name": "momentum"}),
        (
            ["mlp", "--optimizer", "adam", "--momentum", "0.5"],
            Misplaced,
            {"settings": ["momentum"]},
        ),
        (["mlp", "--width", "0"], OutOfRange, {"name": "width"}),
    ],
)
def test_bad_input_gets_a_sentence(arguments, kind, fields):
    with refuses(kind, **fields):
        runner.invoke(app, arguments, catch_exceptions=False)


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(
        "import torch\n"
        "def setup():\n"
        "    model = torch.nn.Linear(4, 3)\n"
        "    return model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)\n"
    )
    monkeypatch.chdir(tmp_path)
    table = rows("own_training:setup")
    assert {name: row["factor"] for name, row in table.items()} == {"weight": 0.875, "bias": 0.875}
    with refuses(Lacks, what="model"):
        runner.invoke(app, ["torch.optim:AdamW"], catch_exceptions=False)
