"""Captured training and evaluation on CUDA: what the same run gives without graphs, bit for bit.

`deterministic` runs throughout, so that equal means equal.
"""

from dataclasses import replace

import pytest
import torch

from decaylab.data import DataSet, Split
from decaylab.errors import Diverged
from decaylab.networks import build
from decaylab.optim.graphs import Captured, CudaGraphs
from decaylab.records import RunStore
from decaylab.training import (
    Execution,
    RunSpec,
    TrainingRun,
    checkpoint,
    interleave,
    train,
    train_to_end,
)
from decaylab.training.arithmetic import arithmetic
from decaylab.training.evaluate import Evaluator

pytestmark = pytest.mark.gpu
SPEC = RunSpec(
    data="cifar10",
    network="vgg11",
    width=0.25,
    batch_norm=True,
    augment=True,
    batch_size=64,
    epochs=5,
    lr_drop_every=2,
    weight_decay=0.01,
    decay="decoupled",
    deterministic=True,
)
OFTEN = {"refresh_every": 5, "invert_every": 20, "initialize_batches": 2, "damping": 0.01}
SPECS = {
    "sgd": replace(SPEC, optimizer="sgd", decay="l2", lr=0.05),
    "adam": replace(SPEC, optimizer="adam"),
    "kfac-f": replace(SPEC, optimizer="kfac-f", **OFTEN),
    "kfac-f, scale-free": replace(SPEC, optimizer="kfac-f", **OFTEN, damping_scaling="scale-free"),
    "kfac-g": replace(SPEC, optimizer="kfac-g", lr=0.01, **OFTEN),
    "kfac-g, lag": replace(SPEC, optimizer="kfac-g", lr=0.01, **OFTEN, inversion_lag=3),
    "kfac-f, authors' loop": replace(  # 19 batches of 66 images and one of 26
        SPEC,
        optimizer="kfac-f",
        **OFTEN,
        batch_size=66,
        keep_last_batch=True,
        lr_drop_steps=30,
        late_refresh=True,
    ),
}


@pytest.fixture(scope="module")
def data():
    """Noisy templates, one per class: 20 batches of 64, and 230 test images (a short batch)."""
    generator = torch.Generator().manual_seed(0)
    templates = torch.randint(256, (10, 3, 32, 32), generator=generator)

    def split(size):
        labels = torch.arange(size) % 10
        noise = torch.randint(-99, 100, (size, 3, 32, 32), generator=generator)
        return Split((templates[labels] + noise).clamp(0, 255).to(torch.uint8), labels)

    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    return DataSet("cifar10", split(1280), split(230), 10, mean, std).to("cuda")


def trained(spec, data, *, steps=64, **how):
    """The run, its losses step by step, and what it measured after each epoch.

    After 64 steps of 20 an epoch, each kind of step was replayed, inversions twice.
    """
    run = TrainingRun(spec.resolved(), data, **how)
    losses, measured = [], []
    with run.at_work():
        run.initialize(lambda: None)
    for _ in range(steps):
        if run.position == 0:
            run.begin_epoch()
        with run.at_work():
            losses.append(run.train_step().clone())
            if run.position == run.steps_per_epoch:
                run.launch_evaluation(whole_train_set=True, between=lambda: None)
                measured.append(run.measure())
        if run.position == run.steps_per_epoch:
            run.next_epoch()
    return run, torch.stack(losses), measured


def assert_same_state(one, other):
    tensors = [checkpoint.flatten(state)[1] for state in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    differ = [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])]
    assert differ == []


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "bf16") for name in SPECS), ("sgd", "tf32"), ("kfac-g, lag", "tf32")],
)
def test_captured_training_and_evaluation_are_eager_ones(data, name, precision):
    spec = replace(SPECS[name], precision=precision)
    eager, losses, measured = trained(spec, data, graphs=False)
    captured, captured_losses, captured_measured = trained(spec, data, graphs=True)
    assert captured._steps.captured.replayed > 0
    assert torch.equal(losses, captured_losses)
    assert losses[-1] < losses[0]
    assert measured == captured_measured
    assert len(measured) == 3
    assert_same_state(eager.model.state_dict(), captured.model.state_dict())
    assert_same_state(eager.optimizer.state_dict(), captured.optimizer.state_dict())


def test_inverses_on_the_side_stream_reproduce_themselves(data):
    spec = replace(SPECS["kfac-g, lag"], precision="bf16", invert_every=10, inversion_lag=5)
    first, losses, measured = trained(spec, data, graphs=True)
    second, again, measured_again = trained(spec, data, graphs=True)
    assert torch.equal(losses, again)
    assert measured == measured_again
    assert_same_state(first.model.state_dict(), second.model.state_dict())


@pytest.mark.filterwarnings("ignore")  # torch's compiler uses what torch has deprecated
@pytest.mark.parametrize(("name", "lr"), [("sgd", 5e-5), ("kfac-g", 3e-4)])
def test_compiled_agrees_with_eager(data, name, lr):
    """At small steps: at larger ones any rounding grows a thousandfold in ten steps."""
    spec = replace(SPECS[name], precision="fp32", deterministic=False, lr=lr)
    _, losses, _ = trained(spec, data, graphs=False, steps=20)
    _, compiled, _ = trained(spec, data, graphs=True, compiled=True, steps=20)
    assert ((compiled - losses).abs() <= 1e-3 * losses).all()
    assert (losses[1:] != losses[0]).all()


def test_runs_at_once_are_the_runs_alone_also_beside_one_that_diverges(data):
    chosen = [SPECS["sgd"], SPECS["adam"], SPECS["kfac-g, lag"]]
    specs = [replace(s, precision="bf16", seed=i, epochs=3) for i, s in enumerate(chosen)]
    alone = [train_to_end(spec, data=data, device="cuda") for spec in specs]
    wild = replace(SPECS["sgd"], batch_norm=False, lr=1e30)
    how = Execution(every_step=True, at_once=4)
    runs = {s: train(s, data=data, device="cuda", execution=how) for s in [*specs, wild]}
    last = dict(interleave(runs))
    assert isinstance(last[wild], Diverged)
    for spec, expected in zip(specs, alone, strict=True):
        assert last[spec].kind == "finished"
        found, wanted = dict(last[spec].values), dict(expected.values)
        assert found.pop("train/seconds") != wanted.pop("train/seconds")
        assert found == wanted
        assert_same_state(last[spec].model.state_dict(), expected.model.state_dict())


def test_runs_at_once_go_at_their_own_pace(data, monkeypatch):
    """The short one has three times the steps of the long one, and yet ends before it."""
    long = replace(SPECS["sgd"], precision="bf16", seed=0, epochs=5)
    short = replace(SPECS["adam"], precision="bf16", seed=1, epochs=15)
    alone = {spec: train_to_end(spec, data=data, device="cuda") for spec in (long, short)}
    step = TrainingRun.train_step

    def train_step(run):
        if run.spec.seed == long.seed and run.epoch >= 2:  # both have captured their steps then
            torch.cuda._sleep(2 * 10**8)  # a tenth of a second, on the run's stream
        return step(run)

    monkeypatch.setattr(TrainingRun, "train_step", train_step)
    how = Execution(every_step=True, at_once=2)
    runs = {s: train(s, data=data, device="cuda", execution=how) for s in (long, short)}
    finished = {spec: given for spec, given in interleave(runs) if given.kind == "finished"}
    assert list(finished) == [short, long]
    for spec, expected in alone.items():
        found, wanted = dict(finished[spec].values), dict(expected.values)
        del found["train/seconds"], wanted["train/seconds"]
        assert found == wanted
        assert_same_state(finished[spec].model.state_dict(), expected.model.state_dict())


def test_runs_at_once_save_checkpoints_while_others_capture(tmp_path, data):
    """Which a thread writes: waiting for its copies, it must not spoil a capture."""
    chosen = [SPECS["kfac-g, lag"], SPECS["sgd"], SPECS["kfac-f"]]
    specs = [replace(s, precision="bf16", seed=i, epochs=3) for i, s in enumerate(chosen)]
    alone = [train_to_end(spec, data=data, device="cuda") for spec in specs]
    how = Execution(every_step=True, at_once=3, checkpoint_every=0.01, keep_checkpoint=False)
    store = RunStore(tmp_path)
    runs = {s: train(s, data=data, device="cuda", store=store, execution=how) for s in specs}
    last = dict(interleave(runs))
    for spec, expected in zip(specs, alone, strict=True):
        assert last[spec].kind == "finished"
        assert_same_state(last[spec].model.state_dict(), expected.model.state_dict())
        folder = store.folder(spec.id)
        assert folder.is_finished()
        assert not folder.has_checkpoint()


@pytest.mark.parametrize("name", ["sgd", "kfac-g, lag"])
def test_a_run_that_was_left_continues_bit_for_bit(tmp_path, data, name):
    spec = replace(SPECS[name], precision="bf16", epochs=3)
    whole = train_to_end(spec, data=data, device="cuda")
    store = RunStore(tmp_path)
    how = Execution(every_step=True, checkpoint_every=0.05)
    for leave_at in (7, 43):  # in an epoch; and while an inversion is under way
        for progress in train(spec, data=data, device="cuda", store=store, execution=how):
            if progress.step >= leave_at:
                break
    last = train_to_end(spec, data=data, device="cuda", store=store, execution=how)
    assert_same_state(last.model.state_dict(), whole.model.state_dict())
    assert last.values["test/loss"] == whole.values["test/loss"]


def test_a_caller_reads_model_and_loss_of_the_step_that_was_yielded(data):
    """Also if its reading comes late on its own stream; and what it keeps stays."""

    def read(late):
        found = []
        for progress in train(SPECS["sgd"], data=data, device="cuda", execution=how):
            if progress.kind == "step":
                if late:
                    torch.cuda._sleep(10**7)
                weight = next(progress.model.parameters())
                found.append((progress.loss, weight.detach().clone()))
                if not late:
                    torch.cuda.synchronize()
            if progress.step == 12:
                break
        return [torch.stack(kept) for kept in zip(*found, strict=True)]

    how = Execution(every_step=True)
    losses, weights = read(late=False)
    late_losses, late_weights = read(late=True)
    assert torch.equal(losses, late_losses)
    assert torch.equal(weights, late_weights)
    assert len(losses.unique()) == 12


@pytest.mark.parametrize(
    ("network", "precision"), [("vgg11", "fp32"), ("vgg11", "bf16"), ("resnet20", "tf32")]
)
def test_captured_evaluation_is_the_eager_one(data, network, precision):
    """With the algorithms that cuDNN finds fastest, as weights and running statistics change."""

    def autocast():
        return torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")

    def evaluator(**options):
        return Evaluator(model, data, autocast=autocast, batch_size=100, **options)

    model = build(network, classes=10, width=0.25, batch_norm=True).cuda()
    model = model.to(memory_format=torch.channels_last)
    with arithmetic(precision):
        eager, captured = evaluator(), evaluator(graphs=True)
        for seed in range(4):
            torch.manual_seed(seed)
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        tensor.copy_(torch.rand_like(tensor) * 0.1 + 0.01)
            for split in (data.test, data.train):
                replayed, plain = captured(split), eager(split)
                assert replayed == plain
                assert torch.equal(replayed.correct, plain.correct)
        model.load_state_dict(
            {k: v + 0.01 if v.is_floating_point() else v for k, v in model.state_dict().items()},
            assign=True,
        )
        assert captured(data.test) == eager(data.test)
        assert model.training


def test_a_replay_draws_what_an_eager_run_draws_even_while_the_capturing_stream_lags(monkeypatch):
    """A capture resets the generator's counter on its own stream, and a replay sets it on ours."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def slow_begin(*args, **kwargs):
        torch.cuda._sleep(10**8)  # on the capturing stream, before the counter is reset
        begin(*args, **kwargs)

    def draw():
        torch.cuda._sleep(10**9)
        return torch.rand(4, device="cuda")

    torch.manual_seed(0)
    expected = [torch.rand(4, device="cuda") for _ in range(4)]
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", slow_begin)
    captured = Captured(draw, CudaGraphs())
    drawn = [captured().clone() for _ in range(4)]
    assert captured.replays
    assert torch.equal(torch.stack(drawn), torch.stack(expected))
