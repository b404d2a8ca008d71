import errno
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sweeps.killed_workers import reproduce, small_grid
from sweeps.records import numbers

from decaylab.data import load
from decaylab.errors import NotWritten
from decaylab.records import RunFolder, RunStore
from decaylab.records.ownership import Ownership
from decaylab.sweeps import worker as module
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.training import Interrupted, RunSpec, checkpoint
from decaylab.training.journal import Journal

TESTS = Path(__file__).parents[1]
TINY = RunSpec(network="mlp", hidden=(8,), batch_size=256, epochs=2, lr_drop_every=1)
pytestmark = pytest.mark.usefixtures("one_thread")


def script(*arguments):
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "sweeps" / "killed_workers.py"),
         *map(str, arguments)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def reproduction(specs, runs, **how):
    planned = [PlannedRun(spec.resolved(), (), ("test",)) for spec in specs]
    made = Worker(planned, RunStore(runs), WorkerOptions(torch.device("cpu"), **how))
    made._data["digits"] = load("digits")
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the grid records in one process."""
    runs = tmp_path_factory.mktemp("grid") / "whole"
    outcome = reproduce(runs, checkpoint_every=60.0)
    assert len(outcome.finished) == len(small_grid()) == 6
    return numbers(runs)


@pytest.mark.parametrize(("kills", "processes"), [(12, 1), (20, 2)])
def test_killed_again_and_again_sweeps_record_what_an_undisturbed_one_does(
    tmp_path, undisturbed, kills, processes
):
    """Also where two share the folder and file locks exclude nobody."""
    done = script(tmp_path / "killed", 0, kills, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed ") >= kills // 2, done.stdout  # late ones find less to do
    assert numbers(tmp_path / "killed") == undisturbed
    assert not list((tmp_path / "killed").glob("*/checkpoint*"))


def test_two_processes_share_a_folder_and_make_each_run_once(tmp_path):
    done = script(tmp_path / "shared", 0, 0, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    made = [line.split()[1:] for line in done.stdout.splitlines()]
    assert sorted(run for runs in made for run in runs) == sorted(r.spec.id for r in small_grid())
    for folder in RunStore(tmp_path / "shared").runs():
        assert folder.manifest().resumes == 0


def test_what_fails_is_tried_once_more_and_then_listed(tmp_path, monkeypatch):
    train, tries = module.train, []

    def failing(spec, **rest):
        tries.append(spec.seed)
        if spec.seed == 1 or (spec.seed == 2 and tries.count(2) == 1):
            raise RuntimeError("out of memory")
        return train(spec, **rest)

    monkeypatch.setattr(module, "train", failing)
    specs = [replace(TINY, seed=seed) for seed in range(4)] + [replace(TINY, lr=1e30)]
    made = reproduction(specs, tmp_path)
    kinds = [event.kind for event in made.run()]
    assert tries == [0, 1, 1, 2, 2, 3, 0]
    assert kinds.count("retried") == 2
    failed = made.outcome.failed
    assert list(failed) == [specs[1].id, specs[4].id]
    assert "out of memory" in failed[specs[1].id]
    assert "not finite" in failed[specs[4].id]
    assert len(made.outcome.finished) == 3
    again = reproduction(specs, tmp_path)
    list(again.run())
    assert tries[7:] == [1, 1]  # a run that diverged would do so again: it is listed only
    assert list(again.outcome.failed) == [specs[1].id, specs[4].id]


def test_a_run_that_failed_holds_no_memory_while_the_others_have_their_turn(tmp_path, monkeypatch):
    train, seen = module.train, []

    def failing(spec, **rest):
        progress = next(train(spec, **rest))
        seen.append(weakref.ref(progress.model))
        yield progress
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "train", failing)
    made, held = reproduction([TINY], tmp_path), []
    for event in made.run():
        if event.kind in ("retried", "failed"):
            del event
            gc.collect()
            held.append(seen[-1]() is not None)
    assert held == [False, False]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_signal_ends_it_also_if_the_last_checkpoint_cannot_be_written(
    tmp_path, monkeypatch, at_once
):
    def full(*given, **rest):
        raise OSError(errno.ENOSPC, "No space left on device")

    specs = [replace(TINY, epochs=50, seed=seed) for seed in range(3)]
    made = reproduction(specs, tmp_path, at_once=at_once).run()
    while next(made).kind != "epoch":
        pass
    monkeypatch.setattr(checkpoint, "save_file", full)
    os.kill(os.getpid(), signal.SIGTERM)  # SIGINT is ignored behind an `&`
    with pytest.raises(NotWritten):
        list(made)
    assert not RunStore(tmp_path).folder(specs[2].id).path.exists()


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_signal_after_the_last_step_of_a_run_lets_no_other_begin(tmp_path, monkeypatch, at_once):
    end = Journal.end

    def ask(journal, status, *more, **named):
        end(journal, status, *more, **named)
        if status == "finished":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Journal, "end", ask)
    specs = [replace(TINY, seed=seed, epochs=1 + seed) for seed in range(3)]
    made = reproduction(specs, tmp_path, at_once=at_once)
    with pytest.raises(Interrupted, match="SIGTERM"):
        list(made.run())
    assert made.outcome.finished == [specs[0].id]
    assert not RunStore(tmp_path).folder(specs[at_once].id).path.exists()


def made_until_the_alarm(specs, runs):
    """An hour is asked for; its alarm is set forward once the first epoch is over."""
    made = reproduction(specs, runs, seconds=3600)
    events = made.run()
    while next(events).kind != "epoch":
        pass
    left, every = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left <= 3600
    signal.setitimer(signal.ITIMER_REAL, 1e-3, every)
    list(events)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    return made


def test_when_the_time_is_up_the_running_run_is_saved_and_goes_on_later(tmp_path):
    specs = [replace(TINY, epochs=20_000), replace(TINY, seed=1)]
    made = made_until_the_alarm(specs, tmp_path)
    assert made.outcome.out_of_time
    assert made.outcome.left == [spec.id for spec in specs]
    folder = RunStore(tmp_path).folder(specs[0].id)
    assert folder.manifest().status == "interrupted"
    assert folder.checkpoint.exists()
    steps = max(row.step for row in folder.rows().rows)
    made_until_the_alarm(specs[:1], tmp_path)
    assert max(row.step for row in folder.rows().rows) > steps


def test_of_a_limited_time_only_runs_that_should_end_in_it_are_begun(tmp_path):
    long = replace(TINY, batch_norm=True, epochs=10_000_000)  # more than an hour anywhere
    behind_it = replace(TINY, batch_norm=True, norm_source=long.id)
    made = reproduction([long, behind_it, TINY], tmp_path, seconds=3600, whole_runs=True)
    list(made.run())
    assert made.outcome.finished == [TINY.id]
    assert made.outcome.left == [long.id, behind_it.id]
    assert made.outcome.late == [long.id]
    assert made.outcome.out_of_time
    assert not made.outcome.failed
    assert not RunStore(tmp_path).folder(long.id).path.exists()


@pytest.mark.parametrize(("processes", "most"), [(1, 2), (2, 1)])
def test_whole_runs_count_those_under_way_and_the_other_processes(
    tmp_path, monkeypatch, processes, most
):
    specs = [replace(TINY, seed=seed) for seed in range(4)]
    sharing = {"at_once": 4, "processes": processes, "seconds": 1e5, "whole_runs": True}
    made = reproduction(specs, tmp_path, **sharing)
    monkeypatch.setattr(made, "_estimated", lambda planned: 4e4)
    kinds = [event.kind for event in made.run()]
    assert kinds.index("epoch") == most  # so many began together
    assert made.outcome.finished == [spec.id for spec in specs]
    assert not made.outcome.out_of_time
    assert not made._left


def test_a_run_that_would_end_in_the_last_moment_is_not_begun(tmp_path, monkeypatch):
    made = reproduction([TINY], tmp_path, seconds=1e5, whole_runs=True)
    monkeypatch.setattr(made, "_estimated", lambda planned: 9.5e4)
    list(made.run())
    assert made.outcome.late == [TINY.id]


def test_a_dependent_run_whose_source_is_not_there_is_listed(tmp_path):
    dependent = replace(TINY, batch_norm=True, norm_source="digits-mlp-bn-sgd-l2-00000000")
    made = reproduction([dependent, TINY], tmp_path)
    list(made.run())
    assert made.outcome.finished == [TINY.id]
    assert "its source digits-mlp-bn-sgd-l2-00000000" in made.outcome.failed[dependent.id]


def test_checkpoints_are_kept_only_when_asked_for(tmp_path):
    list(reproduction([TINY], tmp_path, keep_checkpoints=True).run())
    checkpoint = RunStore(tmp_path).folder(TINY.id).checkpoint
    assert checkpoint.exists()
    again = reproduction([TINY], tmp_path)
    list(again.run())
    assert again.outcome.before == [TINY.id]
    assert not checkpoint.exists()


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_last_checkpoint_that_is_not_kept_is_not_written(tmp_path, monkeypatch, at_once):
    """Nor is an earlier one left behind."""
    epochs, save = [], checkpoint.Writer.save
    monkeypatch.setattr(
        checkpoint.Writer, "save", lambda w, state: (epochs.append(state["epoch"]), save(w, state))
    )
    list(reproduction([TINY], tmp_path, at_once=at_once, checkpoint_every=0.0).run())
    assert set(epochs) == {0, 1}
    steps = len(load("digits").train.labels) // TINY.batch_size
    assert len(epochs) == 2 * steps - 1
    folder = RunStore(tmp_path).folder(TINY.id)
    assert folder.is_finished()
    assert not folder.has_checkpoint()


def test_a_damaged_folder_is_one_runs_trouble(tmp_path):
    list(reproduction([TINY], tmp_path).run())
    (tmp_path / TINY.id / "manifest.json").write_text("{")
    made = reproduction([TINY, replace(TINY, seed=1)], tmp_path)
    made.check_data()
    list(made.run())
    assert "damaged" in made.outcome.failed[TINY.id]
    assert made.outcome.finished == [replace(TINY, seed=1).id]


def by_another_process(specs, runs):
    list(reproduction(specs, runs, keep_checkpoints=True).run())


@pytest.mark.parametrize("keep_checkpoints", [False, True])
def test_a_run_that_another_process_makes_before_its_turn_is_not_made_here(
    tmp_path, monkeypatch, keep_checkpoints
):
    train = module.train

    def late(spec, **rest):
        monkeypatch.setattr(module, "train", train)
        by_another_process([TINY], tmp_path)
        return train(spec, **rest)

    monkeypatch.setattr(module, "train", late)
    made = reproduction([TINY], tmp_path, keep_checkpoints=keep_checkpoints)
    assert [event.kind for event in made.run()] == ["begun"]
    assert made.outcome.before == [TINY.id]
    assert not made.outcome.finished
    assert RunStore(tmp_path).folder(TINY.id).checkpoint.exists() == keep_checkpoints


def test_a_run_that_another_process_takes_over_this_moment_is_made_elsewhere(tmp_path):
    folder = RunStore(tmp_path).folder(TINY.id)
    folder.path.mkdir()
    owner = folder.path / "owner.json"
    Ownership(owner).take()
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "started": 0}))  # it was killed
    taking_over = Ownership(owner.with_name(owner.name + ".takeover"))
    assert taking_over.take() is None
    made = reproduction([TINY], tmp_path)
    assert [event.kind for event in made.run()] == ["begun"]
    assert made.outcome.elsewhere == [TINY.id]
    assert not made.outcome.failed
    taking_over.release()


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("looks", [2, 3])
def test_a_source_that_ends_elsewhere_while_it_is_looked_at_is_waited_for(
    tmp_path, monkeypatch, looks, ends
):
    """Another process ends it, or dies in it, between any two looks at its lock."""
    source = replace(TINY, batch_norm=True)
    behind_it = replace(TINY, batch_norm=True, seed=1, norm_source=source.id)
    made = reproduction([source, behind_it], tmp_path, poll=0.01)
    store, locked, seen = RunStore(tmp_path), RunFolder.locked, []
    other = ExitStack()
    other.enter_context(store.folder(source.id).writing(source.resolved().to_toml()))

    def look(folder):
        if folder.id != source.id:
            return locked(folder)
        seen.append(folder.id)
        if len(seen) == looks:
            other.close()
            if ends:
                by_another_process([source], tmp_path)
        return locked(folder)

    monkeypatch.setattr(RunFolder, "locked", look)
    list(made.run())
    assert not made.outcome.failed
    assert not made.outcome.left
    assert not made.outcome.elsewhere
    assert behind_it.id in made.outcome.finished
