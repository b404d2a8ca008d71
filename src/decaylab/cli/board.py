"""Planned runs on a terminal: a live table, or a line for each that ends."""

import time
from typing import TextIO

from rich.console import Console
from rich.live import Live

from decaylab.cli.terminal import say
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.worker import RunEvent, Worker
from decaylab.text_table import Column, TextTable, in_words


def follow(worker: Worker, stream: TextIO) -> None:
    """Make the runs: a live table on a terminal, else a line for each that ends."""
    total = len(worker.planned)
    if not stream.isatty():
        for event in worker.run():
            if event.kind in ("finished", "pruned", "failed", "retried"):
                made = len(worker.outcome.finished) + len(worker.outcome.before)
                say(f"{made}/{total} {_line(event)}", stream=stream)
        return
    board = _Board(worker)
    with Live(board.table(), console=Console(file=stream), refresh_per_second=4) as live:
        for event in worker.run():
            board.note(event)
            if event.kind in ("failed", "retried"):
                live.console.print(_line(event), highlight=False, markup=False)
            live.update(board.table())


def _line(event: RunEvent) -> str:
    run_id = event.run.spec.id
    if event.progress is None:
        again = "failed, trying once more" if event.kind == "retried" else "failed"
        return f"{run_id} {again}: {event.message}"
    values = event.progress.values
    return (
        f"{run_id} seed {event.run.spec.seed}: test accuracy {100 * values['test/accuracy']:.2f} %,"
        f" train loss {values['train/loss']:.3g}, {in_words(event.progress.seconds)}"
    )


class _Board:
    """Done, running, left and the time left, as a small table."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._estimator = worker, Estimator(worker.store)
        self._begun = time.monotonic()
        self._spent = 0.0  # estimated seconds of what was made since then
        self._event: RunEvent | None = None

    def note(self, event: RunEvent) -> None:
        self._event = event
        if event.kind == "finished":
            self._spent += self._estimator.of(event.run.spec).seconds

    def table(self) -> TextTable:
        outcome = self._worker.outcome
        ended = {*outcome.finished, *outcome.before, *outcome.failed, *outcome.elsewhere}
        left = [run.spec for run in self._worker.planned if run.spec.id not in ended]
        seconds = self._estimator.total(left)
        if self._spent > 0:  # this machine against the estimates
            seconds *= (time.monotonic() - self._begun) / self._spent
        running = ""
        if self._event is not None and self._event.kind in ("begun", "epoch"):
            at = self._event.progress
            running = self._event.run.spec.id + (f"  epoch {at.epoch}/{at.epochs}" if at else "")
        table = TextTable([Column(""), Column("", words=True)])
        table.add("done", f"{len(outcome.finished) + len(outcome.before)}")
        table.add("running", running)
        table.add("left", f"{len(left)}, about {in_words(seconds)}")
        if outcome.failed:
            table.add("failed", str(len(outcome.failed)))
        return table
