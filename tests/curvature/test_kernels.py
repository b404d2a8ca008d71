"""Kernels, in the version of this device, against the formula."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from decaylab.curvature import kernels
from decaylab.curvature.kernels import fold_, packed_triangles
from decaylab.curvature.kinds import conv
from decaylab.curvature.kinds.rows import Columns
from decaylab.curvature.storage import pack, packed_shape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 70, 70)])
def test_a_fold_mixes_in_the_mean_and_leaves_out_what_is_not_finite(device, shape):
    average, total = torch.randn(2, *shape, device=device).unbind()
    total[1] = torch.nan
    keep = torch.tensor([0.0, 1.0, 0.75], device=device)
    count = torch.tensor([8.0, 0.0, 4.0], device=device)
    wanted = average.clone()
    wanted[0] = total[0] / 8
    wanted[2] = 0.75 * average[2] + 0.25 * total[2] / 4
    fold_(average, total, keep, count)
    torch.testing.assert_close(average, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fold_into_a_part_of_a_stack_leaves_the_rest(device):
    stack = torch.randn(5, 33, 33, device=device)
    before, total = stack.clone(), torch.randn(2, 33, 33, device=device)
    fold_(stack[1:3], total, torch.zeros(2, device=device), torch.full((2,), 4.0, device=device))
    torch.testing.assert_close(stack[1:3], total / 4)
    assert torch.equal(stack[[0, 3, 4]], before[[0, 3, 4]])


def test_without_a_c_compiler_it_is_said_once_and_torch_does_it(monkeypatch):
    class Kernel:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "_kernels", lambda: SimpleNamespace(fold=Kernel()))
    monkeypatch.setattr(kernels, "_usable", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    arguments = (torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1), torch.ones(1))
    with pytest.warns(UserWarning, match="C compiler"):
        assert not kernels._folded(*arguments)
    assert not kernels._folded(*arguments)


@pytest.mark.gpu
def test_a_fold_of_a_very_long_side():
    """More than 65535 blocks, which is as many as most axes of a grid take."""
    average = torch.zeros(1, 65536 * kernels.BLOCK, device="cuda")
    total = torch.ones_like(average)
    fold_(average, total, torch.zeros(1, device="cuda"), torch.full((1,), 2.0, device="cuda"))
    assert bool((average == 0.5).all())


LAYERS = {
    "plain": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "groups": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
    "each channel": lambda: nn.Conv2d(6, 6, 3, groups=6),
    "all different": lambda: nn.Conv2d(4, 4, (3, 2), (2, 1), (0, 1), (1, 2)),
    "pointwise": lambda: nn.Conv2d(70, 4, 1),
    "same": lambda: nn.Conv2d(16, 4, 4, padding="same", dilation=2),
    "one axis": lambda: nn.Conv1d(4, 6, 4, 2, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", ["contiguous", "channels last", "a part"])
@torch.no_grad()
def test_patches_are_gathered_as_torch_does(name, dtype, order):
    layer = LAYERS[name]()
    sizes = (2, layer.in_channels, 12, 11)[: layer.weight.dim()]
    inputs = torch.randn(sizes, device="cuda").to(dtype)
    if order == "a part":
        inputs = inputs[..., 1:-2]
    elif order == "channels last" and inputs.dim() == 4:
        inputs = inputs.to(memory_format=torch.channels_last)
    bias = layer.bias is not None
    width = layer.weight[0].numel()
    columns = Columns(weight=True, bias=bias, wide=-(-(width + bias) // 32) * 32)
    rows = conv._gathered(layer, inputs, columns)
    view = conv.patches(layer, inputs, channels_last=False)
    expected = torch.zeros_like(rows)
    expected[..., :width] = view.reshape(*expected.shape[:3], width)
    expected[..., width : width + bias] = 1
    assert torch.equal(rows, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 2, 7, 64, 131, 1000])
def test_triangles_are_packed_as_torch_does(length):
    matrices = torch.randn(2, length, length, device="cuda")
    triangles = torch.full((2, *packed_shape(length)), torch.nan, device="cuda")
    assert packed_triangles(triangles, matrices)
    assert torch.equal(triangles.cpu(), pack(matrices.cpu()))
