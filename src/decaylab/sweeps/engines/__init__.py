"""Engines start ordinary `decaylab` commands and report how they ended.

All state stays in the run folders: any engine, or a person, can go on where another stopped. An
engine is a class with the methods of `Engine`, in a module of its own here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

JobState = Literal["waiting", "running", "ended", "failed"]


@dataclass(frozen=True)
class Job:
    """A command to start: its words, what it needs, and how long it should take."""

    command: tuple[str, ...]
    seconds: float = 0.0
    gpus: float = 0.0
    cpus: int = 1


@dataclass(frozen=True)
class JobStatus:
    """Where a job stands, by its place in what was started; and why, where there is a reason."""

    number: int
    state: JobState
    reason: str = ""


class Engine(Protocol):
    """Starts jobs."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise, in a sentence with the remedy, where it is known that they could not run."""

    def start(self, jobs: Sequence[Job]) -> str:
        """Start all of them, now or when there is room; returns a name for what was started."""

    def wait(self) -> list[JobStatus]:
        """Stay until all of them have ended, and say how; a signal stops them."""
