"""Diagnoses in the report, and as a page of their own."""

import json
import re
from dataclasses import replace

import pytest
import torch
from report.synthetic import CLOCK
from report.synthetic import write_run as write_paper_run
from torch import nn
from typer.testing import CliRunner

from decaylab import diagnose, watch
from decaylab.cli import app
from decaylab.diagnosis import Reason
from decaylab.diagnosis.words.findings import finding_text, layer_heading, verdict_title
from decaylab.diagnosis.words.headline import headline
from decaylab.document import Subsection
from decaylab.paper import cells
from decaylab.records import Manifest, Row, RunStore
from decaylab.report import diagnoses, write
from decaylab.report.diagnoses import diagnosed, diagnoses_section
from decaylab.sweeps.run_index import indexed_runs
from decaylab.training import RunSpec

runner = CliRunner()
BASE = RunSpec(hidden=(8, 8), batch_norm=True, lr=0.1, epochs=10)
DECAYED = replace(BASE, decay="l2", weight_decay=0.01)  # takes 10 % an epoch


def write_run(store, spec, *, decayed, seed=0, status="finished", jacobian=None):
    """Norms that shrink by 10 % an epoch under decay and stay as they are without; 10 epochs."""
    spec = replace(spec, seed=seed).resolved()
    with store.folder(spec.id).writing(spec.to_toml()) as folder:
        for epoch in range(11):
            norm = 0.9**epoch if decayed else 1.0
            values = {"norm/features.0": norm, "norm/features.3": 2 * norm, "norm/head": norm}
            values |= {"jacobian_norm": jacobian} if jacobian else {}
            folder.rows_writer.append(
                Row(11 * epoch, epoch, 1.0, name, value) for name, value in values.items()
            )
        folder.write_manifest(
            Manifest(
                *(spec.id, status, "0.1.0", None, "2.13.0", "cpu"),
                seed=seed,
                tier="",
                started=CLOCK,
                updated=CLOCK,
            )
        )
    return folder


def cases_of(store):
    return diagnosed(indexed_runs(store)[0])[0]


def test_runs_are_paired_with_the_same_run_without_decay(tmp_path):
    store = RunStore(tmp_path)
    for seed in (0, 1):
        write_run(store, DECAYED, decayed=True, seed=seed, jacobian=1.0)
        write_run(store, BASE, decayed=False, seed=seed, jacobian=4.0)
    write_run(store, replace(BASE, lr=0.05), decayed=False)  # another learning rate: no baseline
    write_run(store, replace(DECAYED, lr=0.03), decayed=True)
    first, alone = sorted(cases_of(store), key=lambda case: -len(case.seeds))
    assert first.seeds == (0, 1)
    assert [result.baselines for result in first.diagnoses] == [
        (replace(BASE, seed=seed).resolved().id,) for seed in (0, 1)
    ]
    assert [result.first for result in first.diagnoses] == [(), ()]
    assert not alone.diagnoses[0].baselines
    section = diagnoses_section([first, alone])
    rows = section.blocks[0].grids[0].rows
    # geometric mean of 0.9^(-2 epoch) over epochs 5 to 10
    factor = f"{0.9 ** (-2 * 7.5):.3g}"
    assert [cell.text for cell in rows[0][1:]] == [
        *(f"acts ({factor}x)", "acts (4x)", "does not act"),
        "no decay, 2 seeds",
    ]
    assert [cell.tone for cell in rows[0][1:4]] == ["good", "good", "plain"]
    assert rows[1][4].text == "judged alone, one seed"
    by_layer = f"By layer: {layer_heading(first.diagnoses[0].findings[0])}"
    (layers,) = [grid for grid in section.blocks[1].grids if grid.caption == by_layer]
    assert [row[0].text for row in layers.rows] == ["features.0", "features.3", "head"]
    assert len(layers.rows[0]) == 3  # a column per seed
    assert layers.rows[2][1].text == layers.rows[2][2].text  # the head, for one reason


def test_looking_for_baselines_takes_time_in_proportion_to_the_runs(tmp_path, monkeypatch):
    """Compared pair by pair, ten thousand runs took a quarter of an hour."""
    store, looks = RunStore(tmp_path), []
    for seed in range(12):
        write_run(store, DECAYED, decayed=True, seed=seed)
        write_run(store, BASE, decayed=False, seed=seed)
    setting = diagnoses._setting

    def counted(spec, without):
        looks.append(spec)
        return setting(spec, without)

    monkeypatch.setattr(diagnoses, "_setting", counted)
    (case,) = cases_of(store)
    assert case.seeds == tuple(range(12))
    assert len(looks) <= 2 * 24


def test_settings_that_read_alike_are_told_apart(tmp_path):
    store, kfac = RunStore(tmp_path), replace(DECAYED, optimizer="kfac-f", lr=0.01)
    for spec in (DECAYED, kfac, replace(kfac, precision="tf32")):
        write_run(store, spec, decayed=True)
    overview, *details = diagnoses_section(cases_of(store)).blocks
    titles = [row[0].text for row in overview.grids[0].rows]
    assert [block.title for block in details] == titles
    told = {title for title in titles if title.startswith("K-FAC-F")}
    ends = {
        f", precision {spec.resolved().precision}"
        for spec in (kfac, replace(kfac, precision="tf32"))
    }
    assert {title[title.index(", precision") :] for title in told} == ends
    assert "precision" not in next(title for title in titles if title.startswith("SGD"))


def test_seeds_that_disagree_are_counted(tmp_path):
    store = RunStore(tmp_path)
    for seed, jacobian in ((0, 1.0), (1, 4.0)):
        write_run(store, DECAYED, decayed=True, seed=seed, jacobian=jacobian)
        write_run(store, BASE, decayed=False, seed=seed, jacobian=4.0)
    verdicts, details = diagnoses_section(cases_of(store)).blocks
    cell = verdicts.grids[0].rows[0][2]
    assert cell.text == "acts 1 of 2; does not act 1 of 2 (1x to 4x)"
    assert cell.tone == "near"
    head = "Decay of the layers whose size counts (head)"
    apart = [text for text in details.text if head in text]
    assert [text[:8] for text in apart] == ["Seed 0: ", "Seed 1: "]
    shared = [text for text in details.text if text.startswith("Decay of the scale-inv")]
    assert len(shared) == 1


def test_another_seed_serves_and_is_named(tmp_path):
    store = RunStore(tmp_path)
    write_run(store, DECAYED, decayed=True, seed=3)
    write_run(store, BASE, decayed=False, seed=0)
    write_run(store, BASE, decayed=False, seed=5, status="interrupted")
    (case,) = cases_of(store)
    assert [item.reason for item in case.diagnoses[0].troubles] == [Reason.DIFFERS]
    block = diagnoses_section([case]).blocks[1]
    assert "seed differs: 3 and 0" in block.text


@pytest.mark.usefixtures("without_theory")
def test_the_report_has_it(tmp_path):
    store = RunStore(tmp_path / "runs")
    write_run(store, DECAYED, decayed=True)
    write_run(store, BASE, decayed=False)
    page = write.write_report(tmp_path / "runs", tmp_path / "out").page
    text = page.read_text(encoding="utf-8")
    assert '<a href="#diagnosis">' in text
    assert 'id="diagnosis-1"' in text
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "## Diagnosis" in markdown
    assert "SGD, lr 0.1, L2 0.01; digits, MLP 8x8, BN" in markdown


@pytest.mark.usefixtures("without_theory")
def test_it_comes_first_unless_there_are_runs_of_the_paper(tmp_path):
    store = RunStore(tmp_path / "runs")
    write_run(store, DECAYED, decayed=True)

    def begins_with():
        write.write_report(tmp_path / "runs", tmp_path / "out")
        markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
        return re.findall(r"^## (.*)$", markdown, re.MULTILINE)[:2]

    assert begins_with() == ["Findings", "Diagnosis"]
    cell = cells("table1", "smoke")[0]
    write_paper_run(store, cell.runs[0], {"test/accuracy": 0.9}, tier="smoke")
    assert begins_with() == ["Findings", "Claims, tier smoke"]


@pytest.mark.usefixtures("without_theory")
def test_a_report_without_decay_has_none(tmp_path):
    write_run(RunStore(tmp_path / "runs"), BASE, decayed=False)
    page = write.write_report(tmp_path / "runs", tmp_path / "out").page
    assert "#diagnosis" not in page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Two runs of somebody's own loop, with a frozen layer."""
    folder = tmp_path_factory.mktemp("watched")
    inputs, labels = torch.randn(64, 6), torch.randint(3, (64,))
    for name, weight_decay in (("decayed", 0.05), ("plain", 0.0)):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)),
            *(nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        )
        model[3].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
        with watch(model, optimizer, every=10, folder=folder / name):
            for _ in range(200):
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    return folder


def test_a_page_of_its_own(watched, tmp_path):
    pair = [str(watched / name) for name in ("decayed", "plain")]
    out = tmp_path / "new" / "page.html"
    done = runner.invoke(app, ["diagnose", *pair, "--report", str(out)])
    assert done.exit_code == 0, done.output
    assert f"report: {out}" in done.stdout
    text = out.read_text(encoding="utf-8")
    result = diagnose(*pair)
    assert result["effective l"].verdict == "acts"
    for finding in result.findings:
        assert f"{verdict_title(finding)[1:]}</h3>" in text
        assert finding_text(finding).replace("'", "&#39;") in text
    assert headline(result).split(":")[0] in text
    assert "frozen: not trained" in text
    assert text.count('<script type="application/json">') >= 2
    assert not re.search(r"https?://(?!github.com/leeoniya/uPlot)|@import|url\(|<script src", text)
    printed = runner.invoke(app, ["diagnose", *pair, "--report", str(out), "--json"]).stdout
    assert json.loads(printed)["runs"] == [pair[0]]


def test_what_is_wrong_stands_first_on_the_page(watched, tmp_path):
    out = tmp_path / "page.html"
    plain, decayed = (str(watched / name) for name in ("plain", "decayed"))
    typed = ["diagnose", plain, "--against", decayed, "--report", str(out)]
    assert runner.invoke(app, typed).exit_code == 0
    text = out.read_text(encoding="utf-8")
    assert text.index("Know this first") < text.index("did you swap the two?")
    assert text.index("did you swap the two?") < text.index("Verdicts")


def test_a_page_is_html(watched, tmp_path):
    words = ["diagnose", str(watched / "plain"), "--report", str(tmp_path / "page.pdf")]
    done = runner.invoke(app, words)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "page.html" in done.stderr


def test_blocks_have_names_of_their_own(tmp_path):
    store = RunStore(tmp_path)
    for strength in (0.001, 0.002):
        write_run(store, replace(DECAYED, weight_decay=strength), decayed=True)
    blocks = diagnoses_section(cases_of(store)).blocks
    assert all(isinstance(block, Subsection) for block in blocks)
    assert len({block.anchor for block in blocks}) == len(blocks) == 3
