"""Several runs in one process that take turns, so that their work overlaps on the device."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from traceback import clear_frames
from typing import TypeVar

from decaylab.training.backlog import Backlog, wait_for
from decaylab.training.loop import Progress

Name = TypeVar("Name")
Given = TypeVar("Given")


def interleave(
    active: dict[Name, Iterator[Given]],
) -> Generator[tuple[Name, Given | Exception], None, None]:
    """Advance runs made by `train` in turn, and yield whose turn it was with what it gave.

    Each goes at its own pace: a run whose steps the device has yet to do (`Progress.backlog`) is
    passed over meanwhile. On a CPU none ever is, so that runs simply alternate.

    A run that has ended is taken out of the mapping, and one that is put into it joins the others.

    With `Execution(every_step=True)` a turn is a step; on CUDA each run has a stream of its own,
    and the device works on all of them: a model or loss that the caller reads must be read to the
    end (`.item()`, `torch.cuda.synchronize()`) before the next turn. Each gives what it gives
    alone (but for a CUDA network that draws random numbers itself, as dropout does: the graphs of
    all runs share torch's generator). A run that ends with an error (`Diverged`, no memory) yields
    it and is out; the others go on. A signal, or closing this generator, closes all runs: those
    with a store save a checkpoint.

    >>> from decaylab.training import Execution, RunSpec, train
    >>> how = Execution(every_step=True, at_once=2)
    >>> specs = [RunSpec(hidden=(8,), epochs=1, seed=seed) for seed in (0, 1)]
    >>> turns = interleave({spec.seed: train(spec, execution=how) for spec in specs})
    >>> [seed for seed, progress in turns if progress.kind == "finished"]
    [0, 1]
    """
    backlogs: dict[Name, Backlog] = {}  # of runs that gave Progress in their last turn
    try:
        while active:
            waiting = True
            for name, run in list(active.items()):
                if name in backlogs and not backlogs[name].is_short():
                    continue
                waiting = False
                backlogs.pop(name, None)
                given: Given | Exception
                try:
                    given = next(run)
                except StopIteration:
                    del active[name]
                    continue
                except Exception as error:
                    del active[name]
                    clear_frames(error.__traceback__)  # they hold the run's memory
                    given = error
                if isinstance(given, Progress):
                    backlogs[name] = given.backlog
                yield name, given
            if waiting:
                wait_for(backlogs.values())
    finally:
        with ExitStack() as stack:  # every run is closed, also if closing another fails
            for run in active.values():
                if isinstance(run, Generator):
                    stack.callback(run.close)
