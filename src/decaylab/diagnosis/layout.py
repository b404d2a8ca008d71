"""How a verdict is laid out, once for terminals, notebooks, Markdown and the report."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.mechanisms import Finding
from decaylab.diagnosis.reasons import Because, Reason, Verdict
from decaylab.diagnosis.verdict import Diagnosis
from decaylab.diagnosis.words.findings import (
    compared,
    finding_text,
    first_texts,
    follow_texts,
    layer_heading,
    layer_table,
    left_out,
    records_words,
    remedy_text,
    verdict_title,
)
from decaylab.diagnosis.words.headline import headline, next_reason
from decaylab.diagnosis.words.motions import insight, motion_legend, motion_table, motion_title
from decaylab.diagnosis.words.reasons import sentence
from decaylab.document import Grid, GridCell, Subsection, Tone, joined, listed, subsection_markdown
from decaylab.records.files import without_nan

TONES: dict[str, Tone] = {
    Verdict.ACTS: "good",
    Verdict.DOES_NOT_ACT: "plain",
    Verdict.CANNOT_TELL: "near",
}


def sections(diagnosis: Diagnosis) -> list[Subsection]:
    """A section per mechanism, how far layers turn, which were left out, what follows.

    Before them come `headline` and `warnings`.
    """
    shown = mechanisms(diagnosis)
    text, grids = insight(diagnosis), _motions(diagnosis)
    if text or grids:
        shown.append(Subsection("motions", motion_title(diagnosis), text, grids=grids))
    if diagnosis.skipped:
        skipped = [f"{layers}: {why}" for why, layers in left_out(diagnosis).items()]
        shown.append(Subsection("skipped", "Layers left out", items=skipped))
    follows = follow_texts(diagnosis)
    return [*shown, Subsection("follows", "What follows", items=follows)]


def warnings(diagnosis: Diagnosis) -> list[str]:
    """What is to be known first."""
    return first_texts(diagnosis.first)


def mechanisms(diagnosis: Diagnosis) -> list[Subsection]:
    """What decay does to each mechanism."""
    above = next_reason(diagnosis)
    return [mechanism(finding, diagnosis.places, above) for finding in diagnosis.findings]


def mechanism(finding: Finding, places: Places, above: Reason | None = None) -> Subsection:
    """What decay does to a mechanism, why, what would decide it, and the factors by layer.

    A remedy that was given `above` is not repeated.
    """
    text = [finding_text(finding)]
    if finding.remedies:
        text.append(f"To decide it: {remedy_text(finding, places, above)}.")
    return Subsection(
        finding.mechanism.replace(" ", "-"),
        verdict_title(finding),
        text,
        note=records_words(finding),
        grids=[_layers(finding)] if any(row.effect for row in finding.layers) else (),
        badge=finding.verdict,
        tone=TONES[finding.verdict],
    )


def _layers(finding: Finding) -> Grid:
    header = [GridCell("layer"), GridCell("verdict"), GridCell(layer_heading(finding))]
    rows = [
        [  # a name is not broken, a list of them is
            GridCell(names, "words" if "," in names else "key"),
            GridCell(verdict, tone=TONES.get(verdict, "")),
            GridCell(text, "words"),
        ]
        for names, verdict, text in layer_table(finding)
    ]
    return Grid(header, rows)


def _motions(diagnosis: Diagnosis) -> list[Grid]:
    """A table, if anything is known of how layers turn."""
    headings, table = motion_table(diagnosis)
    if len(headings) < 2:
        return []
    header, *rows = (_numbers(cells) for cells in (headings, *table))
    return [Grid(header, rows, legend=motion_legend(diagnosis))]


def _numbers(cells: Sequence[str]) -> list[GridCell]:
    return [GridCell(cells[0], "key"), *(GridCell(cell, "number") for cell in cells[1:])]


def markdown(diagnosis: Diagnosis) -> str:
    """The whole result as Markdown."""
    parts = [f"# What weight decay does in {compared(diagnosis)}\n"]
    parts.append(f"**{headline(diagnosis)}**\n")
    if diagnosis.first:
        parts.append(listed([f"**{text}**" for text in warnings(diagnosis)]))
    return joined([*parts, *(subsection_markdown(block, 2) for block in sections(diagnosis))])


def plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, for JSON: the data, and the words for them."""

    def written(reasons: Iterable[Because]) -> list[dict[str, str]]:
        codes = [why.reason.name.lower().replace("_", "-") for why in reasons]
        texts = [sentence(why, diagnosis.places) for why in reasons]
        return [{"reason": a, "text": b} for a, b in zip(codes, texts, strict=True)]

    findings = [
        asdict(replace(f, layers=(), reasons=(), remedies=()))
        | {
            "title": verdict_title(f),
            "text": finding_text(f),
            "reasons": written(f.reasons),
            "remedies": written(f.remedies),
            "layers": [
                asdict(replace(row, why=None)) | {"why": sentence(row.why) if row.why else ""}
                for row in f.layers
            ],
        }
        for f in diagnosis.findings
    ]
    values: dict[str, Any] = {
        "headline": headline(diagnosis),
        "runs": list(diagnosis.runs),
        "baselines": list(diagnosis.baselines),
        "outcome": asdict(diagnosis.outcome),
        "first": warnings(diagnosis),
        "findings": findings,
        "motions": [asdict(m) for m in diagnosis.motions],
        "insights": insight(diagnosis),
        "follows": follow_texts(diagnosis),
        "skipped": {layer: sentence(why) for layer, why in diagnosis.skipped.items()},
    }
    return dict(without_nan(values))
