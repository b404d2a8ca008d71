"""What a recording says of a run, as diagnosis and advice read it. Nothing is measured here."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from decaylab.diagnosis.commands import Address
from decaylab.diagnosis.layers import RecordedLayer, Timeline, joined, known_rate
from decaylab.diagnosis.limits import clipped, cut_entries, eps_counts, norm_bound
from decaylab.diagnosis.reasons import Because, Reason, because
from decaylab.diagnosis.rules import RULES
from decaylab.errors import DecaylabError
from decaylab.optim.laws.dynamics import Series
from decaylab.records.recording import Recording
from decaylab.records.settings import LayerSettings
from decaylab.records.sources import Source, as_recording
from decaylab.records.store import RunFolder
from decaylab.training.spec import RunSpec

# By layer and of the whole model, what a diagnosis reads.
QUANTITIES = (
    *("effective_lr", "rotation", "update_norm", "second_moment", "second_order_share"),
    *("effective_damping", "kfac_gn_norm", "size_response", "direction_response"),
)
EVENT_REASONS = {
    "shared-parameters": Reason.SHARED_PARAMETERS,
    "unstepped-parameters": Reason.UNSTEPPED_PARAMETERS,
}
TOTALS = ("jacobian_norm", "kfac_gn_norm", "gn_norm", "clip_coefficient", "gradient_norm")


@dataclass(frozen=True)
class Run:
    """A run as its recording has it. `troubles`: what any answer must begin with.

    `clipped`: at which part of the records gradients are clipped; 0 where that changes little.
    `gains`: names of decayed gains of normalisations, which are part of the function.
    """

    recording: Recording
    layers: Mapping[str, RecordedLayer]
    totals: Mapping[str, Series]
    steps: int
    troubles: tuple[Because, ...] = ()
    gains: tuple[str, ...] = ()
    clipped: float = 0.0
    diverged: bool = False
    norm_bound: float = math.inf

    @property
    def name(self) -> str:
        """What it is called."""
        return self.recording.name

    @cached_property
    def spec(self) -> Mapping[str, Any] | None:
        """The spec of a run of our own trainer, else None.

        Resolved, since a run from before a field came has its default; as it is if unreadable.
        """
        spec = self.recording.meta.spec
        with suppress(DecaylabError):
            return spec and asdict(RunSpec.from_mapping(spec).resolved())
        return spec

    @property
    def address(self) -> Address:
        """Where commands find it."""
        folder, spec = self.recording.meta.folder, self.spec
        seed = None if spec is None else spec.get("seed", 0)
        if folder is not None and folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())  # as short as it can be typed
        if folder is None or spec is None:
            return Address("" if folder is None else str(folder), spec is not None, seed)
        kept = RunFolder(folder).has_checkpoint()
        return Address(str(folder), True, seed, self.recording.meta.status, kept)

    @cached_property
    def failed_probes(self) -> dict[str, str]:
        """The probes that could not be measured, and what they ended in."""
        events = [event for event in self.recording.events if event.kind == "probe-failed"]
        return {event.data["probe"]: event.data["error"] for event in events}

    @cached_property
    def decays(self) -> bool:
        """Whether any layer decays."""
        return any(layer.decayed for layer in self.layers.values())

    @cached_property
    def has_settings(self) -> bool:
        """Whether it is known how any layer is stepped."""
        return any(layer.settings for layer in self.layers.values())

    @cached_property
    def decayed_layers(self) -> list[RecordedLayer]:
        """Those with a decay term that are not skipped."""
        return [x for x in self.layers.values() if x.decayed and not x.skipped]

    @cached_property
    def turned_layers(self) -> list[RecordedLayer]:
        """The decayed layers whose size hardly matters: decay sets how far steps turn them."""
        return [layer for layer in self.decayed_layers if layer.size_counts is False]

    @cached_property
    def unwatched(self) -> list[str]:
        """Layers that move, by an optimizer that is not watched: their decay is not known."""
        return _unwatched(self.layers)


def _unwatched(layers: Mapping[str, RecordedLayer]) -> list[str]:
    return [
        layer.name
        for layer in layers.values()
        if layer.skipped is not None
        and layer.skipped.reason is Reason.NOT_STEPPED
        and len({norm for _, norm in layer.norms}) > 1
    ]


@dataclass(frozen=True)
class Comparison:
    """A run and the baseline that it is judged against, if there is one."""

    run: Run
    baseline: Run | None = None

    def other(self, layer: RecordedLayer) -> RecordedLayer | None:
        """The same layer, or the same layers as one, in the baseline."""
        return self._others.get(layer.name)

    @cached_property
    def _others(self) -> dict[str, RecordedLayer]:
        theirs = {} if self.baseline is None else self.baseline.layers
        others = {}
        for name, layer in self.run.layers.items():
            members = layer.members or (name,)
            if all(member in theirs for member in members):
                group = [theirs[member] for member in members]
                others[name] = joined(group) if layer.members else group[0]
        return others


def read_run(source: Source, name: str | None = None) -> Run:
    """A run from its recording; `name` for those that have none of their own."""
    if isinstance(source, Run):
        return source
    recording = as_recording(source)
    if name is not None and recording.meta.folder is None:
        recording = replace(recording, name=name)
    series, troubles, diverged = _finite(recording)
    if not series:
        troubles.append(because(Reason.NOTHING_RECORDED))
    first = min((values[0][0] for values in series.values()), default=0)
    if first > 1:
        troubles.append(because(Reason.BEGINS_LATE, step=first))
    names = [name.partition("/")[2] for name in series if name.startswith("weight_norm/")]
    names = list(dict.fromkeys([*names, *recording.settings]))
    clips = {x: clipped(series, x, _latest(recording, x).rounding) for x in names}
    layers = {layer: _layer(recording, series, layer, clips[layer]) for layer in names}
    gains = [name for name, layer in layers.items() if layer.role == "gain"]
    decayed_gains = tuple(name for name in gains if layers[name].decayed)
    layers = {name: x for name, x in layers.items() if name not in gains or x.norms}
    layers = _with_groups(recording, layers)
    troubles += _said_of_layers(recording, series, layers)
    return Run(
        recording,
        layers,
        {name: series[name] for name in TOTALS if name in series},
        max((values[-1][0] for values in series.values()), default=0),
        tuple(troubles),
        decayed_gains,
        max(clips.values(), default=0.0),
        diverged,
        norm_bound(series, max((_latest(recording, x).rounding for x in names), default=0.0)),
    )


def _finite(recording: Recording) -> tuple[dict[str, Series], list[Because], bool]:
    """Series of what is finite, before a divergence; what is to be said of the rest."""
    troubles: list[Because] = []
    rows, status = recording.rows, recording.meta.status
    if rows.damaged:
        troubles.append(because(Reason.DAMAGED, damaged=rows.damaged))
    troubles += _said_of_optimizers(recording)
    not_finite = rows.not_finite()
    # a weight of zeros has no direction
    bad = [row for row in not_finite if not row.name.startswith(("rotation/", "effective_lr/"))]
    last_sound = {
        name: max((step for step, value in rows.points(name) if math.isfinite(value)), default=-1)
        for name in {row.name for row in bad}
    }
    to_the_end = [row for row in bad if row.step > last_sound[row.name]]
    # A Jacobian or a trace may overflow on its own, and a loss in one batch; weights that do, and
    # losses from then on, end the run.
    losses, weights = ("train/", "test/loss", "outcome/"), ("weight_norm", "update_norm")
    ended = [row.step for row in to_the_end if row.name.startswith(losses)]
    ended += [row.step for row in bad if row.name.startswith(weights)]
    ended += _exploded(recording)
    fatal = min(ended, default=None)
    diverged = fatal is not None or status == "diverged"
    if fatal is not None:
        troubles.insert(0, because(Reason.DIVERGED, step=fatal))
    elif bad:
        rows_of = [row.name for row in bad]
        if to_the_end:
            lasting = to_the_end[0].name
            troubles.append(because(Reason.PROBABLY_DIVERGED, bad=rows_of, lasting=lasting))
        else:
            troubles.append(because(Reason.NOT_FINITE, bad=rows_of))
    if status == "diverged" and fatal is None:
        troubles.insert(0, because(Reason.RUN_DIVERGED, message=recording.meta.message))
    elif status not in ("", "finished", "diverged"):
        epochs = max((row.epoch for row in rows.rows), default=0)
        planned = recording.meta.epochs
        troubles.insert(0, because(Reason.UNFINISHED, status=status, epochs=epochs, of=planned))
    series: dict[str, Series] = {}
    for name in rows.names():
        points = tuple(dict(rows.points(name)).items())  # of several at a step, the last one
        if not_finite:
            points = tuple(
                (step, value)
                for step, value in points
                if math.isfinite(value) and (fatal is None or step < fatal)
            )
        if points:
            series[name] = points
    return series, troubles, diverged


def _exploded(recording: Recording) -> list[int]:
    """By layer whose size counts, the first step at which it is out of all proportion, if any."""
    steps = []
    for name, timeline in recording.settings.items():
        norms = [x for x in recording.rows.points(f"weight_norm/{name}") if math.isfinite(x[1])]
        latest = timeline[-1][1]
        if latest.invariant or not latest.size or not norms:
            continue
        usual = max(norms[0][1], math.sqrt(latest.size))
        steps += [step for step, norm in norms if norm > RULES.exploded * usual][:1]
    return steps


def _said_of_optimizers(recording: Recording) -> list[Because]:
    """Which came and went, and which parameters are then stepped by two or by none."""
    troubles, parameters = [], {}
    for event in recording.events:
        if event.kind == "stepped-before":
            troubles.append(because(Reason.STEPPED_BEFORE))
        elif event.kind in EVENT_REASONS:
            parameters[event.kind] = event.data["parameters"]
        elif event.kind in ("optimizer-changed", "optimizer-joined"):
            parameters = {}  # what holds of those that are there now is recorded after it
            if event.data.get("was") and not event.step:
                continue  # one that another holds, and steps in its place (SAM)
            reason = Reason.OPTIMIZER_CHANGED
            if not event.data.get("was"):
                reason = Reason.OPTIMIZER_JOINED
            name = event.data.get("optimizer") or event.data.get("now") or "another optimizer"
            troubles.append(because(reason, step=event.step, optimizer=name))
    return troubles + [because(EVENT_REASONS[k], parameters=n) for k, n in parameters.items()]


def _said_of_layers(
    recording: Recording, series: Mapping[str, Series], layers: Mapping[str, RecordedLayer]
) -> list[Because]:
    troubles = []
    if series and not recording.settings:
        troubles.append(because(Reason.NO_SETTINGS))
    elif layers and all(
        layer.skipped is not None and layer.skipped.reason is Reason.RECORDED_ONCE
        for layer in layers.values()
    ):
        ours = recording.meta.spec is not None  # which always records them, after each epoch
        troubles.append(because(Reason.TOO_FEW_EPOCHS if ours else Reason.TOO_FEW_NORMS))
    along = [k for k, x in layers.items() if not x.invariant and f"radial_gradient/{k}" in series]
    if along:
        troubles.append(because(Reason.GRADIENTS_ALONG, layers=along))
    if eps := [k for k in layers if eps_counts(series, k, _latest(recording, k))]:
        troubles.append(because(Reason.EPS_COUNTS, layers=eps))
    if lost := [k for k, x in layers.items() if x.lost]:
        troubles.append(because(Reason.LOST_TO_ROUNDING, layers=lost))
    if unwatched := _unwatched(layers):
        troubles.append(because(Reason.UNWATCHED, layers=unwatched))
    return troubles


def _layer(
    recording: Recording, series: Mapping[str, Series], name: str, clips: float
) -> RecordedLayer:
    timeline, latest = recording.settings.get(name, ()), _latest(recording, name)
    usable = tuple(item for item in timeline if item[1].recorded and not item[1].frozen)
    recorded = series.get(f"weight_norm/{name}", ())
    norms = tuple((step, norm) for step, norm in recorded if norm > 0)  # zeros: no direction
    below = latest.floor is not None and any(norm < latest.floor for _, norm in norms)
    counted = tuple(item for item in timeline if item[1].recorded or item[1].frozen)
    exposure = _exposure(series.get(f"decay_exposure/{name}", ()), counted, norms)
    return RecordedLayer(
        name,
        settings=usable,
        norms=norms,
        exposure=exposure,
        series={q: series[f"{q}/{name}"] for q in QUANTITIES if f"{q}/{name}" in series},
        invariant=_invariant(recording, series, name, dict(exposure)),
        skipped=_why_skipped(timeline, recorded, norms, series.get(f"update_norm/{name}", ())),
        clipped=bool(clips),
        off_law=below or eps_counts(series, name, latest),
        role=latest.role,
        normalised_net=any(x[-1][1].role == "gain" for x in recording.settings.values()),
        frozen=tuple((step, own.frozen) for step, own in timeline),
    )


def _invariant(
    recording: Recording,
    series: Mapping[str, Series],
    name: str,
    exposure: Mapping[int, float],
) -> bool | None:
    """Whether a layer is scale-invariant as last known: gains that start at zero hide it at first.

    What was read off the order of the modules is checked by the gradients, which then have no part
    along the weights.
    """
    recorded = [x.invariant for _, x in recording.settings.get(name, ()) if not x.frozen]
    latest = next((value for value in reversed(recorded) if value is not None), None)
    if not latest or f"invariance/{name}" in series:
        return latest
    cut = cut_entries(series, name)
    early = [
        value
        for step, value in series.get(f"radial_gradient/{name}", ())
        # a gradient of which a clip has cut entries points anywhere
        if exposure.get(step, 0.0) < RULES.too_little_exposure and step not in cut
    ]
    return not early or math.sqrt(fmean(value**2 for value in early)) <= RULES.along


def _with_groups(
    recording: Recording, layers: Mapping[str, RecordedLayer]
) -> dict[str, RecordedLayer]:
    """With one layer in the place of those that are scale-invariant together.

    That is so of layers that decay at one rate. Where some of a group decay and others do not,
    decay changes their sizes relative to each other, which is part of the function.
    """
    grouped = dict(layers)
    groups = [timeline[-1][1].together for timeline in recording.settings.values()]
    for names in dict.fromkeys(names for names in groups if len(names) > 1):
        group = [grouped[name] for name in names if name in grouped]
        exposures = [layer.total_exposure or 0.0 for layer in group]
        usable = len(group) == len(names) and not any(layer.skipped for layer in group)
        if usable and 0 < max(exposures) <= RULES.alike * min(exposures):
            grouped = {name: layer for name, layer in grouped.items() if name not in names}
            whole = joined(group)
            grouped[whole.name] = whole
    return grouped


def _latest(recording: Recording, layer: str) -> LayerSettings:
    timeline = recording.settings.get(layer, ())
    return timeline[-1][1] if timeline else LayerSettings()


def _exposure(recorded: Series, settings: Timeline, norms: Series) -> Series:
    """The decay exposure at the steps of the norms: as recorded, else summed over the steps."""
    recorded_at = dict(recorded)
    exposure = tuple((step, recorded_at[step]) for step, _ in norms if step in recorded_at)
    resumed = any(after < before for (_, before), (_, after) in pairwise(exposure))
    if len(exposure) == len(norms) and not resumed:  # a resumed watch counts from zero again
        return exposure
    starts, rates = [step for step, _ in settings], [known_rate(now) for _, now in settings]
    before = [0.0]  # each of the settings
    for rate, (start, end) in zip(rates, pairwise(starts), strict=False):
        before.append(before[-1] + rate * (end - start))
    exposures = []
    for step, _ in norms:
        last = bisect_right(starts, step) - 1
        total = before[last] + rates[last] * (step + 1 - starts[last]) if last >= 0 else 0.0
        exposures.append((step, total))
    return tuple(exposures)


def _why_skipped(
    timeline: Sequence[tuple[int, LayerSettings]], recorded: Series, norms: Series, moved: Series
) -> Because | None:
    trained = [settings for _, settings in timeline if not settings.frozen]
    if timeline and (not trained or (timeline[-1][1].frozen and len(recorded) < 2)):
        return because(Reason.FROZEN)
    now = trained[-1] if trained else None  # of a layer that was frozen later, what was before
    if now is not None and not now.stepped:
        return because(Reason.NOT_STEPPED)
    if now is None or not now.recorded:
        return because(Reason.NO_LAYER_SETTINGS)
    if len(recorded) < 2:
        return because(Reason.RECORDED_ONCE)
    if len(norms) < 2:
        return because(Reason.ZEROS)
    if moved and not any(length for _, length in moved):
        # without a gradient torch leaves a weight alone, and does not decay it
        return because(Reason.NEVER_MOVED)
    return None
