"""How a verdict is laid out, once for terminals, notebooks, Markdown and the report."""

from collections.abc import Sequence

from decaylab.diagnosis import words
from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.mechanisms import Finding
from decaylab.diagnosis.reasons import Reason, Verdict
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.document import Grid, GridCell, Subsection, Tone, joined, listed, subsection_markdown

TONES: dict[str, Tone] = {
    Verdict.ACTS: "good",
    Verdict.DOES_NOT_ACT: "plain",
    Verdict.CANNOT_TELL: "near",
}


def sections(diagnosis: Diagnosis) -> list[Subsection]:
    """A section per mechanism, how far layers turn, which were left out, what follows.

    Before them come `words.headline` and `warnings`.
    """
    shown = mechanisms(diagnosis)
    text, grids = words.insight(diagnosis), _motions(diagnosis)
    if text or grids:
        shown.append(Subsection("motions", words.motion_title(diagnosis), text, grids=grids))
    if diagnosis.skipped:
        skipped = [f"{layers}: {why}" for why, layers in words.left_out(diagnosis).items()]
        shown.append(Subsection("skipped", "Layers left out", items=skipped))
    follows = words.follow_texts(diagnosis)
    return [*shown, Subsection("follows", "What follows", items=follows)]


def warnings(diagnosis: Diagnosis) -> list[str]:
    """What is to be known first."""
    return [words.first_text(*item) for item in diagnosis.first]


def mechanisms(diagnosis: Diagnosis) -> list[Subsection]:
    """What decay does to each mechanism."""
    above = words.next_reason(diagnosis)
    return [mechanism(finding, diagnosis.places, above) for finding in diagnosis.findings]


def mechanism(finding: Finding, places: Places, above: Reason | None = None) -> Subsection:
    """What decay does to a mechanism, why, what would decide it, and the factors by layer.

    A remedy that was given `above` is not repeated.
    """
    text = [words.finding_text(finding)]
    if finding.remedies:
        text.append(f"To decide it: {words.remedy_text(finding, places, above)}.")
    return Subsection(
        finding.mechanism.replace(" ", "-"),
        words.verdict_title(finding),
        text,
        note=words.records_words(finding),
        grids=[_layers(finding)] if any(row.effect for row in finding.layers) else (),
        badge=finding.verdict,
        tone=TONES[finding.verdict],
    )


def _layers(finding: Finding) -> Grid:
    header = [GridCell("layer"), GridCell("verdict"), GridCell(words.layer_heading(finding))]
    rows = [
        [  # a name is not broken, a list of them is
            GridCell(names, "words" if "," in names else "key"),
            GridCell(verdict, tone=TONES.get(verdict, "")),
            GridCell(text, "words"),
        ]
        for names, verdict, text in words.layer_table(finding)
    ]
    return Grid(header, rows)


def _motions(diagnosis: Diagnosis) -> list[Grid]:
    """A table, if anything is known of how layers turn."""
    headings, table = words.motion_table(diagnosis)
    if len(headings) < 2:
        return []
    header, *rows = (_numbers(cells) for cells in (headings, *table))
    return [Grid(header, rows, legend=words.motion_legend(diagnosis))]


def _numbers(cells: Sequence[str]) -> list[GridCell]:
    return [GridCell(cells[0], "key"), *(GridCell(cell, "number") for cell in cells[1:])]


def markdown(diagnosis: Diagnosis) -> str:
    """The whole result as Markdown."""
    parts = [f"# What weight decay does in {words.compared(diagnosis)}\n"]
    parts.append(f"**{words.headline(diagnosis)}**\n")
    if diagnosis.first:
        parts.append(listed([f"**{text}**" for text in warnings(diagnosis)]))
    return joined([*parts, *(subsection_markdown(block, 2) for block in sections(diagnosis))])
