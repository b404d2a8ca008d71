"""The compact form reads as the file of rows did."""

import gzip
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from refusals import refuses
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import Damaged
from decaylab.records import Event, LayerSettings, Row, RunStore, SettingsChange, read_recording
from decaylab.records.packing import pack, read_contents, read_packed
from decaylab.records.rows import RowWriter

RESULTS = Path(__file__).parents[2] / "results"


def ordered(rows):
    return sorted(rows, key=lambda row: (row.step, row.name))


def test_packed_records_are_as_old_as_before(tmp_path):
    path = filled(tmp_path)
    os.utime(path, (1000, 1000))
    pack(tmp_path)
    assert [file.stat().st_mtime for file in tmp_path.glob("rows.json*")] == [1000]


def filled(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    writer = RowWriter(path)
    writer.append([Row(1, 0, 0.1, "late", 1.0)], meta={"version": "9"})
    writer.resume(0)
    for step in (0, 5, 10):
        rows = [Row(step, step // 5, step / 7, name, step / 3) for name in ("a/x", "a/y", "loss")]
        writer.append(rows[: None if step else 2])
    writer.append([Row(10, 2, 10 / 7, "nan", math.nan), Row(10, 2, 10 / 7, "inf", -math.inf)])
    settings = LayerSettings("SGD", "sgd", 0.1, together=("x", "y"))
    writer.append([SettingsChange(1, "x", settings), Event(5, "noted", {"why": [1, "b"]})])
    with path.open("a") as file:
        file.write("torn\n")
    return path


def test_packed_rows_are_the_same(tmp_path):
    path = filled(tmp_path)
    before = read_contents(path)
    assert pack(tmp_path) == pytest.approx(0, abs=2000)
    assert not path.exists()
    after = read_contents(path)
    assert repr(ordered(after.rows.rows)) == repr(ordered(before.rows.rows))
    assert (after.settings, after.events, after.meta) == (
        before.settings,
        before.events,
        before.meta,
    )
    assert after.rows.left_out == before.rows.left_out
    assert [len(series) for series in after.rows.by_name.values()] == [3, 3, 2, 1, 1]
    first = (tmp_path / "rows.json.gz").read_bytes()
    assert pack(tmp_path) == 0
    assert (tmp_path / "rows.json.gz").read_bytes() == first


def test_the_compact_file_may_be_named_and_belongs_to_no_other(tmp_path):
    path = filled(tmp_path)
    by_lines = read_recording(path)
    pack(tmp_path)
    named = read_recording(tmp_path / "rows.json.gz")
    assert repr(ordered(named.rows.rows)) == repr(ordered(by_lines.rows.rows))
    assert named.rows.left_out == by_lines.rows.left_out
    other = tmp_path / "other.jsonl"
    RowWriter(other).append([Row(1, 0, 0.0, "alone", 1.0)])
    assert [row.name for row in read_contents(other).rows.rows] == ["alone"]


def test_a_packed_run_goes_on(tmp_path):
    path = filled(tmp_path)
    pack(tmp_path)
    writer = RowWriter(path)
    writer.append([Row(10, 2, 9.0, "loss", -1.0), Row(15, 3, 10.0, "loss", -2.0)])
    assert [row.value for row in read_contents(path).rows.series("loss")] == [5 / 3, -1.0, -2.0]
    writer.resume(5)
    assert [row.step for row in read_contents(path).rows.series("loss")] == [5]
    pack(tmp_path)
    assert [row.step for row in read_packed(tmp_path / "rows.json.gz").rows.series("loss")] == [5]


def test_a_damaged_file_is_an_error(tmp_path):
    filled(tmp_path)
    pack(tmp_path)
    packed = tmp_path / "rows.json.gz"
    packed.write_bytes(packed.read_bytes()[:-40])
    with refuses(Damaged, what=packed):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("series", [1]),
        ("meta", ["version"]),
        ("places", [[-1]]),
        ("places", [[2**70]]),
        ("moments", [[2**70, 0, 0.0]]),
        ("moments", [[math.inf, 0, 0.0]]),
        ("settings", [[1, "x", 3]]),
        ("events", {"a": 1}),
    ],
)
def test_values_that_nobody_wrote_are_damage_too(tmp_path, key, value):
    filled(tmp_path)
    pack(tmp_path)
    packed = tmp_path / "rows.json.gz"
    entry = json.loads(gzip.decompress(packed.read_bytes()))
    packed.write_bytes(gzip.compress(json.dumps({**entry, key: value}).encode()))
    with refuses(Damaged, what=packed):
        read_recording(tmp_path)


def test_the_command_packs_finished_runs(tmp_path):
    runs = [run for run in RunStore(RESULTS).runs() if run.is_finished()][:3]
    begun = tmp_path / "begun"
    for path, run in [(begun, runs[0]), *((tmp_path / run.id, run) for run in runs)]:
        shutil.copytree(run.path, path)
        (path / "rows.json.gz").unlink()  # not packed yet
        filled(path)
    (begun / "manifest.json").unlink()
    before = {run.id: read_recording(tmp_path / run.id) for run in runs}
    result = CliRunner().invoke(app, ["runs", "pack", "--runs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for run in runs:
        folder = RunStore(tmp_path).folder(run.id)
        assert not folder.rows_writer.path.exists()
        assert not (folder.path / "owner.json").exists()
        again = read_recording(folder)
        assert repr(ordered(again.rows.rows)) == repr(ordered(before[run.id].rows.rows))  # nan too
        assert again.settings == before[run.id].settings
        assert again.outcomes == before[run.id].outcomes
    assert not (begun / "rows.json.gz").exists()
