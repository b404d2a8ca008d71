"""Train planned runs in this process: in order, once each; it may be stopped at any time."""

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from decaylab.data import DataSet, load
from decaylab.errors import DecaylabError, Diverged, MadeElsewhere, Misplaced
from decaylab.records import RunStore
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.plan import PlannedRun, State, state_of
from decaylab.training import Execution, Interrupted, Progress, Pruned, interleave, train
from decaylab.training.arithmetic import prepare_deterministic
from decaylab.training.signals import is_stopping, requests
from decaylab.training.world import World

SOON = 1e-3  # seconds: a time limit that has passed
MARGIN = 1.1  # times its estimate that a run may take (how good estimates are: docs/scale.md)


@dataclass(frozen=True)
class RunEvent:
    """Something that happened: a run began, went on by an epoch, or ended."""

    kind: Literal["begun", "epoch", "finished", "pruned", "failed", "retried"]
    run: PlannedRun
    progress: Progress | None = None
    message: str = ""


@dataclass
class SweepOutcome:
    """What became of the runs; ids, and why where there is a reason."""

    finished: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    pruned: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # of those left: too long for the time there was
    out_of_time: bool = False


@dataclass(frozen=True)
class WorkerOptions:
    """Where and how long: nothing here changes a run's numbers, but for the rounding of `compiled`.

    Attributes:
        seconds: stop cleanly after so long; None is never.
        whole_runs: of a limited time: begin only runs that should end in it, by `Estimator` (for a
            machine whose checkpoints are lost with it).
        keep_checkpoints: else a finished run's is deleted: it may be over a gigabyte.
        checkpoint_every: seconds between checkpoints, at least.
        at_once: runs that take turns; on a GPU their steps overlap, and each goes at its own pace.
            Each gives what it gives alone.
        processes: like this one that share the device, itself included: one prepares a run while
            another trains. Recorded (their seconds mingle), and counted by `whole_runs`.
        compiled: networks go through torch.compile: half a minute, once, for a fifth less a step.
        poll: seconds between looks at runs of other processes that one waits for.
        stay: wait for runs that other processes make, and take them over if those end: for what
            follows from all of them (a search, an attribution).
        world: processes that train each run together, one run after another; the first of them
            chooses (`Worker.run`), the others help (`Worker.assist`).
    """

    device: torch.device
    data_dir: Path | None = None
    seconds: float | None = None
    whole_runs: bool = False
    keep_checkpoints: bool = False
    checkpoint_every: float = 60.0
    at_once: int = 1
    processes: int = 1
    compiled: bool = False
    poll: float = 2.0
    stay: bool = False
    world: World = World()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.world.size > 1 and self.at_once > 1:
            raise Misplaced(["--at-once"], "runs that one process trains")

    def running_out(self) -> Callable[[], "WorkerOptions"]:
        """Begin to count: what is given has these options with the seconds left by then."""
        if self.seconds is None:
            return lambda: self
        ends = time.monotonic() + self.seconds
        return lambda: replace(self, seconds=max(ends - time.monotonic(), SOON))


class Worker:
    """Makes planned runs, `at_once` at a time, skipping what is done or done by another process.

    A run that fails is tried once more; if it fails again, or diverges, it is listed in `outcome`
    and the others go on. Two processes may share the store: each run has one lock, and who comes
    second takes the next run; a run that waits for another process's source waits.
    """

    def __init__(self, planned: list[PlannedRun], store: RunStore, options: WorkerOptions) -> None:
        self.planned, self.store, self.options = planned, store, options
        self.outcome = SweepOutcome()
        self._data: dict[str, DataSet] = {}
        self._estimator = Estimator(store, options.device) if options.whole_runs else None
        self._left: dict[str, float] = {}  # seconds that runs under way should still need
        self._late: set[str] = set()  # runs that did not fit when they were looked at
        self._ends = math.inf
        self._joined, self._look_at = 0, 0.0
        if any(run.spec.deterministic for run in planned):  # before the data start CUDA
            prepare_deterministic(options.device)
        self.stop_early: Callable[[PlannedRun, Progress], bool] | None = None
        """Asked after each epoch; a run that it says yes to ends there, as pruned."""

    def check_data(self) -> None:
        """Load the data sets that unfinished runs need: what is missing is said before all."""
        for planned in self.planned:
            try:
                finished = state_of(planned, self.store) == "finished"
            except DecaylabError:  # a damaged folder: listed when its turn comes
                continue
            if not finished:
                self._load(planned.spec.data)

    def run(self) -> Iterator[RunEvent]:
        """Make the runs; `outcome` is complete when this ends."""
        todo = list(self.planned)
        if self.options.seconds is not None:
            self._ends = time.monotonic() + self.options.seconds
        active: dict[str, Iterator[RunEvent | Progress]] = {}
        with _time_limit(self.options.seconds), requests.listening():  # between runs, too
            try:
                while self._begin(todo, active):
                    turns = interleave(active)
                    with closing(turns):
                        for _, event in turns:
                            if isinstance(event, Exception):
                                raise event
                            if isinstance(event, RunEvent):
                                yield event
                            self._begin(todo, active)
            except Interrupted as stop:
                if stop.exit_code != 128 + signal.SIGALRM:
                    raise
                self.outcome.out_of_time = True
        self.options.world.from_first("")  # the others may go
        unfinished = [
            planned.spec.id
            for planned in self.planned
            if planned.spec.id not in (*self.outcome.failed, *self.outcome.pruned)
            and not self.store.folder(planned.spec.id).is_finished()
        ]
        self.outcome.elsewhere = [run for run in unfinished if run in self.outcome.elsewhere]
        self.outcome.left = [run for run in unfinished if run not in self.outcome.elsewhere]
        self.outcome.late = [run for run in self.outcome.left if run in self._late]
        self.outcome.out_of_time |= bool(self.outcome.late)

    def assist(self) -> None:
        """Train what the first process trains, together with it, until it has no more."""
        by_id = {planned.spec.id: planned for planned in self.planned}
        with requests.listening():
            while run_id := self.options.world.from_first(""):
                try:
                    for _ in self._training(by_id[run_id]):
                        pass
                except Diverged:  # for all: the first lists it
                    pass
                except Interrupted as stop:
                    if stop.exit_code != 128 + signal.SIGALRM:
                        raise

    def _begin(
        self, todo: list[PlannedRun], active: dict[str, Iterator[RunEvent | Progress]]
    ) -> bool:
        """Let runs join those under way while there is room; False if there are none then.

        Looks at what others do when a run has ended, or `poll` seconds after the last time.
        """
        if active and len(active) == self._joined and time.monotonic() < self._look_at:
            return True
        while len(active) < self.options.at_once:
            chosen = self._next(todo, wait=not active)
            if chosen is None:  # the rest is made elsewhere, or cannot be made
                break
            requests.check()
            if time.monotonic() >= self._ends:
                raise Interrupted(signal.SIGALRM)
            todo.remove(chosen)
            self._left[chosen.spec.id] = self._estimated(chosen)
            active[chosen.spec.id] = self._made(chosen)
        self._joined, self._look_at = len(active), time.monotonic() + self.options.poll
        return bool(active)

    def _fits(self, planned: PlannedRun) -> bool:
        """Whether a run should end in time, with those under way, on its share of the device."""
        needed = MARGIN * (self._estimated(planned) + sum(self._left.values()))
        return needed * self.options.processes <= self._ends - time.monotonic()

    def _estimated(self, planned: PlannedRun) -> float:
        """Seconds of the device, where that matters."""
        return self._estimator.of(planned.spec).seconds if self._estimator else 0.0

    def _next(self, todo: list[PlannedRun], *, wait: bool) -> PlannedRun | None:
        """The first run that can be made now; those that need not be are taken off the list.

        None if there is none, now (without `wait`) or at all.
        """
        while todo:
            states: dict[str, str] = {}
            for planned in list(todo):
                state = self._state(planned)
                if state == "ready":
                    if self._estimator is None or self._fits(planned):
                        return planned
                    states[planned.spec.id] = "late"
                    self._late.add(planned.spec.id)
                elif state in ("finished", "diverged"):
                    todo.remove(planned)
                else:
                    states[planned.spec.id] = state
            if not wait:
                return None
            waiting = [
                planned
                for planned in todo
                if states.get(planned.spec.id) == "waiting"
                and states.get(planned.spec.norm_source) != "late"
            ]
            staying = self.options.stay and "busy" in states.values()
            if not staying and not any(self._source_may_come(p, states) for p in waiting):
                self.outcome.elsewhere += [run for run, state in states.items() if state == "busy"]
                for planned in waiting:
                    source = planned.spec.norm_source
                    self.outcome.failed[planned.spec.id] = f"its source {source} is not there"
                return None
            _sleep(self.options.poll)
        return None

    def _source_may_come(self, planned: PlannedRun, states: dict[str, str]) -> bool:
        source = self.store.folder(planned.spec.norm_source)
        # in this order: another process may end it, or die in it, between two of these looks
        return states.get(source.id) == "busy" or source.locked() or source.is_finished()

    def _state(self, planned: PlannedRun) -> State:
        """`state_of`, with what it means for the outcome."""
        run_id = planned.spec.id
        try:
            state = state_of(planned, self.store)
        except DecaylabError as error:  # a damaged folder is this run's trouble only
            self.outcome.failed[run_id] = str(error)
            return "diverged"
        if state == "finished":
            self.outcome.before.append(run_id)
            self._clean(planned)
        elif state == "diverged":
            manifest = self.store.folder(run_id).manifest()
            self.outcome.failed[run_id] = manifest.message if manifest else "diverged"
        return state

    def _made(self, planned: PlannedRun) -> Iterator[RunEvent | Progress]:
        """One run, while `_left` has what it still needs."""
        try:
            yield from self._tried(planned)
        finally:
            del self._left[planned.spec.id]

    def _tried(self, planned: PlannedRun) -> Iterator[RunEvent | Progress]:
        """One run, tried twice if need be; Progress after a step, when several runs take turns."""
        run_id = planned.spec.id
        for attempt in (1, 2):
            total_seconds = self._left[run_id] = self._estimated(planned)
            again, progress = False, None
            try:
                yield RunEvent("begun", planned)
                self.options.world.from_first(run_id)
                with closing(self._training(planned)) as training:
                    for progress in training:
                        if progress.kind == "epoch":
                            self._left[run_id] = total_seconds * (
                                1 - progress.epoch / progress.epochs
                            )
                            yield RunEvent("epoch", planned, progress)
                            if self.stop_early and self.stop_early(planned, progress):
                                with suppress(StopIteration):
                                    training.throw(Pruned())
                                self._clean(planned)
                                self.outcome.pruned.append(run_id)
                                yield RunEvent("pruned", planned, progress)
                                return
                        elif progress.kind == "step":
                            yield progress
                self._clean(planned)
                if progress and progress.made_before:  # by another process, since this one looked
                    self.outcome.before.append(run_id)
                    return
                self.outcome.finished.append(run_id)
                yield RunEvent("finished", planned, progress)
                return
            except Diverged as error:
                self.outcome.failed[run_id] = str(error)
            except DecaylabError as error:
                # else a signal would be forgotten, and the next run begin; or others wait in this
                if is_stopping(error) or self.options.world.size > 1:
                    raise
                folder = self.store.folder(run_id)
                elsewhere = isinstance(error, MadeElsewhere) or folder.locked()
                if folder.is_finished():  # looked at last: it may end now
                    self.outcome.before.append(run_id)
                    return
                if elsewhere:
                    self.outcome.elsewhere.append(run_id)
                    return
                self.outcome.failed[run_id] = str(error)
            except Exception as error:  # one run's trouble (memory, a bug) does not end the others
                if self.options.world.size > 1:
                    raise
                self.outcome.failed[run_id] = f"{type(error).__name__}: {error}"
                again = attempt == 1
            progress = None  # it and the error hold the run's memory, which the others may need
            if not again:
                yield RunEvent("failed", planned, message=self.outcome.failed[run_id])
                return
            yield RunEvent("retried", planned, message=self.outcome.failed.pop(run_id))

    def _training(self, planned: PlannedRun) -> Generator[Progress, None, None]:
        execution = Execution(
            checkpoint_every=self.options.checkpoint_every,
            keep_checkpoint=self.options.keep_checkpoints,
            every_step=self.options.at_once > 1,
            at_once=self.options.at_once * self.options.processes,
            compiled=self.options.compiled,
            world=self.options.world,
            tier=planned.tier,
            epoch_probe=planned.epoch_probe,
            record_paths=planned.record_paths,
        )
        return train(
            planned.spec,
            data=self._load(planned.spec.data),
            device=self.options.device,
            store=self.store,
            execution=execution,
        )

    def _load(self, name: str) -> DataSet:
        if name not in self._data:
            self._data[name] = load(name, self.options.data_dir).to(self.options.device)
        return self._data[name]

    def _clean(self, planned: PlannedRun) -> None:
        if not self.options.keep_checkpoints:
            self.store.folder(planned.spec.id).remove_checkpoints()


def _sleep(seconds: float) -> None:
    """Sleep, but heed a time limit or a signal."""
    with requests.listening():
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            requests.check()
            time.sleep(0.05)


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """After so long, ask the running training to stop as a signal would: with a checkpoint.

    The alarm repeats, since between two runs nobody listens.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        if requests.received is None:
            requests.received = number

    previous = signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, SOON), 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if requests.received == signal.SIGALRM:  # heeded; a caller that listens, too, goes on
            requests.received = None
