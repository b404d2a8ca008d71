"""How a run's device computes: the precision of float32 products, and whether bits repeat."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decaylab.errors import BadValue

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def arithmetic(precision: str, *, deterministic: bool = False) -> Iterator[None]:
    """Torch's settings for a run while inside; the caller's come back after.

    CUDA: IEEE products of float32 for fp32; TF32 for tf32, and for what bf16 leaves in float32.
    cuDNN looks for its fastest convolutions, unless deterministic algorithms are asked for, here or
    by the caller: then torch uses those that give the same bits each time, and refuses what has
    none.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    settings: list[tuple[Any, str, Any]] = [
        (matmul, "fp32_precision", "ieee" if precision == "fp32" else "tf32"),
        (cudnn.conv, "fp32_precision", "ieee" if precision == "fp32" else "tf32"),
    ]
    asked = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.append((cudnn, "benchmark", not (asked or deterministic)))
    if deterministic:
        settings.append((cudnn, "deterministic", True))
        # else every new tensor is filled once for nothing
        settings.append((torch.utils.deterministic, "fill_uninitialized_memory", False))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(asked, warn_only=warn_only)
        for owner, name, value in before:
            setattr(owner, name, value)


def prepare_deterministic(device: torch.device) -> None:
    """CUDA: fix cuBLAS's workspace, which it does not look at again once CUDA has started."""
    if device.type != "cuda" or os.environ.get(WORKSPACE) in FIXED_WORKSPACES:
        return
    if torch.cuda.is_initialized():
        remedy = (
            "deterministic = true needs it before CUDA starts; set it in the environment and start"
            " again"
        )
        raise BadValue(WORKSPACE, os.environ.get(WORKSPACE, ""), FIXED_WORKSPACES[0], remedy)
    os.environ[WORKSPACE] = FIXED_WORKSPACES[0]
