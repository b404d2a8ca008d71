"""Runs that take turns in one process."""

import weakref
from dataclasses import replace

import pytest
import torch

from decaylab.data import load
from decaylab.errors import Diverged
from decaylab.records import RunStore
from decaylab.training import (
    Execution,
    RunSpec,
    TrainingRun,
    interleave,
    train,
    train_to_end,
)

BASE = RunSpec(hidden=(8, 8), batch_norm=True, batch_size=256, epochs=2, lr_drop_every=1)
SPECS = {
    "sgd": replace(BASE, augment=True),
    "adam": replace(BASE, optimizer="adam", decay="decoupled", weight_decay=0.1, seed=3, epochs=3),
    "kfac": replace(BASE, optimizer="kfac-g", refresh_every=3, invert_every=4, inversion_lag=2),
    "wild": replace(BASE, lr=1e30, batch_norm=False),
}
HOW = Execution(every_step=True, at_once=4)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def turns(data, store=None):
    return interleave(
        {name: train(spec, data=data, store=store, execution=HOW) for name, spec in SPECS.items()}
    )


def test_each_gives_what_it_gives_alone_and_one_that_diverges_touches_nobody(digits):
    order, last = [], {}
    for name, given in turns(digits):
        order.append(name)
        last[name] = given
    assert order[:8] == [*SPECS, *SPECS]
    assert isinstance(last.pop("wild"), Diverged)
    for name, progress in last.items():
        alone = train_to_end(SPECS[name], data=digits)
        assert progress.kind == "finished"
        for key, value in alone.model.state_dict().items():
            assert torch.equal(progress.model.state_dict()[key], value), (name, key)


def test_an_evaluation_is_under_way_while_the_others_take_their_turns(digits, monkeypatch):
    """One reads its own only when all have begun theirs."""
    said = []
    launch, measure = TrainingRun.launch_evaluation, TrainingRun.measure
    monkeypatch.setattr(
        TrainingRun,
        "launch_evaluation",
        lambda run, **how: (said.append(("begins", run.spec.seed)), launch(run, **how))[1],
    )
    monkeypatch.setattr(
        TrainingRun, "measure", lambda run: (said.append(("reads", run.spec.seed)), measure(run))[1]
    )
    specs = [replace(BASE, seed=seed, epochs=1) for seed in (0, 1)]
    last = dict(interleave({s: train(s, data=digits, execution=HOW) for s in specs}))
    assert said == [("begins", 0), ("begins", 1), ("reads", 0), ("reads", 1)]
    for spec, progress in last.items():
        alone = train_to_end(spec, data=digits).values
        assert progress.values | {"train/seconds": 0} == alone | {"train/seconds": 0}


def test_leaving_between_the_last_step_and_its_rows_loses_nothing(digits, tmp_path):
    spec, store = SPECS["kfac"], RunStore(tmp_path)
    for leave_at in (5, 10):  # the last steps of both epochs
        for progress in train(spec, data=digits, store=store, execution=HOW):
            if progress.step == leave_at:
                break
        assert progress.kind == "step"
        del progress
    last = train_to_end(spec, data=digits, store=store)
    alone = train_to_end(spec, data=digits)
    assert last.values | {"train/seconds": 0} == alone.values | {"train/seconds": 0}
    assert [row.step for row in store.folder(spec.id).rows().series("test/loss")] == [5, 10]


def test_leaving_saves_all(digits, tmp_path):
    store, leaving = RunStore(tmp_path), turns(digits, RunStore(tmp_path))
    for _ in range(6):
        next(leaving)
    leaving.close()
    for name in ("sgd", "adam", "kfac"):
        manifest = store.folder(SPECS[name].id).manifest()
        assert (manifest.status, manifest.at_once) == ("interrupted", 4)
        assert store.folder(SPECS[name].id).checkpoint.exists()


def test_an_interruption_ends_all(digits, tmp_path):
    def interrupted():
        yield from train(SPECS["sgd"], data=digits, execution=HOW)
        raise KeyboardInterrupt

    store = RunStore(tmp_path)
    other = train(SPECS["adam"], data=digits, store=store, execution=HOW)
    with pytest.raises(KeyboardInterrupt):
        list(interleave({1: interrupted(), 2: other}))
    assert store.folder(SPECS["adam"].id).manifest().status == "interrupted"


def test_every_run_is_closed_also_if_closing_one_fails():
    closed = []

    def run(name):
        try:
            while True:
                yield name
        finally:
            closed.append(name)
            if name == "full":
                raise OSError("no space left on the disk")

    runs = {name: run(name) for name in ("first", "full", "last")}
    turns = interleave(runs)
    assert [next(turns)[0] for _ in range(4)] == ["first", "full", "last", "first"]
    with pytest.raises(OSError, match="no space"):
        turns.close()
    assert sorted(closed) == sorted(runs)


def test_a_run_may_join_and_one_that_ended_is_taken_out():
    runs = {"short": iter("a"), "long": iter("abc")}
    given = []
    for name, letter in interleave(runs):
        given.append((name, letter))
        if letter == "b":
            assert list(runs) == ["long"]
            runs["late"] = iter("xy")
    assert [letter for name, letter in given if name == "late"] == ["x", "y"]
    assert given[3:] == [("long", "c"), ("late", "x"), ("late", "y")]
    assert not runs


def test_an_error_that_is_kept_does_not_keep_its_run_in_memory():
    held = []

    def run():
        weights = torch.zeros(3)
        held.append(weakref.ref(weights))
        yield "step"
        raise MemoryError(len(weights))

    given = dict(interleave({"only": run()}))
    assert isinstance(given["only"], MemoryError)
    assert held[0]() is None


def test_reading_the_state_at_work_does_not_make_a_run_wait_for_the_outer_stream(digits):
    run = TrainingRun(BASE, digits)
    run._behind = False
    with run.at_work():
        run.state_dict()
    assert not run._behind
    run.state_dict()
    assert run._behind
