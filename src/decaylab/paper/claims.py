"""The paper's empirical claims E1-E17, judged from records alone.

`evidence.py` has the rules: a claim is never supported without the runs it needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from decaylab.paper import accuracy_claims as accuracy
from decaylab.paper import mechanism_claims as mechanism
from decaylab.paper.evidence import Bench, Evidence, Verdict
from decaylab.paper.readings import Readings
from decaylab.paper.tiers import stand_ins

CLAIMS: dict[str, tuple[str, str, Callable[[Bench], Evidence]]] = {
    "E1": ("Table 1", "weight decay raises test accuracy in all 32 pairs", accuracy.e1),
    "E2": ("Fig. 1", "weight decay is at least as good as L2 where they differ", accuracy.e2),
    "E3": ("Table 1", "without BN, K-FAC gains most from weight decay", accuracy.e3),
    "E4": (
        "Fig. 2",
        "BN nets, SGD and Adam: decay of the layers with BN brings most of the effect, that of the"
        " last layer does not matter",
        accuracy.e4,
    ),
    "E5": (
        "Fig. 3",
        "without decay the first layer's effective lr falls from the start over the first stage;"
        " with decay it is flat",
        mechanism.e5,
    ),
    "E6": (
        "Fig. 4",
        "wn-conv closes almost all of the gap, wd-fc + wn-conv all of it",
        accuracy.e6,
    ),
    "E7": (
        "Fig. 5",
        "the K-FAC GN norm goes with the Jacobian norm and with the generalization gap",
        mechanism.e7,
    ),
    "E8": (
        "Table 2",
        "weight decay shrinks the squared Jacobian norm 10-30 times under K-FAC-G, 3-4 under SGD",
        mechanism.e8,
    ),
    "E9": (
        "Fig. 6",
        "K-FAC: wd-fc has the largest effect, wd-conv helps too, more for K-FAC-F",
        accuracy.e9,
    ),
    "E10": (
        "Fig. 7",
        "tr F of the first layer falls 10^4 times in 50 epochs, tr G changes about 2 times",
        mechanism.e10,
    ),
    "E11": (
        "Table 3",
        "large batches lose accuracy without decay; decay closes most of it",
        accuracy.e11,
    ),
    "E12": (
        "Fig. 9",
        "K-FAC-G reaches training loss 1e-4 within 10 epochs and wins in wall-clock time",
        mechanism.e12,
    ),
    "E13": (
        "Table 1",
        "weight decay closes most of the gap between first- and second-order optimizers",
        accuracy.e13,
    ),
    "E14": ("Fig. 8", "all nets of Table 1 end at 100 % training accuracy", mechanism.e14),
    "E15": (
        "App. G.1",
        "large batch: without decay the training loss does not reach zero",
        mechanism.e15,
    ),
    "E16": ("App. G.3, Fig. 9", "K-FAC-G converges ahead of K-FAC-F", mechanism.e16),
    "E17": (
        "Sec. 4.2, Fig. 5",
        "the Jacobian norm goes with the generalization gap",
        mechanism.e17,
    ),
}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and what the records at one tier say about it.

    Attributes:
        id: E1 to E17.
        where: the table or figure.
        claim: what the paper says.
        verdict: supported, contradicted, not enough runs or not enough schedule.
        effect: what was found, in a sentence; "" where nothing was.
        value: the headline number of `effect`: points of accuracy, a ratio, a correlation.
        spread: standard deviation over seeds of a comparison; None with one seed.
        n: runs used.
        tier: whose records.
        data: the data sets they are on.
        notes: what to bear in mind.
        parts: the verdict of each part (a network, a sentence), where the claim has several.
    """

    id: str
    where: str
    claim: str
    verdict: Verdict
    effect: str
    value: float | None
    spread: float | None
    n: int
    tier: str
    data: str
    notes: tuple[str, ...]
    parts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The verdict; `not run` where there is not a single run."""
        return self.verdict if self.n or self.effect else "not run"

    @property
    def told(self) -> str:
        """The same, part by part where parts differ."""
        if self.said == "not run" or len(set(self.parts.values())) < 2:
            return self.said
        return "; ".join(f"{part}: {verdict}" for part, verdict in self.parts.items())


def judge(
    readings: Readings, tier: str, seeds: int = 10, searched_folder: Path | None = None
) -> list[Claim]:
    """All claims, from the finished runs of a tier with seeds 0 to `seeds` - 1."""
    bench = Bench(readings, tier, seeds, searched_folder)
    return [_judged(bench, name) for name in CLAIMS]


def _judged(bench: Bench, name: str) -> Claim:
    where, text, weigh = CLAIMS[name]
    bench.left_out.clear()
    evidence = weigh(bench)
    runs = evidence.runs
    return Claim(
        id=name,
        where=where,
        claim=text,
        verdict=evidence.verdict(),
        effect=evidence.effect,
        value=evidence.value,
        spread=evidence.spread,
        n=len(runs),
        tier=bench.tier.name,
        data=" and ".join(sorted({run.spec.data for run in runs.values()})),
        notes=(*_context(bench, evidence), *evidence.notes, *filter(None, [evidence.doubt])),
        parts=evidence.verdicts(),
    )


def _context(bench: Bench, evidence: Evidence) -> list[str]:
    """How these runs differ from the paper's, and what is missing."""
    runs, notes = list(evidence.runs.values()), []
    needed = [comparison for comparison in evidence.comparisons if comparison.needed]
    if evidence.missing:
        total = evidence.missing + len(needed)
        notes.append(f"{evidence.missing} of {total} comparisons lack runs")
    short = sum(not comparison.enough for comparison in needed)
    if short:
        notes.append(f"{short} of {len(needed)} comparisons lack schedule")
    if runs and bench.tier.on_digits:
        notes.append("on digits with small stand-in nets, not on the paper's data")
        notes.append(f"names are the paper's, the nets are {stand_ins(run.spec for run in runs)}")
    elif runs and bench.tier.name != "full":
        notes.append("at one fifth of the paper's schedule")
    seeds = {run.spec.seed for run in runs}
    if len(seeds) == 1:
        notes.append("one seed")
    for why, names in bench.superseded().items():
        notes.append(f"left out, since {why}: {', '.join(names)}")
    return notes
