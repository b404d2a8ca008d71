"""Watching sharded models gives the records of one process; each case runs in two processes."""

from pathlib import Path

import pytest
from oracle.two_ranks import failures

CASES = Path(__file__).with_name("sharded_cases.py")
OF_FOUR = (
    "tensor_parallelism_in_fully_shard",
    "replicas_and_shards_of_four",
    "teams_that_overlap",
)


@pytest.mark.slow
def test_two_processes(tmp_path):
    assert failures(tmp_path, "cpu", script=CASES) == []


@pytest.mark.slow
def test_four_processes(tmp_path):
    assert failures(tmp_path, "cpu", *OF_FOUR, size=4, script=CASES) == []
