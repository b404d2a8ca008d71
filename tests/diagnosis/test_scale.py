"""`advise scale`: what stays the same by each rule does."""

import math

import pytest
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.diagnosis import scale_decay
from decaylab.errors import OutOfRange

NOW = {"weight_decay": 0.1, "lr": 1e-3}


def rules(**factors):
    return {rule.rule: rule for rule in scale_decay(**NOW, **factors)}


@pytest.mark.parametrize("batch", [0.25, 4.0])
@pytest.mark.parametrize("steps", [0.5, 3.0])
@pytest.mark.parametrize("width", [1.0, 2.0])
def test_each_rule_keeps_what_it_says(batch, steps, width):
    found = rules(batch=batch, steps=steps, width=width)
    tau = 1 / (NOW["lr"] * NOW["weight_decay"])
    for rule in found.values():
        assert rule.lr == NOW["lr"] / width  # muP
        now, there = rule.timescales
        assert now == pytest.approx(tau)
        assert there == pytest.approx(1 / (rule.lr * rule.weight_decay))
    # an epoch has 1/batch as many steps, the run has `steps` times as many
    assert found["epochs"].timescales[1] * batch == pytest.approx(tau)
    assert found["run"].timescales[1] / steps == pytest.approx(tau)
    angles = [math.sqrt(2 / t) for t in found["rotation"].timescales]
    assert angles[1] / math.sqrt(batch) == pytest.approx(angles[0])


def test_at_fixed_data_and_parameters_decay_goes_with_the_batch():
    """The finding of both sources: twice the batch in half the steps, twice the decay."""
    found = rules(batch=2.0, steps=0.5)
    assert found["epochs"].weight_decay == pytest.approx(0.2)
    assert found["run"].weight_decay == pytest.approx(0.2)


def test_nothing_changes_where_nothing_does():
    assert {rule.weight_decay for rule in rules().values()} == {0.1}


@pytest.mark.parametrize("bad", [{"batch": 0.0}, {"steps": -1.0}, {"width": 0.0}])
def test_factors_above_zero(bad):
    with pytest.raises(OutOfRange):
        scale_decay(**NOW, **bad)


@pytest.mark.parametrize(("width", "noted"), [("1:2", False), ("1:1", True)])
def test_the_command_names_each_source_and_what_it_was_not_checked_for(width, noted):
    words = ["scale", "0.1", "--lr", "1e-3", "--batch", "64:128", "--steps", "1000:2000"]
    result = CliRunner().invoke(app, ["advise", *words, "--width", width])
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())
    for source in ("2405.13698", "2505.13738", "2305.17212"):
        assert source in said
    assert ("tokens per parameter change" in said) == noted


def test_a_change_that_is_none():
    result = CliRunner().invoke(app, ["advise", "scale", "0.1", "--lr", "1", "--batch", "64"])
    assert result.exit_code == 2
    assert "FROM:TO" in result.stderr
