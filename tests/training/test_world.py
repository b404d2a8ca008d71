"""One run trained by several processes: as by one, killed, and continued by another number."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from refusals import refuses
from torch.nn import functional as F
from training import world_cases
from typer.testing import CliRunner

from decaylab.cli import app, options
from decaylab.curvature.outputs import sampled
from decaylab.data import Batches, load
from decaylab.errors import BadValue, Misplaced, OutOfRange
from decaylab.records import RunStore
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import RunSpec, TrainingRun, checkpoint
from decaylab.training.world import AGREED_EVERY, World, launched

CASES = Path(world_cases.__file__)
HELD = Path(__file__).with_name("held_at_a_step.py")
SECONDS = 600
SPEC = RunSpec(data="digits", network="mlp", hidden=(8,), epochs=1)


def environment(**given: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **given}


# -- several processes --


@pytest.mark.torchrun
def test_two_processes_train_as_one(tmp_path):
    """Weights, optimizer states and values, in double precision, with batch norm and without."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *torchrun_command(2), str(CASES)],
        env=environment(PYTHONWARNINGS="error"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(world_cases.CASES), done.stdout
    assert all(line.endswith(" ok") for line in lines), done.stdout


def torchrun_command(processes: int, restarts: int = 0) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*run, f"--max-restarts={restarts}"]


def training(folder: Path) -> list[str]:
    command = ["train", "--data", "digits", "--network", "mlp", "--hidden", "8"]
    command += ["--optimizer", "kfac-g", "--initialize-batches", "2", "--epochs", "10"]
    return [*command, "--runs", str(folder), "--checkpoint-every", "0"]


def started(folder: Path, processes: int, restarts: int = 0) -> subprocess.Popen:
    """Held before the steps that have a file in FOLDER.hold (`held_at_a_step.py`)."""
    hold = folder.with_suffix(".hold")
    hold.mkdir(exist_ok=True)
    torchrun = torchrun_command(processes, restarts)
    with folder.with_suffix(".stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, *torchrun, str(HELD), *training(folder)],
            env=environment(HOLD=str(hold)),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def kill_rank(torchrun: subprocess.Popen, rank: int) -> None:
    """The process of that rank, among torchrun's."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            os.kill(int(child), signal.SIGKILL)
            return
    raise AssertionError(f"no process of rank {rank}")


def wait_until(what: str, folder: Path, torchrun: subprocess.Popen, step: int, count: int) -> None:
    """Until all processes are "held" before a step, or "told" there, with a checkpoint."""
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        assert torchrun.poll() is None, folder.with_suffix(".stderr").read_text()
        marks = list(folder.with_suffix(".hold").glob(f"{what}.{step}.*"))
        if len(marks) == count and list(folder.glob("*/checkpoint.safetensors")):
            return
        time.sleep(0.05)
    raise AssertionError(f"it does not get to step {step}")


def rows(folder: Path):
    (run,) = folder.glob("*/spec.toml")
    return RunStore(folder).folder(run.parent.name).rows().rows


def manifest(folder: Path) -> dict:
    (path,) = folder.glob("*/manifest.json")
    return json.loads(path.read_text())


@pytest.mark.torchrun
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_killed_processes_are_gone_on_from_by_any_number(tmp_path):
    """Two, which torchrun starts once more, four, and one in the end: as one all the time."""
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    folder.with_suffix(".hold").mkdir()
    for processes, killed, steps in ((2, 1, (22, 55)), (4, 0, (88,))):
        gates = [folder.with_suffix(".hold") / str(step) for step in steps]
        for gate in gates:
            gate.touch()
        torchrun = started(folder, processes, restarts=len(steps) - 1)
        try:
            for step, gate in zip(steps, gates, strict=True):
                wait_until("held", folder, torchrun, step, processes)
                kill_rank(torchrun, killed)
                gate.unlink()
            assert torchrun.wait(SECONDS) != 0
        finally:
            torchrun.kill()
        told = folder.with_suffix(".stderr").read_text()
        assert f"another of the {processes} processes of this training has ended" in told
        assert "Traceback" not in told.split("another of")[0]
        assert manifest(folder)["status"] in ("interrupted", "running")
    for place in (folder, whole):
        alone = CliRunner().invoke(app, training(place))
        assert alone.exit_code == 0, alone.output
    resumed = manifest(folder)
    assert (resumed["status"], resumed["resumes"]) == ("finished", 3)
    assert resumed["device"] == "2 x cpu + 4 x cpu + cpu"
    devices = [start["device"] for start in resumed["starts"]]
    assert devices == ["2 x cpu", "2 x cpu", "4 x cpu", "cpu"]
    found, expected = (
        {(row.epoch, row.step, row.name): row.value for row in rows(place)}
        for place in (folder, whole)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "seconds" not in key[2]:
            assert found[key] == pytest.approx(value, rel=1e-2, abs=1e-3), key


@pytest.mark.torchrun
def test_a_signal_to_torchrun_stops_all_after_the_same_step_with_a_checkpoint(tmp_path):
    folder = tmp_path / "stopped"
    gate = folder.with_suffix(".hold") / "22"
    gate.parent.mkdir()
    gate.touch()
    torchrun = started(folder, 2)
    try:
        wait_until("held", folder, torchrun, 22, 2)
        torchrun.send_signal(signal.SIGTERM)
        wait_until("told", folder, torchrun, 22, 2)
        gate.unlink()
        assert torchrun.wait(SECONDS) != 0
    finally:
        torchrun.kill()
    assert manifest(folder)["status"] == "interrupted"
    (path,) = folder.glob("*/checkpoint.safetensors")
    step = checkpoint.load(path)["step"]
    assert step == 22 + -22 % AGREED_EVERY


@pytest.mark.torchrun
def test_several_processes_make_the_runs_of_a_cell(tmp_path):
    command = ["-m", "decaylab", "reproduce", "table1", "--tier", "smoke", "--runs", str(tmp_path)]
    command += ["--only", "network=vgg16", "--only", "optimizer=kfac-g", "--only", "batch_norm=1"]
    made = subprocess.run(
        [sys.executable, *torchrun_command(2), *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    ended = [json.loads(path.read_text()) for path in tmp_path.glob("*/manifest.json")]
    assert [(run["status"], run["device"]) for run in ended] == [("finished", "2 x cpu")] * 2


# -- parts of a whole --


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_parts_of_a_batch_make_up_the_batch(augment, as_tensor):
    data = load("digits")

    def batches(share=(0, 1)):
        made = Batches(
            data.train, batch_size=60, mean=data.mean, std=data.std, augment=augment, share=share
        )
        made.begin_epoch()
        return made.batch(torch.tensor(3) if as_tensor else 3)

    images, labels = batches()
    parts = [batches((rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat([part[0] for part in parts]), images)
    assert torch.equal(torch.cat([part[1] for part in parts]), labels)


@pytest.mark.parametrize("kind", [("fisher", "categorical"), ("fisher", "bernoulli")])
def test_samples_of_the_parts_are_those_of_the_batch(kind):
    logits = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    drawn = sampled(logits, *kind, torch.Generator().manual_seed(1))
    parts = [
        sampled(part, *kind, torch.Generator().manual_seed(1), (rank, 3))
        for rank, part in enumerate(logits.chunk(3))
    ]
    assert torch.equal(torch.cat(parts), drawn)


def test_every_image_is_evaluated_by_one_process():
    indices = list(range(10))
    parts = [indices[World(rank, 4).part(10)] for rank in range(4)]
    assert [index for part in parts for index in part] == indices


# -- one process --


def test_one_process_asks_nobody():
    world, state = World(), {"a": torch.ones(2)}
    before = F.batch_norm
    with world.whole_batch():
        assert F.batch_norm is before
    assert world.from_first(state) is state
    assert world.agreed(7, 1, 15) == (1, 15)
    assert world.first


def test_torchrun_is_seen_in_the_environment():
    assert launched({"RANK": "0", "WORLD_SIZE": "2"})
    assert not launched({"RANK": "0", "WORLD_SIZE": "1"})
    assert not launched({})


# -- refusals --


def test_batches_that_cannot_be_shared_are_refused():
    with refuses(BadValue, name="the batch size"):
        TrainingRun(SPEC, load("digits"), world=World(0, 3))


def test_compiled_networks_are_refused():
    with refuses(Misplaced, settings=["--compiled"]):
        TrainingRun(SPEC, load("digits"), compiled=True, world=World(0, 2))


def test_runs_that_take_turns_are_refused():
    with refuses(Misplaced, settings=["--at-once"]):
        WorkerOptions(device=torch.device("cpu"), at_once=2, world=World(0, 2))


# -- GPUs --


@pytest.mark.parametrize(
    ("variable", "number", "index"), [("LOCAL_RANK", "1", 1), ("SLURM_LOCALID", "5", 1)]
)
def test_a_process_takes_the_gpu_of_its_number(monkeypatch, variable, number, index):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(variable, number)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert options.chosen_device("auto") == torch.device("cuda", index)
    assert options.chosen_device("cuda") == torch.device("cuda", index)
    assert options.chosen_device("cuda:3") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each task sees its own
    assert options.chosen_device("auto").index in (None, 0)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        refuses(OutOfRange, name="--nproc-per-node", value=2),
        options.together("auto", torch.device("cuda")),
    ):
        pass
