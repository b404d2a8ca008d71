"""Checkpoints that are written while training goes on."""

import errno
import threading
from dataclasses import replace

import pytest
import torch

from decaylab.data import load
from decaylab.errors import NotWritten
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, checkpoint, train, train_to_end
from decaylab.training.journal import Journal

SPEC = RunSpec(hidden=(16,), batch_norm=True, batch_size=256, epochs=2, lr_drop_every=2)
EVERY_STEP = Execution(checkpoint_every=0.0, every_step=True)


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be told to stand still or to be full."""

    class Disk:
        def __init__(self):
            self.moves, self.reached = threading.Event(), threading.Event()
            self.full, self.asked, self.stands_at = False, 0, None
            self.moves.set()

        def save_file(self, tensors, filename, metadata):
            self.asked += 1
            if self.asked == self.stands_at:
                self.moves.clear()
            if not self.moves.is_set():
                self.reached.set()
            assert self.moves.wait(timeout=600)
            if self.full:
                filename.write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            write(tensors, filename, metadata)

        def moves_when_waited_for(self):
            """From now on; how often it had been asked to write each time, in a list to come."""
            waited, join = [], threading.Thread.join

            def joined(thread, timeout=None):
                waited.append(self.asked)
                self.moves.set()
                join(thread, timeout)

            monkeypatch.setattr(threading.Thread, "join", joined)
            return waited

    write, found = checkpoint.save_file, Disk()
    monkeypatch.setattr(checkpoint, "save_file", found.save_file)
    yield found
    found.moves.set()


def test_the_state_may_change_while_it_is_written(tmp_path, disk):
    path, weight = tmp_path / "c", torch.ones(3)
    writer = checkpoint.Writer(path)
    disk.moves.clear()
    writer.save({"w": weight, "view": weight[1:]})
    weight.zero_()
    assert not path.exists()
    disk.moves.set()
    writer.wait()
    assert checkpoint.load(path)["w"].tolist() == [1, 1, 1]
    assert checkpoint.load(path)["view"].tolist() == [1, 1]


def test_the_next_state_takes_the_place_of_the_last(tmp_path):
    writer = checkpoint.Writer(tmp_path / "c")
    states = [
        {"a": torch.ones(3), "b": torch.zeros(2)},
        {"a": torch.full((3,), 2.0), "b": torch.zeros(4), "c": torch.ones(1)},
        {"a": torch.tensor(3), "c": torch.full((1,), 3.0, dtype=torch.float64)},
    ]
    places = []
    for state in states:
        writer.save(state)
        writer.wait()
        places.append(writer._snapshot._copies["state.a"].data_ptr())
        found = checkpoint.load(tmp_path / "c")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert all(found[key].dtype == state[key].dtype for key in state)
    assert places[0] == places[1]


def test_one_at_a_time(tmp_path, disk):
    writer = checkpoint.Writer(tmp_path / "c")
    disk.moves.clear()
    writer.save({"n": 1})
    assert disk.reached.wait(timeout=600)
    waited = disk.moves_when_waited_for()
    writer.save({"n": 2})
    assert waited == [1]
    writer.wait()
    assert checkpoint.load(tmp_path / "c") == {"n": 2}


def test_an_error_is_raised_by_the_next_save_or_wait_and_then_forgotten(tmp_path, disk):
    path = tmp_path / "c"
    writer = checkpoint.Writer(path)
    writer.save({"n": 1})
    writer.wait()
    disk.full = True
    writer.save({"n": 2})
    with pytest.raises(NotWritten):
        writer.save({"n": 3})
    writer.save({"n": 4})
    with pytest.raises(NotWritten):
        writer.wait()
    assert checkpoint.load(path) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    disk.full = False
    writer.save({"n": 5})
    writer.wait()
    assert checkpoint.load(path) == {"n": 5}


def test_training_goes_on_beside_it_and_leaving_waits_for_it(tmp_path, disk, monkeypatch):
    store = RunStore(tmp_path)
    due = iter([True, False, False])
    monkeypatch.setattr(Journal, "due", lambda *_: next(due))
    run = train(SPEC, data=load("digits"), store=store, execution=EVERY_STEP)
    disk.moves.clear()
    steps = [next(run).step for _ in range(3)]
    assert steps == [1, 2, 3]  # the first of them began a checkpoint that is not written yet
    assert disk.reached.wait(timeout=600)
    assert disk.asked == 1
    assert not store.folder(SPEC.id).checkpoint.exists()
    disk.moves_when_waited_for()
    run.close()
    assert checkpoint.load(store.folder(SPEC.id).checkpoint)["step"] == 3
    assert store.folder(SPEC.id).manifest().status == "interrupted"


def test_a_disk_that_fills_up_ends_the_run_and_it_continues(tmp_path, disk):
    store, data = RunStore(tmp_path), load("digits")
    run = train(SPEC, data=data, store=store, execution=EVERY_STEP)
    for _ in range(3):
        next(run)
    disk.full = True
    with pytest.raises(NotWritten):
        list(run)
    manifest = store.folder(SPEC.id).manifest()
    assert manifest.status == "failed"
    assert "free some space" in manifest.message
    disk.full = False
    last = train_to_end(SPEC, data=data, store=store)
    whole = train_to_end(SPEC, data=data).model.state_dict()
    assert all(torch.equal(last.model.state_dict()[name], whole[name]) for name in whole)


def test_a_last_checkpoint_that_cannot_be_written_is_no_finished_run(tmp_path, disk):
    store = RunStore(tmp_path)
    disk.full = True
    with pytest.raises(NotWritten):
        train_to_end(SPEC, data=load("digits"), store=store)
    assert store.folder(SPEC.id).manifest().status == "failed"


def test_nothing_is_written_once_the_lock_is_free(tmp_path, disk):
    store = RunStore(tmp_path)

    def fail(run):
        if run.position == run.steps_per_epoch:
            assert disk.reached.wait(timeout=600)
            waited.append(disk.moves_when_waited_for())
            raise RuntimeError("out of luck")
        return {}

    waited, disk.stands_at = [], 4  # the last checkpoint of the epoch
    before = threading.active_count()
    run = train(
        SPEC, data=load("digits"), store=store, execution=replace(EVERY_STEP, epoch_probe=fail)
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        list(run)
    assert set(waited[0]) == {4}  # for the writer, then for the thread that shows who owns the run
    folder = store.folder(SPEC.id)
    assert not folder.locked()
    assert folder.manifest().message == "RuntimeError: out of luck"
    assert checkpoint.load(folder.checkpoint)["step"] == 4
    assert not list(folder.path.glob("*.part"))
    assert threading.active_count() <= before


def test_a_dtype_that_the_file_cannot_hold_is_refused_at_once_by_its_path(tmp_path):
    """Not in the thread that writes, whose error comes with the next checkpoint."""
    writer = checkpoint.Writer(tmp_path / "checkpoint")
    with pytest.raises(TypeError, match=r"state\.a\.b is of torch\.complex64"):
        writer.save({"a": {"b": torch.zeros(2, dtype=torch.complex64)}})
    writer.wait()
