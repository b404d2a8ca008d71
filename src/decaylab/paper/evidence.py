"""How records are weighed: samples over seeds, comparisons with their noise, and a verdict.

The rules (the same for every claim):

- A comparison is *for* or *against* a claim when it is at least twice its noise away from zero, and
  *unclear* between. From three seeds on, the noise is the standard error over the seeds, and twice
  is what it is for Student's t (3 seeds: 4.5 times); with fewer it is the sampling error of the
  test set, sqrt(p (1 - p) / images) per accuracy.
- One comparison against it contradicts a claim. It is supported when every run it needs is there,
  none is against, and the mean over its comparisons is for it (where it has several parts: that of
  each part; where it is about every case: each of them positive too); else there are not enough
  runs.
- At a shortened schedule a run with decay whose exposure in the first stage is below 1 tells
  nothing: the claim has "not enough schedule", unless the others contradict it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from decaylab.data.facts import DATA_SETS
from decaylab.paper.readings import Readings, RunReading
from decaylab.paper.suite import Cell, artefact_of, cells
from decaylab.paper.tiers import tier_of

Verdict = Literal["supported", "contradicted", "not enough runs", "not enough schedule"]
Leaning = Literal["for", "against", "unclear"]
LEAST_EXPOSURE = 1.0
SEEDS_FOR_SPREAD = 3


@dataclass(frozen=True)
class Sample:
    """A quantity in the runs of one cell, by seed."""

    values: dict[int, float]
    runs: tuple[RunReading, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values.values())

    @property
    def sampling_error(self) -> float:
        """Of an accuracy on the test set of its runs."""
        images = DATA_SETS[self.runs[0].spec.data].splits["test"].count
        return math.sqrt(max(self.mean * (1 - self.mean), 0.5 / images) / images)


@dataclass(frozen=True)
class Noise:
    """One standard error, and on how many degrees of freedom it was estimated."""

    error: float = math.inf
    degrees: float = math.inf

    @property
    def reach(self) -> float:
        """As far from zero as a value must be; as certain as two standard errors that are known."""
        if not math.isfinite(self.degrees):
            return 2 * self.error
        from scipy.special import stdtrit  # slow to import, and seldom needed

        return float(stdtrit(self.degrees, statistics.NormalDist().cdf(2.0))) * self.error

    def leaning(self, value: float) -> Leaning:
        """For, against or unclear."""
        unclear = abs(value) < self.reach or value == 0
        return "unclear" if unclear else "for" if value > 0 else "against"

    @staticmethod
    def of_mean(noises: Sequence["Noise"]) -> "Noise":
        """Of the mean of values with these; the degrees by Welch and Satterthwaite."""
        squares = [noise.error**2 for noise in noises]
        total = sum(squares)
        parts = sum(sq**2 / noise.degrees for sq, noise in zip(squares, noises, strict=True))
        degrees = total**2 / parts if 0 < parts < math.inf else math.inf
        return Noise(math.sqrt(total) / len(noises), degrees)


def _noise_and_spread(terms: Sequence[tuple[float, Sample]]) -> tuple[Noise, float | None]:
    """Of a sum of factor * accuracy, and the spread over seeds, in points.

    Seeds that all samples have are taken together.
    """
    seeds = set.intersection(*(set(sample.values) for _, sample in terms))
    by_seed = [sum(100 * f * sample.values[seed] for f, sample in terms) for seed in sorted(seeds)]
    spread = statistics.stdev(by_seed) if len(by_seed) > 1 else None
    if spread is not None and len(by_seed) >= SEEDS_FOR_SPREAD:
        return Noise(spread / math.sqrt(len(by_seed)), len(by_seed) - 1), spread
    sampling = [factor * 100 * sample.sampling_error for factor, sample in terms]
    return Noise(math.hypot(*sampling)), spread


@dataclass(frozen=True)
class Comparison:
    """One test of a claim: which way it leans, and whether its schedule is long enough to tell.

    `text` says what was found. `value` is positive in the direction of the claim. `part` names the
    part of the claim it tests, where that has several.
    """

    text: str
    leaning: Leaning
    enough: bool
    runs: tuple[RunReading, ...]
    value: float = 0.0
    noise: Noise = Noise()
    spread: float | None = None
    part: str = ""


def _mean_leaning(comparisons: Sequence[Comparison]) -> Leaning:
    mean = statistics.fmean(comparison.value for comparison in comparisons)
    return Noise.of_mean([comparison.noise for comparison in comparisons]).leaning(mean)


@dataclass
class Evidence:
    """What the records hold on a claim; `missing` counts the comparisons without runs."""

    comparisons: list[Comparison] = field(default_factory=list)
    missing: int = 0
    effect: str = ""
    value: float | None = None
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # what was seen, but decides nothing
    every: bool = False  # whether the claim is about every single case

    def verdict(self) -> Verdict:
        """By the rules above."""
        judged = [comparison for comparison in self.comparisons if comparison.enough]
        if any(comparison.leaning == "against" for comparison in judged):
            return "contradicted"
        if self.missing or not self.comparisons:
            return "not enough runs"
        if len(judged) < len(self.comparisons):
            return "not enough schedule"
        if all(comparison.leaning == "for" for comparison in judged):
            return "supported"
        turned = [comparison for comparison in judged if comparison.value <= 0]
        parts = self.parts().values()
        if all(_mean_leaning(part) == "for" for part in parts) and not (self.every and turned):
            return "supported"
        return "not enough runs"

    def parts(self) -> dict[str, list[Comparison]]:
        """The comparisons by the part of the claim they test."""
        found: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            found.setdefault(comparison.part, []).append(comparison)
        return found

    @property
    def doubt(self) -> str:
        """What more seeds would tell, where all runs are there and do not; else empty."""
        if self.verdict() != "not enough runs" or self.missing or not self.comparisons:
            return ""
        turned, of = sum(c.value <= 0 for c in self.comparisons), len(self.comparisons)
        those = f"{turned} of {of} differences are negative," if turned else "it is"
        return f"{those} within the noise: more seeds would tell"

    @property
    def spread(self) -> float | None:
        """Root mean square of the comparisons' spreads over seeds."""
        spreads = [c.spread for c in self.comparisons if c.spread is not None]
        return math.sqrt(statistics.fmean(s * s for s in spreads)) if spreads else None

    @property
    def runs(self) -> dict[str, RunReading]:
        """The runs used, by id."""
        return {run.spec.id: run for c in self.comparisons for run in c.runs}

    def add(self, comparison: Comparison | None) -> None:
        """Take a comparison, or count it as missing."""
        if comparison is None:
            self.missing += 1
        else:
            self.comparisons.append(comparison)

    def told(self) -> "Evidence":
        """Itself, its effect telling what each comparison found, its value being their mean."""
        values = [c.value for c in self.comparisons if math.isfinite(c.value)]
        self.value = statistics.fmean(values) if values else None
        self.effect = "; ".join([*(c.text for c in self.comparisons), *self.unjudged])
        return self


class Bench:
    """The records at one tier, arranged for comparison."""

    def __init__(
        self, readings: Readings, tier: str, seeds: int, searched_folder: Path | None
    ) -> None:
        self.readings, self.tier = readings, tier_of(tier)
        self._seeds, self._folder = seeds, searched_folder

    def groups(self, artefact: str) -> list[tuple[dict[str, object], dict[object, Cell]]]:
        """Cells by all key columns but the last, as (key, last column -> cell).

        Groups of the same runs (on digits, where CIFAR-10 and CIFAR-100 are one) count once.
        """
        last = artefact_of(artefact).keys[-1]
        found: dict[tuple[object, ...], tuple[dict[str, object], dict[object, Cell]]] = {}
        for cell in cells(artefact, self.tier.name, self._seeds, searched_folder=self._folder):
            rest = {name: value for name, value in cell.key.items() if name != last}
            found.setdefault(tuple(rest.values()), (rest, {}))[1][cell.key[last]] = cell
        unique: dict[object, tuple[dict[str, object], dict[object, Cell]]] = {}
        for rest, by_last in found.values():
            runs = tuple(cell.runs[0].id if cell.runs else cell.label for cell in by_last.values())
            unique.setdefault(runs, (rest, by_last))
        return list(unique.values())

    def runs(self, cell: Cell) -> list[RunReading]:
        """The finished runs of a cell."""
        return self.readings.finished(cell)

    def sample(self, cell: Cell | None, metric: str = "test/accuracy") -> Sample | None:
        """A metric in the finished runs of a cell; None where there is none."""
        runs = [] if cell is None else self.runs(cell)
        values = {run.spec.seed: run.final(metric) for run in runs}
        known = {seed: value for seed, value in values.items() if value is not None}
        kept = tuple(run for run in runs if run.spec.seed in known)
        return Sample(known, kept) if known else None

    def pair(
        self, by_decay: Mapping[object, Cell], metric: str = "test/accuracy"
    ) -> tuple[Sample, Sample] | None:
        """A metric without and with decay; None where one is missing."""
        without, decayed = (self.sample(by_decay[decay], metric) for decay in (0, 1))
        return None if without is None or decayed is None else (without, decayed)

    def enough(self, runs: Iterable[RunReading], least: float = LEAST_EXPOSURE) -> bool:
        """Whether decay had the time to act in each of these runs that has decay.

        L2 under Adam and K-FAC is no matter of exposure: their preconditioner changes it.
        """
        if self.tier.name == "full":
            return True
        decayed = [
            run
            for run in runs
            if run.spec.weight_decay > 0 and (run.spec.decay != "l2" or run.spec.optimizer == "sgd")
        ]
        return all(run.first_stage_exposure() >= least for run in decayed)

    def difference(
        self, text: str, *terms: tuple[float, Sample | None], part: str = ""
    ) -> Comparison | None:
        """Sum of factor * accuracy as a comparison, in points; None where a sample is missing."""
        known = [(factor, sample) for factor, sample in terms if sample is not None]
        if len(known) < len(terms):
            return None
        value = sum(100 * factor * sample.mean for factor, sample in known)
        noise, spread = _noise_and_spread(known)
        runs = tuple(run for _, sample in known for run in sample.runs)
        said = " ".join(filter(None, [text, part, f"{value:+.2f}"]))
        leaning, enough = noise.leaning(value), self.enough(runs)
        return Comparison(said, leaning, enough, runs, value, noise, spread, part)


def named(key: dict[str, object], *columns: str) -> str:
    """Some key columns in words, for the text of a comparison.

    >>> named({"dataset": "cifar10", "network": "vgg16", "batch_norm": 1, "augment": 1})
    'cifar10 vgg16 BN+Aug'
    """
    columns = columns or tuple(key)
    words = [str(key[c]) for c in columns if c in key and c not in ("batch_norm", "augment")]
    extra = [name for c, name in (("batch_norm", "BN"), ("augment", "Aug")) if key.get(c)]
    return " ".join([*words[:2], *(["+".join(extra)] if extra else []), *words[2:]])
