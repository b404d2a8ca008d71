"""Data-parallel K-FAC on CUDA: two ranks that share the device, over gloo."""

import pytest
import torch
from oracle.two_ranks import failures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_two_ranks_on_one_device(tmp_path):
    """All that is tested on a CPU, SyncBatchNorm, single precision and CUDA graphs."""
    assert failures(tmp_path, "cuda") == []
