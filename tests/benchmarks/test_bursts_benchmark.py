"""benchmarks/bursts.py: what counts as a burst, and that a run of it ends in one."""

import json
from dataclasses import replace

import pytest

from decaylab.data import load


@pytest.fixture(scope="module")
def script(benchmark):
    return benchmark("bursts")


@pytest.mark.parametrize(
    ("norms", "accuracies", "wanted"),
    [
        ([3, 2, 4, 3], [1, 1, 1, 1], [(3, 2, 4)]),
        ([3, 2, 4, 3], [0.5, 0.9, 1, 1], []),  # not fitted before it
        ([3, 2, 4, 6, 5], [1, 1, 0.3, 0.4, 1], [(3, 2, 6)]),  # two epochs, one burst
        ([3, 4, 3, 4], [1, 1, 1, 1], [(2, 3, 4), (4, 3, 4)]),
        ([2, 2.19, 2.4], [1, 1, 1], []),  # less than a tenth each
        ([3], [1], []),
    ],
)
def test_a_burst_is_a_row_of_epochs_that_lengthen_a_fitted_layer(script, norms, accuracies, wanted):
    assert script.bursts(norms, accuracies) == [
        {"epoch": epoch, "before": before, "after": after} for epoch, before, after in wanted
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


def test_what_it_prints(script, capsys):
    script.main(["--seeds", "1", "--epochs", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [run["setting"] for run in found["runs"]] == list(script.SETTINGS)
    assert {len(run["norm"]) for run in found["runs"]} == {2}
    assert found["about"]["epochs"] == 2
