"""What records say of a run, in one form: our own run folders and what `watch` recorded.

Nothing is measured here: everything is read off a `Recording`.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from decaylab.diagnosis.lawless import clipped, cut, eps_counts, of_clipped
from decaylab.diagnosis.layers import TOO_LITTLE_EXPOSURE, LayerRecord, Setting
from decaylab.errors import DecaylabError
from decaylab.optim.laws import law_for
from decaylab.optim.laws.dynamics import Series
from decaylab.probes.watch import Watch
from decaylab.records import (
    LayerSettings,
    Recording,
    Row,
    Rows,
    RunFolder,
    read_recording,
    recording_from_rows,
)
from decaylab.training import RunSpec

Source = Watch | Recording | Rows | RunFolder | str | Path

# By layer and of the whole model, what a diagnosis reads.
QUANTITIES = (
    *("effective_lr", "rotation", "second_moment"),
    *("second_order_share", "effective_damping", "kfac_gn_norm"),
)
TOTALS = ("jacobian_norm", "kfac_gn_norm", "gn_norm")
# What radial_gradient is below before decay acts, if a layer is scale-invariant. Rounding gives up
# to 0.02 (16 bits); of a layer that is not, it is about 1.
ALONG = 0.1
# Adagrad forgets nothing. Beside any number of steps, this is as good as 1, and has a mean.
NEVER_FORGETS = 1 - 1e-9
ZEROS = "its weights are zero: it has no direction"


@dataclass(frozen=True)
class Observed:
    """A run as the records have it. `troubles` are sentences that any answer must begin with.

    `decayed_gains`: whether gains of normalisations, which are part of the function, decay too.
    `clipped`: at which part of the records gradients are clipped; 0 where that changes little.
    """

    name: str
    layers: Mapping[str, LayerRecord]
    totals: Mapping[str, Series]
    steps: int
    troubles: tuple[str, ...] = ()
    spec: RunSpec | None = None
    decayed_gains: bool = False
    clipped: float = 0.0

    @property
    def decays(self) -> bool:
        """Whether any layer decays."""
        return any(layer.decayed for layer in self.layers.values())

    @property
    def settled(self) -> bool:
        """Whether it is known how any layer is stepped."""
        return any(layer.settings for layer in self.layers.values())

    @property
    def diverged(self) -> bool:
        """Whether it is said to have diverged."""
        return any("diverged" in trouble for trouble in self.troubles)

    @property
    def own(self) -> bool:
        """Whether it is a run folder of ours."""
        return self.spec is not None


def observe(source: Source, name: str = "the watched run") -> Observed:
    """Read a run folder, a folder that `watch(folder=...)` wrote, a `Watch` or its records.

    `name`: what a `Watch` or its records, which have no name of their own, are called.
    """
    if isinstance(source, Watch):
        return _watched(name, source.recording)
    if isinstance(source, Rows):
        return _watched(name, recording_from_rows(source))
    if not isinstance(source, (str, Path, RunFolder, Recording)):
        raise DecaylabError(
            f"a {type(source).__name__} holds no records: give what `watch(...)` returned, or a"
            " folder of records"
        )
    recording = source if isinstance(source, Recording) else read_recording(source)
    if recording.meta.spec is not None:
        return _own(recording)
    return _watched(recording.name, recording)


def _finite(rows: Rows) -> tuple[list[Row], list[str]]:
    """The rows before the first that is not finite, and what is to be said of the others."""
    troubles = list(rows.damaged)
    if len(troubles) > 1:
        troubles = [f"{len(troubles)} lines are damaged and left out, the first: {troubles[0]}"]
    bad = [row for row in rows.rows if not math.isfinite(row.value)]
    # A Jacobian or a trace may overflow on its own; weights and losses that do end the run.
    ends = ("weight_norm", "train/", "test/loss", "update_norm")
    fatal = min((row.step for row in bad if row.name.startswith(ends)), default=None)
    kept = [row for row in rows.rows if math.isfinite(row.value)]
    if fatal is not None:
        troubles.insert(0, f"it diverged at step {fatal}: only the steps before are judged")
        kept = [row for row in kept if row.step < fatal]
    elif bad:
        names = ", ".join(sorted({row.name for row in bad})[:3])
        said = f"{len(bad)} values were not finite ({names}) and are left out"
        # those of a layer of zeros, which has no direction, are not finite in a sound run too
        own = ("rotation/", "effective_lr/")
        last = {row.name: row for row in rows.rows if not row.name.startswith(own)}
        if lasting := [row for row in last.values() if not math.isfinite(row.value)]:
            said += f", {lasting[0].name} to the end: it has probably diverged"
        troubles.append(said)
    return kept, troubles


def _series(rows: list[Row]) -> dict[str, Series]:
    """By name; of a step that was recorded twice, the later row."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row.step):
        found.setdefault(row.name, {})[row.step] = row.value
    return {name: tuple(values.items()) for name, values in found.items()}


def _norms(recorded: Series) -> Series:
    """Those above zero: a layer of zeros has no direction."""
    return tuple((step, norm) for step, norm in recorded if norm > 0)


def _by_layer(series: Mapping[str, Series], layer: str) -> dict[str, Series]:
    return {q: series[f"{q}/{layer}"] for q in QUANTITIES if f"{q}/{layer}" in series}


def _totals(series: Mapping[str, Series]) -> dict[str, Series]:
    return {name: series[name] for name in TOTALS if name in series}


def _exposure(settings: tuple[tuple[int, Setting], ...], norms: Series) -> Series:
    """The decay exposure at each record: `Setting.rate` summed over the steps up to it."""
    before = [0.0]  # each of the settings
    for (start, setting), (end, _) in pairwise(settings):
        before.append(before[-1] + setting.rate * (end - start))
    found = []
    for step, _ in norms:
        last = bisect_right(settings, step, key=lambda of: of[0]) - 1
        total = 0.0
        if last >= 0:
            start, setting = settings[last]
            total = before[last] + setting.rate * (step + 1 - start)
        found.append((step, total))
    return tuple(found)


def _settings(
    recording: Recording, layer: str, clips: float = 0.0
) -> tuple[tuple[int, Setting], ...]:
    """How a layer was stepped, where that was recorded in full."""
    settings: list[tuple[int, Setting]] = []
    for step, recorded in recording.settings.get(layer, ()):
        if recorded.lr is not None:
            setting = of_clipped(_setting(recorded), clips)
            if not settings or settings[-1][1] != setting:
                settings.append((step, setting))
    return tuple(settings)


def _setting(recorded: LayerSettings) -> Setting:
    beta2, memory = recorded.beta2, recorded.momentum
    return Setting(
        lr=recorded.lr or 0.0,
        decay=recorded.decay,
        weight_decay=recorded.weight_decay,
        memory=recorded.beta1 or 0.0 if memory is None else memory,
        dampening=recorded.dampening or 0.0,
        beta2=None if beta2 is None else min(beta2, NEVER_FORGETS),
        power=law_for(recorded).norm_power,
        damping=recorded.damping,
        scale_free=bool(recorded.scale_free),
        factor_decay=recorded.factor_decay or 0.0,
        refresh_every=recorded.refresh_every or 1,
        invert_every=recorded.invert_every or 1,
        rounding=recorded.rounding,
    )


def _last(recording: Recording, layer: str) -> LayerSettings:
    timeline = recording.settings.get(layer, ())
    return timeline[-1][1] if timeline else LayerSettings()


def _gains_decay(recording: Recording) -> bool:
    """Whether gains, which are part of the function as layers are, decay too."""
    timelines = recording.settings.values()
    return any(own.role == "gain" and own.decays for timeline in timelines for _, own in timeline)


# ---------------------------------------------------------------- watched runs


def _watched(name: str, recording: Recording) -> Observed:
    kept, troubles = _finite(recording.rows)
    series = _series(kept)
    if not kept:
        troubles.append("nothing was recorded: train inside `with watch(model, optimizer):`")
    recorded = (n.split("/", 1)[1] for n in series if n.startswith("weight_norm/"))
    gains = {layer for layer in recording.settings if _last(recording, layer).role == "gain"}
    named = [
        layer for layer in dict.fromkeys((*recorded, *recording.settings)) if layer not in gains
    ]
    first = min((row.step for row in kept), default=0)
    if first > 1:
        troubles.append(
            f"its records begin at step {first}, so what decay did before is not judged (with"
            " watch(folder=...), a run that is resumed keeps its records)"
        )
    lasts = {layer: _last(recording, layer) for layer in named}
    clips = {layer: clipped(series, layer, lasts[layer].rounding) for layer in named}
    layers = {layer: _watched_layer(recording, series, layer, clips[layer]) for layer in named}
    if kept and not recording.settings:
        troubles.append("the optimizer's settings are not in these records: record them again")
    elif layers and all("less than twice" in layer.skipped for layer in layers.values()):
        troubles.append(
            "it has fewer than two records of the norms, so no layer can be judged: keep"
            " `weight_norm` among the probes, and lower `every`"
        )
    if along := [k for k in layers if not layers[k].invariant and f"radial_gradient/{k}" in series]:
        troubles.append(
            f"{', '.join(along[:4])}{' and others' * (len(along) > 4)}: a normalisation comes next"
            " in the model, but the gradients point along the weights, so they do not count as"
            " scale-invariant. To measure it, give watch(..., inputs=batch)"
        )
    if eps := [layer for layer in layers if eps_counts(series, layer, lasts[layer])]:
        names = f"{', '.join(eps[:4])}{' and others' * (len(eps) > 4)}"
        troubles.append(
            f"{names}: the optimizer's eps is more than a tenth of what it is added to, so that its"
            " steps are neither Adam's nor SGD's. Lower it"
        )
    steps = max((row.step for row in kept), default=0)
    most = max(clips.values(), default=0.0)
    decayed_gains = _gains_decay(recording)
    return Observed(
        name, layers, _totals(series), steps, tuple(troubles), None, decayed_gains, most
    )


def _watched_layer(
    recording: Recording, series: Mapping[str, Series], layer: str, clips: float
) -> LayerRecord:
    last, settings = _last(recording, layer), _settings(recording, layer, clips)
    recorded = series.get(f"weight_norm/{layer}", ())
    norms = _norms(recorded)
    floor = any(norm < (last.floor or 0.0) for _, norm in norms)  # between lr and lr/|W|
    if floor or eps_counts(series, layer, last):
        settings = tuple((step, replace(setting, power=None)) for step, setting in settings)
    exposures = dict(series.get(f"decay_exposure/{layer}", ()))
    exposure = tuple((step, exposures[step]) for step, _ in norms if step in exposures)
    resumed = any(after < before for (_, before), (_, after) in pairwise(exposure))
    if len(exposure) < len(norms) or resumed:  # a resumed watch counts from zero again
        exposure = _exposure(settings, norms)
    known, cut_off = dict(exposure), cut(series, layer)
    early = [
        value
        for step, value in series.get(f"radial_gradient/{layer}", ())
        # a gradient of which a clip has cut entries points anywhere
        if known.get(step, 0.0) < TOO_LITTLE_EXPOSURE and step not in cut_off
    ]
    along = bool(early) and math.sqrt(fmean(value**2 for value in early)) > ALONG
    return LayerRecord(
        layer,
        invariant=bool(last.invariant) and not along,
        settings=settings,
        norms=norms,
        exposure=exposure,
        series=_by_layer(series, layer),
        skipped=_why_skipped(last, recorded, series.get(f"update_norm/{layer}", ())),
        size=last.size,
    )


def _why_skipped(last: LayerSettings, recorded: Series, updates: Series) -> str:
    if last.frozen and len(recorded) < 2:  # else it was trained for a time
        return "frozen: it is not trained"
    if not last.stepped and not last.frozen:
        return "the watched optimizer does not hold it"
    if last.lr is None and not last.frozen:
        return "its optimizer's settings are not in the records"
    if len(recorded) < 2:
        return "its norm was recorded less than twice: record weight_norm more often"
    if len(_norms(recorded)) < 2:
        return ZEROS
    if updates and not any(length for _, length in updates):
        # without a gradient torch leaves a weight alone, and does not decay it
        return "no step has moved it: it has no gradient, or a learning rate of 0"
    return ""


# ---------------------------------------------------------------- our own runs


def _own(recording: Recording) -> Observed:
    meta = recording.meta
    spec = RunSpec.from_mapping(meta.spec or {}).resolved()
    kept, troubles = _finite(recording.rows)
    epochs = max((row.epoch for row in kept), default=0)
    if meta.status == "diverged" and not any("diverged" in trouble for trouble in troubles):
        troubles.insert(0, f"it diverged ({meta.message})")
    elif meta.status != "finished" and meta.status != "diverged":
        troubles.insert(
            0, f"it is not finished ({meta.status}): {epochs} of {spec.epochs} epochs are judged"
        )
    series = _series(kept)
    names = [n.removeprefix("weight_norm/") for n in series if n.startswith("weight_norm/")]
    if not names:
        troubles.append("no norms are recorded: train it first")
    layers = {}
    for name in names:
        settings = _settings(recording, name)
        recorded = series[f"weight_norm/{name}"]
        norms = _norms(recorded)
        skipped = ZEROS if len(norms) < 2 else ""
        if len(recorded) < 2:
            skipped = "its norm was recorded less than twice: train longer"
        layers[name] = LayerRecord(
            name,
            invariant=bool(_last(recording, name).invariant),
            settings=settings,
            norms=norms,
            exposure=_exposure(settings, norms),
            series=_by_layer(series, name),
            skipped=skipped,
        )
    steps = max((row.step for row in kept), default=0)
    return Observed(recording.name, layers, _totals(series), steps, tuple(troubles), spec)
