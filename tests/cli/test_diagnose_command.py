import json
import shutil
from pathlib import Path

import pytest
from diagnosis.recorded import ScriptedLayer, records
from refusals import refused
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import (
    BadValue,
    Conflict,
    Lacks,
    Misplaced,
    NotFinished,
    OutOfRange,
    Range,
    UnknownName,
)

runner = CliRunner()
TINY = ["--hidden", "32,32", "--batch-norm", "--batch-size", "64", "--epochs", "12"]
LEARNING_RATES = ["--from-lr", "1", "--to", "sgd", "--to-lr", "1"]
PART = Range(above=0, below=1)
DECAY = ["--decay", "l2", "--weight-decay", "0.005"]


def run(*arguments):
    return runner.invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for extra in ([], DECAY, [*DECAY, "--lr", "0.05"]):
        lr = [] if "--lr" in extra else ["--lr", "0.1"]
        done = run("train", *TINY, *lr, *extra, "--device", "cpu", "--runs", folder)
        assert done.exit_code == 0, done.output
    return folder


def names(runs):
    found = json.loads(run("runs", "list", "--runs", runs, "--json").stdout)
    return {(entry["spec"]["decay"], entry["spec"]["lr"]): entry["id"] for entry in found}


def test_card_markdown_and_json_are_one_result(runs):
    of = names(runs)
    pair = [of["l2", 0.1], of["none", 0.1], "--runs", runs]
    plain = json.loads(run("diagnose", *pair, "--json").stdout)
    verdicts = [finding["verdict"] for finding in plain["findings"]]
    assert verdicts[0] == "acts"
    assert verdicts[2] == "does not act"
    assert plain["baselines"] == [of["none", 0.1]]
    markdown = run("diagnose", *pair, "--markdown").stdout
    card = run("diagnose", *pair)
    assert card.exit_code == 0
    for finding in plain["findings"]:
        assert f"## {finding['title']}" in markdown
        assert finding["title"] in card.stdout
    for text in (card.stdout, markdown):
        assert " ".join(plain["headline"].split()[:6]) in text
    assert plain["outcome"]["name"] == "test_accuracy"
    assert plain["outcome"]["verdict"] in ("better in one seed", "worse in one seed")
    beside = run("diagnose", of["l2", 0.1], "--runs", runs, "--json").stdout
    assert json.loads(beside) == plain
    alone = json.loads(run("diagnose", of["l2", 0.1], "--alone", "--runs", runs, "--json").stdout)
    assert alone["baselines"] == []
    assert alone["findings"][0]["effect"]["source"] == "reconstruction"
    undecayed = json.loads(
        run("diagnose", of["none", 0.1], "--all-seeds", "--runs", runs, "--json").stdout
    )
    assert (undecayed["runs"], undecayed["baselines"]) == ([of["none", 0.1]], [])
    other_lr = json.loads(run("diagnose", of["l2", 0.05], "--runs", runs, "--json").stdout)
    assert other_lr["baselines"] == []  # the one without decay has another
    assert isinstance(refused("diagnose", *pair, "--alone"), Conflict)
    by_path = run("diagnose", runs / of["l2", 0.1], runs / of["none", 0.1], "--json")
    assert json.loads(by_path.stdout) == plain


def test_a_run_from_before_a_field_came_is_comparable(runs, tmp_path):
    of, old = names(runs), tmp_path / "runs"
    shutil.copytree(runs, old)
    spec = old / of["none", 0.1] / "spec.toml"
    kept = [
        line
        for line in spec.read_text().splitlines(keepends=True)
        if not line.startswith(("size_source", "step_scaling", "keep_last_batch", "deterministic"))
    ]
    assert len(kept) == len(spec.read_text().splitlines()) - 4
    spec.write_text("".join(kept))
    pair = [of["l2", 0.1], of["none", 0.1], "--runs", old, "--json"]
    result = json.loads(run("diagnose", *pair).stdout)
    assert result["baselines"] == [of["none", 0.1]]
    assert not result["first"]


def test_a_spec_of_another_version_and_a_run_without_decay(runs, tmp_path):
    of, other = names(runs), tmp_path / "runs"
    shutil.copytree(runs, other)
    with (other / of["l2", 0.1] / "spec.toml").open("a") as spec:
        spec.write("future_field = 1\n")
    result = json.loads(run("diagnose", of["l2", 0.1], "--runs", other, "--json").stdout)
    assert result["baselines"] == []
    error = refused("diagnose", of["l2", 0.1], "--all-seeds", "--runs", other)
    assert isinstance(error, UnknownName)
    assert error.name == "future_field"
    alone = run("diagnose", of["none", 0.1], "--all-seeds", "--runs", runs, "--json")
    assert json.loads(alone.stdout)["baselines"] == []


def test_training_records_what_all_three_mechanisms_need(runs):
    """`decaylab train`, then `diagnose`, with no command in between."""
    of = names(runs)
    pair = [of["l2", 0.1], "--against", of["none", 0.1], "--runs", runs]
    findings = json.loads(run("diagnose", *pair, "--json").stdout)["findings"]
    assert [finding["verdict"] for finding in findings] == ["acts", "acts", "does not act"]
    assert findings[1]["effect"]["probes"] == ["jacobian_norm"]


def test_what_is_wrong_is_said_first(runs, tmp_path):
    of = names(runs)
    words = ["--against", of["l2", 0.1], "--runs", runs, "--markdown"]
    swapped = run("diagnose", of["none", 0.1], *words).stdout
    assert "did you swap the two?" in swapped
    plain = json.loads(run("diagnose", of["none", 0.1], "--runs", runs, "--json").stdout)
    assert plain["first"] == []  # nothing is hidden: the headline says it
    assert plain["headline"].startswith("This run has no weight decay.")
    told = [of["none", 0.1], of["l2", 0.1], "--runs", runs, "--json"]  # told apart by their decay
    assert json.loads(run("diagnose", *told).stdout)["runs"] == [of["l2", 0.1]]
    words = ["--against", of["l2", 0.05], "--runs", runs, "--json"]
    other = json.loads(run("diagnose", of["l2", 0.1], *words).stdout)
    assert "has weight decay" in other["first"][0]
    unlike = json.loads(
        run("diagnose", of["l2", 0.05], of["none", 0.1], "--runs", runs, "--json").stdout
    )
    assert "lr 0.05 and 0.1" in unlike["first"][0]
    assert unlike["baselines"] == []
    assert unlike["findings"][0]["verdict"] == "acts"
    # cut short, and diverged
    short = tmp_path / "runs"
    shutil.copytree(runs, short)
    for status, said in (("interrupted", "not finished"), ("diverged", "diverged (too fast)")):
        path = short / of["l2", 0.1] / "manifest.json"
        manifest = json.loads(path.read_text()) | {"status": status, "message": "too fast"}
        path.write_text(json.dumps(manifest))
        entry = json.loads(run("diagnose", of["l2", 0.1], "--runs", short, "--json").stdout)
        assert said in entry["first"][0]
        words = ["advise", "schedule", of["l2", 0.1], "--runs", short, "--out", tmp_path / "s.csv"]
        assert said in run(*words).stderr
        advice = run("advise", "suggest", of["l2", 0.1], "--runs", short).stdout
        assert said in advice.splitlines()[0]
    error = refused("probe", of["l2", 0.1], "--runs", short, "--device", "cpu", "--record")
    assert isinstance(error, NotFinished)


@pytest.mark.parametrize(
    ("line", "kind", "fields"),
    [
        ("diagnose nothing", UnknownName, {"kind": "run", "name": "nothing"}),
        ("diagnose .", Lacks, {"owner": Path("."), "what": "records"}),
        ("advise suggest nothing", UnknownName, {"kind": "run", "name": "nothing"}),
        ("advise schedule PLAIN --out schedule.csv", Lacks, {"owner": "PLAIN"}),
        ("advise schedule DECAYED --out schedule.txt", BadValue, {"value": "schedule.txt"}),
        ("advise suggest DECAYED --rotation 3", OutOfRange, {"name": "rotation", "value": 3}),
        ("advise suggest DECAYED --norm-at -1", OutOfRange, {"name": "norm_at", "value": -1}),
        ("advise convert 0.1 --from lio", UnknownName, {"kind": "optimizer", "name": "lio"}),
        ("advise convert 1e3 --from sgd", OutOfRange, {"wanted": PART}),
        ("advise convert 1e3 --from adam", OutOfRange, {"wanted": PART}),
        ("advise convert 0.1 --from adam --from-decay l2", Lacks, {}),
    ],
)
def test_bad_input_is_one_sentence(runs, tmp_path, monkeypatch, line, kind, fields):
    monkeypatch.chdir(tmp_path)
    of = names(runs)
    known = {"PLAIN": of["none", 0.1], "DECAYED": of["l2", 0.1]}
    words = [known.get(word, word) for word in line.split()]
    error = refused(*words, *(LEARNING_RATES if words[1] == "convert" else ["--runs", runs]))
    assert isinstance(error, kind)
    expected = {name: known.get(value, value) for name, value in fields.items()}
    assert expected.items() <= vars(error).items()


@pytest.mark.usefixtures("without_theory")
def test_folders_of_watch_where_a_run_is_needed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").touch()
    for words in (["probe"], ["runs", "show"]):
        assert "mine holds records of `watch`" in str(refused(*words, tmp_path / "mine"))
        assert "mine holds records of `watch`" in str(refused(*words, "mine", "--runs", tmp_path))
    assert isinstance(refused("diagnose", tmp_path / "mine", "--all-seeds"), Misplaced)
    page = run("report", "--runs", tmp_path)
    assert "decaylab diagnose FOLDER --report" in page.stderr
    assert "decaylab diagnose FOLDER" in run("runs", "list", "--runs", tmp_path).stdout
    (tmp_path / "mine" / "spec.toml").write_text("damaged")  # a run, though it cannot be read
    page = run("report", "--runs", tmp_path)
    assert "mine/spec.toml" in page.stderr
    assert "records of `watch`" not in page.stderr


def test_folders_of_watch_are_named_within_the_folder_of_runs(tmp_path):
    rows = records({"a": ScriptedLayer(weight_decay=0.03, growth=0.004)}).rows
    lines = [json.dumps({"step": r.step, "values": {r.name: r.value}}) for r in rows]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").write_text("\n".join(lines))
    for words in (["diagnose", "mine"], ["advise", "suggest", "mine"]):
        done = run(*words, "--runs", tmp_path)
        assert done.exit_code == 0, done.output


def test_advice(runs, tmp_path):
    of = names(runs)
    out = tmp_path / "schedule.csv"
    done = run("advise", "schedule", of["l2", 0.1], "--runs", runs, "--out", out, "--json")
    facts = json.loads(done.stdout)
    assert facts["layers"] == ["features.0", "features.3"]
    assert len(out.read_text().splitlines()) == facts["steps"] + 2
    assert facts["last_lr"] > 2 * facts["last_lr_with_decay"]
    suggested = run("advise", "suggest", of["none", 0.1], "--runs", runs)
    assert suggested.exit_code == 0
    assert "suggested for features.0, features.3: SGD: l2 weight decay of" in suggested.stdout
    assert "over layers) at lr 0.1, to act within 264 steps" in suggested.stdout
    # a layer's line and the sentence below count the same steps
    short = run("advise", "suggest", of["none", 0.1], "--runs", runs, "--steps", "10").stdout
    table = [line.split() for line in short.splitlines() if line.startswith("features.")][:2]
    assert {line[7] for line in table} == {"10"}
    assert "to act within 10 steps" in " ".join(short.split())
    plain = json.loads(run("advise", "suggest", of["l2", 0.1], "--runs", runs, "--json").stdout)
    assert plain["decay"] == "l2"
    assert [row["layer"] for row in plain["layers"]] == ["features.0", "features.3", "head"]
    words = ["--from", "sgd", "--from-lr", "0.1", "--to", "adam", "--to-lr", "0.001"]
    converted = run("advise", "convert", "5e-4", *words)
    assert "= decoupled weight decay 0.5 of adam" in converted.stdout


def test_a_conversion_says_what_it_takes_for_granted():
    words = ["--from", "sgd", "--from-lr", "0.1", "--to", "kfac-g", "--to-lr", "0.01"]
    said = run("advise", "convert", "1e-3", *words, "--from-momentum", "0").stdout
    assert "l2 weight decay 0.001 of sgd (lr 0.1, momentum 0) =" in said
    assert "decoupled weight decay 0.01 of kfac-g (lr 0.01, momentum 0.9)" in said
    assert "K-FAC has this equilibrium through its damping" in said
    nothing = run("advise", "convert", "0", *words[:4], "--to", "adam", "--to-lr", "0.001")
    assert nothing.exit_code == 0
    assert "inf" not in nothing.stdout
    assert "K-FAC" not in nothing.stdout


def test_a_schedule_in_place_of_kfac_f_is_said_to_be_rough(tmp_path):
    for kind, rough in (("kfac-f", True), ("kfac-g", False)):
        words = [
            "--optimizer",
            kind,
            "--decay",
            "decoupled",
            "--weight-decay",
            "0.1",
            "--epochs",
            "2",
        ]
        place = ["--device", "cpu", "--runs", tmp_path / kind, "--batch-norm", "--hidden", "8"]
        trained = json.loads(run("train", *words, *place, "--json").stdout)
        out = ["--runs", tmp_path / kind, "--out", tmp_path / "schedule.csv"]
        done = run("advise", "schedule", trained["id"], *out)
        assert done.exit_code == 0, done.output
        assert ("not reliable for K-FAC-F" in done.stderr) == rough
