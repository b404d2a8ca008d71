"""The report as a browser sees it. Run with `make test-browser`."""

from collections import OrderedDict

import pytest
import torch
from report.synthetic import everything, fill_artefacts, write_run
from torch import nn

from decaylab import diagnose, watch
from decaylab.cli.demo import demo_specs
from decaylab.records import RunStore
from decaylab.report.mechanisms import TIER
from decaylab.report.write import write_report
from decaylab.theory import Check

pytestmark = pytest.mark.browser
CHECK = Check("T1", "Lemma 1", "no bias", 1.0, 1.0, 1e-16, 1e-10, True, "statement")
IMAGES = "[...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.width])"
TABLES = "[...document.querySelectorAll('table')].map(t => t.querySelectorAll('tbody td').length)"
CHARTS = "document.querySelectorAll('.chart').length"
WIDTHS = "[document.documentElement.scrollWidth, window.innerWidth]"
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    fill_artefacts(runs)
    for number, spec in enumerate(demo_specs()):
        shown = {"effective_damping/features.0": 0.1, "second_order_share/features.0": 0.5}
        write_run(RunStore(runs), spec, {**everything(number), **shown}, tier=TIER)
    return write_report(runs, runs / "report", [CHECK]).page


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory):
    """A page of one diagnosis, of two watched runs with a long layer name."""
    folder = tmp_path_factory.mktemp("diagnosis")
    runs = []
    for weight_decay in (0.05, 0.0):
        torch.manual_seed(0)
        parts = {"a_layer_with_a_name_that_is_too_long_for_a_phone": nn.Linear(6, 8)}
        parts |= {"norm": nn.BatchNorm1d(8), "head": nn.Linear(8, 3)}
        model = nn.Sequential(OrderedDict(parts))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
        with watch(model, optimizer, every=20) as watched:
            for _ in range(200):
                model(torch.randn(16, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(watched)
    diagnose(*runs).report(folder / "diagnosis.html")
    return folder / "diagnosis.html"


@pytest.fixture
def opened(shown, page):
    shown[0].open(page)
    return shown


def test_it_loads_whole_and_alone(opened, page):
    tab, _ = opened
    images = tab.value(IMAGES)
    assert len(images) >= 12
    assert all(complete and width == 630 and height == 450 for complete, width, height, _ in images)
    tables = tab.value(TABLES)
    assert len(tables) >= 10
    assert all(tables)
    assert tab.reported("Runtime.exceptionThrown") == []
    assert tab.reported("Runtime.consoleAPICalled") == []
    assert [entry["entry"]["text"] for entry in tab.reported("Log.entryAdded")] == []
    asked = {
        event["request"]["url"].split(",")[0] for event in tab.reported("Network.requestWillBeSent")
    }
    assert asked <= {page.as_uri(), "data:image/png;base64", "data:"}


def test_nothing_runs_over_the_edge(opened):
    tab, kind = opened
    content, window = tab.value(WIDTHS)
    assert content <= window
    widths = [shown for *_, shown in tab.value(IMAGES)]
    assert min(widths) > (300 if kind != "phone" else 280)
    assert max(widths) <= window


def test_no_table_has_to_be_moved_sideways(opened):
    tab, _ = opened
    tab.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    tables = "[...document.querySelectorAll('.scroll')]"
    wide = f"{tables}.filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    assert tab.value(wide) == []


def test_what_is_folded_fits_too(opened):
    """Every diagnosis of the report, opened."""
    tab, _ = opened
    folded = "[...document.querySelectorAll('#diagnosis article > details')]"
    assert tab.value(f"{folded}.map(d => d.open = true).length") > 10
    content, window = tab.value(WIDTHS)
    assert content <= window
    assert all(tab.value(f"{folded}.map(d => d.querySelectorAll('tbody td').length)"))


def test_a_diagnosis_is_whole_and_fits(shown, diagnosis):
    tab, _ = shown
    tab.open(diagnosis)
    images = tab.value(IMAGES)
    assert images == []
    assert tab.value(CHARTS) == 3  # effective learning rate, norm, angle
    content, window = tab.value(WIDTHS)
    assert content <= window
    assert tab.reported("Runtime.exceptionThrown") == []
    assert [entry["entry"]["text"] for entry in tab.reported("Log.entryAdded")] == []
    assert tab.value("logTicks(63, 250)") == [70, 80, 90, 100, 200]
    assert tab.value("logTicks(0.0004, 0.0021)")[-2:] == [0.001, 0.002]
    scrolled = "[...document.querySelectorAll('.scroll:has(.stacked)')]"
    assert tab.value(f"{scrolled}.every(e => e.scrollWidth <= e.clientWidth)")  # nothing is cut
    badges = "[...document.querySelectorAll('#verdicts .badge')].map(b => b.textContent)"
    assert tab.value(badges)[0] == "acts"
    # the verdicts are to be seen without scrolling, sideways too
    edges = "[...document.querySelectorAll('#verdicts .badge')].map(b => b.getBoundingClientRect())"
    for box in tab.value(f"{edges}.map(r => [r.right, r.bottom])"):
        assert box[0] <= window
        assert box[1] <= 844


def test_the_menu_stays_in_view_and_marks_where_one_is(opened):
    tab, _ = opened
    current = "document.querySelector('nav a[aria-current]')?.hash"
    assert tab.value(current) == "#findings"
    for anchor in ("figures-smoke", "diagnosis"):
        tab.value(f"location.hash = '#{anchor}'")
        there = f"document.getElementById('{anchor}').scrollIntoView()"  # charts are drawn late
        tab.until(f"({there}, {current} === '#{anchor}')")
        assert tab.value("document.querySelector('nav').getBoundingClientRect().top") == 0


def test_curves_are_drawn_when_they_come_into_view_and_answer(opened):
    tab, _ = opened
    chart = "document.querySelector('#fig2-smoke .chart')"
    assert tab.value(f"{chart}.querySelector('canvas') === null")
    tab.value("location.hash = '#fig2-smoke'")
    tab.until(f"{chart}.querySelector('canvas') !== null")
    keys = f"[...{chart}.querySelectorAll('.key')].map(k => k.textContent)"
    assert "wd-all" in tab.value(keys)
    assert "test accuracy" in tab.read_off(chart, 0.9)


def test_what_is_printed_has_all_curves(tab, page):
    tab.open(page)
    drawn = "document.querySelectorAll('.chart canvas').length"
    assert tab.value(drawn) < tab.value(CHARTS)
    tab.call("Page.printToPDF")
    assert tab.value(drawn) == tab.value(CHARTS)


def test_a_verdict_leads_to_its_evidence(opened):
    tab, _ = opened
    link = "document.querySelector('#diagnoses td a')"
    assert tab.value(f"{link}.click(), location.hash") == "#diagnosis-1"
    tab.until("document.querySelector('#diagnosis-1 details').open")


def test_dark_is_dark(opened):
    tab, kind = opened
    first = int(tab.value(GROUND).removeprefix("rgb(").split(",")[0])
    assert (first < 50) == (kind == "dark")


def test_the_check_sees_a_request(tab, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text('<img src="missing.png"><script>console.error("no")</script>')
    tab.open(path)
    asked = {event["request"]["url"] for event in tab.reported("Network.requestWillBeSent")}
    assert (tmp_path / "missing.png").as_uri() in asked
    assert tab.reported("Runtime.consoleAPICalled")
    assert tab.value(IMAGES)[0][1] == 0
