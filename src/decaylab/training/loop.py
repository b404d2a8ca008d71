"""Training: a generator that yields after each epoch, writes records, and resumes bit for bit."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn

from decaylab.data import DataSet, load
from decaylab.errors import Diverged, Lacks
from decaylab.records import Manifest, RunStore
from decaylab.training import checkpoint
from decaylab.training.arithmetic import prepare_deterministic
from decaylab.training.backlog import Backlog
from decaylab.training.build import chosen_split
from decaylab.training.execution import Execution
from decaylab.training.journal import Journal, open_journal
from decaylab.training.paths import followed_paths, paths_file
from decaylab.training.run import TrainingRun
from decaylab.training.signals import Interrupted, requests
from decaylab.training.spec import RunSpec
from decaylab.training.transfer import source_norms
from decaylab.training.world import ProcessLost


class Pruned(Exception):
    """Thrown into `train` by its caller: the run ends here, recorded as given up."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `values` are the numbers recorded after an epoch, none after a step.

    `loss` is the last batch's, on the device: reading it waits for the device. `made_before`: the
    run was already finished, by an earlier start or another process, and nothing was trained.
    `backlog` says how far the device is behind (`interleave`).
    """

    kind: Literal["step", "epoch", "finished"]
    run: str
    epoch: int
    epochs: int
    step: int
    steps: int
    seconds: float
    values: dict[str, float] = field(default_factory=dict)
    model: nn.Module | None = field(default=None, repr=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)
    loss: Tensor | None = field(default=None, repr=False)
    made_before: bool = False
    backlog: Backlog = field(default_factory=Backlog, repr=False, compare=False)


def train(
    spec: RunSpec,
    *,
    data: DataSet | None = None,
    device: str | torch.device = "cpu",
    store: RunStore | None = None,
    execution: Execution | None = None,
) -> Generator[Progress, None, None]:
    """Train what `spec` describes, yielding after each epoch (with `every_step`, each step too).

    `data` is the whole data set (left out: it is loaded). With a `store`, rows and checkpoints go
    to the run's folder; a run that was stopped there continues, and one that is finished yields
    its last Progress at once. The last one has kind `finished`: everything is on disk by then.

    A loss that is not finite raises `Diverged`; SIGINT, SIGTERM, SIGHUP and SIGUSR1 raise
    `Interrupted` after a checkpoint; closing the generator at a yield saves a checkpoint too.
    Checkpoints in between are written while training continues.

    Several processes (`Execution.world`) may call it with the same spec and train together. The
    first one writes, and only it has the values of probes.

    >>> spec = RunSpec(data="digits", network="mlp", hidden=(16,), epochs=2)
    >>> [progress.kind for progress in train(spec)]
    ['epoch', 'finished']
    """
    spec, how = spec.resolved(), execution or Execution()
    if spec.deterministic:
        prepare_deterministic(torch.device(device))
    data = chosen_split(spec, load(spec.data) if data is None else data).to(device)
    world = how.world
    # an error in here leaves no folder
    run = TrainingRun(spec, data, compiled=how.compiled, world=world)
    run.beside_others = how.at_once > 1
    run.keep_before = "movement" in how.probes and world.first
    if spec.norm_source:
        run.norms = source_norms(store, spec.norm_source, run.epochs)
    if how.record_paths or spec.followed or not spec.held_decay:
        run.follow(followed_paths(store, spec.followed))
    with ExitStack() as stack:
        journal = None
        if store is not None and world.first:
            name = device_name(torch.device(device))
            name = name if world.size == 1 else f"{world.size} x {name}"
            journal = stack.enter_context(open_journal(store, spec, device=name, how=how))
        stack.enter_context(requests.listening())
        before = None if journal is None else journal.previous
        status, message = world.from_first(("", "") if before is None else _ending(before))
        if status == "diverged":
            raise Diverged(f"{message} (run {spec.id}, in an earlier start)")
        if status == "finished":
            yield _finished_before(run, journal)
            return
        yield from _guarded(run, journal, how)


def train_to_end(
    spec: RunSpec,
    *,
    data: DataSet | None = None,
    device: str | torch.device = "cpu",
    store: RunStore | None = None,
    execution: Execution | None = None,
) -> Progress:
    """The last Progress of `train`: a run as a plain function of its spec."""
    for progress in train(spec, data=data, device=device, store=store, execution=execution):
        last = progress
    return last


def device_name(device: torch.device) -> str:
    """`cpu`, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _guarded(run: TrainingRun, journal: Journal | None, how: Execution) -> Iterator[Progress]:
    """The run, with a last word in its manifest however it ends."""
    try:
        with run.world.without_losses():
            yield from _epochs(run, journal, how)
    except Diverged as error:
        if journal is not None:
            journal.end("diverged", str(error))
        raise
    except Pruned:
        if journal is not None:
            journal.end("pruned")
    except (KeyboardInterrupt, GeneratorExit) as error:
        if journal is not None and not journal.ended:
            # Inside a step (a second signal) the state is not whole: the last checkpoint stands.
            if run.whole and run.finite():
                journal.save(run.state_dict())
            journal.settle()
            journal.end("interrupted", str(error) or "left by its caller")
        raise
    except ProcessLost as error:
        if journal is not None:
            journal.end("interrupted", str(error))
        raise
    except BaseException as error:
        if journal is not None:
            journal.end("failed", f"{type(error).__name__}: {error}")
        raise


def _epochs(run: TrainingRun, journal: Journal | None, how: Execution) -> Iterator[Progress]:
    _start(run, journal, how)
    if run.epoch == run.epochs:  # stopped before its last word alone
        if journal is not None:
            _end(run, journal, how)
        yield _progress(run, "finished", _recorded(run, journal))
    while run.epoch < run.epochs:
        run.begin_epoch()
        run.record_settings()
        while run.position < run.steps_per_epoch:
            with run.at_work():
                loss = _advance(run, journal, how)
            if how.every_step:
                yield _progress(run, "step", loss=loss)
        last = run.epoch + 1 == run.epochs
        values = _finish_epoch(run, journal, how)
        if journal is not None:
            if how.keep_checkpoint if last else journal.due(how.checkpoint_every):
                with run.at_work():
                    journal.save(run.state_dict())
            if last:
                _end(run, journal, how)
        yield _progress(run, "finished" if last else "epoch", values)
        run.next_epoch()


def _end(run: TrainingRun, journal: Journal, how: Execution) -> None:
    with run.at_work():
        hits = run.test_hits()
        paths = None if run.intervention is None else run.intervention.paths()
    if paths is not None:
        paths.save(paths_file(journal.folder))
    journal.end("finished", hits=hits, keep_checkpoint=how.keep_checkpoint)


def _start(run: TrainingRun, journal: Journal | None, how: Execution) -> None:
    """Continue from the checkpoint, or initialise and record how things stand before step 1."""
    continued = _resume(run, journal)
    if journal is not None:
        journal.begin(run, continued=continued)
    if not continued:
        with run.at_work():
            run.initialize(_between(run))
            run.record(_probed(run, how), how.probes)


def _advance(run: TrainingRun, journal: Journal | None, how: Execution) -> Tensor:
    """Steps up to the next yield; a checkpoint between them when one is due."""
    while True:
        started = perf_counter()
        loss = run.train_step()
        done = run.position == run.steps_per_epoch
        if done and how.at_once > 1:  # the others go on before this one waits for the device
            run.train_seconds += perf_counter() - started
            _launch_evaluation(run, how)
            return loss
        wanted = journal is not None and not done and journal.due(how.checkpoint_every)
        due, stop = run.world.agreed(run.step, wanted, requests.received or 0)
        if (done or due) and not run.finite():  # waits for the device
            _diverge(run)
        run.train_seconds += perf_counter() - started
        if done:
            return loss
        if stop:
            raise Interrupted(stop)
        if journal is not None and due:
            journal.save(run.state_dict())
        if how.every_step:
            return loss


def _launch_evaluation(run: TrainingRun, how: Execution) -> None:
    last = run.epoch + 1 == run.epochs
    whole = last or how.train_set_each_epoch
    run.launch_evaluation(whole_train_set=whole, between=_between(run))


def _between(run: TrainingRun) -> Callable[[], None]:
    """What is called between batches: it may stop a single process, but none of several."""
    return requests.check if run.world.size == 1 else lambda: None


def _finish_epoch(run: TrainingRun, journal: Journal | None, how: Execution) -> dict[str, float]:
    with run.at_work():
        if not run.evaluating:
            _launch_evaluation(run, how)
        else:
            started = perf_counter()
            if not run.finite():  # waits for the steps, and for the evaluation behind them
                _diverge(run)
            run.train_seconds += perf_counter() - started
        values = run.measure()
        values |= {"train/seconds": run.train_seconds, **_probed(run, how)}
        values = run.record(values, how.probes)
    run.recorded = True
    losses = ("train/running_loss", "train/loss", "test/loss")
    if not all(isfinite(values.get(name, 0.0)) for name in losses):
        _diverge(run, recorded=True)
    return values


def _diverge(run: TrainingRun, *, recorded: bool = False) -> None:
    if not recorded and run.world.first:
        run.watched.steps = run.step
        run.watched.record([], {"train/running_loss": float("nan"), "lr": run.lr})
    decay = ", or the weight decay" if run.spec.weight_decay else ""
    raise Diverged(
        f"the loss is not finite in epoch {run.epoch + 1} (step {run.step}): lower the learning"
        f" rate, now {run.lr:g}{decay}"
    )


def _probed(run: TrainingRun, how: Execution) -> dict[str, float]:
    return dict(how.epoch_probe(run)) if how.epoch_probe is not None and run.world.first else {}


def _progress(
    run: TrainingRun,
    kind: Literal["step", "epoch", "finished"],
    values: dict[str, float] | None = None,
    loss: Tensor | None = None,
) -> Progress:
    return Progress(
        kind=kind,
        run=run.spec.id,
        epoch=run.complete_epochs,
        epochs=run.epochs,
        step=run.step,
        steps=run.steps_per_epoch * run.epochs,
        seconds=run.seconds,
        values=values or {},
        model=run.model,
        optimizer=run.optimizer,
        loss=loss,
        backlog=run.backlog,
    )


def _ending(manifest: Manifest) -> tuple[str, str]:
    return manifest.status, manifest.message


def _resume(run: TrainingRun, journal: Journal | None) -> bool:
    """Bring the run to its last checkpoint, which the first process reads; False: none."""
    state = run.world.from_first(None if journal is None else journal.last_state())
    if state is None:
        return False
    with checkpoint.fitting(Path() if journal is None else journal.folder.checkpoint):
        run.load_state_dict(state)
    if journal is not None:
        journal.check_rows(run)
    return True


def _recorded(run: TrainingRun, journal: Journal | None) -> dict[str, float]:
    """What was recorded after the last step, as the first process reads it."""
    values: dict[str, float] = run.world.from_first(
        None if journal is None else journal.values(run.step)
    )
    return values


def _finished_before(run: TrainingRun, journal: Journal | None) -> Progress:
    if not _resume(run, journal) or run.epoch < run.epochs:
        where = "its folder" if journal is None else journal.folder.path
        remedy = f"move {where} away to train it again"
        raise Lacks(f"run {run.spec.id}, which is finished,", "checkpoint", remedy)
    return replace(_progress(run, "finished", _recorded(run, journal)), made_before=True)
