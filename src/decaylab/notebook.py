"""What results look like in a notebook: small pieces of HTML, without a template engine."""

from collections.abc import Iterable, Sequence
from html import escape

TONES = {
    "good": "background:#d8f0e3;color:#0b5235",
    "near": "background:#fbf0cd;color:#6b4e00",
    "plain": "background:#ececea;color:#55554f",
}


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table; the first `words` columns are text, the others numbers, set to the right.

    >>> html_table(["layer", "norm"], [["fc", "1 < 2"]])[-33:]
    'right">1 &lt; 2</td></tr></table>'
    """

    def row(cells: Sequence[str], tag: str) -> str:
        sides = ["left" if place < words else "right" for place in range(len(cells))]
        inner = (
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(inner)}</tr>"

    return f"<table>{row(header, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def html_badge(text: str, tone: str) -> str:
    """A few words on a coloured ground."""
    style = f"{TONES[tone]};padding:0 .5em;border-radius:.8em;white-space:nowrap"
    return f'<span style="{style}">{escape(text)}</span>'


def html_folded(title: str, inside: str) -> str:
    """HTML that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"
