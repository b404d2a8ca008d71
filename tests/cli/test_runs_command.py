import json
import re

import pytest
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli.runs import latest_values

runner = CliRunner()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny = ["--hidden", "8", "--batch-size", "256", "--epochs", "2", "--device", "cpu"]
    for optimizer in ("sgd", "adam"):
        arguments = ["train", *tiny, "--optimizer", optimizer, "--runs", str(folder)]
        assert runner.invoke(app, arguments).exit_code == 0
    return folder


def test_the_text_of_a_help_page_flows():
    """The line breaks of a docstring are not the terminal's."""
    page = runner.invoke(app, ["probe", "--help"], terminal_width=80).stdout
    text = page.split("Arguments")[0].split("layer.")[1].strip(" \n─╭")
    assert all(len(line.strip()) > 65 for line in text.splitlines()[:-1]), text


def test_list(runs):
    result = runner.invoke(app, ["runs", "list", "--runs", str(runs)])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("digits-mlp-adam-none-")
    assert "finished" in lines[2]
    entries = json.loads(runner.invoke(app, ["runs", "list", "--runs", str(runs), "--json"]).stdout)
    assert [entry["spec"]["optimizer"] for entry in entries] == ["adam", "sgd"]


def test_layers_are_rows_and_probes_columns():
    values = {"test/loss": 1.0, "lr": 0.1, "norm/a.0": 2.0, "norm/b": 3.0, "effective_lr/a.0": 4.0}
    whole, layers = latest_values(values)
    assert [[cell.text for cell in row] for row in whole.rows] == [
        ["test/loss", "1"],
        ["lr", "0.1"],
    ]
    assert [column.heading for column in layers.columns] == ["layer", "norm", "effective lr"]
    assert [[cell.text for cell in row] for row in layers.rows] == [
        ["a.0", "2", "4"],
        ["b", "3", ""],
    ]


def test_show(runs):
    result = runner.invoke(app, ["runs", "show", "digits-mlp-sgd", "--runs", str(runs)])
    assert result.exit_code == 0
    assert 'optimizer = "sgd"' in result.stdout
    assert re.search(r"^layer +.*\bweight norm\b", result.stdout, re.MULTILINE)
    assert re.search(r"^head +[0-9.]+", result.stdout, re.MULTILINE)
    arguments = ["runs", "show", "digits-mlp-sgd", "--runs", str(runs), "--json"]
    entry = json.loads(runner.invoke(app, arguments).stdout)
    assert [step for step, _ in entry["series"]["test/accuracy"]] == [5, 10]
    assert entry["values"]["test/accuracy"] == entry["series"]["test/accuracy"][-1][1]


def test_no_runs_and_no_such_run(tmp_path, runs):
    assert "no runs in" in runner.invoke(app, ["runs", "list", "--runs", str(tmp_path)]).stdout
    for name in ("nothing", "digits"):
        result = runner.invoke(app, ["runs", "show", name, "--runs", str(runs)])
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


def test_damaged_folders_do_not_hide_the_others(tmp_path):
    tiny = ["--hidden", "8", "--batch-size", "256", "--epochs", "1", "--device", "cpu"]
    runner.invoke(app, ["train", *tiny, "--runs", str(tmp_path)])
    (good,) = tmp_path.iterdir()
    with (good / "rows.jsonl").open("a") as file:
        file.write('{"step": 1, "ep')
    other = tmp_path / "written-later"
    other.mkdir()
    (other / "spec.toml").write_text('data = "digits"')
    (other / "manifest.json").write_text('{"format": 7, "version": "9.9"}')
    listed = runner.invoke(app, ["runs", "list", "--runs", str(tmp_path)])
    assert listed.exit_code == 0
    assert good.name in listed.stdout
    assert "(7)" in listed.stderr
    shown = runner.invoke(app, ["runs", "show", good.name, "--runs", str(tmp_path)])
    assert shown.exit_code == 0
    assert "rows.jsonl" in shown.stderr
    (good / "spec.toml").write_text("data = ")
    refused = runner.invoke(app, ["runs", "show", good.name, "--runs", str(tmp_path)])
    assert refused.exit_code == 2
    assert "train again" in refused.stderr
