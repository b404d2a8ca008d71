"""How long runs take, from records."""

from dataclasses import replace

import pytest
import torch
from report.synthetic import CLOCK, write_run

from decaylab.paper.estimate import Estimator, device_seconds
from decaylab.records import RunStore
from decaylab.training import RunSpec

SPEC = RunSpec(data="cifar10", network="vgg16", optimizer="sgd", epochs=3, lr_drop_every=3)


def recorded(tmp_path, **changes):
    """A run of 30 steps: 7.5 s at work, and a minute from its start to its end."""
    store = RunStore(tmp_path)
    folder = write_run(store, SPEC, {"test/accuracy": 0.5}, tier="full", device="a GPU")
    with folder.writing(SPEC.to_toml()):
        folder.write_manifest(replace(folder.manifest(), **changes))
    return store, folder.manifest()


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [({}, 7.5), ({"at_once": 4, "resumes": 1}, 7.5), ({"at_once": 4}, None)],
)
def test_a_run_had_the_device_while_at_work_or_for_its_share(tmp_path, changes, seconds):
    _, manifest = recorded(tmp_path, **changes)
    expected = (manifest.updated - CLOCK) / 4 if seconds is None else seconds
    assert device_seconds(manifest, 7.5) == expected


def test_a_like_run_is_estimated_by_its_steps(tmp_path):
    store, _ = recorded(tmp_path)
    estimate = Estimator(store).of(replace(SPEC, epochs=6))
    assert estimate.recorded
    assert estimate.seconds == pytest.approx(6 * 390 * 7.5 / 30)


def test_a_gpu_is_not_estimated_by_a_cpu(tmp_path):
    store, _ = recorded(tmp_path, device="cpu")
    assert not Estimator(store).of(SPEC).recorded
    assert Estimator(store, torch.device("cpu")).of(SPEC).recorded
    assert not Estimator(store, torch.device("cuda")).of(SPEC).recorded


def test_of_runs_that_took_turns_the_share_counts_and_nothing_if_they_were_stopped(tmp_path):
    store, manifest = recorded(tmp_path, at_once=4)
    share = (manifest.updated - CLOCK) / 4
    assert Estimator(store).of(SPEC).seconds == pytest.approx(3 * 390 * share / 30)
    stopped, _ = recorded(tmp_path / "stopped", at_once=4, resumes=1)
    assert not Estimator(stopped).of(SPEC).recorded
