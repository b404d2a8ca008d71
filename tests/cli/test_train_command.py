import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli.progress import line
from decaylab.errors import DecaylabError
from decaylab.records import RunStore, files, store
from decaylab.training import RunSpec, checkpoint
from decaylab.training.loop import Progress

TINY = ["--hidden", "16", "--batch-size", "256", "--epochs", "2", "--device", "cpu"]
runner = CliRunner()


def run(*arguments, runs):
    return runner.invoke(app, ["train", *TINY, "--runs", str(runs), *map(str, arguments)])


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def default_signals():
    # A test run in the background would hand on an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_one_line_per_epoch_when_piped_and_a_second_time_nothing_to_do(tmp_path):
    first = run(runs=tmp_path)
    assert first.exit_code == 0
    lines = first.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["epoch 1/2", "epoch 2/2"]
    assert lines[3].startswith("finished: test accuracy")
    before = snapshot(tmp_path)
    second = run(runs=tmp_path)
    assert second.exit_code == 0
    assert "is already finished" in second.stdout
    assert "epoch" not in second.stdout
    assert snapshot(tmp_path) == before


def test_stopped_before_the_spec_was_written_the_same_command_begins(tmp_path, monkeypatch):
    def full(path, text):
        raise DecaylabError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "replace_text", full)
        assert run(runs=tmp_path).exit_code == 2
    assert [path.name for path in tmp_path.glob("*/*")] == []
    again = run(runs=tmp_path)
    assert again.exit_code == 0, again.stderr
    assert RunStore(tmp_path).runs()[0].is_finished()


def test_a_short_run_says_that_batch_norms_averages_lag_behind(tmp_path):
    """Right in training mode, at chance in evaluation: that is not the network's fault."""
    deep = ["--hidden", "16,16,16", "--batch-size", "128", "--lr", "0.3"]
    result = run(*deep, "--batch-norm", runs=tmp_path)
    rows = RunStore(tmp_path).runs()[0].rows()
    right, in_training = (
        rows.series(f"train/{name}")[-1].value for name in ("accuracy", "running_accuracy")
    )
    assert right < in_training - 0.1
    assert "running averages" in result.stdout.splitlines()[-1]
    assert "running averages" not in run(*deep, runs=tmp_path).stdout


def test_json_is_alone_on_stdout(tmp_path):
    result = run("--json", runs=tmp_path)
    summary = json.loads(result.stdout)
    assert (summary["status"], summary["epoch"], summary["step"]) == ("finished", 2, 10)
    assert 0 <= summary["values"]["test/accuracy"] <= 1
    assert result.stderr.count("epoch ") == 2
    assert json.loads(run("--json", runs=tmp_path).stdout) == summary


def test_every_field_of_the_spec_is_an_option(tmp_path):
    given = {
        "optimizer": "kfac-g",
        "damping": 0.01,
        "damping_scaling": "scale-free",
        "kl_clip": 0.001,
        "curvature_scale": 1.0,
        "refresh_every": 2,
        "invert_every": 4,
        "factor_decay": 0.9,
        "initialize_batches": 3,
        "momentum": 0.8,
        "lr": 0.01,
        "decay": "independent",
        "weight_decay": 0.001,
        "decay_scope": "conv",
        "lr_drop_every": 1,
        "lr_drop_factor": 3.0,
        "precision": "bf16",
        "seed": 4,
        "width": 0.5,
        "activation": "linear",
        "batch_norm_eps": 0.01,
    }
    words = [w for key, value in given.items() for w in ("--" + key.replace("_", "-"), value)]
    flags = ["--augment", "--held-out", "--batch-norm", "--no-bias"]
    result = run(*words, *flags, "--json", runs=tmp_path)
    assert result.exit_code == 0, result.stderr
    spec = json.loads(result.stdout)["spec"]
    assert {key: spec[key] for key in given} == given
    switched = [spec[key] for key in ("augment", "held_out", "batch_norm", "bias")]
    assert switched == [True, True, True, False]
    assert spec["hidden"] == [16]


def test_options_win_over_the_config_and_the_recorded_spec_is_one(tmp_path):
    config = tmp_path / "spec.toml"
    config.write_text('optimizer = "adam"\nbetas = [0.8, 0.9]\nlr = 0.5\n')
    result = run("--config", config, "--lr", "0.01", "--json", runs=tmp_path / "runs")
    summary = json.loads(result.stdout)
    assert (summary["spec"]["lr"], summary["spec"]["betas"]) == (0.01, [0.8, 0.9])
    recorded = f"{summary['folder']}/spec.toml"
    arguments = ["train", "--config", recorded, "--runs", str(tmp_path / "runs")]
    again = runner.invoke(app, arguments)
    assert "is already finished" in again.stdout


BAD = {
    "unknown network": (["--network", "vgg17"], "vgg16"),
    "AdamW without a strength": (["--optimizer", "adamw"], "--weight-decay"),
    "AdamW with L2": (["--optimizer", "adamw", "--decay", "l2"], "l2"),
    "unknown optimizer": (["--optimizer", "rmsprop"], "kfac-g"),
    "unknown data set": (["--data", "imagenet"], "cifar10"),
    "unknown decay": (["--decay", "l1"], "independent"),
    "negative lr": (["--lr", "-0.1"], "-0.1"),
    "batch larger than the data": (["--batch-size", "5000"], "5000"),
    "missing data folder": (["--data", "mnist", "--data-dir", "/nonexistent"], "/nonexistent"),
    "another's setting": (["--damping", "0.1"], "damping"),
    "unknown device": (["--device", "abacus"], "'abacus'"),
    "other device": (["--device", "mps"], "'mps'"),
    "negative interval": (["--checkpoint-every", "-1"], "--checkpoint-every"),
    "decay without a kind": (["--weight-decay", "0.1"], "--decay"),
    "decay without a strength": (["--decay", "l2"], "--weight-decay"),
    "missing config": (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, case):
    arguments, said = BAD[case]
    (tmp_path / "mine").write_text("mine")
    before = snapshot(tmp_path)
    result = run(*arguments, runs=tmp_path / "runs")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert {p: b for p, b in snapshot(tmp_path).items() if p in before} == before
    assert "finished" not in str(snapshot(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path):
    result = run("--device", "cuda", runs=tmp_path)
    assert (result.exit_code, "there is no cuda here" in result.stderr) == (2, True)


@pytest.mark.parametrize("text", ['lr = "fast"', "lrate = 1", "seed = 2.5", "lr = ["])
def test_a_bad_config_names_the_file_and_the_key(tmp_path, text):
    config = tmp_path / "spec.toml"
    config.write_text(text)
    result = run("--config", config, runs=tmp_path / "runs")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {config}: ")
    assert not (tmp_path / "runs").exists()


def test_wrong_words_on_the_command_line_exit_with_2(tmp_path):
    for arguments in (["--lr", "fast"], ["--no-such-option"], ["--hidden", "a,b"]):
        assert run(*arguments, runs=tmp_path / "runs").exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("finished", [True, False])
def test_a_spec_that_changed_under_a_run_is_refused(tmp_path, finished):
    run(runs=tmp_path)
    (folder,) = RunStore(tmp_path).runs()
    spec = folder.path / "spec.toml"
    spec.write_text(spec.read_text().replace("lr = 0.03", "lr = 0.04"))
    if not finished:
        (folder.path / "manifest.json").unlink()
    before = snapshot(tmp_path)
    result = run(runs=tmp_path)
    assert result.exit_code == 2
    assert "(0.04)" in result.stderr
    assert snapshot(tmp_path) == before


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_afterwards(tmp_path, monkeypatch):
    whole = json.loads(run("--json", runs=tmp_path / "whole").stdout)
    real, calls = os.fsync, []

    def fills_up(handle):
        calls.append(handle)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fills_up)
        result = run("--checkpoint-every", "0", runs=tmp_path / "runs")
    assert result.exit_code == 2
    assert re.fullmatch(r"error: .*rows.jsonl .*free some space .*\n", result.stderr)
    (folder,) = RunStore(tmp_path / "runs").runs()
    assert folder.manifest().status in ("failed", "interrupted")
    assert folder.checkpoint.exists()
    again = run("--json", runs=tmp_path / "runs")
    assert "(continued)" in again.stderr
    assert json.loads(again.stdout)["values"]["test/loss"] == whole["values"]["test/loss"]


def test_divergence_exits_with_3_and_keeps_the_records(tmp_path):
    result = run("--lr", "1e30", runs=tmp_path)
    assert result.exit_code == 3
    assert re.fullmatch(r"error: the loss is not finite .*\n", result.stderr)
    (folder,) = RunStore(tmp_path).runs()
    assert folder.manifest().status == "diverged"
    assert folder.rows().rows
    before = snapshot(tmp_path)
    again = run("--lr", "1e30", runs=tmp_path)
    assert (again.exit_code, snapshot(tmp_path)) == (3, before)


def test_debug_shows_the_error_whole(tmp_path):
    result = run("--lr", "-1", "--debug", runs=tmp_path)
    assert type(result.exception).__name__ == "OutOfRange"
    assert result.exit_code == 1


def test_version():
    from decaylab import __version__

    assert runner.invoke(app, ["--version"]).stdout == f"decaylab {__version__}\n"


# Waits for a line in epoch 3: else a quick run may be over before the signal is sent.
WAITING = """
import sys
from decaylab.cli import main
from decaylab.training import TrainingRun

step = TrainingRun.train_step

def waiting_step(run):
    if run.step == 25:
        sys.stdin.readline()
    return step(run)

TrainingRun.train_step = waiting_step
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("one_thread")  # as the process that is stopped has
def test_a_signal_leaves_a_checkpoint_and_the_same_command_continues(tmp_path, number, code):
    options = ["--hidden", "16", "--epochs", "4", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "train", *options, "--runs", str(tmp_path / "runs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=default_signals,
    )
    while not process.stdout.readline().startswith("epoch 2/"):
        assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate("go on\n", timeout=600)
    assert process.returncode == code
    assert said == f"stopped by {number.name}: run the same command again to continue\n"
    (folder,) = RunStore(tmp_path / "runs").runs()
    assert folder.manifest().status == "interrupted"
    reached = checkpoint.load(folder.checkpoint)["step"]
    assert reached >= 2 * 11

    again = runner.invoke(app, ["train", *options, "--runs", str(tmp_path / "runs")])
    whole = runner.invoke(app, ["train", *options, "--runs", str(tmp_path / "whole")])
    assert "(continued)" in again.stdout
    assert "epoch 2/" not in again.stdout
    spec = RunSpec(hidden=(16,), epochs=4)
    ends = [
        checkpoint.load(RunStore(tmp_path / name).folder(spec.id).checkpoint)["model"]
        for name in ("runs", "whole")
    ]
    assert whole.exit_code == 0
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[1])


@pytest.mark.filterwarnings("ignore:watch")  # of the norms, which are not finite
def test_a_divergence_without_decay_does_not_blame_the_decay(tmp_path):
    options = ["--hidden", "16", "--epochs", "1", "--lr", "1e20", "--runs", str(tmp_path)]
    for decay in ([], ["--decay", "l2", "--weight-decay", "0.01"]):
        result = runner.invoke(app, ["train", *options, *decay])
        assert result.exit_code == 3
        assert ("weight decay" in " ".join(result.stderr.split())) == bool(decay)
    undecayed = next(tmp_path.glob("*-none-*"))
    shown = runner.invoke(app, ["runs", "show", undecayed.name, "--runs", str(tmp_path)]).stdout
    assert "diverged after 1 epoch," in shown
    told = json.loads(runner.invoke(app, ["diagnose", str(undecayed), "--json"]).stdout)
    assert [finding["verdict"] for finding in told["findings"]] == ["does not act"] * 3
    assert "every" not in json.dumps(told)  # which no option of `decaylab train` sets


def test_a_warning_of_ours_is_a_sentence_without_a_line_of_code(tmp_path):
    options = ["--hidden", "16", "--epochs", "3", "--lr", "3", "--batch-norm"]
    options += ["--decay", "l2", "--weight-decay", "5", "--runs", str(tmp_path)]
    command = [sys.executable, "-c", "from decaylab.cli import main; main()", "train", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "warning: watch: " in done.stderr
    assert ".py" not in done.stderr


def test_a_loss_out_of_all_proportion_fits_the_line():
    values = {"train/running_loss": 4.7e20, "test/loss": 4.8e23, "test/accuracy": 0.1, "lr": 3.0}
    progress = Progress("epoch", "run", 2, 3, 22, 33, 0.2, values)
    assert len(line(progress)) < 80


def test_a_second_process_is_kept_out_after_a_second(tmp_path, monkeypatch):
    spec = RunSpec(hidden=(16,), batch_size=256, epochs=2)
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with RunStore(tmp_path).folder(spec.id).writing(spec.to_toml()):
        result = run(runs=tmp_path)
    assert sum(slept) <= 1.01
    assert result.exit_code == 2
    assert "another process" in result.stderr
