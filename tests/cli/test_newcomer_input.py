"""What a newcomer types first: runs by their path, a folder misspelt, options out of range."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import Conflict, Lacks, NoFolder, OutOfRange
from decaylab.records import Row, RunFolder, RunStore

TINY = ["--hidden", "8", "--batch-size", "256", "--epochs", "1", "--device", "cpu"]
CELL = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0", "optimizer=adam"]


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that finished and one that diverged."""
    folder = tmp_path_factory.mktemp("runs")
    assert run("train", *TINY, "--runs", folder).exit_code == 0
    assert run("train", *TINY, "--lr", "1e30", "--runs", folder).exit_code == 3
    return folder


def of(runs, status):
    (found,) = [f for f in RunStore(runs).runs() if f.manifest().status == status]
    return found


def test_numbers_that_are_not_finite_are_null_in_json(runs):
    listed = strict(run("runs", "list", "--runs", runs, "--json").stdout)
    diverged = next(entry for entry in listed if entry["status"] == "diverged")
    assert diverged["values"]["train/running_loss"] is None
    shown = strict(run("runs", "show", diverged["id"], "--runs", runs, "--json").stdout)
    assert shown["series"]["train/running_loss"][-1][1] is None


def test_a_run_may_be_given_by_its_path(runs, tmp_path, monkeypatch):
    folder = of(runs, "finished")
    monkeypatch.chdir(runs.parent)
    for name in (folder.path, f"{runs.name}/{folder.id}/"):
        shown = run("runs", "show", name, "--runs", tmp_path)
        assert shown.stdout.startswith(f"{folder.id}: finished"), shown.output
        probed = run("probe", name, "--runs", tmp_path, "--device", "cpu", "--examples", 8)
        assert probed.stdout.startswith(f"{folder.id}: 8 images"), probed.output
    monkeypatch.chdir(folder.path)
    assert run("runs", "show", ".").stdout.startswith(f"{folder.id}: finished")


def test_more_images_than_there_are_are_not_claimed(runs):
    name = of(runs, "finished").id
    probed = run("probe", name, "--runs", runs, "--device", "cpu", "--examples", 400)
    assert probed.stdout.startswith(f"{name}: 400 + 360 images of digits"), probed.output


@pytest.mark.parametrize("command", ["runs list", "runs pack", "claims", "report", "sweep status"])
def test_a_folder_of_runs_that_is_not_there_is_refused(tmp_path, command):
    error = refused(*command.split(), "--runs", tmp_path / "rnus")
    assert isinstance(error, NoFolder)
    assert error.path == tmp_path / "rnus"


def test_a_name_that_is_neither_a_run_nor_a_folder_is_taken_for_a_folder(tmp_path, monkeypatch):
    """Who watches a loop has no folder `runs`, and a sentence about it would help nobody."""
    monkeypatch.chdir(tmp_path)
    error = refused("diagnose", "decayd")
    assert isinstance(error, NoFolder)
    assert error.path == Path("decayd")


def test_a_folder_of_recordings_is_refused_with_one_of_them(tmp_path):
    (tmp_path / "decayed").mkdir()
    (tmp_path / "decayed" / "rows.jsonl").touch()
    error = refused("diagnose", tmp_path)
    assert isinstance(error, Lacks)
    assert str(tmp_path / "decayed") in error.remedy


def test_a_file_of_something_else_is_no_recording(tmp_path):
    (tmp_path / "notes.txt").write_text("hello\n")
    error = refused("diagnose", tmp_path / "notes.txt")
    assert isinstance(error, Lacks)
    assert error.owner == tmp_path / "notes.txt"


def test_a_result_is_printed_in_one_form(tmp_path):
    assert isinstance(refused("diagnose", tmp_path, "--json", "--markdown"), Conflict)


def test_a_data_folder_that_is_not_there_is_refused_once(tmp_path):
    error = refused("data", "list", "--data-dir", tmp_path / "nowhere")
    assert isinstance(error, NoFolder)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("broken:build", "fix broken first"),
        ("brokn:build", "run the command where `import` finds it"),
        ("torch.optim:AdanW", "(did you mean AdamW?)"),
    ],
)
def test_what_cannot_be_imported_is_told_apart(tmp_path, monkeypatch, name, remedy):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert remedy in refused("audit-decay", name).remedy


def in_a_process(*arguments, **options):
    words = [sys.executable, "-m", "decaylab", *map(str, arguments)]
    return subprocess.run(words, stderr=subprocess.PIPE, check=False, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = in_a_process("data", "list", "--json", stdout=full)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr.decode()


def test_a_locale_without_the_letters_of_a_curve_does_no_harm(tmp_path):
    with RunFolder(tmp_path / "run").writing("seed = 0\n") as folder:
        folder.rows_writer.append([Row(step, 0, 0.0, "outcome/loss", 1 / step) for step in (1, 2)])
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = in_a_process("live", tmp_path / "run", "--once", stdout=subprocess.PIPE, env=plain)
    assert done.returncode == 0, done.stderr
    assert b"0.5" in done.stdout
    assert b"?" in done.stdout  # the curve


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_number_out_of_range_is_refused_like_any_other(tmp_path, port):
    error = refused("live", tmp_path, "--port", port)
    assert isinstance(error, OutOfRange)
    assert (error.name, error.value) == ("--port", int(port))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["search", *CELL, "batch_size=big"], "not 'big'"),
        (["search", *CELL, "--max-minutes", "-3"], "--max-minutes"),
        (["reproduce", "table1", "--checkpoint-every", "-1"], "--checkpoint-every"),
        (["train", *TINY, "--checkpoint-every", "nan"], "--checkpoint-every"),
    ],
)
def test_options_out_of_range_are_one_sentence(tmp_path, arguments, said):
    result = run(*arguments, "--runs", tmp_path / "runs")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert said in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_report_into_a_file_names_the_option(tmp_path):
    (tmp_path / "page.html").write_text("mine")
    result = run("report", "--runs", tmp_path, "--out", tmp_path / "page.html")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--out" in result.stderr


@pytest.mark.usefixtures("without_theory")
def test_what_the_report_leaves_out_is_named(runs, tmp_path):
    copy = tmp_path / "runs"
    shutil.copytree(runs, copy)
    spec = of(copy, "finished").path / "spec.toml"
    spec.write_text(spec.read_text() + "of_a_later_version = 3\n")
    result = run("report", "--runs", copy)
    assert f"left out: {spec}: unknown key 'of_a_later_version'" in result.stderr


def test_a_page_that_cannot_be_written_is_not_blamed_on_the_runs(runs, tmp_path):
    (tmp_path / "file").write_text("mine")
    page = tmp_path / "file" / "page.html"
    result = run("diagnose", of(runs, "finished").path, "--report", page)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--runs" not in result.stderr


def test_claims_do_not_deny_the_runs_there_are(runs):
    said = " ".join(run("claims", "--runs", runs).stdout.split())
    assert said.startswith("no runs of a tier (smoke, quick, short, full) in")
