"""A report as plain values, and that as one self-contained HTML file or as Markdown.

The HTML needs nothing but itself: images are inlined, there is no script, no font and no address.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decaylab.report.drawing import needed

Kind = Literal["", "number", "words", "key"]
Tone = Literal["", "good", "near", "bad", "plain"]


@dataclass(frozen=True)
class Cell:
    """One field of a table; a tone colours it, and `more` is shown on a click."""

    text: str
    kind: Kind = ""
    tone: Tone = ""
    more: str = ""


@dataclass(frozen=True)
class Grid:
    """A table ready to be shown, under a caption where a block has several."""

    header: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


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
class Block:
    """Tables or a figure with what is to be said about them.

    `anchor` names it on the page, and its files: `<anchor>.csv`, `figures/<anchor>.png`.
    `missing` says what is not there. A folded block opens on a click.
    """

    anchor: str
    title: str
    text: Sequence[str] = ()
    note: str = ""
    images: Sequence[Image] = ()
    grids: Sequence[Grid] = ()
    missing: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """Blocks under one heading."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Report:
    """Everything on the page. `notices` stand first: what was left out, and why."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    notices: Sequence[str] = ()
    footer: str = ""
    notices_title: str = "Left out"


def to_html(report: Report) -> str:
    """The report as one HTML file."""
    jinja2 = needed("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("decaylab.report", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text: str = environment.get_template("page.html.jinja").render(report=report)
    return text


def to_markdown(report: Report) -> str:
    """The same as Markdown, with its figures beside it in `figures/`."""
    parts = [f"# {report.title}\n\n{report.subtitle}\n"]
    if report.notices:
        listed = "".join(f"- {notice}\n" for notice in report.notices)
        parts.append(f"## {report.notices_title}\n\n{listed}")
    for section in report.sections:
        parts.append(f"## {section.title}\n")
        parts += [text + "\n" for text in section.text]
        parts += [_block(block) for block in section.blocks]
    parts.append(report.footer + "\n")
    return "\n".join(parts)


def _block(block: Block) -> str:
    parts = [f"### {block.title}\n", *(text + "\n" for text in block.text)]
    if block.note:
        parts.append(block.note + "\n")
    if block.images:
        parts.append(f"![{block.title}](figures/{block.anchor}.png)\n")
    for grid in block.grids:
        parts += [f"{grid.caption}\n"] if grid.caption else []
        parts.append(grid_markdown(grid))
    if block.missing:
        parts.append(f"*{block.missing}*\n")
    return "\n".join(parts)


def grid_markdown(grid: Grid) -> str:
    """A table as Markdown, without its caption."""
    rows = [[_plain(cell) for cell in row] for row in (grid.header, *grid.rows)]
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(_markdown_row(line) for line in lines)


def text_grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts as Markdown."""
    return grid_markdown(Grid([*map(Cell, header)], [[*map(Cell, row)] for row in rows]))


def _plain(cell: Cell) -> str:
    return f"{cell.text} ({cell.more})" if cell.more else cell.text


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
