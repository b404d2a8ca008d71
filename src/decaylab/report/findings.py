"""The findings: the first section of a report, before the evidence."""

from collections.abc import Mapping, Sequence

from decaylab.diagnosis import Mechanism, Verdict
from decaylab.document import Grid, GridCell, Section, Subsection, Tone
from decaylab.paper.claims import Claim
from decaylab.report.diagnoses import DiagnosedSetting
from decaylab.theory import Check

DOES = {
    Mechanism.EFFECTIVE_LR: "Decay keeps the effective learning rate high",
    Mechanism.JACOBIAN: "Decay shrinks the Jacobian norm",
    Mechanism.DAMPING: "Decay keeps K-FAC's effective damping low",
}
TONES: dict[str, Tone] = {"supported": "good", "contradicted": "bad"}


def findings_section(
    claims: Mapping[str, Sequence[Claim]],
    settings: Sequence[DiagnosedSetting],
    checks: Sequence[Check],
) -> Section:
    """What decay does in these runs, the claims that are settled, and whether theory holds.

    `claims`: by tier, the fullest first.
    """
    rows = [*_effects(claims), *_mechanisms(settings), *_claims(claims), *_theory(checks)]
    header = [GridCell(""), GridCell("finding")]
    text = ["What the records show. Every verdict links to its evidence."]
    blocks = [Subsection("findings-table", "In short", grids=[Grid(header, rows)])] if rows else []
    return Section("findings", "Findings", text, blocks)


def _effects(claims: Mapping[str, Sequence[Claim]]) -> list[list[GridCell]]:
    """What decay does to the test accuracy (E1), at each tier that has pairs."""
    rows = []
    for tier, judged in claims.items():
        pairs = next((claim for claim in judged if claim.id == "E1" and claim.effect), None)
        if pairs is not None:
            text = f"Test accuracy {pairs.effect}, tier {tier}."
            link = f"table1-{tier}"
            rows.append([GridCell("accuracy", tone="plain", link=link), GridCell(text, "words")])
    return rows


def _claims(claims: Mapping[str, Sequence[Claim]]) -> list[list[GridCell]]:
    """Each claim at the fullest tier that settles it, and how many are open."""
    settled: dict[str, tuple[str, Claim]] = {}
    for tier, judged in claims.items():
        for claim in judged:
            if claim.verdict in TONES:
                settled.setdefault(claim.id, (tier, claim))
    rows = []
    for verdict, tone in TONES.items():
        for tier, claim in settled.values():
            if claim.verdict == verdict:
                seen = f"{claim.id}, {claim.where}, tier {tier}: {claim.effect or '—'}"
                badge = GridCell(verdict, tone=tone, link=f"claims-{tier}")
                text = f"The paper's claim {claim.id}: {claim.claim}."
                rows.append([badge, GridCell(text, "words", notes=seen)])
    first = next(iter(claims.items()), None)
    unsettled = [c.id for c in first[1] if c.id not in settled] if first else []
    if first and unsettled:
        text = f"{len(unsettled)} of the paper's {len(first[1])} claims are open."
        badge = GridCell("open", tone="plain", link=f"claims-{first[0]}")
        rows.append([badge, GridCell(text, "words", notes=", ".join(unsettled))])
    return rows


def _mechanisms(settings: Sequence[DiagnosedSetting]) -> list[list[GridCell]]:
    rows = []
    for place, mechanism in enumerate(Mechanism):
        verdicts = [
            {result.findings[place].verdict for result in setting.diagnoses} for setting in settings
        ]
        decided = [kinds for kinds in verdicts if Verdict.CANNOT_TELL not in kinds]
        if not decided:
            continue
        acting = sum(kinds == {Verdict.ACTS} for kinds in decided)
        badge = GridCell(
            f"{acting} of {len(decided)}", tone="good" if acting else "plain", link="diagnosis"
        )
        text = f"{DOES[mechanism]}, in {acting} of the {len(decided)} settings that can be judged."
        unjudged = len(settings) - len(decided)
        seen = f"{unjudged} more settings lack the records for it" if unjudged else ""
        rows.append([badge, GridCell(text, "words", notes=seen)])
    return rows


def _theory(checks: Sequence[Check]) -> list[list[GridCell]]:
    stated = [check for check in checks if check.kind == "statement"]
    if not stated:
        return []
    holding = sum(check.holds for check in stated)
    tone: Tone = "good" if holding == len(stated) else "bad"
    badge = GridCell(f"{holding} of {len(stated)}", tone=tone, link="theory")
    text = "The paper's lemmas, theorem and equations hold on random networks."
    seen = "both sides of each are computed in double precision"
    return [[badge, GridCell(text, "words", notes=seen)]]
