"""README's printed verdict is what its code prints on digits."""

import importlib.util
import re

import pytest
from documented import ROOT
from PIL import Image

from decaylab.diagnosis import Verdict

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def loaded():
    path = ROOT / "docs" / "first_verdict.py"
    spec = importlib.util.spec_from_file_location("first_verdict", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


first_verdict = loaded()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """README's blocks "adamw" and "verdict", run."""
    return first_verdict.ran(tmp_path_factory.mktemp("readme"))


def without_numbers(text):
    """Rounding differs between machines, and with it numbers and where lines break."""
    return " ".join(NUMBER.sub("N", text).split())


def test_readme_prints_what_it_shows(ran):
    _, text, _ = ran
    shown = first_verdict.printed()
    assert without_numbers(text) == without_numbers(shown), "run `make results-pages`"
    for new, old in zip(NUMBER.findall(text), NUMBER.findall(shown), strict=True):
        assert float(new) == pytest.approx(float(old), rel=0.5, abs=0.01)


def test_the_verdict_is_worth_reading(ran):
    alone, _, diagnosis = ran
    verdicts = [finding.verdict for finding in diagnosis.findings]
    assert verdicts == [Verdict.ACTS, Verdict.ACTS, Verdict.DOES_NOT_ACT]
    assert alone.count("cannot tell") == 1  # of the Jacobian, which needs a baseline


def test_the_lines_fit_a_terminal():
    assert max(map(len, first_verdict.printed().splitlines())) <= 80


def test_the_figure_is_there():
    assert f"(docs/images/{first_verdict.PICTURE.name})" in first_verdict.README.read_text()
    with Image.open(first_verdict.PICTURE) as image:
        assert image.width > 600
