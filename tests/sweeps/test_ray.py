"""A Ray cluster on this machine: a worker that is killed is started again and its run goes on.

`pytest -m ray tests/sweeps`.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from refusals import refuses
from sweeps.processes import state_and_parent, stop_a_run
from sweeps.records import numbers

from decaylab.records import RunStore

pytestmark = pytest.mark.ray
FOUR = ["reproduce", "table2", "--tier", "quick", "--only", "network=vgg16"]
FOUR += ["--checkpoint-every", "0.2"]


def words(*arguments):
    return [sys.executable, "-m", "decaylab", *map(str, arguments)]


def test_a_killed_worker_is_retried_and_the_records_are_those_of_one_process(tmp_path):
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    alone = subprocess.run(
        words(*FOUR, "--runs", tmp_path / "alone"), env=environment, capture_output=True, text=True
    )
    assert alone.returncode == 0, alone.stderr
    runs = tmp_path / "ray"
    arguments = [*FOUR, "--runs", runs, "--engine", "ray", "--jobs", 4]
    sweep = subprocess.Popen(
        words(*arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    store, stopped = RunStore(runs), None
    while stopped is None:
        assert sweep.poll() is None, sweep.communicate()[0]
        time.sleep(0.02)
        stopped = stop_a_run(store)
    killed, command = stopped
    _, worker = state_and_parent(command)
    os.kill(worker, signal.SIGKILL)  # Ray's worker: its command, still stopped, ends too
    output, _ = sweep.communicate(timeout=600)
    assert sweep.returncode == 0, output
    assert "4 of 4 runs ended, 0 left" in output
    assert store.folder(killed).manifest().resumes >= 1
    assert numbers(runs) == numbers(tmp_path / "alone")


def test_a_gpu_that_nobody_has_is_said_before_anything_starts(tmp_path):
    ray = pytest.importorskip("ray")
    from decaylab.errors import OutOfRange
    from decaylab.sweeps.engines import Job
    from decaylab.sweeps.engines.ray import RayEngine

    engine = RayEngine(tmp_path, cpus=1)
    try:
        with refuses(OutOfRange, name="the number of GPUs of a job", value=1.0):
            engine.start([Job(("true",), gpus=1.0)])
    finally:
        ray.shutdown()
