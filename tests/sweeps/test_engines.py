"""What runs are shared out to which jobs, processes on this machine, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from refusals import refused
from sweeps.records import numbers
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import BadValue, DecaylabError, Lacks, Misplaced, UnknownName
from decaylab.sweeps.engines import Job
from decaylab.sweeps.engines.local import LocalEngine
from decaylab.sweeps.engines.slurm import SlurmEngine
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.sweep import make_jobs, pack
from decaylab.training import Interrupted, RunSpec

TINY = RunSpec(hidden=(8,), batch_norm=True, epochs=1)


def planned(count):
    return [PlannedRun(replace(TINY, seed=seed)) for seed in range(count)]


def python(script):
    return Job((sys.executable, "-c", script))


def test_runs_are_shared_out_by_their_estimates_and_each_once():
    runs = planned(9)
    seconds = {run.spec.id: float(10 * (1 + n % 3)) for n, run in enumerate(runs)}
    packs = pack(runs, seconds, jobs=3, longest=1e9)
    loads = [sum(seconds[run.spec.id] for run in runs_of_job) for runs_of_job in packs]
    assert loads == [60.0, 60.0, 60.0]
    assert sorted(r.spec.seed for runs_of_job in packs for r in runs_of_job) == list(range(9))
    shorter = pack(runs, seconds, jobs=1, longest=50.0)
    assert len(shorter) == 4
    assert len(pack(runs, seconds, jobs=50, longest=1e9)) == 9
    (job, *_) = make_jobs(packs, ["decaylab", "reproduce"], seconds, gpus=0.5)
    assert job.command[:3] == ("decaylab", "reproduce", "--run")
    assert (job.seconds, job.gpus) == (60.0, 0.5)


def test_a_run_stays_with_the_one_whose_norms_it_takes_over():
    source, other = planned(2)
    behind = [PlannedRun(replace(TINY, seed=5 + n, norm_source=source.spec.id)) for n in range(2)]
    runs = [source, other, *behind]
    packs = pack(runs, {run.spec.id: 1.0 for run in runs}, jobs=4, longest=1.0)
    assert packs == [[source, *behind], [other]]


def test_processes_take_their_turns_and_say_why_they_failed(tmp_path):
    go = tmp_path / "go"
    script = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nprint('x')"
    engine = LocalEngine(tmp_path, slots=2)
    engine.start([python(script), python(script), python("raise SystemExit('no luck')")])
    states = [status.state for status in engine.look()]
    assert states == ["running", "running", "waiting"]
    go.touch()
    ended = engine.wait()
    assert [status.state for status in ended] == ["ended", "ended", "failed"]
    assert ended[2].reason == "no luck"
    assert (tmp_path / "0.out").read_text() == "x\n"


def test_the_reason_is_the_error_and_not_what_is_said_after_it(tmp_path):
    says = "print('failed: a-run: Disk quota exceeded'); print('`report` shows them')"
    killed = "import os; print('error: of another time', flush=True); os.kill(os.getpid(), 9)"
    engine = LocalEngine(tmp_path, slots=2)
    for _ in range(2):  # what was left is started again by the same engine
        engine.start([python(f"{says}; raise SystemExit(1)"), python(killed)])
        first, second = engine.wait()
        assert first.reason == "failed: a-run: Disk quota exceeded"
        assert second.reason == "it was ended by SIGKILL"


def test_each_process_sees_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    engine = LocalEngine(tmp_path, slots=2, gpus=2)
    engine.start([python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")] * 2)
    engine.wait()
    assert {(tmp_path / f"{n}.out").read_text().strip() for n in (0, 1)} == {"GPU-a", "GPU-b"}


def test_a_signal_is_passed_on_to_the_processes(tmp_path, monkeypatch):
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    engine = LocalEngine(tmp_path, slots=2)
    engine.start([python(script)] * 2)
    while any("ready" not in (tmp_path / f"{n}.out").read_text() for n in (0, 1)):
        time.sleep(0.02)
    look = engine.look

    def look_and_be_told():
        os.kill(os.getpid(), signal.SIGTERM)
        return look()

    monkeypatch.setattr(engine, "look", look_and_be_told)
    with pytest.raises(Interrupted):
        engine.wait()
    assert all("saved" in (tmp_path / f"{n}.out").read_text() for n in (0, 1))


def test_the_script_has_what_was_asked_for_and_the_users_options_win(tmp_path):
    jobs = [Job(("decaylab", "reproduce", "--only", "a b"), seconds=600.0, gpus=1.0)] * 3
    script = SlurmEngine("a-sweep", tmp_path, {"partition": "gpu", "time": "30"}).script(jobs)
    for line in (
        "#SBATCH --array=0-2",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --gpus-per-task=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=30",
        "2) set -- decaylab reproduce --only 'a b' ;;",
    ):
        assert line in script.splitlines()
    assert script.count("--time=") == 1
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0
    theirs = SlurmEngine("a-sweep", tmp_path, {"gres": "gpu:a100:1"}).script(jobs)
    assert "gpus-per-task" not in theirs


@pytest.mark.parametrize(
    ("arguments", "kind", "fields"),
    [
        ("--engine k8s", UnknownName, {"kind": "engine", "name": "k8s"}),
        ("--sbatch time=3", Misplaced, {"settings": ["--sbatch", "--wait"]}),
        ("--engine slurm --sbatch --time=3", BadValue, {"name": "--sbatch", "value": "--time=3"}),
        ("--engine slurm", Lacks, {"owner": "this machine", "what": "sinfo"}),
        ("--jobs 2 --max-minutes 3", Misplaced, {"settings": ["--max-minutes", "--whole-runs"]}),
        ("--engine slurm --gpus 0.5", BadValue, {"name": "--gpus", "value": 0.5}),
        ("--jobs 2 --gpus 1", Misplaced, {"settings": ["--gpus"]}),
        ("--run digits-nothing", UnknownName, {"kind": "run", "name": "digits-nothing"}),
    ],
)
def test_what_an_engine_cannot_do_is_one_sentence_before_anything_runs(
    tmp_path, monkeypatch, arguments, kind, fields
):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    error = refused("reproduce", "table2", "--runs", tmp_path / "runs", *arguments.split())
    assert type(error) is kind
    assert fields.items() <= vars(error).items()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_of_a_cluster_save_a_checkpoint(tmp_path, number):
    words = ["train", "--hidden", "8", "--epochs", "20000", "--runs", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "decaylab", *words, "--device", "cpu"])
    while not any(path.stat().st_size for path in tmp_path.glob("*/rows.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(600) == 128 + number
    assert list(tmp_path.glob("*/checkpoint.safetensors"))


def test_two_processes_make_a_sweep_and_its_status_says_so(tmp_path):
    words = ["reproduce", "table2", "--only", "network=vgg16", "--runs", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, "--jobs", "2"])
    assert result.exit_code == 0, result.output
    assert "4 runs in 2 jobs" in result.stdout
    assert "4 of 4 runs ended, 0 left" in result.stdout
    status = CliRunner().invoke(app, ["sweep", "status", "--runs", str(tmp_path)])
    assert status.stdout.splitlines()[1].split()[1:] == ["local", "4", "0", "0", "0", "0", "4"]
    gone = CliRunner().invoke(app, ["sweep", "cancel", "other", "--runs", str(tmp_path)])
    assert "'other'" in gone.stderr


SEARCH = ["search", "dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0"]
SEARCH += ["optimizer=adam", "--tier", "smoke", "--lr", "0.001", "--weight-decay", "0.001,0.01,0.1"]


def one_process(words, runs):
    result = CliRunner().invoke(app, [*words, "--runs", str(runs)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_two_processes_share_a_search_and_its_winner_is_that_of_one(tmp_path):
    alone = one_process(SEARCH, tmp_path / "alone")
    shared = one_process([*SEARCH, "--jobs", "2"], tmp_path / "shared")
    assert "runs ended, 0 left" in shared
    winner = [line for line in alone.splitlines() if line.startswith("winner")]
    assert winner == [line for line in shared.splitlines() if line.startswith("winner")]
    for runs in ("alone", "shared"):
        assert list((tmp_path / runs / "searched").glob("*.toml"))
    assert numbers(tmp_path / "shared/searched/runs") == numbers(tmp_path / "alone/searched/runs")


def test_two_processes_share_a_search_by_lines_and_know_its_end(tmp_path):
    """Its second line has the best decay of the first, which nobody knows before."""
    lines = [*SEARCH, "--lr", "0.0003,0.001,0.003", "--method", "lines", "--no-widen"]
    lines += ["--weight-decay", "1e-5,1e-2,100"]
    shared = one_process([*lines, "--jobs", "2"], tmp_path)
    assert "5 runs in 2 jobs" in shared
    assert "5 of 5 runs ended, 0 left" in shared
    assert "weight_decay 1e-05" in shared


def test_two_processes_share_a_search_by_tpe_and_know_its_end(tmp_path):
    pytest.importorskip("optuna")
    tpe = [*SEARCH, "--lr", "0.0001,0.01", "--method", "tpe", "--trials", "3", "--jobs", "2"]
    shared = one_process(tpe, tmp_path)
    assert "3 runs in 2 jobs" in shared
    assert "3 of 3 runs ended, 0 left" in shared
    assert "winner: lr" in shared
    assert "3 of 3 runs ended, 0 left" in one_process(tpe, tmp_path)  # and makes none


def test_two_processes_share_the_arms_of_an_attribution(tmp_path):
    spec = tmp_path / "spec.toml"
    text = 'hidden = [8]\nepochs = 1\ndecay = "l2"\nweight_decay = 0.01\nbatch_size = 256\n'
    spec.write_text(text)
    words = ["attribute", str(spec), "--seeds", "2", "--json"]
    shared = one_process([*words, "--jobs", "2"], tmp_path / "shared")
    alone = one_process(words, tmp_path / "alone")
    first, second = json.loads(shared[shared.index("{") :]), json.loads(alone)
    assert first["metrics"] == second["metrics"]
    assert numbers(tmp_path / "shared/attribution") == numbers(tmp_path / "alone/attribution")


def test_two_processes_work_off_a_queue_and_a_command_of_it_once(tmp_path):
    made = tmp_path / "made"
    script = f"import pathlib; pathlib.Path({str(made)!r}).open('a').write('x')"
    queue = tmp_path / "queue.toml"
    queue.write_text(
        '[[entry]]\nname = "pairs"\nreproduce = "table2"\nonly = ["network=vgg16"]\n'
        'tier = "smoke"\n[[entry]]\nname = "file"\nminutes = 1\n'
        f"command = {json.dumps(['python', '-c', script])}\nwrites = {json.dumps(str(made))}\n"
    )
    printed = one_process(["reproduce", "--queue", str(queue), "--jobs", "2"], tmp_path / "runs")
    assert "4 of 4 runs ended, 0 left" in printed
    assert made.read_text() == "x"


def test_a_queue_without_runs_to_divide_is_worked_off_here_or_refused(tmp_path):
    made, queue = tmp_path / "made", tmp_path / "queue.toml"
    script = f"import pathlib; pathlib.Path({str(made)!r}).write_text('x')"
    queue.write_text(
        '[[entry]]\nname = "pairs"\nreproduce = "table2"\ntier = "smoke"\nhold = "later"\n'
        '[[entry]]\nname = "file"\nminutes = 1\n'
        f"command = {json.dumps(['python', '-c', script])}\nwrites = {json.dumps(str(made))}\n"
    )
    words = ["reproduce", "--queue", str(queue), "--jobs", "2"]
    assert type(refused(*words, "--runs", tmp_path, "--engine", "slurm")) is DecaylabError
    one_process(words, tmp_path / "runs")
    assert made.exists()


@pytest.mark.parametrize(
    "words", [SEARCH, ["reproduce", "--queue", "results/queue.toml"], ["reproduce", "table2"]]
)
def test_scripts_of_slurm_start_the_command_that_was_given(tmp_path, words):
    words = [*words, "--runs", str(tmp_path), "--engine", "slurm", "--jobs", "2", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--sbatch", "partition=gpu"])
    assert result.exit_code == 0, result.output
    tasks = [line for line in result.stdout.splitlines() if " set -- " in line]
    assert len(tasks) >= 2
    assert all(f"-m decaylab {words[0]}" in line for line in tasks)
    ends = {line.split("--run ")[0].endswith("--engine local --jobs 1 ;;") for line in tasks}
    assert ends == {"table2" not in words}
    assert not list(tmp_path.iterdir())


def test_gpus_of_a_job_are_those_that_were_asked_for(tmp_path):
    words = ["reproduce", "table2", "--runs", str(tmp_path), "--engine", "slurm", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--gpus", "2"])
    assert "#SBATCH --gpus-per-task=2" in result.stdout.splitlines()
