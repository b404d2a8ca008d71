"""Verdicts: whether decay helped, which mechanism it acts through, and what follows."""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from decaylab.diagnosis.bursts import Burst, bursts
from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.comparable import comparable, same_training
from decaylab.diagnosis.effects import (
    ComparedWith,
    Effect,
    Motion,
    Spread,
    damping_effect,
    effect_of,
    effective_lr_effect,
    judged_part,
    longer_by_memory,
    motion,
    old_factors,
    pooled,
    ratio,
    rotation_effect,
    share_without_decay,
    too_few_shares,
)
from decaylab.diagnosis.outcome import Outcome, outcome_of
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict, because, has
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import RecordedLayer, Run, counterpart, read_run
from decaylab.errors import DecaylabError
from decaylab.records.sources import Source

ACTS, DOES_NOT_ACT, CANNOT_TELL = Verdict.ACTS, Verdict.DOES_NOT_ACT, Verdict.CANNOT_TELL
# Which row stands for the function's sensitivity, best first (Sec. 4.2, Table 2, Fig. 5).
SENSITIVITY = ("jacobian_norm", "kfac_gn_norm", "gn_norm")

Effects = Callable[[RecordedLayer, RecordedLayer | None], Effect | None]


@dataclass(frozen=True)
class LayerRow:
    """One layer's part in a mechanism. Without an effect, `why` says why."""

    layer: str
    verdict: Verdict | None
    effect: Effect | None
    why: Because | None = None


@dataclass(frozen=True)
class Finding:
    """One mechanism: the verdict, why, and what would decide it.

    `quantity`: the row that the effect of the whole model is read from. `layer_quantity`: what the
    layers' effects are of. `remedies` are empty unless the verdict is "cannot tell".
    """

    mechanism: Mechanism
    verdict: Verdict
    reasons: tuple[Because, ...]
    effect: Effect | None = None
    layers: tuple[LayerRow, ...] = ()
    remedies: tuple[Because, ...] = ()
    quantity: str = ""
    layer_quantity: str = ""

    def because_of(self, reason: Reason) -> Because | None:
        """The reason with its data, if it is one of this finding's."""
        return next((item for item in self.reasons if item.reason is reason), None)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What decay does in a run, or in several seeds of it.

    Attributes:
        runs, baselines: their names. places: where commands find them.
        outcome: whether decay helped.
        first: what must be known before anything else, each with the run it is said of ("": both).
        findings: the three mechanisms, in the paper's order.
        motions: how every layer turns (of the first seed).
        follows: what follows from all together.
        skipped: layers that could not be judged, with the reason.
        seeds: the diagnoses of single seeds, where there are several.
        compared: what was read, for figures: each run with the baseline it was judged against.
    """

    runs: tuple[str, ...]
    baselines: tuple[str, ...]
    places: Places
    outcome: Outcome
    first: tuple[tuple[str, Because], ...]
    findings: tuple[Finding, ...]
    motions: tuple[Motion, ...]
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

    @property
    def troubles(self) -> tuple[Because, ...]:
        """The reasons of `first`, whatever run they are said of."""
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
        """Plain values, for JSON, and the sentences."""
        from decaylab.diagnosis.words import plain

        return plain(self)


def _pages() -> Any:
    """What draws figures and pages. It stands above this package, so it is looked up when asked."""
    return importlib.import_module("decaylab.report.diagnoses")


def diagnose(
    run: Source | Sequence[Source], baseline: Source | Sequence[Source] | None = None
) -> Diagnosis:
    """Tell whether weight decay helped, and which of the paper's three mechanisms it acted through.

    `run` and `baseline` (the same training without decay): a run folder, a folder that
    `watch(folder=...)` wrote, a `Watch`, its records, or lists of these: several seeds. Reads
    records only; measures nothing.

    With a baseline, effective learning rates, Jacobian norms and effective dampings are compared.
    Without one, the first and the third are compared with a reconstruction of the norms without
    decay (`laws.dynamics`); the second cannot be told. Thresholds: `rules.Rules`.
    """
    sources, others = _listed(run), _listed(baseline)
    several = len(sources) != 1 or len(others) > 1
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
                f"{run.name} is given twice, and a run is no baseline or second seed of itself:"
                " record each run in a folder of its own"
            )
        seen.add(key)


def _listed(sources: Source | Sequence[Source] | None) -> list[Source]:
    if isinstance(sources, list | tuple):
        return list(sources)
    return [] if sources is None else [sources]


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
    used = [item for item in diagnoses if item.baselines]
    findings = tuple(
        _over_seeds([item.findings[place] for item in diagnoses]) for place in range(len(Mechanism))
    )
    notes = _distinct(item for each in diagnoses for item in each.first)
    compared = baselines if used else []
    return replace(
        diagnoses[0],
        runs=tuple(run.name for run in runs),
        baselines=tuple(run.name for run in compared),
        places=Places(tuple(run.address for run in runs), tuple(run.address for run in compared)),
        outcome=outcome_of(runs, compared),
        first=(*left_out, *(x for x in notes if x[1].reason is not Reason.DIFFERS)),
        findings=findings,
        follows=tuple(
            _follows(runs[0], findings, _shares(runs[0], compared[0] if compared else None))
        ),
        seeds=tuple(diagnoses) if len(diagnoses) > 1 else (),
        compared=tuple(pair for each in diagnoses for pair in each.compared),
    )


def _distinct(items: Iterable[Any]) -> list[Any]:
    """Each once, in their order; reasons have no hash, as their data may be lists."""
    return list({repr(item): item for item in items}.values())


def _paired(runs: list[Run], baselines: list[Run]) -> list[tuple[Run, Run | None]]:
    if not baselines:
        return [(run, None) for run in runs]
    of_seed = {run.spec["seed"]: run for run in baselines if run.spec and "seed" in run.spec}
    turns = cycle(baselines)
    pairs: list[tuple[Run, Run | None]] = []
    for run in runs:
        same_seed = of_seed.get(run.spec["seed"]) if run.spec and "seed" in run.spec else None
        following = next(turns)
        pairs.append((run, same_seed or following))
    return pairs


def _over_seeds(findings: Sequence[Finding]) -> Finding:
    """One finding of several seeds': theirs if they agree, else "cannot tell" with the count."""
    first, verdicts = findings[0], [finding.verdict for finding in findings]
    effect = pooled((finding.effect for finding in findings), Spread.SEEDS)
    rows = []
    for place, row in enumerate(first.layers):
        same = [f.layers[place] for f in findings if len(f.layers) > place]
        effects = (other.effect for other in same if other.layer == row.layer)
        joined = pooled(effects, Spread.SEEDS)
        rows.append(replace(row, effect=joined))
    if len(set(verdicts)) == 1:
        reasons = first.reasons
        if effect is not None and (changed := first.because_of(Reason.CHANGED)) is not None:
            of_all = replace(changed, data={**changed.data, "effect": effect})
            reasons = tuple(of_all if item is changed else item for item in reasons)
        return replace(first, effect=effect, layers=tuple(rows), reasons=reasons)
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return replace(
        first,
        verdict=CANNOT_TELL,
        reasons=(because(Reason.SEEDS_DISAGREE, counts=counts),),
        effect=effect,
        layers=tuple(rows),
        remedies=(because(Reason.MORE_SEEDS, baseline=True),),
    )


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
    if collapsed := [layer.name for layer in run.decayed_layers if has_collapsed(layer)]:
        first.append((run.name, because(Reason.COLLAPSED, layers=collapsed)))
    lost = has(run.troubles, Reason.LOST_TO_ROUNDING)
    if not run.decays and run.settled and not run.unwatched and not lost:
        swapped = candidate is not None and candidate.decays
        first.append((run.name, because(Reason.SWAPPED if swapped else Reason.NO_DECAY)))
    damping = _damping(run, baseline)
    findings = (
        _effective_learning_rate(run, baseline, damping),
        replace(_jacobian(run, baseline), layer_quantity="weight_norm"),
        damping,
    )
    per_epoch = run.recording.meta.steps_per_epoch
    judged = [x for x in run.layers.values() if not x.skipped and x.norms]
    compared = [baseline] if baseline is not None else []
    return Diagnosis(
        (run.name,),
        (baseline.name,) if baseline is not None else (),
        Places((run.address,), (baseline.address,) if baseline is not None else ()),
        outcome_of([run], compared),
        tuple(first),
        findings,
        tuple(motion(x, counterpart(x, baseline), run.steps, per_epoch) for x in judged),
        tuple(_follows(run, findings, _shares(run, baseline))),
        {name: layer.skipped for name, layer in run.layers.items() if layer.skipped},
        decays=run.decays,
        compared=((run, baseline),),
    )


def has_collapsed(layer: RecordedLayer) -> bool:
    """Whether hardly anything is left of its norm."""
    return layer.norms[-1][1] < RULES.collapsed * layer.norms[0][1]


def judged(
    effect: Effect | None, acts: float = RULES.acts, nothing: float = RULES.nothing
) -> Verdict:
    """The verdict on one factor."""
    if effect is None:
        return CANNOT_TELL
    if effect.value >= acts:
        return ACTS
    return DOES_NOT_ACT if effect.value <= nothing else CANNOT_TELL


def _no(mechanism: Mechanism, reason: Because, **fields: Any) -> Finding:
    """It does not act; `more`: fields of `Finding`."""
    return Finding(mechanism, DOES_NOT_ACT, (reason,), **fields)


def _cannot_tell(
    mechanism: Mechanism, reason: Because, *remedies: Reason, **fields: Any
) -> Finding:
    return Finding(
        mechanism, CANNOT_TELL, (reason,), remedies=tuple(map(because, remedies)), **fields
    )


# ---------------------------------------------------------------- before anything is compared


def _no_decay(run: Run, mechanism: Mechanism, *, joint: bool = False) -> Finding | None:
    """Where the records show nothing, where nothing decays, or too little.

    `joint`: what decay takes of each layer adds up, as in the Jacobian, a product over layers.
    """
    skipped = [layer.skipped for layer in run.layers.values()]
    if skipped and all(why is not None and why.reason is Reason.FROZEN for why in skipped):
        return _no(mechanism, because(Reason.ALL_FROZEN))
    if all(why is not None for why in skipped):
        remedy = Reason.TRAIN_LONGER if run.spec is not None else Reason.RECORD_MORE
        return _cannot_tell(mechanism, because(Reason.NONE_JUDGEABLE), remedy)
    if not run.decayed_layers and not run.gains and run.unwatched:
        reason = because(Reason.UNWATCHED, layers=run.unwatched)
        return _cannot_tell(mechanism, reason, Reason.WATCH_ALL)
    if not run.decayed_layers and not run.gains:
        lost = has(run.troubles, Reason.LOST_TO_ROUNDING)
        return _no(mechanism, because(Reason.NO_LAYER_DECAYS, lost=lost))
    return _too_little(run, mechanism, run.decayed_layers, sum if joint else max)


def _too_little(
    run: Run,
    mechanism: Mechanism,
    layers: list[RecordedLayer],
    together: Callable[[list[float]], float] = max,
) -> Finding | None:
    """Where decay took next to nothing of any of these layers, or of all of them together."""
    exposures = [layer.total_exposure for layer in layers if layer.total_exposure is not None]
    if not exposures or len(exposures) < len(layers):
        return None
    if together(exposures) >= RULES.too_little_exposure:
        return None
    first = min(step for layer in layers for step, _ in layer.norms)
    reason = because(Reason.TOO_LITTLE, taken=max(exposures), first=first, last=run.steps)
    return _no(mechanism, reason)


def _at_once(run: Run, mechanism: Mechanism) -> Finding | None:
    """As `_no_decay`, for what acts on layers whose size is not part of the function."""
    early = _no_decay(run, mechanism)
    if early is not None:
        return early
    if layers := run.turned_layers:
        return _too_little(run, mechanism, layers)
    rows = _layer_rows(run, None, lambda layer, other: None)
    if hidden := [x.name for x in run.decayed_layers if x.size_counts is None]:
        reason = because(Reason.INVARIANCE_UNKNOWN, layers=hidden)
        return _cannot_tell(mechanism, reason, Reason.GIVE_INPUTS, layers=rows)
    some = any(layer.invariant for layer in run.layers.values())
    reason = because(Reason.NO_INVARIANT_DECAYS if some else Reason.NO_INVARIANT)
    return _no(mechanism, reason, layers=rows)


def _layer_rows(
    run: Run, baseline: Run | None, effect_on: Effects, *, kfac_only: bool = False
) -> tuple[LayerRow, ...]:
    """A row for every layer; `effect_on` is asked of those that the mechanism can act on."""
    rows = []
    for layer in run.layers.values():
        apart = layer.skipped or _why_apart(layer)
        if apart is None and kfac_only and not layer.preconditioned:
            apart = because(Reason.NOT_KFAC)
        if apart is not None:
            rows.append(LayerRow(layer.name, None, None, apart))
            continue
        other = counterpart(layer, baseline)
        effect = effect_on(layer, other)
        why = None
        if effect is None:
            why = _no_effect(layer) if other is None else because(Reason.NO_COMMON_STEP)
        rows.append(LayerRow(layer.name, judged(effect), effect, why))
    return tuple(rows)


def _why_apart(layer: RecordedLayer) -> Because | None:
    if layer.size_counts is None:
        return because(Reason.INVARIANCE_UNKNOWN, layers=[layer.name])
    if layer.size_counts:
        return why_size_counts(layer)
    return None if layer.decayed else _why_not_decayed(layer)


def why_size_counts(layer: RecordedLayer) -> Because:
    """Why the size of a layer is part of the function."""
    kinds = {"gain": Reason.GAIN, "adapter": Reason.ADAPTER}
    kind = kinds.get(layer.role, Reason.SIZE_COUNTS)
    return because(kind, response=layer.size_response)


def _why_not_decayed(layer: RecordedLayer) -> Because:
    lost = because(Reason.LOST_TO_ROUNDING, layers=[layer.name])
    return lost if layer.lost else because(Reason.NOT_DECAYED)


def _no_effect(layer: RecordedLayer) -> Because:
    """Why one run shows no effect on a layer that the mechanism can act on."""
    if (unknown := layer.unknown) is not None:
        return unknown
    if layer.natural and layer.clipped:
        return because(Reason.GRADIENTS_CLIPPED)
    if layer.natural and "second_order_share" not in layer.series:
        return because(Reason.NO_SHARES)
    if too_few_shares(layer):
        return because(Reason.FEW_SHARES)
    return because(Reason.OLD_FACTORS if old_factors(layer) else Reason.LAW_UNKNOWN)


# ---------------------------------------------------------------- the three mechanisms


def _effective_learning_rate(run: Run, baseline: Run | None, damping: Finding) -> Finding:
    """What `_turned` says, unless it says the opposite at another limit of what a size counts."""
    finding = _turned(run, baseline, damping)
    limits = (RULES.size_little / RULES.size_doubt, RULES.size_little * RULES.size_doubt)
    near = [
        layer
        for layer in run.decayed_layers
        if not (layer.invariant or layer.role == "gain")
        and limits[0] < (layer.size_response or 0.0) <= limits[1]
    ]
    if not near:
        return finding
    verdicts = {finding.verdict}
    for limit in limits:
        layers = {name: replace(x, size_limit=limit) for name, x in run.layers.items()}
        verdicts.add(_turned(replace(run, layers=layers), baseline, damping).verdict)
    if not {ACTS, DOES_NOT_ACT} <= verdicts:
        return finding
    responses = {layer.name: layer.size_response for layer in near}
    reason = because(Reason.SIZE_IN_DOUBT, responses=responses, limit=RULES.size_little)
    return _cannot_tell(finding.mechanism, reason, Reason.ATTRIBUTE, layers=finding.layers)


def _turned(run: Run, baseline: Run | None, damping: Finding) -> Finding:
    mechanism = Mechanism.EFFECTIVE_LR
    early = _at_once(run, mechanism)
    if early is not None:
        return early
    layers = run.turned_layers
    others = [other for layer in layers if (other := counterpart(layer, baseline)) is not None]
    both = [*layers, *others]
    unknown = [layer for layer in both if layer.law.norm_power is None]
    kfac_clipped = any(layer.natural and layer.clipped for layer in both)
    recorded = baseline is not None and all(
        rotation_effect(layer, counterpart(layer, baseline)) is not None for layer in layers
    )
    clipped = max(run.clipped, baseline.clipped if baseline is not None else 0.0)
    invariant = any(layer.invariant for layer in layers)
    if clipped and (unknown or kfac_clipped) and (invariant or not recorded):
        return _cannot_tell(mechanism, because(Reason.CLIPPED, share=clipped), Reason.NO_CLIPPING)
    if unknown and not recorded:
        changed = any(layer.changed_law for layer in layers)
        angles = baseline is None and all("rotation" in layer.series for layer in layers)
        remedies = [Reason.GIVE_BASELINE] if angles or changed else []
        remedies += [] if changed else [Reason.NAME_THE_LAW]
        return _cannot_tell(mechanism, because(Reason.LAW_UNKNOWN), *remedies)
    if all(layer.natural for layer in both):
        return _of_kfac(run, baseline, layers, damping)
    rows = _layer_rows(run, baseline, effective_lr_effect)
    effect = pooled(row.effect for row in rows)
    by_rotation = not any(layer.invariant for layer in layers) or bool(unknown)
    return _found(mechanism, "rotation" if by_rotation else "effective_lr", effect, rows, run)


def _of_kfac(
    run: Run, baseline: Run | None, layers: list[RecordedLayer], damping: Finding
) -> Finding:
    """K-FAC turns weights by lr, whatever their norm; but for its damping and old curvature."""
    mechanism = Mechanism.EFFECTIVE_LR
    if not any(layer.first.damping is not None for layer in layers):
        return _no(mechanism, because(Reason.BY_LR))
    pairs = [(layer, counterpart(layer, baseline)) for layer in layers]
    clip = _mean_clip(run)
    shortened = 1.0 if baseline is None else clip / _mean_clip(baseline)
    longer = geometric_mean(longer_by_memory(layer, other, shortened) for layer, other in pairs)
    if longer < RULES.acts:
        return _no(mechanism, because(Reason.UNDAMPED_BY_LR))
    turned = pooled(rotation_effect(layer, other) for layer, other in pairs if other is not None)
    data = {"longer": longer, "turned": turned, "clip": clip if clip < 1 else None}
    reason = because(Reason.OLD_CURVATURE, **data)
    if turned is not None and damping.verdict is not ACTS:
        rows = _layer_rows(run, baseline, rotation_effect)
        return Finding(mechanism, ACTS, (reason,), turned, rows, quantity="rotation")
    remedies = [Reason.GIVE_BASELINE] if baseline is None else []
    return _cannot_tell(mechanism, reason, *remedies, Reason.RENEW_CURVATURE, effect=turned)


def _mean_clip(run: Run) -> float:
    """What K-FAC's KL clip multiplies steps with, where they are judged."""
    recorded = [value for _, value in judged_part(run.totals.get("clip_coefficient", ())) if value]
    return geometric_mean(recorded) if recorded else 1.0


def _damping(run: Run, baseline: Run | None) -> Finding:
    mechanism = Mechanism.DAMPING
    if run.settled and not any(layer.preconditioned for layer in run.layers.values()):
        return _no(mechanism, because(Reason.ONLY_KFAC_DAMPS))
    early = _at_once(run, mechanism)
    if early is not None:
        return early
    layers = _damped(run)
    if not layers:
        return _no(mechanism, because(Reason.NO_KFAC_LAYER))
    if all(layer.first.scale_free for layer in layers):
        return _no(mechanism, because(Reason.SCALE_FREE))
    rows = _layer_rows(run, baseline, damping_effect, kfac_only=True)
    effect = pooled(row.effect for row in rows)
    shares = _shares(run, baseline)
    if effect is None and shares.run is not None:
        return _found(mechanism, "effective_damping", effect, rows, run)
    if shares.run is None or shares.baseline is None:
        reason, remedy = because(Reason.SHARE_UNKNOWN), Reason.RECORD_SHARE
        return _cannot_tell(mechanism, reason, remedy, effect=effect, layers=rows)
    shares_reason = because(Reason.SHARES, **shares.data())
    if min(shares.run, shares.baseline) >= RULES.damping_negligible:
        # whatever the factor of a damping that does not matter
        rows = tuple(replace(x, verdict=DOES_NOT_ACT) if x.verdict else x for x in rows)
        reason = because(Reason.DAMPING_NEGLIGIBLE, **shares.data())
        return _no(mechanism, reason, effect=effect, layers=rows)
    finding = _found(mechanism, "effective_damping", effect, rows, run)
    same = finding.verdict is ACTS and shares.same
    share_reasons = (shares_reason, because(Reason.SAME_SHARES)) if same else (shares_reason,)
    return replace(finding, reasons=(*finding.reasons, *share_reasons))


@dataclass(frozen=True)
class SecondOrderShares:
    """K-FAC's second-order share at the end; without decay measured, or `estimated`."""

    run: float | None
    baseline: float | None
    estimated: bool

    @property
    def same(self) -> bool:
        """Whether two measured runs are as much second-order with decay as without."""
        if self.run is None or self.baseline is None or self.estimated:
            return False
        return abs(self.run - self.baseline) < RULES.same_share

    def data(self) -> dict[str, Any]:
        """As the data of a reason."""
        return {"run": self.run, "baseline": self.baseline, "estimated": self.estimated}


def _damped(run: Run) -> list[RecordedLayer]:
    return [layer for layer in run.turned_layers if layer.preconditioned]


def _shares(run: Run, baseline: Run | None) -> SecondOrderShares:
    layers = _damped(run)
    mine = _last_share(layers)
    if baseline is not None:
        others = [other for x in layers if (other := counterpart(x, baseline)) is not None]
        return SecondOrderShares(mine, _last_share(others), estimated=False)
    estimates = [s for layer in layers if (s := share_without_decay(layer)) is not None]
    return SecondOrderShares(mine, fmean(estimates) if estimates else None, estimated=True)


def _last_share(layers: Iterable[RecordedLayer]) -> float | None:
    shares = [s for x in layers if (s := x.last("second_order_share")) is not None]
    return fmean(shares) if shares else None


def _jacobian(run: Run, baseline: Run | None) -> Finding:
    mechanism = Mechanism.JACOBIAN
    early = _no_decay(run, mechanism, joint=True)
    if early is not None:
        return early
    rows = tuple(_function_row(layer, baseline) for layer in run.layers.values())
    known = not run.unwatched and not run.gains
    if known and all(layer.invariant for layer in run.decayed_layers):
        return _no(mechanism, because(Reason.ALL_INVARIANT), layers=rows)
    if baseline is None:
        recorded = any(row in run.totals for row in SENSITIVITY)
        too = Reason.RECORD_SAME_WAY if recorded else Reason.RECORD_IN_BOTH
        reason = because(Reason.JACOBIAN_ALONE)
        return _cannot_tell(mechanism, reason, Reason.GIVE_BASELINE, too, layers=rows)
    effects = {
        row: effect_of(
            ratio(baseline.totals.get(row, ()), run.totals.get(row, ())),
            (row,),
            ComparedWith.BASELINE,
        )
        for row in SENSITIVITY
    }
    row = next((row for row, effect in effects.items() if effect is not None), None)
    if row is None:
        reason = because(Reason.NO_SENSITIVITY)
        return _cannot_tell(mechanism, reason, Reason.RECORD_IN_BOTH, layers=rows)
    thresholds = (RULES.jacobian_acts, RULES.jacobian_nothing)
    finding = _found(mechanism, row, effects[row], rows, run, thresholds, joint=True)
    kinds = [kind for layer in run.turned_layers for kind in _ways(layer)]
    if finding.verdict is ACTS and kinds:
        through = because(Reason.THROUGH_OTHERS, mechanisms=list(dict.fromkeys(kinds)))
        finding = replace(finding, reasons=(*finding.reasons, through))
    return finding


def _ways(layer: RecordedLayer) -> list[Mechanism]:
    """The mechanisms through which decay can act on a layer whose size hardly matters."""
    ways = [] if layer.natural else [Mechanism.EFFECTIVE_LR]
    damped = layer.preconditioned and not layer.first.scale_free
    return [*ways, *([Mechanism.DAMPING] if damped else [])]


def _function_row(layer: RecordedLayer, baseline: Run | None) -> LayerRow:
    """A layer's part in the Jacobian: its norm (or its K-FAC norm), against the baseline."""
    if layer.skipped or not layer.decayed:
        return LayerRow(layer.name, None, None, layer.skipped or _why_not_decayed(layer))
    if layer.invariant:
        return LayerRow(layer.name, None, None, because(Reason.INVARIANT))
    other = counterpart(layer, baseline)
    if other is None:
        return LayerRow(layer.name, None, None, because(Reason.NEEDS_BASELINE))
    norms, baseline_norms = (x.series.get("kfac_gn_norm", ()) for x in (layer, other))
    probe = "kfac_gn_norm" if ratio(baseline_norms, norms) else "weight_norm"
    ratios = ratio(baseline_norms, norms) or ratio(other.norms, layer.norms)
    effect = effect_of(ratios, (probe,), ComparedWith.BASELINE)
    return LayerRow(layer.name, None, effect, None if effect else because(Reason.NO_COMMON_STEP))


# ---------------------------------------------------------------- a measured factor


def _found(
    mechanism: Mechanism,
    quantity: str,
    effect: Effect | None,
    rows: tuple[LayerRow, ...],
    run: Run,
    thresholds: tuple[float, float] = (RULES.acts, RULES.nothing),
    *,
    joint: bool = False,
) -> Finding:
    """The finding on a measured factor; `joint`: as in `_no_decay`."""
    verdict = judged(effect, *thresholds)
    if effect is None:
        why = _distinct(row.why for row in rows if row.verdict and row.why)
        apart = has(tuple(why), Reason.NO_COMMON_STEP)
        remedy = Reason.SAME_STEPS if apart else Reason.GIVE_BASELINE
        nothing = because(Reason.NOTHING_TO_COMPARE, why=why)
        return _cannot_tell(mechanism, nothing, remedy, layers=rows, quantity=quantity)
    finding = Finding(mechanism, verdict, (), effect, rows, quantity=quantity)
    compared = [run.layers[row.layer] for row in rows if row.effect]
    exposures = _exposures_at(compared or run.layers.values(), effect.steps[1])
    if (early := _implausible(finding, exposures, joint=joint)) is not None:
        return early
    data = {"quantity": quantity, "effect": effect, "taken": max(exposures, default=None)}
    reasons = [because(Reason.CHANGED, **data, verdict=verdict)]
    if effect.value < 1 / thresholds[0]:
        reasons = [because(Reason.OPPOSITE, **data)]
    acting_layers = [row.layer for row in rows if row.effect and row.effect.value >= RULES.acts]
    remedies: list[Because] = []
    if verdict is DOES_NOT_ACT and acting_layers and not joint:
        verdict = CANNOT_TELL  # one layer of many is not lost in the mean
        reasons.append(because(Reason.SOME_LAYERS_MORE, layers=acting_layers))
        remedies = [because(Reason.MORE_SEEDS, baseline=effect.source is ComparedWith.BASELINE)]
    elif verdict is CANNOT_TELL:
        reasons.append(because(Reason.BETWEEN, nothing=thresholds[1], acts=thresholds[0]))
        remedies = [because(Reason.MORE_SEEDS, baseline=effect.source is ComparedWith.BASELINE)]
        if effect.source is ComparedWith.BASELINE:
            remedies.append(because(Reason.ATTRIBUTE))
        else:
            remedies.append(because(Reason.GIVE_BASELINE))
    return replace(finding, verdict=verdict, reasons=tuple(reasons), remedies=tuple(remedies))


def _implausible(finding: Finding, exposures: list[float], *, joint: bool) -> Finding | None:
    """Where decay cannot have changed so much by then: 1/|W|^2 by exp(2 x exposure) at most."""
    effect = finding.effect
    if not exposures or effect is None:
        return None
    reached = max(exposures)
    if (sum(exposures) if joint else reached) < RULES.too_little_exposure:
        reason, remedy = (
            because(Reason.TOO_EARLY, step=effect.steps[1], taken=reached),
            Reason.RECORD_FURTHER,
        )
    else:
        most = math.exp(min(2 * reached, 700))
        if joint or effect.source is not ComparedWith.BASELINE or effect.value <= RULES.acts * most:
            return None
        data = {"quantity": finding.quantity, "effect": effect, "taken": reached, "most": most}
        reason, remedy = because(Reason.MORE_THAN_DECAY, **data), Reason.SAME_DATA
    return replace(finding, verdict=CANNOT_TELL, reasons=(reason,), remedies=(because(remedy),))


def _exposures_at(layers: Iterable[RecordedLayer], step: int) -> list[float]:
    """The decay exposure of each layer at a step, where it is recorded."""
    exposed = [layer for layer in layers if layer.total_exposure is not None]
    reached = [[value for s, value in layer.exposure if s <= step] for layer in exposed]
    return [values[-1] for values in reached if values]


# ---------------------------------------------------------------- what follows


def _follows(run: Run, findings: tuple[Finding, ...], shares: SecondOrderShares) -> list[Because]:
    """Which decay matters, and what would replace it."""
    lr, jacobian, damping = findings
    turned = run.turned_layers
    counting = [x for x in run.decayed_layers if x.size_counts is not False]
    adapters = [layer.name for layer in counting if layer.role == "adapter"]
    rest = [x.name for x in counting if x.role not in ("gain", "adapter")]  # gains are said as one
    gains = bool(run.gains) and bool(run.decayed_layers)
    consequences: list[Because] = []
    if turned:
        names = [name for layer in turned for name in layer.members or (layer.name,)]
        exact = all(layer.invariant for layer in turned)
        by_lr = all(layer.natural and not layer.preconditioned for layer in turned)
        data = {"layers": names, "exact": exact, "by_lr": by_lr}
        consequences.append(because(Reason.DIRECTION_ONLY, **data))
        ways = [f.mechanism for f in (lr, damping) if f.verdict is ACTS]
        if lr.verdict is not ACTS and damping.verdict is ACTS and shares.same:
            consequences.append(because(Reason.NO_MORE_SECOND_ORDER))
        elif ways:
            consequences.append(because(Reason.MATTERS, mechanisms=ways))
        if lr.verdict is damping.verdict is DOES_NOT_ACT:
            if not (opposite(lr) or opposite(damping) or run.diverged):
                taken = max((layer.total_exposure or 0.0 for layer in turned), default=0.0)
                consequences.append(because(Reason.NO_EFFECT, taken=taken))
        else:
            consequences += _schedule([layer for layer in turned if layer.invariant])
    if rest or gains:
        data = {"layers": rest, "gains": gains, "verdict": jacobian.verdict}
        consequences.append(because(Reason.FUNCTION, **data, opposite=opposite(jacobian)))
    if adapters:
        consequences.append(because(Reason.ADAPTERS, layers=adapters))
    undecided = any(finding.verdict is CANNOT_TELL for finding in findings)
    if (consequences and undecided) or jacobian.because_of(Reason.THROUGH_OTHERS) is not None:
        consequences.append(because(Reason.ATTRIBUTE))
    if not consequences:
        unsure = run.decays or not run.settled or run.unwatched
        consequences.append(because(Reason.NOTHING_YET if unsure else Reason.NOTHING_TO_DROP))
    burst_list: list[Burst] = [b for layer in turned if layer.invariant for b in bursts(layer)]
    if burst_list:
        worst = min(burst_list, key=lambda burst: burst.before / burst.after)
        settings = run.layers[worst.layer].first
        damped = settings.damping is not None
        data = {"burst": worst, "others": len(burst_list) - 1, "damped": damped}
        consequences.append(because(Reason.BURST, **data, scale_free=bool(settings.scale_free)))
    kfac = [x for x in run.layers.values() if x.invariant and x.preconditioned]
    fixed = [x for x in kfac if x.norms and not x.first.scale_free]
    # a damping relative to the curvature, with steps of a set length, is meant to be this large
    share = _last_share([x for x in kfac if x.natural] or fixed)
    if share is not None and share < RULES.damping_dominates:
        grown = sum(math.log(x.norms[-1][1] / x.norms[0][1]) for x in fixed) > 0
        data = {"share": share, "burst": bool(burst_list), "grown": grown}
        consequences.append(because(Reason.DAMPING_DOMINATES, **data))
    return consequences


def opposite(finding: Finding) -> bool:
    """Whether the change is as large as that of a mechanism that acts, but the other way."""
    jacobian = finding.mechanism is Mechanism.JACOBIAN
    acts = RULES.jacobian_acts if jacobian else RULES.acts
    return finding.effect is not None and finding.effect.value < 1 / acts


def _schedule(layers: list[RecordedLayer]) -> list[Because]:
    """By how much lr would have to grow without decay (`advise schedule` writes it out)."""
    if not layers:
        return []
    first = max(layers, key=lambda layer: layer.total_exposure or 0.0)  # one may be frozen early
    exposure, power = first.total_exposure, first.law.norm_power
    if not (exposure and power) or any(layer.stepping != first.stepping for layer in layers):
        return []  # one schedule is for layers that are stepped alike
    factor = math.exp(min(power * exposure, 700))
    if factor > RULES.raised_at_most:
        return []
    return [because(Reason.SCHEDULE, exposure=exposure, power=power, factor=factor)]
