import errno
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decaylab.errors import DecaylabError
from decaylab.records.packing import read_rows
from decaylab.records.rows import Row, RowWriter


def row(step, name="loss", value=1.0):
    return Row(step, step // 10, step / 2, name, value)


def test_written_rows_are_read_back(tmp_path):
    rows = [row(0), row(10), row(10, "accuracy", 0.5)]
    RowWriter(tmp_path / "rows.jsonl").append(rows)
    assert list(read_rows(tmp_path / "rows.jsonl").rows) == rows


@given(st.floats())
def test_every_float_survives(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    RowWriter(path).append([row(1, value=value)])
    (found,) = read_rows(path).rows
    assert found.value == value or (math.isnan(found.value) and math.isnan(value))
    json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)  # strict JSON: no NaN token


def test_the_last_row_of_a_step_and_name_counts(tmp_path):
    writer = RowWriter(tmp_path / "rows.jsonl")
    writer.append([row(10, value=1.0), row(10, "accuracy", 0.1)])
    writer.append([row(10, value=2.0)])
    rows = read_rows(tmp_path / "rows.jsonl")
    assert rows.last("loss") == 2.0
    assert rows.last("accuracy") == 0.1
    assert len(rows.rows) == 2


def test_a_resume_voids_the_rows_past_its_step_and_says_so(tmp_path):
    writer = RowWriter(tmp_path / "rows.jsonl")
    writer.append([row(step, value=float(step)) for step in (10, 20, 30)])
    writer.resume(20)
    writer.append([row(25, value=-1.0)])
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [r.step for r in rows.series("loss")] == [10, 20, 25]
    assert rows.left_out == ("1 rows past a checkpoint were superseded by a resume",)


def test_a_restart_voids_everything_before_it(tmp_path):
    writer = RowWriter(tmp_path / "rows.jsonl")
    writer.resume(-1)
    assert not (tmp_path / "rows.jsonl").exists()
    writer.append([row(0), row(10)])
    writer.resume(-1)
    assert read_rows(tmp_path / "rows.jsonl").rows == ()


def test_what_could_not_be_written_is_written_with_what_comes_next(tmp_path, monkeypatch):
    """Else rows of an earlier run, whose mark was lost, would stand among those of this one."""
    path = tmp_path / "rows.jsonl"
    RowWriter(path).append([row(1), row(2), row(3)])
    writer = RowWriter(path)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *given: full(0))  # before the write
        for write in (lambda: writer.resume(-1), lambda: writer.append([row(1, value=2.0)])):
            with pytest.raises(DecaylabError, match="free some space"):
                write()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # behind it
        with pytest.raises(DecaylabError, match="free some space"):
            writer.append([row(2, value=3.0)])
    writer.append([row(4)])
    found = read_rows(path)
    assert list(found.rows) == [row(1, value=2.0), row(2, value=3.0), row(4)]
    size = path.stat().st_size
    writer.append([])
    assert path.stat().st_size == size  # nothing is written twice


def test_a_torn_line_is_left_out_and_named_and_later_rows_are_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    writer = RowWriter(path)
    writer.append([row(10), row(20)])
    path.write_bytes(path.read_bytes()[:-15])
    assert [r.step for r in read_rows(path).rows] == [10]
    writer.append([row(30)])
    rows = read_rows(path)
    assert [r.step for r in rows.rows] == [10, 30]
    assert rows.left_out == ("line 2 of rows.jsonl is damaged",)


def test_damaged_lines_are_left_out_and_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    writer = RowWriter(path)
    writer.append([row(10)])
    damaged = [b"\xff\xfe", b"[1, 2]", b'{"step": 1}', b"7", b'{"step": "x", "epoch": 0}', b"null"]
    with path.open("ab") as file:
        file.write(b"\n".join([*damaged, b"", b""]))
    writer.append([row(20)])
    rows = read_rows(path)
    assert [r.step for r in rows.rows] == [10, 20]
    assert len(rows.left_out) == len(damaged)
