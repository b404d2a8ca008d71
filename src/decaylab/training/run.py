"""The state of a run between two steps, and the operations that advance it.

What is here is exactly what a checkpoint holds: model, optimizer, position (epoch, step), the
generators, and the sums of the running epoch. `loop.train` says when which operation happens.
"""

import gc
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decaylab.curvature.streams import own_stream
from decaylab.data import DataSet, Split, evaluation_batches
from decaylab.errors import Lacks, Mismatch
from decaylab.optim import schedules
from decaylab.optim.decay import OPTIMIZERS, decay_rate
from decaylab.optim.first_order import lay_out_state
from decaylab.optim.kfac import KFAC
from decaylab.probes.registry import When, probe_named
from decaylab.probes.watching import Watch
from decaylab.records import TestHits
from decaylab.training.arithmetic import arithmetic, prepare_deterministic
from decaylab.training.backlog import Backlog
from decaylab.training.build import (
    CAPTURED,
    build_batches,
    build_model,
    build_optimizer,
    compile_network,
)
from decaylab.training.evaluate import Evaluation, Evaluator
from decaylab.training.held_layers import select
from decaylab.training.interventions import Intervention
from decaylab.training.paths import Targets
from decaylab.training.spec import RunSpec
from decaylab.training.steps import Steps
from decaylab.training.transfer import Norms, rescale
from decaylab.training.world import World

ALWAYS = ("weight_norm", "second_moment", "clip_coefficient")
"""The probes that every run records, at the start and after each epoch."""
DIAGNOSED = ("movement", "second_order_share", "jacobian_norm", "size_response")
"""What `diagnose` needs besides, for all three mechanisms; `decaylab train` records it."""


class TrainingRun:
    """One run, in memory. `spec` is resolved; `data` is as the spec uses it, on the device.

    `graphs=False` trains and evaluates without graphs on CUDA too, with the same result. `world`:
    the processes that train it together, each of which has a `TrainingRun` of its own.
    """

    def __init__(
        self,
        spec: RunSpec,
        data: DataSet,
        *,
        graphs: bool = True,
        compiled: bool = False,
        world: World = World(),  # noqa: B008 - frozen
    ) -> None:
        self.spec, self.data, self.world = spec, data, world
        self.device = data.train.images.device
        if spec.deterministic:
            prepare_deterministic(self.device)
        if self.device.type == "cuda":
            gc.collect()  # graphs of runs that have ended are in cycles, with all their memory
            _wake_backward_thread(self.device)
        self.batches = build_batches(spec, data, share=(world.rank, world.size))
        world.check(self.batches, compiled=compiled)
        # says in which order the images lie, which is not the same in all files of a data set
        self._labels = zlib.crc32(data.train.labels.cpu().numpy().tobytes())
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.model = build_model(spec, data)
        forward: Any = compile_network(self.model) if compiled else self.model
        with arithmetic(spec.precision):  # K-FAC looks whether products are in TF32
            self.optimizer = build_optimizer(spec, forward, world.group)
        assert spec.lr_drop_every is not None
        every = spec.lr_drop_steps or spec.lr_drop_every  # steps, or epochs
        self._schedule = schedules.step(every, spec.lr_drop_factor)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        captured = graphs and spec.optimizer in CAPTURED and world.size == 1
        after = (spec.refresh_every or 0, spec.invert_every or 0)
        self._steps = Steps(
            *(forward, self.optimizer, self.batches, self.autocast, world),
            graphs=captured,
            refresh_after=after if spec.late_refresh else None,
        )
        self._evaluate = Evaluator(
            self.model, data, autocast=self.autocast, graphs=graphs, pool=self._steps.pool
        )
        self._train_pass: Evaluator | None = None
        self._evaluations: dict[str, Callable[[], Evaluation]] = {}  # begun, not yet read
        self._test_correct: Tensor | None = None  # of the last evaluation that was read
        self.loss_sum, self.correct = self._steps.loss_sum, self._steps.correct
        cuda = self.device.type == "cuda"
        # ahead of the stream on which K-FAC inverts beside it
        self._stream = own_stream(self, self.device, priority=-1) if cuda else None
        self.backlog = Backlog()
        self._behind = True  # whether the outer stream has work that the run's must wait for
        self.beside_others = False  # whether other runs take turns with this one
        assert spec.epochs is not None
        self.epochs = spec.epochs
        self.epoch = 0  # the running one, from 0
        self.position = 0  # its steps that are done
        self.drawn = False  # whether its batches are drawn
        self.recorded = False  # whether its rows are written
        self.whole = False  # False before an epoch and inside a step: must not be saved then
        self.train_seconds = 0.0
        self.norms: Norms | None = None  # of another run, taken over after each epoch
        self._settings_lr: float | None = None  # under which settings were recorded last
        self.intervention: Intervention | None = None  # records its paths, follows another's
        self.keep_before = False  # whether the last step of each epoch is one to be measured
        self._random = _seeded_states(spec.seed, self.device)
        self._seconds = 0.0
        self._since: float | None = None  # when it went to work; None while it rests
        self.watched = Watch(
            self.model,
            [self.optimizer],
            {},
            images=RunImages(data),
            steps_per_epoch=self.steps_per_epoch,
            clock=lambda: (self.complete_epochs, self.seconds),
            hooks=False,
        )
        self.layers = self.watched.layers

    @property
    def step(self) -> int:
        """Steps done since the start."""
        return self.epoch * self.steps_per_epoch + self.position

    @property
    def complete_epochs(self) -> int:
        """Epochs whose steps are all done."""
        return self.epoch + (self.position == self.steps_per_epoch)

    @property
    def seconds(self) -> float:
        """Time at work since the start, over all resumes: training, evaluation, checkpoints.

        Of runs that take turns only the sum says something: the time in which all of them wait for
        the device is divided equally.
        """
        now = 0.0 if self._since is None else perf_counter() - self._since
        return self._seconds + self.backlog.waited + now

    @property
    def lr(self) -> float:
        """The learning rate of the running epoch (recipe line 14), or of the coming step."""
        assert self.spec.lr is not None
        return self._schedule(self._stage(self.step), self.spec.lr)

    def _stage(self, step: int) -> int:
        """What the schedule counts, at a step of the running epoch: steps, or epochs."""
        return step if self.spec.lr_drop_steps else self.epoch

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The run's own precision and random stream, and its clock; the caller's come back after.

        So runs that take turns in one process do not disturb each other.
        """
        began = self._since = perf_counter()
        outer = _get_states(self.device)
        _set_states(self._random, self.device)
        try:
            with (
                arithmetic(self.spec.precision, deterministic=self.spec.deterministic),
                self._on_stream(),
            ):
                yield
        finally:
            self._random = _get_states(self.device)
            _set_states(outer, self.device)
            self._seconds += perf_counter() - began
            self._since = None

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On CUDA: on the run's own stream, beside those of other runs.

        Both streams wait for each other, so that the caller may read and change the model there.
        Runs that take turns would wait for each other then, since the outer stream waits for all:
        they wait only after work was done for them there (building, loading, reading the state).
        """
        if self._stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        if self._behind or not self.beside_others:
            self._stream.wait_stream(outer)
            self._behind = False
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            done = self._stream.record_event()
            outer.wait_event(done)
            self.backlog.add(done)

    def autocast(self) -> torch.autocast:
        """For forward passes: bf16 where the spec asks for it. Weights and steps stay float32."""
        enabled = self.spec.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def initialize(self, between: Callable[[], None]) -> None:
        """K-FAC: average the factors over batches of a pass of its own (recipe line 8)."""
        if not isinstance(self.optimizer, KFAC) or not self.spec.initialize_batches:
            return
        # Another seed than the training batches', whose generator must not be touched.
        share = self.world.rank, self.world.size
        batches = build_batches(self.spec, self.data, seed=self.spec.seed + 2**62, share=share)
        batches.begin_epoch()
        count = min(self.spec.initialize_batches, batches.steps_per_epoch)

        def images() -> Iterator[Tensor]:
            for index in range(count):
                between()
                yield batches.batch(index)[0]

        with self.autocast(), self.world.whole_batch():
            self.optimizer.initialize(images())

    def follow(self, targets: Targets) -> None:
        """From the first step on, record the paths of its layers and follow `targets`."""
        spec = self.spec
        only = spec.held_layers.split(",") if "," in spec.held_layers else spec.held_layers
        chosen = select(self.model, self.optimizer, only, decayed=not spec.held_decay)
        undecayed = () if spec.held_decay else chosen.held
        steps = self.epochs * self.steps_per_epoch
        self.intervention = Intervention(
            chosen.optimizers, chosen.weights, steps, targets, undecayed
        ).__enter__()

    def begin_epoch(self) -> None:
        """Draw the batches of the epoch (again, after a resume) and set its learning rate."""
        with self._on_stream():
            if not self.drawn:
                self.batches.begin_epoch()
                self.drawn, self.recorded = True, False
                if self.norms is not None and self.epoch:
                    rescale(self.model, self.norms[self.epoch])
            self._steps.begin_epoch(self.position, self._rates(self.step))
        self.model.train()
        self.whole = True

    def train_step(self) -> Tensor:
        """One step; the mean loss of its batch, still on the device. No host synchronisation."""
        self.whole = False
        if self.keep_before and self.position + 1 == self.steps_per_epoch:
            self.watched.before_step()
        if self.spec.lr_drop_steps and self.step % self.spec.lr_drop_steps == 0:
            self._steps.set_learning_rates(self._rates(self.step))
        loss = self._steps.take()
        self.position += 1
        self.whole = True
        return loss

    def _rates(self, step: int) -> list[float]:
        """The learning rates of the param groups from a step of the running epoch on."""
        return [self._schedule(self._stage(step), base) for base in self._base_lrs]

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation has begun and is not yet read."""
        return bool(self._evaluations)

    def finite(self) -> bool:
        """Whether every loss of the running epoch was finite. One host synchronisation."""
        return bool(torch.isfinite(self.loss_sum))

    def launch_evaluation(self, *, whole_train_set: bool, between: Callable[[], None]) -> None:
        """Begin what `measure` reads; it is queued on the device when this returns.

        `between` may raise between batches.
        """
        splits = {"test": self.data.test}
        if whole_train_set:
            splits["train"] = self.data.train
        launch = partial(self._evaluate.launch, between=between)
        self._evaluations = {n: self.world.evaluated(split, launch) for n, split in splits.items()}
        self.backlog.reads_next = True

    def measure(self) -> dict[str, float]:
        """The numbers at the end of an epoch, once `launch_evaluation` has been called for it."""
        images = self.batches.images_per_epoch
        values = {
            "train/running_loss": self.loss_sum.item() / self.steps_per_epoch,
            "train/running_accuracy": self.correct.item() / images,
        }
        if isinstance(self.optimizer, KFAC):
            health = self.optimizer.check()
            values["kfac/skipped_steps"] = health.skipped
            values["kfac/failed_inversions"] = sum(health.failed_inversions.values())
        for name, read in self._evaluations.items():
            result = read()
            values[f"{name}/loss"], values[f"{name}/accuracy"] = result.loss, result.accuracy
            if name == "test":
                self._test_correct = result.correct
        self._evaluations = {}
        self.backlog.reads_next = False
        values["lr"] = self.lr
        values["exposure/stage"] = self.stage_exposure()
        return values

    def measured(self, names: Iterable[str], when: When | None = None) -> dict[str, float]:
        """What the probes of these names measure now, as far as they are due.

        `when`: how often, if it is not what each says itself (`Probe.when`).
        """
        if not self.world.first:
            return {}
        self._catch_up()
        due = [probe for probe in map(probe_named, names) if self._due(when or probe.when)]
        return self.watched.measure(due)

    def record(self, values: Mapping[str, float], names: Iterable[str] = ()) -> dict[str, float]:
        """Record values and the probes that are due, those of every run among them.

        Of several processes the first does so.
        """
        if not self.world.first:
            return dict(values)
        self._catch_up()
        wanted = dict.fromkeys((*ALWAYS, *names))
        due = [probe for probe in map(probe_named, wanted) if self._due(probe.when)]
        return self.watched.record(due, values)

    def _catch_up(self) -> None:
        """Tell the watch of the steps since, and of the drops of the learning rate among them."""
        start, every = self.watched.steps, self.spec.lr_drop_steps
        drops = range(start + every - start % every, self.step, every) if every else ()
        for begin, end in pairwise([start, *drops, self.step]):
            if drops:
                self._steps.set_learning_rates(self._rates(begin))
                self.watched.record_settings()
            self.watched.count(end - begin)

    def _due(self, when: When) -> bool:
        done = self.complete_epochs
        if self.step == 0 or done == self.epochs:
            return self.step > 0 or when != "end"
        if when == "tenth":
            return done % max(self.epochs // 10, 1) == 0
        return when == "record" or (when == "seldom" and done == max(self.epochs // 10, 1))

    def train_pass(self) -> Evaluation:
        """Loss and accuracy over the training set as training sees it: a pass in train mode.

        Batches of the run's size with batch norm's own statistics of each, augmented where the
        run's are, drawn from a generator of its own; nothing of the run is changed. (What the
        paper's authors log after each epoch.) Without batch norm and augmentation it is the plain
        evaluation of the training set. Cost: one forward pass an image.
        """
        if not (self.spec.batch_norm or self.spec.augment):
            return self._evaluate(self.data.train)
        if self._train_pass is None:
            graphs, pool = self._steps.pool is not None, self._steps.pool
            self._train_pass = Evaluator(
                self.model,
                self.data,
                autocast=self.autocast,
                graphs=graphs,
                pool=pool,
                mode="train",
            )
        batches = build_batches(self.spec, self.data, seed=self.spec.seed + 2**61 + self.step)
        batches.begin_epoch()
        parts = (batches.batch(index) for index in range(batches.steps_per_epoch))
        images = batches.images_per_epoch
        return self._train_pass.launch_batches(parts, images)()

    def test_hits(self) -> TestHits:
        """Which test images the model, as it is now, classifies correctly.

        As `measure` found them, or by an evaluation where none was read since the start.
        """
        if self._test_correct is None:
            self._test_correct = self._evaluate(self.data.test).correct
        labels = self.data.test.labels.cpu().numpy()
        return TestHits.pack(self._test_correct.cpu().numpy(), labels)

    def stage_exposure(self) -> float:
        """Decay so far since the last drop of lr: `decay_rate` summed over its steps."""
        spec = self.spec
        assert spec.lr_drop_every is not None
        if spec.lr_drop_steps:
            steps = self.step % spec.lr_drop_steps
        else:
            steps = (self.epoch % spec.lr_drop_every) * self.steps_per_epoch + self.position
        return steps * decay_rate(
            spec.weight_decay,
            spec.decay,
            law=OPTIMIZERS[spec.optimizer],
            lr=self.lr,
            momentum=spec.momentum or 0.0,
        )

    def record_settings(self) -> None:
        """Record how layers are stepped from the running epoch on, if that has changed."""
        if self.world.first and self.lr != self._settings_lr:  # nothing else changes on the way
            with self._on_stream():  # it reads tensors: on the outer one it would wait for all runs
                self._steps.set_learning_rates(self._rates(self.watched.steps))
                self.watched.record_settings()
                self._steps.set_learning_rates(self._rates(self.step))
            self._settings_lr = self.lr

    def next_epoch(self) -> None:
        """Leave the epoch behind; its rows are written."""
        self.whole = False
        self.epoch, self.position, self.drawn = self.epoch + 1, 0, False
        with self._on_stream():
            self.loss_sum.zero_()
            self.correct.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the rest of the run: to be copied before the run goes on."""
        self._behind |= self._since is None  # then it is read on the outer stream
        return {
            "device": self.device.type,
            "labels": self._labels,
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "recorded": self.recorded,
            "seconds": self.seconds,
            "train_seconds": self.train_seconds,
            "loss_sum": self.loss_sum,
            "correct": self.correct,
            "random": self._random if self._since is None else _get_states(self.device),
            "batches": self.batches.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **({"paths": self.intervention.state_dict()} if self.intervention else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; the draws of the running epoch are made again."""
        if state["device"] != self.device.type:
            raise Mismatch(
                "device, on which random streams depend",
                {f"run {self.spec.id} so far": state["device"], "now": self.device.type},
                f"continue it with --device {state['device']}, or use another --runs folder",
            )
        if state.get("labels", self._labels) != self._labels:
            raise Mismatch(
                f"the order of {self.spec.data} images, as archive and parquet files do",
                {
                    f"run {self.spec.id} so far": f"checksum {state['labels']:08x}",
                    "now": f"checksum {self._labels:08x}",
                },
                "give it the files it was started with (--data-dir), or use another --runs folder",
            )
        if self.intervention is not None:
            if "paths" not in state:
                remedy = "use another --runs folder, because it was started without recording them"
                raise Lacks(f"run {self.spec.id}", "paths", remedy)
            self.intervention.load_state_dict(state["paths"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        lay_out_state(self.optimizer)
        self.batches.load_state_dict(state["batches"])
        self.batches.begin_epoch()
        self.epoch, self.position, self.drawn = state["epoch"], state["position"], True
        self.recorded = state["recorded"]
        self._seconds, self.train_seconds = state["seconds"], state["train_seconds"]
        self.loss_sum.copy_(state["loss_sum"])
        self.correct.copy_(state["correct"])
        self._random = state["random"]
        self._behind = True
        if self.recorded:
            self.next_epoch()


@dataclass(frozen=True)
class RunImages:
    """The images of a run for its probes: normalised, not augmented, in their order."""

    data: DataSet

    @property
    def small(self) -> bool:
        """Digits, a toy."""
        return self.data.name == "digits"

    def train(self, batch_size: int) -> Iterator[Tensor]:
        """The training images."""
        return self._of(self.data.train, batch_size)

    def test(self, batch_size: int) -> Iterator[Tensor]:
        """The test images."""
        return self._of(self.data.test, batch_size)

    def _of(self, split: Split, batch_size: int) -> Iterator[Tensor]:
        mean, std = self.data.mean, self.data.std
        batches = evaluation_batches(split, batch_size=batch_size, mean=mean, std=std)
        return (images for images, _ in batches)


def _wake_backward_thread(device: torch.device) -> None:
    """Let torch's backward thread take up the GPU; it warns of that, once, which helps nobody."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        scalar = torch.ones(1, 1, device=device, requires_grad=True)
        (scalar @ scalar).sum().backward()


def _seeded_states(seed: int, device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return states


def _get_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
