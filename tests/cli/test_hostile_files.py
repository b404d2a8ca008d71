"""What a folder of runs from somebody else may hold: nothing of it steers a terminal or a page."""

import json

import pytest
from refusals import refuses
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import BadValue, UnknownName
from decaylab.records import Manifest, RunStore
from decaylab.records.rows import Row
from decaylab.training import RunSpec

CLEAR = "\x1b[2J\x1b]0;owned\x07\x9b31m"


@pytest.fixture
def store(tmp_path):
    """One run, whose texts hold control characters and HTML."""
    store = RunStore(tmp_path / "runs")
    spec = RunSpec(hidden=(8,), epochs=1)
    with store.folder(spec.id).writing(spec.to_toml()) as folder:
        folder.rows_writer.append(
            Row(44, 1, 0.1, name, 0.5)
            for name in ("test/accuracy", "train/loss", f"weight_norm/a{CLEAR}<img src=x>")
        )
        manifest = Manifest(
            id=spec.id, status="diverged", version=CLEAR, commit=None, torch=CLEAR,
            device=f"cpu{CLEAR}<script>alert(1)</script>", seed=0, tier="quick", started=0.0,
            updated=1.0, message=f"no loss {CLEAR}",
        )  # fmt: skip
        folder.write_manifest(manifest)
    bad = store.root / f"bad{CLEAR}<b>"
    bad.mkdir()
    (bad / "spec.toml").write_text("day = 2020-01-01\n")
    (store.root / "sweeps" / "a").mkdir(parents=True)
    entry = {"name": "a", "command": ["reproduce", CLEAR]}
    entry["submissions"] = [{"engine": "local", "handle": "", "jobs": [[spec.id, "../x"]]}]
    (store.root / "sweeps" / "a" / "sweep.json").write_text(json.dumps(entry))
    return store


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "list"],
        ["runs", "show", "digits"],
        ["claims", "--tier", "quick"],
        ["sweep", "status"],
        ["diagnose", "digits"],
        ["runs", "show", f"none{CLEAR}"],
    ],
)
def test_control_characters_of_records_do_not_reach_the_terminal(store, words):
    result = CliRunner().invoke(app, [*words, "--runs", str(store.root)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.output
    assert not {"\x1b", "\x07", "\x9b"} & set(result.output)


@pytest.mark.usefixtures("without_theory")
def test_the_report_holds_no_html_of_records(store, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["report", "--runs", str(store.root), "--out", str(tmp_path / "report")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for name in ("report.md", "index.html"):
        text = (tmp_path / "report" / name).read_text()
        assert "<script>alert" not in text
        assert "<b>" not in text or name == "index.html"
        assert "\x1b" not in text


@pytest.mark.parametrize("name", ["../other", "/etc", "..", "a/b", "a" * 300, "a\0b"])
def test_a_source_is_a_run_beside_this_one(tmp_path, name):
    with refuses(BadValue, name="norm_source"):
        RunSpec(batch_norm=True, norm_source=name)
    with refuses(BadValue, name="rotation_source"):
        RunSpec(rotation_source=name)
    with refuses(BadValue, value=name):
        RunStore(tmp_path).folder(name)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"hidden": (10**12,)}, "hidden"),
        ({"hidden": (8,) * 100_000}, "the number of hidden layers"),
        ({"hidden": (2**20, 2**20)}, "the number of hidden weights"),
        ({"network": "vgg16", "width": 1e9}, "width"),
        ({"batch_size": 10**18}, "batch_size"),
        ({"epochs": 10**30}, "epochs"),
        ({"seed": 2**63}, "seed"),
        ({"optimizer": "kfac-f", "refresh_every": 10**20}, "refresh_every"),
        ({"lr": "1" * 10**6}, "lr"),
    ],
)
def test_absurd_sizes_are_one_short_sentence(values, name):
    with refuses(BadValue, name=name) as caught:
        RunSpec(**values)
    assert len(str(caught.value)) < 400


def test_an_absurd_name_is_one_short_sentence():
    with refuses(UnknownName, kind="network") as caught:
        RunSpec(network="v" * 10**6)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("words", [["runs", "show"], ["diagnose"], ["train", "--config"]])
def test_over_long_names_are_one_short_sentence(tmp_path, words):
    result = CliRunner().invoke(app, [*words, "a" * 5000, "--runs", str(tmp_path)])
    assert result.exit_code == 2, result.exception
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 6000
