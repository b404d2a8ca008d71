"""A watch: measures probes when rounds of the optimizers' steps end, and records them."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor, nn

import decaylab
from decaylab.errors import Lacks, WrongType
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.networks.scale_invariance import Invariance
from decaylab.networks.sharded import is_sharded, local, team_of
from decaylab.probes.applied import input_sizes
from decaylab.probes.exposure import ModelExposure, last_counted
from decaylab.probes.gradients import Scaled, gradient_sizes, radial_gradients
from decaylab.probes.layers import Layers, groups_of, layers_of
from decaylab.probes.moments import has_stepped
from decaylab.probes.movement import Snapshot, snapshot, with_vectors
from decaylab.probes.reading import NonFiniteWarning, Reading, row_name
from decaylab.probes.registry import ImageBatches, Moment, Probe
from decaylab.probes.rounds import Rounds
from decaylab.probes.settings import layer_settings
from decaylab.probes.size_response import measured_invariance, with_invariance
from decaylab.records.recorder import Recorder
from decaylab.records.recording import Recording
from decaylab.records.rows import Row, Rows, RowWriter, Tracker


class Watch:
    """What `watch` returns: a context manager with `records`, `log(...)` and `detach()`.

    It measures at the rounds that `Rounds` tells it of, or, without `hooks`, at the steps that its
    owner counts; what it measures goes to a `Recorder`. `steps` counts rounds.
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
        self.model, self.inputs, self.steps = model, inputs, 0
        self.optimizers = tuple(optimizers)
        self.probes = dict(probes)
        self._team = team_of(model)
        self._logits, self._images = logits, images
        self._steps_per_epoch, self._clock = steps_per_epoch, clock or self._own_clock
        self._began = time.perf_counter()
        meta = _meta(self.probes, steps_per_epoch, inputs)
        self._recorder = Recorder(self._now, meta, writer, trackers, warns=first)
        self._detached = False
        self._records = 0  # moments recorded so far
        self._to_measure = False  # whether layers have come that invariance was not measured of
        self._step: _RecordedStep | None = None  # the one that is being taken
        self._earlier: Snapshot | None = None  # the move of the last one, for probes that follow it
        measured = None if inputs is None else measured_invariance(model, inputs, logits)
        self._find_layers(measured)
        self._exposure = ModelExposure(self.optimizers, self.layers)
        self._note_parameters()
        self._rounds = Rounds(self) if hooks else None

    # ------------------------------------------------------------ what was recorded

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first of the optimizers."""
        return self.optimizers[0]

    @property
    def begun_steps(self) -> int:
        """`steps`, plus the current round if some optimizers have already stepped in it."""
        return self.steps + (self._rounds is not None and self._rounds.begun)

    @property
    def records(self) -> Rows:
        """All numbers recorded so far, in the format of a run's own rows."""
        return self._recorder.rows

    @property
    def recording(self) -> Recording:
        """The same with settings, outcomes and events: what `diagnose` reads."""
        return self._recorder.recording

    def log(self, **values: float | Tensor) -> None:
        """Record outcomes at the step just taken: `log(loss=..., test_loss=..., accuracy=...)`.

        Values are numbers or tensors of one number, finite or not. A tensor is read when the next
        record is written, so that nothing waits for the device; after the `with` block, at once.
        `diagnose` needs at least one outcome. Where several processes train, those of the first one
        are written, as they are: take the mean over processes first if that is what you mean.
        """
        for name, value in values.items():
            self._recorder.log(name, _one_number(name, value))
        if self._detached:
            self._recorder.flush()

    def write_to(self, writer: RowWriter) -> None:
        """From now on, also append everything to this file."""
        self._recorder.write_to(writer)

    def resume(self, step: int) -> None:
        """Continue from `step`, a checkpoint's step; rows recorded after it no longer count.

        -1 continues from the start: no row counts.

        With a folder, `records` has its rows up to there, and exposure to decay continues from the
        last of them, with the present lr and decay in the steps since. Without one, exposure is
        counted from here. All processes of a sharded model must call this.
        """
        recorder, team = self._recorder, self._team
        if team is not None:
            team.meet("watched.resume(...)", {"step": step})
        self.steps = max(step, 0)
        if team is None:
            recorder.resume(step)
            in_file = recorder.folder is not None
        else:  # all count records alike, and go on with the first one's

            def resume_first() -> list[Any]:
                recorder.resume(step)
                return [recorder.folder is not None, list(map(astuple, recorder.rows.rows))]

            in_file, rows = team.by_first("watched.resume(...)", resume_first)
            if not team.first:
                recorder.resume(step, [Row(*row) for row in rows])
        earlier = recorder.rows.latest if in_file else {}
        self._exposure = ModelExposure(self.optimizers, self.layers, earlier)
        if (last := last_counted(recorder.rows)) is not None and in_file:
            self._exposure.add_all(self.steps - last)  # taken, but not recorded, before the stop
        steps = {row.step for row in recorder.rows.rows}  # also those at which outcomes were logged
        self._records = len(list(filter(self._at, steps - {0})))
        if self._rounds is not None:  # runs of ours have it in their manifest
            recorder.note("resumed")

    def detach(self) -> None:
        """Take the hooks off the optimizers; the records stay.

        A round that only some of the optimizers have stepped in ends here, and may be recorded: all
        processes of a sharded model must call this.
        """
        rounds = self._rounds
        if rounds is not None:
            rounds.end()
        self._recorder.flush()
        self._detached = True
        if rounds is not None:
            rounds.detach()
            self._rounds = None

    def __repr__(self) -> str:
        names = " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        every = min(self.probes.values(), default=1)
        what = f"{type(self.model).__name__}, {names}, every={every}"
        return f"<Watch of {what}: {self.steps} steps, {len(self._recorder)} rows>"

    def __enter__(self) -> "Watch":
        if self._detached:
            raise Lacks("a watch that has ended", "hooks on the optimizer", "call watch(...) again")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._team is not None and self._rounds is not None:
            self._rounds.abandon()  # others may not have come as far: no record, nothing is sent
        self.detach()

    # ------------------------------------------------------------ steps: `Rounds`' observer

    def wants_step(self) -> bool:
        """Whether the coming step is recorded, so that it must not be a replay of a graph."""
        return bool(self._at(self.steps + 1)) or self._earlier is not None

    def count(self, steps: int) -> None:
        """Count steps of all optimizers that no hook reports."""
        self.steps += steps
        self._exposure.add_all(steps)

    def round_begins(self) -> None:
        """Prepare for a step, which may be recorded."""
        if self._trained != _trained(self._parameters):
            self._find_layers_again()
        if self.wants_step():
            self.before_step()

    def step_begins(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Measure the gradients, if the step is recorded."""
        if self._step is not None:
            self._step.begins(optimizer, closure=closure)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count its exposure, and measure the gradients that a closure took."""
        self._exposure.add(optimizer)
        if self._step is not None:
            self._step.ended(optimizer)

    def round_ended(self) -> None:
        """Count the step, and record it if a record is due."""
        self.steps += 1
        if self._step is None:
            return
        try:
            if self._earlier is not None:  # written below: the first process's disk may be full
                self._record_following(self._earlier)
            if probes := self._at(self.steps):
                self.record(self._without_seldom(probes), self._step.gradients)
            else:
                self._recorder.flush()
        finally:
            self._step = None

    def optimizer_met(
        self, optimizer: torch.optim.Optimizer, replaced: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Watch another optimizer, in place of these or beside the others."""
        name = type(optimizer).__name__
        if replaced:
            names = [type(o).__name__ for o in replaced]
            self._recorder.note("optimizer-changed", was=names, now=name)
            assert self._rounds is not None
            self._rounds.end()
        else:
            self._recorder.note("optimizer-joined", optimizer=name)
        for old in replaced:
            self._exposure.leave(old, self.layers)
        self._exposure.join(optimizer, self.layers)
        self.optimizers = (*(o for o in self.optimizers if o not in replaced), optimizer)
        self._note_parameters()

    def failed(self, what: str, error: Exception) -> None:
        """Warn once: the training must not stop for a probe."""
        self._recorder.warn_once(what, error)

    def _at(self, step: int) -> list[Probe]:
        """The probes of a record after this step, if there is one."""
        return [
            probe
            for probe, every in self.probes.items()
            if (step == 1 or step % every == 0) and not probe.follows
        ]

    def _without_seldom(self, probes: Sequence[Probe]) -> list[Probe]:
        """All but the "seldom" ones, which are measured at the 1st, 4th, 16th ... record."""
        number = self._records + 1
        seldom = number & (number - 1) == 0 and number.bit_length() % 2 == 1
        return [probe for probe in probes if seldom or probe.when != "seldom"]

    # ------------------------------------------------------------ measuring and recording

    def before_step(self) -> None:
        """Keep a copy of the weights before a step that will be recorded."""
        self._recorder.continues = not self.steps and any(map(has_stepped, self.optimizers))
        if self._recorder.continues and self._rounds is not None:
            self._recorder.note("stepped-before")
        if self._trained != _trained(self.model.parameters()):
            self._find_layers_again()
        if self._to_measure and self.inputs is not None:
            self._measure_invariance_again()
        self._step = _RecordedStep(self.layers)

    def measure(self, probes: Sequence[Probe]) -> dict[str, float]:
        """Measure probes now, by row name; nothing is recorded."""
        return self._measured(probes, self._moment())

    def record(
        self, probes: Sequence[Probe], values: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Measure probes now and record them with other values; returns all that was recorded."""
        seldom = any(probe.when == "seldom" for probe in probes)
        if seldom and self.inputs is not None and self._records:  # at first it is known already
            self._measure_invariance_again()
        self._recorder.read_logged()
        measured = self.measure(probes) | dict(values or {})
        self._records += 1
        self._recorder.add(measured)
        if self._rounds is not None:  # without hooks, `record_settings` is called
            self._recorder.add_settings(self.steps, layer_settings(self.optimizers, self.layers))
        follow = any(probe.follows for probe in self.probes)
        self._earlier = self._step.move() if self._step is not None and follow else None
        self._step = None
        self._recorder.flush()
        return measured

    def record_settings(self) -> None:
        """Record how layers are stepped from the next step on, if that has changed."""
        self._recorder.add_settings(self.steps + 1, layer_settings(self.optimizers, self.layers))
        self._recorder.flush()

    def exposure(self) -> dict[str, float]:
        """The decay exposure of each layer since the start."""
        return self._exposure.by_layer(self.layers)

    def _record_following(self, earlier: Snapshot) -> None:
        """What is measured at the step after a record, from both moves."""
        following = [probe for probe in self.probes if probe.follows]
        moment = replace(self._moment(), earlier=earlier)
        self._earlier = None
        self._recorder.add(self._measured(following, moment))

    def _moment(self) -> Moment:
        return Moment(
            self.model,
            self.optimizers,
            self.inputs,
            self.layers,
            None if self._step is None else self._step.before,
            self.exposure(),
            self._logits,
            images=self._images,
        )

    def _measured(self, probes: Sequence[Probe], moment: Moment) -> dict[str, float]:
        rows: dict[str, float] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # said below, once per probe
            for probe in probes:
                try:
                    measured = probe.measure(moment)
                except Exception as error:
                    self._recorder.trouble(probe.name, error)
                    continue
                for reading in [measured] if isinstance(measured, Reading) else measured:
                    rows |= reading.rows()
                    if reading.non_finite:
                        self._recorder.trouble(probe.name, reading.not_finite_sentence())
        return rows

    def _now(self) -> tuple[int, int, float]:
        return (self.steps, *self._clock())

    def _own_clock(self) -> tuple[int, float]:
        seconds = time.perf_counter() - self._began
        per_epoch = self._steps_per_epoch
        return 0 if per_epoch is None else max(self.steps - 1, 0) // per_epoch, seconds

    # ------------------------------------------------------------ the model's layers

    def _find_layers(self, measured: Invariance | None) -> None:
        self._parameters = list(self.model.parameters())  # to go through the modules takes long
        self._trained = _trained(self._parameters)
        self.layers = layers_of(self.model)
        if measured is not None:
            self.layers = with_invariance(self.layers, measured)

    def _find_layers_again(self) -> None:
        """Go on with other layers: some were frozen or thawed, or added to the model."""
        self._find_layers(self.layers.measured)
        self._exposure.begin(self.layers)
        self._to_measure = True

    def _measure_invariance_again(self) -> None:
        self._to_measure = False
        try:
            measured = measured_invariance(self.model, self.inputs, self._logits)
        except Exception as error:
            self._recorder.trouble("size_response", error)
        else:
            self.layers = with_invariance(self.layers, measured)

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
            self._recorder.note("shared-parameters", parameters=shared)
        if unstepped:
            self._recorder.note("unstepped-parameters", parameters=unstepped)


class _RecordedStep:
    """A step of the model that is recorded: the weights before it, and its gradients."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.before = snapshot(with_vectors(layers))
        self.gradients: dict[str, float] = {}
        self._of_optimizers: dict[str, float] = {}  # by layer, |g| of all that its optimizer steps
        self._scaled: Scaled | None = None  # before a step that takes its gradients in a closure

    def begins(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Measure the gradients, which the step may change, unless they are taken in it."""
        scaled = self._layers.scaled
        if closure:
            self._scaled = {k: [p.detach().clone() for p in ps] for k, ps in scaled.items()}
        else:
            self._scaled = None
            self._measure_gradients(optimizer, scaled)

    def ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the gradients that were taken in the step."""
        if self._scaled is not None:
            self._measure_gradients(optimizer, self._scaled)

    def move(self) -> Snapshot:
        """How far the weights have come."""
        now = with_vectors(self._layers).weights
        return {
            layer: {name: now[layer][name].detach() - old for name, old in weights.items()}
            for layer, weights in self.before.items()
        }

    def _measure_gradients(self, optimizer: torch.optim.Optimizer, weights: Scaled) -> None:
        sizes = gradient_sizes(optimizer, self._layers)
        known = self.gradients
        if "gradient_norm" in sizes:
            rows = [
                row_name("optimizer_gradient_norm", x) for x in groups_of(self._layers, optimizer)
            ]
            self._of_optimizers |= dict.fromkeys(rows, sizes["gradient_norm"])
        if "gradient_norm" in known and "gradient_norm" in sizes:  # of another optimizer
            sizes |= self._of_optimizers  # each may be clipped by itself
            sizes["gradient_norm"] = math.hypot(sizes["gradient_norm"], known["gradient_norm"])
            sizes["gradient_max"] = max(sizes["gradient_max"], known["gradient_max"])
        self.gradients = known | radial_gradients(self._layers, weights) | sizes


def _trained(parameters: Iterable[nn.Parameter]) -> list[bool]:
    return [p.requires_grad for p in parameters]


def _meta(probes: Iterable[Probe], steps_per_epoch: int | None, inputs: Inputs) -> dict[str, Any]:
    """Facts of the run."""
    how = {probe.name: dict(probe.how) for probe in probes if probe.how}
    per_epoch = {"steps_per_epoch": steps_per_epoch} if steps_per_epoch else {}
    given = {} if inputs is None else {"inputs": input_sizes(inputs)}
    return {"version": decaylab.__version__, "probes": how, **per_epoch, **given}


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
