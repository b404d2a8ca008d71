"""The verdict: whether decay helped, which mechanism it acts through, and what follows."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.comparable import comparable, same_training
from decaylab.diagnosis.consequences import consequences
from decaylab.diagnosis.effects import Change, Motion, Spread, motion, pooled
from decaylab.diagnosis.mechanisms import Finding, distinct, findings
from decaylab.diagnosis.outcome import Outcome, outcome_of
from decaylab.diagnosis.reasons import Because, Reason, Verdict, because, has
from decaylab.diagnosis.runs import Comparison, Run, read_run
from decaylab.errors import DecaylabError, Lacks
from decaylab.records.sources import Source


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What decay does in a run, or in several seeds of it.

    Attributes:
        runs, baselines: their names. places: where commands find them.
        outcome: whether decay helped.
        first: what to know before anything else, each with the run it is about ("": both).
        findings: the three mechanisms, in the paper's order.
        follows: what follows from all findings together.
        skipped: layers that could not be judged, with the reason.
        seeds: the diagnoses of single seeds, if there are several.
        compared: what was read, for figures: each run with the baseline it was judged against.
    """

    runs: tuple[str, ...]
    baselines: tuple[str, ...]
    places: Places
    outcome: Outcome
    first: tuple[tuple[str, Because], ...]
    findings: tuple[Finding, ...]
    follows: tuple[Because, ...]
    skipped: dict[str, Because]
    seeds: tuple["Diagnosis", ...] = ()
    decays: bool = True
    compared: tuple[tuple[Run, Run | None], ...] = field(default=(), compare=False)

    def __getitem__(self, mechanism: str) -> Finding:
        """The finding of a mechanism, by how its name begins: `diagnosis["effective l"]`."""
        for finding in self.findings:
            if finding.mechanism.startswith(mechanism):
                return finding
        raise KeyError(mechanism)

    @cached_property
    def motions(self) -> tuple[Motion, ...]:
        """How every layer turns (of the first seed)."""
        compared = Comparison(*self.compared[0])
        run, per_epoch = compared.run, compared.run.recording.meta.steps_per_epoch
        judged = [layer for layer in run.layers.values() if not layer.skipped and layer.norms]
        return tuple(motion(x, compared.other(x), run.steps, per_epoch) for x in judged)

    @property
    def troubles(self) -> tuple[Because, ...]:
        """The reasons of `first`, whichever run they are about."""
        return tuple(item for _, item in self.first)

    def __str__(self) -> str:
        from decaylab.diagnosis.card import text_of

        return text_of(self)

    def __repr__(self) -> str:
        verdicts = "; ".join(f"{f.mechanism}: {f.verdict}" for f in self.findings)
        return f"<Diagnosis of {', '.join(self.runs)}: {verdicts}>"

    def __rich__(self) -> Any:
        """What `rich.print` shows: the card with every layer."""
        from decaylab.diagnosis.card import card

        return card(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from decaylab.diagnosis.card import html_of

        return html_of(self)

    def plot(self) -> Any:
        """The recorded curves behind the verdicts, as a matplotlib figure.

        A notebook shows it; `figure.savefig("decay.png")` writes it. Needs the extra `report`.
        """
        return _pages().diagnosis_figure(self)

    def report(self, path: str | Path = "diagnosis.html") -> Path:
        """Write everything with its curves as one offline HTML page; returns its path.

        Needs the extra `report`.
        """
        written: Path = _pages().write_page(self, Path(path))
        return written

    def to_markdown(self) -> str:
        """The whole result as Markdown."""
        from decaylab.diagnosis.layout import markdown

        return markdown(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, and the sentences; None where a number is not known."""
        from decaylab.diagnosis.layout import plain

        return plain(self)


def _pages() -> Any:
    """What draws figures and pages. It stands above this package, so it is looked up when asked."""
    return importlib.import_module("decaylab.report.diagnoses")


def diagnose(
    run: Source | Sequence[Source], baseline: Source | Sequence[Source] | None = None
) -> Diagnosis:
    """Say whether weight decay helped, and which of the paper's three mechanisms it acted through.

    `run` and `baseline` (the same training without decay): a run folder, a folder that
    `watch(folder=...)` wrote, a `Watch`, its records, or lists of these: several seeds. Reads
    records only; measures nothing.

    With a baseline, effective learning rates, Jacobian norms and effective dampings are compared.
    Without one, the first and the third are compared with a reconstruction of the norms without
    decay (`laws.dynamics`); the second cannot be judged. Thresholds: `rules.Rules`.
    """
    sources, others = _listed(run), _listed(baseline)
    if not sources:
        raise Lacks("the list of runs", "run", "give one or more (a pattern may match no folder)")
    several = len(sources) > 1 or len(others) > 1
    mine = [
        read_run(source, f"run {i}" if several else "the watched run")
        for i, source in enumerate(sources, start=1)
    ]
    theirs = [
        read_run(source, f"baseline {i}" if several else "the baseline")
        for i, source in enumerate(others, start=1)
    ]
    _check_distinct([*sources, *others], [*mine, *theirs])
    return _several(mine, theirs) if several else _one(mine[0], theirs[0] if theirs else None)


def _check_distinct(sources: Sequence[Source], runs: Sequence[Run]) -> None:
    """Refuse a run that is given twice: as its own baseline, or as two seeds."""
    seen: set[Path | int] = set()
    for source, run in zip(sources, runs, strict=True):
        folder = run.recording.meta.folder
        key = id(source) if folder is None else folder.resolve()
        if key in seen:
            raise DecaylabError(
                f"{run.name} is given twice, but a run cannot be its own baseline or second seed:"
                " record each run in its own folder"
            )
        seen.add(key)


def _listed(sources: Source | Sequence[Source] | None) -> list[Source]:
    if isinstance(sources, list | tuple):
        return list(sources)
    return [] if sources is None else [sources]


def _one(run: Run, candidate: Run | None) -> Diagnosis:
    first = [(run.name, trouble) for trouble in run.troubles]
    baseline = candidate
    if candidate is not None:
        first += [(candidate.name, trouble) for trouble in candidate.troubles]
        why_not, differs = comparable(run, candidate)
        first += [("", item) for item in differs]
        if why_not is not None:
            first.append(("", why_not))
            baseline = None
    if collapsed := [layer.name for layer in run.decayed_layers if layer.collapsed]:
        first.append((run.name, because(Reason.COLLAPSED, layers=collapsed)))
    lost = has(run.troubles, Reason.LOST_TO_ROUNDING)
    if not run.decays and run.has_settings and not run.unwatched and not lost:
        if candidate is not None and candidate.decays:
            first.append((run.name, because(Reason.SWAPPED)))
        elif run.spec is None:  # our trainer decays weights in its optimizer and nowhere else
            first.append((run.name, because(Reason.NO_DECAY)))
    compared = Comparison(run, baseline)
    mechanisms = findings(compared)
    baselines = [baseline] if baseline is not None else []
    return Diagnosis(
        *_named([run], baselines),
        outcome_of([run], baselines),
        tuple(first),
        mechanisms,
        consequences(compared, mechanisms),
        {name: layer.skipped for name, layer in run.layers.items() if layer.skipped},
        decays=run.decays,
        compared=((run, baseline),),
    )


def _named(
    runs: Sequence[Run], baselines: Sequence[Run]
) -> tuple[tuple[str, ...], tuple[str, ...], Places]:
    """The names of runs and of baselines, and where they lie."""
    sides = (runs, baselines)
    mine, theirs = (tuple(run.name for run in side) for side in sides)
    my_places, their_places = (tuple(run.address for run in side) for side in sides)
    return mine, theirs, Places(my_places, their_places)


# ---------------------------------------------------------------- several seeds


def _several(runs: list[Run], baselines: list[Run]) -> Diagnosis:
    """Seeds judged one by one, each against a baseline of its own seed if there is one."""
    left_out: list[tuple[str, Because]] = []
    for group in (runs, baselines):
        for other in list(group[1:]):
            why_not, _ = same_training(group[0], other, free=set())
            if why_not is not None:
                left_out.append((other.name, because(Reason.SEED_LEFT_OUT, why=why_not)))
                group.remove(other)
    diagnoses = [_one(run, other) for run, other in _paired(runs, baselines)]
    compared = baselines if any(item.baselines for item in diagnoses) else []
    by_mechanism = zip(*(item.findings for item in diagnoses), strict=True)
    over_seeds = tuple(map(_over_seeds, by_mechanism))
    notes = distinct(item for each in diagnoses for item in each.first)
    names, baseline_names, places = _named(runs, compared)
    first_pair = Comparison(runs[0], compared[0] if compared else None)
    return replace(
        diagnoses[0],
        runs=names,
        baselines=baseline_names,
        places=places,
        outcome=outcome_of(runs, compared),
        first=(*left_out, *(x for x in notes if x[1].reason is not Reason.DIFFERS)),
        findings=over_seeds,
        follows=consequences(first_pair, over_seeds),
        seeds=tuple(diagnoses) if len(diagnoses) > 1 else (),
        compared=tuple(pair for each in diagnoses for pair in each.compared),
    )


def _paired(runs: list[Run], baselines: list[Run]) -> list[tuple[Run, Run | None]]:
    if not baselines:
        return [(run, None) for run in runs]
    of_seed = {_seed(run): run for run in baselines if _seed(run) is not None}
    pairs = zip(runs, cycle(baselines), strict=False)
    return [(run, of_seed.get(_seed(run), following)) for run, following in pairs]


def _seed(run: Run) -> int | None:
    return None if run.spec is None else run.spec.get("seed")


def _over_seeds(seeds: Sequence[Finding]) -> Finding:
    """One finding of several seeds': theirs if they agree, else "cannot tell" with the count."""
    verdicts = [finding.verdict for finding in seeds]
    effect = pooled((finding.effect for finding in seeds), Spread.SEEDS)
    together = replace(seeds[0], effect=effect).effect_alone
    # what is said of a change is said of one this large
    first = next((finding for finding in seeds if finding.effect_alone is together), seeds[0])
    rows = []
    for place, row in enumerate(first.layers):
        same = [f.layers[place] for f in seeds if len(f.layers) > place]
        same = [other for other in same if other.layer == row.layer]
        verdict = row.verdict if len({x.verdict for x in same}) == 1 else Verdict.CANNOT_TELL
        over_seeds = pooled((other.effect for other in same), Spread.SEEDS)
        rows.append(replace(row, verdict=verdict, effect=over_seeds))
    pooled_finding = replace(first, effect=effect, layers=tuple(rows))
    if len(set(verdicts)) == 1:
        reasons = tuple(
            because(why.reason, **{**why.data, "change": Change(first.quantity, effect)})
            if effect is not None and "change" in why.data
            else why
            for why in first.reasons
        )
        return replace(pooled_finding, reasons=reasons)
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return replace(
        pooled_finding,
        verdict=Verdict.CANNOT_TELL,
        reasons=(because(Reason.SEEDS_DISAGREE, counts=counts),),
        remedies=(because(Reason.MORE_SEEDS),),
    )
