"""What an engine cannot do: a sentence before anything is submitted, else in `sweep status`."""

import errno
import json
import os
import socket
import types
from dataclasses import replace

import pytest
from refusals import refused, refuses
from sweeps import fake_slurm
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import BadValue, Failed, Lacks, NotWritten, UnknownName
from decaylab.records import RunStore
from decaylab.sweeps import sweep as module
from decaylab.sweeps.engines import Job, local, slurm
from decaylab.sweeps.engines.local import LocalEngine
from decaylab.sweeps.engines.ray import RayEngine
from decaylab.sweeps.engines.slurm import SlurmEngine
from decaylab.sweeps.plan import PlannedRun
from decaylab.training import RunSpec

TABLE2 = ["reproduce", "table2", "--only", "network=vgg16", "--engine", "slurm"]
NODES = "gpu|gpu:a100:4(S:0-1)|node1\ncpu|(null)|node2\n"
ON_CPU, ON_GPU = [Job(("true",))], [Job(("true",), gpus=1.0)]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A Slurm of two partitions; `fails` gives a command another answer."""

    def fails(**answers):
        known = {"sinfo": (0, NODES, ""), "sbatch": (0, "41\n", ""), "squeue": (0, "", "")}
        fake_slurm.install(tmp_path / "bin", monkeypatch, **(known | answers))
        return tmp_path / "bin"

    fails()
    return fails


def reproduce(runs, *words):
    return CliRunner().invoke(app, [*TABLE2, "--runs", str(runs), *words])


@pytest.mark.parametrize(
    ("words", "kind", "fields"),
    [
        ("partition=nowhere", UnknownName, {"name": "nowhere", "choices": ("cpu", "gpu")}),
        ("gpus=b200:1", UnknownName, {"name": "b200", "choices": ("a100",)}),
        ("gres=gpu:b200:1", UnknownName, {"name": "b200", "choices": ("a100",)}),
        ("partition=cpu --sbatch gres=gpu:a100:1", UnknownName, {"name": "a100", "choices": ()}),
        ("partition=cpu --tier full", Lacks, {"owner": "Slurm's list of nodes"}),
    ],
)
def test_what_no_node_has_is_said_before_anything_is_submitted(
    cluster, tmp_path, words, kind, fields
):
    folder = cluster()
    error = refused(*TABLE2, "--runs", tmp_path / "runs", "--sbatch", *words.split())
    assert type(error) is kind
    assert fields.items() <= vars(error).items()
    assert not fake_slurm.calls(folder, "sbatch")


@pytest.mark.parametrize("gpus", ["gpus=a100:1", "gpus=2", "gres=gpu:1", "gres=gpu:a100"])
def test_what_a_node_has_is_submitted(cluster, tmp_path, gpus):
    folder = cluster()
    result = reproduce(tmp_path / "runs", "--sbatch", "partition=gpu", "--sbatch", gpus)
    assert result.exit_code == 0, result.output
    assert "submitted as Slurm job 41" in result.stdout
    assert len(fake_slurm.calls(folder, "sbatch")) == 1


def test_no_slurmctld_is_one_sentence(cluster, tmp_path, monkeypatch):
    unreachable = "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
    cluster(sinfo=(1, "", unreachable))
    error = refused(*TABLE2, "--runs", tmp_path / "runs")
    assert (type(error), error.what) == (Failed, "reaching slurmctld")
    monkeypatch.setattr(slurm, "ANSWERS_WITHIN", 0.2)
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/sh\nexec sleep 30\n")
    with refuses(Failed, what="Slurm's sinfo", reason="no answer in 0.2 s"):
        SlurmEngine("a", tmp_path, {}).check(ON_CPU)


def test_a_folder_in_memory_is_refused_where_other_hosts_need_it(cluster, tmp_path, monkeypatch):
    cluster()
    monkeypatch.setattr(slurm, "_in_memory", lambda folder: True)
    with refuses(BadValue, name="--runs", value=str(tmp_path / "a")):
        SlurmEngine("a", tmp_path / "a", {}).check(ON_CPU)


def test_tasks_that_failed_without_a_word_are_explained_by_status(cluster, tmp_path):
    runs = tmp_path / "runs"
    cluster()
    assert reproduce(runs).exit_code == 0
    (name,) = [path.name for path in (runs / "sweeps").iterdir()]
    cluster(squeue=(0, "0|NODE_FAIL|node7|None\n", ""))
    status = CliRunner().invoke(app, ["sweep", "status", "--runs", str(runs), "--json"])
    (entry,) = json.loads(status.stdout)
    assert entry["left"] == 4
    assert "node7 may not see" in entry["reasons"][0]
    out = runs / "sweeps" / name / "0.out"
    out.write_text("failed: a: cannot write (Disk quota exceeded)\n`decaylab report` shows them\n")
    cluster(squeue=(1, "", "slurm_load_jobs error: Invalid job id specified\n"))  # long ago
    status = CliRunner().invoke(app, ["sweep", "status", "--runs", str(runs)])
    assert "Disk quota exceeded" in status.stdout


@pytest.mark.usefixtures("one_thread")
def test_a_search_that_has_grown_is_left_to_its_jobs_while_they_are_at_work(cluster, tmp_path):
    words = ["search", "dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0"]
    words += ["optimizer=adam", "--tier", "smoke", "--lr", "0.001", "--weight-decay", "0.01,0.1"]
    words += ["--runs", str(tmp_path / "runs")]

    def submitted():
        result = CliRunner().invoke(app, [*words, "--engine", "slurm"])
        assert result.exit_code == 0, result.output
        return "submitted as Slurm job" in result.stdout

    assert submitted()
    assert CliRunner().invoke(app, [*words, "--no-widen", "--device", "cpu"]).exit_code == 0
    cluster(squeue=(0, "0|RUNNING|node1|None\n", ""))
    assert not submitted()  # the best is on an edge: one more value
    cluster()
    assert submitted()


def test_who_waits_is_told_why_tasks_failed(cluster, tmp_path):
    cluster(squeue=(0, "0|FAILED|node7|NonZeroExitCode\n", ""))
    result = reproduce(tmp_path / "runs", "--wait")
    assert result.exit_code == 1
    assert "0 of 4 runs ended, 4 left" in result.stdout
    assert result.stderr.count("job 0 failed") == 1
    assert "node7 may not see" in " ".join(result.stderr.split())


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path, monkeypatch, number
):
    def fails(path, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local.Path, "write_bytes", fails)
    with pytest.raises(NotWritten):
        LocalEngine(tmp_path / "a", 2).check(ON_CPU)
    assert not list((tmp_path / "a").iterdir())


def test_runs_of_another_user_are_named(tmp_path, monkeypatch):
    store, spec = RunStore(tmp_path), RunSpec(hidden=(8,), epochs=1)
    mine = PlannedRun(replace(spec, seed=1))
    with store.folder(spec.id).writing(spec.to_toml()):
        pass
    monkeypatch.setattr(module.os, "access", lambda path, mode: path.name != spec.id)
    module.check_owners([mine], store)
    with pytest.raises(NotWritten):
        module.check_owners([mine, PlannedRun(spec)], store)


def test_gpus_that_are_not_here_are_refused(tmp_path):
    with refuses(Lacks, owner="this machine", what="GPU"):
        LocalEngine(tmp_path, 2, gpus=0).check(ON_GPU)


def test_a_ray_that_does_not_answer_is_one_sentence_at_once(tmp_path, monkeypatch):
    def init(**options):
        raise AssertionError("it would try for minutes")

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init, __version__="2.40.0")
    monkeypatch.setattr("decaylab.sweeps.engines.ray.needed", lambda *words: ray)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{free.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")  # one that has ended
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        nobody = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        for given in (address, "auto"):
            monkeypatch.setenv("RAY_ADDRESS", given)
            with refuses(Failed, what="reaching Ray", reason=str(nobody)):
                RayEngine(tmp_path).check(ON_CPU)


def test_without_an_address_no_cluster_of_earlier_days_is_looked_for(tmp_path, monkeypatch):
    """Ray keeps the address of the last one, and tries for minutes where that has ended."""

    def init(**options):
        raise RuntimeError(options["address"])

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init, __version__="2.40.0")
    monkeypatch.setattr("decaylab.sweeps.engines.ray.needed", lambda *words: ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with refuses(Failed, what="reaching Ray", reason="local"):
        RayEngine(tmp_path).check(ON_CPU)


def test_a_ray_of_another_version_is_one_sentence(tmp_path, monkeypatch):
    def init(**options):
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\n"
        )

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init, __version__="2.40.0")
    monkeypatch.setattr("decaylab.sweeps.engines.ray.needed", lambda *words: ray)
    with refuses(Failed, what="reaching Ray") as caught:
        RayEngine(tmp_path).check(ON_CPU)
    assert "Ray: 2.9.0 Python: 3.10.1" in caught.value.reason
    assert "2.40.0" in caught.value.remedy
