"""How long runs take, from records."""

import json
from dataclasses import replace

import pytest
import torch
from report.synthetic import CLOCK, write_run

from decaylab.networks import NETWORKS
from decaylab.optim.decay import OPTIMIZERS
from decaylab.records import RunStore
from decaylab.sweeps.estimate import STARTUP, Estimator, checked_estimates, steps_per_epoch
from decaylab.sweeps.run_index import device_seconds
from decaylab.training import RunSpec
from decaylab.training.spec import PUBLISHED

SPEC = RunSpec(data="cifar10", network="vgg16", optimizer="sgd", epochs=3, lr_drop_every=3)
START = STARTUP["cuda"]


def foretold(steps, seconds):
    """By a run of 30 steps that took so long, its start among them."""
    return START + steps * (seconds - START) / 30


def recorded(tmp_path, **changes):
    """A run of 30 steps: 7.5 s at work, and a minute from its start to its end."""
    store = RunStore(tmp_path)
    folder = write_run(store, SPEC, {"test/accuracy": 0.5}, tier="full", device="a GPU")
    with folder.writing(SPEC.to_toml()):
        folder.write_manifest(replace(folder.manifest(), **changes))
    return store, folder.manifest()


@pytest.mark.parametrize("changes", [{}, {"at_once": 4, "resumes": 1}])
def test_a_run_had_the_device_while_at_work(tmp_path, changes):
    _, manifest = recorded(tmp_path, **changes)
    assert device_seconds([(manifest, 7.5)]) == [7.5]


def test_of_a_shared_device_a_run_has_its_part_of_each_moment(tmp_path):
    """Two from 0 to 40 s and one from 30 to 60 s; one on another device, and one that is alone."""
    _, manifest = recorded(tmp_path)

    def run(start, end, **changes):
        times = {"started": CLOCK + start, "updated": CLOCK + end, "at_once": 3}
        return (replace(manifest, **{**times, **changes}), 7.5)

    other = run(0, 60, device="another GPU")
    runs = [run(0, 40), run(0, 40), run(30, 60), other, run(0, 60, at_once=1)]
    expected = [15 + 10 / 3, 15 + 10 / 3, 10 / 3 + 20, 60, 7.5]
    assert device_seconds(runs) == pytest.approx(expected)
    assert sum(device_seconds(runs[:3])) == pytest.approx(60)  # all the time there is


def test_two_devices_of_a_kind_are_not_taken_for_one(tmp_path):
    """Four runs at the same time, two each: at_once says that two shared a device."""
    _, manifest = recorded(tmp_path)
    run = replace(manifest, at_once=2, started=CLOCK, updated=CLOCK + 10)
    assert device_seconds([(run, 7.5)] * 4) == [5.0] * 4


def test_a_like_run_is_estimated_by_its_steps(tmp_path):
    store, _ = recorded(tmp_path)
    estimate = Estimator(store).of(replace(SPEC, epochs=6))
    assert estimate.recorded
    assert estimate.seconds == pytest.approx(foretold(6 * 390, 7.5))


def test_what_was_never_measured_is_estimated_too(tmp_path, monkeypatch):
    estimator = Estimator(RunStore(tmp_path))
    monkeypatch.setitem(OPTIMIZERS, "never_measured", "kfac")
    monkeypatch.setitem(PUBLISHED, "never_measured", PUBLISHED["kfac-g"])
    for data in ("digits", "cifar10"):
        own, known = (
            RunSpec(data=data, network="mlp", optimizer=name)
            for name in ("never_measured", "kfac-g")
        )
        assert estimator.of(own) == estimator.of(known)
    deep = [estimator.of(replace(SPEC, network=n)).seconds for n in NETWORKS if n.startswith("res")]
    assert sorted(set(deep)) == deep  # from 20 layers to 56


def test_a_gpu_is_not_estimated_by_a_cpu(tmp_path):
    store, _ = recorded(tmp_path, device="cpu")
    assert not Estimator(store).of(SPEC).recorded
    on_cpu = Estimator(store, torch.device("cpu")).of(SPEC)
    start = STARTUP["cpu"]  # nothing is compiled or captured there
    assert on_cpu.recorded
    assert on_cpu.seconds == pytest.approx(start + 3 * 390 * (7.5 - start) / 30)
    assert not Estimator(store, torch.device("cuda")).of(SPEC).recorded


def test_of_runs_that_took_turns_the_share_counts_and_nothing_if_they_were_stopped(tmp_path):
    store, manifest = recorded(tmp_path, at_once=4)
    alone = manifest.updated - manifest.started
    assert Estimator(store).of(SPEC).seconds == pytest.approx(foretold(3 * 390, alone))
    stopped, _ = recorded(tmp_path / "stopped", at_once=4, resumes=1)
    assert not Estimator(stopped).of(SPEC).recorded


@pytest.mark.parametrize("nested", ["searched/runs", "repeats"])
def test_runs_of_other_stores_count_where_they_shared_the_device(tmp_path, nested):
    """Two at the same time, each in a store of its own: of either, half of its time."""
    store, manifest = recorded(tmp_path, at_once=2)
    other, _ = recorded(tmp_path / nested, at_once=2)
    half = (manifest.updated - manifest.started) / 2
    for one in (store, other):
        assert Estimator(one).of(SPEC).seconds == pytest.approx(foretold(3 * 390, half))


def test_what_slowed_some_of_the_like_runs_is_not_foretold(tmp_path):
    """Four as long as each other, three of them slowed by company: what the first third took."""
    store = timed_store(tmp_path, [12.0, 30.0, 12.0, 60.0, 12.0, 12.0, 45.0])
    assert Estimator(store).of(SPEC).seconds == pytest.approx(foretold(3 * 390, 12.0))


@pytest.mark.parametrize(
    "change", [{"optimizer": "adam"}, {"data": "cifar100"}, {"lr": 0.5}, {"augment": True}]
)
def test_steps_that_take_as_long_foretell_each_other(tmp_path, change):
    store = timed_store(tmp_path, [12.0])
    like = Estimator(store).of(replace(SPEC, **change))
    assert (like.recorded, like.seconds) == (True, pytest.approx(foretold(3 * 390, 12.0)))


@pytest.mark.parametrize(
    "change", [{"optimizer": "kfac-g"}, {"data": "mnist"}, {"batch_norm": True}, {"width": 0.5}]
)
def test_steps_that_do_not_foretell_nothing(tmp_path, change):
    store = timed_store(tmp_path, [12.0])
    assert not Estimator(store).of(replace(SPEC, **change)).recorded


def test_a_search_goes_by_its_own_runs_first_and_by_those_of_its_folder_else(tmp_path):
    timed_store(tmp_path, [12.0])
    searches = RunStore(tmp_path / "searched" / "runs")
    assert Estimator(searches).of(SPEC).seconds == pytest.approx(foretold(3 * 390, 12.0))
    timed_store(searches.root, [9.0], first=CLOCK + 1e6)
    assert Estimator(searches).of(SPEC).seconds == pytest.approx(foretold(3 * 390, 9.0))


def timed_store(tmp_path, seconds, first=CLOCK):
    """Runs of 30 steps, one after another, that took so long."""
    store = RunStore(tmp_path)
    for seed, taken in enumerate(seconds):
        spec = replace(SPEC, seed=seed)
        folder = write_run(store, spec, {"test/accuracy": 0.5}, tier="full", device="a GPU")
        began = first + 1000 * seed
        times = {"started": began, "at_once": 2}
        path = folder.path / "manifest.json"  # `write_manifest` sets the time of the update
        entry = json.loads(path.read_text()) | times | {"updated": began + taken}
        path.write_text(json.dumps(entry))
    return store


def test_recorded_runs_are_checked_against_estimates_that_do_not_know_them(tmp_path):
    store = timed_store(tmp_path, [10.0, 20.0, 60.0])
    checks = {check.spec.seed: check for check in checked_estimates(store)}
    likely = [20 + 40 / 3, 10 + 50 / 3, 10 + 10 / 3]  # a third of the way between the other two
    assert [checks[seed].from_like for seed in range(3)] == pytest.approx(likely)
    assert [checks[seed].seconds for seed in range(3)] == pytest.approx([10.0, 20.0, 60.0])
    unknown = replace(SPEC, epochs=1), RunStore(tmp_path / "none")
    per_step = (Estimator(unknown[1]).of(unknown[0]).seconds - START) / steps_per_epoch(SPEC)
    assert checks[0].from_table == pytest.approx(START + 30 * per_step)
