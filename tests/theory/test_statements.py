"""`decaylab theory`: every statement holds, a broken one is found out, the JSON is as agreed."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from decaylab import theory
from decaylab.cli.theory import theory_command
from decaylab.theory import identities, invariance, nets
from decaylab.theory.check import Statement

KEYS = ["id", "where", "condition", "left", "right", "error", "tolerance", "holds", "kind"]


@pytest.fixture(scope="module")
def run():
    app = typer.Typer()
    app.command()(theory_command)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def result(run):
    return run("--json")


def test_it_exits_with_zero(result):
    assert result.exit_code == 0, result.output


def test_the_json_has_the_agreed_shape(result):
    rows = json.loads(result.stdout)
    assert all(list(row) == KEYS for row in rows)
    assert {row["id"] for row in rows} == {f"T{i}" for i in range(1, 9)}
    assert {row["kind"] for row in rows} == {"statement", "broken"}
    for row in rows:
        assert row["holds"] is (row["error"] <= row["tolerance"])


@pytest.mark.parametrize("number", [f"T{i}" for i in range(1, 9)])
def test_statements_hold_and_broken_ones_are_far_off(result, number):
    rows = [row for row in json.loads(result.stdout) if row["id"] == number]
    for row in rows:
        if row["kind"] == "statement":
            assert row["holds"], row
        else:
            assert row["error"] > 0.05, row  # the condition matters: no rounding
    assert {row["kind"] for row in rows} == {"statement", "broken"}


def test_the_table_names_every_statement(run):
    result = run()
    assert result.exit_code == 0
    for number in theory.STATEMENTS:
        assert f"{number}  " in result.stdout
    assert "checks of the statements hold" in result.stdout
    assert "FAILS" not in result.stdout


def only(monkeypatch, *numbers):
    chosen = {number: theory.STATEMENTS[number] for number in numbers}
    monkeypatch.setattr("decaylab.theory.STATEMENTS", chosen)


def test_a_bias_added_on_purpose_makes_it_fail(run, monkeypatch):
    only(monkeypatch, "T1", "T2")
    honest = nets.mlp
    monkeypatch.setattr(nets, "mlp", lambda *a, **k: honest(*a, **{**k, "bias": True}))
    result = run()
    assert result.exit_code == 1
    assert "FAILS" in result.stdout


def test_a_factor_dropped_on_purpose_makes_it_fail(run, monkeypatch):
    only(monkeypatch, "T1", "T2", "T3", "T4")
    honest = nets.layer_count
    monkeypatch.setattr(identities.nets, "layer_count", lambda net: honest(net) - 1)
    rows = json.loads(run("--json").stdout)
    failed = {row["id"] for row in rows if row["kind"] == "statement" and not row["holds"]}
    assert failed == {"T1", "T2", "T3", "T4"}
    assert run().exit_code == 1


def test_eps_left_in_on_purpose_makes_it_fail(run, monkeypatch):
    only(monkeypatch, "T5")
    honest = nets.normalised_net
    with_eps = lambda *a, **k: honest(*a, **{**k, "eps": 1e-3})  # noqa: E731
    monkeypatch.setattr(invariance.nets, "normalised_net", with_eps)
    assert run().exit_code == 1


def test_the_worst_case_is_kept_and_nan_never_holds(run, monkeypatch):
    statement = Statement("T0", "nowhere", 1e-3)
    one, off, bad = (torch.tensor([value]).double() for value in (1.0, 1.5, float("nan")))
    assert statement.check("", [(one, one)]).holds
    worst = statement.check("", [(one, one), (off, one), (one, one)])
    assert worst.error == 0.5
    assert not worst.holds
    not_a_number = statement.check("", [(one, one), (bad, one), (one, one)])
    assert not not_a_number.holds
    monkeypatch.setattr("decaylab.theory.STATEMENTS", {"T0": lambda: [not_a_number]})
    (row,) = json.loads(run("--json").stdout, parse_constant=pytest.fail)  # JSON has no nan
    assert row["error"] is None
    assert not statement.check("", []).holds  # nothing checked is nothing shown


def test_whitened_inputs_are_white():
    x = nets.whitened(torch.randn(20, 5, dtype=torch.float64) * 3 + 1)
    torch.testing.assert_close(x.mean(0), torch.zeros(5).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(x.T @ x / 20, torch.eye(5).double(), atol=1e-12, rtol=0)
