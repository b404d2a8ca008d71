"""A Ray cluster on this machine: a worker that is killed is started again and its run goes on.

`pytest -m ray tests/sweeps`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from sweeps.records import numbers

from decaylab.records import RunStore

pytestmark = pytest.mark.ray
FOUR = ["reproduce", "table2", "--tier", "quick", "--only", "network=vgg16"]
FOUR += ["--checkpoint-every", "0.2"]


def words(*arguments):
    return [sys.executable, "-m", "decaylab", *map(str, arguments)]


def worker_of(runs, run_id):
    """The process that makes a run, and the worker of Ray that started it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError, IndexError):
            parts = path.read_bytes().split(b"\0")
            ours = {run_id.encode(), str(runs).encode()} <= set(parts)
            if ours and parts[0].endswith(b"python"):
                pid = int(path.parent.name)
                stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                return pid, int(stat[1])
    return None


def stop(pid):
    """Stop a process; False if it ended before."""
    while True:
        try:
            os.kill(pid, signal.SIGSTOP)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        if state in "TZX":
            return state == "T"
        time.sleep(0.005)


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
    store, killed = RunStore(runs), None
    while killed is None:
        assert sweep.poll() is None, sweep.communicate()[0]
        for folder in store.runs():
            processes = worker_of(runs, folder.id) if folder.checkpoint.exists() else None
            if processes is None:
                continue
            command, worker = processes
            if not stop(command) or folder.is_finished() or not folder.checkpoint.exists():
                with suppress(ProcessLookupError):
                    os.kill(command, signal.SIGCONT)
                continue
            killed = folder.id
            os.kill(worker, signal.SIGKILL)  # Ray's worker: its command, still stopped, ends too
            break
        time.sleep(0.02)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, output
    assert "4 of 4 runs ended, 0 left" in output
    assert store.folder(killed).manifest().resumes >= 1
    assert numbers(runs) == numbers(tmp_path / "alone")


def test_a_gpu_that_nobody_has_is_said_before_anything_starts(tmp_path):
    ray = pytest.importorskip("ray")
    from decaylab.errors import DecaylabError
    from decaylab.sweeps.engines import Job
    from decaylab.sweeps.engines.ray import RayEngine

    engine = RayEngine(tmp_path, cpus=1)
    try:
        with pytest.raises(DecaylabError, match="asks for 1 GPUs and the Ray cluster has 0"):
            engine.start([Job(("true",), gpus=1.0)])
    finally:
        ray.shutdown()
