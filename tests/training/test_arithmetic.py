"""The settings of torch that a run computes with, and that they are given back."""

import os
from dataclasses import replace

import pytest
import torch
from refusals import refuses

from decaylab.curvature import preconditioner
from decaylab.data import load
from decaylab.errors import BadValue
from decaylab.training import Execution, RunSpec, TrainingRun, train_to_end
from decaylab.training.arithmetic import arithmetic, prepare_deterministic

SPEC = RunSpec(hidden=(8,), batch_size=256, epochs=1, lr_drop_every=2)
CUDA = torch.device("cuda")


def settings():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize(
    ("precision", "deterministic", "inside"),
    [
        ("fp32", False, ("ieee", "ieee", True, False, False, True)),
        ("tf32", False, ("tf32", "tf32", True, False, False, True)),
        ("bf16", True, ("tf32", "tf32", False, True, True, False)),
    ],
)
def test_inside_and_after(precision, deterministic, inside):
    before = settings()
    with arithmetic(precision, deterministic=deterministic):
        assert settings() == inside
    assert settings() == before


def test_the_callers_deterministic_algorithms_stay():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with arithmetic("fp32"):
            assert not torch.backends.cudnn.benchmark
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        with arithmetic("fp32", deterministic=True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-g"])
def test_a_run_is_deterministic_at_work_only(optimizer):
    seen = []

    def observe(run):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return {}

    how = Execution(epoch_probe=observe)
    spec = replace(SPEC, optimizer=optimizer, deterministic=True)
    exact = train_to_end(spec, data=load("digits"), execution=how)
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()
    plain = train_to_end(replace(spec, deterministic=False), data=load("digits"))
    for one, other in zip(exact.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)  # on a CPU it is deterministic anyway
    assert spec.id != replace(spec, deterministic=False).id


def test_cublas_workspace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_deterministic(torch.device("cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ""
    with refuses(BadValue, name="CUBLAS_WORKSPACE_CONFIG", wanted=":4096:8"):
        prepare_deterministic(CUDA)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    prepare_deterministic(CUDA)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_deterministic(CUDA)


def test_a_run_halves_inverses_as_its_own_precision_wants(monkeypatch):
    """Not as torch's settings outside of it."""
    asked = []

    def are_halved(banks, device):
        asked.append(torch.backends.cuda.matmul.fp32_precision)
        return False

    monkeypatch.setattr(preconditioner, "are_halved", are_halved)
    for precision in ("fp32", "tf32", "bf16"):
        spec = RunSpec(hidden=(4,), optimizer="kfac-f", precision=precision).resolved()
        TrainingRun(spec, load("digits"))
    assert asked == ["ieee", "tf32", "tf32"]
