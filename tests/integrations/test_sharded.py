"""Sharded models under the libraries that people train with, in two processes."""

from pathlib import Path

import pytest
from oracle.two_ranks import failures

CASES = Path(__file__).with_name("sharded_cases.py")


@pytest.mark.slow
def test_two_processes(tmp_path):
    for library in ("pytorch_lightning", "transformers", "accelerate"):
        pytest.importorskip(library)
    assert failures(tmp_path, "cpu", script=CASES) == []
