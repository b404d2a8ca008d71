"""Every command and line of Python that a diagnosis prints is typed as it stands, and works."""

import json
import re
import shlex

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import decaylab
from decaylab import diagnose, watch
from decaylab.cli import app
from decaylab.diagnosis import Reason
from decaylab.records import RunFolder

TINY = ["--hidden", "16,16", "--batch-norm", "--batch-size", "128", "--epochs", "6", "--lr", "0.1"]
DECAY = ["--decay", "l2", "--weight-decay", "0.01"]


def typed(command):
    """What a shell would do with it."""
    name, *arguments = shlex.split(command)
    assert name == "decaylab"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (command, result.output)
    return result


def told(*arguments):
    return json.loads(typed(shlex.join(["decaylab", "diagnose", *arguments, "--json"])).stdout)


def advice_in(result):
    """All that a diagnosis advises, as texts."""
    remedies = [remedy["text"] for finding in result["findings"] for remedy in finding["remedies"]]
    return [result["headline"], *remedies, *result["follows"]]


def commands_in(texts):
    found = re.findall(r"`([^`]+)`", " ".join(texts))
    return list(dict.fromkeys(command for command in found if command.startswith("decaylab ")))


@pytest.mark.parametrize(
    "how", [DECAY, ["--optimizer", "kfac-g", "--decay", "decoupled", "--weight-decay", "1"]]
)
def test_a_run_of_ours_alone_then_with_what_it_asked_for(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed(shlex.join(["decaylab", "train", *TINY, *how, "--runs", "my runs"]))
    (run,) = (tmp_path / "my runs").iterdir()
    name = f"my runs/{run.name}"
    alone = told(name)
    assert alone["outcome"]["verdict"] == "nothing to compare with"
    printed = commands_in(advice_in(alone))
    assert any(command.startswith("decaylab train ") for command in printed)
    for command in printed:
        typed(command)
    schedules = any("advise schedule" in command for command in printed)
    assert (tmp_path / "schedule.csv").exists() == schedules == (how is DECAY)
    paired = told(name, "--all-seeds")
    assert len(paired["baselines"]) == 1
    assert paired["outcome"]["verdict"] in ("better in one seed", "worse in one seed")
    assert paired["findings"][1]["verdict"] != "cannot tell" or paired["findings"][1]["effect"]
    for command in commands_in(advice_in(paired)):
        if not command.startswith("decaylab attribute"):  # below
            typed(command)
    for one in (told(name), told(name, "--alone")):  # what is there is not to be trained again
        assert commands_in([one["headline"]]) == [f"decaylab diagnose '{name}' --all-seeds"]
    several = told(name, "--all-seeds")
    assert (len(several["runs"]), len(several["baselines"])) == (2, 2)
    assert several["outcome"]["interval"] is not None
    for command in commands_in(advice_in(several)):
        if not command.startswith("decaylab attribute"):
            typed(command)


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_run_lacks_is_recorded_with_and_without_its_checkpoint(kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for decay in ([], DECAY):
        typed(shlex.join(["decaylab", "train", *TINY, *decay]))
    for folder in (tmp_path / "runs").iterdir():
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        for row in rows:
            kept_values = {k: v for k, v in row.get("values", {}).items() if "jacobian" not in k}
            row |= {"values": kept_values} if "values" in row else {}
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if not kept:
            RunFolder(folder).remove_checkpoints()
    (run,) = (tmp_path / "runs").glob("*-l2-*")
    lacking = told(run.name)
    assert lacking["findings"][1]["verdict"] == "cannot tell"
    (asked,) = [x["text"] for x in lacking["findings"][1]["remedies"] if "record" in x["text"]]
    for command in commands_in([asked]):
        typed(command)
    again = tmp_path / "runs" / ("" if kept else "again") / run.name
    assert told(str(again))["findings"][1]["effect"]


def test_what_cannot_be_told_is_settled_by_the_experiment_it_names(tmp_path, monkeypatch):
    """Where two mechanisms may act on one number, `attribute` of the real folder."""
    monkeypatch.chdir(tmp_path)
    short = [*TINY[:-4], "--epochs", "2", "--lr", "0.1", *DECAY[:-1], "0.3"]
    typed(shlex.join(["decaylab", "train", *short, "--runs", "runs"]))
    (run,) = (tmp_path / "runs").iterdir()
    without = "--decay none --weight-decay 0"
    typed(f"decaylab train --config runs/{run.name}/spec.toml --runs runs {without}")
    found = told(f"runs/{run.name}", "--all-seeds")
    named = {c for c in commands_in(advice_in(found)) if c.startswith("decaylab attribute")}
    assert named == {f"decaylab attribute runs/{run.name}"}
    typed(f"{named.pop()} --seeds 1")


def trained(weight_decay, seed=0, folder=None, *, log=True, **watching):
    """A loop of somebody else's."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(64, 6)
    labels = inputs[:, :3].argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
    with watch(model, optimizer, every=10, inputs=inputs, folder=folder, **watching) as watched:
        for _ in range(150):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if log:
            watched.log(test_loss=loss)
    return watched


def follow(texts, decays, seed):
    """Train what the texts ask for, into the folders that they name, then type their commands."""
    for folder in dict.fromkeys(re.findall(r'folder="([^"]+)"', " ".join(texts))):
        baseline = "no-decay" in folder
        trained(0.0 if baseline else decays, seed, folder, probes="diagnosis")
    return [typed(command) for command in commands_in(texts)]


def test_folders_of_a_watch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(0.05, 0, "mine", probes="diagnosis")
    alone = told("mine")
    follow(advice_in(alone), 0.05, seed=0)
    paired = told("mine", "--against", "mine-no-decay")
    assert paired["baselines"] == ["mine-no-decay"]
    assert {finding["verdict"] for finding in paired["findings"][:2]} != {"cannot tell"}
    follow([paired["headline"]], 0.05, seed=1)
    (command,) = commands_in([paired["headline"]])
    several = told(*shlex.split(command)[2:])
    assert several["outcome"]["interval"] is not None
    assert several["outcome"]["seeds"] == [2, 2]


def python_in(texts):
    found = re.findall(r"`([^`]+)`", " ".join(texts))
    return [line for line in dict.fromkeys(found) if "(" in line]


@pytest.mark.parametrize("logged", [True, False])
def test_lines_of_python_for_runs_in_memory(logged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = {"watched": 0.05, "baseline": 0.0, "watched_2": 0.05, "baseline_2": 0.0}
    names = {
        name: trained(weight_decay, seed=name.endswith("2"), log=logged, probes="diagnosis")
        for name, weight_decay in weights.items()
    }
    alone = diagnose(names["watched"])
    pair = diagnose(names["watched"], names["baseline"])
    seeds = diagnose(
        [names["watched"], names["watched_2"]], [names["baseline"], names["baseline_2"]]
    )
    lines = [
        line for result in (alone, pair, seeds) for line in python_in(advice_in(result.as_dict()))
    ]
    assert any(line.startswith("diagnose(") for line in lines) or not logged
    assert any(".log(" in line for line in lines) or logged
    for line in lines:
        line = line.replace("=...", "=1.0")  # what the reader fills in
        eval(line, {"decaylab": decaylab, "diagnose": diagnose, **names})


def test_what_was_not_recorded_is_asked_for_and_then_judged():
    """`watch(..., probes="diagnosis", inputs=batch)`, as the remedy says."""
    seldom = [trained(weight_decay, probes=["weight_norm"]) for weight_decay in (0.05, 0.0)]
    before = diagnose(*seldom)["Jacobian"]
    assert [why.reason for why in before.remedies] == [Reason.RECORD_IN_BOTH]
    again = [trained(weight_decay, probes="diagnosis") for weight_decay in (0.05, 0.0)]
    assert diagnose(*again)["Jacobian"].effect is not None
