import json
import sys

import pytest
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli import demo as demo_module
from decaylab.cli.demo import demo_specs
from decaylab.data import load
from decaylab.report.mechanisms import MECHANISMS
from decaylab.report.names import named
from decaylab.theory import Check
from decaylab.training import Execution, train_to_end

runner = CliRunner()
CHECK = Check("T1", "Lemma 1", "no bias", 1.0, 1.0, 1e-16, 1e-10, True, "statement")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The theory has tests of its own."""
    monkeypatch.setattr(demo_module, "all_checks", lambda: [CHECK])


def test_it_ends_with_a_report_and_trains_nothing_the_second_time(tmp_path, monkeypatch):
    monkeypatch.delenv("DECAYLAB_DATA", raising=False)
    arguments = ["demo", "--runs", str(tmp_path), "--epochs", "1", "--all"]
    first = runner.invoke(app, arguments)
    assert first.exit_code == 0, first.stderr
    lines = first.stdout.splitlines()
    for mechanism in MECHANISMS:
        start = lines.index(mechanism.title)
        measured = [line for line in lines[start : start + 8] if " -> " in line]
        assert [line.split(":")[0].strip() for line in measured] == [
            named(optimizer) for optimizer in mechanism.optimizers
        ]
    page = tmp_path / "report" / "index.html"
    assert str(page) in first.stdout
    command = lines[-1].split()
    assert runner.invoke(app, command[1:]).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert all(f'id="{mechanism.anchor}"' in text for mechanism in MECHANISMS)
    assert text.count('<div class="chart"') == 10  # 2 + 4 + 2 * 2 panels
    rows = {path: path.read_bytes() for path in tmp_path.glob("*/rows.jsonl")}
    second = runner.invoke(app, [*arguments, "--no-report", "--json"])
    assert {path: path.read_bytes() for path in tmp_path.glob("*/rows.jsonl")} == rows
    found = json.loads(second.stdout)
    assert len(found["runs"]) == 24
    assert found["report"] is None
    for run in found["runs"]:
        names = "effective_lr/features.0" if run["batch_norm"] else "jacobian_norm"
        assert run[names] > 0
        damped = run["batch_norm"] and run["optimizer"].startswith("kfac")
        assert ("effective_damping/features.0" in run) == damped


def test_without_all_it_trains_a_pair_for_each_line(tmp_path):
    """What is printed comes while it trains: a mechanism is told before the next one begins."""
    result = runner.invoke(app, ["demo", "--runs", str(tmp_path), "--epochs", "1", "--no-report"])
    assert result.exit_code == 0, result.stderr
    assert len(list(tmp_path.glob("*/spec.toml"))) == 12
    assert result.stdout.count(" -> ") == 6 + 1
    assert not (tmp_path / "report").exists()


def test_its_runs_cover_optimizers_decays_and_batch_norm():
    specs = demo_specs(seed=3, seeds=2)
    assert len({spec.id for spec in specs}) == 48
    keys = {(s.optimizer, s.decay, s.batch_norm, s.seed) for s in specs}
    assert len(keys) == 4 * 3 * 2 * 2
    assert {s.seed for s in specs} == {3, 4}
    assert {(s.data, s.network, s.hidden, s.epochs) for s in specs} == {
        ("digits", "mlp", (128, 128), 50)
    }


def test_probes_leave_the_run_alone(tmp_path):
    spec = next(s for s in demo_specs(epochs=2) if (s.optimizer, s.batch_norm) == ("kfac-f", True))
    watched, plain = (
        train_to_end(spec, data=load("digits"), execution=Execution(epoch_probe=probe))
        for probe in (demo_module.measure_epoch, None)
    )
    for name, value in plain.values.items():
        assert name == "train/seconds" or watched.values[name] == value


def test_decay_acts_as_the_paper_says():
    """The three mechanisms at a fifth of the demo's length, with a margin for the seed."""
    ends = {}
    for spec in demo_specs(epochs=10):
        wanted = {
            ("sgd", True): "effective_lr/features.0",
            ("kfac-g", False): "jacobian_norm",
            ("kfac-g", True): "effective_damping/features.0",
        }
        name = wanted.get((spec.optimizer, spec.batch_norm))
        if name is not None and spec.decay != "l2":
            execution = Execution(epoch_probe=demo_module.measure_epoch)
            values = train_to_end(spec, data=load("digits"), execution=execution).values
            ends[name, spec.decay] = values[name]
    ratios = {name: ends[name, "decoupled"] / ends[name, "none"] for name, _ in ends}
    assert ratios["effective_lr/features.0"] > 1.2
    assert ratios["jacobian_norm"] < 0.8
    assert ratios["effective_damping/features.0"] < 0.9


@pytest.mark.parametrize("bad", [["--epochs", "0"], ["--seeds", "0"]])
def test_bad_numbers(tmp_path, bad):
    result = runner.invoke(app, ["demo", "--runs", str(tmp_path), *bad])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_report_asked_for_without_matplotlib_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = runner.invoke(app, ["demo", "--runs", str(tmp_path / "runs"), "--report"])
    assert result.exit_code == 2
    assert "decaylab[report]" in result.stderr
    assert not (tmp_path / "runs").exists()
