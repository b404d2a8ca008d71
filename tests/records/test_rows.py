import errno
import json
import math
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decaylab.errors import NotWritten
from decaylab.records.packing import read_rows
from decaylab.records.rows import Row, Rows, RowWriter


def row(step, name="loss", value=1.0):
    return Row(step, step // 10, step / 2, name, value)


def test_written_rows_are_read_back(tmp_path):
    rows = [row(0), row(10), row(10, "accuracy", 0.5)]
    RowWriter(tmp_path / "rows.jsonl").append(rows)
    assert list(read_rows(tmp_path / "rows.jsonl").rows) == rows


def test_rows_are_shown_in_short():
    assert repr(Rows([row(0), row(10), row(10, "accuracy", 0.5)])) == (
        "<3 rows of 2 quantities, steps 0 to 10>"
    )
    assert repr(Rows([])) == "<0 rows of 0 quantities>"


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
            with pytest.raises(NotWritten):
                write()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # behind it
        with pytest.raises(NotWritten):
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


ENTRIES = st.lists(
    st.one_of(
        st.integers(-1, 6),  # a resume from this step
        st.tuples(st.integers(0, 6), st.dictionaries(st.sampled_from("abc"), st.floats(0, 1))),
    ),
    max_size=12,
)


@given(ENTRIES)
def test_columns_say_what_a_dictionary_of_rows_says(tmp_path_factory, entries):
    """Against the definition: by (step, name), in the order of the last time it was written."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    expected, superseded, lines = {}, 0, []
    for seconds, entry in enumerate(entries):
        if isinstance(entry, int):
            lines.append({"resumed_from": entry})
            voided = [key for key in expected if key[0] > entry]
            superseded += len(voided)
            for key in voided:
                del expected[key]
            continue
        step, values = entry
        moment = {"step": step, "epoch": step // 2, "seconds": seconds}
        lines.append({**moment, "values": values})
        for name, value in values.items():
            expected.pop((step, name), None)
            expected[step, name] = Row(step, step // 2, float(seconds), name, value)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_rows(path)
    assert rows.rows == tuple(expected.values())
    assert list(rows.rows[::2]) == list(expected.values())[::2]
    assert rows.superseded == superseded
    assert set(rows.names()) == {name for _, name in expected}
    for name in "abc":
        series = sorted((r for r in expected.values() if r.name == name), key=lambda r: r.step)
        assert rows.series(name) == series
        assert rows.last(name) == (series[-1].value if series else None)


def test_numbers_out_of_range_and_lines_without_end_are_damaged_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("decaylab.records.rows.LONGEST_LINE", 200)
    path = tmp_path / "rows.jsonl"
    RowWriter(path).append([row(1)])
    moment = {"epoch": 0, "seconds": 0.0, "values": {"loss": 1.0}}
    with path.open("a") as file:
        file.write(json.dumps({"step": 10**30, **moment}) + "\n")
        file.write(json.dumps({"step": 1, **moment, "epoch": 10**30}) + "\n")
        file.write("x" * 1000 + "\n")
        file.write("[" * 150 + "\n")
    RowWriter(path).append([row(2)])
    rows = read_rows(path)
    assert rows.rows == (row(1), row(2))
    assert rows.damaged == tuple(f"line {n} of rows.jsonl is damaged" for n in (2, 3, 4, 5))


def test_a_large_file_takes_less_memory_than_it_has_bytes(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = [f"weight_norm/layer{n}" for n in range(20)]
    RowWriter(path).append([row(step, name, 1 / 3) for step in range(3000) for name in names])
    tracemalloc.start()
    try:
        rows = read_rows(path)
        assert rows.last(names[3]) == 1 / 3
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(rows.rows) == 60_000
    assert peak < path.stat().st_size


def test_rows_in_memory_are_all_there_also_several_of_one_step():
    """As they were logged: what a file has of them is the last of each step and name."""
    every = [row(step, value=value) for step in (20, 10) for value in (3.0, math.inf, 1.0)]
    rows = Rows(tuple(every))
    assert rows.series("loss") == every[3:] + every[:3]
    assert rows.points("loss") == tuple((r.step, r.value) for r in every[3:] + every[:3])
    assert rows.not_finite() == [every[1], every[4]]
    assert rows.last("loss") == 1.0
