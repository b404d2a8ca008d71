"""Tables and figures of one's own in the report: no cell is lost, each has its name."""

import csv
import io

import pytest
from refusals import refuses
from report.synthetic import everything, write_run

from decaylab.errors import BadValue
from decaylab.paper import FinishedRuns, artefacts, cells, register_artefact
from decaylab.records import RunStore
from decaylab.report.sections import all_artefacts, fill
from decaylab.report.tables import to_csv, to_grid

OWN = """
title = "x"
shows = "y"
kind = "{kind}"
keys = {keys}
metric = "test/accuracy"
percent = true

[[cells]]
dataset = "cifar10"
batch_norm = 0
augment = 0
"""
SCHEMES = """
network = "vgg16"
optimizer = "sgd"
scheme = ["baseline", "wd-conv", "wd-fc", "wd-all"]
"""
OPTIMIZERS = """
network = "vgg16"
optimizer = ["sgd", "adam"]
weight_decay = 1
"""


@pytest.fixture
def filled(tmp_path):
    """An artefact with a run in each cell, of which the n-th has an accuracy of n %."""

    def make(kind, keys, columns):
        path = tmp_path / "of-ones-own.toml"
        path.write_text(OWN.format(kind=kind, keys=keys) + columns)
        artefact, store = register_artefact(path), RunStore(tmp_path / "runs")
        for number, cell in enumerate(cells(artefact.name, "short"), start=1):
            values = {**everything(0), "test/accuracy": number / 100}
            write_run(store, cell.runs[0], values, tier="short")
        return fill(artefact, "short", FinishedRuns(store), 1)

    yield make
    artefacts().pop("of-ones-own", None)


def test_a_table_of_several_schemes_has_a_row_for_each(filled):
    table = filled("table", ["network", "optimizer", "scheme"], SCHEMES).table
    rows = [[cell.text for cell in row] for row in to_grid(table).rows]
    assert [row[:5] for row in rows] == [
        ["VGG16, wd-conv", "SGD", "1.00", "2.00", "+1.00"],
        ["VGG16, wd-fc", "SGD", "1.00", "3.00", "+2.00"],
        ["VGG16, wd-all", "SGD", "1.00", "4.00", "+3.00"],
    ]
    written = list(csv.DictReader(io.StringIO(to_csv([table]))))
    assert [(row["scheme"], row["ours"]) for row in written] == [
        ("baseline", "1"),
        ("wd-conv", "2"),
        ("wd-fc", "3"),
        ("wd-all", "4"),
    ]


def test_so_has_a_table_without_a_baseline(filled):
    both = SCHEMES.replace('"baseline", ', "").replace(', "wd-all"', "")
    table = filled("table", ["network", "optimizer", "scheme"], both).table
    rows = [[cell.text for cell in row] for row in to_grid(table).rows]
    assert [row[:4] for row in rows] == [
        ["VGG16, wd-conv", "SGD", "—", "1.00"],
        ["VGG16, wd-fc", "SGD", "—", "2.00"],
    ]


def test_a_table_compares_decays(filled):
    with refuses(BadValue, name="the last key of a table", value="optimizer"):
        filled("table", ["network", "optimizer"], OPTIMIZERS)


def test_bars_of_one_optimizer_need_no_key_for_it(filled):
    (panel,) = filled("bars", ["network", "scheme"], SCHEMES).panels
    assert [(mark.label, *mark.values) for mark in panel.marks] == [
        ("baseline", 1.0),
        ("wd-conv", 2.0),
        ("wd-fc", 3.0),
        ("wd-all", 4.0),
    ]


@pytest.mark.parametrize(
    "keys", [["network", "optimizer"], ["network", "weight_decay", "optimizer"]]
)
def test_curves_are_labelled_by_what_is_compared(filled, keys):
    (panel,) = filled("curves", keys, OPTIMIZERS).panels
    assert [(mark.label, mark.y[-1]) for mark in panel.marks] == [("SGD", 1.0), ("Adam", 2.0)]


@pytest.mark.parametrize("kind", ["bars", "curves"])
def test_a_metric_that_is_no_share_is_shown_as_it_is(filled, kind, monkeypatch):
    own = OWN.replace("test/accuracy", "jacobian_norm").replace("true", "false")
    monkeypatch.setitem(globals(), "OWN", own)
    (panel,) = filled(kind, ["network", "optimizer", "scheme"], SCHEMES).panels
    first = panel.marks[0]
    assert (first.values if kind == "bars" else first.y)[-1] == everything(0)["jacobian_norm"]
    assert panel.y_label == "jacobian_norm"


OUR_FIGURES = ["adam-precision", "bursts", "fig9-bn", "fig9-pace", "jacobian-lr"]


def test_those_of_the_paper_come_first(filled):
    filled("table", '["network", "optimizer", "weight_decay"]', OPTIMIZERS)
    tables = ["table1", "table2", "table3", "decay-alone", "jacobian-alone", "of-ones-own"]
    figures = [*(f"fig{n}" for n in range(1, 10)), *OUR_FIGURES]
    assert [one.name for one in all_artefacts()] == tables + figures
