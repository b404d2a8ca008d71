"""Searches by grid and by lines, which need no Optuna."""

import math
import sys
import tomllib
from dataclasses import replace

import pytest
import torch
from refusals import refused, refuses
from report.synthetic import write_run
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import RUNS_LEFT, Lacks, UnknownName
from decaylab.records import RunStore
from decaylab.sweeps.search import (
    Search,
    SearchPlan,
    Winner,
    first_line,
    grid_specs,
    second_line,
    widened,
)
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import Progress, RunSpec

BASE = RunSpec(hidden=(8,), batch_size=256, epochs=3, decay="l2", weight_decay=0.1)
SPACE = {"lr": [0.1, 0.01], "weight_decay": [1e-4, 1e-3, 1e-2]}
CELL = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0", "optimizer=adam"]
CPU = WorkerOptions(torch.device("cpu"))
PLAN = SearchPlan("a-search", BASE, SPACE)


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "searched" / "runs")


@pytest.fixture(autouse=True)
def without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)


def record(store, accuracy, *, loss=lambda spec: 1.0, diverged=lambda spec: False, plan=PLAN):
    for spec in grid_specs(plan):
        values = {"test/accuracy": accuracy(spec), "test/loss": loss(spec)}
        status = "diverged" if diverged(spec) else "finished"
        write_run(store, spec, values, tier="quick", status=status)


def winner(plan, store):
    return Search(replace(plan, widen=False), store.root.parent, CPU).winner()


def test_the_winner_has_the_highest_last_accuracy_and_of_equals_the_lower_loss(store):
    record(store, lambda spec: 0.9 - abs(spec.weight_decay - 1e-3), loss=lambda spec: spec.lr)
    found = winner(PLAN, store)
    assert found.values == {"lr": 0.01, "weight_decay": 1e-3}
    assert found.score == pytest.approx(0.9, rel=1e-12)
    assert found.tried == {"lr": [0.01, 0.1], "weight_decay": [1e-4, 1e-3, 1e-2]}
    assert found.trials == 6


@pytest.mark.parametrize("row", ["train/running_loss", "train/pass_loss"])
def test_the_winner_by_training_loss(store, row):
    plan = replace(PLAN, by="train/pass_loss")
    for spec in grid_specs(plan):
        loss = spec.lr + abs(spec.weight_decay - 1e-3)
        values = {"test/accuracy": loss, "test/loss": -loss, "train/running_loss": 1.0, row: loss}
        write_run(store, spec, values, tier="quick")
    found = winner(plan, store)
    assert found.values == {"lr": 0.01, "weight_decay": 1e-3}
    assert found.score == pytest.approx(-0.01)


def test_a_run_that_diverged_does_not_win(store):
    record(store, lambda spec: spec.lr, diverged=lambda spec: spec.lr == 0.1)
    assert winner(PLAN, store).values["lr"] == 0.01


def test_nothing_is_chosen_before_all_runs_are_there(store):
    spec, *others = grid_specs(PLAN)
    write_run(store, spec, {"test/accuracy": 0.5, "test/loss": 1.0}, tier="quick")
    assert winner(PLAN, store) is None
    asked = Search(PLAN, store.root.parent, CPU).ask()
    assert [spec.id for spec in asked] == [spec.id for spec in others]


def test_where_all_diverge_the_remedy_is_said(store):
    record(store, lambda spec: 0.1, diverged=lambda spec: True)
    with refuses(Lacks, what="run that came to its end"):
        winner(PLAN, store)


@pytest.mark.parametrize("cell", [None, {"dataset": "cifar10", "scheme": "wd"}])
def test_a_narrower_search_does_not_replace_a_better_winner(store, cell):
    folder = store.root.parent
    wide = replace(PLAN, cell=cell, widen=False)
    record(store, lambda spec: 0.9 - abs(spec.weight_decay - 1e-3) - spec.lr, plan=wide)
    search = Search(wide, folder, CPU)
    before = search.write_winner(search.winner())
    narrow = replace(wide, space={"lr": [0.1, 0.3]})
    record(store, lambda spec: 0.5 + spec.lr / 10, plan=narrow)
    search = Search(narrow, folder, CPU)
    assert search.winner().values == {"lr": 0.3}
    standing = search.write_winner(search.winner())
    assert standing.values == before.values == {"lr": 0.01, "weight_decay": 1e-3}
    assert standing.tried["lr"] == [0.01, 0.1, 0.3]
    spec = RunSpec.from_file(folder / "a-search" / "winner.toml")
    assert (spec.lr, spec.weight_decay, spec.held_out) == (0.01, 1e-3, False)
    if cell:
        written = tomllib.loads((folder / "a-search.toml").read_text())
        assert written["winner"] == before.values
        assert written["search"]["lr_tried"] == [0.01, 0.1, 0.3]
    better = replace(wide, space={"lr": [0.001]})
    record(store, lambda spec: 0.95, plan=better)
    search = Search(better, folder, CPU)
    assert search.write_winner(search.winner()).values == {
        "lr": 0.001,
        "weight_decay": BASE.weight_decay,
    }


@pytest.mark.parametrize(
    ("lr", "decay", "added"),
    [
        (0.03, 1e-4, {"weight_decay": 3.16e-5}),
        (0.03, 1e-2, {"weight_decay": 3.16e-2}),
        (0.01, 1e-3, {"lr": 3.16e-3}),
        (0.1, 1e-4, {"lr": 0.316, "weight_decay": 3.16e-5}),
        (0.03, 1e-3, None),
    ],
)
def test_the_grid_grows_beyond_the_edges_that_won(store, lr, decay, added):
    plan = replace(PLAN, space={**SPACE, "lr": [0.01, 0.03, 0.1]})
    distance = lambda spec: abs(spec.lr - lr) + abs(spec.weight_decay - decay)  # noqa: E731
    record(store, lambda spec: 0.9 - distance(spec), plan=plan)
    wider = widened(plan, winner(plan, store))
    if added is None:
        assert wider is None
    else:
        for field, values in plan.space.items():
            new = set(wider.space[field]) - set(values)
            assert new == ({added[field]} if field in added else set())


def test_a_field_with_one_value_does_not_grow():
    plan = replace(PLAN, space={"lr": [0.1], "weight_decay": [1e-4, 1e-3, 1e-2]})
    assert widened(plan, Winner({"lr": 0.1, "weight_decay": 1e-3}, 0.9, plan.space, 3)) is None


def test_a_grid_that_grows_twice_is_back_at_a_power_of_ten():
    plan = replace(PLAN, space={"weight_decay": SPACE["weight_decay"]})
    for best in (1e-4, 3.16e-5, 1e-5):
        plan = widened(plan, Winner({"weight_decay": best}, 0.9, plan.space, 6))
    assert plan.space["weight_decay"][:3] == [3.16e-6, 1e-5, 3.16e-5]


def test_a_search_by_lines_chooses_among_both(store):
    """Its runs are a cross."""
    plan = SearchPlan("a-search", replace(BASE, lr=0.1), SPACE, "lines", widen=False)
    down = first_line(plan)
    assert down.space == {"lr": [0.1], "weight_decay": SPACE["weight_decay"]}
    record(store, lambda spec: 0.9 - abs(spec.weight_decay - 1e-3) - spec.lr, plan=down)
    search = Search(plan, store.root.parent, CPU)
    (asked,) = search.ask()
    assert (asked.lr, asked.weight_decay) == (0.01, 1e-3)
    across = second_line(plan, 1e-3)
    record(store, lambda spec: 0.9 - abs(spec.weight_decay - 1e-3) - spec.lr, plan=across)
    found = search.winner()
    assert found.values == {"lr": 0.01, "weight_decay": 1e-3}
    assert found.tried == {"lr": [0.01, 0.1], "weight_decay": [1e-4, 1e-3, 1e-2]}
    assert found.trials == 4


def search(tmp_path, *more, lr="0.001", cell=CELL, code=0):
    words = [*cell, "--scheme", "wd", "--tier", "smoke", "--lr", lr, "--runs", tmp_path]
    done = CliRunner().invoke(app, ["search", *map(str, [*words, *more])])
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_command_makes_the_grid_chooses_and_writes_what_reproduce_reads(tmp_path):
    said = search(tmp_path, "--weight-decay", "0.01,0.1,1", "--no-widen", "--at-once", "2")
    assert "3 runs of smoke-digits-vgg16-adam-wd recorded" in said
    found = tomllib.loads((tmp_path / "searched" / "smoke-digits-vgg16-adam-wd.toml").read_text())
    assert found["cell"]["scheme"] == "wd"
    assert found["search"]["trials"] == 3
    assert found["search"]["device"] == "cpu"
    spec = RunSpec.from_file(tmp_path / "searched" / "smoke-digits-vgg16-adam-wd" / "winner.toml")
    assert not spec.held_out
    assert spec.weight_decay == found["winner"]["weight_decay"]
    assert f"winner: lr 0.001, weight_decay {spec.weight_decay:g}" in said
    again = search(tmp_path, "--weight-decay", "0.01,0.1,1", "--no-widen")
    assert "recorded" not in again  # there was nothing to make
    assert "winner: lr 0.001" in again


def test_the_command_says_what_reproduce_makes_of_the_winner(tmp_path):
    used = search(tmp_path, "--weight-decay", "0.01", "--no-widen")
    assert "at tier smoke, `reproduce` uses it in table1" in used
    cell = [*CELL[:-1], "optimizer=sgd"]  # whose L2 is its weight decay
    unused = search(tmp_path, "--scheme", "l2", "--weight-decay", "0.01", "--no-widen", cell=cell)
    assert "`reproduce` does not use it: no table or figure has this cell with scheme l2" in unused


def test_the_command_says_what_lies_on_the_edge(tmp_path):
    said = search(tmp_path, "--weight-decay", "0.01,0.1", "--no-widen")
    assert "on the edge of what was tried: weight_decay (try --weight-decay beyond it)" in said


def test_a_constant_lr_is_searched_by_training_loss_and_taken_by_its_figure_alone(tmp_path):
    cell = ["dataset=cifar10", "network=vgg16", "batch_norm=1", "augment=0", "optimizer=kfac-g",
            "batch_size=640", "constant_lr=1"]  # fmt: skip
    said = search(tmp_path, "--scheme", "none", cell=cell, lr="0.0001,0.01,1")
    assert "at tier smoke, `reproduce` uses it in fig9-bn\n" in said
    name = "smoke-digits-vgg16-batch_norm-kfac-g-none-640-constant_lr.toml"
    found = tomllib.loads((tmp_path / "searched" / name).read_text())
    assert found["search"]["by"] == "train/pass_loss"
    assert found["search"]["epochs"] == 10
    losses = {}
    for folder in RunStore(tmp_path / "searched" / "runs").runs():
        spec, last = RunSpec.of_run(folder), folder.rows().last("train/pass_loss")
        assert spec.lr_drop_every == spec.epochs
        losses[spec.lr] = math.inf if last is None else last
    assert found["winner"]["lr"] == min(losses, key=losses.get)
    assert found["search"]["value"] == min(losses.values())
    done = CliRunner().invoke(app, ["search", *cell[:-1], "constant_lr=yes", "--scheme", "none"])
    assert "'yes'" in done.stderr


@pytest.mark.parametrize("scheme", ["wn-conv", "wd-fc", "undecayed", "L2"])
def test_a_scheme_that_cannot_be_searched_is_refused(scheme):
    error = refused("search", *CELL, "--scheme", scheme, "--lr", "0.1")
    assert isinstance(error, UnknownName)
    assert error.name == scheme


def test_the_command_searches_by_lines(tmp_path):
    decays = ("--weight-decay", "0.01,0.1,1", "--no-widen")
    said = search(tmp_path, *decays, "--method", "lines", lr="0.001,0.003,0.01")
    recorded = [line.split()[0] for line in said.splitlines() if line.endswith("recorded")]
    assert recorded == ["3", "5"]
    found = tomllib.loads((tmp_path / "searched" / "smoke-digits-vgg16-adam-wd.toml").read_text())
    assert found["search"]["method"] == "lines"
    assert found["search"]["trials"] == 5
    assert len(list((tmp_path / "searched" / "runs").iterdir())) == 5
    assert found["search"]["lr_tried"] == [0.001, 0.003, 0.01]


def test_both_lines_grow(tmp_path, store, monkeypatch):
    """Up to the best, which lies beyond both of their first edges."""
    best = {"weight_decay": 0.0316, "lr": 0.01}

    def train(spec, *, store, **rest):
        far = sum(abs(math.log(getattr(spec, f) / v)) for f, v in best.items())
        write_run(store, spec, {"test/accuracy": 0.9 - far / 100, "test/loss": 1.0}, tier="smoke")
        values = {"test/accuracy": 0.5, "train/loss": 0.0}
        yield Progress("finished", spec.id, spec.epochs, spec.epochs, 1, 1, 0.0, values)

    monkeypatch.setattr("decaylab.sweeps.worker.train", train)
    words = ("--weight-decay", "0.1,0.316", "--method", "lines")
    assert "winner: lr 0.01, weight_decay 0.0316" in search(tmp_path, *words, lr="0.001,0.00316")
    found = tomllib.loads((tmp_path / "searched" / "smoke-digits-vgg16-adam-wd.toml").read_text())
    assert found["search"]["weight_decay_tried"] == [0.01, 0.0316, 0.1, 0.316]
    assert found["search"]["lr_tried"] == [0.001, 0.00316, 0.01, 0.0316]
    assert found["search"]["on_edge"] == []


def test_lines_need_weight_decays():
    words = [*CELL, "--scheme", "none", "--method", "lines"]
    done = CliRunner().invoke(app, ["search", *words, "--lr", "0.1"])
    assert "give some" in done.stderr


def test_the_minutes_end_it_without_a_choice(tmp_path):
    said = search(tmp_path, "--weight-decay", "0.01,0.1", "--max-minutes", "1e-6", code=RUNS_LEFT)
    assert "0 runs of" in said
    assert "winner" not in said
    assert not list((tmp_path / "searched").glob("*.toml"))
