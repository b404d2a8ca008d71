import tomllib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.data import load
from decaylab.errors import DecaylabError
from decaylab.paper import cells, select
from decaylab.paper.search import Search, SearchPlan, default_space
from decaylab.records import RunStore
from decaylab.training import RunSpec, loop

pytest.importorskip("optuna")
BASE = RunSpec(hidden=(8,), batch_size=256, epochs=3, lr_drop_every=3, decay="l2", weight_decay=0.1)
CELL = {"dataset": "digits", "network": "vgg16", "batch_norm": 0, "augment": 0,
        "optimizer": "adam", "batch_size": 128, "scheme": "l2"}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def plan(**changes):
    space = {"lr": [0.01, 0.1], "weight_decay": [1e-4, 1e-3]}
    return SearchPlan(**{"name": "a-search", "base": BASE, "space": space} | changes)


def fake_accuracy(monkeypatch, accuracy):
    """Training that ends at once, with an accuracy that is a function of the spec."""

    def train(spec, **rest):
        values = {"test/accuracy": accuracy(spec), "test/loss": 1.0}
        yield loop.Progress("finished", spec.id, spec.epochs, spec.epochs, 1, 1, 0.0, values)

    monkeypatch.setattr("decaylab.paper.search.train", train)


def test_the_grid_is_searched_on_held_out_images_and_the_winner_trains_on_all(tmp_path, digits):
    search = Search(plan(), tmp_path, digits)
    trials = list(search.run())
    tried = {tuple(trial.values.values()) for trial in trials}
    assert tried >= {(lr, wd) for lr in (0.01, 0.1) for wd in (1e-4, 1e-3)}
    for folder in RunStore(tmp_path / "runs").runs():
        assert RunSpec.from_toml(folder.spec_text()).held_out
        assert not folder.checkpoint.exists()
    complete = [trial for trial in trials if trial.state == "complete"]
    winner = RunSpec.from_file(tmp_path / "a-search" / "winner.toml")
    best = max(trial.accuracy for trial in complete)
    assert best == next(t.accuracy for t in complete if t.values["lr"] == winner.lr
                        and t.values["weight_decay"] == winner.weight_decay)  # fmt: skip
    assert not winner.held_out
    assert not list(Search(plan(), tmp_path, digits).run())  # nothing is made twice


def test_a_search_that_was_stopped_goes_on_where_it_was(tmp_path, digits):
    stopped = Search(plan(), tmp_path, digits).run()
    first = [next(stopped), next(stopped)]
    stopped.close()
    rest = list(Search(plan(), tmp_path, digits).run())
    points = [tuple(trial.values.values()) for trial in (*first, *rest)]
    assert len(points) == len(set(points))


def test_the_grid_widens_while_the_best_weight_decay_is_on_its_edge(tmp_path, digits, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 - abs(spec.weight_decay - 0.00316))
    search = Search(plan(space={"weight_decay": [1e-4, 3e-4, 1e-3]}, cell=CELL), tmp_path, digits)
    list(search.run())
    assert search.found().values["weight_decay"] == pytest.approx(0.00316)
    found = tomllib.loads((tmp_path / "a-search.toml").read_text())
    assert found["cell"] == CELL
    assert found["search"]["on_edge"] == []
    assert max(found["search"]["weight_decay_tried"]) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("made_before", [10, 11, 13])
def test_a_search_stopped_while_its_grid_widens_goes_on_widening(
    tmp_path, digits, monkeypatch, made_before
):
    best = {"lr": 0.03, "weight_decay": 0.00316}
    fake_accuracy(
        monkeypatch, lambda spec: 1 - sum(abs(getattr(spec, f) - v) for f, v in best.items())
    )
    lrs = [0.01, 0.03, 0.1]
    chosen = plan(space={"lr": lrs, "weight_decay": [1e-4, 3e-4, 1e-3]}, cell=CELL)
    stopped = Search(chosen, tmp_path, digits).run()
    first = [next(stopped) for _ in range(made_before)]
    stopped.close()
    rest = list(Search(chosen, tmp_path, digits).run())
    decays = [1e-4, 3e-4, 1e-3, 0.00316, 0.01]
    assert sorted(tuple(trial.values.values()) for trial in (*first, *rest)) == [
        (lr, decay) for lr in lrs for decay in decays
    ]
    found = tomllib.loads((tmp_path / "a-search.toml").read_text())["search"]
    assert found["on_edge"] == []
    assert found["weight_decay_tried"] == decays


def test_a_search_killed_before_a_trial_begins_leaves_none_out(tmp_path, digits, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 - abs(spec.lr - 0.03))
    killed = Search(plan(space={"lr": [0.01, 0.03, 0.1]}), tmp_path, digits)
    with killed._own.writing(killed.base.to_toml()):
        killed._study().enqueue_trial({"lr": 0.01})
    trials = list(Search(killed.plan, tmp_path, digits).run())
    assert [trial.values["lr"] for trial in trials] == [0.01, 0.03, 0.1]


def test_a_search_of_more_fields_begins_anew(tmp_path, digits, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 - abs(spec.lr - 0.03) - abs(spec.damping - 0.003))
    base = replace(BASE, optimizer="kfac-f")
    lrs = [0.01, 0.03, 0.1]
    chosen = plan(base=base, space={"lr": lrs})
    list(Search(chosen, tmp_path, digits).run())
    more = replace(chosen, space={"lr": lrs, "damping": [1e-3, 3e-3, 1e-2]})
    assert len(list(Search(more, tmp_path, digits).run())) == 9
    assert Search(more, tmp_path, digits).found().values["damping"] == 3e-3


def test_the_command_says_what_lies_on_the_edge_by_optuna(tmp_path, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: spec.weight_decay)
    words = [f"{name}={value}" for name, value in (CELL | {"dataset": "cifar10"}).items()][:-1]
    words += ["--tier", "smoke", "--lr", "0.1", "--weight-decay", "0.1,1", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, ["search", *words])
    assert done.exit_code == 0, done.output
    assert "on the edge of what was tried: weight_decay (give --weight-decay" in done.stdout


def test_of_tpe_it_says_that_more_trials_help(tmp_path, monkeypatch):
    """The largest of the values that were drawn is mostly inside the range."""
    asked = []

    def train(spec, *, execution, **rest):
        asked.append(execution.compiled)
        values = {"test/accuracy": spec.lr, "test/loss": 1.0}
        yield loop.Progress("finished", spec.id, spec.epochs, spec.epochs, 1, 1, 0.0, values)

    monkeypatch.setattr("decaylab.paper.search.train", train)
    (tmp_path / "own.toml").write_text(BASE.to_toml())
    words = ["search", "--config", str(tmp_path / "own.toml"), "--runs", str(tmp_path)]
    words += ["--method", "tpe", "--trials", "3", "--lr", "0.01,0.1", "--weight-decay", "0.1"]
    done = CliRunner().invoke(app, [*words, "--compiled"])
    assert done.exit_code == 0, done.output
    said = "on the edge of what was tried: lr (give more --trials, or --lr with a wider range)"
    assert said in done.stdout
    assert asked == [True] * 3


def test_a_winner_that_stays_on_the_edge_is_said_to_be_so(tmp_path, digits, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 / (1 + spec.weight_decay))
    list(Search(plan(space={"weight_decay": [0.1, 0.3]}, cell=CELL), tmp_path, digits).run())
    found = tomllib.loads((tmp_path / "a-search.toml").read_text())
    assert found["search"]["on_edge"] == ["weight_decay"]


def test_tpe_makes_as_many_trials_as_asked_inside_the_range(tmp_path, digits, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: spec.lr)
    chosen = plan(method="tpe", trials=7, space={"lr": [0.01, 0.1]})
    trials = list(Search(chosen, tmp_path, digits).run())
    assert len(trials) == 7
    assert all(0.01 <= trial.values["lr"] <= 0.1 for trial in trials)
    more = replace(chosen, trials=9)
    assert len(list(Search(more, tmp_path, digits).run())) == 2


def test_a_trial_that_diverges_does_not_end_the_search(tmp_path, digits):
    chosen = plan(space={"lr": [0.03, 1e30]})
    trials = list(Search(chosen, tmp_path, digits).run())
    states = {trial.values["lr"]: trial.state for trial in trials}
    assert states.pop(1e30) == "diverged"
    assert set(states.values()) == {"complete"}


def test_a_written_winner_fills_its_cell(tmp_path, digits, monkeypatch):
    fake_accuracy(monkeypatch, lambda spec: 1 - abs(spec.weight_decay - 3e-4))
    space = {"lr": [0.002], "weight_decay": [1e-4, 3e-4, 1e-3]}
    chosen = plan(space=space, cell=CELL, tier="quick")
    list(Search(chosen, tmp_path, digits).run())
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
    with pytest.raises(DecaylabError, match="cannot search 'momentum'"):
        plan(space={"momentum": [0.9]})
    with pytest.raises(DecaylabError, match="damping is no setting of sgd"):
        plan(space={"damping": [0.1]})
    with pytest.raises(DecaylabError, match="must be positive"):
        plan(space={"lr": [0.0, 0.1]})
    with pytest.raises(DecaylabError, match="choose grid, lines or tpe"):
        plan(method="random")
    with pytest.raises(DecaylabError, match="nothing to search"):
        plan(space={})
