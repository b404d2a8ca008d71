"""Everything commands print at 80 and at 120 columns: within the width, and nothing is cut."""

import os
import re
from functools import cache

import pytest
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli import audit as cli_audit
from decaylab.cli import theory as cli_theory
from decaylab.records import RunStore

TINY = ["--hidden", "8,8", "--batch-size", "64", "--epochs", "3", "--device", "cpu", "--batch-norm"]
DECAYED = ["--weight-decay", "0.1", "--decay", "decoupled"]
QUEUE = """
[[entry]]
name = "the first table on digits, at the tier that takes minutes"
reproduce = "table1"
tier = "quick"
only = ["network=vgg16", "batch_norm=1"]
hold = "until the settings of its cells with L2 have been searched on held-out images"
[[entry]]
name = "fig2"
reproduce = "fig2"
tier = "quick"
"""
COMMANDS = [
    "runs list",
    "runs show {kfac}",
    "runs show {adam}",
    "probe {kfac} --device cpu --examples 16",
    "probe {adam} --device cpu --examples 16",
    "diagnose {adam} --against {plain}",
    "diagnose {kfac}",
    "advise suggest {adam}",
    "advise scale 0.1 --lr 0.001 --batch 64:256",
    "advise convert 0.1 --from adamw --from-lr 0.001 --to sgd --to-lr 0.1",
    "decay-table resnet32 --optimizer adamw --batch-norm",
    "decay-table vgg16 --optimizer kfac-f",
    "data list",
    "theory",
    "audit audited_kfac:build --damping 0.001",
    "audit-decay torch.optim:AdamW",
    "reproduce table1 --tier quick --dry-run",
    "reproduce --queue queue.toml --dry-run",
    "claims",
    "sweep status",
]

AUDITED = """
from decaylab import KFAC

def build(model):
    return KFAC(model, lr=0.1, step_scaling="none")
"""


def run(command, **names):
    return CliRunner().invoke(app, command.format(**names).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three small runs in ./runs, and a queue."""
    folder = tmp_path_factory.mktemp("printed")
    runs = ["--runs", str(folder / "runs")]
    for options in (
        ["--optimizer", "adamw", *DECAYED[:2]],
        ["--optimizer", "adam"],
        ["--optimizer", "kfac-f", *DECAYED],
    ):
        made = CliRunner().invoke(app, ["train", *TINY, *runs, *options])
        assert made.exit_code == 0, made.output
    (folder / "queue.toml").write_text(QUEUE)
    (folder / "audited_kfac.py").write_text(AUDITED)
    return folder


@pytest.fixture(scope="module")
def names(folder):
    ids = [folder.id for folder in RunStore(folder / "runs").runs()]
    found = {"adam": "-adam-decoupled-", "plain": "-adam-none-", "kfac": "-kfac-f-"}
    return {name: next(i for i in ids if part in i) for name, part in found.items()}


@pytest.fixture(scope="module", autouse=True)
def computed_once():
    """What takes seconds to compute and is only printed at another width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_theory, "all_checks", cache(cli_theory.all_checks))
        patch.setattr(cli_audit, "audit", cache(cli_audit.audit))
        yield


@pytest.fixture(scope="module")
def unlimited(folder, names):
    """What each command prints where nothing says how wide."""
    printed = {}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for command in COMMANDS:
            printed[command] = run(command, **names)
    finally:
        os.chdir(before)
    return printed


def numbers(text):
    """Every word with a digit in it, without what stands around it."""
    words = (word.strip("│╭╮╰╯─(),.;:`'") for word in text.split())
    return {word for word in words if re.search(r"\d", word)}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut(command, width, folder, names, unlimited, monkeypatch):
    wide = unlimited[command]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))
    printed = run(command, **names)
    assert printed.exit_code == wide.exit_code, printed.output
    assert printed.stdout.strip()
    assert max(map(len, printed.output.splitlines())) <= width
    assert "…" not in printed.output.replace("tokens…", "")
    assert numbers(printed.stdout) <= numbers(wide.stdout)


@pytest.mark.parametrize("width", [80, 120])
def test_an_error_breaks_between_words(width, folder, monkeypatch):
    monkeypatch.chdir(folder)
    wide = run("train --network vgg61").stderr
    monkeypatch.setenv("COLUMNS", str(width))
    error = run("train --network vgg61").stderr
    assert max(map(len, error.splitlines())) <= width
    assert error.split() == wide.split()
