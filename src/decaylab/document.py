"""A document as plain values, and that as Markdown: sections of sentences, lists and tables.

A page of the report is one, and so is a verdict. Terminals, notebooks and browsers have renderers
of their own.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["", "number", "words", "key"]
Tone = Literal["", "good", "near", "bad", "plain"]


@dataclass(frozen=True)
class GridCell:
    """One field of a table; a tone colours it, and `notes` are shown on a click.

    `link`: the anchor on the page where the evidence is.
    """

    text: str
    kind: Kind = ""
    tone: Tone = ""
    notes: str = ""
    link: str = ""


def cells(texts: Iterable[str], kind: Kind = "") -> list[GridCell]:
    """Fields of one kind."""
    return [GridCell(text, kind) for text in texts]


@dataclass(frozen=True)
class Grid:
    """A table ready to be shown, under a caption where a block has several, above its legend."""

    header: Sequence[GridCell]
    rows: Sequence[Sequence[GridCell]]
    caption: str = ""
    legend: str = ""

    @property
    def has_words(self) -> bool:
        """Whether there are sentences in it, not names and numbers alone."""
        return any(cell.kind == "words" for row in self.rows for cell in row)

    @property
    def least_width(self) -> int:
        """Letters and gaps that its columns need side by side: numbers whole, names wrapped.

        >>> Grid([GridCell("first layer"), GridCell("norm", "number")],
        ...      [[GridCell("features.0.weight"), GridCell("12.345", "number")]]).least_width
        18
        """
        columns = zip(self.header, *self.rows, strict=True)
        return sum(
            1 + max([_longest(heading.text), *map(_least_width, cells)])
            for heading, *cells in columns
        )


def _least_width(cell: GridCell) -> int:
    return len(cell.text) if cell.kind == "number" else min(_longest(cell.text), 10)


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)


@dataclass(frozen=True)
class Image:
    """A PNG and what it shows, in words."""

    png: bytes
    text: str

    @property
    def data(self) -> str:
        """The image as it stands in a `data:` address."""
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Subsection:
    """Tables or a figure with what is to be said about them.

    `anchor` names it on the page, and its files: `<anchor>.csv`, `figures/<anchor>.png`. `text` is
    paragraphs, `items` are listed. `badge` is a verdict, in the colour of `tone`. `missing` says
    what is not there. A folded block opens on a click. `charts` are curves (`report.drawing.Panel`)
    that the browser draws; a picture of them is in the same file.
    """

    anchor: str
    title: str
    text: Sequence[str] = ()
    note: str = ""
    items: Sequence[str] = ()
    images: Sequence[Image] = ()
    charts: Sequence[Any] = ()
    grids: Sequence[Grid] = ()
    missing: str = ""
    folded: bool = False
    badge: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Section:
    """Blocks under one heading."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    blocks: Sequence[Subsection] = ()


@dataclass(frozen=True)
class Report:
    """Everything on the page. `notices` stand first: what was left out, and why."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    notices: Sequence[str] = ()
    footer: str = ""
    notices_title: str = "Left out"


def to_markdown(report: Report) -> str:
    """The same as Markdown, with its figures beside it in `figures/`."""
    parts = [f"# {report.title}\n\n{report.subtitle}\n"]
    if report.notices:
        parts.append(f"## {report.notices_title}\n\n{listed(report.notices)}")
    for section in report.sections:
        parts.append(f"## {section.title}\n")
        parts += [text + "\n" for text in section.text]
        parts += [subsection_markdown(block) for block in section.blocks]
    parts.append(report.footer + "\n")
    return joined(parts)


def subsection_markdown(block: Subsection, level: int = 3) -> str:
    """A subsection as Markdown, under a heading of this level."""
    parts = [f"{'#' * level} {block.title}\n", *(text + "\n" for text in block.text)]
    if block.note:
        parts.append(block.note + "\n")
    if block.items:
        parts.append(listed(block.items))
    if block.images or block.charts:
        parts.append(f"![{block.title}](figures/{block.anchor}.png)\n")
    for grid in block.grids:
        parts += [f"{grid.caption}\n"] if grid.caption else []
        parts.append(grid_markdown(grid))
        parts += [f"{grid.legend}\n"] if grid.legend else []
    if block.missing:
        parts.append(f"*{block.missing}*\n")
    return "\n".join(parts)


def listed(items: Sequence[str]) -> str:
    """A list as Markdown."""
    return "".join(f"- {item}\n" for item in items)


def joined(parts: Sequence[str]) -> str:
    """Parts of a document as one; what comes from records is text, never HTML."""
    return "\n".join(parts).replace("<", "&lt;")


def grid_markdown(grid: Grid) -> str:
    """A table as Markdown, without its caption."""
    header, *rows = ([_plain(cell) for cell in row] for row in (grid.header, *grid.rows))
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([text.replace("|", "\\|") for text in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def text_grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts as Markdown."""
    return grid_markdown(Grid(cells(header), [*map(cells, rows)]))


def _plain(cell: GridCell) -> str:
    return f"{cell.text} ({cell.notes})" if cell.notes else cell.text
