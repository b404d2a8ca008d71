"""A diagnosis as text for a terminal and as HTML for a notebook."""

import io
import re
import shutil
from html import escape

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from decaylab.diagnosis.layout import sections, warnings
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.diagnosis.words.findings import compared
from decaylab.diagnosis.words.headline import headline
from decaylab.document import Grid, Subsection
from decaylab.notebook import html_badge, html_folded, html_table
from decaylab.text_table import Column, Styled, TextTable

COLOURS = {"good": "green", "plain": "dim", "near": "yellow", "bad": "red", "": ""}
PRINTED_LAYERS = 24
WIDTH = 80
"""Columns of a printed result where the terminal does not say how wide it is."""


# ---------------------------------------------------------------- a terminal


def card(diagnosis: Diagnosis) -> Panel:
    """The result as a card: the answer, what to know first, verdicts, layers, what follows."""
    return Panel(
        Group(_compared(diagnosis), *_body(diagnosis)), title="weight decay", title_align="left"
    )


def text_of(diagnosis: Diagnosis) -> str:
    """What `print(diagnosis)` shows: the result in plain letters, layers where there are few."""
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, 100)
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        if diagnosis.baselines:
            console.print(_compared(diagnosis))
        console.print(Group(*_body(diagnosis, PRINTED_LAYERS)))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _compared(diagnosis: Diagnosis) -> Text:
    """The runs, and what they are compared with; a title would cut long names."""
    return Text(compared(diagnosis), "dim")


def _body(diagnosis: Diagnosis, most_rows: int | None = None) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(headline(diagnosis), "bold")]
    parts += [Text(text, "bold red") for text in warnings(diagnosis)]
    for section in sections(diagnosis):
        if inside := _inside(section, most_rows):
            title = Text.assemble("\n", (section.title, f"bold {COLOURS[section.tone]}"))
            parts += [title, *inside]
    return parts


def _inside(section: Subsection, most_rows: int | None) -> list[RenderableType]:
    """A section without its title; of its tables those of numbers, up to `most_rows` long."""
    parts: list[RenderableType] = [Text(text) for text in section.text]
    if section.note:
        parts.append(Text(section.note, "dim"))
    if section.items:
        items = Table.grid(padding=(0, 1))
        for item in section.items:
            items.add_row("-", Text(item))
        parts.append(items)
    for grid in section.grids:
        if not grid.has_words and (most_rows is None or len(grid.rows) <= most_rows):
            parts += [_table(grid), Text(grid.legend, "dim")]
    return parts


def _table(grid: Grid) -> TextTable:
    columns = [
        Column(cell.text, number=cell.kind == "number", words=(key := cell.kind == "key"), path=key)
        for cell in grid.header
    ]
    return TextTable(columns, [[Styled(cell.text, "dim") for cell in row] for row in grid.rows])


# ---------------------------------------------------------------- a notebook


def html_of(diagnosis: Diagnosis) -> str:
    """What a notebook shows: the answer, the verdicts, what follows; tables behind a click."""
    parts = [f"<p><b>{_html(headline(diagnosis))}</b></p>"]
    parts += [f'<p style="color:#b03000">{_html(text)}</p>' for text in warnings(diagnosis)]
    parts += map(_section_html, sections(diagnosis))
    return f'<div style="max-width:52em">{"".join(parts)}</div>'


def _section_html(section: Subsection) -> str:
    badge = f"{html_badge(section.badge, section.tone)} " if section.badge else ""
    lines = [f"{badge}<b>{_html(section.title)}</b>", *map(_html, section.text)]
    parts = [f"<p>{'<br>'.join(lines)}</p>"]
    if section.items:
        parts.append(f"<ul>{''.join(f'<li>{_html(item)}</li>' for item in section.items)}</ul>")
    for grid in section.grids:
        header, *rows = ([cell.text for cell in row] for row in (grid.header, *grid.rows))
        words_first = sum(cell.kind != "number" for cell in grid.header)
        table = html_table(header, rows, words=words_first)
        legend = f"<p><small>{_html(grid.legend)}</small></p>" if grid.legend else ""
        parts.append(html_folded("By layer", table + legend))
    return "".join(parts)


def _html(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
