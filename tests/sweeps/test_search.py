import tomllib
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from report.synthetic import write_run
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import Lacks, Misplaced, OutOfRange, UnknownName
from decaylab.paper import cells, select
from decaylab.paper.searches import default_space
from decaylab.records import RunStore
from decaylab.sweeps.search import Search, SearchPlan
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import Progress, RunSpec

BASE = RunSpec(hidden=(8,), batch_size=256, epochs=3, lr_drop_every=3, decay="l2", weight_decay=0.1)
CELL = {"dataset": "digits", "network": "vgg16", "batch_norm": 0, "augment": 0,
        "optimizer": "adam", "batch_size": 128, "scheme": "l2"}  # fmt: skip
CPU = WorkerOptions(torch.device("cpu"))
pytestmark = pytest.mark.usefixtures("one_thread")


def plan(**changes):
    space = {"lr": [0.01, 0.1], "weight_decay": [1e-4, 1e-3]}
    return SearchPlan(**{"name": "a-search", "base": BASE, "space": space} | changes)


def fake_accuracy(monkeypatch, accuracy, most=10**6):
    """Training that ends at once, with an accuracy that is a function of the spec.

    After `most` runs it stops as a signal would stop it.
    """
    made = []

    def train(spec, *, store, execution, **rest):
        if len(made) == most:
            raise KeyboardInterrupt
        made.append(spec)
        values = {"test/accuracy": accuracy(spec), "test/loss": 1.0}
        write_run(store, spec, values, tier=execution.tier)
        values["train/loss"] = 1.0
        yield Progress("finished", spec.id, spec.epochs, spec.epochs, 1, 1, 0.0, values)

    monkeypatch.setattr("decaylab.sweeps.worker.train", train)
    return made


def make(chosen, folder, options=CPU):
    """The search with all its rounds made."""
    search = Search(chosen, folder, options)
    for worker in search.rounds():
        for _ in worker.run():
            pass
    return search


def points(chosen, folder):
    return [
        tuple(getattr(trial.spec, name) for name in chosen.space)
        for trial in Search(chosen, folder, CPU).trials()
    ]


def test_the_grid_is_searched_on_held_out_images_and_the_winner_trains_on_all(tmp_path):
    search = make(plan(), tmp_path)
    assert set(points(plan(), tmp_path)) >= {(lr, wd) for lr in (0.01, 0.1) for wd in (1e-4, 1e-3)}
    for folder in RunStore(tmp_path / "runs").runs():
        assert RunSpec.from_toml(folder.spec_text()).held_out
        assert not folder.checkpoint.exists()
    search.write_winner(search.winner())
    winner = RunSpec.from_file(tmp_path / "a-search" / "winner.toml")
    best = max(trial.score for trial in search.trials())
    (score,) = [
        trial.score
        for trial in search.trials()
        if (trial.spec.lr, trial.spec.weight_decay) == (winner.lr, winner.weight_decay)
    ]
    assert score == best
    assert not winner.held_out
    assert not list(Search(plan(), tmp_path, CPU).rounds())  # nothing is made twice


@pytest.mark.parametrize("made_before", [1, 10, 11, 13])
def test_a_search_stopped_while_its_grid_widens_goes_on_widening(
    tmp_path, monkeypatch, made_before
):
    best = {"lr": 0.03, "weight_decay": 0.00316}

    def accuracy(spec):
        return 1 - sum(abs(getattr(spec, name) - value) for name, value in best.items())

    lrs = [0.01, 0.03, 0.1]
    chosen = plan(space={"lr": lrs, "weight_decay": [1e-4, 3e-4, 1e-3]}, cell=CELL)
    first = fake_accuracy(monkeypatch, accuracy, most=made_before)
    with pytest.raises(KeyboardInterrupt):
        make(chosen, tmp_path)
    rest = fake_accuracy(monkeypatch, accuracy)
    search = make(chosen, tmp_path)
    decays = [1e-4, 3e-4, 1e-3, 0.00316, 0.01]
    assert sorted((spec.lr, spec.weight_decay) for spec in (*first, *rest)) == [
        (lr, decay) for lr in lrs for decay in decays
    ]
    search.write_winner(search.winner())
    found = tomllib.loads((tmp_path / "a-search.toml").read_text())
    assert found["cell"] == CELL
    assert found["winner"] == best
    assert found["search"]["on_edge"] == []
    assert found["search"]["weight_decay_tried"] == decays


def test_a_search_of_more_fields_takes_over_the_runs_that_are_its_own(tmp_path, monkeypatch):
    made = fake_accuracy(
        monkeypatch, lambda spec: 1 - abs(spec.lr - 0.03) - abs(spec.damping - 0.003)
    )
    base = replace(BASE, optimizer="kfac-f", damping=1e-3)
    lrs = [0.01, 0.03, 0.1]
    chosen = plan(base=base, space={"lr": lrs})
    make(chosen, tmp_path)
    more = replace(chosen, space={"lr": lrs, "damping": [1e-3, 3e-3, 1e-2]})
    search = make(more, tmp_path)
    assert len(made) == len(set(made)) == 9
    assert search.winner().values == {"lr": 0.03, "damping": 3e-3}
    assert search.winner().trials == 9


def test_of_tpe_it_says_that_more_trials_help(tmp_path, monkeypatch):
    """The largest of the values that were drawn is mostly inside the range."""
    pytest.importorskip("optuna")
    fake_accuracy(monkeypatch, lambda spec: spec.lr)
    (tmp_path / "own.toml").write_text(BASE.to_toml())
    words = ["search", "--config", str(tmp_path / "own.toml"), "--runs", str(tmp_path)]
    words += ["--method", "tpe", "--trials", "3", "--lr", "0.01,0.1", "--weight-decay", "0.1"]
    done = CliRunner().invoke(app, [*words, "--compiled"])
    assert done.exit_code == 0, done.output
    text = "on the edge of what was tried: lr (give more --trials, or --lr with a wider range)"
    assert text in done.stdout


def test_a_winner_that_stays_on_the_edge_is_said_to_be_so(tmp_path, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 / (1 + spec.weight_decay))
    search = make(plan(space={"weight_decay": [0.1, 0.3]}, cell=CELL), tmp_path)
    search.write_winner(search.winner())
    found = tomllib.loads((tmp_path / "a-search.toml").read_text())
    assert found["search"]["on_edge"] == ["weight_decay"]


def score_of(spec):
    return 1 - abs(spec.lr - 0.03) - abs(spec.weight_decay - 3e-4)


@pytest.mark.parametrize("at_once", [1, 3])
def test_tpe_makes_as_many_trials_as_asked_inside_the_range(tmp_path, monkeypatch, at_once):
    pytest.importorskip("optuna")
    made = fake_accuracy(monkeypatch, score_of)
    chosen = plan(method="tpe", trials=7)
    options = replace(CPU, at_once=at_once)
    make(chosen, tmp_path, options)
    assert len(set(made)) == len(made) == 7
    assert all(0.01 <= spec.lr <= 0.1 for spec in made)
    assert all(1e-4 <= spec.weight_decay <= 1e-3 for spec in made)
    make(replace(chosen, trials=9), tmp_path, options)
    assert len(set(made)) == len(made) == 9


@pytest.mark.parametrize("stopped_after", [1, 6, 11, 13])
def test_a_tpe_search_that_is_stopped_and_continued_is_the_one_that_was_not(
    tmp_path, monkeypatch, stopped_after
):
    pytest.importorskip("optuna")
    chosen = plan(method="tpe", trials=14)
    undisturbed = fake_accuracy(monkeypatch, score_of)
    whole = make(chosen, tmp_path / "whole")
    first = fake_accuracy(monkeypatch, score_of, most=stopped_after)
    with pytest.raises(KeyboardInterrupt):
        make(chosen, tmp_path / "stopped")
    rest = fake_accuracy(monkeypatch, score_of)
    continued = make(chosen, tmp_path / "stopped")
    assert [*first, *rest] == undisturbed
    assert continued.winner() == whole.winner()


def test_two_workers_on_one_tpe_search_count_each_others_runs(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    made = fake_accuracy(monkeypatch, score_of)
    chosen = plan(method="tpe", trials=5)
    (mine,) = Search(chosen, tmp_path, CPU).ask()
    with RunStore(tmp_path / "runs").folder(mine.id).writing(mine.to_toml()):
        search = make(chosen, tmp_path)  # another one, while the first is under way
        assert len(made) == 4
        assert mine not in made
        assert search.ask() == []
    assert search.ask() == [mine]  # its process is gone


def test_tpe_prunes_what_is_far_behind_and_records_it(tmp_path):
    pytest.importorskip("optuna")
    base = replace(BASE, decay="none", weight_decay=0.0, epochs=9, lr_drop_every=9)
    chosen = plan(base=base, space={"lr": [1e-4, 0.1]}, method="tpe", trials=12)
    search = make(chosen, tmp_path)
    statuses = [trial.status for trial in search.trials()]
    assert len(statuses) == 12
    assert "pruned" in statuses
    assert statuses.count("finished") >= 5
    assert not list(Search(chosen, tmp_path, CPU).rounds())  # a pruned run is not made again
    assert search.winner().values["lr"] > 1e-3
    for trial in search.trials():
        if trial.status == "pruned":
            assert trial.score is None
            assert len(trial.course) < 9


def test_a_trial_that_diverges_does_not_end_the_search(tmp_path):
    search = make(plan(space={"lr": [0.03, 1e30]}), tmp_path)
    states = {trial.spec.lr: trial.status for trial in search.trials()}
    assert states.pop(1e30) == "diverged"
    assert set(states.values()) == {"finished"}


def test_a_written_winner_fills_its_cell(tmp_path, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 - abs(spec.weight_decay - 3e-4))
    space = {"lr": [0.002], "weight_decay": [1e-4, 3e-4, 1e-3]}
    search = make(plan(space=space, cell=CELL, tier="quick"), tmp_path)
    search.write_winner(search.winner())
    key = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "optimizer=adam", "scheme=l2"]
    (cell,) = select(cells("fig1", "quick", searched_folder=tmp_path), key)
    (spec,) = cell.runs
    assert (spec.lr, spec.weight_decay, spec.decay) == (0.002, 3e-4, "l2")


def test_the_default_grid_is_the_recipes():
    spec = RunSpec(optimizer="adam", lr=0.0003, decay="l2", weight_decay=0.3)
    space = default_space(spec, "l2")
    assert space["lr"] == [0.0001, 0.0003, 0.0009]
    assert (space["weight_decay"][0], space["weight_decay"][-1]) == (1e-6, 1e-2)
    steps = [b / a for a, b in zip(space["weight_decay"], space["weight_decay"][1:], strict=False)]
    assert steps == pytest.approx([10**0.5] * 8, rel=1e-2)


def test_what_cannot_be_searched_is_refused():
    with refuses(UnknownName, name="momentum"):
        plan(space={"momentum": [0.9]})
    with refuses(Misplaced, settings=["damping"]):
        plan(space={"damping": [0.1]})
    with refuses(OutOfRange, name="lr", value=0.0):
        plan(space={"lr": [0.0, 0.1]})
    with refuses(UnknownName, kind="method", name="random"):
        plan(method="random")
    with refuses(Lacks, owner="a search by TPE"):  # which would draw one point for ever
        plan(method="tpe", space={"lr": [0.1]})
    with refuses(Lacks, owner="the search"):
        plan(space={})
