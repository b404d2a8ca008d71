"""What runs of the suite measure beyond their losses, against the probes themselves."""

import pytest

from decaylab import probes
from decaylab.data import evaluation_batches, load
from decaylab.paper import observe
from decaylab.training import Execution, RunSpec, train

SETTINGS = {"data": "digits", "network": "mlp", "hidden": (24, 12), "epochs": 3, "batch_norm": True}


def rows_of(optimizer: str, wanted: list[str]):
    """The run's last progress, and the rows that were observed, by call."""
    seen, measure = [], observe.observer(wanted)

    def watched(run):
        seen.append(measure(run))
        return seen[-1]

    spec = RunSpec(**SETTINGS, optimizer=optimizer)
    how = Execution(observe=watched)
    *_, last = train(spec, data=load("digits"), execution=how)
    return last, seen


def test_damping_at_the_start_and_at_the_end_of_kfac_runs(monkeypatch):
    last, seen = rows_of("kfac-g", ["damping"])
    assert [bool(rows) for rows in seen] == [True, False, False, True]
    kfac = last.optimizer
    wanted = probes.effective_damping(last.model, kfac.factors(), kfac.dampings())
    for layer, share in wanted.layers.items():
        assert seen[-1][f"second_order_share/{layer}"] == pytest.approx(share)
        damping = seen[-1][f"effective_damping/{layer}"]
        assert damping == pytest.approx(wanted.details[layer].effective)
    assert "second_order_share" not in seen[-1]  # a total of some layers would say little
    monkeypatch.setattr(observe, "LONGEST_SIDE", 30)
    _, short = rows_of("kfac-g", ["damping"])
    left = {name.split("/")[1] for name in short[-1]}
    assert left == {"features.3", "head"}  # the first layer's factor has 65 rows


def test_there_is_no_damping_without_kfac():
    _, seen = rows_of("sgd", ["damping"])
    assert seen == [{}] * 4


def test_the_jacobian_at_the_end_on_all_test_images(monkeypatch):
    monkeypatch.setattr(observe, "CHUNK", 7)  # more than one batch, and a last one that is smaller
    last, seen = rows_of("sgd", ["jacobian"])
    assert seen[:-1] == [{}] * 3
    data = load("digits")
    pixels = {"batch_size": len(data.test), "mean": data.mean, "std": data.std}
    ((images, _),) = evaluation_batches(data.test, **pixels)
    norms = probes.jacobian_norms(last.model, images)
    assert seen[-1] == {
        "jacobian_norm": pytest.approx(float(norms.mean()), rel=1e-5),
        "jacobian_norm_median": pytest.approx(float(norms.median()), rel=1e-5),
    }
