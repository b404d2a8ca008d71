import csv
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from refusals import refused
from report.synthetic import everything, fill_artefacts, write_run
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import NoFolder
from decaylab.paper import cells, settings
from decaylab.records import RunStore
from decaylab.report import write
from decaylab.theory import Check

runner = CliRunner()
CHECK = Check("T1", "Lemma 1", "ReLU & <no> bias", 1.0, 1.0, 1e-16, 1e-10, True, "statement")
BROKEN = Check("T2", "Lemma 2", "biases added", 1.0, 2.0, 0.5, 1e-8, False, "broken")


@pytest.fixture(autouse=True)
def theory(monkeypatch):
    """The theory has tests of its own; here it must only be shown."""
    monkeypatch.setattr(write, "beside", lambda work: nullcontext(lambda: [CHECK, BROKEN]))


class Page(HTMLParser):
    """What a browser would have to fetch, and the rows of each table."""

    def __init__(self, text):
        super().__init__()
        self.images, self.addresses, self.tables, self.ids, self.tags = [], [], [], [], []
        self.links, self.words = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        if tag == "img":
            self.images.append(given)
        if tag == "a":
            self.links.append(given["href"])
        elif tag != "img":
            self.addresses += [given[name] for name in ("src", "href", "srcset") if name in given]
        if tag == "table":
            self.tables.append(0)
        if tag == "td":
            self.tables[-1] += 1

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


UPLOT = "https://github.com/leeoniya/uPlot"  # in its first line, which names its authors


def report(folder, *arguments):
    result = runner.invoke(app, ["report", "--runs", str(folder), *arguments])
    assert result.exit_code == 0, result.stderr
    out = folder / "report"
    return result, out, Page((out / "index.html").read_text(encoding="utf-8"))


def table_of(out, name):
    text = (out / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    root = tmp_path_factory.mktemp("filled")
    fill_artefacts(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "beside", lambda work: nullcontext(lambda: [CHECK, BROKEN]))
        return root, *report(root)


def test_the_page_needs_nothing_but_itself(filled):
    page = filled[3]
    assert len(page.images) >= 12  # bars and points
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    assert all(len(image["alt"]) > 10 for image in page.images)
    assert all(address.startswith("data:") for address in page.addresses)
    text = (filled[2] / "index.html").read_text(encoding="utf-8")
    assert len(re.findall('<script type="application/json">', text)) > 20  # curves
    assert not re.search(r"https?://|@import|url\(|src=.http", text.replace(UPLOT, ""))
    assert text.count(UPLOT) == 1
    assert len(text) < 5_000_000
    assert "Content-Security-Policy" in text


def test_every_table_has_fields_and_every_link_a_target(filled):
    page = filled[3]
    assert len(page.tables) >= 7
    assert all(page.tables)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    for name in [f"table{n}" for n in (1, 2, 3)] + [f"fig{n}" for n in range(1, 10)]:
        assert f"{name}-smoke" in page.ids
    assert {"theory", "runs", "overview", "claims-smoke"} <= set(page.ids)


def test_numbers_say_where_they_come_from(filled):
    text = filled[3].text
    assert "64 of 64 cells, tier smoke, on cpu" in text
    stand_ins = "MLP 256x256x256x256 for VGG16, ResNet20 for ResNet32, at width 0.125"
    assert f"but the numbers are from stand-ins on digits: {stand_ins}" in text
    assert "one seed" in text
    assert "0.1.0 (012345678+)" in text
    assert "1 of 1 checks of the statements hold" in text
    assert "ReLU & <no> bias" in text  # escaped, not swallowed


def test_only_what_has_runs_is_shown_and_the_rest_is_counted(tmp_path):
    store, found = RunStore(tmp_path), cells("table1", "quick")
    for number, cell in enumerate(found[:2]):
        write_run(store, cell.runs[0], everything(number), tier="quick")
    full = cells("fig9", "full")[0].runs[0]  # over epochs alone: it had not the device to itself
    folder = write_run(store, full, everything(5), tier="full")
    folder.write_manifest(replace(folder.manifest(), at_once=4))
    _, out, page = report(tmp_path)
    blocks = {name for name in page.ids if re.match("(table|fig)[0-9]", name)}
    assert {"table1-quick", "fig9-full"} <= blocks
    assert "table3-quick" not in blocks
    assert "31 of 32 rows have no run yet: decaylab reproduce table1 --tier quick" in page.text
    assert "No runs yet: Table 3 (" in page.text
    assert "<code>decaylab reproduce NAME --tier quick</code>" in (out / "index.html").read_text()
    assert "Nothing recorded yet for VGG16 over seconds of training; ResNet32." in page.text
    overview = page.text.split("How much there is")[1].split("Claims, tier")[0]
    assert overview.count("Table 1: ") == 1
    assert "2 of 64 cells" in overview
    assert "0 of 64 cells" in overview
    assert "14 not run" in page.text
    assert len(table_of(out, "table1")) == 2 * 64  # the file has every cell


def test_what_needs_a_search_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_all_searched", lambda folder: [])
    fill_artefacts(tmp_path, ["fig1"])
    assert (
        "cells have no setting yet and need a search: decaylab search " in report(tmp_path)[2].text
    )


def test_files(filled):
    _, result, out, _ = filled
    assert f"report: {out / 'index.html'}" in result.stdout
    names = {path.relative_to(out).as_posix() for path in out.rglob("*.*")}
    assert {"index.html", "report.md", "table1.csv", "fig2.csv", "figures/fig9-smoke.png"} <= names
    rows = table_of(out, "table1")
    assert len(rows) == 64
    assert list(rows[0]) == [
        *("dataset", "network", "batch_norm", "augment", "optimizer", "weight_decay"),
        *("paper", "ours", "spread", "n", "tier"),
        *("own", "own_spread", "own_n", "own_setting"),
    ]
    assert rows[0]["paper"] == "83.2"
    assert (rows[0]["n"], rows[0]["tier"], rows[0]["spread"]) == ("1", "smoke", "")
    markdown = (out / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((figures/[^)]+)\)", markdown)
    assert len(linked) == 14
    assert all((out / path).exists() for path in linked)


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    error = refused("report", "--runs", tmp_path / "rusn")
    assert isinstance(error, NoFolder)
    assert error.path == tmp_path / "rusn"
    assert not (tmp_path / "rusn").exists()


def test_no_runs_at_all(tmp_path):
    (tmp_path / "none").mkdir()
    result = runner.invoke(app, ["report", "--runs", str(tmp_path / "none")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert str(tmp_path / "none") in result.stderr
    assert not (tmp_path / "none" / "report").exists()


def test_some_cells_damage_and_runs_that_did_not_finish(tmp_path):
    store = RunStore(tmp_path)
    chosen = cells("table1", "quick", 2)[:3]
    folders = [
        write_run(store, c.runs[0], everything(n), tier="quick") for n, c in enumerate(chosen)
    ]
    write_run(store, chosen[0].runs[1], everything(9), tier="quick")
    write_run(
        store, cells("table1", "quick")[4].runs[0], {"lr": 1.0}, tier="quick", status="diverged"
    )
    with (folders[0].path / "rows.jsonl").open("a") as file:
        file.write('{"step": 1, "ep\n')
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "spec.toml").write_text("data = [")
    (tmp_path / "unreadable" / "manifest.json").write_text("{")
    result, _, page = report(tmp_path)
    assert "3 of 64 cells" in page.text
    assert "table1 3/64" in result.stdout
    assert "is damaged" in result.stderr
    # among what is left out, and first in the diagnosis that it is the baseline of
    assert page.text.count("rows.jsonl is damaged") == 2
    assert "Left out" in page.text
    assert "unreadable" in page.text
    assert "diverged" in page.text
    assert "± 0" in page.text  # two seeds of one cell have a spread
    assert "one seed" in page.text


def test_tiers_stand_beside_each_other(tmp_path):
    fill_artefacts(tmp_path, ["table2"], tier="smoke")
    fill_artefacts(tmp_path, ["table2"], tier="quick")
    _, out, page = report(tmp_path)
    assert {"table2-smoke", "table2-quick"} <= set(page.ids)
    rows = table_of(out, "table2")
    assert [row["tier"] for row in rows] == ["quick"] * 8 + ["smoke"] * 8


def test_json_and_out(tmp_path):
    spec = cells("table1", "full")[0].runs[0]
    write_run(RunStore(tmp_path / "runs"), spec, everything(0), tier="full")
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--json"]
    result = runner.invoke(app, ["report", *arguments])
    found = json.loads(result.stdout)
    assert found["page"] == str(tmp_path / "out" / "index.html")
    assert found["coverage"]["full"]["table1"] == [1, 64]
    assert {path.name for path in (tmp_path / "runs").iterdir()} <= {spec.id, ".index.json"}


def test_a_file_for_a_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    result = runner.invoke(app, ["report", "--runs", str(tmp_path / "runs")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
