"""Progress for people: a bar on a terminal, one line per epoch elsewhere."""

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from decaylab.training import Progress


def on_terminal(*, to_stderr: bool) -> bool:
    """Whether progress goes to a terminal (then it is worth an update per step)."""
    return (sys.stderr if to_stderr else sys.stdout).isatty()


def follow(training: Iterator[Progress], *, to_stderr: bool) -> Progress:
    """Run a training to its end, showing where it stands; its last Progress."""
    if on_terminal(to_stderr=to_stderr):
        return _with_bar(training, Console(stderr=to_stderr))
    for progress in training:
        last = progress
        if progress.kind != "step":
            print(line(progress), file=sys.stderr if to_stderr else sys.stdout, flush=True)
    return last


def line(progress: Progress) -> str:
    """One epoch in one line."""
    return f"epoch {progress.epoch}/{progress.epochs}  {_numbers(progress)}"


def _numbers(progress: Progress) -> str:
    values = progress.values
    return (
        f"loss {values['train/running_loss']:.4f}"
        f"  test loss {values['test/loss']:.4f}"
        f"  accuracy {100 * values['test/accuracy']:.2f} %"
        f"  lr {values['lr']:g}  {progress.seconds:.1f} s"
    )


def _with_bar(training: Iterator[Progress], console: Console) -> Progress:
    columns = (BarColumn(), TaskProgressColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Bar(
        TextColumn("{task.description}"),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=None)
        for progress in training:
            last = progress
            at = min(progress.epoch + 1, progress.epochs)
            description = f"epoch {at}/{progress.epochs}"
            bar.update(task, total=progress.steps, completed=progress.step, description=description)
            if progress.kind != "step":
                bar.console.print(line(progress), highlight=False, soft_wrap=True)
    return last
