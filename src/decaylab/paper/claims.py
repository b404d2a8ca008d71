"""The paper's empirical claims E1-E17, judged from records alone.

`evidence.py` has the rules: a claim is never supported without the runs it needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from decaylab.paper import accuracy_claims as accuracy
from decaylab.paper import mechanism_claims as mechanism
from decaylab.paper.evidence import Bench, Evidence, Verdict
from decaylab.paper.finished_runs import FinishedRuns
from decaylab.paper.tiers import stand_ins


@dataclass(frozen=True)
class Rule:
    """How a claim is judged.

    Attributes:
        where: the table or figure.
        claim: what the paper says, in our words.
        sentence: the sentence of the paper that it stands for; "..." where it is shortened.
        supported: what supports it, besides that every run is there.
        contradicted: what contradicts it.
        weigh: the function that applies the rule.
    """

    where: str
    claim: str
    sentence: str
    supported: str
    contradicted: str
    weigh: Callable[[Bench], Evidence]


CLAIMS: dict[str, Rule] = {
    "E1": Rule(
        "Table 1",
        "weight decay raises test accuracy in all 32 pairs",
        "In all experiments, weight decay regularization consistently improved the performance",
        "each of the 32 effects is significantly positive",
        "an effect is negative, and significantly so after Holm's correction for 32",
        accuracy.e1,
    ),
    "E2": Rule(
        "Fig. 1",
        "weight decay is at least as good as L2 where they differ",
        "[weight decay] was more effective than L2 regularization in cases where they differ",
        "weight decay's mean lead over L2 (L2 with its own search) is significantly positive",
        "L2 is significantly ahead in a cell after Holm's correction",
        accuracy.e2,
    ),
    "E3": Rule(
        "Table 1",
        "without BN, K-FAC gains most from weight decay",
        "weight decay gave an especially strong performance boost to the K-FAC optimizer when BN"
        " was disabled",
        "the smaller gain of K-FAC-F and -G is on average significantly above the larger one of SGD"
        " and Adam",
        "it is significantly below it on a network after Holm's correction",
        accuracy.e3,
    ),
    "E4": Rule(
        "Fig. 2",
        "BN nets, SGD and Adam: decay of the layers with BN brings most of the effect, that of the"
        " last layer does not matter",
        "Most of the generalization effect of weight decay is due to applying it to layers with BN"
        " (caption); whether weight decay was applied to the top (fully connected) layer did not"
        " appear to matter (text)",
        "caption: in each cell wd-conv closes significantly more than half of the gap, wd-fc less;"
        " text: wd-fc differs from none, and wd-all from wd-conv, by significantly less than a"
        " point",
        "the opposite of either, in a cell, after Holm's correction",
        accuracy.e4,
    ),
    "E5": Rule(
        "Fig. 3",
        "without decay the first layer's effective lr falls from the start over the first stage;"
        " with decay it is flat",
        "Without weight decay, the normalization effects cause an additional effective learning"
        " rate decay ..., which reduces the effective learning rate by a factor of 10 over the"
        " first 50 epochs. By contrast, when weight decay is applied, the effective learning rate"
        " remains more or less constant in each stage",
        "under SGD, its largest over its smallest value from the initialisation through the first"
        " stage is at least twice as large without decay as with it",
        "it is no larger without decay",
        mechanism.e5,
    ),
    "E6": Rule(
        "Fig. 4",
        "wn-conv closes almost all of the gap, wd-fc + wn-conv all of it",
        "this effective learning rate transfer scheme (wn-conv) eliminates almost the entire"
        " generalization gap; it is fully closed by also adding weight decay to the top layer",
        "wn-conv closes 70 % of a gap that is significantly there, with wd-fc 85 %",
        "wn-conv closes less, and is significantly below weight decay after Holm's correction",
        accuracy.e6,
    ),
    "E7": Rule(
        "Fig. 5",
        "the K-FAC GN norm goes with the Jacobian norm and with the generalization gap",
        "the K-FAC GN norm is highly correlated with both the squared Frobenius norm of the"
        " input-output Jacobian and the generalization gap",
        "each rank correlation over the nets at 100 % training accuracy is significantly positive",
        "one is significantly negative after Holm's correction",
        mechanism.e7,
    ),
    "E8": Rule(
        "Table 2",
        "weight decay shrinks the squared Jacobian norm 10-30 times under K-FAC-G, 3-4 under SGD",
        "weight decay reduced the Jacobian norm by a much larger factor when K-FAC was used as the"
        " optimizer than when SGD was used (and the factors of the table)",
        "on each network both factors are within 2x of the paper's, above or below, and K-FAC-G's"
        " is 1.5x SGD's",
        "on a network a factor is 4x off the paper's, or K-FAC-G's is no larger than SGD's",
        mechanism.e8,
    ),
    "E9": Rule(
        "Fig. 6",
        "K-FAC: wd-fc has the largest effect, wd-conv helps too, more for K-FAC-F",
        "Applying it to the non-BN layers had the largest effect ... However, applying weight decay"
        " to the BN layers also led to significant gains, especially for K-FAC-F",
        "each of the three on average, significantly; a gain also over a baseline at the learning"
        " rate of the decayed runs",
        "one of them significantly turned in a cell after Holm's correction",
        accuracy.e9,
    ),
    "E10": Rule(
        "Fig. 7",
        "tr F of the first layer falls 10^4 times in 50 epochs, tr G changes about 2 times",
        "While the norm of F decays by 4 orders of magnitude over the first 50 epochs, the norm of"
        " G increases by only a factor of 2",
        "on ResNet32, with decay and without it (the paper does not say which), BN in train mode,"
        " from the initialisation over the first 50 of 100 epochs (the median over seeds): tr F"
        " falls at least 100x, and 10x more than tr G changes",
        "tr G changes at least as much as tr F falls, with decay or without it",
        mechanism.e10,
    ),
    "E11": Rule(
        "Table 3",
        "large batches lose accuracy without decay; decay closes most of it",
        "Weight decay closed most of the generalization gaps ... between small and large batches;"
        " We tune weight decay factor and learning rate using held-out validation set",
        "over all rows together, the loss from batch 128 to 2000 shrinks significantly, by more"
        " than half; learning rate and decay searched at each batch size",
        "a loss is significantly negative or larger with decay, or less than half of it closes",
        accuracy.e11,
    ),
    "E12": Rule(
        "Fig. 9",
        "K-FAC-G reaches training loss 1e-4 within 10 epochs and wins in wall-clock time",
        "the training loss decreases to 1e-4 within 10 epochs with K-FAC-G; Although K-FAC based"
        " algorithms take more time for each epoch, [the figure] still shows wall-clock time"
        " improvements over the baselines",
        "without BN, by a pass over the training set after each epoch, on both networks: 1e-4 by"
        " epoch 10; and fewer seconds to 1e-4 than SGD and Adam, each alone on one device",
        "later, at a learning rate and KL clip that were searched; SGD or Adam sooner",
        mechanism.e12,
    ),
    "E13": Rule(
        "Table 1",
        "weight decay closes most of the gap between first- and second-order optimizers",
        "Weight decay closed most of the generalization gaps between first- and second-order"
        " optimizers",
        "over all rows with BN together, the spread over optimizers shrinks significantly, by more"
        " than half",
        "it grows significantly in a row, or shrinks by significantly less than half",
        accuracy.e13,
    ),
    "E14": Rule(
        "Fig. 8",
        "all nets of Table 1 end at 100 % training accuracy",
        "Note that training accuracies of all the models are 100 % in the end of the training",
        "all 64 cells end at 99.9 % or more, in train mode on the images as they are trained on",
        "a cell ends below 99.5 % at the full schedule, which would not be printed as 100 %",
        mechanism.e14,
    ),
    "E15": Rule(
        "App. G.1",
        "large batch: without decay the training loss does not reach zero",
        "we observe that the training loss cannot decrease to zero if weight decay is not used",
        "at batch 2000 it ends above 0.01 without decay in each row, in train mode on images as"
        " they are trained on",
        "it ends below 0.001 in a row",
        mechanism.e15,
    ),
    "E16": Rule(
        "App. G.3, Fig. 9",
        "K-FAC-G converges ahead of K-FAC-F",
        "K-FAC-G outperforms both K-FAC-F and other baselines in term of optimization per epoch,"
        " and compute time",
        "without BN, it reaches 1e-4 in fewer epochs, and in fewer seconds, on both networks, at"
        " settings that were searched for both",
        "K-FAC-F is ahead in either on a network",
        mechanism.e16,
    ),
    "E17": Rule(
        "Sec. 4.2, Fig. 5",
        "the Jacobian norm goes with the generalization gap",
        "the Jacobian norm correlates strongly with the generalization gap",
        "each rank correlation over the nets at 100 % training accuracy is significantly positive",
        "one is significantly negative after Holm's correction",
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
        verdict: supported, contradicted, not enough runs, not enough schedule or undecided.
        effect: what was found, in a sentence; "" if nothing was.
        value: the headline number of `effect`: points of accuracy, a ratio, a correlation.
        spread: standard deviation over seeds of a comparison; None with one seed.
        n: runs used.
        tier: whose records.
        data: the data sets they are on.
        notes: what to bear in mind.
        parts: the verdict of each part (a network, a sentence), where the claim has several.
        lacking: how many comparisons lack runs, and how many have too short a schedule.
        against: what was found against it.
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
    lacking: tuple[int, int] = (0, 0)
    against: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The verdict; `not run` where there is not a single run."""
        return self.verdict if self.n or self.effect else "not run"

    @property
    def status_by_part(self) -> str:
        """The same, part by part where parts differ."""
        if self.status == "not run" or len(set(self.parts.values())) < 2:
            return self.status
        return "; ".join(f"{part}: {verdict}" for part, verdict in self.parts.items())


def judge(
    finished_runs: FinishedRuns,
    tier: str,
    seeds: int = 10,
    searched_folder: Path | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> list[Claim]:
    """All claims, from the finished runs of a tier with seeds 0 to `seeds` - 1.

    `tell` is called with each stage, in words. What searches found is looked for
    in `searched` of the folder of runs, unless told otherwise.
    """
    folder = searched_folder or finished_runs.store.root / "searched"
    bench = Bench(finished_runs, tier, seeds, folder)
    return [_judged(bench, name, rule, tell) for name, rule in CLAIMS.items()]


def _judged(bench: Bench, name: str, rule: Rule, tell: Callable[[str], None]) -> Claim:
    tell(f"judging {name} at tier {bench.tier.name}")
    bench.left_out.clear()
    evidence = rule.weigh(bench)
    runs = evidence.runs
    return Claim(
        id=name,
        where=rule.where,
        claim=rule.claim,
        verdict=evidence.verdict(),
        effect=evidence.effect,
        value=evidence.value,
        spread=evidence.spread,
        n=len(runs),
        tier=bench.tier.name,
        data=" and ".join(sorted({run.spec.data for run in runs.values()})),
        notes=(*_context(bench, evidence), *evidence.notes, *filter(None, [evidence.doubt])),
        parts=evidence.verdicts(),
        lacking=evidence.lacking,
        against=tuple(dict.fromkeys(c.text for c in evidence.against() if c.enough)),
    )


def _context(bench: Bench, evidence: Evidence) -> list[str]:
    """How these runs differ from the paper's, and what is missing."""
    runs, notes = list(evidence.runs.values()), []
    missing, short = evidence.lacking
    needed = sum(comparison.needed for comparison in evidence.comparisons)
    if missing:
        notes.append(f"{missing} of {missing + needed} comparisons lack runs")
    if short:
        notes.append(f"in {short} of {needed} comparisons the schedule is too short")
    if runs and bench.tier.on_digits:
        notes.append("on digits with small stand-in nets, not on the paper's data")
        notes.append(f"names are the paper's, the nets are {stand_ins(run.spec for run in runs)}")
    elif runs and not bench.tier.whole:
        notes.append(f"at {bench.tier.schedule}")
    seeds = {run.spec.seed for run in runs}
    if len(seeds) == 1:
        notes.append("one seed")
    for why in dict.fromkeys(bench.left_out.values()):
        names = [name for name, other in bench.left_out.items() if other == why]
        notes.append(f"left out, since {why}: {', '.join(names)}")
    return notes
