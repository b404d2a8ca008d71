"""One run trained by several processes: as by one, killed, and continued by another number."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from decaylab.cli import options
from decaylab.curvature.outputs import sampled
from decaylab.data import Batches, load
from decaylab.errors import DecaylabError
from decaylab.records import RunStore
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import RunSpec, TrainingRun
from decaylab.training.world import World, launched

CASES = Path(__file__).with_name("world_cases.py")
SECONDS = 300
SPEC = RunSpec(data="digits", network="mlp", hidden=(8,), epochs=1)


def environment(**given: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **given}


# -- several processes --


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Weights, optimizer states and values, in double precision, with batch norm and without."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(CASES)],
            env=environment(RANK=rank, LOCAL_RANK=rank, **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for output in outputs:
        lines = output.splitlines()
        assert len(lines) >= 7, output
        assert all(line.endswith(" ok") for line in lines), output


def torchrun_command(processes: int, restarts: int = 0) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*run, f"--max-restarts={restarts}"] if processes > 1 else []


def started(folder: Path, processes: int, restarts: int = 0) -> subprocess.Popen:
    command = ["-m", "decaylab", "train", "--data", "digits", "--network", "mlp", "--hidden", "8"]
    command += ["--optimizer", "kfac-g", "--initialize-batches", "2", "--epochs", "20"]
    command += ["--runs", str(folder), "--checkpoint-every", "0"]
    return subprocess.Popen(
        [sys.executable, *torchrun_command(processes, restarts), *command],
        env=environment(),
        stdout=subprocess.DEVNULL,
    )


def kill_rank(torchrun: subprocess.Popen, rank: int) -> None:
    """The process of that rank, among torchrun's."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            os.kill(int(child), signal.SIGKILL)
            return
    raise AssertionError(f"no process of rank {rank}")


def wait_for_step(folder: Path, torchrun: subprocess.Popen, epoch: int) -> None:
    """Until the rows of an epoch are written."""
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends and torchrun.poll() is None:
        runs = list(folder.glob("*/spec.toml"))
        if runs and any(r.epoch >= epoch for r in rows(folder)):
            return
        time.sleep(0.05)
    raise AssertionError("it has ended before, or does not get there")


def rows(folder: Path):
    (run,) = folder.glob("*/spec.toml")
    return RunStore(folder).folder(run.parent.name).rows().rows


def manifest(folder: Path) -> dict:
    (path,) = folder.glob("*/manifest.json")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_killed_processes_are_gone_on_from_by_any_number(tmp_path):
    """Two, which torchrun starts once more, four, and one in the end: as one all the time."""
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    for processes, killed, epochs in ((2, 1, (2, 5)), (4, 0, (8,))):
        torchrun = started(folder, processes, restarts=len(epochs) - 1)
        try:
            for epoch in epochs:
                wait_for_step(folder, torchrun, epoch)
                kill_rank(torchrun, killed)
            assert torchrun.wait(SECONDS) != 0
        finally:
            torchrun.kill()
        assert manifest(folder)["status"] in ("interrupted", "running")
    for place in (folder, whole):
        alone = started(place, 1)
        assert alone.wait(SECONDS) == 0
    resumed = manifest(folder)
    assert (resumed["status"], resumed["resumes"]) == ("finished", 3)
    assert resumed["device"] == "2 x cpu + 4 x cpu + cpu"
    found, expected = (
        {(row.epoch, row.step, row.name): row.value for row in rows(place)}
        for place in (folder, whole)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "seconds" not in key[2]:
            assert found[key] == pytest.approx(value, rel=1e-2, abs=1e-3), key


@pytest.mark.slow
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
    with pytest.raises(DecaylabError, match="cannot be shared equally"):
        TrainingRun(SPEC, load("digits"), world=World(0, 3))


def test_compiled_networks_are_refused():
    with pytest.raises(DecaylabError, match="--compiled"):
        TrainingRun(SPEC, load("digits"), compiled=True, world=World(0, 2))


def test_runs_that_take_turns_are_refused():
    with pytest.raises(DecaylabError, match="--at-once"):
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
        pytest.raises(DecaylabError, match="--nproc-per-node"),
        options.together("auto", torch.device("cuda")),
    ):
        pass
