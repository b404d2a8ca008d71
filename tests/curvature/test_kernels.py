"""Kernels against the formula; those for CUDA run in Triton's interpreter too, if there is one."""

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

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture
def device(request, monkeypatch):
    """A device to make tensors on, where kernels run: "interpreter" is Triton's, on the CPU."""
    if request.param != "interpreter":
        yield request.param
        return
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    kernels._kernels.cache_clear()
    yield "cpu"
    kernels._kernels.cache_clear()


def fold(request, *arguments):
    """`fold_`, by the kernel wherever there is one."""
    if "interpreter" in request.node.callspec.params.values():
        assert kernels._folded(*arguments)
    else:
        fold_(*arguments)


@pytest.mark.parametrize("device", ["cpu", "interpreter", CUDA], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 70, 70)])
def test_a_fold_mixes_in_the_mean_and_leaves_out_what_is_not_finite(request, device, dtype, shape):
    average, total = torch.randn(2, *shape, dtype=dtype, device=device).unbind()
    total[1] = torch.nan
    keep, count = torch.tensor([[0.0, 1.0, 0.75], [8.0, 0.0, 4.0]], dtype=dtype, device=device)
    wanted = average.clone()
    wanted[0] = total[0] / 8
    wanted[2] = 0.75 * average[2] + 0.25 * total[2] / 4
    fold(request, average, total, keep, count)
    torch.testing.assert_close(average, wanted)


@pytest.mark.parametrize("device", ["cpu", "interpreter", CUDA], indirect=True)
def test_a_fold_into_a_part_of_a_stack_leaves_the_rest(request, device):
    stack = torch.randn(5, 33, 33, device=device)
    before, total = stack.clone(), torch.randn(2, 33, 33, device=device)
    keep, count = torch.tensor([[0.0, 0.0], [4.0, 4.0]], device=device)
    fold(request, stack[1:3], total, keep, count)
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


@pytest.mark.parametrize("device", ["interpreter", CUDA], indirect=True)
@pytest.mark.parametrize(
    ("name", "dtype"),  # each pair is a compilation of its own on CUDA
    [
        *((name, torch.float32) for name in LAYERS),
        ("all different", torch.bfloat16),
        ("all different", torch.float64),
    ],
)
@pytest.mark.parametrize("order", ["contiguous", "channels last", "a part"])
@torch.no_grad()
def test_patches_are_gathered_as_torch_does(device, name, dtype, order):
    layer = LAYERS[name]()
    sizes = (2, layer.in_channels, 12, 11)[: layer.weight.dim()]
    inputs = torch.randn(sizes, device=device).to(dtype)
    if order == "a part":
        inputs = inputs[..., 1:-2]
    elif order == "channels last" and inputs.dim() == 4:
        inputs = inputs.to(memory_format=torch.channels_last)
    bias = layer.bias is not None
    width = layer.weight[0].numel()
    columns = Columns(weight=True, bias=bias, wide=-(-(width + bias) // 32) * 32)
    rows = conv._gathered(layer, inputs, columns)
    assert rows is not None
    view = conv.patches(layer, inputs, channels_last=False)
    expected = torch.zeros_like(rows)
    expected[..., :width] = view.reshape(*expected.shape[:3], width)
    expected[..., width : width + bias] = 1
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("device", ["interpreter", CUDA], indirect=True)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 131, 300])
def test_triangles_are_packed_as_torch_does(device, length):
    matrices = torch.randn(2, length, length, device=device)
    triangles = torch.full((2, *packed_shape(length)), torch.nan, device=device)
    assert packed_triangles(triangles, matrices)
    assert torch.equal(triangles.cpu(), pack(matrices.cpu()))
