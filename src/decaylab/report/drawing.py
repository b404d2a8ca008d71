"""Panels of plain data, drawn by matplotlib. Nothing is computed here: what is drawn was recorded.

A figure is a list of panels, and each panel an image of its own, so that a page can put them side
by side or one below the other. Images have a white ground; the page inverts them in dark mode.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from decaylab import errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

needed = partial(errors.needed, extra="report", what="a report")
NOT_FITTED = "not fitted"
PAPER = " (paper)"
"""What the label of a line ends with that is the paper's number."""
# After Okabe and Ito: told apart without seeing red from green, and of middle lightness, so that
# they stay visible when a page inverts the image. One name, one colour.
COLOURS = {
    "no decay": "#D55E00",
    "L2": "#0072B2",
    "weight decay": "#009E73",
    "baseline": "#D55E00",
    "wd-all": "#0072B2",
    "wd-conv": "#009E73",
    "wd-fc": "#8548B0",
    "wn-conv": "#C0407E",
    "wd-fc+wn-conv": "#8A6D00",
    "SGD": "#0072B2",
    "Adam": "#B87500",
    "K-FAC-F": "#009E73",
    "K-FAC-G": "#C0407E",
    "tr F": "#D55E00",
    "tr G": "#0072B2",
    NOT_FITTED: "#8c8c8c",
}
_OTHERS = ("#0072B2", "#D55E00", "#009E73", "#C0407E", "#B87500", "#8548B0", "#555555")
SIZE = (4.2, 3.0)  # inches
DPI = 150
INKS = 256  # colours of the palette an image is reduced to


@dataclass(frozen=True)
class Line:
    """Numbers over time; lines of one label share its colour and legend entry.

    `name` tells those of one label apart: a layer, a run. `low` and `high` are the ends of a band
    around a mean. A `published` line is the paper's number for what has that label without PAPER.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    published: bool = False


def line(
    label: str, points: Sequence[tuple[float, float]], factor: float = 1.0, name: str = ""
) -> Line:
    """A line through points (x, y), y times a factor."""
    return Line(label, [x for x, _ in points], [factor * y for _, y in points], name)


@dataclass(frozen=True)
class Bars:
    """One bar in each group; None if there is no number. Spreads are drawn as whiskers.

    `published`: the paper's numbers, drawn as marks across the bars.
    """

    label: str
    values: Sequence[float | None]
    spreads: Sequence[float | None]
    published: Sequence[float | None] = ()


@dataclass(frozen=True)
class Points:
    """One point per run; if not `framed`, the axes make no room for them beside those that are."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    framed: bool = True


@dataclass(frozen=True)
class Panel:
    """One set of axes: lines, points, or bars over named groups. An empty one says so.

    `late`: the ends of the lines are what counts; where they begin far below, the axis is cut.
    """

    title: str
    x_label: str
    y_label: str
    marks: Sequence[Line | Bars | Points] = ()
    groups: Sequence[str] = ()
    log_x: bool = False
    log_y: bool = False
    late: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(
            any(value is not None for value in mark.values)
            if isinstance(mark, Bars)
            else len(mark.x) > 0
            for mark in self.marks
        )


def check_extra() -> None:
    """An error unless the extra `report` is installed: before the work, not after it."""
    needed("matplotlib")
    needed("jinja2")


STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.titlesize": 10,
}


def draw(panel: Panel) -> bytes:
    """One panel as a PNG of 630 x 450 pixels and few colours."""
    return png(picture(panel))


def picture(panel: Panel) -> Any:
    """One panel as an image of PIL."""
    with needed("matplotlib").rc_context(STYLE):
        figure = needed("matplotlib.figure").Figure(figsize=SIZE, dpi=DPI)
        # Fixed margins: axes of one size in every panel, in half the time of a fitted layout.
        _paint(figure.add_axes((0.19, 0.25, 0.79, 0.66)), panel)
        canvas = needed("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        canvas.draw()
        size, pixels = canvas.get_width_height(), canvas.buffer_rgba()
        return needed("PIL.Image").frombuffer("RGBA", size, pixels).convert("RGB")


def figure_of(panels: Sequence[Panel]) -> Any:
    """Panels side by side, two in a row, as a matplotlib figure that a notebook shows."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with needed("matplotlib").rc_context(STYLE):
        size = (columns * SIZE[0], rows * SIZE[1])
        figure = needed("matplotlib.figure").Figure(figsize=size, dpi=100, layout="constrained")
        for place, panel in enumerate(panels, start=1):
            _paint(figure.add_subplot(rows, columns, place), panel, outside=False)
    figure._repr_png_ = lambda: _bytes(figure)  # also where pyplot is not imported
    return figure


def _bytes(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _paint(axes: "Axes", panel: Panel, *, outside: bool = True) -> None:
    """Draw a panel; `outside`: the legend stands below the axes, in a margin that is there."""
    # a given place of a label spares matplotlib the search for one, a third of the time
    axes.set_title(panel.title, y=1.0 if outside else None)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if outside:
        axes.xaxis.set_label_coords(0.5, -0.1403)
        axes.yaxis.set_label_coords(-0.2, 0.5)
    if panel.empty:
        _say_empty(axes)
        return
    _marks(axes, panel)
    if outside:
        _legend(axes, panel)
    elif any(mark.label for mark in panel.marks):
        axes.legend(loc="best", fontsize=8)


def side_by_side(pictures: Sequence[Any]) -> Any:
    """Pictures as one, two in a row."""
    columns = min(2, len(pictures))
    width, height = pictures[0].size
    rows = -(-len(pictures) // columns)
    sheet = needed("PIL.Image").new("RGB", (columns * width, rows * height), "white")
    for place, panel in enumerate(pictures):
        sheet.paste(panel, (place % columns * width, place // columns * height))
    return sheet


def _marks(axes: "Axes", panel: Panel) -> None:
    colours = label_colours(panel)
    bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
    named: set[str] = set()
    loose = [mark for mark in panel.marks if isinstance(mark, Points) and not mark.framed]
    framed = [mark for mark in panel.marks if mark not in loose] or loose
    for mark in framed:
        colour = colours[mark.label]
        label = "_" if mark.label in named else mark.label
        named.add(mark.label)
        if isinstance(mark, Bars):
            _bars(axes, mark, bars.index(mark), len(bars), colour)
        elif isinstance(mark, Points):
            _scatter(axes, mark, colour, label)
        else:
            shape: dict[str, Any] = {"marker": "o", "markersize": 3} if len(mark.x) < 12 else {}
            if mark.published:
                shape = {"linestyle": (0, (5, 3))}
            if len(mark.low):
                axes.fill_between(
                    mark.x, mark.low, mark.high, color=colour, alpha=0.18, linewidth=0
                )
            axes.plot(mark.x, mark.y, color=colour, label=label, linewidth=1.2, alpha=0.85, **shape)
    if bars:
        axes.set_xticks(range(len(panel.groups)), panel.groups)
        axes.set_xlim(-0.5, len(panel.groups) - 0.5)  # groups without a bar have room too
        axes.grid(visible=False, axis="x")
    limits = _bar_limits(bars) if bars and not panel.log_y else None
    if panel.late:
        limits = _end_limits([mark for mark in panel.marks if isinstance(mark, Line)])
    if limits:
        axes.set_ylim(*limits)
        axes.set_ylabel(f"{axes.get_ylabel()}, axis cut")
    for axis, logarithmic in (("x", panel.log_x), ("y", panel.log_y)):
        if logarithmic and _any_positive(panel, axis):
            getattr(axes, f"set_{axis}scale")("log", nonpositive="clip" if bars else "mask")
            _log_ticks(axes, axis)
    if panel.x_label == "epoch":
        ticker = needed("matplotlib.ticker")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True))
    if loose != framed:
        for mark in loose:
            _unframed(axes, mark, colours[mark.label])


def _unframed(axes: "Axes", mark: Points, colour: str) -> None:
    """Points within the limits that the others have set; those outside are counted."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    pairs = zip(mark.x, mark.y, strict=True)
    outside = sum(not (left <= x <= right and low <= y <= high) for x, y in pairs)
    _scatter(axes, mark, colour, f"{mark.label} ({outside} outside)" if outside else mark.label)
    axes.set(xlim=(left, right), ylim=(low, high))


def _scatter(axes: "Axes", mark: Points, colour: str, label: str) -> None:
    axes.scatter(mark.x, mark.y, s=16, color=colour, label=label, alpha=0.8, linewidths=0)


def _log_ticks(axes: "Axes", name: str) -> None:
    """Decades; with less than two of them, 1, 2 and 5 of each in plain numbers.

    Without matplotlib's own formulas and small ticks, which take two thirds of the time.
    """
    ticker = needed("matplotlib.ticker")
    axis, limits = (axes.xaxis, axes.get_xlim) if name == "x" else (axes.yaxis, axes.get_ylim)
    low, high = limits()
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(_power_of_ten))
    if high < 100 * low:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))


def _power_of_ten(value: float, _: object = None) -> str:
    """A power of ten with a raised exponent.

    >>> _power_of_ten(1e-4), _power_of_ten(1000.0)
    ('10⁻⁴', '10³')
    """
    exponent = str(round(math.log10(value)))
    return "10" + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _bars(axes: "Axes", mark: Bars, place: int, count: int, colour: str) -> None:
    width = 0.8 / count
    at = [
        (group + (place - (count - 1) / 2) * width, value, spread or 0.0)
        for group, (value, spread) in enumerate(zip(mark.values, mark.spreads, strict=True))
        if value is not None
    ]
    if at:
        x, heights, _ = zip(*at, strict=True)
        axes.bar(x, heights, width * 0.92, color=colour, label=mark.label)
    if drawn := [bar for bar in at if bar[2]]:
        x, heights, whiskers = zip(*drawn, strict=True)
        axes.errorbar(x, heights, whiskers, fmt="none", ecolor="#333333", elinewidth=1)
    for group, value in enumerate(mark.published):
        if value is not None:
            middle = group + (place - (count - 1) / 2) * width
            label = "paper" if not axes.lines else "_"
            ends = [middle - 0.46 * width, middle + 0.46 * width]
            axes.plot(ends, [value, value], color="#111111", linewidth=1.6, label=label)


def _bar_limits(bars: Sequence[Bars]) -> tuple[float, float] | None:
    """The range of the bars, cut below the lowest; None where they are not all close."""
    numbers = [value for mark in bars for value in (*mark.values, *mark.published)]
    values = [value for value in numbers if value is not None]
    low, high = min(values), max(values)
    edge = 0.35 * (high - low)
    return (low - edge, high + edge) if high > low > 0.7 * high else None


def cut_below(lines: Sequence[Line]) -> float | None:
    """Where to cut the axis: half of the room for the range of the lines' second halves.

    None if that leaves nothing out.
    """
    ends = [value for line in lines for value in line.y[len(line.y) // 2 :]]
    values = [value for line in lines for value in line.y]
    if not values:
        return None
    low, high = min(ends), max(values)
    cut = low - (high - low)
    return cut if high > low and min(values) < cut else None


def _end_limits(lines: Sequence[Line]) -> tuple[float, float] | None:
    cut = cut_below(lines)
    if cut is None:
        return None
    high = max(value for line in lines for value in line.y)
    return cut, high + 0.05 * (high - cut)


def _legend(axes: "Axes", panel: Panel) -> None:
    labels = list(dict.fromkeys(mark.label for mark in panel.marks if mark.label))
    if labels:
        wide = sum(map(len, labels)) > 38  # letters: in the middle of the picture, not of the axes
        many = len(labels) > 4  # in rows of three, which are as many as fit below the axes
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.39 if wide else 0.45, -0.2),
            ncols=3 if many else len(labels),
            fontsize=7 if many else 8,
            handlelength=1.4,
            columnspacing=1.2,
            **({"borderpad": 0, "borderaxespad": 0, "labelspacing": 0.2} if many else {}),
        )


def label_colours(panel: Panel) -> Mapping[str, str]:
    """The colour of each label in a panel."""
    others = iter(_OTHERS * 9)
    chosen: dict[str, str] = {}
    for mark in panel.marks:
        label = mark.label.removesuffix(PAPER)
        if label not in chosen:
            chosen[label] = COLOURS.get(label) or next(others)
        chosen[mark.label] = chosen[label]
    return chosen


def _any_positive(panel: Panel, side: str) -> bool:
    """Whether a logarithmic axis would show anything; what is not positive is left out of it."""
    values: list[Any] = []
    for mark in panel.marks:
        values += mark.values if isinstance(mark, Bars) else getattr(mark, side)
    return any(value is not None and value > 0 for value in values)


def _say_empty(axes: "Axes") -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(
        0.5, 0.5, "no runs yet", ha="center", va="center", color="#777777", transform=axes.transAxes
    )


def png(image: Any) -> bytes:
    """A PNG with a palette: a third of the size. Maximum coverage keeps colours that are rare."""
    method = needed("PIL.Image").Quantize.MAXCOVERAGE
    buffer = io.BytesIO()
    image.quantize(INKS, method).save(buffer, format="png")
    return buffer.getvalue()
