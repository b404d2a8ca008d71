"""How records are weighed: samples over seeds, comparisons with their noise, and a verdict.

The rules (the same for every claim):

- An effect on accuracy is *for* a claim where it is positive in its direction with p <= 0.05, and
  *against* it where it is negative and p <= 0.05 after Holm's correction over the comparisons of
  the claim (`statistics`). Other quantities have a rule of their own, said in the claim's notes.
- A comparison against it contradicts a claim. (Support needs no correction: where every comparison
  has to be for a claim, more of them make support harder, not easier.) It is supported when every
  run it needs is there and every comparison is for it; where it is not about every single case,
  also when none is against and the mean over its comparisons is for it. Else it is open: there are
  "not enough runs", or all are there and leave it "undecided". Where a claim has several parts,
  each has a verdict.
- At a shortened schedule a run with decay whose exposure in the first stage is below 1 tells
  nothing: the claim has "not enough schedule", unless the others contradict it.
- Runs with superseded numerics (`superseded.toml`) and records of another kind than the claim
  speaks of are named and left out.
"""

import math
import statistics as plain_statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Literal

from decaylab.data.facts import DATA_SETS
from decaylab.paper.finished_runs import FinishedRun, FinishedRuns
from decaylab.paper.statistics import ALPHA, LEAST_DEGREES, Noise, Pool, holm, image_p_value
from decaylab.paper.suite import Cell, artefact_of, artefacts, cells
from decaylab.paper.tiers import TIERS, tier_of
from decaylab.training import RunSpec

Verdict = Literal[
    "supported", "contradicted", "not enough runs", "not enough schedule", "undecided"
]
Leaning = Literal["for", "against", "unclear"]
LEAST_EXPOSURE = 1.0
Group = tuple[dict[str, object], dict[object, Cell]]


@dataclass(frozen=True)
class Sample:
    """A quantity in the runs of one cell, by seed."""

    values: dict[int, float]
    runs: tuple[FinishedRun, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return plain_statistics.fmean(self.values.values())

    @property
    def geometric_mean(self) -> float:
        """Mean of the logarithms over seeds, as a number again."""
        return plain_statistics.geometric_mean(self.values.values())

    @property
    def sampling_deviation(self) -> float:
        """Of an accuracy in points: what a test set of as many images brings, whatever the seed."""
        images = DATA_SETS[self.runs[0].spec.data].splits["test"].count
        return 100 * math.sqrt(max(self.mean * (1 - self.mean), 0.5 / images) / images)


@dataclass(frozen=True)
class Comparison:
    """One test of a claim: which way it leans, and whether its schedule is long enough to tell.

    Attributes:
        text: what was found.
        enough: whether decay had the time to act.
        runs: what it was found in.
        value: positive in the direction of the claim.
        p: of a true value of zero, two-sided; None if a rule of the claim decides.
        rule: what that rule says.
        noise: of the value; None if a rule decides.
        spread: standard deviation over seeds.
        part: the part of the claim it tests, where that has several.
        needed: whether support hangs on it; else it can only contradict.
        headline: the number to show, where it is not `value`.
    """

    text: str
    enough: bool
    runs: tuple[FinishedRun, ...]
    value: float = 0.0
    p: float | None = None
    rule: Leaning = "unclear"
    noise: Noise | None = None
    spread: float | None = None
    part: str = ""
    needed: bool = True
    headline: float | None = None

    def leaning(self, adjusted: float | None = None) -> Leaning:
        """For, against or unclear; a p-value that was adjusted decides about against."""
        if self.p is None:
            return self.rule
        if self.value > 0:
            return "for" if self.p <= ALPHA else "unclear"
        against = (self.p if adjusted is None else adjusted) <= ALPHA and self.value < 0
        return "against" if against else "unclear"


@dataclass
class Evidence:
    """What the records hold on a claim; `missing` counts the comparisons without runs, by part."""

    comparisons: list[Comparison] = field(default_factory=list)
    missing_by_part: dict[str, int] = field(default_factory=dict)
    effect: str = ""
    value: float | None = None
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # what was seen, but decides nothing
    every: bool = False  # whether the claim is about every single case

    @property
    def missing(self) -> int:
        """Comparisons without runs."""
        return sum(self.missing_by_part.values())

    @property
    def lacking(self) -> tuple[int, int]:
        """How many comparisons lack runs, and how many have too short a schedule."""
        return self.missing, sum(not c.enough for c in self.comparisons if c.needed)

    def leanings(self) -> list[tuple[Comparison, Leaning]]:
        """Each comparison with its leaning, corrected for how many are judged."""
        judged = [c for c in self.comparisons if c.p is not None and c.enough]
        adjusted = dict(zip(map(id, judged), holm([c.p or 0.0 for c in judged]), strict=True))
        return [(c, c.leaning(adjusted.get(id(c)))) for c in self.comparisons]

    def against(self) -> list[Comparison]:
        """The comparisons that are against the claim."""
        return [comparison for comparison, leaning in self.leanings() if leaning == "against"]

    def verdicts(self) -> dict[str, Verdict]:
        """A verdict for each part of the claim; one without a name where it has none."""
        leanings = self.leanings()
        parts = [*(c.part for c in self.comparisons), *self.missing_by_part]
        return {
            part: self._verdict(
                [(c, leaning) for c, leaning in leanings if c.part == part],
                self.missing_by_part.get(part, 0),
            )
            for part in dict.fromkeys(parts)
        }

    def verdict(self) -> Verdict:
        """Of the whole claim: contradicted by any part, supported if every part is."""
        verdicts = self.verdicts().values()
        for verdict in ("contradicted", "not enough runs", "not enough schedule", "undecided"):
            if verdict in verdicts:
                return verdict
        return "supported" if verdicts else "not enough runs"

    def _verdict(self, leanings: Sequence[tuple[Comparison, Leaning]], missing: int) -> Verdict:
        if any(leaning == "against" and c.enough for c, leaning in leanings):
            return "contradicted"
        needed = [(c, leaning) for c, leaning in leanings if c.needed]
        if missing or not needed:
            return "not enough runs"
        if not all(c.enough for c, _ in needed):
            return "not enough schedule"
        if all(leaning == "for" for _, leaning in needed):
            return "supported"
        noises = [c.noise for c, _ in needed if c.noise is not None]
        if not self.every and len(noises) == len(needed):
            mean = plain_statistics.fmean(c.value for c, _ in needed)
            if mean > 0 and Noise.of_mean(noises).p_value(mean) <= ALPHA:
                return "supported"
        return "undecided"

    @property
    def doubt(self) -> str:
        """What more seeds would tell, where all runs are there and do not; else empty."""
        tested = [c for c in self.comparisons if c.p is not None]
        if self.verdict() != "undecided" or not tested:
            return ""
        turned, total = sum(c.value <= 0 for c in tested), len(tested)
        those = f"{turned} of {total} differences are negative," if turned else "it is"
        return f"{those} within the noise: more seeds would tell"

    @property
    def spread(self) -> float | None:
        """Root mean square of the comparisons' spreads over seeds."""
        spreads = [c.spread for c in self.comparisons if c.spread is not None]
        return math.sqrt(plain_statistics.fmean(s * s for s in spreads)) if spreads else None

    @property
    def runs(self) -> dict[str, FinishedRun]:
        """The runs used, by id."""
        return {run.spec.id: run for c in self.comparisons for run in c.runs}

    def by_part(self) -> dict[str, list[Comparison]]:
        """The comparisons by the part of the claim they test."""
        parts: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            parts.setdefault(comparison.part, []).append(comparison)
        return parts

    def add(self, comparison: Comparison | None, part: str = "") -> None:
        """Take a comparison, or count it as missing from a part."""
        if comparison is None:
            self.lack(part)
        else:
            self.comparisons.append(comparison)

    def lack(self, part: str = "") -> None:
        """Count a comparison as missing."""
        self.missing_by_part[part] = self.missing_by_part.get(part, 0) + 1

    def summarised(self) -> "Evidence":
        """Itself, its effect telling what each comparison found, its value being their mean."""
        shown = [
            c.value if c.headline is None else c.headline for c in self.comparisons if c.needed
        ]
        values = [value for value in shown if math.isfinite(value)]
        self.value = plain_statistics.fmean(values) if values else None
        texts = dict.fromkeys(c.text for c in self.comparisons if c.text)
        self.effect = "; ".join([*texts, *self.unjudged])
        return self


class Bench:
    """The records at one tier, arranged for comparison."""

    def __init__(
        self, finished_runs: FinishedRuns, tier: str, seeds: int, searched_folder: Path | None
    ) -> None:
        self.finished_runs, self.tier = finished_runs, tier_of(tier)
        self._seeds, self._folder = seeds, searched_folder
        self.left_out: dict[str, str] = {}  # run -> why it decides nothing

        self._pools: dict[tuple[str, str], Pool | None] = {}

    def cells(self, artefact: str) -> list[Cell]:
        """The cells of an artefact."""
        return cells(artefact, self.tier.name, self._seeds, searched_folder=self._folder)

    def groups(self, artefact: str) -> list[Group]:
        """Cells by all key columns but the last, as (key, last column -> cell).

        Groups of the same runs (on digits, where CIFAR-10 and CIFAR-100 are one) count once.
        """
        last = artefact_of(artefact).keys[-1]
        by_key: dict[tuple[object, ...], Group] = {}
        for cell in self.cells(artefact):
            rest = {name: value for name, value in cell.key.items() if name != last}
            by_key.setdefault(tuple(rest.values()), (rest, {}))[1][cell.key[last]] = cell
        unique: dict[tuple[str, ...], Group] = {}
        for group in by_key.values():
            runs = (cell.runs[0].id if cell.runs else cell.label for cell in group[1].values())
            unique.setdefault(tuple(runs), group)
        return list(unique.values())

    def runs(self, cell: Cell) -> list[FinishedRun]:
        """The finished runs of a cell, without those of superseded numerics."""
        finished = [run for spec in cell.runs if (run := self.finished_runs.of(spec)) is not None]
        self.left_out |= {run.spec.id: run.superseded for run in finished if run.superseded}
        return [run for run in finished if not run.superseded]

    def leave_out(self, runs: Iterable[FinishedRun], why: str) -> None:
        """Note runs that decide nothing."""
        self.left_out |= {run.spec.id: why for run in runs}

    def sample(self, cell: Cell | None, metric: str = "test/accuracy") -> Sample | None:
        """A metric in the finished runs of a cell; None if there is none."""
        runs = [] if cell is None else self.runs(cell)
        values = {run.spec.seed: run.final(metric) for run in runs}
        known = {seed: value for seed, value in values.items() if value is not None}
        measured = tuple(run for run in runs if run.spec.seed in known)
        return Sample(known, measured) if known else None

    def pair(
        self, by_decay: Mapping[object, Cell], metric: str = "test/accuracy"
    ) -> tuple[Sample, Sample] | None:
        """A metric without and with decay; None if one is missing."""
        without, decayed = (self.sample(by_decay[decay], metric) for decay in (0, 1))
        return None if without is None or decayed is None else (without, decayed)

    def enough(self, runs: Iterable[FinishedRun], least: float = LEAST_EXPOSURE) -> bool:
        """Whether decay had the time to act in each of these runs that has decay.

        L2 under Adam and K-FAC is not a matter of exposure: their preconditioner changes it.
        """
        if self.tier.whole:
            return True
        return all(
            run.first_stage_exposure() >= least
            for run in runs
            if run.spec.weight_decay > 0 and (run.spec.decay != "l2" or run.spec.optimizer == "sgd")
        )

    def difference(
        self,
        text: str,
        *terms: tuple[float, Sample | None],
        part: str = "",
        within: float | None = None,
    ) -> Comparison | None:
        """Sum of factor * accuracy as a comparison, in points; None if a sample is missing.

        With `within`, the claim is that the sum is smaller than so many points on either side:
        `value` is by how much.
        """
        known = [(factor, sample) for factor, sample in terms if sample is not None]
        if len(known) < len(terms):
            return None
        effect = sum(100 * factor * sample.mean for factor, sample in known)
        value = effect if within is None else within - abs(effect)
        noise = Noise.of_terms((f, self.pool(sample), len(sample.runs)) for f, sample in known)
        expected = 0.0 if within is None else math.copysign(within, effect) / 100
        p = max(noise.p_value(value), _on_images(known, expected))
        runs = tuple(run for _, sample in known for run in sample.runs)
        summary = " ".join(filter(None, [text, part, f"{effect:+.2f}"]))
        return Comparison(
            summary,
            self.enough(runs),
            runs,
            value,
            p,
            noise=noise,
            spread=_spread(known),
            part=part,
        )

    def pool(self, sample: Sample) -> Pool:
        """One seed's spread for a sample: of its data set and optimizer, else of its data set.

        Where no cell was run with several seeds, the sampling error of the test set stands in.
        """
        spec = sample.runs[0].spec
        for key in ((spec.data, spec.optimizer), (spec.data, "")):
            if key not in self._pools:
                self._pools[key] = self._pooled(*key)
            pool = self._pools[key]
            if pool is not None:
                return pool
        return Pool(f"test images {sample.mean:g}", sample.sampling_deviation)

    def _pooled(self, data: str, optimizer: str) -> Pool | None:
        values = [
            accuracies
            for spec, accuracies in self._replicated
            if spec.data == data and optimizer in ("", spec.optimizer)
        ]
        pool = Pool.over(f"{data} {optimizer}".strip(), values)
        return pool if pool.degrees >= LEAST_DEGREES else None

    @cached_property
    def _replicated(self) -> list[tuple[RunSpec, list[float]]]:
        """All cells with several seeds, of all tiers on the same kind of data, in points."""
        tiers = [t.name for t in TIERS.values() if t.on_digits == self.tier.on_digits]
        names = [artefact.name for artefact in artefacts().values() if artefact.percent]
        chosen: dict[str, tuple[RunSpec, list[float]]] = {}
        for tier, name in product(tiers, names):
            for cell in cells(name, tier, self._seeds, searched_folder=self._folder):
                begun = [spec for spec in cell.runs if self.finished_runs.exists(spec)]
                if len(begun) > 1 and begun[0].id not in chosen:
                    runs = filter(None, map(self.finished_runs.of, begun))
                    values = [run.final("test/accuracy") for run in runs if not run.superseded]
                    accuracies = [100 * value for value in values if value is not None]
                    chosen[begun[0].id] = begun[0], accuracies
        return [entry for entry in chosen.values() if len(entry[1]) > 1]


def _on_images(terms: Sequence[tuple[float, Sample]], expected: float) -> float:
    """The p-value on the same test images; 0, which decides nothing, where some have no hits."""
    by_term = []
    first = terms[0][1].runs[0].manifest.test_hits
    for factor, sample in terms:
        hits = [run.manifest.test_hits for run in sample.runs]
        known = [each for each in hits if first and each and each.comparable(first)]
        if len(known) < len(hits):
            return 0.0
        by_term.append((factor, [each.unpack() for each in known]))
    return image_p_value(by_term, expected)


def _spread(terms: Sequence[tuple[float, Sample]]) -> float | None:
    """Standard deviation of an effect over the seeds that all samples have, in points."""
    seeds = set.intersection(*(set(sample.values) for _, sample in terms))
    by_seed = [sum(100 * f * sample.values[seed] for f, sample in terms) for seed in sorted(seeds)]
    return plain_statistics.stdev(by_seed) if len(by_seed) > 1 else None


def named(key: dict[str, object], *columns: str) -> str:
    """Some key columns in words, for the text of a comparison.

    >>> named({"dataset": "cifar10", "network": "vgg16", "batch_norm": 1, "augment": 1})
    'cifar10 vgg16 BN+Aug'
    """
    columns = columns or tuple(key)
    words = [str(key[c]) for c in columns if c in key and c not in ("batch_norm", "augment")]
    extra = [name for c, name in (("batch_norm", "BN"), ("augment", "Aug")) if key.get(c)]
    return " ".join([*words[:2], *(["+".join(extra)] if extra else []), *words[2:]])
