"""The pictures of a report's figures. Loads matplotlib but not torch, to begin at once alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from decaylab.report.beside import beside
from decaylab.report.curves import is_curves
from decaylab.report.drawing import Panel, picture, png, side_by_side

Figures = Mapping[str, Sequence[Panel]]
FEW = 12  # panels that are drawn in the time another process takes to begin


@dataclass(frozen=True)
class Sheet:
    """A figure as PNGs: all its panels, two in a row; and alone those that are not curves."""

    png: bytes
    alone: Sequence[bytes]


@contextmanager
def sheets_beside(figures: Figures) -> Iterator[Callable[[], dict[str, Sheet]]]:
    """Begin to draw figures in another process, unless they are few."""
    if sum(map(len, figures.values())) <= FEW:
        yield lambda: draw_sheets(figures)
        return
    with beside(draw_sheets, figures) as drawn:
        yield drawn


def draw_sheets(figures: Figures) -> dict[str, Sheet]:
    """Each figure's panels, drawn now."""
    sheets = {}
    for name, panels in figures.items():
        pictures = [picture(panel) for panel in panels]
        drawn = zip(panels, pictures, strict=True)
        alone = [png(image) for panel, image in drawn if not is_curves(panel)]
        sheets[name] = Sheet(png(side_by_side(pictures)), alone)
    return sheets
