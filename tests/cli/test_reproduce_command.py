import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import RUNS_LEFT
from decaylab.records import RunStore

runner = CliRunner()
SMALL = ["table2", "--only", "network=vgg16", "--only", "optimizer=sgd"]


def decaylab(*arguments):
    return runner.invoke(app, [str(word) for word in arguments])


def test_one_line_per_finished_run_when_piped_and_a_second_time_nothing(tmp_path):
    first = decaylab("reproduce", *SMALL, "--runs", tmp_path)
    assert first.exit_code == 0, first.output
    lines = first.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["1/2", "2/2"]
    assert "2 of 2 cells filled: 2 runs made, 0 done before, 0 left" in lines[2]
    assert f"`decaylab report --runs {tmp_path}`" in lines[3]
    assert lines[4].startswith("tier smoke only shows that everything runs")
    second = decaylab("reproduce", *SMALL, "--runs", tmp_path)
    assert "2 of 2 cells filled: 0 runs made, 2 done before" in second.stdout
    more = decaylab("reproduce", *SMALL, "--seeds", 2, "--runs", tmp_path, "--json")
    result = json.loads(more.stdout)
    assert (len(result["finished"]), len(result["before"])) == (2, 2)


def test_whole_runs_that_never_fit_ask_for_more_minutes(tmp_path):
    limit = ["--max-minutes", 1e-3, "--whole-runs", "--runs", tmp_path]
    result = decaylab("reproduce", *SMALL, *limit)
    assert result.exit_code == RUNS_LEFT, result.output
    assert "0 runs made, 0 done before, 2 left" in result.stdout
    assert "2 of those left were not started" in result.stdout
    assert json.loads(decaylab("reproduce", *SMALL, *limit, "--json").stdout)["late"]


def test_a_run_records_what_other_artefacts_want_and_says_what_it_lacks(tmp_path):
    decaylab("reproduce", *SMALL, "--runs", tmp_path)
    (folder, _) = RunStore(tmp_path).runs()
    assert folder.rows().last("kfac_gn_norm") is not None
    rows = tmp_path / folder.id / "rows.jsonl"
    kept = [line for line in rows.read_text().splitlines() if "jacobian_norm" not in line]
    rows.write_text("\n".join(kept) + "\n")
    again = decaylab("reproduce", *SMALL, "--runs", tmp_path)
    assert f"{folder.id} was finished without jacobian" in again.stdout


def test_a_dry_run_prints_the_plan_with_its_time_and_makes_nothing(tmp_path):
    result = decaylab("reproduce", "fig4", "--tier", "short", "--dry-run", "--runs", tmp_path)
    assert result.exit_code == 0
    assert not list(tmp_path.iterdir())
    assert "8 cells, 8 runs: 0 done, 8 left, about" in result.stdout
    assert "to do, after its source" in result.stdout
    assert "table of step times" in result.stdout
    decaylab("reproduce", *SMALL, "--runs", tmp_path)
    plan = json.loads(
        decaylab(
            "reproduce", *SMALL, "--seeds", 2, "--dry-run", "--json", "--runs", tmp_path
        ).stdout
    )
    assert [run["state"] for run in plan["runs"]] == ["finished"] * 2 + ["to do"] * 2
    assert all(run["recorded"] for run in plan["runs"])  # measured in the first two
    first, other = plan["runs"][0]["seconds"], plan["runs"][2]["seconds"]
    assert other == pytest.approx(first)


def test_a_search_that_is_missing_is_listed(tmp_path):
    result = decaylab("reproduce", "fig1", "--tier", "short", "--dry-run", "--runs", tmp_path)
    assert "cells without a run yet" in result.stdout
    assert "decaylab search dataset=cifar100 network=resnet32" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table9"], "'table9'"),
        (["table1", "--tier", "huge"], "'huge'"),
        (["table1", "--only", "optimiser=sgd"], "'optimiser'"),
        (["table1", "--only", "optimizer=lamb"], "'lamb'"),
        (["table1", "--seeds", "0"], "seeds"),
        (["table1", "--max-minutes", "0"], "--max-minutes"),
    ],
)
def test_bad_input_is_one_sentence_with_what_is_known(tmp_path, arguments, said):
    result = decaylab("reproduce", *arguments, "--runs", tmp_path)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_tier_whose_data_is_missing_says_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DECAYLAB_DATA", raising=False)
    result = decaylab(
        "reproduce", "table1", "--tier", "short", "--device", "cpu", "--runs", tmp_path / "runs"
    )
    assert result.exit_code == 2
    assert "decaylab data fetch cifar10" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_damaged_line_and_another_format_are_left_out_and_named(tmp_path):
    decaylab("reproduce", *SMALL, "--runs", tmp_path)
    one, two = RunStore(tmp_path).runs()
    with (one.path / "rows.jsonl").open("a") as file:
        file.write("{torn\n")
    manifest = json.loads((two.path / "manifest.json").read_text())
    (two.path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    result = decaylab("claims", "--tier", "smoke", "--runs", tmp_path)
    assert result.exit_code == 0
    assert f"{one.id}: line" in result.stderr
    assert "(99)" in result.stderr
    again = decaylab("reproduce", *SMALL, "--runs", tmp_path)
    assert again.exit_code == 1
    assert "(99)" in again.stderr


def test_search_of_a_cell_and_of_a_spec_file(tmp_path):
    cell = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0", "optimizer=adam"]
    result = decaylab(
        "search", *cell, "--tier", "smoke", "--lr", "0.001", "--weight-decay", "1e-3,1e-2,1e-1",
        "--runs", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "winner: lr 0.001" in result.stdout
    assert (tmp_path / "searched" / "smoke-digits-vgg16-adam-l2.toml").exists()
    (tmp_path / "spec.toml").write_text("hidden = [8]\nepochs = 1\nbatch_size = 256\nlr = 0.1\n")
    own = decaylab("search", "--config", tmp_path / "spec.toml", "--retrain", "--runs", tmp_path)
    assert own.exit_code == 0, own.output
    assert "test accuracy" in own.stdout


def test_a_search_by_tpe_alone_needs_optuna(tmp_path, monkeypatch):
    (tmp_path / "spec.toml").write_text("hidden = [8]\nepochs = 1\nbatch_size = 256\nlr = 0.1\n")
    search = ["search", "--config", tmp_path / "spec.toml", "--runs", tmp_path, "--lr", "0.01,0.1"]
    monkeypatch.setitem(sys.modules, "optuna", None)
    made = decaylab(*search, "--at-once", "2")
    assert made.exit_code == 0, made.output
    assert "winner: lr " in made.stdout
    assert "pip install" in decaylab(*search, "--method", "tpe").stderr


def test_a_tier_for_gpus_is_refused_where_there_is_none_unless_a_cpu_is_asked_for(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = decaylab("reproduce", "table1", "--tier", "full", "--runs", tmp_path)
    assert result.exit_code == 2
    assert "--device cpu" in result.stderr
    assert not list(tmp_path.iterdir())


def test_reproduce_makes_the_searches_that_its_cells_need(tmp_path, monkeypatch):
    monkeypatch.setattr("decaylab.paper.settings._packaged", lambda: ())
    cell = ["batch_norm=0", "network=vgg16", "optimizer=adam", "scheme=l2"]
    words = [word for condition in cell for word in ("--only", condition)]
    listed = decaylab("reproduce", "fig1", *words, "--runs", tmp_path, "--no-search")
    assert "0 of 1 cells filled" in listed.stdout
    result = decaylab("reproduce", "fig1", *words, "--runs", tmp_path, "--at-once", 4)
    assert result.exit_code == 0, result.output
    assert "1 of 1 cells filled" in result.stdout
    assert (tmp_path / "searched" / "smoke-digits-vgg16-adam-l2.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a cell"),
        (["network=vgg16"], "dataset"),
        (["width=3"], "'width'"),
        (["dataset=mnist", "network=vgg16", "batch_norm=0", "augment=0", "optimizer=adam"],
         "dataset=mnist"),
    ],
)  # fmt: skip
def test_search_says_what_a_cell_is(tmp_path, arguments, said):
    result = decaylab("search", *arguments, "--runs", tmp_path)
    assert result.exit_code == 2
    assert said in result.stderr


def test_claims_without_runs_say_how_to_make_some(tmp_path):
    result = decaylab("claims", "--runs", tmp_path)
    assert result.exit_code == 0
    assert "decaylab reproduce table1" in result.stdout
    assert decaylab("claims", "--tier", "tiny", "--runs", tmp_path).exit_code == 2
