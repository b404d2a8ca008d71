"""A diagnosis as text for a terminal and as HTML for a notebook."""

import io
import re
import shutil
from html import escape

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from decaylab.diagnosis import words
from decaylab.diagnosis.reasons import Verdict
from decaylab.diagnosis.verdict import Diagnosis, Finding
from decaylab.notebook import html_badge, html_folded, html_table
from decaylab.text_table import Column, Styled, TextTable

COLOURS = {Verdict.ACTS: "green", Verdict.DOES_NOT_ACT: "dim", Verdict.CANNOT_TELL: "yellow"}
TONES = {Verdict.ACTS: "good", Verdict.DOES_NOT_ACT: "plain", Verdict.CANNOT_TELL: "near"}
PRINTED_LAYERS = 24
WIDTH = 80
"""Columns of a printed result where the terminal does not say how wide it is."""


def card(diagnosis: Diagnosis) -> Panel:
    """The result as a card: the answer, what to know first, verdicts, layers, what follows."""
    return Panel(
        Group(_compared(diagnosis), _body(diagnosis)), title="weight decay", title_align="left"
    )


def _compared(diagnosis: Diagnosis) -> Text:
    """The runs, and what they are compared with; a title would cut long names."""
    sides = [", ".join(names) for names in (diagnosis.runs, diagnosis.baselines) if names]
    return Text(" against ".join(sides), "dim")


def _body(diagnosis: Diagnosis, most_layers: int | None = None) -> Group:
    """The parts of the result; the table of layers where these are no more than `most_layers`."""
    layers = most_layers is None or len(diagnosis.motions) <= most_layers
    parts: list[Text | Table | TextTable] = [Text(words.headline(diagnosis), "bold")]
    parts += [Text(words.first_text(*item), "bold red") for item in diagnosis.first]
    for finding in diagnosis.findings:
        parts += _finding(finding, diagnosis)
    insight = words.insight(diagnosis)
    if diagnosis.motions and (layers or insight):
        parts.append(Text("\nHow far each layer turns", "bold"))
        parts += [Text(line) for line in insight]
        if layers:
            parts.append(_motions(diagnosis))
            parts.append(Text(words.motion_legend(diagnosis), "dim"))
    left_out = words.left_out(diagnosis)
    follows = Table.grid(padding=(0, 1))
    for sentence in words.follow_texts(diagnosis):
        follows.add_row("-", Text(sentence))
    for why, names in left_out.items():
        follows.add_row("-", Text(f"left out: {names} ({why})"))
    parts += [Text("\nWhat follows", "bold"), follows]
    return Group(*parts)


def text_of(diagnosis: Diagnosis) -> str:
    """What `print(diagnosis)` shows: the result in plain letters, layers where there are few."""
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, 100)
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        if diagnosis.baselines:
            console.print(_compared(diagnosis))
        console.print(_body(diagnosis, PRINTED_LAYERS))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _html(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def html_of(diagnosis: Diagnosis) -> str:
    """What a notebook shows: the answer, the verdicts, what follows; layers behind a click."""
    parts = [f"<p><b>{_html(words.headline(diagnosis))}</b></p>"]
    parts += [
        f'<p style="color:#b03000">{_html(words.first_text(*item))}</p>' for item in diagnosis.first
    ]
    for finding in diagnosis.findings:
        badge = html_badge(str(finding.verdict), TONES[finding.verdict])
        text = words.finding_text(finding)
        if finding.remedies:
            remedy = words.remedy_text(finding, diagnosis.places, words.headline(diagnosis))
            text += f" To decide it: {remedy}."
        title = words.verdict_title(finding)
        parts.append(f"<p>{badge} <b>{_html(title)}</b>. {_html(text)}</p>")
    follows = "".join(f"<li>{_html(text)}</li>" for text in words.follow_texts(diagnosis))
    parts.append(f"<p><b>What follows</b></p><ul>{follows}</ul>")
    if diagnosis.motions:
        insight = "".join(f"<p>{_html(line)}</p>" for line in words.insight(diagnosis))
        table = html_table(*words.motion_table(diagnosis))
        legend = f"<p><small>{_html(words.motion_legend(diagnosis))}</small></p>"
        parts.append(html_folded("How far each layer turns", insight + table + legend))
    return f'<div style="max-width:52em">{"".join(parts)}</div>'


def _finding(finding: Finding, diagnosis: Diagnosis) -> list[Text]:
    colour = COLOURS[finding.verdict]
    parts = [
        Text.assemble("\n", (words.verdict_title(finding), f"bold {colour}")),
        Text(words.finding_text(finding)),
    ]
    if finding.effect is not None:
        parts.append(Text(words.records_words(finding), "dim"))
    if finding.remedies:
        remedy = words.remedy_text(finding, diagnosis.places, words.headline(diagnosis))
        parts.append(Text(f"To decide it: {remedy}.", "yellow"))
    return parts


def _motions(diagnosis: Diagnosis) -> TextTable:
    headings, rows = words.motion_table(diagnosis)
    numbers = [Column(heading, number=True) for heading in headings[1:]]
    cells = [[Styled(text, "dim") for text in row] for row in rows]
    return TextTable([Column(headings[0]), *numbers], cells)
