"""Kernels, in the version of this device, against the formula."""

import contextlib

import pytest
import torch

from decaylab.curvature import kernels
from decaylab.curvature.kernels import fold_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 70, 70)])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_fold_mixes_in_the_mean_and_leaves_out_what_is_not_finite(device, shape, kind):
    average, total = torch.randn(2, *shape, device=device).unbind()
    total[1] = torch.nan
    keep = torch.tensor([0.0, 1.0, 0.75], device=device)
    count = 8.0 if kind == "number" else torch.tensor(8.0, device=device)
    wanted = average.clone()
    wanted[0] = total[0] / 8
    wanted[2] = 0.75 * average[2] + 0.25 * total[2] / 8
    fold_(average, total, keep, count)
    torch.testing.assert_close(average, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fold_into_a_part_of_a_stack_leaves_the_rest(device):
    stack = torch.randn(5, 33, 33, device=device)
    before, total = stack.clone(), torch.randn(2, 33, 33, device=device)
    fold_(stack[1:3], total, torch.zeros(2, device=device), 4.0)
    torch.testing.assert_close(stack[1:3], total / 4)
    assert torch.equal(stack[[0, 3, 4]], before[[0, 3, 4]])


def test_without_a_c_compiler_it_is_said_once_and_torch_does_it(monkeypatch):
    class Kernel:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "_kernel", Kernel)
    monkeypatch.setattr(kernels, "_usable", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    arguments = (torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1), 4.0)
    with pytest.warns(UserWarning, match="C compiler"):
        assert not kernels._folded(*arguments)
    assert not kernels._folded(*arguments)


@pytest.mark.gpu
def test_a_fold_of_a_very_long_side():
    """More than 65535 blocks, which is as many as most axes of a grid take."""
    average = torch.zeros(1, 65536 * kernels.BLOCK, device="cuda")
    total = torch.ones_like(average)
    fold_(average, total, torch.zeros(1, device="cuda"), 2.0)
    assert bool((average == 0.5).all())
