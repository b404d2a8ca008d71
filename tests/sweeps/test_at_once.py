"""Runs that take turns give what each gives alone."""

import os
from dataclasses import replace

import pytest
import torch

from decaylab.data import load
from decaylab.records import RunStore
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.training import RunSpec
from decaylab.training.build import load_run

SPEC = RunSpec(network="mlp", hidden=(8, 8), batch_norm=True, epochs=2, lr_drop_every=1)
SPECS = [
    replace(SPEC, optimizer="sgd", augment=True),
    replace(SPEC, optimizer="adam", decay="decoupled", weight_decay=0.1, seed=3),
    replace(SPEC, optimizer="kfac-g", refresh_every=3, invert_every=4, initialize_batches=2),
    replace(SPEC, optimizer="kfac-f", refresh_every=2, invert_every=6, inversion_lag=2),
    replace(SPEC, optimizer="sgd", lr=1e30, batch_norm=False),  # diverges
]


def made(folder, at_once):
    store = RunStore(folder)
    planned = [PlannedRun(spec.resolved(), (), ("test",)) for spec in SPECS]
    how = WorkerOptions(torch.device("cpu"), keep_checkpoints=True, at_once=at_once)
    reproduction = Worker(planned, store, how)
    reproduction._data["digits"] = load("digits")
    begun = {event.run.spec.id: event.kind for event in reproduction.run()}
    assert list(reproduction.outcome.failed) == [SPECS[-1].id]
    assert begun.keys() == {spec.id for spec in SPECS}
    return store


@pytest.mark.parametrize("at_once", [2, 5])
def test_taking_turns_changes_nothing(tmp_path, at_once):
    alone, together = made(tmp_path / "alone", 1), made(tmp_path / "together", at_once)
    for spec in SPECS:
        rows = [
            [(r.step, r.name, r.value) for r in store.folder(spec.id).rows().rows]
            for store in (alone, together)
        ]
        plain = [[row for row in run if "seconds" not in row[1]] for run in rows]
        assert repr(plain[0]) == repr(plain[1])  # repr: a diverged run's nan equals itself
        if spec is not SPECS[-1]:
            models = [load_run(store.folder(spec.id))[0] for store in (alone, together)]
            first, second = (model.state_dict() for model in models)
            assert all(torch.equal(first[name], second[name]) for name in first)


def test_cublas_is_prepared_before_data_go_to_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    planned = [PlannedRun(s.resolved(), (), ()) for s in (SPEC, replace(SPEC, deterministic=True))]
    for runs, prepared in ((planned[:1], ""), (planned, ":4096:8")):
        Worker(runs, RunStore(tmp_path), WorkerOptions(torch.device("cuda")))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == prepared


def test_the_record_says_how_many_runs_shared_the_device(tmp_path):
    how = WorkerOptions(torch.device("cpu"), at_once=2, processes=3)
    planned = [PlannedRun(SPECS[0].resolved(), (), ("test",))]
    reproduction = Worker(planned, RunStore(tmp_path), how)
    for _ in reproduction.run():
        pass
    assert RunStore(tmp_path).folder(SPECS[0].id).manifest().at_once == 6
