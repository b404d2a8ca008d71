import json
import math
import signal
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from typer.testing import CliRunner

from decaylab import probes
from decaylab.attribution import SIZE_FREE_ROTATION, recorded_arms
from decaylab.attribution.arms import WITH, WITHOUT, Plan, norms_alone
from decaylab.attribution.branches import branch_from, train_to
from decaylab.attribution.progress import ArmProgress
from decaylab.attribution.reasons import Fault
from decaylab.attribution.recorded_arms import (
    METRICS,
    OutOfTime,
    arm_spec,
    arm_store,
    attribute_spec,
)
from decaylab.cli import app
from decaylab.data import evaluation_batches, load
from decaylab.errors import (
    BadValue,
    Lacks,
    Mismatch,
    Misplaced,
    NotFinished,
    OutOfRange,
    UnknownName,
)
from decaylab.records import RunStore
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import Execution, RunSpec, TrainingRun, train, train_to_end
from decaylab.training.held_layers import select
from decaylab.training.interventions import Intervention
from decaylab.training.paths import LayerPaths, Targets, paths_file

CPU = WorkerOptions(device=torch.device("cpu"), keep_checkpoints=True)
SPEC = RunSpec(
    data="digits",
    network="mlp",
    hidden=(16,),
    batch_norm=True,
    momentum=0.0,
    lr=0.3,
    decay="l2",
    weight_decay=0.05,
    decay_scope="conv",
    bias=False,
    epochs=2,
    lr_drop_every=2,
)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def attributed(tmp_path_factory):
    store = arm_store(tmp_path_factory.mktemp("runs"))
    extra = [SIZE_FREE_ROTATION]
    return store, attribute_spec(SPEC, store=store, options=CPU, seeds=(0, 1), extra=extra)


def test_the_arms_of_a_spec_are_runs(attributed):
    store, result = attributed
    assert len(store.runs()) == 2 * 5
    assert all(folder.is_finished() for folder in store.runs())
    assert result.layers == ("features.0",)
    assert set(result.metrics) == set(METRICS)
    assert not result.unused
    assert result.steps == 2 * math.ceil(1437 // 128)
    assert max(result.worst_errors().values()) < 1e-5


def test_the_corners_are_ordinary_runs(attributed, digits, tmp_path):
    store, _ = attributed
    last = train_to_end(SPEC, data=digits, store=RunStore(tmp_path))
    rows = store.folder(SPEC.id).rows().rows
    recorded = {row.name: row.value for row in rows if row.step == last.step}
    for name in ("test/loss", "train/loss", "test/accuracy"):
        assert recorded[name] == last.values[name]


def test_nothing_is_trained_twice(attributed, capsys):
    store, result = attributed
    again = attribute_spec(
        SPEC,
        store=store,
        options=CPU,
        seeds=(0, 1),
        extra=[SIZE_FREE_ROTATION],
    )
    assert not capsys.readouterr().err
    assert again.shares == result.shares


def test_under_batch_norm_the_rotation_gives_back_the_run_with_decay(attributed):
    """In train mode: in eval mode running statistics lag behind sizes that change fast."""
    store, _ = attributed
    plan = Plan(("size", "rotation"))

    def running_loss(arm, seed):
        rows = store.folder(arm_spec(SPEC, arm, plan, seed).id).rows().rows
        return [row.value for row in rows if row.name == "train/running_loss"][-1]

    for seed in (0, 1):
        decayed, free = running_loss(WITH, seed), running_loss(WITHOUT, seed)
        rotation, size = (running_loss(plan.crossed([p]), seed) for p in ("rotation", "size"))
        assert abs(rotation - decayed) < 0.1 * abs(decayed - free)
        assert abs(size - free) < 0.1 * abs(decayed - free)


def test_an_arm_that_was_stopped_goes_on_bit_for_bit(attributed, digits, tmp_path):
    store, _ = attributed
    arm = arm_spec(
        SPEC, Plan(("size", "rotation")).crossed(["rotation"]), Plan(("size", "rotation")), 0
    )
    whole = LayerPaths.load(paths_file(store.folder(arm.id)))
    copy = RunStore(tmp_path)
    for source in set(arm.followed.values()):
        target = copy.folder(source).path
        target.mkdir(parents=True)
        for file in store.folder(source).path.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    training = train(arm, data=digits, store=copy, execution=Execution(every_step=True))
    for progress in training:
        if progress.step == 5:
            break
    training.close()
    train_to_end(arm, data=digits, store=copy)
    resumed = LayerPaths.load(paths_file(copy.folder(arm.id)))
    assert torch.equal(resumed.sizes, whole.sizes)
    assert torch.equal(resumed.angles, whole.angles)


def test_a_reference_that_was_begun_without_its_paths_is_refused(digits, tmp_path):
    training = train(SPEC, data=digits, store=RunStore(tmp_path))
    next(training)
    training.close()
    with refuses(Lacks, what="paths"):
        train_to_end(
            SPEC, data=digits, store=RunStore(tmp_path), execution=Execution(record_paths=True)
        )


def test_kfac_has_a_damping_path(tmp_path):
    spec = replace(
        SPEC,
        optimizer="kfac-f",
        decay="decoupled",
        decay_scope="all",
        weight_decay=1.0,
        lr=0.03,
        initialize_batches=1,
        refresh_every=2,
        invert_every=4,
        epochs=1,
    )
    result = attribute_spec(spec, store=RunStore(tmp_path), options=CPU, seeds=(0,))
    assert set(result.shares) == {"size", "rotation", "damping", "interaction"}
    assert len(result.results) == 8
    assert not result.unused
    assert max(result.worst_errors().values()) < 1e-5
    parts = [result.shares[name].value for name in ("size", "rotation", "damping")]
    assert sum(parts) == pytest.approx(1) or math.isnan(parts[0])


def test_runs_that_take_turns_are_the_same(attributed, tmp_path):
    _, result = attributed
    turns = attribute_spec(
        SPEC,
        store=RunStore(tmp_path),
        seeds=(0, 1),
        options=replace(CPU, at_once=3, keep_checkpoints=False),
    )
    assert turns.shares == result.shares
    assert not list(tmp_path.glob("*/checkpoint.safetensors"))


def test_when_the_time_is_up_the_same_call_goes_on(attributed, tmp_path, monkeypatch):
    """An hour is asked for; its alarm goes off when the first arm has ended."""
    store, (_, result) = RunStore(tmp_path), attributed
    ended, hour = ArmProgress.ended, replace(CPU, seconds=3600)

    def ended_at_the_alarm(progress, *outcome):
        ended(progress, *outcome)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(ArmProgress, "ended", ended_at_the_alarm)
    with pytest.raises(OutOfTime):
        attribute_spec(SPEC, store=store, options=hour, seeds=(0, 1))
    monkeypatch.undo()
    assert sum(run.is_finished() for run in store.runs()) == 1
    again = attribute_spec(SPEC, store=store, options=CPU, seeds=(0, 1))
    assert again.shares == result.shares


def test_a_seed_whose_reference_diverges_is_left_out(tmp_path):
    spec = replace(SPEC, lr=1e30, epochs=1, lr_drop_every=1)
    result = attribute_spec(spec, store=RunStore(tmp_path), options=CPU, seeds=(0,))
    assert {unused.fault for unused in result.unused} == {Fault.DIVERGED}
    assert all(r.arm in ("with decay", "without decay") for r in result.results)


def test_specs_that_make_no_sense_are_refused(digits, tmp_path):
    store = RunStore(tmp_path)
    none = replace(SPEC, decay="none", weight_decay=0.0)
    with refuses(Lacks, owner="this run", what="weight decay"):
        attribute_spec(none, store=store, options=CPU)
    follower = replace(SPEC, size_source=SPEC.id)
    with refuses(BadValue, name="the run", value=follower.id):
        arm_spec(follower, WITH, Plan(("size", "rotation")), 0)
    with refuses(NotFinished, run=SPEC.id):
        train_to_end(follower, data=digits, store=store)
    with refuses(Misplaced, settings=["damping_source"]):
        replace(SPEC, damping_source="x")
    with refuses(Misplaced, settings=["held_decay"]):
        replace(none, held_decay=False)
    with refuses(Misplaced, settings=["held_layers"]):
        replace(SPEC, held_layers="fc")
    with refuses(UnknownName, name="nowhere"):
        attribute_spec(SPEC, store=store, options=CPU, only="nowhere")


def test_paths_of_a_shorter_run_are_refused(attributed, digits):
    store, _ = attributed
    longer = replace(SPEC, epochs=3, size_source=SPEC.id)
    with refuses(Mismatch, what="number of steps"):
        train_to_end(longer, data=digits, store=store)


def test_the_ids_of_ordinary_runs_know_nothing_of_paths():
    assert RunSpec(data="digits", network="mlp").id == "digits-mlp-sgd-none-928a37b9"


# ---------------------------------------------------------------- branches


def test_the_arm_with_decay_goes_on_as_the_run_did(digits, tmp_path):
    whole = train_to_end(SPEC, data=digits, store=RunStore(tmp_path / "whole"))
    path = train_to(SPEC, 1, data=digits, folder=tmp_path / "branch")
    assert train_to(SPEC, 1, data=digits, folder=tmp_path / "branch") == path
    make = branch_from(path, SPEC, digits)
    _, _, step, evaluate = make(0)
    losses = [float(step()) for _ in range(11)]
    values = evaluate()
    for name in ("test/loss", "train/loss", "test/accuracy"):
        assert values[name] == whole.values[name]
    _, _, other_step, _ = make(1)
    assert [float(other_step()) for _ in range(11)] != losses


@pytest.mark.parametrize("epoch", [0, 2, 5])
def test_an_epoch_that_is_none_to_branch_at_is_refused(epoch, digits, tmp_path):
    with refuses(OutOfRange, value=epoch):
        train_to(SPEC, epoch, data=digits, folder=tmp_path)


# ---------------------------------------------------------------- the command


def run(*arguments):
    return CliRunner().invoke(app, ["attribute", *map(str, arguments)])


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.to_toml())
    return path


def test_the_command(spec_file, tmp_path):
    page = tmp_path / "page.html"
    runs = ("--runs", tmp_path / "runs", "--device", "cpu")
    done = run(spec_file, "--seeds", 2, *runs, "--report", page, "--norms-alone", "step")
    assert done.exit_code == 0, done.output
    assert "Decay changes test/accuracy by" in done.output
    assert "norms alone" in done.output
    assert page.read_text().count("<img") >= 5
    norms = ("--norms-alone", "step")
    done = run(spec_file, "--seeds", 2, *runs, "--json", *norms, "--metric", "train/loss")
    found = json.loads(done.output)
    assert found["metric"] == "train/loss"
    assert set(found["metrics"]["train/loss"]["shares"]) == {"size", "rotation", "interaction"}
    by_run = run(SPEC.id, "--runs", tmp_path / "runs" / "attribution", "--seeds", 1, "--json")
    assert by_run.exit_code == 0, by_run.output
    assert found["title"] == "SGD, MLP BN on digits"
    assert RunSpec.from_mapping(found["spec"]).id == found["id"] == SPEC.id
    held = run(spec_file, "--seeds", 1, *runs, "--json", "--only", "layers=conv")
    assert json.loads(held.stdout)["title"] == "SGD, MLP BN on digits, held: conv"


def test_a_plan_of_arms_needs_no_data(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(replace(SPEC, data="cifar10").to_toml())
    nowhere = ("--runs", tmp_path / "runs", "--data-dir", tmp_path, "--device", "cpu")
    for norms in ((), ("--norms-alone", "epoch")):
        planned = run(spec, *nowhere, *norms, "--dry-run")
        assert planned.exit_code == 0, planned.output
        assert f"{3 * (4 + len(norms) // 2)} runs" in planned.output
    command = ["compare", str(spec), str(spec), "--match", "norm", *map(str, nowhere)]
    for done in (run(spec, *nowhere), CliRunner().invoke(app, command)):
        assert done.exit_code
        assert "error: the data set cifar10 is not in" in done.output
        assert not list(RunStore(tmp_path / "runs" / "attribution").runs())


def test_the_command_from_the_middle_of_a_run(spec_file, tmp_path):
    common = ("--runs", tmp_path / "runs", "--device", "cpu", "--seeds", 2)
    done = run("--from", spec_file, "--at", 1, "--for", 6, *common)
    assert done.exit_code == 0, done.output
    assert done.output.count("seed 1,") == 4
    again = run("--from", spec_file, "--at", 1, "--for", 6, *common, "--json")
    assert json.loads(again.output)["steps"] == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a spec"),
        (("x.toml", "--from", "y"), "give a spec"),
        (("{spec}", "--only", "conv"), "layers=all"),
        (("{spec}", "--at", "1"), "--at and --for"),
        (("--from", "{spec}", "--at", "1"), "--for STEPS"),
        (("--from", "{spec}", "--at", "1", "--for", "2", "--at-once", "2"), "--at-once"),
        (("{spec}", "--metric", "beauty"), "beauty"),
        (("{spec}", "--tier", "huge"), "huge"),
        (("{spec}", "--norms-alone", "week"), "week"),
        (("{spec}", "--norms-alone", "epoch", "--only", "layers=features.0"), "wn-conv"),
        (("{spec}", "--only", "layers=fc"), "fc has no layer"),
    ],
)
def test_bad_input(arguments, said, spec_file, tmp_path):
    given = [a.format(spec=spec_file) for a in arguments]
    done = run(*given, "--runs", tmp_path / "runs", "--device", "cpu", "--seeds", 1)
    assert done.exit_code == 2
    assert said in done.output
    assert "seed 0," not in done.output  # nothing was trained first


# ---------------------------------------------------------------- Fig. 4


def test_sizes_followed_epoch_by_epoch_are_the_papers_norm_transfer(digits, tmp_path):
    """wn-conv (recipe line 16) and an arm with free rotation take the very same steps."""
    store = RunStore(tmp_path)
    decayed = replace(SPEC, epochs=3, lr_drop_every=3)
    train_to_end(decayed, data=digits, store=store, execution=Execution(record_paths=True))
    without = replace(decayed, decay="none", weight_decay=0.0, decay_scope="all")
    transferred = train_to_end(
        replace(without, norm_source=decayed.id), data=digits, store=store
    ).model
    plain = train_to_end(without, data=digits).model
    run = TrainingRun(without.resolved(), digits)
    source = LayerPaths.load(paths_file(store.folder(decayed.id)))
    held = select(run.model, run.optimizer, "conv", decayed=False)
    targets = Targets(size=source, size_every=run.steps_per_epoch)
    steps = run.epochs * run.steps_per_epoch
    with Intervention([run.optimizer], held.weights, steps, targets):
        for _ in range(run.epochs):
            run.begin_epoch()
            with run.at_work():
                for _ in range(run.steps_per_epoch):
                    run.train_step()
            run.next_epoch()
    for name, weight in run.model.named_parameters():
        ours, theirs, free = (
            m.get_parameter(name).detach() / m.get_parameter(name).detach().norm()
            for m in (run.model, transferred, plain)
        )
        assert float((ours - theirs).norm()) < 1e-4, name
        if weight.ndim > 1:
            assert float((ours - free).norm()) > 1e-2, name


@pytest.mark.parametrize("scope", ["all", "conv"])
def test_the_arm_with_free_rotation_is_fig_4s_cell(tmp_path, scope):
    """Nothing decays in it; once an epoch it is wn-conv itself, and its share the gap closed."""
    spec = replace(SPEC, batch_norm=True, bias=True, decay_scope=scope)
    plan = Plan(("size", "rotation"), others=scope == "all")
    without = arm_spec(spec, WITHOUT, plan, 0, "conv")
    each_step = arm_spec(spec, norms_alone(), plan, 0, "conv")
    assert each_step.weight_decay == 0
    assert (each_step.held_layers, each_step.size_source) == ("conv", spec.id)
    assert not each_step.rotation_source
    kfac = RunSpec(optimizer="kfac-f", batch_norm=True, decay="decoupled", weight_decay=0.1)
    free = arm_spec(kfac, norms_alone(), Plan(("size", "rotation", "damping")), 0)
    assert free.followed == {"size": kfac.id}  # its damping relative to them follows, too
    each_epoch = norms_alone(11)
    assert arm_spec(spec, each_epoch, plan, 0) == replace(without, norm_source=spec.id)
    result = attribute_spec(
        spec,
        store=arm_store(tmp_path),
        options=CPU,
        seeds=(0,),
        only="conv",
        extra=[norms_alone(), each_epoch],
        metric="test/loss",
    )
    assert not result.unused
    loss = {arm.arm: arm.metrics["test/loss"] for arm in result.results}
    gap = loss["with decay"] - loss["without decay"]
    for name, share in result.shares_of("test/loss").extra.items():
        assert share.value == pytest.approx((loss[name] - loss["without decay"]) / gap)
    arm, aim = result.paths[0]["norms alone"], result.reference(0)
    ratio = arm.sizes[:, 0] / aim.sizes[:, aim.layers.index("features.0")]
    assert float((ratio - 1).abs().max()) < 1e-5


def test_the_jacobian_norm_at_the_end_is_that_of_as_many_images_as_gradients_allow(
    digits, monkeypatch
):
    monkeypatch.setattr(recorded_arms, "GRADIENTS", 1000)
    run = TrainingRun(SPEC.resolved(), digits)
    assert recorded_arms._jacobian_at_end(run) == {}
    run.epoch = run.epochs
    batches = evaluation_batches(digits.test, batch_size=100, mean=digits.mean, std=digits.std)
    expected = float(probes.jacobian_norms(run.model, next(iter(batches))[0]).mean())
    value = recorded_arms._jacobian_at_end(run)["jacobian_norm"]
    assert value == pytest.approx(expected, rel=1e-5)
