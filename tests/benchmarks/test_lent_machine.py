"""A queue on a lent machine: begun, killed, begun again, collected in tars, and read at home."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUEUE = """
[[entry]]
name = "pairs"
reproduce = "table2"
only = ["network=vgg16", "optimizer=sgd"]
tier = "smoke"

[[entry]]
name = "waits"
command = ["python", "waits.py"]
writes = "results/loops/waited.json"
minutes = 1
"""
WAITS = """
import time
from pathlib import Path

import decaylab

while not Path("go").exists():
    time.sleep(0.05)
Path("results/loops").mkdir(exist_ok=True)
Path("results/loops/waited.json").write_text("{}")
"""


class Machine:
    """A copy of the tree without a git history, and without an installed package."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
        (folder / "queue.toml").write_text(QUEUE)
        (folder / "waits.py").write_text(WAITS)
        (folder / "results").mkdir()

    def __call__(self, *words, **environment):
        script = [sys.executable, "benchmarks/lent_machine.py", *map(str, words)]
        return subprocess.run(
            script,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def start(self, *options, **environment):
        words = ["--queue", "queue.toml", "--runs", "results", "--device", "cpu", "--at-once", "2"]
        said = self("start", "--minutes", 10, *options, "--", *words, **environment)
        return int(said.split()[1]) if said.startswith("process") else None

    def collected(self):
        """By name, what the tars of a collection hold."""
        contents = {}
        for path in sorted((self.folder / "out").glob("*.tar.gz")):
            with tarfile.open(path) as tar:
                for entry in tar:
                    assert entry.name not in contents
                    contents[entry.name] = tar.extractfile(entry).read()
        return contents


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path / "machine")
    yield made
    (made.folder / "go").touch()
    made("collect", "out", "--wait", 60)


def until(condition):
    while not (value := condition()):
        time.sleep(0.1)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "rows.jsonl"])
def test_a_file_takes_no_more_room_in_a_tar_than_is_counted(name, tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import lent_machine
    finally:
        sys.path.pop(0)
    content = lent_machine.Content(Path(name), random.Random(0).randbytes(2**22), 0.0)
    lent_machine.write_tar(tmp_path / "one.tar.gz", [content])
    assert (tmp_path / "one.tar.gz").stat().st_size <= content.size


def test_from_start_to_the_records_at_home(machine, tmp_path):
    old = machine.folder / "results" / "old.json"
    old.write_text("{}")
    os.utime(old, (1e9, 1e9))
    process = machine.start()
    assert machine.start() is None  # it is running

    def finished():
        assert "still running" in machine("collect", "out")
        manifests = [v for k, v in machine.collected().items() if k.endswith("manifest.json")]
        return [json.loads(m)["status"] for m in manifests].count("finished") == 2

    until(finished)
    assert "results/loops/waited.json" not in machine.collected()
    os.kill(process, signal.SIGKILL)
    assert "has ended" in machine("collect", "out", "--wait", 600)
    process = machine.start()
    os.kill(process, signal.SIGTERM)
    assert "has ended" in machine("collect", "out", "--wait", 600)
    machine.start()
    (machine.folder / "go").touch()
    assert "0 of 2 entries to do" in machine("collect", "out", "--wait", 600)
    collected = machine.collected()
    assert "results/loops/waited.json" in collected
    assert not {name for name in collected if "old.json" in name or "owner" in name}
    log = (machine.folder / "out" / "log.txt").read_text()
    assert "ended with exit codes [0]" in log

    home = tmp_path / "home"
    tars = sorted((machine.folder / "out").glob("*.tar.gz"))
    machine("unpack", *tars, "--target", home)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in tars:
        subprocess.run(["tar", "xf", path], cwd=plain, check=True)
    for place in (home, plain):
        words = [sys.executable, "-m", "decaylab", "runs", "list", "--runs", "results", "--json"]
        listed = subprocess.run(words, cwd=place, capture_output=True, text=True, check=True)
        assert [run["status"] for run in json.loads(listed.stdout)] == ["finished"] * 2
    report = [sys.executable, "-m", "decaylab", "report", "--runs", "results", "--out", "page"]
    subprocess.run(report, cwd=home, capture_output=True, check=True)
    assert list(home.glob("page*"))


@pytest.mark.slow
def test_without_a_working_mps_processes_share_the_device_as_they_are(machine, tmp_path):
    """A fake one, which says that it has begun; there is no device."""
    tools = tmp_path / "tools"
    tools.mkdir()
    control = tools / "nvidia-cuda-mps-control"
    control.write_text(f"#!/bin/sh\necho $1 >> {tools}/asked\n")
    control.chmod(0o755)
    (machine.folder / "go").touch()
    machine.start("--processes", 2, PATH=f"{tools}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="")
    machine("collect", "out", "--wait", 600)
    log = (machine.folder / "out" / "log.txt").read_text()
    assert "MPS does not work here" in log
    codes = re.search(r"ended with exit codes \[(\d+), (\d+)\]", log).groups()
    assert set(codes) <= {"0", "75"}  # one may end while the other has the last entry
    assert "0 of 2 entries to do" in log
    assert (tools / "asked").read_text().split("\n")[0] == "-d"


def test_data_arrive_in_pieces(benchmark, tmp_path, capsys):
    script = benchmark("lent_machine")
    data, pieces, there = tmp_path / "data", tmp_path / "pieces", tmp_path / "there"
    contents = {
        "a/large.parquet": random.Random(0).randbytes(2500),
        "a/small": b"s",
        "b/empty": b"",
    }
    for name, content in contents.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    script.split(data, pieces, 1000)
    assert max(path.stat().st_size for path in pieces.rglob("*") if path.is_file()) == 1000
    late = pieces / "a" / "large.parquet.2-of-3"
    late.rename(tmp_path / "late")
    script.join(pieces, there)
    assert not (there / "a" / "large.parquet").exists()
    assert "large.parquet waits for large.parquet.2-of-3" in capsys.readouterr().out
    (tmp_path / "late").rename(late)
    for _ in range(2):  # the second finds all of it there
        script.join(pieces, there)
        arrived = {str(p.relative_to(there)): p for p in there.rglob("*") if p.is_file()}
        assert {name: path.read_bytes() for name, path in arrived.items()} == contents
        assert capsys.readouterr().out == f"{there}: 3 files, 0.0 MB\n"
    with pytest.raises(SystemExit, match="there is no folder"):
        script.join(tmp_path / "nowhere", there)


@pytest.fixture
def begun(benchmark, tmp_path, monkeypatch):
    """The script, in a folder where work began and has ended."""
    script = benchmark("lent_machine")
    monkeypatch.chdir(tmp_path)
    script.LENT.mkdir()
    script.BEGAN.touch()
    script.LOG.touch()
    return script


def run_folder(name, **files):
    folder = Path("results") / name
    folder.mkdir(parents=True)
    for file, content in {"spec": b"s", "manifest": b"m", "rows": b"r", **files}.items():
        suffix = {"spec": ".toml", "manifest": ".json", "rows": ".jsonl"}.get(file, ".safetensors")
        (folder / f"{file}{suffix}").write_bytes(content)
    return folder


def test_what_is_not_needed_is_collected_where_there_is_room(begun):
    noise = random.Random(0).randbytes
    run_folder("a", checkpoint=noise(700_000), rows=noise(300_000))
    run_folder("b", checkpoint=noise(400_000), rows=noise(300_000))
    run_folder("c", checkpoint=noise(2_000_000))
    begun.main(["collect", "out", "--megabytes", "1", "--tars", "2"])
    names = []
    for path in sorted(Path("out").glob("*.tar.gz")):
        assert path.stat().st_size <= begun.MEGABYTE
        with tarfile.open(path) as tar:
            names.append(tar.getnames())
    needed = ("manifest.json", "rows.jsonl", "spec.toml")
    every = {name for inside in names for name in inside}
    assert {f"results/{run}/{name}" for run in "abc" for name in needed} <= every
    for run in "abc":  # each in one tar
        assert sum(f"results/{run}/manifest.json" in inside for inside in names) == 1
        assert any({f"results/{run}/{name}" for name in needed} <= set(i) for i in names)
    kept = {name for name in every if "checkpoint" in name}
    assert kept == {"results/b/checkpoint.safetensors", "results/a/checkpoint.safetensors"}


def test_a_run_that_was_made_again_takes_the_place_of_the_old_one(begun, tmp_path):
    """All of its folder comes; of the old one no rows stay."""
    folder = run_folder("a")
    os.utime(folder / "spec.toml", (1e9, 1e9))
    begun.main(["collect", "out"])
    home = tmp_path / "home" / "results" / "a"
    home.mkdir(parents=True)
    (home / "rows.json.gz").write_bytes(b"old")
    (home / "checkpoint.safetensors").write_bytes(b"old")
    tars = [str(path) for path in Path("out").glob("*.tar.gz")]
    begun.main(["unpack", *tars, "--target", str(tmp_path / "home")])
    left = {path.name for path in home.iterdir()}
    assert left == {"checkpoint.safetensors", "manifest.json", "rows.jsonl", "spec.toml"}


def test_a_manifest_is_read_before_rows_and_a_checkpoint_too(begun):
    """What is written meanwhile is newer than what vouches for it, or needs it."""
    run_folder("a", checkpoint=b"c")
    names = [content.path.name for content in begun.changed([Path("results")], 100)]
    assert names == ["manifest.json", "checkpoint.safetensors", "rows.jsonl", "spec.toml"]


def test_a_checkpoint_that_goes_while_it_is_collected_is_left_out(begun, monkeypatch):
    run_folder("a", checkpoint=b"c")
    is_file = Path.is_file

    def last_look(path):
        there = is_file(path)
        if path.name == "checkpoint.safetensors":
            path.unlink(missing_ok=True)
        return there

    monkeypatch.setattr(Path, "is_file", last_look)
    names = {content.path.name for content in begun.changed([Path("results")], 100)}
    assert names == {"manifest.json", "rows.jsonl", "spec.toml"}
