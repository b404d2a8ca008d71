import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from decaylab.data import load
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, train, train_to_end
from decaylab.training.run import TrainingRun

pytestmark = pytest.mark.gpu

SPEC = RunSpec(
    network="vgg11",
    width=0.125,
    batch_norm=True,
    augment=True,
    batch_size=128,
    epochs=3,
    decay="l2",
    weight_decay=0.001,
)


@contextmanager
def no_waiting():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *(("sgd", "fp32"), ("adam", "tf32"), ("kfac-f", "bf16")),
        *(("kfac-g", "fp32"), ("kfac-g", "tf32"), ("kfac-g", "bf16")),
    ],
)
def test_a_step_does_not_wait_for_the_device(optimizer, precision):
    often = {"refresh_every": 2, "invert_every": 3} if optimizer.startswith("kfac") else {}
    spec = replace(SPEC, optimizer=optimizer, precision=precision, **often)
    run = TrainingRun(spec.resolved(), load("digits").to("cuda"))
    with run.at_work():
        run.begin_epoch()
        for _ in range(3):  # allocation and autotuning may wait
            run.train_step()
        with no_waiting():
            for _ in range(5):
                run.train_step()
        assert run.finite()


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-g"])
def test_a_run_continues_on_the_gpu(tmp_path, optimizer):
    spec = replace(SPEC, optimizer=optimizer, batch_size=64)
    store, data = RunStore(tmp_path), load("digits")
    how = Execution(every_step=True)
    for leave_at in (3, 25):
        for progress in train(spec, data=data, device="cuda", store=store, execution=how):
            if progress.step >= leave_at:
                break
    last = train_to_end(spec, data=data, device="cuda", store=store)
    whole = train_to_end(spec, data=data, device="cuda")
    assert last.values["train/running_loss"] == pytest.approx(
        whole.values["train/running_loss"], rel=0.05
    )
    assert torch.cuda.get_device_name(0) in store.folder(spec.id).manifest().device


def test_the_callers_random_stream_and_flags_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2, device="cuda")
    torch.manual_seed(3)
    flags = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    train_to_end(replace(SPEC, precision="tf32"), data=load("digits"), device="cuda")
    assert torch.equal(torch.rand(2, device="cuda"), expected)
    now = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    assert now == flags
