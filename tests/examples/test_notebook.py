"""The notebook runs from top to bottom, and every cell that shows something shows it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PATH = Path(__file__).parents[2] / "examples" / "watch_to_verdict.ipynb"


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(PATH, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": PATH.parent}}).execute()
    return notebook


def outputs(executed, start):
    """What the cell that begins so put out, by MIME type."""
    (cell,) = [cell for cell in executed.cells if cell.source.startswith(start)]
    return {kind: data for output in cell.outputs for kind, data in output.get("data", {}).items()}


def test_it_comes_to_a_verdict(executed):
    html = outputs(executed, "diagnosis = diagnose")["text/html"]
    assert "effective learning rate" in html
    assert html.count(">acts</span>") >= 1


def test_tables_and_figures_are_shown(executed):
    assert "<table>" in outputs(executed, "model = build()")["text/html"]
    assert "image/png" in outputs(executed, "diagnosis.plot()")
    assert "<table" in outputs(executed, "frame = ")["text/html"]


def test_no_cell_warns(executed):
    for cell in executed.cells:
        assert [o.text for o in cell.get("outputs", ()) if o.get("name") == "stderr"] == []


def test_it_is_kept_without_outputs():
    assert all(not cell.get("outputs") for cell in nbformat.read(PATH, as_version=4).cells)
