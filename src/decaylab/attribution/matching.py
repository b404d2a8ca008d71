"""Two optimizers at the same decay: the second follows a path of the first, or its timescale.

Is one better for its steps, or for what its decay does to the layers? A run B that turns its layers
as far per step as A does (or has A's norms, or A's timescale of decay) differs from A in what is
left: the directions of its steps. What the match takes away of the difference was decay's, or the
learning rate's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from decaylab.attribution import words
from decaylab.attribution.progress import ArmProgress
from decaylab.attribution.reasons import Unused
from decaylab.attribution.recorded_arms import METRICS, Clock, arm_result, train_all
from decaylab.attribution.shares import Estimate, estimate, fraction, in_points
from decaylab.errors import Lacks, Mismatch, check_name
from decaylab.optim.decay import OPTIMIZERS, decay_rate
from decaylab.records import RunStore
from decaylab.records.files import without_nan
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import RunSpec

Matched = Literal["rotation", "norm", "timescale"]
SAME = ("data", "network", "width", "hidden", "batch_norm", "batch_size", "epochs", "held_out")


@dataclass(frozen=True)
class Match:
    """What became of the difference between two runs when a path was matched.

    Attributes:
        a, b: ids of the two runs, of the first seed.
        path: what was matched.
        differences: metric -> A minus B, as they are.
        left: metric -> A minus the B that follows A.
        gone: metric -> the part of the difference that the match took away.
        unused: runs that are not used, and why.
    """

    a: str
    b: str
    path: Matched
    seeds: tuple[int, ...]
    differences: dict[str, Estimate]
    left: dict[str, Estimate]
    gone: dict[str, Estimate]
    unused: tuple[Unused, ...] = ()

    def __str__(self) -> str:
        """A sentence and a table of at most 80 columns."""
        rows = [
            [
                metric,
                words.margin(self.differences[metric], in_points(metric, [])),
                words.margin(self.left[metric], in_points(metric, [])),
                "" if 0.0 in self.differences[metric] else words.fraction(self.gone[metric]),
            ]
            for metric in self.differences
        ]
        parts = [words.folded(words.match_sentence(self)), words.table(words.MATCH_HEADER, rows)]
        parts += map(words.folded, words.unused_sentences(self.unused))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        unused = [{**asdict(each), "fault": each.fault.value} for each in self.unused]
        return dict(without_nan({**asdict(self), "unused": unused}))


def matched_spec(a: RunSpec, b: RunSpec, path: Matched) -> RunSpec:
    """B as it follows A."""
    check_name("match", path, get_args(Matched))
    a, b = a.resolved(), b.resolved()
    for name in SAME:
        if getattr(a, name) != getattr(b, name):
            values = {"A": getattr(a, name), "B": getattr(b, name)}
            raise Mismatch(name, values, "give runs that differ in optimizer and decay alone")
    if path == "timescale":
        return replace(b, weight_decay=b.weight_decay * _rate(a) / _rate(b))
    source = "rotation_source" if path == "rotation" else "size_source"
    return RunSpec.from_mapping(
        {**{item.name: getattr(b, item.name) for item in fields(b)}, source: a.id}
    )


def _rate(spec: RunSpec) -> float:
    """What decay takes per step at the first learning rate: one over its timescale."""
    law = OPTIMIZERS[spec.optimizer]
    assert spec.lr is not None
    if spec.decay == "l2" and law != "sgd":
        remedy = "give a run with decoupled decay, or match the rotation or the norm"
        raise Lacks(f"L2 under {spec.optimizer}", "timescale", remedy)
    rate = decay_rate(
        spec.weight_decay, spec.decay, law=law, lr=spec.lr, momentum=spec.momentum or 0.0
    )
    if not rate:
        raise Lacks(f"run {spec.id}", "weight decay", "a timescale needs it in both runs")
    return rate


def matched_runs(
    a: RunSpec, b: RunSpec, path: Matched, seeds: Sequence[int]
) -> dict[tuple[int, str], RunSpec]:
    """Seed and name (A, B, B matched) -> the run."""
    return {
        (seed, name): spec
        for seed in seeds
        for name, spec in _three(replace(a, seed=seed), replace(b, seed=seed), path).items()
    }


def match(
    a: RunSpec,
    b: RunSpec,
    path: Matched,
    *,
    store: RunStore,
    options: WorkerOptions,
    seeds: Sequence[int] = (0, 1, 2),
    tier: str = "custom",
    silent: bool = False,
) -> Match:
    """Train A, B, and B as it follows A, as recorded runs, and compare them."""
    runs = matched_runs(a, b, path, seeds)
    clock, progress = Clock(options), ArmProgress(len(runs), silent=silent)
    for stage in (("A", "B"), ("B matched",)):
        specs = {key: spec for key, spec in runs.items() if key[1] in stage}
        train_all(specs, store, clock.options(), progress, tier)
    results = {key: arm_result(store, key[1], spec)[0] for key, spec in runs.items()}
    differences, left, gone = {}, {}, {}
    for metric in METRICS:
        lacking = {s for (s, _), result in results.items() if result.unused_for(metric) is not None}
        values = {key: r.metrics[metric] for key, r in results.items() if key[0] not in lacking}
        complete = [seed for seed in seeds if seed not in lacking]
        if not complete:
            continue
        before = [values[s, "A"] - values[s, "B"] for s in complete]
        after = [values[s, "A"] - values[s, "B matched"] for s in complete]
        differences[metric], left[metric] = estimate(before), estimate(after)
        removed = [unmatched - matched for unmatched, matched in zip(before, after, strict=True)]
        gone[metric] = fraction(removed, before)
    reasons = (result.unused_for(METRICS[0]) for result in results.values())
    first = seeds[0]
    return Match(
        runs[first, "A"].id,
        runs[first, "B"].id,
        path,
        tuple(seeds),
        differences,
        left,
        gone,
        tuple(unused for unused in reasons if unused is not None),
    )


def _three(a: RunSpec, b: RunSpec, path: Matched) -> dict[str, RunSpec]:
    return {"A": a.resolved(), "B": b.resolved(), "B matched": matched_spec(a, b, path)}
