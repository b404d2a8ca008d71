"""A report as plain values, and that as one self-contained HTML file or as Markdown.

The HTML needs nothing but itself: images, styles and the script that draws curves are inlined, and
there is no font and no address.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decaylab.report.curves import asset, curves, script
from decaylab.report.drawing import Panel, needed

Kind = Literal["", "number", "words", "key"]
Tone = Literal["", "good", "near", "bad", "plain"]


@dataclass(frozen=True)
class GridCell:
    """One field of a table; a tone colours it, and `more` is shown on a click.

    `link`: the anchor on the page where the evidence is.
    """

    text: str
    kind: Kind = ""
    tone: Tone = ""
    more: str = ""
    link: str = ""


@dataclass(frozen=True)
class Grid:
    """A table ready to be shown, under a caption where a block has several."""

    header: Sequence[GridCell]
    rows: Sequence[Sequence[GridCell]]
    caption: str = ""

    @property
    def stacked(self) -> bool:
        """Whether a narrow screen shows a row's cells below each other: where there are words."""
        return any(cell.kind == "words" for row in self.rows for cell in row)


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

    `anchor` names it on the page, and its files: `<anchor>.csv`, `figures/<anchor>.png`.
    `missing` says what is not there. A folded block opens on a click. `charts` are curves that the
    browser draws; a picture of them is in the same file.
    """

    anchor: str
    title: str
    text: Sequence[str] = ()
    note: str = ""
    images: Sequence[Image] = ()
    charts: Sequence[Panel] = ()
    grids: Sequence[Grid] = ()
    missing: str = ""
    folded: bool = False


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


def to_html(report: Report) -> str:
    """The report as one HTML file."""
    jinja2 = needed("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("decaylab.report", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    raw = jinja2.utils.markupsafe.Markup
    style = raw(asset("uPlot.min.css") + asset("page.css"))
    drawn = any(block.charts for section in report.sections for block in section.blocks)
    code = raw(script() if drawn else "")
    environment.filters["curves"] = curves
    template = environment.get_template("page.html.jinja")
    text: str = template.render(report=report, style=style, script=code, menu=raw(asset("menu.js")))
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
    return "\n".join(parts).replace("<", "&lt;")  # what comes from records is text, never HTML


def _block(block: Subsection) -> str:
    parts = [f"### {block.title}\n", *(text + "\n" for text in block.text)]
    if block.note:
        parts.append(block.note + "\n")
    if block.images or block.charts:
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
    return grid_markdown(Grid([*map(GridCell, header)], [[*map(GridCell, row)] for row in rows]))


def _plain(cell: GridCell) -> str:
    return f"{cell.text} ({cell.more})" if cell.more else cell.text


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
