"""What a recording says of a run, as diagnosis and advice read it. Nothing is measured here."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from decaylab.diagnosis.commands import Address
from decaylab.diagnosis.limits import clipped, cut_entries, eps_counts
from decaylab.diagnosis.reasons import Because, Reason, because
from decaylab.diagnosis.rules import RULES
from decaylab.optim.decay import DECAYS
from decaylab.optim.laws import Kfac, Law, Sgd, Unknown, law_for
from decaylab.optim.laws.dynamics import Series
from decaylab.optim.laws.memory import by_step
from decaylab.records.recording import Recording
from decaylab.records.settings import LayerSettings
from decaylab.records.sources import Source, as_recording

# By layer and of the whole model, what a diagnosis reads.
QUANTITIES = (
    *("effective_lr", "rotation", "update_norm", "second_moment", "second_order_share"),
    *("effective_damping", "kfac_gn_norm", "size_response", "direction_response"),
)
EVENT_REASONS = {
    "shared-parameters": Reason.SHARED_PARAMETERS,
    "unstepped-parameters": Reason.UNSTEPPED_PARAMETERS,
}
TOTALS = ("jacobian_norm", "kfac_gn_norm", "gn_norm", "clip_coefficient")


def shrink_under(settings: LayerSettings, weight_decay: float) -> float:
    """The fraction of the weights that a decay of this strength removes per step."""
    return law_for(settings).shrink(weight_decay, settings.decay, settings.lr or 0.0)


@dataclass(frozen=True)
class RecordedLayer:
    """One layer in the records, or several that are scale-invariant together (`members`).

    Attributes:
        settings: (from step, how it is stepped), by step.
        norms: above zero. exposure: the decay exposure at the steps of `norms`.
        invariant: whether its size is not part of the function; None if that is not known.
        skipped: why it cannot be judged. clipped: whether its gradients are.
        off_law: whether its steps depart from their law, because of an eps or a floor.
        size_limit: per cent of the outputs per per cent of its size, from which on that counts.
        normalised_net: whether normalisations stand somewhere in the network, so that the size of
            a layer may hardly count though it is not scale-invariant.
    """

    name: str
    settings: tuple[tuple[int, LayerSettings], ...] = ()
    norms: Series = ()
    exposure: Series = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    invariant: bool | None = False
    skipped: Because | None = None
    clipped: bool = False
    off_law: bool = False
    members: tuple[str, ...] = ()
    role: str = "weight"
    normalised_net: bool = False
    size_limit: float = RULES.size_little

    @cached_property
    def law(self) -> Law:
        """How its steps depend on its norm."""
        if not self.settings or self.off_law:
            return Unknown()
        law = law_for(self.settings[0][1])
        if self.changed_law:
            return Unknown()
        return law.clipped() if self.clipped else law

    @property
    def changed_law(self) -> bool:
        """Whether it was stepped by another kind of optimizer for a time."""
        return len({type(law_for(settings)) for _, settings in self.settings}) > 1

    @cached_property
    def stepping(self) -> tuple[tuple[int, LayerSettings], ...]:
        """The settings without what says nothing of its steps; the same of layers stepped alike."""
        timeline: list[tuple[int, LayerSettings]] = []
        for step, settings in self.settings:
            now = replace(settings, size=0, role="weight", invariant=None, together=())
            if not timeline or timeline[-1][1] != now:
                timeline.append((step, now))
        return tuple(timeline)

    @property
    def first(self) -> LayerSettings:
        """The first settings: kind of decay, law and momentum, which do not change in a run."""
        return self.settings[0][1]

    @property
    def preconditioned(self) -> bool:
        """Whether K-FAC steps it, which has a damping; others may step by its law without one."""
        return isinstance(self.law, Kfac) and self.first.damping is not None

    @property
    def natural(self) -> bool:
        """Whether steps go with the norm: K-FAC's of natural length (Eq. 13), torch's Adafactor."""
        return isinstance(self.law, Kfac) and self.law.norm_power == 0

    @property
    def decayed(self) -> bool:
        """Whether it ever has a decay term that rounding does not undo."""
        return any(settings.decays for _, settings in self.settings) and not self.lost

    @property
    def lost(self) -> bool:
        """Whether rounding undoes all of its decay."""
        decaying = [settings for _, settings in self.settings if settings.decays and settings.lr]
        return bool(decaying) and all(settings.lost for settings in decaying)

    @cached_property
    def unknown(self) -> Because | None:
        """Why it is not known which fraction of it decay takes per step; None if it is."""
        for _, settings in self.settings:
            if (why := self.why_unknown(settings)) is not None:
                return why
        return None

    def why_unknown(self, settings: LayerSettings) -> Because | None:
        """The same under one of its settings."""
        if not settings.decays:
            return None
        if settings.decay not in DECAYS:
            return because(Reason.KIND_UNKNOWN, kind=settings.decay)
        if settings.decay == "l2" and not isinstance(law_for(settings), Sgd):
            return because(Reason.L2_RESCALED)
        rate = shrink_under(settings, settings.weight_decay)
        if 0 < rate < settings.rounding:
            return because(Reason.ROUNDED_AWAY)
        return because(Reason.TAKES_ALL) if rate >= 1 else None  # weights that change sign grow

    def rate(self, settings: LayerSettings) -> float:
        """What a step adds to the decay exposure; 0 where that is not known."""
        if not settings.decays or self.why_unknown(settings):
            return 0.0
        return shrink_under(settings, settings.weight_decay)

    def settings_at(self, step: int) -> LayerSettings:
        """Those that step `step` (from 1) was taken with."""
        after = bisect_right(self.settings, step, key=lambda item: item[0])
        return self.settings[max(after - 1, 0)][1]

    @cached_property
    def moments(self) -> Series:
        """Adam's |v| (`second_moment`), if it counts and is recorded wherever the norm is."""
        recorded = self.series.get("second_moment", ())
        counts = self.law.adam_betas is not None
        return recorded if counts and by_step(self.norms, recorded) else ()

    @cached_property
    def effective_per_lr(self) -> Series:
        """The effective learning rate over lr (Eq. 9) at the recorded norms; Adam's has memory."""
        return self.law.effective_per_lr(self.norms, self.moments)

    @property
    def effective(self) -> Series:
        """The effective learning rate at the recorded norms."""
        return tuple(
            (step, (self.settings_at(step).lr or 0.0) * value)
            for step, value in self.effective_per_lr
        )

    @property
    def total_exposure(self) -> float | None:
        """The decay exposure at the end; None if it is not known."""
        return self.exposure[-1][1] if self.exposure and not self.unknown else None

    @property
    def size_response(self) -> float | None:
        """Per cent by which the logits change, in size and direction, per per cent of its size."""
        if self.members:
            return 0.0  # which is how such layers are found
        size, direction = self.last("size_response"), self.last("direction_response")
        return None if size is None else 100 * math.hypot(size, direction or 0.0)

    @property
    def size_counts(self) -> bool | None:
        """Whether its size is part of what the network computes; None if that is not known.

        Gains count as such, also those before a ReLU, a layer and a normalisation, which are
        scale-invariant together with their shifts: the mechanisms are those of weights. Adapters
        count however little they change the outputs: it is all that they do.
        """
        if self.role in ("gain", "adapter"):
            return True
        if self.invariant:
            return False
        if self.size_response is not None:
            return self.size_response > self.size_limit
        may_hardly = self.normalised_net and self.role == "weight"
        return None if self.invariant is None or may_hardly else True

    def last(self, quantity: str) -> float | None:
        """The last recorded value."""
        recorded = self.series.get(quantity, ())
        return recorded[-1][1] if recorded else None


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

    @property
    def name(self) -> str:
        """What it is called."""
        return self.recording.name

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The spec of a run of our own trainer, else None."""
        return self.recording.meta.spec

    @property
    def address(self) -> Address:
        """Where commands find it."""
        folder, spec = self.recording.meta.folder, self.spec
        seed = None if spec is None else spec.get("seed", 0)
        if folder is not None and folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())  # as short as it can be typed
        return Address("" if folder is None else str(folder), spec is not None, seed)

    @property
    def decays(self) -> bool:
        """Whether any layer decays."""
        return any(layer.decayed for layer in self.layers.values())

    @property
    def settled(self) -> bool:
        """Whether it is known how any layer is stepped."""
        return any(layer.settings for layer in self.layers.values())

    @property
    def decayed_layers(self) -> list[RecordedLayer]:
        """Those with a decay term that are not skipped."""
        return [x for x in self.layers.values() if x.decayed and not x.skipped]

    @property
    def turned_layers(self) -> list[RecordedLayer]:
        """The decayed layers whose size hardly matters: decay sets how far steps turn them."""
        return [layer for layer in self.decayed_layers if layer.size_counts is False]

    @property
    def unwatched(self) -> list[str]:
        """Layers that move, by an optimizer that is not watched: their decay is not known."""
        return [
            layer.name
            for layer in self.layers.values()
            if layer.skipped is not None
            and layer.skipped.reason is Reason.NOT_STEPPED
            and len({norm for _, norm in layer.norms}) > 1
        ]


def read_run(source: Source, name: str | None = None) -> Run:
    """A run from its recording; `name` for those that have none of their own."""
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
    clips = {layer: clipped(series, layer, _rounding(recording, layer)) for layer in names}
    layers = {layer: _layer(recording, series, layer, clips[layer]) for layer in names}
    gains = tuple(k for k, x in layers.items() if x.role == "gain")
    decayed_gains = tuple(k for k in gains if layers[k].decayed)
    layers = {k: x for k, x in layers.items() if k not in gains or x.norms}
    layers = _joined(recording, layers)
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
    )


def _finite(recording: Recording) -> tuple[dict[str, Series], list[Because], bool]:
    """Series of what is finite, before a divergence; what is to be said of the rest."""
    troubles: list[Because] = []
    rows, status = recording.rows, recording.meta.status
    if rows.damaged:
        troubles.append(because(Reason.DAMAGED, count=len(rows.damaged), first=rows.damaged[0]))
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
        names = sorted({row.name for row in bad})
        kind = Reason.PROBABLY_DIVERGED if to_the_end else Reason.NOT_FINITE
        lasting = [row.name for row in to_the_end]
        data = {"count": len(bad), "names": names[:3], "lasting": lasting[:1]}
        troubles.append(because(kind, **data))
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
        if event.kind in EVENT_REASONS:
            parameters[event.kind] = event.data["parameters"]
        elif event.kind in ("optimizer-changed", "optimizer-joined"):
            parameters = {}  # what holds of those that are there now is recorded after it
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
        troubles.append(because(Reason.TOO_FEW_NORMS))
    along = [k for k, x in layers.items() if not x.invariant and f"radial_gradient/{k}" in series]
    if along:
        troubles.append(because(Reason.GRADIENTS_ALONG, layers=along))
    if eps := [k for k in layers if eps_counts(series, k, _latest(recording, k))]:
        troubles.append(because(Reason.EPS_COUNTS, layers=eps))
    if lost := [k for k, x in layers.items() if x.lost]:
        troubles.append(because(Reason.LOST_TO_ROUNDING, layers=lost))
    if unwatched := Run(recording, layers, {}, 0).unwatched:
        troubles.append(because(Reason.UNWATCHED, layers=unwatched))
    return troubles


def _layer(
    recording: Recording, series: Mapping[str, Series], name: str, clips: float
) -> RecordedLayer:
    timeline = recording.settings.get(name, ())
    usable = tuple(item for item in timeline if item[1].lr is not None and not item[1].frozen)
    recorded = series.get(f"weight_norm/{name}", ())
    norms = tuple((step, norm) for step, norm in recorded if norm > 0)  # zeros: no direction
    floor = timeline[-1][1].floor if timeline else None
    layer = RecordedLayer(
        name,
        settings=usable,
        role=_latest(recording, name).role,
        normalised_net=any(x[-1][1].role == "gain" for x in recording.settings.values()),
        norms=norms,
        series={q: series[f"{q}/{name}"] for q in QUANTITIES if f"{q}/{name}" in series},
        clipped=bool(clips),
        off_law=any(norm < (floor or 0.0) for _, norm in norms)
        or eps_counts(series, name, _latest(recording, name)),
    )
    exposure_at = dict(series.get(f"decay_exposure/{name}", ()))
    exposure = tuple((step, exposure_at[step]) for step, _ in norms if step in exposure_at)
    resumed = any(after < before for (_, before), (_, after) in pairwise(exposure))
    if len(exposure) < len(norms) or resumed:  # a resumed watch counts from zero again
        exposure = _exposure(layer)
    skipped = _why_skipped(timeline, recorded, norms, series.get(f"update_norm/{name}", ()))
    layer = replace(layer, exposure=exposure, skipped=skipped)
    return replace(layer, invariant=_invariant(recording, series, layer))


def _invariant(
    recording: Recording, series: Mapping[str, Series], layer: RecordedLayer
) -> bool | None:
    """As last known: gains that start at zero hide it for a time.

    What was read off the order of the modules is checked by the gradients, which then have no part
    along the weights.
    """
    recorded = [x.invariant for _, x in recording.settings.get(layer.name, ()) if not x.frozen]
    latest = next((value for value in reversed(recorded) if value is not None), None)
    if not latest or f"invariance/{layer.name}" in series:
        return latest
    exposure, cut = dict(layer.exposure), cut_entries(series, layer.name)
    early = [
        value
        for step, value in series.get(f"radial_gradient/{layer.name}", ())
        # a gradient of which a clip has cut entries points anywhere
        if exposure.get(step, 0.0) < RULES.too_little_exposure and step not in cut
    ]
    return not early or math.sqrt(fmean(value**2 for value in early)) <= RULES.along


def _joined(recording: Recording, layers: Mapping[str, RecordedLayer]) -> dict[str, RecordedLayer]:
    """With one layer in the place of those that are scale-invariant together.

    That is so of layers that decay at one rate. Where some of a group decay and others do not,
    decay changes their sizes relative to each other, which is part of the function.
    """
    joined = dict(layers)
    groups = [timeline[-1][1].together for timeline in recording.settings.values()]
    for names in dict.fromkeys(names for names in groups if len(names) > 1):
        group = [joined[name] for name in names if name in joined]
        exposures = [layer.total_exposure or 0.0 for layer in group]
        usable = len(group) == len(names) and not any(layer.skipped for layer in group)
        if usable and _alike(exposures):
            joined = {name: layer for name, layer in joined.items() if name not in names}
            whole = _whole(group)
            joined[whole.name] = whole
    return joined


def _alike(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) <= RULES.alike * min(values)


def _whole(group: Sequence[RecordedLayer]) -> RecordedLayer:
    """Several layers as one: their weights are one vector, with one norm and one rotation."""
    first = group[0]
    steps = set.intersection(*({step for step, _ in layer.norms} for layer in group))

    def combined(series: Sequence[Series]) -> Series:
        value_at = [dict(values) for values in series]
        common_steps = sorted(step for step in steps if all(step in values for values in value_at))
        return tuple(
            (step, math.sqrt(sum(v[step] ** 2 for v in value_at))) for step in common_steps
        )

    norms = combined([layer.norms for layer in group])
    lengths = combined([layer.series.get("update_norm", ()) for layer in group])
    turned = [
        tuple((s, angle * dict(x.norms).get(s, 0.0)) for s, angle in x.series.get("rotation", ()))
        for x in group
    ]
    across, sizes = combined(turned), dict(norms)
    rotation = tuple((step, length / sizes[step]) for step, length in across if step in sizes)
    exposure = tuple(item for item in first.exposure if item[0] in sizes)
    other = group[1].name if len(group) == 2 else f"{len(group) - 1} more"
    roles = {layer.role for layer in group}
    return replace(
        first,
        name=f"{first.name} + {other}",
        role=first.role if len(roles) == 1 else "weight",
        norms=norms,
        exposure=exposure,
        series={"rotation": rotation, "update_norm": lengths},
        invariant=True,
        members=tuple(layer.name for layer in group),
    )


def counterpart(layer: RecordedLayer, baseline: Run | None) -> RecordedLayer | None:
    """The same layer, or the same layers as one, in the baseline."""
    if baseline is None or not layer.members:
        return baseline.layers.get(layer.name) if baseline is not None else None
    group = [baseline.layers[name] for name in layer.members if name in baseline.layers]
    return _whole(group) if len(group) == len(layer.members) else None


def _latest(recording: Recording, layer: str) -> LayerSettings:
    timeline = recording.settings.get(layer, ())
    return timeline[-1][1] if timeline else LayerSettings()


def _rounding(recording: Recording, layer: str) -> float:
    return _latest(recording, layer).rounding


def _exposure(layer: RecordedLayer) -> Series:
    """The decay exposure at each record: `RecordedLayer.rate` summed over the steps up to it."""
    rates = [layer.rate(settings) for _, settings in layer.settings]
    before = [0.0]  # each of the settings
    for rate, ((start, _), (end, _)) in zip(rates, pairwise(layer.settings), strict=False):
        before.append(before[-1] + rate * (end - start))
    exposures = []
    for step, _ in layer.norms:
        last = bisect_right(layer.settings, step, key=lambda item: item[0]) - 1
        total = 0.0
        if last >= 0:
            total = before[last] + rates[last] * (step + 1 - layer.settings[last][0])
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
    if now is None or now.lr is None:
        return because(Reason.NO_LAYER_SETTINGS)
    if len(recorded) < 2:
        return because(Reason.RECORDED_ONCE)
    if len(norms) < 2:
        return because(Reason.ZEROS)
    if moved and not any(length for _, length in moved):
        # without a gradient torch leaves a weight alone, and does not decay it
        return because(Reason.NEVER_MOVED)
    return None
