"""`decaylab live`: a training run in progress, in the terminal or in a browser."""

import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from decaylab.cli.options import option
from decaylab.cli.terminal import console
from decaylab.diagnosis.card import COLOURS
from decaylab.diagnosis.layout import mechanisms, warnings
from decaylab.errors import NoFolder, Range
from decaylab.report.live import Follower, Server, Standing, mean_curve

BLOCKS = "▁▂▃▄▅▆▇█"
PAUSE = 1.0
"""Seconds between two looks at the folder."""
TREND = 24

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="A folder that `watch` or `decaylab train` writes to, or one that holds several.",
    ),
]
Against = Annotated[
    Path | None, option("--against", "The same run without decay, for the verdict.", metavar="BASE")
]
Web = Annotated[bool, option("--web", "Serve a page on this machine (127.0.0.1).")]
Port = Annotated[
    int,
    option(
        "--port", "Port for --web; 0 picks a free one.", allowed=Range(at_least=0, at_most=65535)
    ),
]
Once = Annotated[bool, option("--once", "Print the current state and exit.")]


def live_command(
    folder: Folder, against: Against = None, web: Web = False, port: Port = 8765, once: Once = False
) -> None:
    """Follow a training run: loss, rotation, effective learning rate, the verdict so far.

    Reads FOLDER while another process writes to it; if it holds several runs, shows the one written
    to last. Ctrl-C ends the display, not the training. With --web, open the printed address in a
    browser on this machine; the page refreshes itself.
    """
    if folder.exists() and not folder.is_dir():
        raise NoFolder(folder, "give the one that holds the records")
    if against is not None and not against.is_dir():
        raise NoFolder(against, "give a run without decay")
    follower = Follower(folder, against)
    if web:
        _serve(follower, port)
    elif once or not sys.stdout.isatty():
        if not folder.exists():
            raise NoFolder(folder, "start the training first")
        console(80).print(view(follower.standing(), folder))
    else:
        _follow(follower)


def _serve(follower: Follower, port: int) -> None:
    with Server(follower, port) as server:
        print(f"{server.url} shows {follower.folder} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _follow(follower: Follower) -> None:
    begun = time.perf_counter()
    standing = follower.standing()
    with Live(
        view(standing, follower.folder), console=console(80), auto_refresh=False, screen=False
    ) as live:
        try:
            while standing is None or not standing.ended:
                spent = time.perf_counter() - begun  # records that take long are read less often
                time.sleep(max(PAUSE, 4 * spent))
                begun = time.perf_counter()
                standing = follower.standing()
                live.update(view(standing, follower.folder), refresh=True)
        except KeyboardInterrupt:
            pass


def view(standing: Standing | None, folder: Path) -> RenderableType:
    """How a run stands, as a few lines for a terminal."""
    if standing is None:
        return Text(f"{folder}: waiting for the first record", "dim")
    table = Table(box=None, pad_edge=False)
    for heading, right in (("", False), ("first", True), ("now", True), ("so far", False)):
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for name, series in standing.outcomes.items():
        table.add_row(escape(name), *_row([value for _, value in series]))
    for quantity, by_layer in standing.layers.items():
        layers = f" ({len(by_layer)} layers)" if len(by_layer) > 1 else f" ({next(iter(by_layer))})"
        curve = [value for _, value in mean_curve(by_layer)]
        table.add_row(escape(quantity + layers), *_row(curve))
    parts: list[RenderableType] = [
        Text.assemble((standing.name, "bold"), f"  {standing.progress}"),
        Text(standing.last_record, "dim"),
        Text(),
        table,
        Text(),
    ]
    judged = standing.diagnosis
    if judged is None:
        return Group(*parts, Text("Too few records for a verdict yet.", "dim"))
    parts += [Text(text, "red") for text in warnings(judged)]
    for section in mechanisms(judged):
        parts.append(Text(section.title, f"bold {COLOURS[section.tone]}"))
        parts.append(Padding(Text(section.text[0]), (0, 0, 0, 2)))
    return Group(*parts)


def _row(values: list[float]) -> tuple[str, str, str]:
    if not values:
        return "-", "-", ""
    return f"{values[0]:.4g}", f"{values[-1]:.4g}", sparkline(values)


def sparkline(values: list[float], width: int = TREND) -> str:
    """A curve in one line of letters; each stands for the mean of some values.

    >>> sparkline([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([3.0]), sparkline([2.0, float("nan"), 2.0])
    ('▁', '▁ ▁')
    """
    parts = min(width, len(values))
    edges = [place * len(values) // parts for place in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0

    def letter(value: float) -> str:
        return BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))]

    return "".join(letter(value) if math.isfinite(value) else " " for value in means)
