import json
import math
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from refusals import refuses
from torch.nn import functional as F

from decaylab.data import load
from decaylab.errors import DecaylabError, Diverged, Lacks, Mismatch, OutOfRange, UnknownName
from decaylab.records import Manifest, RunFolder, RunStore
from decaylab.training import (
    Execution,
    Interrupted,
    RunSpec,
    TrainingRun,
    checkpoint,
    evaluate,
    journal,
    load_run,
    train,
)
from decaylab.training import train_to_end as finish
from decaylab.training.build import build_batches, build_data, build_model, build_optimizer

SPEC = RunSpec(hidden=(16,), batch_norm=True, batch_size=256, epochs=3, lr_drop_every=2)
EAGER = Execution(checkpoint_every=0.0)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one) and one.keys() == other.keys()


def test_it_is_the_plain_loop(digits):
    spec = replace(SPEC, decay="l2", weight_decay=0.01, lr=0.1)
    model = build_model(spec, digits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    batches = build_batches(spec, digits)
    for epoch in range(3):
        batches.begin_epoch()
        for index in range(batches.steps_per_epoch):
            images, labels = batches.batch(index)
            optimizer.param_groups[0]["lr"] = 0.1 if epoch < 2 else 0.01
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    last = finish(spec, data=digits)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(last.model.state_dict()[key], value, rtol=1e-6, atol=1e-7)
    result = evaluate(model, digits.test, digits)
    assert last.values["test/accuracy"] == result.accuracy
    assert last.values["test/loss"] == pytest.approx(result.loss, rel=1e-5)
    assert last.values["lr"] == pytest.approx(0.01)


def test_what_is_recorded(digits, tmp_path):
    spec = replace(SPEC, decay="l2", weight_decay=0.01, lr=0.1)
    store = RunStore(tmp_path)
    last = finish(spec, data=digits, store=store)
    folder = store.folder(spec.id)
    rows = folder.rows()
    assert [row.step for row in rows.series("test/loss")] == [5, 10, 15]
    assert [row.epoch for row in rows.series("test/loss")] == [1, 2, 3]
    assert [row.step for row in rows.series("weight_norm/head")] == [0, 5, 10, 15]
    assert [row.step for row in rows.series("train/loss")] == [15]
    weight = last.model.head.weight.detach().double()
    assert rows.last("weight_norm/head") == pytest.approx(weight.norm().item(), rel=1e-12)
    exposures = [row.value for row in rows.series("exposure/stage")]
    per_epoch = 5 * 0.1 * 0.01 / (1 - 0.9)
    assert exposures == pytest.approx([per_epoch, 2 * per_epoch, per_epoch / 10])
    seconds = [row.seconds for row in rows.rows]
    assert seconds == sorted(seconds)
    manifest = folder.manifest()
    assert (manifest.status, manifest.device, manifest.seed) == ("finished", "cpu", 0)
    assert manifest.torch == torch.__version__
    # an independent count: the model's own answers on the normalised images
    last.model.eval()
    with torch.no_grad():
        (mean,), (std,) = digits.mean, digits.std
        logits = last.model((digits.test.images / 255 - mean) / std)
    expected = logits.argmax(dim=1) == digits.test.labels
    assert manifest.test_hits.unpack().tolist() == expected.tolist()
    assert manifest.test_hits.unpack().mean() == last.values["test/accuracy"]
    each = finish(spec, data=digits, execution=Execution(train_set_each_epoch=True))
    assert each.values["train/loss"] == last.values["train/loss"]


def test_yields_after_each_epoch_and_on_request_each_step(digits):
    kinds = [p.kind for p in train(SPEC, data=digits)]
    assert kinds == ["epoch", "epoch", "finished"]
    stepped = list(train(SPEC, data=digits, execution=Execution(every_step=True)))
    assert [p.kind for p in stepped] == (["step"] * 5 + ["epoch"]) * 2 + ["step"] * 5 + ["finished"]
    assert [p.step for p in stepped if p.kind == "step"] == list(range(1, 16))
    mean = sum(p.loss.item() for p in stepped[:5]) / 5
    assert stepped[5].values["train/running_loss"] == pytest.approx(mean, rel=1e-12)


def test_runs_in_turn_do_not_disturb_each_other_nor_the_caller(digits):
    alone = finish(SPEC, data=digits).model.state_dict()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = train(SPEC, data=digits)
    second = train(replace(SPEC, seed=1, precision="bf16"), data=digits)
    for one, _ in zip(first, second, strict=True):
        last = one
    assert same(last.model.state_dict(), alone)
    assert torch.equal(torch.rand(2), expected)


def test_a_seed_decides_the_weights(digits):
    again, other = (finish(replace(SPEC, seed=seed), data=digits).model for seed in (0, 1))
    assert same(finish(SPEC, data=digits).model.state_dict(), again.state_dict())
    assert not same(again.state_dict(), other.state_dict())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "kfac-f", "kfac-g"])
def test_every_optimizer_trains_and_its_model_loads_from_its_folder(digits, tmp_path, optimizer):
    spec = replace(SPEC, optimizer=optimizer, decay="decoupled", weight_decay=0.01)
    spec = replace(spec, hidden=(64,), batch_size=64, epochs=5, lr_drop_every=5)
    last = finish(spec, data=digits, store=RunStore(tmp_path))
    assert last.values["train/running_accuracy"] > 0.9
    model, found, data = load_run(tmp_path / spec.id)
    assert found == spec.resolved()
    assert same(model.state_dict(), last.model.state_dict())
    assert evaluate(model, data.test, data).accuracy == last.values["test/accuracy"]


def test_initialising_kfac_leaves_the_training_batches_alone(digits):
    spec = replace(SPEC, optimizer="kfac-g", lr=1e-9)
    with_pass = finish(spec, data=digits).values["train/running_loss"]
    without = finish(replace(spec, initialize_batches=0), data=digits).values["train/running_loss"]
    assert with_pass == pytest.approx(without, rel=1e-4)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_precisions_train_and_leave_torch_as_it_was(digits, precision):
    flags = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    for progress in train(replace(SPEC, precision=precision), data=digits):
        last = progress
        now = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
        assert now == flags
        assert not torch.is_autocast_enabled("cpu")
    exact = finish(SPEC, data=digits).values["test/loss"]
    assert last.values["test/loss"] == pytest.approx(exact, rel=0.05)
    assert (last.values["test/loss"] == exact) == (precision == "tf32")  # no TF32 on a CPU


def test_held_out_images_are_tested_and_not_trained_on(digits):
    spec = replace(SPEC, held_out=True)
    data = build_data(spec)
    assert len(data.test) == len(digits.train) // 10
    assert len(data.train) + len(data.test) == len(digits.train)
    last = finish(spec, data=digits)
    found = evaluate(last.model, data.test, data)
    assert last.values["test/accuracy"] == found.accuracy


def test_evaluation_uses_running_statistics_and_leaves_the_model_as_it_was(digits):
    model = finish(SPEC, data=digits).model
    model.features[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = evaluate(model, digits.test, digits)
    assert same(model.state_dict(), before)
    assert [module.training for module in (model, *model.features[:2])] == [True, True, False]
    logits = model.eval()((digits.test.images / 255 - digits.mean[0]) / digits.std[0])
    loss = F.cross_entropy(logits, digits.test.labels).item()
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == (logits.argmax(1) == digits.test.labels).double().mean().item()


def test_evaluation_in_parts_is_evaluation_in_whole(digits):
    model = build_model(SPEC, digits)
    whole = evaluate(model, digits.test, digits, batch_size=360)
    parts = evaluate(model, digits.test, digits, batch_size=7)
    assert parts.accuracy == whole.accuracy
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_loss_that_is_not_finite_keeps_the_records_and_stays_diverged(digits, tmp_path):
    spec = replace(SPEC, batch_norm=False, lr=1e30)
    store = RunStore(tmp_path)
    with pytest.raises(Diverged, match="learning rate"):
        finish(spec, data=digits, store=store)
    folder = store.folder(spec.id)
    assert folder.manifest().status == "diverged"
    assert math.isnan(folder.rows().last("train/running_loss"))
    assert folder.rows().last("weight_norm/head") is not None
    assert not folder.checkpoint.exists()
    with pytest.raises(Diverged, match="earlier start"):
        finish(spec, data=digits, store=store)
    with pytest.raises(Diverged):
        finish(spec, data=digits, store=RunStore(tmp_path / "other"), execution=EAGER)


def test_leaving_the_generator_saves_and_another_call_continues(digits, tmp_path):
    whole = finish(SPEC, data=digits).model.state_dict()
    store = RunStore(tmp_path)
    how = Execution(every_step=True)
    for leave_at in (2, 5, 6, 9, 13):  # in an epoch, at its last step, and after it
        for progress in train(SPEC, data=digits, store=store, execution=how):
            if progress.step >= leave_at:
                break
        del progress
        assert store.folder(SPEC.id).manifest().status == "interrupted"
    starts = next(train(SPEC, data=digits, store=store, execution=how)).step
    assert starts > 13
    last = finish(SPEC, data=digits, store=store)
    assert same(last.model.state_dict(), whole)
    assert store.folder(SPEC.id).manifest().status == "finished"


def test_a_finished_run_is_not_trained_again(digits, tmp_path):
    store = RunStore(tmp_path)
    last = finish(SPEC, data=digits, store=store)
    (again,) = train(SPEC, data=digits, store=store)
    assert again.kind == "finished"
    assert again.values == last.values
    assert same(again.model.state_dict(), last.model.state_dict())
    store.folder(SPEC.id).checkpoint.unlink()
    with refuses(Lacks, what="checkpoint"):
        finish(SPEC, data=digits, store=store)


def test_stopped_between_its_last_checkpoint_and_its_manifest_it_is_finished_next_time(
    digits, tmp_path
):
    store = RunStore(tmp_path)
    write = RunFolder.write_manifest

    class Full(Exception):
        pass

    def full(folder, manifest):
        if manifest.status != "running":
            raise Full
        write(folder, manifest)

    with (
        mock.patch.object(RunFolder, "write_manifest", full),
        pytest.raises(Full),
    ):
        finish(SPEC, data=digits, store=store)
    assert store.folder(SPEC.id).manifest().status == "interrupted"
    (last,) = train(SPEC, data=digits, store=store)
    manifest = store.folder(SPEC.id).manifest()
    assert manifest.status == "finished"
    assert manifest.test_hits.unpack().mean() == last.values["test/accuracy"]
    assert (last.kind, last.epoch, last.step, last.made_before) == ("finished", 3, 15, False)
    whole = finish(SPEC, data=digits)
    assert same(last.model.state_dict(), whole.model.state_dict())
    seconds = {"train/seconds": 0.0}
    assert last.values | seconds == whole.values | seconds


class Killed(BaseException):
    pass


def killed_at_the_last_manifest(data, store, *, written):
    """A run that keeps no checkpoint, up to its last manifest, or to just after it."""
    write = RunFolder.write_manifest

    def last_write(folder, manifest):
        if manifest.status == "running" or (written and manifest.status == "finished"):
            write(folder, manifest)
        if manifest.status != "running":
            raise Killed

    execution = replace(EAGER, keep_checkpoint=False)
    with mock.patch.object(RunFolder, "write_manifest", last_write), pytest.raises(Killed):
        finish(SPEC, data=data, store=store, execution=execution)
    return execution


def test_without_its_last_manifest_a_run_continues_though_it_keeps_no_checkpoint(digits, tmp_path):
    store = RunStore(tmp_path)
    execution = killed_at_the_last_manifest(digits, store, written=False)
    last = finish(SPEC, data=digits, store=store, execution=execution)
    folder = store.folder(SPEC.id)
    assert [start.step for start in folder.manifest().starts] == [0, 14]
    assert same(last.model.state_dict(), finish(SPEC, data=digits).model.state_dict())
    assert folder.is_finished()
    assert not folder.has_checkpoint()


def test_an_earlier_checkpoint_beside_a_finished_manifest_is_not_taken_for_the_last(
    digits, tmp_path
):
    store = RunStore(tmp_path)
    execution = killed_at_the_last_manifest(digits, store, written=True)
    folder = store.folder(SPEC.id)
    assert folder.is_finished()
    assert folder.has_checkpoint()
    with pytest.raises(Lacks):
        load_run(folder)
    with refuses(Lacks, what="checkpoint"):
        finish(SPEC, data=digits, store=store, execution=execution)


def test_an_error_is_a_failed_run_that_continues(digits, tmp_path):
    store = RunStore(tmp_path)

    def fail(run):
        if run.step == 10:
            raise RuntimeError("out of luck")
        return {"mine": 1.0}

    with pytest.raises(RuntimeError):
        finish(SPEC, data=digits, store=store, execution=replace(EAGER, epoch_probe=fail))
    manifest = store.folder(SPEC.id).manifest()
    assert (manifest.status, manifest.message) == ("failed", "RuntimeError: out of luck")
    last = finish(SPEC, data=digits, store=store)
    assert same(last.model.state_dict(), finish(SPEC, data=digits).model.state_dict())
    assert [row.step for row in store.folder(SPEC.id).rows().series("mine")] == [0, 5]


@pytest.mark.parametrize(
    ("at", "kind"),
    [(0, signal.SIGTERM), (5, signal.SIGTERM), (10, signal.SIGTERM), (5, signal.SIGHUP)],
)
def test_a_signal_is_heeded_at_the_next_step(digits, tmp_path, at, kind):
    store = RunStore(tmp_path)

    def interrupt(run):
        if run.step == at:
            os.kill(os.getpid(), kind)
        return {}

    def handler(number, frame):
        """Somebody's own; an ignored signal would stay ignored."""

    before = signal.signal(kind, handler)
    try:
        with pytest.raises(Interrupted) as caught:
            finish(SPEC, data=digits, store=store, execution=Execution(epoch_probe=interrupt))
        assert signal.getsignal(kind) is handler
    finally:
        signal.signal(kind, before)
    assert caught.value.exit_code == 128 + kind
    assert store.folder(SPEC.id).manifest().status == "interrupted"
    assert store.folder(SPEC.id).checkpoint.exists()
    last = finish(SPEC, data=digits, store=store)
    assert same(last.model.state_dict(), finish(SPEC, data=digits).model.state_dict())


def test_a_signal_that_comes_when_the_run_is_finished_reaches_the_caller(digits, tmp_path):
    store = RunStore(tmp_path)
    training = train(replace(SPEC, epochs=1), data=digits, store=store)
    assert next(training).kind == "finished"
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted):
        next(training)
    assert store.runs()[0].is_finished()
    (again,) = train(replace(SPEC, epochs=1), data=digits, store=store)  # it is not raised twice
    assert again.made_before


def test_bad_calls(digits, tmp_path):
    with refuses(OutOfRange, name="batch_size", value=5000):
        finish(replace(SPEC, batch_size=5000), data=digits)
    with refuses(Mismatch, what="data"):
        finish(replace(SPEC, data="mnist"), data=digits)
    with RunStore(tmp_path).folder("r").writing(SPEC.to_toml()):
        pass
    with refuses(Lacks, what="checkpoint"):
        load_run(tmp_path / "r")
    (tmp_path / "r" / "spec.toml").write_text("learning_rate = 1.0")
    with refuses(UnknownName, name="learning_rate", place=str(tmp_path / "r/spec.toml")):
        load_run(tmp_path / "r")


@pytest.mark.parametrize(
    ("status", "remedy"), [("diverged", "give another run"), ("finished", "ANOTHER_FOLDER")]
)
def test_a_run_that_left_no_checkpoint_says_what_can_be_done(digits, tmp_path, status, remedy):
    finish(SPEC, data=digits, store=RunStore(tmp_path))
    folder = RunStore(tmp_path).folder(SPEC.id)
    folder.checkpoint.unlink()
    folder.write_manifest(replace(folder.manifest(), status=status))
    with pytest.raises(Lacks, match=remedy):
        load_run(folder)


def test_a_run_is_not_continued_on_another_kind_of_device(digits, tmp_path):
    store = RunStore(tmp_path)
    training = train(SPEC, data=digits, store=store)
    next(training)
    training.close()
    path = store.folder(SPEC.id).checkpoint
    checkpoint.Snapshot({**checkpoint.load(path), "device": "cuda"}).write(path)
    with refuses(Mismatch, values={f"run {SPEC.id} so far": "cuda", "now": "cpu"}):
        finish(SPEC, data=digits, store=store)


def test_scopes_reach_the_optimizer(digits):
    spec = replace(SPEC, decay="l2", weight_decay=0.1, decay_scope="fc")
    model = build_model(spec, digits)
    decayed = [g for g in build_optimizer(spec, model).param_groups if g["weight_decay"]]
    assert [id(p) for g in decayed for p in g["params"]] == [id(p) for p in model.head.parameters()]


def test_a_copy_is_told_its_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("DECAYLAB_COMMIT", "0123abc")
    finish(replace(SPEC, epochs=1), store=RunStore(tmp_path))
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["commit"] == "0123abc"


def test_every_start_of_a_run_is_recorded_with_its_code(digits, monkeypatch, tmp_path):
    store = RunStore(tmp_path)
    for commit in ("first", "second"):
        monkeypatch.setenv("DECAYLAB_COMMIT", commit)
        training = train(SPEC, data=digits, store=store)
        next(training)
        training.close()
    monkeypatch.setenv("DECAYLAB_COMMIT", "third")
    finish(SPEC, data=digits, store=store)
    starts = store.folder(SPEC.id).manifest().starts
    assert [start.commit for start in starts] == ["first", "second", "third"]
    assert {(start.torch, start.device) for start in starts} == {(torch.__version__, "cpu")}
    steps = [start.step for start in starts]
    assert steps == sorted(set(steps))
    assert steps[0] == 0


def test_commits_made_while_a_process_runs_are_not_its_codes(monkeypatch):
    monkeypatch.delenv("DECAYLAB_COMMIT", raising=False)
    heads = iter(["first", "", "second", ""])
    monkeypatch.setattr(journal, "_git", lambda *given: next(heads))
    monkeypatch.setattr(journal.Path, "exists", lambda path: True)
    journal._checked_out.cache_clear()
    assert [journal.code_commit(), journal.code_commit()] == ["first", "first"]
    journal._checked_out.cache_clear()
    monkeypatch.setattr(journal, "_git", mock.Mock(side_effect=[OSError("busy"), "late", ""]))
    assert [journal.code_commit(), journal.code_commit()] == [None, "late"]  # not None for good
    journal._checked_out.cache_clear()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_looking_at_the_checkout_does_not_get_in_the_way_of_ones_own_git(tmp_path):
    """A plain `git status` writes the index, under a lock that a commit then fails at."""
    (tmp_path / "file").write_text("code")
    for command in (["init", "--quiet"], ["add", "file"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    os.utime(tmp_path / "file", ns=(1, 1))
    index = (tmp_path / ".git" / "index").read_bytes()
    assert journal._git(tmp_path, "status", "--porcelain", "-uno") == "A  file"
    assert (tmp_path / ".git" / "index").read_bytes() == index


@pytest.mark.parametrize("wrong", [{"batch_size": 100_000}, {"norm_source": "not-there"}])
def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path, wrong):
    with pytest.raises(DecaylabError):
        finish(replace(SPEC, batch_norm=True, **wrong), store=RunStore(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_run_that_begins_anew_is_no_resumed_one(tmp_path):
    """Killed before its first checkpoint: nothing of it was made where that was."""
    store, spec = RunStore(tmp_path), replace(SPEC, epochs=1)
    folder = store.folder(spec.id)
    with folder.writing(spec.to_toml()):
        earlier = {"status": "running", "version": "0", "commit": None, "torch": "2"}
        where = {"device": "A GPU", "seed": 0, "tier": "custom", "at_once": 4}
        folder.write_manifest(Manifest(spec.id, **earlier, **where, started=0.0, updated=0.0))
    finish(spec, store=store)
    found = folder.manifest()
    assert (found.device, found.resumes, found.at_once) == ("cpu", 0, 1)
    assert found.started > 0


def test_compiling_is_recorded_and_no_other_run(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled.append(model) or model)
    spec, store = replace(SPEC, epochs=1), RunStore(tmp_path)
    last = finish(spec, store=store, execution=Execution(compiled=True))
    assert compiled == [last.model]
    assert store.folder(spec.id).manifest().compiled


def test_every_network_and_batch_size_of_a_process_is_compiled_for_itself(digits, monkeypatch):
    """More of them than torch would compile, and none for any batch size."""
    compiled, compile_ = [], torch.compile

    def backend(graph, inputs):
        sizes = [tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 4]
        assert all(isinstance(size, int) for size in sizes[0])
        compiled.append((len(inputs), sizes[0][0]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compile_, backend=backend))
    wanted = []
    for depth in range(1, 6):
        for batch_size in (256, 512):
            spec = replace(SPEC, hidden=(8,) * depth, batch_size=batch_size).resolved()
            for _ in range(2):  # the second takes what was compiled for the first
                run = TrainingRun(spec, digits, compiled=True)
                run.begin_epoch()
                run.train_step()
            wanted.append((batch_size, depth))
    assert [size for _, size in compiled] == [size for size, _ in wanted]
    assert len({inputs for inputs, _ in compiled}) == 5
    assert len(compiled) > 8
