import json
import time

import pytest
import torch
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli.demo import demo_specs

runner = CliRunner()


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_prints_one_table_and_is_instant_the_second_time(tmp_path, monkeypatch):
    monkeypatch.delenv("DECAYLAB_DATA", raising=False)
    arguments = ["demo", "--runs", str(tmp_path), "--epochs", "2"]
    first = runner.invoke(app, arguments)
    assert first.exit_code == 0, first.stderr
    rows = [
        line
        for line in first.stdout.splitlines()
        if line.strip().startswith(("sgd", "adam", "kfac"))
    ]
    assert len(rows) == 12
    started = time.perf_counter()
    second = runner.invoke(app, arguments)
    assert time.perf_counter() - started < 1
    assert second.stdout == first.stdout
    results = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert len(results) == 12
    assert first.stderr == ""


def test_its_runs_differ_only_in_optimizer_and_decay():
    specs = demo_specs()
    assert len({spec.id for spec in specs}) == 12
    assert {(s.data, s.network, s.batch_norm, s.epochs, s.seed) for s in specs} == {
        ("digits", "mlp", True, 50, 0)
    }


def test_bad_epochs(tmp_path):
    result = runner.invoke(app, ["demo", "--runs", str(tmp_path), "--epochs", "0"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
