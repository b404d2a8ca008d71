"""Lines on stderr while arms are trained: each arm as it ends, and the time left."""

import sys
import time

from decaylab.text_table import in_words

EVERY = 60.0
"""Seconds between two lines about an arm that is being trained."""


class ArmProgress:
    """Tells how far an experiment is.

    All arms take the same number of steps: the time left is estimated from what was trained so far.
    """

    def __init__(self, arms: int, *, silent: bool = False) -> None:
        self._arms, self._silent = arms, silent
        self._trained: dict[str, float] = {}  # arm -> the part of its steps that is done
        self._began = self._last = time.monotonic()

    def found(self, arms: int) -> None:
        """So many arms need no training: they were finished before."""
        self._arms -= arms

    def running(self, arm: str, part: float) -> None:
        """Part of an arm's steps is done, 0 to 1."""
        self._trained[arm] = part
        if time.monotonic() - self._last >= EVERY:
            self._say(f"{arm}: {100 * part:.0f} %{self._left()}")

    def ended(self, arm: str, outcome: str, seconds: float) -> None:
        """An arm is done."""
        self._trained[arm] = 1.0
        self._say(f"{arm}: {outcome} ({in_words(seconds)}){self._left()}")

    def _left(self) -> str:
        done = sum(self._trained.values())
        left = self._arms - done
        if done == 0 or left <= 0:
            return ""
        return f", about {in_words((time.monotonic() - self._began) / done * left)} left"

    def _say(self, line: str) -> None:
        self._last = time.monotonic()
        if not self._silent:
            print(line, file=sys.stderr, flush=True)
