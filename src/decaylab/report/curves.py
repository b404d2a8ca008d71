"""Panels as data for curves that a browser draws (`assets/charts.js`, uPlot)."""

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from decaylab.report.drawing import Line, Panel, cut_below, label_colours


def asset(name: str) -> str:
    """A file of `report/assets`, as text."""
    return (files("decaylab.report") / "assets" / name).read_text(encoding="utf-8")


def script() -> str:
    """All that draws curves, to be embedded once in a page."""
    return asset("uPlot.iife.min.js") + asset("charts.js")


def is_curves(panel: Panel) -> bool:
    """Whether the panel holds lines alone; bars and points stay pictures."""
    return not panel.empty and all(isinstance(mark, Line) for mark in panel.marks)


def curves(panel: Panel) -> dict[str, Any]:
    """A panel of lines as plain values for JSON."""
    ink = label_colours(panel)
    lines = [mark for mark in panel.marks if isinstance(mark, Line) and len(mark.x)]
    return {
        "title": panel.title,
        "x_label": panel.x_label,
        "y_label": panel.y_label,
        "log_x": panel.log_x,
        "log_y": panel.log_y,
        "y_min": cut_below(lines) if panel.late else None,
        "lines": [_line(mark, ink[mark.label]) for mark in lines],
    }


def _line(mark: Line, colour: str) -> dict[str, Any]:
    values: dict[str, Any] = {"label": mark.label, "name": mark.name, "colour": colour}
    values |= {"x": [*mark.x], "y": _numbers(mark.y)}
    if len(mark.low):
        values |= {"low": _numbers(mark.low), "high": _numbers(mark.high)}
    return values | ({"dashed": True} if mark.published else {})


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Seven digits, and None for what is not finite: JSON has no word for it."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]
