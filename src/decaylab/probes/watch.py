"""Watching a training run: probes at every n-th step of any torch optimizer, as records.

    with watch(model, optimizer, every=100) as watched:
        ...  # your own loop
    watched.records.series("effective_lr/features.0")

It hangs on the optimizer's step hooks, so that it works in plain loops and under Lightning or
accelerate (whose optimizer wrappers are looked through). Between two records a step costs a few
microseconds.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decaylab.curvature.untouched import bare, check_inputs
from decaylab.errors import DecaylabError
from decaylab.optim.kfac import KFAC
from decaylab.probes.damping import effective_damping
from decaylab.probes.exposure import Exposure
from decaylab.probes.gauss_newton import (
    fisher_rao_norm,
    gauss_newton_norm,
    kfac_gauss_newton_norm,
)
from decaylab.probes.gradients import Scaled, gradient_sizes, radial_gradients
from decaylab.probes.jacobian import jacobian_norm
from decaylab.probes.moments import has_stepped, second_moments
from decaylab.probes.reading import NonFiniteWarning, Reading
from decaylab.probes.settings import layer_settings
from decaylab.probes.traces import curvature_traces
from decaylab.probes.weights import (
    Layers,
    Snapshot,
    effective_learning_rate,
    layers_of,
    movement,
    snapshot,
    weight_norms,
)
from decaylab.records.recording import Recording, recording_of
from decaylab.records.rows import (
    Contents,
    Row,
    Rows,
    RowWriter,
    SettingsChange,
    Tracker,
    read_contents,
    read_rows,
)
from decaylab.records.settings import LayerSettings

Cost = Literal["free", "one backward", "many"]


@dataclass(frozen=True)
class Moment:
    """What a probe is shown: the step just taken.

    Attributes:
        model: the bare model.
        optimizer: the torch optimizer that took the step.
        inputs: the batch given to `watch`, or None.
        layers: the model's layers, found once.
        before: the weights before the step.
        exposure: decay exposure of each layer since the watch began.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Any
    layers: Layers
    before: Snapshot
    exposure: dict[str, float]


@dataclass(frozen=True)
class Probe:
    """A named measurement, what it costs, and whether it needs a batch of inputs.

    Costs: "free" (no pass through the model), "one backward" (about one training step), "many".
    """

    name: str
    cost: Cost
    measure: Callable[[Moment], Reading | Sequence[Reading]]
    needs_inputs: bool = False


def _second_order_share(moment: Moment) -> Reading:
    if not isinstance(moment.optimizer, KFAC):
        raise DecaylabError("second_order_share needs a K-FAC optimizer")
    kfac = moment.optimizer
    return effective_damping(moment.model, kfac.factors(), kfac.dampings())


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe("weight_norm", "free", lambda m: weight_norms(m.layers)),
        Probe("movement", "free", lambda m: movement(m.layers, m.before)),
        Probe("effective_lr", "free", lambda m: effective_learning_rate(m.layers, m.optimizer)),
        Probe("decay_exposure", "free", lambda m: Reading("decay_exposure", "1", m.exposure)),
        Probe("second_moment", "free", lambda m: second_moments(m.layers, m.optimizer)),
        Probe(
            "gn_norm",
            "one backward",
            lambda m: gauss_newton_norm(m.model, m.inputs, per_layer=False),
            needs_inputs=True,
        ),
        Probe(
            "fr_norm",
            "one backward",
            lambda m: fisher_rao_norm(m.model, m.inputs, per_layer=False),
            needs_inputs=True,
        ),
        Probe("jacobian_norm", "many", lambda m: jacobian_norm(m.model, m.inputs), True),
        Probe("kfac_gn_norm", "many", lambda m: kfac_gauss_newton_norm(m.model, [m.inputs]), True),
        Probe(
            "fisher_trace",
            "many",
            lambda m: curvature_traces(m.model, m.inputs, curvature="fisher", samples=8),
            needs_inputs=True,
        ),
        Probe(
            "gn_trace",
            "many",
            lambda m: curvature_traces(m.model, m.inputs, curvature="gauss-newton", samples=8),
            needs_inputs=True,
        ),
        Probe("second_order_share", "many", _second_order_share),
    )
}
VOIDED = (
    "this optimizer has stepped before, but the rows in this folder, up to step {}, do not count"
    " any more: to go on with them, call watched.resume(step) before the first step"
)
SHARED = "another watch or process writes to it, too: give each a folder of its own"
FREE = tuple(name for name, probe in PROBES.items() if probe.cost == "free")


class Watch:
    """What `watch` returns: a context manager with `records`, and `detach()`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        probes: Sequence[Probe],
        *,
        every: int,
        inputs: Tensor | None,
        steps_per_epoch: int | None,
        writer: RowWriter | None,
        trackers: Iterable[Tracker],
    ) -> None:
        self.model, self.optimizer, self.inputs = model, optimizer, inputs
        self.probes, self.every = tuple(probes), every
        self.steps = 0
        self._rows: list[Row] = []
        self._writer, self._steps_per_epoch = writer, steps_per_epoch
        self._trackers = list(trackers)
        self._began = time.perf_counter()
        self._exposure = Exposure(optimizer)
        self._find_layers()
        self._before: Snapshot | None = None
        self._gradients: dict[str, float] = {}
        self._scaled: Scaled = {}
        self._closure = self._continues = False
        self._warned: set[str] = set()
        self._changes: list[SettingsChange] = []
        self._settings: dict[str, LayerSettings] = {}
        self._before_step: Any = None
        self._after_step: Any = optimizer.register_step_post_hook(self._step_ended)
        self._listen_if_due()

    @property
    def records(self) -> Rows:
        """Everything recorded so far, in the format of a run's own rows."""
        return Rows(tuple(self._rows))

    @property
    def recording(self) -> Recording:
        """The same with settings, outcomes and events: what `diagnose` reads."""
        contents = Contents(self.records, tuple(self._changes))
        return recording_of("the watched run", contents, steps_per_epoch=self._steps_per_epoch)

    def resume(self, step: int) -> None:
        """Count on from `step`, that of a checkpoint; rows recorded past it do not count any more.

        With a folder, `records` has its rows up to there. Exposure to decay is counted from here.
        """
        self.steps = step
        self._exposure = Exposure(self.optimizer)
        self._exposure.begin(self._layers)
        self._rows = [row for row in self._rows if row.step <= step]
        self._changes = [change for change in self._changes if change.step <= step]
        self._settings = {}  # those that changed past the checkpoint are to be recorded again
        if self._writer is not None:
            self._writer.resume(step)
            contents = read_contents(self._writer.path)
            self._rows, self._changes = list(contents.rows.rows), list(contents.settings)
        self._listen_if_due()

    def detach(self) -> None:
        """Take the hooks off the optimizer; the records stay."""
        for handle in (self._before_step, self._after_step):
            if handle is not None:
                handle.remove()
        self._before_step = self._after_step = None

    def __repr__(self) -> str:
        of = f"{type(self.model).__name__}, {type(self.optimizer).__name__}, every={self.every}"
        return f"<Watch of {of}: {self.steps} steps, {len(self._rows)} rows>"

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _find_layers(self) -> None:
        self._trained = [p.requires_grad for p in self.model.parameters()]
        self._layers = layers_of(self.model, self.inputs)
        self._exposure.begin(self._layers)

    def _due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def _listen_if_due(self) -> None:
        """Hear of the next step's beginning only where it is recorded: most steps cost one hook."""
        if self._before_step is not None:
            self._before_step.remove()
            self._before_step = None
        if self._due(self.steps + 1):
            self._before_step = self.optimizer.register_step_pre_hook(self._step_begins)
            # first of all, so that what other hooks do to the weights (decay) is part of the step
            hooks: Any = self.optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(self._before_step.id, last=False)

    def _step_begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _inner(self.optimizer):
            return
        self._scaled, self._gradients, self._closure = {}, {}, False
        try:
            self._continues = not self.steps and has_stepped(self.optimizer)
            if self._trained != [p.requires_grad for p in self.model.parameters()]:
                self._find_layers()  # some were frozen or thawed
            self._before, scaled = snapshot(self._layers), self._layers.scaled
            self._closure = any(map(callable, [*args[1:], *kwargs.values()]))
            if self._closure:  # the gradients are taken in the step
                self._scaled = {k: [p.detach().clone() for p in of] for k, of in scaled.items()}
            else:  # before the step, which may change the gradients
                self._measure_gradients(scaled)
        except Exception as error:  # the training must not stop for a probe
            self._warn_once("snapshot", error)

    def _measure_gradients(self, weights: Scaled) -> None:
        self._gradients = radial_gradients(self._layers, weights)
        self._gradients |= gradient_sizes(self.optimizer, self._layers)

    def _step_ended(self, *_: Any) -> None:
        if _inner(self.optimizer):
            return
        self.steps += 1
        self._exposure.add()
        if self._due(self.steps):
            try:
                if self._closure:
                    self._measure_gradients(self._scaled)
                self._record()
            except Exception as error:
                self._warn_once("records", error)
            self._before = None
        if self._before_step is not None or self._due(self.steps + 1):
            self._listen_if_due()

    def _record(self) -> None:
        exposure = self._exposure.by_layer(self._layers)
        moment = Moment(
            self.model, self.optimizer, self.inputs, self._layers, self._before or {}, exposure
        )
        found: dict[str, float] = {}
        trouble: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # said below, once per probe
            for probe in self.probes:
                try:
                    measured = probe.measure(moment)
                except Exception as error:
                    trouble[probe.name] = error
                    continue
                for reading in [measured] if isinstance(measured, Reading) else measured:
                    found |= reading.rows()
                    if reading.non_finite:
                        trouble[probe.name] = reading.not_finite_sentence()
        found |= self._gradients
        changes = self._changed_settings()
        seconds = time.perf_counter() - self._began
        epoch = 0 if self._steps_per_epoch is None else (self.steps - 1) // self._steps_per_epoch
        # one string for all rows of a name: they stay in memory
        rows = [Row(self.steps, epoch, seconds, sys.intern(k), v) for k, v in found.items()]
        self._rows.extend(rows)
        self._changes.extend(changes)
        self._show(rows)
        for name, what in trouble.items():
            self._warn_once(name, what)
        if self._writer is not None:  # behind all else: a disk may be full
            self._write(self._writer, [*rows, *changes])

    def _write(self, writer: RowWriter, entries: Sequence[Row | SettingsChange]) -> None:
        voided = read_rows(writer.path).rows if self._continues else ()
        writer.append(entries, anew=self.steps == 1)
        if voided:
            self._warn_once("earlier rows", VOIDED.format(max(row.step for row in voided)))
        if writer.shared:
            self._warn_once("folder", SHARED)

    def _changed_settings(self) -> list[SettingsChange]:
        """How layers are stepped, as far as it is not what it was."""
        now = layer_settings([self.optimizer], self._layers)
        changed = {k: v for k, v in now.items() if v != self._settings.get(k)}
        self._settings = now
        return [SettingsChange(self.steps, layer, own) for layer, own in changed.items()]

    def _show(self, rows: Sequence[Row]) -> None:
        """Hand rows to the trackers; one that fails, maybe after a long wait, is asked no more."""
        for tracker in tuple(self._trackers):
            try:
                tracker.log(rows)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn_once(f"{type(tracker).__name__} is given up", error)

    def _warn_once(self, name: str, trouble: Exception | str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        said = trouble if isinstance(trouble, str) else f"{type(trouble).__name__}: {trouble}"
        text = f"watch: {name} at step {self.steps}: {said} (said once; training goes on)"
        warnings.warn(text, stacklevel=3)


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    every: int = 100,
    probes: Iterable[str | Probe] = FREE,
    inputs: Tensor | None = None,
    steps_per_epoch: int | None = None,
    folder: str | Path | None = None,
    trackers: Iterable[Tracker] = (),
) -> Watch:
    """Record probes after step 1 and after every `every`-th step of `optimizer`.

    Works with any model and any torch optimizer; see the module's text. A probe that fails warns
    once and never stops the training. How each layer is stepped (lr, decay, ...) is recorded with
    them, at first and whenever it has changed, so that `diagnose` needs the records alone.

    Args:
        model: the model that is trained, bare or wrapped.
        optimizer: the optimizer that steps it, or a wrapper that holds it as `.optimizer`.
        every: steps between two records.
        probes: names from `PROBES`, or `Probe`s of your own; by default those that cost nothing.
            "diagnosis": these, and what `diagnose` needs for the other two mechanisms: the Jacobian
            norm (for tokens the Gauss-Newton norm) and K-FAC's second-order share.
        inputs: a fixed batch for probes that run the model, and to find scale-invariant layers by
            experiment (once, now) instead of by module order.
        steps_per_epoch: fills in the rows' epoch; 0 without it.
        folder: rows are also appended to `rows.jsonl` in this folder; those of an earlier run in it
            do not count any more, unless this one goes on with it (`Watch.resume`).
        trackers: rows are also shown to these (`decaylab.integrations.trackers`). One that fails
            warns once and is given up; `tracker.log(watched.records.rows)` makes up for it.
    """
    if every < 1:
        raise DecaylabError(f"every={every}: record at every step with every=1, or less often")
    while not isinstance(optimizer, torch.optim.Optimizer) or _is_wrapper(optimizer):
        if not hasattr(optimizer, "optimizer"):
            raise DecaylabError(
                f"{type(optimizer).__name__} is no torch optimizer: give watch(model, optimizer)"
            )
        optimizer = optimizer.optimizer
    if isinstance(probes, str):
        probes = _named_set(probes, optimizer, inputs)
    chosen = [_probe(probe) for probe in probes]
    model = bare(model)
    if not isinstance(model, nn.Module):
        raise DecaylabError(f"{type(model).__name__} is no model: give watch(model, optimizer)")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):
        raise DecaylabError(
            "the optimizer holds no parameter of this model: give watch the model it was built with"
        )
    if inputs is not None:
        check_inputs(model, inputs)
    for probe in chosen:
        if probe.needs_inputs and inputs is None:
            raise DecaylabError(f"the probe {probe.name!r} runs the model: give watch inputs=...")
    alone = hasattr(trackers, "log")
    trackers = () if alone else tuple(trackers)
    if alone or not all(hasattr(tracker, "log") for tracker in trackers):
        raise DecaylabError("trackers is a list of objects with log(rows): [TensorBoard(folder)]")
    writer = None
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        writer = RowWriter(Path(folder) / "rows.jsonl")
    return Watch(
        model,
        optimizer,
        chosen,
        every=every,
        inputs=inputs,
        steps_per_epoch=steps_per_epoch,
        writer=writer,
        trackers=trackers,
    )


def _named_set(
    name: str, optimizer: torch.optim.Optimizer, inputs: Tensor | None
) -> tuple[str, ...]:
    if name != "diagnosis":
        raise DecaylabError(f'probes={name!r}: give a list of names, or "diagnosis"')
    tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    share = ("second_order_share",) if isinstance(optimizer, KFAC) else ()
    return (*FREE, "gn_norm" if tokens else "jacobian_norm", *share)


def _probe(probe: str | Probe) -> Probe:
    if isinstance(probe, Probe):
        return probe
    if probe not in PROBES:
        known = ", ".join(f"{name} ({of.cost})" for name, of in PROBES.items())
        raise DecaylabError(f"unknown probe {probe!r}: use one of {known}")
    return PROBES[probe]


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
