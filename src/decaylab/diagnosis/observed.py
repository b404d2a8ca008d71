"""What records say of a run, in one form: our own run folders and what `watch` recorded.

Nothing is measured here. Of an own run the layers' roles and settings follow from its spec, of a
watched one from the `setting_*` rows.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch

from decaylab import networks
from decaylab.data import DATA_SETS
from decaylab.diagnosis.lawless import clipped, cut, eps_counts, of_clipped
from decaylab.diagnosis.layers import TOO_LITTLE_EXPOSURE, LayerRecord, Setting
from decaylab.errors import DecaylabError
from decaylab.optim import schedules
from decaylab.optim.decay import DECAYS, OPTIMIZERS
from decaylab.optim.laws.dynamics import Series
from decaylab.probes.watch import Watch
from decaylab.records import Row, Rows, RunFolder
from decaylab.records.rows import read_rows
from decaylab.training import RunSpec
from decaylab.training.build import build_network, decay_groups

POWERS = {"sgd": 2, "adam": 1, "kfac": 0}
Source = Watch | Rows | RunFolder | str | Path

# By layer and of the whole model, what a diagnosis reads.
QUANTITIES = (
    *("effective_lr", "rotation", "second_moment"),
    *("second_order_share", "effective_damping", "kfac_gn_norm"),
)
SETTINGS = {"lr", "decay", "weight_decay"}
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
        return _watched(name, source.records)
    if isinstance(source, Rows):
        return _watched(name, source)
    if isinstance(source, RunFolder):
        return _own(source)
    if not isinstance(source, (str, Path)):
        raise DecaylabError(
            f"a {type(source).__name__} holds no records: give what `watch(...)` returned, or a"
            " folder of records"
        )
    path = Path(source)
    if (path / "spec.toml").exists():
        return _own(RunFolder(path))
    rows = path if path.is_file() else path / "rows.jsonl"
    if not rows.exists():
        raise DecaylabError(
            f"{path} holds no records: give a run folder, or a folder that watch(folder=...) wrote"
        )
    return _watched(str(path), read_rows(rows))


def _finite(rows: Rows) -> tuple[list[Row], list[str]]:
    """The rows before the first that is not finite, and what is to be said of the others."""
    troubles = list(rows.damaged)
    if len(troubles) > 1:
        troubles = [f"{len(troubles)} lines are damaged and left out, the first: {troubles[0]}"]
    bad = [row for row in rows.rows if not math.isfinite(row.value)]
    # A Jacobian or a trace may overflow on its own; weights and losses that do end the run.
    ends = ("norm", "weight_norm", "train/", "test/loss", "update_norm")
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


# ---------------------------------------------------------------- watched runs


def _watched(name: str, rows: Rows) -> Observed:
    kept, troubles = _finite(rows)
    series = _series(kept)
    if not kept:
        troubles.append("nothing was recorded: train inside `with watch(model, optimizer):`")
    named = dict.fromkeys(
        row.name.split("/", 1)[1]
        for row in kept
        if row.name.startswith(("weight_norm/", "setting_", "norm/")) and "/" in row.name
    )
    first = min((row.step for row in kept), default=0)
    if first > 1:
        troubles.append(
            f"its records begin at step {first}, so what decay did before is not judged (with"
            " watch(folder=...), a run that is resumed keeps its records)"
        )
    clips = {layer: clipped(series, layer) for layer in named}
    layers = {layer: _watched_layer(series, layer, clips[layer]) for layer in named}
    if kept and not any(name.startswith("setting_") for name in series):
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
    if eps := [layer for layer in layers if eps_counts(series, layer)]:
        names = f"{', '.join(eps[:4])}{' and others' * (len(eps) > 4)}"
        troubles.append(
            f"{names}: the optimizer's eps is more than a tenth of what it is added to, so that its"
            " steps are neither Adam's nor SGD's. Lower it"
        )
    steps = max((row.step for row in kept), default=0)
    gains = any(count for _, count in series.get("decayed_gains", ()))
    most = max(clips.values(), default=0.0)
    return Observed(name, layers, _totals(series), steps, tuple(troubles), None, gains, most)


def _watched_layer(series: Mapping[str, Series], layer: str, clips: float) -> LayerRecord:
    values: dict[int, dict[str, float]] = {}
    for name, rows in series.items():
        if name.startswith("setting_") and name.split("/", 1)[1] == layer:
            key = name.split("/", 1)[0].removeprefix("setting_")
            for step, value in rows:
                values.setdefault(step, {})[key] = value
    now: dict[str, float] = {}
    settings: list[tuple[int, Setting]] = []
    for step in sorted(values):
        now = now | values[step]
        if now.keys() >= SETTINGS:  # records may be cut off between two of them
            setting = of_clipped(_setting(now), clips)
            if not settings or settings[-1][1] != setting:
                settings.append((step, setting))
    recorded = series.get(f"weight_norm/{layer}", series.get(f"norm/{layer}", ()))
    norms = _norms(recorded)
    floor = any(norm < now.get("floor", 0.0) for _, norm in norms)  # between lr and lr/|W|
    if floor or eps_counts(series, layer):
        settings = [(step, replace(setting, power=None)) for step, setting in settings]
    exposures = dict(series.get(f"decay_exposure/{layer}", ()))
    exposure = tuple((step, exposures[step]) for step, _ in norms if step in exposures)
    resumed = any(after < before for (_, before), (_, after) in pairwise(exposure))
    if len(exposure) < len(norms) or resumed:  # a resumed watch counts from zero again
        exposure = _exposure(tuple(settings), norms)
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
        invariant=now.get("invariant", 0.0) == 1.0 and not along,
        settings=tuple(settings),
        norms=norms,
        exposure=exposure,
        series=_by_layer(series, layer),
        skipped=_why_skipped(now, recorded, series.get(f"update_norm/{layer}", ())),
        size=int(now.get("size", 0)),
    )


def _why_skipped(now: Mapping[str, float], recorded: Series, updates: Series) -> str:
    if now.get("frozen") and len(recorded) < 2:  # else it was trained for a time
        return "frozen: it is not trained"
    if now.get("moved") == 0.0:
        return "the watched optimizer does not hold it"
    if not now.keys() >= SETTINGS:
        return "its optimizer's settings are not in the records"
    if len(recorded) < 2:
        return "its norm was recorded less than twice: record weight_norm more often"
    if len(_norms(recorded)) < 2:
        return ZEROS
    if updates and not any(length for _, length in updates):
        # without a gradient torch leaves a weight alone, and does not decay it
        return "no step has moved it: it has no gradient, or a learning rate of 0"
    return ""


def _setting(now: Mapping[str, float]) -> Setting:
    power, beta2 = now.get("power"), now.get("beta2")
    return Setting(
        lr=now["lr"],
        decay=DECAYS[int(now["decay"])],
        weight_decay=now["weight_decay"],
        memory=now.get("momentum", now.get("beta1", 0.0)),
        dampening=now.get("dampening", 0.0),
        beta2=None if beta2 is None else min(beta2, NEVER_FORGETS),
        power=None if power is None else int(power),
        damping=now.get("damping"),
        scale_free=bool(now.get("scale_free")),
        factor_decay=now.get("factor_decay", 0.0),
        refresh_every=int(now.get("refresh_every", 1)),
        invert_every=int(now.get("invert_every", 1)),
        rounding=now.get("rounding", 0.0),
    )


# ---------------------------------------------------------------- our own runs


def _own(folder: RunFolder) -> Observed:
    spec = RunSpec.of_run(folder).resolved()
    kept, troubles = _finite(folder.rows())
    manifest = folder.manifest()
    status = manifest.status if manifest else "not started"
    epochs = max((row.epoch for row in kept), default=0)
    if status == "diverged" and not any("diverged" in trouble for trouble in troubles):
        troubles.insert(0, f"it diverged ({manifest.message if manifest else ''})")
    elif status != "finished" and status != "diverged":
        troubles.insert(
            0, f"it is not finished ({status}): {epochs} of {spec.epochs} epochs are judged"
        )
    if not any(row.name.startswith("norm/") for row in kept):
        troubles.append("no norms are recorded: train it first")
    series = _series(kept)
    per_epoch = next((row.step // row.epoch for row in reversed(kept) if row.epoch), 0)
    names = [name.removeprefix("norm/") for name in series if name.startswith("norm/")]
    invariant, decayed = _invariant_and_decayed(spec)
    layers = {}
    for name in names:
        settings = _timeline(spec, max(per_epoch, 1), name in decayed)
        recorded = series[f"norm/{name}"]
        norms = _norms(recorded)
        skipped = ZEROS if len(norms) < 2 else ""
        if len(recorded) < 2:
            skipped = "its norm was recorded less than twice: train longer"
        layers[name] = LayerRecord(
            name,
            invariant=name in invariant,
            settings=settings,
            norms=norms,
            exposure=_exposure(settings, norms),
            series=_by_layer(series, name),
            skipped=skipped,
        )
    steps = max((row.step for row in kept), default=0)
    return Observed(folder.id, layers, _totals(series), steps, tuple(troubles), spec)


def _invariant_and_decayed(spec: RunSpec) -> tuple[set[str], set[str]]:
    """Names of the scale-invariant layers and of those that decay; no weight is made."""
    facts = DATA_SETS[spec.data]
    with torch.device("meta"):
        model = build_network(spec, facts.classes, *facts.shape[:2])
    found = networks.roles(model)
    invariant = {role.module for role in found.values() if role.role == "invariant"}
    decayed = [group for group in decay_groups(spec, model) if group["weight_decay"]]
    return invariant, {found[name].module for group in decayed for name in group["names"]}


def _timeline(spec: RunSpec, per_epoch: int, decayed: bool) -> tuple[tuple[int, Setting], ...]:
    kind = OPTIMIZERS[spec.optimizer]
    betas = spec.betas or (0.0, 0.0)
    schedule = schedules.step(spec.lr_drop_every or 1, spec.lr_drop_factor)
    found: list[tuple[int, Setting]] = []
    for epoch in range(spec.epochs or 0):
        setting = Setting(
            lr=schedule(epoch, spec.lr or 0.0),
            decay=spec.decay if decayed else "none",
            weight_decay=spec.weight_decay if decayed else 0.0,
            memory=betas[0] if kind == "adam" else spec.momentum or 0.0,
            beta2=betas[1] if kind == "adam" else None,
            power=POWERS[kind],
            damping=spec.damping,
            scale_free=spec.damping_scaling == "scale-free",
            factor_decay=spec.factor_decay or 0.0,
            refresh_every=spec.refresh_every or 1,
            invert_every=spec.invert_every or 1,
        )
        if not found or found[-1][1] != setting:
            found.append((epoch * per_epoch + 1, setting))
    return tuple(found)
