import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli import demo as demo_module
from decaylab.cli.demo import demo_specs
from decaylab.data import load
from decaylab.report.mechanisms import MECHANISMS
from decaylab.theory import Check
from decaylab.training import Execution, train_to_end

runner = CliRunner()
CHECK = Check("T1", "Lemma 1", "no bias", 1.0, 1.0, 1e-16, 1e-10, True, "statement")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The theory has tests of its own; and the demo changes torch's threads."""
    monkeypatch.setattr(demo_module, "theory_checks", lambda: [CHECK])
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_ends_with_a_report_and_trains_nothing_the_second_time(tmp_path, monkeypatch):
    monkeypatch.delenv("DECAYLAB_DATA", raising=False)
    arguments = ["demo", "--runs", str(tmp_path), "--epochs", "1", "--seeds", "1"]
    first = runner.invoke(app, arguments)
    assert first.exit_code == 0, first.stderr
    lines = first.stdout.splitlines()
    assert sum(line.startswith(("with BN", "without BN")) for line in lines) == 8
    for mechanism in MECHANISMS:
        assert mechanism.title in lines
    assert "1 of 1 checks of the paper's statements hold" in first.stdout
    page = tmp_path / "report" / "index.html"
    assert lines[-1] == f"Report: open {page} in a browser."
    text = page.read_text(encoding="utf-8")
    assert all(f'id="{mechanism.anchor}"' in text for mechanism in MECHANISMS)
    assert text.count("data:image/png") == 10  # 2 + 4 + 2 * 2 panels
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
        train_to_end(spec, data=load("digits"), execution=Execution(observe=observe))
        for observe in (demo_module.observe, None)
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
            execution = Execution(observe=demo_module.observe)
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


def test_without_matplotlib_it_says_so_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = runner.invoke(app, ["demo", "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert "pip install 'decaylab[report]'" in result.stderr
    assert not (tmp_path / "runs").exists()
