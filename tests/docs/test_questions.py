"""The pages that answer questions: their code runs and shows what they say."""

import re

import pytest
import torch
from documented import ROOT, snippet, snippet_text


@pytest.fixture(autouse=True)
def own_randomness():
    with torch.random.fork_rng():
        yield


def printed(page, name, capsys):
    """What the block prints, and its names."""
    names = {}
    exec(snippet(page, name), names)
    return capsys.readouterr().out, names


def test_norms_and_biases(capsys):
    out, _ = printed("norms-and-biases.md", "norms and biases", capsys)
    first, second = out.split("parameter")[1:]
    assert "none" not in first
    rows = [line.split() for line in second.splitlines() if re.match(r"\S*(weight|bias)", line)]
    undecayed = {row[0] for row in rows if "none" in row}
    assert undecayed == {"*.bias", "1.weight", "1.bias"}


def test_batch_size(capsys):
    out, _ = printed("batch-size.md", "batch size", capsys)
    answers = {line.split(": ")[1] for line in out.splitlines()}
    assert answers == {"decay 0.4, memory 10000 -> 2500 steps"}
    assert "`decay 0.4, memory 10000 -> 2500 steps`" in (ROOT / "docs/batch-size.md").read_text()


def test_l2_or_decoupled(capsys):
    out, _ = printed("l2-or-decoupled.md", "l2 or decoupled", capsys)
    values = {line.split()[0]: eval(line.partition(" ")[2]) for line in out.splitlines()}
    assert abs(values["Adam"][1]) < 0.05
    assert values["AdamW"] == pytest.approx([0.74, 0.74], abs=0.15)


def test_muon(capsys):
    out, names = printed("muon.md", "muon", capsys)
    assert out.splitlines()[0] == "acts"
    layer = names["layer"]
    assert layer.rotation == pytest.approx(layer.expected, rel=0.5)


def test_loss_rises(capsys):
    out, _ = printed("loss-rises.md", "loss rises", capsys)
    numbers = {
        line.split(":")[0]: [float(n) for n in re.findall(r"[\d.e-]+(?= at)", line)]
        for line in out.splitlines()
    }
    before, after = numbers["effective_lr"]
    assert after > 1.5 * before
    best, end = numbers["loss"]
    assert end > 1.2 * best
    assert numbers["weight_norm"][0] > numbers["weight_norm"][1]


@pytest.mark.parametrize("name", ["adamw", "verdict"])
def test_the_home_page_has_the_readmes_code(name):
    assert snippet_text("index.md", name) == snippet_text("../README.md", name)
