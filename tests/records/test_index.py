"""Lists of many runs come from an index that is a cache, and no bad run ends a list."""

import json
import os
from dataclasses import replace

import pytest
from report.synthetic import write_run
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.records import Manifest, Row, RunStore, index
from decaylab.records.index import summaries, summarise
from decaylab.sweeps.run_index import device_seconds
from decaylab.training import RunSpec

SPEC = RunSpec(hidden=(8,), epochs=3)
VALUES = {"test/accuracy": 0.9, "train/loss": 0.1, "test/loss": 1.0}


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path)
    for seed in range(30):
        write_run(store, replace(SPEC, seed=seed), VALUES, tier="quick")
    return store


def test_what_the_index_says_is_what_the_runs_say(store):
    first, _ = summaries(store)
    assert (store.root / ".index.json").exists()
    second, _ = summaries(store)
    direct = [summarise(folder) for folder in store.runs()]
    for summary in (first, second):
        assert [vars(s) | {"folder": s.folder.id} for s in summary] == [
            vars(s) | {"folder": s.folder.id} for s in direct
        ]


def test_a_second_look_reads_no_run(store, monkeypatch):
    summaries(store)

    def read_again(folder):
        raise AssertionError(f"{folder.id} was read")

    monkeypatch.setattr(index, "summarise", read_again)
    assert len(summaries(store)[0]) == 30


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"format": 1}', b"\xff"])
def test_an_index_that_is_gone_or_damaged_is_made_anew(store, content):
    before, _ = summaries(store)
    path = store.root / ".index.json"
    path.unlink() if content is None else path.write_bytes(content)
    after, _ = summaries(store)
    assert [s.values for s in after] == [s.values for s in before]
    assert json.loads(path.read_text())["format"] == index.FORMAT


def test_a_run_that_changes_is_read_again(store):
    summaries(store)
    folder = store.runs()[7]
    folder.rows_writer.append([Row(40, 4, 11.0, "test/accuracy", 0.25)])
    known = {summary.folder.id: summary for summary in summaries(store)[0]}
    assert known[folder.id].values["test/accuracy"] == 0.25
    assert known[folder.id].epoch == 4


def test_a_folder_that_can_only_be_read_is_listed_all_the_same(store, monkeypatch):
    def read_only(path, text):
        raise index.DecaylabError("read-only")

    monkeypatch.setattr(index, "replace_text", read_only)
    assert len(summaries(store)[0]) == 30


def spoil(folder, how):
    manifest, spec, rows = (
        folder.path / name for name in ("manifest.json", "spec.toml", "rows.jsonl")
    )
    if how == "no seed":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"seed": None}))
    elif how == "a table for a device":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"device": {"a": 1}}))
    elif how == "a date":
        spec.write_text(spec.read_text() + "day = 2020-01-01\n")
    elif how == "deep":
        rows.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    elif how == "no file":
        rows.unlink()
        rows.mkdir()
    elif how == "another's":
        os.chmod(rows, 0)


@pytest.mark.parametrize(
    "how", ["no seed", "a table for a device", "a date", "deep", "no file", "another's"]
)
@pytest.mark.parametrize(
    "command", [["runs", "list"], ["runs", "list", "--json"], ["claims", "--tier", "quick"]]
)
def test_a_bad_run_is_left_out_by_name_and_the_others_are_listed(store, how, command, monkeypatch):
    bad = store.runs()[3]
    spoil(bad, how)
    if how == "another's" and os.geteuid() == 0:  # root may read everything
        read = index.RunFolder.rows

        def rows(folder):
            with folder.reading("rows.jsonl"):
                if folder.id == bad.id:
                    raise PermissionError(13, "Permission denied")
                return read(folder)

        monkeypatch.setattr(index.RunFolder, "rows", rows)
    result = CliRunner().invoke(app, [*command, "--runs", str(store.root)])
    assert result.exit_code == 0, result.output
    assert bad.id in result.output
    if command == ["runs", "list"]:
        line_alone = how == "deep"  # the rest of the run counts
        assert f"left out: {bad.id if line_alone else bad.path}" in result.stderr
        assert result.stdout.count("finished") == 29 + line_alone


def test_shares_of_a_device_are_those_of_the_definition():
    """Against the sum over moments, pair by pair."""
    times = [(0, 9), (1, 4), (1, 7), (3, 20), (8, 9), (30, 31), (30.5, 40), (0, 40)]
    runs = [
        Manifest(
            id="r", status="finished", version="", commit=None, torch="", tier="", seed=0,
            device="ab"[n % 3 == 0], started=float(start), updated=float(end), at_once=2 + n % 2,
        )
        for n, (start, end) in enumerate(times)
    ]  # fmt: skip
    steps = 4000
    for run, share in zip(runs, device_seconds([(r, 0.0) for r in runs]), strict=True):
        width, total = (run.updated - run.started) / steps, 0.0
        for step in range(steps):
            at = run.started + (step + 0.5) * width
            others = sum(r.device == run.device and r.started <= at < r.updated for r in runs)
            total += width / min(run.at_once, others)
        assert share == pytest.approx(total, rel=1e-3)
