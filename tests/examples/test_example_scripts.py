"""Each example runs, says what it should, and warns of nothing (warnings are errors here)."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--steps", "12", "--batch", "8", "--width", "8", "--depth", "1"]


def run(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *TINY, *arguments])
    monkeypatch.syspath_prepend(EXAMPLES)  # as when it is run as a script
    with torch.random.fork_rng():
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return found, capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "kfac-f", "kfac-g"])
@pytest.mark.parametrize("name", ["gpt", "vit", "resnet_affine"])
def test_an_example_trains_twice_and_diagnoses(name, optimizer, monkeypatch, capsys):
    found, out = run(name, ["--optimizer", optimizer], monkeypatch, capsys)
    assert found["OPTIMIZERS"] == ("adamw", "sgd", "kfac-f", "kfac-g")
    assert len(re.findall(r"step +\d+  training loss \d", out)) == 24  # with decay and without
    assert re.search(r"test (loss|accuracy): [\d.]+%? with decay, [\d.]+%? without", out)
    assert ("outside K-FAC's blocks" in out) == optimizer.startswith("kfac")
    assert re.search(r"^How far each layer turns$", out, re.MULTILINE)
    assert re.search(r"^What follows$", out, re.MULTILINE)
    assert re.search(r" against the baseline$", out, re.MULTILINE)  # they can be compared
    verdict = out[out.index(" without\n") :]
    assert max(map(len, verdict.splitlines())) <= 80


def test_what_the_diagnosis_says_of_each_architecture(monkeypatch, capsys):
    """A ResNet's convolutions are scale-invariant; those of a GPT are judged by how they turn."""
    _, resnet = run("resnet_affine", ["--weight-decay", "0.1"], monkeypatch, capsys)
    assert re.search(r"^from weight_norm, lr", resnet, re.MULTILINE)
    assert re.search(r"^blocks.0.conv1  .* 0$", resnet, re.MULTILINE)  # its size does not count
    _, gpt = run("gpt", ["--weight-decay", "30"], monkeypatch, capsys)
    assert "from rotation: " in gpt
    for out in (resnet, gpt):  # each ends in an insight that the table shows
        assert re.search(r"\(test\s(loss|accuracy)\s[\d.]+\swith\sdecay", out)
        layer = re.search(r"Decay\smakes\s([\w.]+)\sturn\s([\d.]+x)\sas\sfar\sper\sstep", out)
        assert layer, out
        assert re.search(rf"^{layer[1]} .* {layer[2]} ", out, re.MULTILINE)


def test_the_gpts_tied_embedding_has_a_block_of_its_own(monkeypatch, capsys):
    _, out = run("gpt", ["--optimizer", "kfac-f"], monkeypatch, capsys)
    assert "stepped by Adam: LayerNorm has no Kronecker-factored block" in out
    assert "tied" not in out
