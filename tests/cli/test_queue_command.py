import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from select import select as readable

import pytest
from report.synthetic import write_run
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.cli.queue import Queue
from decaylab.data.sources import MNIST_STEMS
from decaylab.errors import RUNS_LEFT
from decaylab.paper import FinishedRuns, select
from decaylab.paper import superseded as supersession
from decaylab.paper.further_seeds import with_doubt
from decaylab.paper.plan import chosen_cells
from decaylab.paper.searches import cell_plan
from decaylab.records import RunStore
from decaylab.sweeps.estimate import Estimator, TimeEstimate
from decaylab.sweeps.queue import CommandEntry, read_queue
from decaylab.training import TrainingRun

ROOT = Path(__file__).parents[2]
QUEUE = ROOT / "results" / "queue.toml"
runner = CliRunner()
pytestmark = pytest.mark.usefixtures("one_thread")
TABLE2 = """
[[entry]]
name = "pairs"
reproduce = "table2"
only = ["network=vgg16", "optimizer=sgd"]
tier = "smoke"
"""
FIGURE = """
[[entry]]
name = "the same and two more"
reproduce = "table2"
only = ["network=vgg16"]
tier = "smoke"
"""
SEARCH = """
[[entry]]
name = "search"
search = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0", "optimizer=adam"]
tier = "smoke"
lr = [0.001]
weight_decay = [0.001, 0.01, 0.1]
"""
SEARCHED = """
[[entry]]
name = "needs the search"
reproduce = "fig1"
only = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "optimizer=adam", "scheme=l2"]
tier = "smoke"
"""


KILLED = """
import os, signal, sys
from decaylab.cli import main
from decaylab.records.rows import RowWriter

count, append, paths = int(sys.argv.pop()), RowWriter.append, set()

def append_and_die(writer, *entries, **how):
    append(writer, *entries, **how)
    paths.add(writer.path)
    if len(paths) == count:
        os.kill(os.getpid(), signal.SIGKILL)

RowWriter.append = append_and_die
main()
"""
"""The command line, killed as soon as so many runs (its last word) have records."""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def work(text, *arguments):
        Path("queue.toml").write_text(text)
        words = ["reproduce", "--queue", "queue.toml", "--runs", "runs", "--device", "cpu"]
        return runner.invoke(app, [*words, *map(str, arguments)])

    return work


def command(script, minutes=1):
    words = json.dumps(["python", "-c", script])
    return f'\n[[entry]]\nname = "c"\ncommand = {words}\nwrites = "out.json"\nminutes = {minutes}\n'


def standing(queue, text):
    result = queue(text, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    entries = json.loads(result.stdout)["entries"]
    return [(entry["state"], entry["done"], entry["runs"]) for entry in entries]


def test_runs_of_neighbouring_entries_are_made_once_and_then_all_is_done(queue):
    assert standing(queue, TABLE2 + FIGURE) == [("to do", 0, 2), ("to do", 0, 4)]
    result = queue(TABLE2 + FIGURE, "--at-once", 3)
    assert result.exit_code == 0, result.output
    assert "4/4" in result.stdout
    assert "5/" not in result.stdout
    assert standing(queue, TABLE2 + FIGURE) == [("done", 2, 2), ("done", 4, 4)]
    made = {run.id: run.manifest() for run in RunStore("runs").runs()}
    assert {manifest.tier for manifest in made.values()} == {"smoke"}
    again = queue(TABLE2 + FIGURE)
    assert again.exit_code == 0
    assert {run.id: run.manifest() for run in RunStore("runs").runs()} == made


def test_a_search_by_tpe_is_done_once_it_has_had_its_runs(queue, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr("decaylab.cli.queue.cell_plan", partial(cell_plan, trials=3))
    text = SEARCH + 'method = "tpe"\n'
    assert standing(queue, text) == [("to do", 0, 3)]
    result = queue(text)
    assert result.exit_code == 0, result.output
    assert standing(queue, text) == [("done", 3, 3)]


def test_a_search_comes_before_the_cells_that_need_it(queue):
    text = SEARCH + SEARCHED
    result = queue(text, "--at-once", 3)
    assert result.exit_code == 0, result.output
    assert [state for state, _, _ in standing(queue, text)] == ["done", "done"]


def test_a_damaged_winner_is_one_sentence(queue):
    assert queue(SEARCH, "--at-once", 3).exit_code == 0
    (winner,) = Path("runs/searched").glob("*.toml")
    for content in (b"[search", b"\xff", b"search = 1\nwinner = 2", b""):
        winner.write_bytes(content)
        for arguments in ([], ["--dry-run"]):
            result = queue(SEARCH, *arguments)
            assert result.exit_code == 2
            sentence = f"{winner} is damaged"
            assert sentence in result.output.replace("\n", " ")
            assert "remove it, and search again" in result.output.replace("\n", " ")


def test_a_command_runs_once_and_is_done_by_the_file_it_writes(queue):
    script = "open('out.json', 'a').write('x')"
    assert queue(command(script)).exit_code == 0
    assert queue(command(script)).exit_code == 0
    assert Path("out.json").read_text() == "x"


def test_what_a_command_prints_is_its_file_once_it_has_ended_well(queue):
    """`decaylab` is the one that works off the queue, wherever it is installed."""
    text = command("", 1).replace('"python", "-c", ""', '"decaylab", "data", "list", "--json"')
    text = text.replace('"out.json"', '"new/out.json"') + "prints = true\n"
    assert queue(text).exit_code == 0
    assert any(entry["name"] == "digits" for entry in json.loads(Path("new/out.json").read_text()))
    failing = command("print('half'); raise SystemExit(3)") + "prints = true\n"
    assert queue(failing).exit_code == 1
    assert not Path("out.json").exists()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, None])
def test_a_command_ends_with_the_queue_that_began_it(tmp_path, stop):
    """Stopped, killed (on Linux) or when its time is up: nothing goes on using the device."""
    if stop == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    script = "import time; f = open('alive', 'w', 1); print('begun', file=f); time.sleep(600)"
    (tmp_path / "queue.toml").write_text(command(f"{script}; print('went on', file=f)"))
    words = [sys.executable, "-m", "decaylab", "reproduce", "--queue", "queue.toml", "--device"]
    words += ["cpu"] if stop else ["cpu", "--max-minutes", "0.02"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    if stop:  # in 0.02 minutes, a busy machine may not even begin the command
        while not readable([alive], [], [], 0.1)[0]:
            assert process.poll() is None
        process.send_signal(stop)
    assert process.wait(600) in ((128 + stop, -stop) if stop else (RUNS_LEFT,))
    os.set_blocking(alive, True)
    with open(alive) as until_the_command_has_ended:
        assert "went on" not in until_the_command_has_ended.read()


def test_a_signal_while_the_queue_plans_is_a_stop_like_any_other(queue, monkeypatch):
    planned = Queue.planned

    def planned_at_the_signal(*given, **how):
        signal.raise_signal(signal.SIGTERM)
        return planned(*given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Queue, "planned", planned_at_the_signal)
        stopped = queue(TABLE2)
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert "run the same command again" in stopped.stderr
    assert standing(queue, TABLE2) == [("to do", 0, 2)]


@pytest.mark.parametrize(
    ("script", "reason"), [("raise SystemExit(3)", "exit code 3"), ("pass", "wrote no out.json")]
)
def test_an_entry_that_fails_does_not_stop_the_next(queue, script, reason):
    result = queue(command(script) + TABLE2)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert standing(queue, command(script) + TABLE2) == [("to do", 0, 1), ("done", 2, 2)]


def test_runs_whose_data_are_not_there_wait_and_the_others_are_made(queue, monkeypatch):
    """In one stage, and in a search: a machine may have been given one data set of two."""
    monkeypatch.setenv("DECAYLAB_DATA", "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    mnist = '[[entry]]\nname = "nets"\nreproduce = "fig5"\nonly = ["dataset=mnist"]\n'
    search = SEARCH.replace('"smoke"', '"short"')
    text = search + TABLE2 + mnist + 'tier = "short"\n'
    result = queue(text)
    assert result.exit_code == 1
    assert "mnist is not on this machine" in result.stderr
    assert "search: the data set cifar10 is not in" in result.stderr
    assert [state for state, _, _ in standing(queue, text)] == ["to do", "done", "to do"]


def test_runs_of_a_data_set_with_a_missing_file_wait_and_the_others_are_made(queue, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    monkeypatch.setenv("DECAYLAB_DATA", "data")
    Path("data/mnist").mkdir(parents=True)
    Path("data/mnist/t10k-labels-idx1-ubyte.gz").touch()
    text = TABLE2 + '[[entry]]\nname = "nets"\nreproduce = "fig5"\nonly = ["dataset=mnist"]\n'
    result = queue(text + 'tier = "short"\n')
    assert result.exit_code == 1
    assert "train-images-idx3-ubyte" in result.stderr
    assert standing(queue, text + 'tier = "short"\n')[0] == ("done", 2, 2)


def test_what_is_held_is_listed_with_its_reason_and_not_run(queue):
    text = TABLE2 + 'hold = "waits for a fix"\n'
    result = queue(text)
    assert result.exit_code == 0
    assert "waits for a fix" in result.stdout
    assert not Path("runs").exists()


def test_when_the_time_is_up_the_exit_code_says_that_something_is_left(queue):
    whole = queue(TABLE2 + command("pass", 9), "--whole-runs", "--max-minutes", 0.001)
    assert whole.exit_code == RUNS_LEFT
    assert not list(Path("runs").glob("*/spec.toml"))
    slow = queue(command("import time; time.sleep(600)"), "--max-minutes", 0.01)
    assert slow.exit_code == RUNS_LEFT


def test_a_stage_that_is_out_of_time_is_no_signal_to_the_queue(queue, monkeypatch):
    """Its alarm comes in the first step: the runs are left, and what follows has its turn."""
    step, alarms = TrainingRun.train_step, [signal.SIGALRM]

    def train_step(run):
        if alarms:
            signal.raise_signal(alarms.pop())
        return step(run)

    monkeypatch.setattr(TrainingRun, "train_step", train_step)
    text = TABLE2 + command("open('out.json', 'w')")
    result = queue(text, "--at-once", 2, "--max-minutes", 20)
    assert result.exit_code == RUNS_LEFT, result.output
    assert standing(queue, text) == [("to do", 0, 2), ("done", 1, 1)]
    assert queue(text, "--max-minutes", 20).exit_code == 0


def test_killed_in_any_run_the_next_call_goes_on(queue, tmp_path):
    (tmp_path / "queue.toml").write_text(TABLE2 + FIGURE)
    words = ["reproduce", "--queue", "queue.toml", "--device", "cpu"]
    for run in ("1", "2"):
        ended = subprocess.run([sys.executable, "-c", KILLED, *words, run], cwd=tmp_path)
        assert ended.returncode == -signal.SIGKILL
        assert len(list(tmp_path.glob("runs/*/rows.jsonl"))) == int(run)
    assert queue(TABLE2 + FIGURE).exit_code == 0
    assert standing(queue, TABLE2 + FIGURE) == [("done", 2, 2), ("done", 4, 4)]
    assert len(RunStore("runs").runs()) == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must hold"),
        ("[[entry]]\nname = 'a'\n", "entry 1: what it does"),
        (TABLE2 + "seed = 3\n", "unknown key 'seed'"),
        (TABLE2 + "seeds = '3'\n", "not '3'"),
        (TABLE2 + TABLE2.replace("vgg16", "vgg99").replace("pairs", "more"), "'vgg99'"),
        (command("pass").replace("minutes = 1", "minutes = -1"), "not -1"),
        (command("pass") + 'needs = ["cifar"]\n', "unknown data set 'cifar'"),
        (command("pass").replace('writes = "out.json"', ""), "has no writes"),
        ("[[entry]\n", "queue in TOML"),
    ],
)
def test_a_wrong_queue_is_one_sentence_before_anything_runs(queue, text, reason):
    result = queue(TABLE2 + text if text.startswith("[[entry]]\nname") else text)
    assert result.exit_code == 2
    assert reason.replace("entry 1", "entry 2") in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("runs").exists()


def test_a_queue_takes_no_options_that_its_entries_say(queue):
    assert "--seeds" in queue(TABLE2, "--seeds", 2).stderr
    assert "give an artefact" in queue(TABLE2, "table1").stderr


def test_the_queue_of_results_can_be_read():
    words = ["reproduce", "--queue", QUEUE, "--runs", ROOT / "results"]
    result = runner.invoke(app, [*map(str, words), "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["seconds_left"] >= 0


@pytest.mark.parametrize(
    "entry",
    [entry for entry in read_queue(QUEUE).entries if isinstance(entry, CommandEntry)],
    ids=lambda entry: entry.name,
)
def test_the_commands_of_results_write_what_they_are_waited_for(entry):
    program, first, *rest = entry.command
    options = dict(pairwise(rest))
    if program == "decaylab":
        assert (first, rest[-1], entry.prints) == ("attribute", "--json", True)
        manifest = RunStore(ROOT / "results").folder(Path(rest[0]).name).manifest()
        assert manifest.tier == "short"
        assert options["--runs"] == "runs"  # arms and their paths are not committed
    else:
        assert (ROOT / first).exists()
        written = options.get("--json") or options.get("--out")
        if first == "benchmarks/attribution_gpt.py":
            written = f"results/attribution/gpt-{options['--optimizers']}-10M.json"
        assert (program, written) == ("python", entry.writes)


def test_runs_whose_seconds_count_have_the_device_to_themselves(queue):
    text = TABLE2 + 'alone = true\n[[entry]]\nname = "others"\nreproduce = "table2"\n'
    text += 'only = ["network=vgg16", "optimizer=kfac-g"]\ntier = "smoke"\n'
    assert queue(text, "--at-once", 2).exit_code == 0
    made = {run.id: run.manifest().at_once for run in RunStore("runs").runs()}
    assert {at_once for name, at_once in made.items() if "sgd" in name} == {1}
    assert {at_once for name, at_once in made.items() if "kfac" in name} == {2}


def test_of_several_processes_none_makes_runs_whose_seconds_count(queue):
    text = TABLE2 + "alone = true\n"
    left = queue(text, "--processes", 2)
    assert left.exit_code == RUNS_LEFT
    assert "pairs waits: it needs the device to itself" in left.output.replace("\n", " ")
    assert "failed" not in left.output
    assert not RunStore("runs").runs()
    assert queue(text).exit_code == 0
    assert queue(text, "--processes", 2).exit_code == 0


def test_an_entry_says_how_many_of_its_runs_go_beside_each_other_at_most(queue):
    text = TABLE2 + 'at_once = 2\n[[entry]]\nname = "others"\nreproduce = "table2"\n'
    text += 'only = ["network=vgg16", "optimizer=kfac-g"]\ntier = "smoke"\n'
    assert queue(text, "--at-once", 3).exit_code == 0
    made = {run.id: run.manifest().at_once for run in RunStore("runs").runs()}
    assert {at_once for name, at_once in made.items() if "sgd" in name} == {2}
    assert {at_once for name, at_once in made.items() if "kfac" in name} == {3}


def shared_out(share, *arguments):
    """The order of runs: two of Table 2 with a share of the time, then one of Table 1."""
    text = f"{TABLE2}at_once = 1\n[shares]\ntable2 = {share}\n[[entry]]\n"
    text += 'name = "other"\nreproduce = "table1"\ntier = "smoke"\nat_once = 1\n'
    text += 'only = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "optimizer=adam"]\n'
    Path("queue.toml").write_text(text)
    words = ["reproduce", "--queue", "queue.toml", "--runs", "runs", "--device", "cpu"]
    result = runner.invoke(app, [*words, "--max-minutes", "20", *arguments])
    assert result.exit_code == 0, result.output
    made = sorted(RunStore("runs").runs(), key=lambda run: run.manifest().started)
    return [run.id.split("-")[2] for run in made]


@pytest.mark.parametrize(
    ("share", "order"),
    [
        (1.0, ["sgd", "sgd", "adam", "adam"]),
        (0.6, ["sgd", "adam", "adam", "sgd"]),
        (0.1, ["sgd", "adam", "adam", "sgd"]),
    ],
)
def test_an_artefact_has_its_share_and_what_is_left_when_nothing_else_is(
    queue, monkeypatch, share, order
):
    """Of 20 minutes, each run is said to take eight: one fits in 12; in two, one is begun."""
    monkeypatch.setattr(Estimator, "of", lambda self, spec: TimeEstimate(8 * 60.0, recorded=True))
    assert shared_out(share) == order


def test_runs_without_data_take_no_part_of_a_share(queue, monkeypatch):
    """Of 20 minutes, table2 has 12, and each run is said to take eight."""
    monkeypatch.setattr(Estimator, "of", lambda self, spec: TimeEstimate(8 * 60.0, recorded=True))
    monkeypatch.setenv("DECAYLAB_DATA", "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    text = TABLE2.replace("pairs", "not there").replace("smoke", "short") + TABLE2
    text += '[shares]\ntable2 = 0.6\n[[entry]]\nname = "other"\nreproduce = "table1"\n'
    text += 'only = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "optimizer=adam"]\n'
    assert queue(text + 'tier = "smoke"\nat_once = 1\n', "--max-minutes", 20).exit_code == 1
    made = sorted(RunStore("runs").runs(), key=lambda run: run.manifest().started)
    assert [run.id.split("-")[2] for run in made] == ["sgd", "adam", "adam", "sgd"]


def test_a_command_is_not_started_without_the_data_that_it_needs(queue, monkeypatch):
    monkeypatch.setenv("DECAYLAB_DATA", "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    script = "open('out.json', 'w')"
    result = queue(command(script) + 'needs = ["digits", "cifar10"]\n' + TABLE2)
    assert result.exit_code == 1
    assert "cifar10 is not on this machine" in result.stderr
    assert not Path("out.json").exists()
    assert len(RunStore("runs").runs()) == 2
    assert queue(command(script) + 'needs = ["digits"]\n').exit_code == 0


def test_a_command_finds_the_data_where_the_queue_found_them(queue, tmp_path, monkeypatch):
    monkeypatch.setenv("DECAYLAB_DATA", "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    for images, labels in MNIST_STEMS.values():
        (tmp_path / "data" / "mnist" / images).touch()
        (tmp_path / "data" / "mnist" / labels).touch()
    script = "from decaylab.data import find; open('out.json', 'w').write(str(find('mnist').place))"
    result = queue(command(script) + 'needs = ["mnist"]\n', "--data-dir", "data")
    assert result.exit_code == 0, result.output
    assert Path("out.json").read_text() == "data/mnist"


def test_two_processes_on_a_device_have_half_of_a_share_each(queue, monkeypatch):
    monkeypatch.setattr(Estimator, "of", lambda self, spec: TimeEstimate(8 * 60.0, recorded=True))
    assert shared_out(1.0, "--processes", "2") == ["sgd", "adam", "adam", "sgd"]


def test_a_share_is_of_an_artefact_of_the_queue_and_a_part_of_the_whole(queue):
    for line, reason in (("table1 = 0.5", "unknown artefact"), ("table2 = 1.5", "not 1.5")):
        result = queue(f"{TABLE2}[shares]\n{line}\n")
        assert result.exit_code == 2
        assert reason in result.stderr


def test_entries_have_names_of_their_own(queue):
    result = queue(TABLE2 + TABLE2)
    assert result.exit_code == 2
    assert "entry 2: there is already a queue entry 'pairs'" in result.stderr.replace("\n", " ")


def recorded(names, commit):
    """Finished runs of `TABLE2` without a single probe."""
    cells = select(chosen_cells("table2", "smoke", 1, [], Path("runs")), names)
    for cell in cells:
        folder = write_run(RunStore("runs"), cell.runs[0], {"test/accuracy": 0.5}, tier="smoke")
        folder.write_manifest(replace(folder.manifest(), commit=commit))
    return [cell.runs[0].id for cell in cells]


def test_superseded_runs_are_made_again_in_their_place(queue, monkeypatch):
    old, current = recorded(["network=vgg16", "optimizer=sgd"], "0ld")
    monkeypatch.setattr(supersession, "_listed", lambda: {old: ("a bug", ("0ld",))})
    text = TABLE2 + 'again = "superseded"\n'
    assert standing(queue, text) == [("to do", 0, 1)]
    assert queue(text).exit_code == 0
    assert standing(queue, text) == [("done", 1, 1)]
    store = RunStore("runs")
    assert store.folder(old).manifest().commit != "0ld"
    assert store.folder(old).rows().last("jacobian_norm") > 0
    assert RunStore("runs/superseded").folder(old).manifest().commit == "0ld"
    assert store.folder(current).manifest().commit == "0ld"  # not listed: left alone
    before = store.folder(old).manifest()
    assert queue(text).exit_code == 0
    assert store.folder(old).manifest() == before


def test_runs_without_what_the_artefact_wants_are_made_once_more_beside_them(queue):
    lacking = recorded(["network=vgg16", "optimizer=sgd"], "0ld")
    text = TABLE2 + 'again = "lacking"\n'
    assert standing(queue, text) == [("to do", 0, 2)]
    assert queue(text).exit_code == 0
    assert standing(queue, text) == [("done", 2, 2)]
    for name in lacking:
        assert RunStore("runs").folder(name).manifest().commit == "0ld"
        assert RunStore("runs/repeats").folder(name).rows().last("jacobian_norm") > 0


def test_what_to_make_again_has_two_kinds(queue):
    result = queue(TABLE2 + 'again = "everything"\n')
    assert result.exit_code == 2
    assert "unknown again 'everything'" in result.output


def accuracies(tier, label, *values):
    """Finished runs of Table 1's cells of a label, seed 0."""
    for cell, value in zip(
        select(chosen_cells("table1", tier, 1, [], Path("runs")), label), values, strict=True
    ):
        write_run(
            RunStore("runs"), cell.runs[0], {"test/accuracy": value}, tier=tier, device="a GPU"
        )


def test_a_second_seed_is_for_what_one_leaves_in_doubt(queue):
    """A number over a point off the paper, or a pair whose effect may be noise: by seed 0."""
    net = ["dataset=cifar10", "network=vgg16", "batch_norm=1", "augment=0"]
    accuracies("full", [*net, "optimizer=sgd"], 0.8580, 0.8885)  # the paper: 86.99 and 88.85
    accuracies("full", [*net, "optimizer=kfac-f"], 0.8850, 0.8880)  # 87.97 and 89.02
    accuracies("full", [*net, "optimizer=kfac-g"], 0.8817, 0.8977)  # the paper's own
    text = (
        '[[entry]]\nname = "d"\nreproduce = "table1"\ntier = "full"\nseeds = 2\ndoubtful = true\n'
    )
    assert standing(queue, text) == [("to do", 3, 6)]
    cells = with_doubt(
        chosen_cells("table1", "full", 2, [], Path("runs")), FinishedRuns(RunStore("runs")), "full"
    )
    assert [(cell.key["optimizer"], cell.key["weight_decay"]) for cell in cells] == [
        ("sgd", 0),
        ("kfac-f", 0),
        ("kfac-f", 1),
    ]
    refused = queue(text.replace("table1", "fig2"), "--dry-run")
    assert refused.exit_code == 2
    assert "table1, table3" in refused.stderr.replace("\n", " ")
