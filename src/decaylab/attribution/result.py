"""What an attribution found, as a value: shares by metric, arms, and what could not be used."""

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decaylab.attribution import words
from decaylab.attribution.arms import WITH, WITHOUT, ArmResult, Plan
from decaylab.attribution.reasons import Unused
from decaylab.attribution.shares import Estimate, Shares, decompose, seeds_to_tell
from decaylab.errors import check_name
from decaylab.records.files import without_nan
from decaylab.training.held_layers import LayerNote
from decaylab.training.paths import LayerPaths


@dataclass(frozen=True)
class Attribution:
    """How much of decay's effect goes through each path, by experiment.

    Attributes:
        plan: the paths that were varied and the arms.
        layers: the held layers.
        notes: layers that are not held, and why.
        seeds, steps: what was trained.
        results: every arm of every seed.
        metric: the metric that `total` and `shares` are of.
        paths: seed -> arm -> what each held layer went through.
        others: the names of the parameters that decay and are not held.
    """

    plan: Plan
    layers: tuple[str, ...]
    notes: Mapping[str, LayerNote]
    seeds: tuple[int, ...]
    steps: int
    results: tuple[ArmResult, ...]
    metric: str
    paths: Mapping[int, Mapping[str, LayerPaths]]
    others: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """The metrics there are, the main one first."""
        names = dict.fromkeys(name for result in self.results for name in result.metrics)
        return sorted(names, key=lambda name: name != self.metric)

    @property
    def total(self) -> Estimate:
        """The effect of decay on the main metric."""
        return self.shares_of(self.metric).total

    @property
    def shares(self) -> Mapping[str, Estimate]:
        """Fractions of `total`: "rotation", "size", "interaction", ...; see `Shares`."""
        return self.shares_of(self.metric).shares

    @property
    def unused(self) -> list[Unused]:
        """The arms that are not used for the main metric, and why."""
        reasons = (result.unused_for(self.metric) for result in self.results)
        return [unused for unused in reasons if unused is not None]

    def shares_of(self, metric: str) -> Shares:
        """The decomposition of a metric."""
        if self.metrics:  # no arm has any where all diverged
            check_name("metric", metric, self.metrics)
        return decompose(metric, self.plan, self.results)

    def sentences(self) -> list[str]:
        """What to know beside the tables: layers not held, arms not used, doubts."""
        shares = self.shares_of(self.metric)
        doubts = []
        if self._decay_lost:
            doubts.append(words.DECAY_LOST)
        elif shares.doubt is not None:
            seeds = seeds_to_tell(shares.total)
            doubts.append(words.doubt_sentence(shares.doubt, self.metric, seeds))
        return [
            *doubts,
            *words.unused_sentences(self.unused),
            *(words.note_sentence(layer, note) for layer, note in self.notes.items()),
            *([words.others_sentence(self.others)] if self.others else []),
        ]

    @property
    def _decay_lost(self) -> bool:
        """Whether sizes are the same with decay and without, in every seed that has both."""
        both = [arms for arms in self.paths.values() if {WITH.name, WITHOUT.name} <= arms.keys()]
        return bool(both) and all(
            torch.equal(arms[WITH.name].sizes, arms[WITHOUT.name].sizes) for arms in both
        )

    def __str__(self) -> str:
        """The answer as text of at most 80 columns: a sentence, the shares, the arms."""
        shares = self.shares_of(self.metric)
        parts = [words.folded(words.sentence(shares))]
        parts.append(words.table(words.share_header(shares), words.share_rows(shares)))
        parts.append(words.table(words.ARM_HEADER, words.arm_rows(self.results, shares)))
        parts += [words.folded(words.sentence(self.shares_of(m))) for m in self.metrics[1:]]
        if sentences := self.sentences():
            parts.append("\n".join(words.folded(text) for text in sentences))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the paths, as plain values for JSON, which has no nan: they are None."""
        plain: dict[str, Any] = {
            "metric": self.metric,
            "sentence": words.sentence(self.shares_of(self.metric)),
            "paths": list(self.plan.paths),
            "layers": list(self.layers),
            "others": list(self.others),
            "seeds": list(self.seeds),
            "steps": self.steps,
            "metrics": {name: _plain(self.shares_of(name)) for name in self.metrics},
            "arms": [asdict(result) for result in self.results],
            "unused": [{**asdict(u), "fault": u.fault.value} for u in self.unused],
            "notes": {layer: note.value for layer, note in self.notes.items()},
        }
        return dict(without_nan(plain))

    def plot(self) -> Any:
        """The effects on every metric as bars with intervals, as a matplotlib figure.

        A notebook shows it; `figure.savefig("decay.png")` writes it. Needs the extra `report`.
        """
        return _pages().attribution_figure(self)

    def report(self, path: str | Path = "attribution.html", title: str = "") -> Path:
        """Write everything with its figures as one offline HTML page; returns its path.

        Needs the extra `report`.
        """
        _pages().write_attribution(Path(path), self, title)
        return Path(path)

    def worst_errors(self) -> dict[str, float]:
        """Path -> the largest relative error of any arm that followed it, in any layer."""
        worst: dict[str, float] = {}
        for result in self.results:
            for path, layers in result.errors.items():
                worst[path] = max(worst.get(path, 0.0), *layers.values())
        return worst

    def reference(self, seed: int) -> LayerPaths:
        """The paths of the run with decay."""
        return self.paths[seed][WITH.name]


def _pages() -> Any:
    return importlib.import_module("decaylab.report.attributions")  # it stands above this


def _plain(shares: Shares) -> dict[str, Any]:
    return {**asdict(shares), "doubt": shares.doubt and shares.doubt.value}
