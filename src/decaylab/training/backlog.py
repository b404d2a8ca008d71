"""What a run has asked of the device and the device has not done yet."""

from collections import deque
from collections.abc import Collection
from time import perf_counter, sleep
from typing import Protocol

# Steps that a run may have outstanding. Enough that its stream stays busy while the host reads the
# evaluation of another run; few, since a checkpoint or a capture waits for those of all runs.
LEAD = 8
POLL = 1e-4  # seconds between looks while every run has that many: much less than LEAD steps take


class Event(Protocol):
    """A mark in a stream, as `torch.cuda.Event` is."""

    def query(self) -> bool:
        """Whether the device has come past it."""


class Backlog:
    """The outstanding work of one run. On a CPU, which has done each step on return, it is empty.

    A stream works in order, so a single event says whether fewer than `LEAD` pieces of work are
    outstanding: the one at the end of the `LEAD`-th last. Holds none of the run's memory.

    Attributes:
        reads_next: whether the run's next turn reads results. It then comes once nothing is
            outstanding: else the host would wait in it, and all other runs with it.
        waited: this run's part of the seconds in which all runs waited for the device.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=LEAD)
        self.reads_next = False
        self.waited = 0.0

    def add(self, event: Event) -> None:
        """Note a piece of work that ends with this event."""
        self._events.append(event)

    def is_short(self) -> bool:
        """Whether the run may have its next turn."""
        place = 1 if self.reads_next else LEAD
        try:
            return len(self._events) < place or self._events[-place].query()
        except RuntimeError:  # of CUDA: the run's own turn raises it again
            return True


def wait_for(backlogs: Collection[Backlog]) -> None:
    """Sleep for a moment, since no run may have its turn; divide the time equally among them."""
    began = perf_counter()
    sleep(POLL)
    part = (perf_counter() - began) / len(backlogs)
    for backlog in backlogs:
        backlog.waited += part
