"""Rows in columns: 16 bytes each, where objects would take hundreds.

A moment (step, epoch, seconds) and a name are stored once, and every row points to its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

PART = 1 << 15  # rows that are looked at together
NOWHERE = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class Row:
    """`name` had `value` after `step` steps, when `epoch` epochs were complete, at `seconds`."""

    step: int
    epoch: int
    seconds: float
    name: str
    value: float


class RowColumns(Sequence[Row]):
    """Rows in the order written; one is made into a `Row` when it is asked for."""

    def __init__(
        self,
        moments: tuple[np.ndarray, np.ndarray, np.ndarray],
        names: Sequence[str],
        columns: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        self.steps, self.epochs, self.seconds = moments
        self.names = tuple(names)
        self.moment, self.name, self.value = columns

    def __len__(self) -> int:
        return len(self.value)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self.at(np.arange(len(self))[index]))
        return next(self.at(np.array([range(len(self))[index]])))

    def __iter__(self) -> Iterator[Row]:
        for begin in range(0, len(self), PART):
            yield from self.at(np.arange(begin, min(begin + PART, len(self))))

    def at(self, places: np.ndarray) -> Iterator[Row]:
        """The rows at some places, in their order."""
        moment, names = self.moment[places], self.names
        return map(
            Row,
            self.steps[moment].tolist(),
            self.epochs[moment].tolist(),
            self.seconds[moment].tolist(),
            [names[number] for number in self.name[places].tolist()],
            self.value[places].tolist(),
        )

    def series(self, name: str) -> Iterator[Row]:
        """The rows of one name, by step; nothing where it was not recorded."""
        return self.at(self.places.get(name, NOWHERE))

    def points(self, name: str) -> Iterator[tuple[int, float]]:
        """(step, value) of one name, by step."""
        places = self.places.get(name, NOWHERE)
        steps = self.steps[self.moment[places]].tolist()
        return zip(steps, self.value[places].tolist(), strict=True)

    def not_finite(self) -> Iterator[Row]:
        """The rows whose value is infinite or not a number."""
        return self.at(np.flatnonzero(~np.isfinite(self.value)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(mine == theirs for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def places(self) -> dict[str, np.ndarray]:
        """Where the rows of each name stand, by step."""
        order = np.lexsort((self.steps[self.moment], self.name))
        ends = np.flatnonzero(np.diff(self.name[order])) + 1
        groups = np.split(order, ends) if len(order) else []
        return {self.names[self.name[places[0]]]: places for places in groups}

    @cached_property
    def latest(self) -> dict[str, float]:
        """The value of each name at its last step; in parts, so that it takes no memory."""
        steps = np.full(len(self.names), np.iinfo(np.int64).min)
        values, has_value = np.zeros(len(self.names)), np.zeros(len(self.names), bool)
        for begin in range(0, len(self), PART):
            part = slice(begin, begin + PART)
            part_steps, name = self.steps[self.moment[part]], self.name[part]
            order = np.lexsort((part_steps, name))
            ends = np.append(np.flatnonzero(np.diff(name[order])), len(order) - 1)
            last = order[ends]  # of each name in this part
            last = last[part_steps[last] >= steps[name[last]]]
            steps[name[last]], has_value[name[last]] = part_steps[last], True
            values[name[last]] = self.value[part][last]
        return {self.names[n]: float(values[n]) for n in np.flatnonzero(has_value)}


class ColumnBuilder:
    """Takes numbers as they are read."""

    def __init__(self) -> None:
        self._steps, self._epochs, self._seconds = array("q"), array("q"), array("d")
        self._moment, self._name, self._value = array("I"), array("I"), array("d")
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """What stands for a name."""
        return self._numbers.setdefault(name, len(self._numbers))

    def add(
        self, step: int, epoch: int, seconds: float, numbers: Sequence[int], values: Sequence[float]
    ) -> None:
        """The values of different names, by `number`, at one moment."""
        at = len(self._steps)
        self._steps.append(step)
        try:
            self._epochs.append(epoch)
            self._seconds.append(seconds)
        except BaseException:  # too large: the three stay of one length
            del self._steps[at:], self._epochs[at:], self._seconds[at:]
            raise
        self._name.extend(numbers)
        self._value.extend(values)
        self._moment.extend([at] * len(values))

    def extend(self, rows: Sequence[Row]) -> None:
        """Rows that are there already."""
        for row in rows:
            self.add(row.step, row.epoch, row.seconds, [self.number(row.name)], [row.value])

    def void_after(self, step: int) -> int:
        """Drop the rows past a step; how many different ones those were."""
        rows = self.rows()
        keep = rows.steps[rows.moment] <= step
        self._moment = array("I", rows.moment[keep].tobytes())
        self._name = array("I", rows.name[keep].tobytes())
        self._value = array("d", rows.value[keep].tobytes())
        return int(len(keep) - keep.sum())

    def every_row(self) -> RowColumns:
        """All that was taken, also several with one step and name."""
        moments = (
            np.array(self._steps, np.int64),
            np.array(self._epochs, np.int64),
            np.array(self._seconds),
        )
        columns = (
            np.frombuffer(self._moment, np.uint32),
            np.frombuffer(self._name, np.uint32),
            np.frombuffer(self._value),
        )
        return RowColumns(moments, list(self._numbers), columns)

    def rows(self) -> RowColumns:
        """What was taken; of several with one step and name the last one."""
        every = self.every_row()
        if not (np.diff(every.steps) <= 0).any():  # no step comes twice
            return every
        steps, names = every.steps[every.moment], every.name
        order = np.lexsort((steps, names))  # stable: of equals the last one stands last
        again = (np.diff(names[order]) == 0) & (np.diff(steps[order]) == 0)
        last = np.sort(order[np.append(~again, True)[: len(order)]])
        columns = every.moment[last], names[last], every.value[last]
        return RowColumns((every.steps, every.epochs, every.seconds), every.names, columns)
