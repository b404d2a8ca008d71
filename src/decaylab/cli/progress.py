"""Progress for people: a bar on a terminal, one line per epoch elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from decaylab.training import Progress


class Elapsed(TimeElapsedColumn):
    """The time so far, with a label."""

    def render(self, task: Task) -> Text:
        """Rich's own text and what it is."""
        return Text.assemble(super().render(task), " so far")


class Left(TimeRemainingColumn):
    """The time left, with a label."""

    def render(self, task: Task) -> Text:
        """Rich's own text and what it is."""
        return Text.assemble(super().render(task), " left")


def follow(training: Iterator[Progress], stream: TextIO) -> None:
    """Run a training to its end, showing where it stands."""
    if stream.isatty():
        _with_bar(training, Console(file=stream))
        return
    for progress in training:
        if progress.kind != "step":
            print(line(progress), file=stream, flush=True)


@contextmanager
def stages(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """A function to call with each stage of a command: shown on a terminal, nowhere else."""
    if not stream.isatty():
        yield lambda stage: None
        return
    with Console(file=stream).status("reading") as status:
        yield lambda stage: status.update(stage)


def line(progress: Progress) -> str:
    """One epoch in one line."""
    values = progress.values
    return (
        f"epoch {progress.epoch}/{progress.epochs}"
        f"  loss {_loss(values['train/running_loss'])}"
        f"  test loss {_loss(values['test/loss'])}"
        f"  accuracy {100 * values['test/accuracy']:.2f} %"
        f"  lr {values['lr']:g}  {progress.seconds:.1f} s"
    )


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def _with_bar(training: Iterator[Progress], console: Console) -> None:
    columns = (BarColumn(), TaskProgressColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Bar(TextColumn("{task.description}"), *columns, Elapsed(), Left(), console=console) as bar:
        task = bar.add_task("starting", total=None)
        for progress in training:
            at = min(progress.epoch + 1, progress.epochs)
            description = f"epoch {at}/{progress.epochs}"
            bar.update(task, total=progress.steps, completed=progress.step, description=description)
            if progress.kind != "step":
                bar.console.print(line(progress), highlight=False)
