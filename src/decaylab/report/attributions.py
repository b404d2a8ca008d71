"""An attribution as a page of its own: shares, arms, and the paths that the arms followed."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

import decaylab
from decaylab.attribution import Attribution, Shares, words
from decaylab.document import Grid, Image, Report, Section, Subsection, cells
from decaylab.errors import Lacks
from decaylab.report.drawing import Bars, Line, Panel, draw, figure_of
from decaylab.report.page import check_page, write_html
from decaylab.training.paths import LayerPaths

POINTS = 200  # of a drawn path


def write_attribution(path: Path, result: Attribution, title: str = "") -> None:
    """Write an attribution with its figures as one offline HTML file."""
    check_page(path)
    write_html(path, attribution_report(result, title))


def attribution_figure(result: Attribution) -> Any:
    """The effects on every metric, beside each other."""
    panels = [effects_panel(result.shares_of(metric)) for metric in result.metrics]
    if shown := [panel for panel in panels if not panel.empty]:
        return figure_of(shown)
    raise Lacks("this attribution", "effects to draw", "give seeds whose arms do not diverge")


def attribution_report(result: Attribution, title: str = "") -> Report:
    """The sections of the page."""
    answers = [words.sentence(result.shares_of(metric)) for metric in result.metrics]
    shares = [_shares_block(result.shares_of(metric)) for metric in result.metrics]
    rows = words.arm_rows(result.results, result.shares_of(result.metric))
    arms = Grid(cells(words.ARM_HEADER), [*map(cells, rows)])
    return Report(
        title or "What carries the effect of weight decay",
        f"{words.counted(len(result.seeds), 'seed')}, {result.steps} steps,"
        f" {words.counted(len(result.layers), 'held layer')}; {datetime.now(UTC):%Y-%m-%d %H:%M}"
        f" UTC, decaylab {decaylab.__version__}",
        [
            Section("answer", "Answer", answers, shares),
            Section("arms", "Arms", blocks=[Subsection("arms", result.metric, grids=[arms])]),
            Section("paths", "Paths", [words.PATHS_TEXT], [_paths_block(result)]),
        ],
        result.sentences(),
        words.METHOD,
        notices_title="Know this first",
    )


def _shares_block(shares: Shares) -> Subsection:
    rows = [*map(cells, words.share_rows(shares))]
    panel = effects_panel(shares)
    return Subsection(
        f"shares-{shares.metric.replace('/', '-')}",
        shares.metric,
        images=[] if panel.empty else [Image(draw(panel), words.sentence(shares))],
        grids=[Grid(cells(words.share_header(shares)), rows)],
    )


def effects_panel(shares: Shares) -> Panel:
    """The total and its parts as bars, with intervals as whiskers."""
    factor = 100 if shares.in_points else 1
    bars = {"total": shares.total, **shares.effects} if shares.effects else {}
    values = [effect.value * factor for effect in bars.values()]
    halves = [(effect.high - effect.low) / 2 * factor for effect in bars.values()]
    marks = [Bars("", values, [None if math.isnan(half) else half for half in halves])]
    y_label = "effect, points" if shares.in_points else "effect"
    names = [words.SHORT_NAMES.get(name, name) for name in bars]
    return Panel(shares.metric, "", y_label, marks, names)


def _paths_block(result: Attribution) -> Subsection:
    seed = result.seeds[0]
    by_arm = result.paths[seed]
    images = [
        Image(draw(panel), f"{panel.title} of {layer}, seed {seed}, in every arm")
        for layer in _shown(result.layers)
        for panel in path_panels(by_arm, layer)
        if not panel.empty
    ]
    return Subsection("paths", f"Seed {seed}", images=images)


def path_panels(by_arm: Mapping[str, LayerPaths], layer: str) -> list[Panel]:
    """Size and angle of one layer in every arm, and its damping under K-FAC."""
    tables = {
        "size": {arm: paths.sizes for arm, paths in by_arm.items()},
        "radians per step": {arm: paths.angles for arm, paths in by_arm.items()},
        "λ|W|²": {arm: p.dampings for arm, p in by_arm.items() if p.dampings is not None},
    }
    column = {arm: paths.layers.index(layer) for arm, paths in by_arm.items()}
    panels = []
    for quantity, by_quantity in tables.items():
        lines = [_line(arm, table[:, column[arm]]) for arm, table in by_quantity.items()]
        log = quantity != "size"
        panels.append(Panel(f"{quantity}, {layer}", "step", quantity, lines, log_y=log))
    return [panel for panel in panels if panel.marks]


def _line(arm: str, values: Tensor) -> Line:
    every = max(1, len(values) // POINTS)
    shown = values[::every].tolist()
    return Line(arm, [every * i for i in range(len(shown))], shown)


def _shown(layers: Sequence[str]) -> list[str]:
    """The first, the middle and the last layer."""
    places = dict.fromkeys([0, len(layers) // 2, len(layers) - 1])
    return [layers[place] for place in places]
