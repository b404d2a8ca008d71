"""The typed result of a diagnosis; as a dict for JSON and as Markdown. The card is the CLI's."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from decaylab.diagnosis.evidence import Effect

Verdict = Literal["acts", "does not act", "cannot tell"]
MECHANISMS = ("effective learning rate", "Jacobian norm", "effective damping")


@dataclass(frozen=True)
class LayerEvidence:
    """One layer's part. Without an effect, `reason` says why."""

    layer: str
    verdict: Verdict | None
    effect: Effect | None
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """One mechanism: the verdict, why, and what would decide it.

    `effect` is of the whole model. `would_decide` is "" unless the verdict is "cannot tell";
    `layer_quantity` names what the layers' factors are of, where it is not `quantity`.
    """

    mechanism: str
    quantity: str
    verdict: Verdict
    reason: str
    effect: Effect | None = None
    layers: tuple[LayerEvidence, ...] = ()
    would_decide: str = ""
    layer_quantity: str = ""

    @property
    def layer_heading(self) -> str:
        """What the factors by layer are of."""
        return self.layer_quantity or self.quantity


@dataclass(frozen=True)
class Diagnosis:
    """What decay does in a run.

    Attributes:
        run, baseline: their names. first: what must be known before anything else.
        findings: the three mechanisms, in the paper's order. consequences: of all together.
        skipped: layers that could not be judged, with the reason.
    """

    run: str
    baseline: str | None
    first: tuple[str, ...]
    findings: tuple[Finding, ...]
    consequences: tuple[str, ...]
    skipped: dict[str, str]

    def __getitem__(self, mechanism: str) -> Finding:
        """The finding of a mechanism, by how its name begins: `diagnosis["effective l"]`."""
        for finding in self.findings:
            if finding.mechanism.startswith(mechanism):
                return finding
        raise KeyError(mechanism)

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return self.to_markdown()

    def left_out(self) -> dict[str, str]:
        """The layers in `skipped` by their reason, as one string each."""
        found: dict[str, list[str]] = {}
        for layer, reason in self.skipped.items():
            found.setdefault(reason, []).append(layer)
        return {reason: ", ".join(layers) for reason, layers in found.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def to_markdown(self) -> str:
        """The whole result as Markdown."""
        against = f" against {self.baseline}" if self.baseline else ", without a baseline"
        lines = [f"# What weight decay does in {self.run}{against}", ""]
        lines += [f"- **{sentence}**" for sentence in self.first] + [""] * bool(self.first)
        lines += ["| mechanism | verdict | effect | records |", "| --- | --- | --- | --- |"]
        for f in self.findings:
            cells = (f.mechanism, f"**{f.verdict}**", effect_words(f), records_words(f))
            lines.append(f"| {' | '.join(cells)} |")
        for f in self.findings:
            lines += ["", f"## {f.mechanism.capitalize()}: {f.verdict}", "", f.reason]
            if f.would_decide:
                lines += ["", f"To decide it: {f.would_decide}."]
            if any(row.effect for row in f.layers):
                lines += ["", f"| layer | verdict | {f.layer_heading} |", "| --- | --- | --- |"]
                lines += [f"| {' | '.join(row)} |" for row in layer_table(f)]
        if self.skipped:
            lines += ["", "## Layers left out", ""]
            lines += [f"- {layers}: {reason}" for reason, layers in self.left_out().items()]
        lines += ["", "## What follows", "", *(f"- {sentence}" for sentence in self.consequences)]
        return "\n".join(lines) + "\n"


def layer_table(finding: Finding) -> list[tuple[str, str, str]]:
    """(layer, verdict, effect or reason); layers without effect, for one reason, share a row."""
    found: list[tuple[str, str, str]] = []
    for row in finding.layers:
        words = row.effect.words() if row.effect else row.reason
        verdict = row.verdict or "-"
        if found and row.effect is None and found[-1][1:] == (verdict, words):
            found[-1] = (f"{found[-1][0]}, {row.layer}", verdict, words)
        else:
            found.append((row.layer, verdict, words))
    return found


def effect_words(finding: Finding) -> str:
    """What changed, which way and by which factor; "" where nothing was compared."""
    return f"{finding.quantity} {finding.effect.words()}" if finding.effect else ""


def records_words(finding: Finding) -> str:
    """Which rows, how many, over which steps."""
    effect = finding.effect
    if effect is None:
        return ""
    how = "compared with the baseline"
    if effect.source != "baseline":
        how = "compared with a reconstruction"
    counted = "1 record" if effect.records == 1 else f"{effect.records} records"
    steps = f"steps {effect.steps[0]} to {effect.steps[1]}"
    if effect.steps[0] == effect.steps[1]:
        steps = f"step {effect.steps[0]}"
    return f"from {', '.join(effect.probes)}: {counted}, {steps}, {how}"
