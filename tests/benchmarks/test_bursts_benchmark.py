"""benchmarks/bursts.py: what counts as a burst, and that a run of it ends in one."""

import json
from dataclasses import replace

import pytest

from decaylab.data import load


@pytest.fixture(scope="module")
def script(benchmark):
    return benchmark("bursts")


@pytest.mark.parametrize(
    ("accuracies", "wanted"),
    [
        ([1, 1, 0.98, 1], [(3, 20)]),
        ([0.95, 0.998, 0.98, 1], []),  # not fitted before it
        ([1, 1, 0.9, 0.4, 0.98, 1], [(3, 20)]),  # three epochs, one burst
        ([1, 0.9, 1, 0.9], [(2, 10), (4, 30)]),
        ([0.999, 0.99, 0.995], []),  # not lost
        ([0.999, 0.992, 0.989], [(3, 20)]),  # fitted once is enough
        ([1], []),
    ],
)
def test_a_burst_is_a_row_of_epochs_that_lose_what_was_fitted(script, accuracies, wanted):
    norms = [10 * epoch for epoch in range(1, 1 + len(accuracies))]
    assert script.bursts(norms, accuracies) == [
        {"epoch": epoch, "before": before} for epoch, before in wanted
    ]


def test_decay_ends_in_a_burst_and_scale_free_damping_does_not(script):
    """More decay and less damping than on the page, so that it comes within some seconds."""
    faster = {"weight_decay": 2.0, "damping": 3e-4, "epochs": 110, "lr_drop_every": 110}
    base, data = replace(script.BASE, **faster), load("digits")
    fixed, free = (
        script.measured(replace(base, **script.SETTINGS[setting]), data)
        for setting in ("fixed damping", "scale-free damping")
    )
    assert fixed["bursts"]
    assert not free["bursts"]
    assert len(fixed["norm"]) == 110
    first = fixed["bursts"][0]
    assert first["before"] in fixed["norm"]
    assert first["before"] < fixed["norm"][0]
    assert set(free["norm"]) == {free["norm"][0]}


def test_what_it_prints(script, capsys):
    script.main(["--seeds", "1", "--epochs", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [run["setting"] for run in found["runs"]] == list(script.SETTINGS)
    assert {len(run["norm"]) for run in found["runs"]} == {2}
    assert found["about"]["epochs"] == 2
