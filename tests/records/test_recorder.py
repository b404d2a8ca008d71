"""What comes in is in memory at once, then goes to trackers, the user and the file, in turn."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from decaylab.records.packing import read_contents
from decaylab.records.recorder import Recorder
from decaylab.records.recording import read_recording
from decaylab.records.rows import Row, RowWriter
from decaylab.records.settings import LayerSettings


class Run:
    """Three steps an epoch, two seconds a step."""

    step = 1

    def now(self):
        return self.step, self.step // 3, 2.0 * self.step

    def recorder(self, folder=None, *trackers, **more):
        writer = None if folder is None else RowWriter(folder / "rows.jsonl")
        return Recorder(self.now, {"version": "test"}, writer, trackers, **more)


def test_rows_are_shown_and_troubles_told_before_anything_is_written(tmp_path):
    order, path = [], tmp_path / "rows.jsonl"
    tracker = SimpleNamespace(log=lambda rows: order.append(("shown", path.exists())))
    recorder = Run().recorder(tmp_path, tracker)
    recorder.add({"a": 1.0})
    recorder.trouble("a", "strange")
    assert order == []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_: order.append(("told", path.exists()))
        recorder.flush()
    assert order == [("shown", False), ("told", False)]
    assert read_contents(path).rows.rows == (Row(1, 0, 2.0, "a", 1.0),)
    recorder.flush()  # nothing new
    recorder.trouble("a", "strange")
    recorder.add({"a": 1.0})
    recorder.flush()  # told once
    assert [what for what, _ in order] == ["shown", "told", "shown"]


def test_memory_and_file_hold_the_same(tmp_path):
    """Outcomes at the step they were logged at, settings where they have changed."""
    run = Run()
    recorder = run.recorder(tmp_path)
    settings = {"fc": LayerSettings(lr=0.1), "head": LayerSettings(lr=0.1)}
    recorder.log("loss", torch.tensor(3.0))
    recorder.add_settings(1, settings)
    run.step = 4
    recorder.note("resumed", by="hand")
    recorder.add({"b": 2.0})
    recorder.add_settings(4, settings | {"head": LayerSettings(lr=0.2)})
    recorder.flush()
    own, written = recorder.recording, read_recording(tmp_path)
    assert own.rows.rows == written.rows.rows
    assert {(row.step, row.name, row.value) for row in own.rows.rows} == {
        (1, "outcome/loss", 3.0),
        (4, "b", 2.0),
    }
    assert own.outcomes == written.outcomes == {"loss": ((1, 3.0),)}
    assert own.settings == written.settings
    assert [step for step, _ in own.settings["fc"]] == [1]
    assert [step for step, _ in own.settings["head"]] == [1, 4]
    assert own.events == written.events
    assert (own.meta.version, own.meta.folder) == ("test", tmp_path)


def test_a_resumed_one_goes_on_in_memory_and_in_the_file(tmp_path):
    """Without a file from memory; `rows` are those of a process that has the file."""
    for folder, rows in ((tmp_path, None), (None, None), (None, [Row(1, 0, 2.0, "a", 7.0)])):
        run = Run()
        recorder = run.recorder(folder)
        for run.step in (1, 2, 3):
            recorder.add({"a": float(run.step)})
        recorder.flush()
        recorder.log("loss", 1.0)  # lost with what came after the checkpoint
        recorder.resume(2, rows)
        expected = [1.0, 2.0] if rows is None else [7.0]
        assert [row.value for row in recorder.rows.rows] == expected
        run.step = 3
        recorder.add({"a": 9.0})
        recorder.flush()
        assert [row.value for row in recorder.rows.rows] == [*expected, 9.0]
        if folder is not None:
            assert read_contents(folder / "rows.jsonl").rows.rows == recorder.rows.rows


@pytest.mark.parametrize("continues", [False, True])
def test_rows_that_are_voided_are_told_of_where_they_may_be_missed(tmp_path, continues):
    first = Run().recorder(tmp_path)
    first.add({"a": 1.0})
    first.flush()
    second = Run().recorder(tmp_path)
    second.continues = continues
    second.add({"a": 2.0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.flush()
    assert len(caught) == continues
    assert [row.value for row in read_contents(tmp_path / "rows.jsonl").rows.rows] == [2.0]


def test_only_one_of_several_processes_warns():
    recorder = Run().recorder(warns=False)
    recorder.warn_once("a", "strange")  # a warning would be an error here
