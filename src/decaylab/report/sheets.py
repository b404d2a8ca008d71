"""The pictures of a report's figures, drawn in another process while this one goes on.

That process is `python -m decaylab.report.sheets`: figures as JSON in, their pictures out. It
loads matplotlib, but not torch.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from decaylab.report.beside import module_beside
from decaylab.report.curves import is_curves
from decaylab.report.drawing import Bars, Line, Panel, Points, picture, png, side_by_side

Figures = Mapping[str, Sequence[Panel]]
FEW = 12  # panels that are drawn in the time another process takes to begin
KINDS = {kind.__name__: kind for kind in (Panel, Line, Bars, Points)}


@dataclass(frozen=True)
class Sheet:
    """A figure as PNGs: all its panels, two in a row; and alone those that are not curves."""

    png: bytes
    alone: Sequence[bytes]


@contextmanager
def sheets_beside(figures: Figures) -> Iterator[Callable[[], dict[str, Sheet]]]:
    """Begin to draw figures; what is given waits for them, or draws them where that failed."""
    if sum(map(len, figures.values())) <= FEW:
        yield lambda: draw_sheets(figures)
        return
    with module_beside(__name__, text=_to_json(figures)) as output:
        yield lambda: _read(output()) or draw_sheets(figures)


def draw_sheets(figures: Figures) -> dict[str, Sheet]:
    """Each figure's panels, drawn now."""
    sheets = {}
    for name, panels in figures.items():
        pictures = [picture(panel) for panel in panels]
        drawn = zip(panels, pictures, strict=True)
        alone = [png(image) for panel, image in drawn if not is_curves(panel)]
        sheets[name] = Sheet(png(side_by_side(pictures)), alone)
    return sheets


def _to_json(figures: Figures) -> bytes:
    def plain(value: object) -> dict[str, object]:
        return {"kind": type(value).__name__, **vars(value)}

    return json.dumps(figures, default=plain).encode()


def _from_json(text: bytes) -> Figures:
    def made(entry: dict[str, Any]) -> Any:
        return KINDS[entry.pop("kind")](**entry) if "kind" in entry else entry

    figures: Figures = json.loads(text, object_hook=made)
    return figures


def _read(text: bytes) -> dict[str, Sheet]:
    """What the other process prints; nothing where it failed."""
    if not text:
        return {}
    decoded = base64.b64decode
    return {
        name: Sheet(decoded(sheet), [*map(decoded, alone)])
        for name, (sheet, alone) in json.loads(text).items()
    }


def main() -> None:
    """Figures from stdin, their sheets to stdout."""

    def encoded(image: bytes) -> str:
        return base64.b64encode(image).decode()

    sheets = draw_sheets(_from_json(sys.stdin.buffer.read()))
    plain = {
        name: (encoded(sheet.png), [*map(encoded, sheet.alone)]) for name, sheet in sheets.items()
    }
    print(json.dumps(plain))


if __name__ == "__main__":
    main()
