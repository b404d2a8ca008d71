"""benchmarks/burst_branches.py: a branch in the run's own order and precision is the run."""

from dataclasses import replace

import pytest

from decaylab.data import load
from decaylab.records import RunStore
from decaylab.training import RunSpec, train_to_end

SPEC = RunSpec(
    **{"hidden": (16,), "batch_norm": True, "optimizer": "kfac-f", "batch_size": 256, "epochs": 4},
    **{"decay": "decoupled", "weight_decay": 0.1, "refresh_every": 2, "invert_every": 4},
)


@pytest.fixture(scope="module")
def script(benchmark):
    return benchmark("burst_branches")


def test_its_own_order_is_the_uninterrupted_run_and_another_is_not(script, tmp_path):
    data = load("digits")
    store = RunStore(tmp_path / "whole")
    whole = train_to_end(SPEC, data=data, store=store)
    losses = [row.value for row in store.folder(SPEC.id).rows().series("test/loss")]
    found = list(script.branches(SPEC, 2, data, tmp_path, precisions=["fp32"], orders=[0, 1]))
    assert [branch["order"] for branch in found] == [0, 1]
    own, other = ([epoch["test/loss"] for epoch in branch["epochs"]] for branch in found)
    assert own == losses[2:]
    assert other != losses[2:]
    assert found[0]["epochs"][-1]["epoch"] == 4
    again = script.branches(SPEC, 2, data, tmp_path, precisions=["fp32"], known=found[:1])
    assert next(again) == found[1]  # what is there is not made again
    first = whole.model.features[0].weight.detach().double()
    assert found[0]["epochs"][-1]["norm"] == pytest.approx(float(first.norm()), rel=1e-6)


def test_the_run_it_looks_into_is_that_of_table_1(script):
    spec = script.burst_cell()
    assert spec.id.endswith("a754ae8b")  # in docs/reproduction.md
    assert replace(spec, seed=1).id.endswith("ba3527da")
