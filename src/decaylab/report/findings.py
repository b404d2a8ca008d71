"""The findings: the first section of a report, before the evidence."""

from collections.abc import Iterator, Mapping, Sequence

from decaylab.diagnosis import Mechanism, Verdict
from decaylab.document import Grid, GridCell, Section, Subsection, Tone, cells
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
    text = ["What the records show. Every verdict links to its evidence."]
    grid = Grid(cells(["", "finding"]), rows)
    blocks = [Subsection("findings-table", "In short", grids=[grid])] if rows else []
    return Section("findings", "Findings", text, blocks)


def _row(badge: str, tone: Tone, link: str, text: str, notes: str = "") -> list[GridCell]:
    return [GridCell(badge, tone=tone, link=link), GridCell(text, "words", notes=notes)]


def _effects(claims: Mapping[str, Sequence[Claim]]) -> Iterator[list[GridCell]]:
    """What decay does to the test accuracy (E1), at each tier that has pairs."""
    for tier, judged in claims.items():
        for claim in judged:
            if claim.id == "E1" and claim.effect:
                text = f"Test accuracy {claim.effect}, tier {tier}."
                yield _row("accuracy", "plain", f"table1-{tier}", text)


def _claims(claims: Mapping[str, Sequence[Claim]]) -> Iterator[list[GridCell]]:
    """Each claim at the fullest tier that settles it, and how many are open."""
    settled: dict[str, tuple[str, Claim]] = {}
    for tier, judged in claims.items():
        for claim in judged:
            if claim.verdict in TONES:
                settled.setdefault(claim.id, (tier, claim))
    for verdict, tone in TONES.items():
        for tier, claim in settled.values():
            if claim.verdict == verdict:
                text = f"The paper's claim {claim.id}: {claim.claim}."
                seen = f"{claim.id}, {claim.where}, tier {tier}: {claim.effect or '—'}"
                yield _row(verdict, tone, f"claims-{tier}", text, seen)
    for tier, judged in list(claims.items())[:1]:
        if unsettled := [claim.id for claim in judged if claim.id not in settled]:
            text = f"{len(unsettled)} of the paper's {len(judged)} claims are open."
            yield _row("open", "plain", f"claims-{tier}", text, ", ".join(unsettled))


def _mechanisms(settings: Sequence[DiagnosedSetting]) -> Iterator[list[GridCell]]:
    by_setting = [setting.by_mechanism for setting in settings]
    for mechanism, cases in zip(Mechanism, zip(*by_setting, strict=True), strict=False):
        verdicts = [{finding.verdict for finding in findings} for findings in cases]
        decided = [kinds for kinds in verdicts if Verdict.CANNOT_TELL not in kinds]
        if decided:
            acting = sum(kinds == {Verdict.ACTS} for kinds in decided)
            share = f"{acting} of the {len(decided)} settings that can be judged"
            unjudged = len(settings) - len(decided)
            seen = f"{unjudged} more settings lack the records for it" if unjudged else ""
            tone: Tone = "good" if acting else "plain"
            badge = f"{acting} of {len(decided)}"
            yield _row(badge, tone, "diagnosis", f"{DOES[mechanism]}, in {share}.", seen)


def _theory(checks: Sequence[Check]) -> Iterator[list[GridCell]]:
    stated = [check for check in checks if check.kind == "statement"]
    if stated:
        holding = sum(check.holds for check in stated)
        tone: Tone = "good" if holding == len(stated) else "bad"
        text = "The paper's lemmas, theorem and equations hold on random networks."
        seen = "both sides of each are computed in double precision"
        yield _row(f"{holding} of {len(stated)}", tone, "theory", text, seen)
