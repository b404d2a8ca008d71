"""The page on attribution, from top to bottom."""

import json

import pytest
from documented import ROOT, commands, snippet
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.training import RunSpec

SPEC = RunSpec(
    data="digits",
    network="mlp",
    hidden=(8,),
    batch_norm=True,
    bias=False,
    decay="l2",
    weight_decay=0.01,
    epochs=11,
    lr_drop_every=8,
)


def test_the_snippet_prints_an_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = snippet("attribution.md", "attribute")
    names: dict[str, object] = {}
    exec(script, names)
    said = capsys.readouterr().out
    assert said.startswith("Decay changes test loss by")
    assert (tmp_path / "attribution" / "seed-2" / "rotation.json").exists()
    assert not names["result"].unused


def test_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = RunSpec(**{**_values(SPEC), "optimizer": "adam", "decay": "decoupled"})
    for name, spec in {"spec": SPEC, "adamw": other, "kfac": SPEC}.items():
        (tmp_path / f"{name}.toml").write_text(spec.to_toml())
    shorter = {"--from": ["--for", "5"]}
    for line in commands(ROOT / "docs" / "attribution.md"):
        words = [*line, "--seeds", "1", "--device", "cpu", *shorter.get(line[1], [])]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
    assert (tmp_path / "attribution.html").exists()


def _values(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "attribution").glob("*.json")))
def test_committed_attributions_are_whole(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"title", "about", "metric", "seeds", "steps", "arms", "metrics"} <= found.keys()
    assert len(found["seeds"]) >= 3
    for shares in found["metrics"].values():
        parts = [
            share["value"] for name, share in shares["shares"].items() if name != "interaction"
        ]
        assert None in parts or abs(sum(parts) - 1) < 1e-6
