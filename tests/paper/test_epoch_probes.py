"""What runs of the suite measure beyond their losses, against the probes themselves."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decaylab import probes
from decaylab.data import Batches, evaluation_batches, load
from decaylab.paper import epoch_probes
from decaylab.training import Execution, RunSpec, train

SETTINGS = {"data": "digits", "network": "mlp", "hidden": (24, 12), "epochs": 3, "batch_norm": True}


def rows_of(optimizer: str, wanted: list[str]):
    """The run's last progress, and the rows that were observed, by call."""
    seen, measure = [], epoch_probes.epoch_probe(wanted)

    def watched(run):
        seen.append(measure(run))
        return seen[-1]

    spec = RunSpec(**SETTINGS, optimizer=optimizer)
    how = Execution(epoch_probe=watched)
    *_, last = train(spec, data=load("digits"), execution=how)
    return last, seen


def test_damping_after_each_tenth_of_kfac_runs(monkeypatch):
    last, seen = rows_of("kfac-g", ["damping"])
    assert all(seen)  # of so few epochs, each is a tenth
    kfac = last.optimizer
    wanted = probes.effective_damping(last.model, kfac.factors(), kfac.dampings())
    for layer, share in wanted.layers.items():
        assert seen[-1][f"second_order_share/{layer}"] == pytest.approx(share)
        damping = seen[-1][f"effective_damping/{layer}"]
        assert damping == pytest.approx(wanted.details[layer].effective)
    assert "second_order_share" not in seen[-1]  # a total of some layers would say little
    monkeypatch.setattr("decaylab.probes.damping.LONGEST_SIDE", 30)
    _, short = rows_of("kfac-g", ["damping"])
    left = {name.split("/")[1] for name in short[-1]}
    assert left == {"features.3", "head"}  # the first layer's factor has 65 rows


def test_there_is_no_damping_without_kfac():
    _, seen = rows_of("sgd", ["damping"])
    assert seen == [{}] * 4


def test_the_jacobian_at_the_end_on_all_test_images(monkeypatch):
    monkeypatch.setattr(
        "decaylab.probes.jacobian.CHUNK", 7
    )  # more than one batch, and a last one that is smaller
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


def test_the_pass_in_train_mode_is_that_of_the_plain_loop(monkeypatch):
    """On the batches it drew: with each batch's own statistics, and the running ones untouched."""
    drawn = []

    class Seen(Batches):
        def batch(self, index):
            drawn.append(super().batch(index))
            return drawn[-1]

    measured = []

    def passed(run):
        if not run.step:
            return {}
        running = [buffer.clone() for buffer in run.model.buffers()]
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["decaylab.training.build"], "Batches", Seen)
            rows = epoch_probes.epoch_probe(["train_pass"])(run)
        assert all(map(torch.equal, running, run.model.buffers()))
        assert run.model.training
        again = copy.deepcopy(run.model).train()
        with torch.no_grad():
            losses = [float(F.cross_entropy(again(images), labels)) for images, labels in drawn]
        measured.append((rows["train/pass_loss"], sum(losses) / len(losses)))
        drawn.clear()
        return rows

    spec = RunSpec(**SETTINGS, batch_size=256)
    *_, last = train(spec, data=load("digits"), execution=Execution(epoch_probe=passed))
    assert len(measured) == 3
    for got, wanted in measured:
        assert got == pytest.approx(wanted, rel=1e-5)
    assert "train/pass_accuracy" in last.values


def test_measuring_a_pass_changes_nothing_of_the_run():
    spec = RunSpec(**SETTINGS, augment=True)
    how = Execution(epoch_probe=epoch_probes.epoch_probe(["train_pass"]))
    *_, measured = train(spec, data=load("digits"), execution=how)
    *_, plain = train(spec, data=load("digits"))
    for one, other in zip(
        measured.model.state_dict().values(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_without_batch_norm_the_pass_is_the_evaluation():
    spec = RunSpec(**{**SETTINGS, "batch_norm": False})
    how = Execution(epoch_probe=epoch_probes.epoch_probe(["train_pass"]))
    *_, last = train(spec, data=load("digits"), execution=how)
    assert last.values["train/pass_loss"] == last.values["train/loss"]
    assert last.values["train/pass_accuracy"] == last.values["train/accuracy"]


def test_the_course_of_the_jacobian_is_every_ten_epochs(monkeypatch):
    monkeypatch.setattr(epoch_probes, "COURSE_EVERY", 2)
    _, seen = rows_of("sgd", ["jacobian_course", "jacobian"])
    assert [sorted(rows) for rows in seen[:3]] == [
        ["jacobian_norm_2000"],
        [],
        ["jacobian_norm_2000"],
    ]
    monkeypatch.setattr(epoch_probes, "COURSE_EVERY", 3)
    _, seen = rows_of("sgd", ["jacobian_course", "jacobian"])
    # digits have fewer than 2,000 test images: all of them
    assert seen[-1]["jacobian_norm_2000"] == pytest.approx(seen[-1]["jacobian_norm"], rel=1e-5)


def test_the_first_running_variance():
    last, seen = rows_of("sgd", ["running_variance"])
    variance = next(m for m in last.model.modules() if isinstance(m, nn.BatchNorm1d)).running_var
    assert seen[-1] == {
        "running_variance_least": float(variance.min()),
        "running_variance_largest": float(variance.max()),
    }
    assert seen[0] == {"running_variance_least": 1.0, "running_variance_largest": 1.0}
