"""The rows of a run: an append-only file of one JSON object per line."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from decaylab.records.files import disk_errors


@dataclass(frozen=True, slots=True)  # a long run has millions
class Row:
    """`name` had `value` after `step` steps, when `epoch` epochs were complete, at `seconds`."""

    step: int
    epoch: int
    seconds: float
    name: str
    value: float


@dataclass(frozen=True)
class Rows:
    """The rows that count, in the order written, and what was left out.

    `damaged`: each line that cannot be read. `superseded`: how many rows a resume voided.
    """

    rows: tuple[Row, ...]
    damaged: tuple[str, ...] = ()
    superseded: int = 0

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was left out and why, a sentence each."""
        if not self.superseded:
            return self.damaged
        voided = f"{self.superseded} rows past a checkpoint were superseded by a resume"
        return (*self.damaged, voided)

    def names(self) -> list[str]:
        """The recorded names, in the order of their first row."""
        return list(dict.fromkeys(row.name for row in self.rows))

    def series(self, name: str) -> list[Row]:
        """All rows of one name, by step."""
        return sorted((row for row in self.rows if row.name == name), key=lambda row: row.step)

    def last(self, name: str) -> float | None:
        """The latest value of one name, or None."""
        series = self.series(name)
        return series[-1].value if series else None


class Tracker(Protocol):
    """Whatever is shown rows as they are recorded; see `decaylab.integrations.trackers`."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order in which they were recorded."""


class RowWriter:
    """Appends rows; each call of `append` is on disk when it returns.

    What could not be written (a full disk) is tried again, in its order, before what comes next.

    `resume(step)` appends a mark that voids all earlier rows past `step`, so that those written
    after the last checkpoint by a killed process do not count. Nothing is ever deleted.

    `shared`: whether somebody else has written to the file since this writer began to.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.shared = path, False
        self._waiting: list[str] = []
        self._end: int | None = None

    def resume(self, step: int) -> None:
        """Void the rows past `step` that are there (-1: all of them)."""
        if mark := self._mark(step):
            self._write(mark)

    def append(self, rows: Iterable[Row], *, anew: bool = False) -> None:
        """Append rows and force them to disk; `anew`: those that are there become void."""
        lines = [json.dumps(_plain(row)) for row in rows]
        self._write(self._mark(-1) + lines if anew else lines)

    def _mark(self, step: int) -> list[str]:
        """What voids the rows past `step`; nothing where there are none."""
        there = self.path.exists() and self.path.stat().st_size
        return [json.dumps({"resumed_from": step})] if there else []

    def _write(self, lines: list[str]) -> None:
        # One write call, and a newline first where a killed process left a torn line.
        self._waiting += lines
        with disk_errors(self.path), self.path.open("ab+") as file:
            end = file.tell()
            self.shared |= self._end not in (None, end)
            self._end = None  # until all is written
            torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
            text = ("\n" if torn else "") + "".join(line + "\n" for line in self._waiting)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        self._waiting = []


def read_rows(path: Path) -> Rows:
    """Read rows: the last per (step, name); damaged lines and voided rows are left out."""
    if not path.exists():
        return Rows(())
    kept: dict[tuple[int, str], Row] = {}
    damaged: list[str] = []
    superseded = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "resumed_from" in entry:
                past = [key for key in kept if key[0] > int(entry["resumed_from"])]
                superseded += len(past)
                for key in past:
                    del kept[key]
                continue
            row = _row(entry)
        except (ValueError, TypeError, KeyError):
            damaged.append(f"line {number} of {path.name} is damaged")
            continue
        kept.pop((row.step, row.name), None)
        kept[row.step, row.name] = row
    return Rows(tuple(kept.values()), tuple(damaged), superseded)


def _plain(row: Row) -> dict[str, object]:
    # JSON has no nan and no inf: they are written as the strings that float() reads.
    entry = asdict(row)
    if not math.isfinite(row.value):
        entry["value"] = str(row.value)
    return entry


def _row(entry: dict[str, object]) -> Row:
    step, epoch, name = entry["step"], entry["epoch"], entry["name"]
    if not (type(step) is int and type(epoch) is int and isinstance(name, str)):
        raise ValueError("not a row")
    return Row(step, epoch, float(str(entry["seconds"])), name, float(str(entry["value"])))
