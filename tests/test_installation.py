"""A CPU machine gets a CPU torch, and none of what would replace it or needs CUDA."""

from importlib import metadata

import pytest
import torch


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_no_cuda_package_came_along():
    names = {(found.metadata["Name"] or "").lower() for found in metadata.distributions()}
    assert "torch" in names
    unwanted = {"torchvision", "torchaudio", "triton", "pytorch-triton"}
    assert not {n for n in names if n in unwanted or n.startswith("nvidia-")}
