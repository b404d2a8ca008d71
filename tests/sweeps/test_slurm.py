"""A real slurmctld and slurmd on this machine: requeued, killed and timed-out tasks all finish.

Needs root and Debian's slurm-wlm: `pytest -m slurm tests/sweeps`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweeps.processes import stop_a_run
from sweeps.records import numbers
from sweeps.slurm_cluster import cluster, is_there
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.records import RunStore

pytestmark = pytest.mark.slurm
EIGHT = ["reproduce", "table1", "--tier", "quick"]
EIGHT += ["--only", "dataset=cifar10", "--only", "network=vgg16", "--only", "batch_norm=0"]
EIGHT += ["--checkpoint-every", "0.2"]
PATIENCE = 600.0  # seconds, on a busy machine


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if not is_there():
        pytest.skip("needs root and slurm-wlm")
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as environment:
        yield environment


def words(*arguments):
    return [sys.executable, "-m", "decaylab", *map(str, arguments)]


def decaylab(environment, *arguments):
    """A command in this process, which has torch already."""
    conf = {"SLURM_CONF": environment["SLURM_CONF"]}
    return CliRunner().invoke(app, [*map(str, arguments)], env=conf)


def pending(pid, number):
    """Whether a signal waits for a stopped process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd")]
    return bool(int(mask, 16) >> (number - 1) & 1)


class Tasks:
    """The sweep's runs, stopped in the middle one after another."""

    def __init__(self, runs, submitted):
        self.store, self.submitted = RunStore(runs), submitted
        self.taken = set()

    def stopped_in_the_middle(self):
        """Run id and process of the next run that is under way, stopped there."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.submitted.poll() is None, self.submitted.communicate()
            if stopped := stop_a_run(self.store, self.taken):
                self.taken.add(stopped[0])
                return stopped
            time.sleep(0.02)
        raise AssertionError("no run under way")


def task_of(environment, run_id):
    """The job and task of Slurm that has a run."""
    squeue = ["squeue", "-h", "-r", "-t", "running", "-o", "%F_%K"]
    for task in subprocess.check_output(squeue, env=environment, text=True).split():
        number = task.split("_")[1]
        script = subprocess.check_output(
            ["scontrol", "write", "batch_script", task.split("_")[0], "-"],
            env=environment, text=True,
        )  # fmt: skip
        (line,) = [text for text in script.splitlines() if text.startswith(f"{number}) ")]
        if run_id in line:
            return task
    raise AssertionError(f"no task has {run_id}")


def end_soon(environment, task):
    """Give a task one to two minutes more: it is told at the next look of Slurm."""
    squeue = ["squeue", "-h", "-j", task, "-o", "%M"]
    *_, minutes, _ = subprocess.check_output(squeue, env=environment, text=True).split(":")
    limit_time(environment, task, int(minutes) + 2)


def limit_time(environment, task, minutes):
    update = ["scontrol", "update", f"JobId={task}", f"TimeLimit={minutes}"]
    subprocess.check_call(update, env=environment)


def test_requeued_killed_and_timed_out_tasks_end_as_an_undisturbed_local_sweep(slurm, tmp_path):
    local = decaylab(slurm, *EIGHT, "--runs", tmp_path / "local")
    assert local.exit_code == 0, local.output
    runs = tmp_path / "slurm"
    arguments = [*EIGHT, "--runs", runs, "--engine", "slurm", "--jobs", 8, "--wait"]
    submitted = subprocess.Popen(
        words(*arguments),
        env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    tasks = Tasks(runs, submitted)
    killed, pid = tasks.stopped_in_the_middle()
    os.kill(pid, signal.SIGKILL)
    requeued, _ = tasks.stopped_in_the_middle()
    subprocess.check_call(["scontrol", "requeue", task_of(slurm, requeued)], env=slurm)
    late, pid = tasks.stopped_in_the_middle()
    task = task_of(slurm, late)
    end_soon(slurm, task)
    deadline = time.monotonic() + PATIENCE
    while not pending(pid, signal.SIGUSR1):  # Slurm looks at time limits every 30 s
        assert time.monotonic() < deadline
        time.sleep(0.2)
    limit_time(slurm, task, 60)  # or Slurm could tell it each time that it has just begun again
    os.kill(pid, signal.SIGCONT)
    output, _ = submitted.communicate(timeout=2 * PATIENCE)
    assert submitted.returncode == 0, output
    assert output.count("submitted as Slurm job") == 2, output  # the killed one, once more
    assert "8 of 8 runs ended, 0 left" in output
    assert numbers(runs) == numbers(tmp_path / "local")
    store = RunStore(runs)
    resumes = {run: store.folder(run).manifest().resumes for run in (killed, requeued, late)}
    assert min(resumes.values()) >= 1, resumes
    status = json.loads(decaylab(slurm, "sweep", "status", "--runs", runs, "--json").stdout)
    assert [(entry["finished"], entry["left"]) for entry in status] == [(8, 0)]
    again = decaylab(slurm, *arguments)
    assert "submitted" not in again.stdout
    assert again.exit_code == 0


def test_what_slurm_refuses_is_one_sentence_and_nothing_is_submitted(slurm, tmp_path):
    refused = decaylab(
        slurm, *EIGHT, "--runs", tmp_path, "--engine", "slurm", "--sbatch", "partition=nowhere"
    )
    assert refused.exit_code == 2
    assert "'nowhere'" in refused.stderr
    assert refused.stderr.count("\n") == 1
    gpus = decaylab(
        slurm, *EIGHT, "--runs", tmp_path, "--engine", "slurm", "--sbatch", "gpus=b200:1"
    )
    assert gpus.exit_code == 2
    assert "'b200'" in gpus.stderr
    assert gpus.stderr.count("\n") == 1
    nothing = decaylab(slurm, "sweep", "status", "--runs", tmp_path)
    assert "no sweeps" in nothing.stdout
    dead = tmp_path / "dead.conf"  # where nobody listens
    text = Path(slurm["SLURM_CONF"]).read_text()
    text = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", text)
    dead.write_text(re.sub(r"MessageTimeout=\d+", "MessageTimeout=2", text))
    unreachable = decaylab(
        slurm | {"SLURM_CONF": str(dead)}, *EIGHT, "--runs", tmp_path, "--engine", "slurm"
    )
    assert unreachable.exit_code == 2
    assert "reaching slurmctld failed" in unreachable.stderr
    assert unreachable.stderr.count("\n") == 1


def test_a_cancelled_sweep_saves_checkpoints_and_is_said_to_be_left(slurm, tmp_path):
    arguments = [*EIGHT, "--runs", tmp_path, "--engine", "slurm", "--jobs", 8]
    submitted = decaylab(slurm, *arguments)
    assert submitted.exit_code == 0, submitted.output
    name = submitted.stdout.split()[1].rstrip(":")
    store = RunStore(tmp_path)
    deadline = time.monotonic() + PATIENCE
    while not any(folder.rows().rows for folder in store.runs()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    twice = decaylab(slurm, *arguments)
    assert "submitted as" not in twice.stdout  # a job has each of them
    cancelled = decaylab(slurm, "sweep", "cancel", name, "--runs", tmp_path)
    assert cancelled.exit_code == 0, cancelled.output
    deadline = time.monotonic() + PATIENCE
    while True:
        result = decaylab(slurm, "sweep", "status", name, "--runs", tmp_path, "--json")
        (status,) = json.loads(result.stdout)
        if not status["running"] + status["waiting"]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert status["left"] > 0
    stopped = [run for run in store.runs() if not run.is_finished() and run.rows().rows]
    assert all(run.checkpoint.exists() for run in stopped)
