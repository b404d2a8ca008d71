"""Signals as requests to stop, obeyed after the current step, where the state is consistent."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# USR1 is what clusters send before a time limit (Slurm's --signal, Lightning's convention).
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A run stopped by a signal, after its checkpoint. Exit code 128 + its number (SIGINT: 130)."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class _Requests:
    """The process's handlers: installed by the first run that listens, removed by the last.

    Runs may interleave in one process, so that they start and end in any order. The second signal
    of a kind acts at once, as if nobody listened.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._listeners = 0
        self._previous: dict[signal.Signals, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep signals for `check` while inside; elsewhere than in the main thread, do nothing.

        One that nobody has heeded by the end, since the last run has ended meanwhile, raises there:
        else the caller would begin the next.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if self._listeners == 0:
            self.received = None
            self._previous = {}
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # a nohup stays one
                    self._previous[number] = signal.signal(number, self._receive)
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1
            if self._listeners == 0:
                for kind, handler in self._previous.items():
                    signal.signal(kind, handler)
        if self._listeners == 0 and self.received in self._previous:
            self.check()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.received is not None:
            raise Interrupted(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == number:
            raise Interrupted(number)
        self.received = number


requests = _Requests()


def is_stopping(error: BaseException | None) -> bool:
    """Whether an error came up while a run was stopped or closed: of its last checkpoint."""
    while error is not None and not isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        error = error.__context__
    return error is not None
