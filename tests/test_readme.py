"""What pages say of results is what the records say; `make results-pages` writes it anew."""

import re
from pathlib import Path

import pytest
from results_pages.blocks import BLOCK, BLOCKS, refreshed
from results_pages.results import Results

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")]
ASKING = [path for path in PAGES if BLOCK.search(path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def results():
    return Results(ROOT / "results")


@pytest.mark.parametrize("page", ASKING, ids=lambda path: path.name)
def test_a_page_has_the_numbers_of_the_records(page, results):
    text = page.read_text(encoding="utf-8")
    assert text == refreshed(text, results), f"{page} is out of date: run `make results-pages`"


def test_the_pages_with_results_are_those_that_make_refreshes():
    (line,) = re.findall("-m results_pages (.*)", (ROOT / "Makefile").read_text())
    assert {ROOT / name for name in line.split()} == set(ASKING)
    assert len(ASKING) >= 3


def test_every_block_is_shown_somewhere():
    texts = [path.read_text(encoding="utf-8") for path in ASKING]
    assert {found[2] for text in texts for found in BLOCK.finditer(text)} == set(BLOCKS)
