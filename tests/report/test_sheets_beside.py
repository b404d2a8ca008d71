"""Figures drawn in another process: the same pictures."""

import math

import pytest

from decaylab.report import beside, sheets
from decaylab.report.drawing import NOT_FITTED, Bars, Line, Panel, Points

FIGURES = {
    "lines": [
        Panel("a", "epoch", "y", [Line("L2", [0, 1], [1.5, math.nan], "seed 0")], log_y=True),
        Panel(
            "b",
            "epoch",
            "y",
            [
                Line("L2", [0, 1], [60.0, 90.0], low=[59.0, 89.0], high=[61.0, 91.5]),
                Line("L2 (paper)", [0, 1], [92.0, 92.0], published=True),
            ],
            late=True,
        ),
    ],
    "bars": [
        Panel("c", "", "y", [Bars("L2", [90.0, None], [0.5, None], [91.0, None])], ["a", "b"])
    ],
    "points": [
        Panel(
            "d",
            "x",
            "y",
            [Points("SGD", [1.0, 2.0], [3.0, 4.0]), Points(NOT_FITTED, [9.0], [9.0], framed=False)],
            log_x=True,
        )
    ],
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(sheets, "FEW", 0)


def test_they_are_what_is_drawn_here():
    here = sheets.draw_sheets(FIGURES)
    with sheets.sheets_beside(FIGURES) as drawn:
        assert drawn() == here
    assert [len(sheet.alone) for sheet in here.values()] == [0, 1, 1]


def test_few_are_drawn_without_another_process(monkeypatch):
    monkeypatch.setattr(sheets, "FEW", 4)
    monkeypatch.setattr(sheets, "beside", None)
    with sheets.sheets_beside(FIGURES) as drawn:
        assert drawn() == sheets.draw_sheets(FIGURES)
