"""Progress for people: a bar on a terminal, one line per epoch elsewhere."""

from collections.abc import Iterator
from typing import TextIO

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


def follow(training: Iterator[Progress], stream: TextIO) -> None:
    """Run a training to its end, showing where it stands."""
    if stream.isatty():
        _with_bar(training, Console(file=stream))
        return
    for progress in training:
        if progress.kind != "step":
            print(line(progress), file=stream, flush=True)


def line(progress: Progress) -> str:
    """One epoch in one line."""
    values = progress.values
    return (
        f"epoch {progress.epoch}/{progress.epochs}"
        f"  loss {values['train/running_loss']:.4f}"
        f"  test loss {values['test/loss']:.4f}"
        f"  accuracy {100 * values['test/accuracy']:.2f} %"
        f"  lr {values['lr']:g}  {progress.seconds:.1f} s"
    )


def _with_bar(training: Iterator[Progress], console: Console) -> None:
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
            at = min(progress.epoch + 1, progress.epochs)
            description = f"epoch {at}/{progress.epochs}"
            bar.update(task, total=progress.steps, completed=progress.step, description=description)
            if progress.kind != "step":
                bar.console.print(line(progress), highlight=False, soft_wrap=True)
