"""The documentation as a browser opens it from the disk: no server, no network."""

import subprocess
import sys

import pytest
from documented import ROOT

pytestmark = pytest.mark.browser
QUERY = "document.querySelector('[data-md-component=search-query]')"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True)
    return folder


def test_equations_are_typeset(tab, site):
    tab.open(site / "l2-or-decoupled.html")
    tab.until("document.querySelectorAll('.katex').length >= 2")
    assert tab.value("document.querySelectorAll('.katex-error').length") == 0
    tab.until("document.fonts.check('16px KaTeX_Main')")
    asked = {event["request"]["url"] for event in tab.reported("Network.requestWillBeSent")}
    assert all(url.startswith(("file:", "data:", "about:")) for url in asked)


def test_search_finds_pages(tab, site):
    tab.open(site / "index.html")
    tab.value(f"{QUERY}.focus(), 0")
    tab.call("Input.insertText", text="Muon")
    event = "new KeyboardEvent('keyup', {key: 'n', bubbles: true})"
    links = "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"
    tab.until(f"({QUERY}.dispatchEvent({event}), {links}.length > 0)")
    assert any(link.endswith("muon.html") for link in tab.value(links))


@pytest.mark.parametrize("page", ["index", "muon", "three-mechanisms"])
def test_pages_fit(shown, site, page):
    tab, _ = shown
    tab.open(site / f"{page}.html")
    content, window = tab.value("[document.documentElement.scrollWidth, window.innerWidth]")
    assert content <= window
