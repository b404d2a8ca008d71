"""The loop of the authors: last batch kept, drops by steps, K-FAC refreshed after a step."""

import copy
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from torch.nn import functional as F

from decaylab.data import load
from decaylab.errors import Misplaced
from decaylab.records import RunStore
from decaylab.records.recording import read_recording
from decaylab.training import Execution, RunSpec, train, train_to_end
from decaylab.training.build import build_batches, build_model
from decaylab.training.run import TrainingRun

SPEC = RunSpec(hidden=(16,), batch_size=256, epochs=3, lr=0.1, keep_last_batch=True,
               lr_drop_steps=8)  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_it_is_the_plain_loop_over_all_images_with_drops_inside_an_epoch(digits):
    model = build_model(SPEC, digits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = build_batches(SPEC, digits)
    seen, step = [], 0
    for _ in range(3):
        batches.begin_epoch()
        for index in range(6):  # 1,437 images: five batches of 256 and one of 157
            images, labels = batches.batch(index)
            optimizer.param_groups[0]["lr"] = 0.1 / 10 ** (step // 8)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            seen.append(len(labels))
            step += 1
    assert seen == [256, 256, 256, 256, 256, 157] * 3
    last = train_to_end(SPEC, data=digits)
    assert last.step == 18
    for key, value in model.state_dict().items():
        torch.testing.assert_close(last.model.state_dict()[key], value, rtol=1e-5, atol=1e-6)
    assert last.values["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("stopped_after", [None, 7, 10, 17])
def test_drops_inside_an_epoch_are_recorded(digits, tmp_path, stopped_after):
    """Drops after 8 and 16 steps, epochs of 6: also where the run is stopped before or after."""
    spec = replace(SPEC, weight_decay=0.5, decay="decoupled")
    store = RunStore(tmp_path)
    how = Execution(every_step=True, probes=("decay_exposure",))
    if stopped_after is not None:
        training = train(spec, data=digits, store=store, execution=how)
        while next(training).step < stopped_after:
            pass
        training.close()
    train_to_end(spec, data=digits, store=store, execution=how)
    recording = read_recording(store.folder(spec.id))
    assert [(step, s.lr) for step, s in recording.settings["head"]] == [
        (1, pytest.approx(0.1)), (9, pytest.approx(0.01)), (17, pytest.approx(0.001))
    ]  # fmt: skip
    rates = [0.1 / 10 ** (step // 8) for step in range(18)]
    for step, exposure in recording.series("decay_exposure/head"):
        assert exposure == pytest.approx(0.5 * sum(rates[:step]), rel=1e-6, abs=1e-12)


def test_stopped_in_an_epoch_it_goes_on_with_the_learning_rate_of_its_step(digits, tmp_path):
    store = RunStore(tmp_path)
    training = train(SPEC, data=digits, store=store)
    next(training)  # an epoch is done: six steps of the eight before the drop
    training.close()
    *_, last = train(SPEC, data=digits, store=store)
    whole = train_to_end(SPEC, data=digits)
    for key, value in whole.model.state_dict().items():
        assert torch.equal(last.model.state_dict()[key], value)


def test_the_accuracy_of_an_epoch_is_over_all_its_images(digits):
    last = train_to_end(replace(SPEC, epochs=1), data=digits)
    hits = last.values["train/running_accuracy"] * 1437
    assert hits == pytest.approx(round(hits), abs=1e-6)


def second_inputs(model, images):
    """A of the last layer: the mean of a a' over the images, with a 1 for the bias."""
    with torch.no_grad():
        a = model.features(images.flatten(1))
    a = torch.cat([a, torch.ones(len(a), 1)], dim=1)
    return a.T @ a / len(a)


def test_factors_are_measured_after_the_step_on_its_batch(digits):
    spec = replace(SPEC, optimizer="kfac-g", refresh_every=2, invert_every=4, momentum=0.0,
                   initialize_batches=0, late_refresh=True, lr=0.01).resolved()  # fmt: skip
    run = TrainingRun(spec, digits)
    run.begin_epoch()
    images, _ = run.batches.batch(0)
    before = copy.deepcopy(run.model)
    run.train_step()
    # the first step's own refresh sets them, at the old weights; then 0.95 of that, and the new
    old, new = second_inputs(before, images), second_inputs(run.model, images)
    assert not torch.allclose(old, new, rtol=1e-3)
    found = run.optimizer.factors()["head"].A
    torch.testing.assert_close(found, 0.95 * old + 0.05 * new, rtol=1e-4, atol=1e-5)
    run.train_step()  # the second is no refresh
    assert torch.equal(run.optimizer.factors()["head"].A, found)
    run.train_step()
    third, _ = run.batches.batch(2)
    expected = 0.95 * found + 0.05 * second_inputs(run.model, third)
    torch.testing.assert_close(run.optimizer.factors()["head"].A, expected, rtol=1e-4, atol=1e-5)


def test_only_kfac_refreshes_after_a_step():
    with refuses(Misplaced, settings=["late_refresh"]):
        replace(SPEC, late_refresh=True)


def test_a_run_as_before_has_the_id_as_before():
    plain = RunSpec(data="cifar10", network="vgg16", batch_norm=True, optimizer="kfac-f",
                    lr=0.001, decay="decoupled", weight_decay=1.0, precision="bf16")  # fmt: skip
    fields = {"keep_last_batch": False, "lr_drop_steps": 0, "late_refresh": False}
    assert replace(plain, **fields).id == plain.id
    ids = {
        replace(plain, **{name: value}).id
        for name, value in {
            "keep_last_batch": True,
            "lr_drop_steps": 16000,
            "late_refresh": True,
        }.items()
    }
    assert len(ids | {plain.id}) == 4
