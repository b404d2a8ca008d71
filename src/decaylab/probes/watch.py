"""Watch a training run: measure probes at every n-th step of any torch optimizer and record them.

    with watch(model, optimizer, every=100) as watched:
        ...  # your own loop
        watched.log(loss=loss, test_loss=test_loss)
    watched.records.series("effective_lr/features.0")

It uses the optimizers' step hooks, so it works in plain loops and under Lightning or accelerate
(it looks through their optimizer wrappers). Between two records it adds a few microseconds to a
step. The trainer of `decaylab train` uses the same object, and tells it of steps itself.

A sharded model (`fully_shard`, tensor parallelism) is watched by all of its processes together: all
call `watch`, `resume` and `detach` (or leave the `with` block) alike. Each then has all numbers, of
the whole model, and the first one writes them. Processes send each other something in these calls
and in steps that are recorded, and nowhere else: `records`, `log` and `diagnose` may be used by one
alone. A `with` block that an error ends sends nothing.
"""

import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import decaylab
from decaylab.curvature.capture import data_parallel
from decaylab.curvature.preserve import bare
from decaylab.errors import AT_LEAST_ONE, BadValue, Lacks, WrongType
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.networks.scale_invariance import Invariance
from decaylab.networks.sharded import (
    Team,
    is_sharded,
    local,
    put_back,
    refuse_flat_parameters,
    team_of,
)
from decaylab.optim.kfac import KFAC
from decaylab.probes.applied import changed, check_call, floating
from decaylab.probes.exposure import Exposure
from decaylab.probes.gradients import Scaled, gradient_sizes, radial_gradients
from decaylab.probes.layers import Layers, layers_of, stepped_by
from decaylab.probes.moments import has_stepped
from decaylab.probes.movement import Snapshot, snapshot, with_vectors
from decaylab.probes.reading import NonFiniteWarning, Reading
from decaylab.probes.registry import PROBES, ImageBatches, Moment, Probe, probe_named
from decaylab.probes.settings import layer_settings
from decaylab.probes.size_response import measured_invariance, with_invariance
from decaylab.records.packing import read_contents
from decaylab.records.recording import LOGGED, Recording, recording_of
from decaylab.records.rows import (
    Contents,
    Entry,
    Event,
    Row,
    Rows,
    RowWriter,
    SettingsChange,
    Tracker,
)
from decaylab.records.settings import LayerSettings

VOIDED = (
    "this optimizer has stepped before, but the rows in this folder, up to step {}, no longer"
    " count: to continue them, call watched.resume(step) before the first step"
)
SHARED = "another watch or process writes to it too: give each its own folder"
Probes = Iterable[str | Probe] | Mapping[str | Probe, int]


class Watch:
    """What `watch` returns: a context manager with `records`, `log(...)` and `detach()`.

    `steps` counts rounds: a round ends when every watched optimizer has stepped, or when one steps
    again before that (loops that alternate between optimizers, or use only one of them).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        probes: Mapping[Probe, int],
        *,
        inputs: Inputs = None,
        logits: LogitsRule = None,
        images: ImageBatches | None = None,
        steps_per_epoch: int | None = None,
        clock: Callable[[], tuple[int, float]] | None = None,
        writer: RowWriter | None = None,
        trackers: Iterable[Tracker] = (),
        hooks: bool = True,
        first: bool = True,
    ) -> None:
        self._team, self._first = team_of(model), first
        self.model, self.inputs, self.steps = model, inputs, 0
        self.optimizers = tuple(optimizers)
        self.probes = dict(probes)
        self.every = min(self.probes.values(), default=1)
        self._logits, self._images = logits, images
        self._steps_per_epoch, self._clock = steps_per_epoch, clock or self._own_clock
        self._writer, self._trackers = writer, list(trackers)
        self._began = time.perf_counter()
        self._rows: list[Row] = []
        self._changes: list[SettingsChange] = []
        self._events: list[Event] = []
        self._logged: list[tuple[int, int, float, str, Any]] = []
        self._unwritten: list[Entry] = []
        self._settings: dict[str, LayerSettings] = {}
        self._warned: set[str] = set()
        self._troubles: dict[str, Exception | str] = {}  # reported after everything else
        self._detached = False
        self._anew, self._begun = True, False  # whether a file's rows become void, is begun
        self._records = 0  # moments recorded so far
        self._exposures = {optimizer: Exposure(optimizer) for optimizer in self.optimizers}
        self._carried: dict[str, float] = {}  # exposure from before a resume
        self._before: Snapshot | None = None
        self._earlier: Snapshot | None = None
        self._gradients: dict[str, float] = {}
        self._scaled: Scaled = {}
        self._closure = self._continues = False
        self._inside: torch.optim.Optimizer | None = None  # whose step is being taken
        self._joining: torch.optim.Optimizer | None = None  # whose first step is not a round's
        self._stepped: set[torch.optim.Optimizer] = set()  # in this round
        self._handles: dict[torch.optim.Optimizer, list[Any]] = {}
        self._global_handle: Any = None
        self._measured_scales: Invariance | None = None
        if inputs is not None:
            self._measured_scales = measured_invariance(model, inputs, logits)
        self._find_layers()
        self._note_parameters()
        if hooks:
            for optimizer in self.optimizers:
                self._attach(optimizer)
            self._global_handle = _hear_of_all(self)

    # ------------------------------------------------------------ what was recorded

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first of the optimizers."""
        return self.optimizers[0]

    @property
    def begun_steps(self) -> int:
        """`steps`, plus the current round if some optimizers have already stepped in it."""
        return self.steps + bool(self._stepped)

    @property
    def records(self) -> Rows:
        """All numbers recorded so far, in the format of a run's own rows."""
        self._take_logged()
        return Rows(tuple(self._rows))

    @property
    def recording(self) -> Recording:
        """The same with settings, outcomes and events: what `diagnose` reads."""
        contents = Contents(self.records, tuple(self._changes), tuple(self._events), self._meta())
        if self._writer is None:
            return recording_of("the watched run", contents)
        folder = self._writer.path.parent
        return recording_of(str(folder), contents, folder=folder)

    def log(self, **values: float | Tensor) -> None:
        """Record outcomes at the step just taken: `log(loss=..., test_loss=..., accuracy=...)`.

        Values are numbers or tensors of one number, finite or not. A tensor is read when the next
        record is written, so that nothing waits for the device; after the `with` block, at once.
        `diagnose` needs at least one outcome. Where several processes train, those of the first one
        are written, as they are: take the mean over processes first if that is what you mean.
        """
        epoch, seconds = self._clock()
        for name, value in values.items():
            number = _one_number(name, value)
            self._logged.append((self.steps, epoch, seconds, name, number))
        if self._detached:
            self._flush()

    def note(self, kind: str, **data: Any) -> None:
        """Record an event: something that happened to the run or to its recording."""
        event = Event(self.steps, kind, data)
        self._events.append(event)
        self._unwritten.append(event)

    def resume(self, step: int) -> None:
        """Continue from `step`, a checkpoint's step; rows recorded after it no longer count.

        -1 continues from the start: no row counts.

        With a folder, `records` has its rows up to there, and exposure to decay continues from the
        last of them. Without one, exposure is counted from here. All processes of a sharded model
        must call this.
        """
        if self._team is not None:
            self._team.meet("watched.resume(...)", {"step": step})
        self.steps = max(step, 0)
        self._exposures = {optimizer: Exposure(optimizer) for optimizer in self.optimizers}
        self._begin_exposure()
        self._rows = [row for row in self._rows if row.step <= step]
        self._changes = [change for change in self._changes if change.step <= step]
        self._events = [event for event in self._events if event.step <= step]
        self._logged, self._unwritten = [], []
        self._settings = {}  # those that changed past the checkpoint are to be recorded again
        self._carried, self._anew = {}, False
        if self._team is None:
            self._read_again(step)
        else:  # all count records alike, and go on with the first one's

            def known() -> list[Any]:
                self._read_again(step)
                return [[astuple(row) for row in self._rows], self._carried]

            rows, self._carried = self._team.by_first("watched.resume(...)", known)
            self._rows = [Row(*row) for row in rows]
        self._records = len({row.step for row in self._rows})
        if self._handles:  # runs of ours have it in their manifest
            self.note("resumed")

    def _read_again(self, step: int) -> None:
        if self._writer is None:
            return
        self._writer.resume(step)
        contents = read_contents(self._writer.path)
        self._rows, self._changes = list(contents.rows.rows), list(contents.settings)
        self._events = list(contents.events)
        self._carried = _last_exposure(contents.rows)

    def detach(self) -> None:
        """Take the hooks off the optimizers; the records stay.

        A round that only some of the optimizers have stepped in ends here, and may be recorded: all
        processes of a sharded model must call this.
        """
        if self._stepped:  # a round that not all have taken part in
            self._end_round()
        self._flush()
        self._detached = True
        for handle in [h for handles in self._handles.values() for h in handles]:
            handle.remove()
        self._handles = {}
        if self._global_handle is not None:
            self._global_handle.remove()
            self._global_handle = None

    def __repr__(self) -> str:
        names = " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        what = f"{type(self.model).__name__}, {names}, every={self.every}"
        return f"<Watch of {what}: {self.steps} steps, {len(self._rows)} rows>"

    def __enter__(self) -> "Watch":
        if self._detached:
            raise Lacks("a watch that has ended", "hooks on the optimizer", "call watch(...) again")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._team is not None:
            self._stepped = set()  # others may not have come as far: no record, nothing is sent
        self.detach()

    # ------------------------------------------------------------ steps, as hooks tell of them

    def wants_step(self) -> bool:
        """Whether the coming step is recorded, so that it must not be a replay of a graph."""
        return self._due(self.steps + 1) or self._earlier is not None

    def step_replayed(self) -> None:
        """Count a step that was replayed from a graph, in which hooks do not run."""
        self.count(1)

    def write_to(self, writer: RowWriter) -> None:
        """From now on, also append everything to this file."""
        self._writer, self._anew, self._begun = writer, False, False

    @property
    def layers(self) -> Layers:
        """The layers of the model, as known now."""
        return self._layers

    def count(self, steps: int) -> None:
        """Count steps of all optimizers that no hook reports."""
        self.steps += steps
        for exposure in self._exposures.values():
            exposure.add(steps)

    def _due(self, step: int) -> bool:
        return any(self._due_probes(step))

    def _due_probes(self, step: int) -> list[Probe]:
        """The probes of a record after this step; "seldom" ones at the 1st, 4th, 16th ... one."""
        number = self._records + 1
        seldom = number & (number - 1) == 0 and number.bit_length() % 2 == 1
        return [
            probe
            for probe, every in self.probes.items()
            if (step == 1 or step % every == 0)
            and not probe.follows
            and (probe.when != "seldom" or seldom)
        ]

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        before = optimizer.register_step_pre_hook(self._step_begins)
        # first of all, so that what other hooks do to the weights (decay) is part of the step
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(before.id, last=False)
        after = optimizer.register_step_post_hook(self._step_ended)
        self._handles[optimizer] = [before, after]

    def _met(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer steps: if it moves parameters of this model, watch it from now on.

        One that holds parameters of a watched one takes its place. One that does not has joined
        them, and its first step belongs to the round that the others have just ended.
        """
        if self._inside is not None or _is_wrapper(optimizer):
            return
        if any(value is known for value in vars(optimizer).values() for known in self.optimizers):
            return  # it only calls one that is watched
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, self.model.parameters())):
            return
        replaced = [o for o in self.optimizers if any(id(p) in held for p in stepped_by([o]))]
        remaining = tuple(o for o in self.optimizers if o not in replaced)
        names = [type(o).__name__ for o in replaced]
        if replaced:
            self.note("optimizer-changed", was=names, now=type(optimizer).__name__)
            if self._stepped:
                self._end_round()
        else:
            self.note("optimizer-joined", optimizer=type(optimizer).__name__)
            self._joining = optimizer if self.steps and not self._stepped else None
        for old in replaced:
            for handle in self._handles.pop(old, []):
                handle.remove()
            totals = self._exposures.pop(old).by_layer(with_vectors(self._layers))
            for layer, total in totals.items():
                self._carried[layer] = self._carried.get(layer, 0.0) + total
        self.optimizers = (*remaining, optimizer)
        self._exposures[optimizer] = Exposure(optimizer)
        self._exposures[optimizer].begin(with_vectors(self._layers))
        self._attach(optimizer)
        self._note_parameters()

    def _step_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._inside is optimizer and _inner(optimizer):
            return
        self._inside = optimizer
        if self._joining is optimizer:
            return
        try:
            if optimizer in self._stepped:
                self._end_round()
            if not self._stepped:
                self._begin_round()
            if self._before is not None:
                self._gather(optimizer, args, kwargs)
        except Exception as error:  # the training must not stop for a probe
            self._warn_once("snapshot", error)

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._inside is not optimizer or _inner(optimizer):
            return
        self._inside = None
        self._exposures[optimizer].add()
        if self._joining is optimizer:
            self._joining = None
            return
        self._stepped.add(optimizer)
        if self._before is not None and self._closure:
            try:
                self._measure_gradients(optimizer, self._scaled)
            except Exception as error:
                self._warn_once("gradients", error)
        if len(self._stepped) == len(self.optimizers):
            self._end_round()

    def _begin_round(self) -> None:
        if self._due(self.steps + 1) or self._earlier is not None:
            self.before_step()

    def before_step(self) -> None:
        """Keep a copy of the weights before a step that will be recorded."""
        self._scaled, self._gradients, self._closure = {}, {}, False
        self._continues = not self.steps and any(map(has_stepped, self.optimizers))
        if self._trained != [p.requires_grad for p in self.model.parameters()]:
            if self.inputs is not None:
                self._measure_invariance_again()
            self._find_layers()  # some were frozen or thawed
        self._before = snapshot(with_vectors(self._layers))

    def _gather(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        scaled = self._layers.scaled
        self._closure = any(map(callable, [*args[1:], *kwargs.values()]))
        if self._closure:  # the gradients are taken in the step
            self._scaled = {k: [p.detach().clone() for p in ps] for k, ps in scaled.items()}
        else:  # before the step, which may change the gradients
            self._measure_gradients(optimizer, scaled)

    def _measure_gradients(self, optimizer: torch.optim.Optimizer, weights: Scaled) -> None:
        sizes = gradient_sizes(optimizer, self._layers)
        known = self._gradients
        if "gradient_norm" in known and "gradient_norm" in sizes:  # of another optimizer
            sizes["gradient_norm"] = math.hypot(sizes["gradient_norm"], known["gradient_norm"])
            sizes["gradient_max"] = max(sizes["gradient_max"], known["gradient_max"])
        self._gradients = known | radial_gradients(self._layers, weights) | sizes

    def _end_round(self) -> None:
        self.steps += 1
        self._stepped = set()
        if self._before is None:
            return
        try:
            if self._earlier is not None:  # written below: the first process's disk may be full
                self._unwritten.extend(self._following_rows())
            if due := self._due_probes(self.steps):
                self.record(due, self._gradients)
            else:
                self._flush()
        except Exception as error:
            self._warn_once("records", error)
        self._before = None

    # ------------------------------------------------------------ recording

    def record(
        self, probes: Sequence[Probe], values: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Measure probes now and record them with other values; returns all that was recorded."""
        seldom = any(probe.when == "seldom" for probe in probes)
        if seldom and self.inputs is not None and self._records:  # at first it is known already
            self._measure_invariance_again()
        follow = any(probe.follows for probe in self.probes) and self._before is not None
        self._take_logged()
        measured = self._measured(probes, self._moment()) | dict(values or {})
        self._records += 1
        changes = self._changed_settings(self.steps) if self._handles else []
        rows = self._as_rows(measured)
        self._earlier = self._last_move() if follow else None
        self._before = None
        self._keep([*rows, *changes])
        return measured

    def measure(self, probes: Sequence[Probe]) -> dict[str, float]:
        """Measure probes now, by row name; nothing is recorded."""
        return self._measured(probes, self._moment())

    def record_settings(self) -> None:
        """Record how layers are stepped from the next step on, if that has changed."""
        self._keep(self._changed_settings(self.steps + 1))

    def _changed_settings(self, step: int) -> list[SettingsChange]:
        now = layer_settings(self.optimizers, self._layers)
        changed = {k: settings for k, settings in now.items() if settings != self._settings.get(k)}
        self._settings = now
        changes = [SettingsChange(step, layer, settings) for layer, settings in changed.items()]
        self._changes.extend(changes)
        return changes

    def _following_rows(self) -> list[Row]:
        following = [probe for probe in self.probes if probe.follows]
        moment = replace(self._moment(), earlier=self._earlier)
        self._earlier = None
        return self._as_rows(self._measured(following, moment))

    def _last_move(self) -> Snapshot:
        assert self._before is not None
        now = with_vectors(self._layers).weights
        return {
            layer: {name: now[layer][name].detach() - old for name, old in weights.items()}
            for layer, weights in self._before.items()
            if layer in now
        }

    def _moment(self) -> Moment:
        return Moment(
            self.model,
            self.optimizers,
            self.inputs,
            self._layers,
            self._before,
            self.exposure(),
            self._logits,
            images=self._images,
        )

    def exposure(self) -> dict[str, float]:
        """The decay exposure of each layer since the start."""
        totals: dict[str, float] = {}
        for exposure in self._exposures.values():
            totals |= exposure.by_layer(with_vectors(self._layers))
        return {layer: total + self._carried.get(layer, 0.0) for layer, total in totals.items()}

    def _measured(self, probes: Sequence[Probe], moment: Moment) -> dict[str, float]:
        rows: dict[str, float] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # said below, once per probe
            for probe in probes:
                try:
                    measured = probe.measure(moment)
                except Exception as error:
                    self._trouble(probe.name, error)
                    continue
                for reading in [measured] if isinstance(measured, Reading) else measured:
                    rows |= reading.rows()
                    if reading.non_finite:
                        self._trouble(probe.name, reading.not_finite_sentence())
        return rows

    def _as_rows(self, values: Mapping[str, float]) -> list[Row]:
        epoch, seconds = self._clock()
        # one string for all rows of a name: they stay in memory
        rows = [Row(self.steps, epoch, seconds, sys.intern(k), v) for k, v in values.items()]
        self._rows.extend(rows)
        return rows

    def _own_clock(self) -> tuple[int, float]:
        seconds = time.perf_counter() - self._began
        per_epoch = self._steps_per_epoch
        return 0 if per_epoch is None else max(self.steps - 1, 0) // per_epoch, seconds

    def _keep(self, entries: Sequence[Entry]) -> None:
        """Show rows to the trackers and write everything, behind all else: a disk may be full."""
        self._unwritten.extend(entries)
        self._flush()

    def _take_logged(self) -> None:
        logged, self._logged = self._logged, []
        rows = [
            Row(step, epoch, seconds, sys.intern(LOGGED + name), float(value))
            for step, epoch, seconds, name, value in logged
        ]
        self._rows.extend(rows)
        self._unwritten.extend(rows)

    def _flush(self) -> None:
        self._take_logged()
        entries, self._unwritten = self._unwritten, []
        if not entries:
            return
        self._show([entry for entry in entries if isinstance(entry, Row)])
        troubles, self._troubles = self._troubles, {}
        for name, trouble in troubles.items():
            self._warn_once(name, trouble)
        if self._writer is not None:
            self._write(self._writer, entries)

    def _write(self, writer: RowWriter, entries: Sequence[Entry]) -> None:
        anew, begun = self._anew, self._begun
        self._anew, self._begun = False, True
        voided = read_contents(writer.path).rows.rows if self._continues and anew else ()
        writer.append(entries, anew=anew, meta=None if begun else self._meta())
        if voided:
            last = max(row.step for row in voided)
            self.note("rows-voided", last_step=last)
            self._warn_once("earlier rows", VOIDED.format(last))
        if writer.shared:
            self._warn_once("folder", SHARED)

    def _meta(self) -> dict[str, Any]:
        how = {probe.name: dict(probe.how) for probe in self.probes if probe.how}
        per_epoch = {"steps_per_epoch": self._steps_per_epoch} if self._steps_per_epoch else {}
        return {"version": decaylab.__version__, "probes": how, **per_epoch}

    def _show(self, rows: Sequence[Row]) -> None:
        """Hand rows to the trackers; one that fails, maybe after a long wait, is asked no more."""
        if not rows:
            return
        for tracker in tuple(self._trackers):
            try:
                tracker.log(rows)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn_once(f"{type(tracker).__name__} is dropped", error)

    # ------------------------------------------------------------ the model's layers

    def _find_layers(self) -> None:
        self._trained = [p.requires_grad for p in self.model.parameters()]
        self._layers = layers_of(self.model)
        if self._measured_scales is not None:
            self._layers = with_invariance(self._layers, self._measured_scales)
        self._begin_exposure()

    def _begin_exposure(self) -> None:
        for exposure in self._exposures.values():
            exposure.begin(with_vectors(self._layers))

    def _measure_invariance_again(self) -> None:
        try:
            self._measured_scales = measured_invariance(self.model, self.inputs, self._logits)
        except Exception as error:
            self._trouble("size_response", error)
        else:
            self._layers = with_invariance(self._layers, self._measured_scales)

    def _note_parameters(self) -> None:
        """Events for parameters that two optimizers hold, and for trained ones that none holds."""
        holders: dict[int, int] = {}
        for optimizer in self.optimizers:
            for p in {id(p) for group in optimizer.param_groups for p in group["params"]}:
                holders[p] = holders.get(p, 0) + 1
        named = dict(self.model.named_parameters())
        shared = [name for name, p in named.items() if holders.get(id(p), 0) > 1]
        unstepped = [n for n, p in named.items() if p.requires_grad and id(p) not in holders]
        if shared:
            self.note("shared-parameters", parameters=shared)
        if unstepped:
            self.note("unstepped-parameters", parameters=unstepped)

    def _trouble(self, name: str, what: Exception | str) -> None:
        if name not in self._warned:
            self._troubles[name] = what
            if isinstance(what, Exception):
                self.note("probe-failed", probe=name, error=f"{type(what).__name__}: {what}")

    def _warn_once(self, name: str, trouble: Exception | str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        if not self._first:
            return
        message = trouble if isinstance(trouble, str) else f"{type(trouble).__name__}: {trouble}"
        text = f"watch: {name} at step {self.steps}: {message} (shown once; training continues)"
        warnings.warn(text, stacklevel=3)


def _one_number(name: str, value: float | Tensor) -> float | Tensor:
    """What is logged; refused here rather than at the record in which it would be read."""
    if is_sharded(value) and not all(place.is_replicate() for place in value.placements):  # type: ignore[union-attr]
        raise WrongType(
            name, value, "one number that this process has", f"log {name}.full_tensor()"
        )
    if isinstance(value, Tensor) and value.numel() == 1:
        return local(value).clone()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise WrongType(name, value, "one number", "give its mean, say") from error


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    every: int = 100,
    probes: Probes | str | None = None,
    inputs: Inputs = None,
    logits: LogitsRule = None,
    steps_per_epoch: int | None = None,
    folder: str | Path | None = None,
    trackers: Iterable[Tracker] = (),
) -> Watch:
    """Record probes after step 1 and after every `every`-th step of the optimizers.

    Works with any model and any torch optimizer. A probe that fails warns once and never stops the
    training. How each layer is stepped (lr, decay, ...) is also recorded, at the start and whenever
    it changes, so `diagnose` needs nothing but the records. An optimizer that starts to step this
    model later is noticed and watched too. Several processes that train one model (`fully_shard`,
    tensor parallelism, DistributedDataParallel) all call this; the first one writes.

    Args:
        model: the model that is trained, wrapped or not; where DistributedDataParallel wraps it,
            the wrapper itself, which says which process is the first. With `wrapper.module` each
            process would take itself for the only one, and write.
        optimizer: the optimizer that steps it, or a list; also wrappers that hold it as
            `.optimizer`.
        every: steps between two records.
        probes: names from `PROBES`, or your own `Probe`s; by default those that cost nothing and,
            with `inputs`, how the outputs react to each layer's scale, measured rarely. A mapping
            gives each probe its own steps between records. "diagnosis" adds to the defaults what
            `diagnose` needs for the other mechanisms: how updates correlate, the Jacobian norm (for
            tokens the Gauss-Newton norm), K-FAC's second-order share.
        inputs: a fixed batch for probes that run the model, and to find scale-invariant layers by
            experiment instead of by module order: a tensor, a tuple of arguments, a mapping of
            keyword arguments, or a function that takes the model and returns its output. Of a
            sharded model, all processes take the first one's tensors.
        logits: where the logits are, if the model's output is not a tensor and has no `logits`: a
            name, an index, or a function of the output. By default the first floating-point tensor
            of two or more axes.
        steps_per_epoch: for the epoch of each row, which is 0 without it.
        folder: also append records to `rows.jsonl` in this folder. An earlier run's rows in it are
            ignored, unless this run continues that one (`Watch.resume`).
        trackers: also send rows to these (`decaylab.integrations.trackers`). One that fails warns
            once and is dropped; `tracker.log(watched.records.rows)` sends the rows later.
    """
    wrapped = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [_torch_optimizer(each) for each in wrapped]
    given, model = model, bare(model)
    if not isinstance(model, nn.Module):
        raise WrongType("model", model, "a torch module", "call watch(model, optimizer)")
    refuse_flat_parameters(model)
    put_back(model)
    chosen = _chosen(probes, every, optimizers, inputs)
    model_parameters = set(map(id, model.parameters()))
    for held in [stepped_by([each]) for each in optimizers] or [{}]:
        if model_parameters.isdisjoint(map(id, held)):
            remedy = "pass watch the model it was built with"
            raise Lacks("the optimizer", "parameter of this model", remedy)
    if inputs is not None:
        check_call(model, inputs)
    for probe in chosen:
        if probe.needs_inputs and inputs is None:
            remedy = "pass inputs=... to watch, because it runs the model"
            raise Lacks(f"the probe {probe.name!r}", "inputs", remedy)
    alone = hasattr(trackers, "log")
    trackers = () if alone else tuple(trackers)
    if alone or not all(hasattr(tracker, "log") for tracker in trackers):
        wanted = "a list of objects with log(rows), such as [TensorBoard(folder)]"
        raise BadValue("trackers", trackers, wanted)
    team, writer = team_of(model), None
    if team is not None:
        inputs = _shared(team, inputs, {probe.name: steps for probe, steps in chosen.items()})
    first = _writes(given, team)
    if folder is not None and first:
        writer = RowWriter(Path(folder) / "rows.jsonl")

    def make_folder() -> None:
        if writer is not None:
            writer.path.parent.mkdir(parents=True, exist_ok=True)

    if team is None:
        make_folder()
    else:
        team.by_first("watch(...)", make_folder)
    return Watch(
        model,
        optimizers,
        chosen,
        inputs=inputs,
        logits=logits,
        steps_per_epoch=steps_per_epoch,
        writer=writer,
        trackers=trackers if first else (),
        first=first,
    )


def _writes(model: nn.Module, team: Team | None) -> bool:
    """Whether this process writes the records: the first of those that train a model together."""
    if team is not None:
        return team.first
    wrapper = data_parallel(model)
    return wrapper is None or dist.get_rank(wrapper.process_group) == 0


def _shared(team: Team, inputs: Inputs, every: Mapping[str, int]) -> Inputs:
    """The first one's inputs, once all processes have called `watch` alike."""
    shapes: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    changed(inputs, note)
    team.meet("watch(...)", {"steps between records": every, "shapes of the inputs": shapes})
    return changed(inputs, lambda tensor: tensor if is_sharded(tensor) else team.from_first(tensor))


def free_probes() -> tuple[str, ...]:
    """The names of the probes that cost nothing and are always measured."""
    return tuple(n for n, probe in PROBES.items() if probe.cost == "free" and not probe.follows)


def _chosen(
    probes: Probes | str | None,
    every: int,
    optimizers: Sequence[torch.optim.Optimizer],
    inputs: Inputs,
) -> dict[Probe, int]:
    """The probes, and after how many steps each."""
    if probes is None:
        probes = (*free_probes(), *(("size_response",) if inputs is not None else ()))
    elif isinstance(probes, str):
        if probes != "diagnosis":
            raise BadValue("probes", probes, 'a list of names, or "diagnosis"')
        share = ("second_order_share",) if any(isinstance(o, KFAC) for o in optimizers) else ()
        function = "jacobian_norm" if inputs is None or floating(inputs) else "gn_norm"
        probes = (*free_probes(), "update_correlation", "size_response", function, *share)
    steps_of: dict[Any, int] = dict.fromkeys(probes, every)
    if isinstance(probes, Mapping) and all(isinstance(n, int) for n in probes.values()):
        steps_of = dict(probes)
    chosen = {}
    for probe, steps in steps_of.items():
        AT_LEAST_ONE.check("every", steps)
        chosen[probe if isinstance(probe, Probe) else probe_named(probe)] = steps
    AT_LEAST_ONE.check("every", every)
    return chosen


def _last_exposure(rows: Rows) -> dict[str, float]:
    start = "decay_exposure/"
    last = {name: series[-1].value for name, series in rows.by_name.items()}
    return {n.removeprefix(start): value for n, value in last.items() if n.startswith(start)}


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer behind the wrappers of accelerate and Lightning."""
    while not isinstance(optimizer, torch.optim.Optimizer) or _is_wrapper(optimizer):
        if not hasattr(optimizer, "optimizer"):
            remedy = "call watch(model, optimizer)"
            raise WrongType("optimizer", optimizer, "a torch optimizer", remedy)
        optimizer = optimizer.optimizer
    return optimizer


def _hear_of_all(watched: Watch) -> Any:
    """Tell the watch of every optimizer that steps and is not one of its own."""
    reference = weakref.ref(watched)

    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is None or optimizer in alive._exposures:
            return
        try:
            alive._met(optimizer)
        except Exception as error:
            alive._warn_once("another optimizer", error)

    return register_optimizer_step_pre_hook(begins)


def _inner(optimizer: torch.optim.Optimizer) -> bool:
    """Whether these hooks are those of `super().step()` inside a subclass's own `step`.

    torch hangs the hooks on the step of every class that has been instantiated.
    """
    if sum(hasattr(vars(kind).get("step"), "hooked") for kind in type(optimizer).__mro__) < 2:
        return False
    code = getattr(type(optimizer).step, "__code__", None)  # torch's, that of all of them
    frame: Any = sys._getframe()
    steps = 0
    while frame is not None:
        steps += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def _is_wrapper(optimizer: Any) -> bool:
    """Whether this optimizer only holds another one (accelerate, Lightning)."""
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer)
