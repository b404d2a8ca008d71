"""The report as a browser sees it. Run with `make test-browser`."""

import pytest
from browser import chromium
from report.synthetic import everything, fill_artefacts, write_run

from decaylab.cli.demo import demo_specs
from decaylab.records import RunStore
from decaylab.report.mechanisms import TIER
from decaylab.report.write import write_report
from decaylab.theory import Check

pytestmark = pytest.mark.browser
CHECK = Check("T1", "Lemma 1", "no bias", 1.0, 1.0, 1e-16, 1e-10, True, "statement")
IMAGES = "[...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.width])"
TABLES = "[...document.querySelectorAll('table')].map(t => t.querySelectorAll('tbody td').length)"
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
def tab(tmp_path_factory):
    program = chromium.found()
    if program is None:
        pytest.fail("no Chromium here: apt-get install chromium")
    with chromium.tab(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(params=["phone", "desktop", "dark"])
def opened(request, tab, page):
    width = 390 if request.param == "phone" else 1200
    scheme = "dark" if request.param == "dark" else "light"
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        **{"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    tab.call("Emulation.setEmulatedMedia", features=[feature])
    tab.open(page)
    return tab, request.param


def test_it_loads_whole_and_alone(opened, page):
    tab, _ = opened
    images = tab.value(IMAGES)
    assert len(images) > 60
    assert all(complete and width == 630 and height == 450 for complete, width, height, _ in images)
    tables = tab.value(TABLES)
    assert len(tables) >= 10
    assert all(tables)
    assert tab.said("Runtime.exceptionThrown") == []
    assert tab.said("Runtime.consoleAPICalled") == []
    assert [entry["entry"]["text"] for entry in tab.said("Log.entryAdded")] == []
    asked = {said["request"]["url"].split(",")[0] for said in tab.said("Network.requestWillBeSent")}
    assert asked <= {page.as_uri(), "data:image/png;base64", "data:"}


def test_nothing_runs_over_the_edge(opened):
    tab, kind = opened
    content, window = tab.value(WIDTHS)
    assert content <= window
    widths = [shown for *_, shown in tab.value(IMAGES)]
    assert min(widths) > (300 if kind != "phone" else 280)
    assert max(widths) <= window


def test_dark_is_dark(opened):
    tab, kind = opened
    first = int(tab.value(GROUND).removeprefix("rgb(").split(",")[0])
    assert (first < 50) == (kind == "dark")


def test_the_check_sees_a_request(tab, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text('<img src="missing.png"><script>console.error("no")</script>')
    tab.open(path)
    asked = {said["request"]["url"] for said in tab.said("Network.requestWillBeSent")}
    assert (tmp_path / "missing.png").as_uri() in asked
    assert tab.said("Runtime.consoleAPICalled")
    assert tab.value(IMAGES)[0][1] == 0
