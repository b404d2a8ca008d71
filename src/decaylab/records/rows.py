"""The numbers of a run, and the append-only file that a run writes.

One JSON object per line, of these kinds:

    {"step": 10, "epoch": 0, "seconds": 1.5, "values": {"weight_norm/fc": 2.0}}    numbers
    {"step": 10, "layer": "fc", "settings": {"law": "sgd", "lr": 0.1}}             `LayerSettings`
    {"step": 10, "event": "resumed", "data": {}}                                   `Event`
    {"meta": {"version": "0.1.0"}}                                                 facts of the run
    {"resumed_from": 10}                        lines above, recorded after this step, do not count

Older files have a line for each number, with `name` and `value`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from decaylab.errors import needed, printable
from decaylab.records.columns import ColumnBuilder, Row, RowColumns
from decaylab.records.files import MALFORMED, disk_errors, json_text, number_or_text
from decaylab.records.settings import LayerSettings

PACKED = "rows.json.gz"
"""The name of the compact form (`records.packing`), beside the file of rows."""
# What older versions called a quantity -> its name.
RENAMED = {"norm": "weight_norm", "invariance_defect": "invariance"}
LONGEST_LINE = 1 << 26


@dataclass(frozen=True)
class Rows:
    """The rows that count, in the order written, and what was left out.

    `damaged`: each line that cannot be read. `superseded`: how many rows a resume voided.
    """

    rows: Sequence[Row]
    damaged: tuple[str, ...] = ()
    superseded: int = 0

    def __repr__(self) -> str:
        steps = [row.step for row in self.rows]
        when = f", steps {min(steps)} to {max(steps)}" if steps else ""
        return f"<{len(steps)} rows of {len(self.names())} quantities{when}>"

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was left out and why, a sentence each."""
        if not self.superseded:
            return self.damaged
        voided = f"{self.superseded} rows past a checkpoint were superseded by a resume"
        return (*self.damaged, voided)

    @cached_property
    def columns(self) -> RowColumns:
        """The same in columns."""
        if isinstance(self.rows, RowColumns):
            return self.rows
        builder = ColumnBuilder()
        builder.extend(self.rows)
        return builder.every_row()

    @cached_property
    def by_name(self) -> Mapping[str, list[Row]]:
        """All rows of each name, by step; names in the order of their first row."""
        return {name: self.series(name) for name in self.names()}

    def names(self) -> list[str]:
        """The recorded names, in the order of their first row."""
        return list(self.columns.places)

    def series(self, name: str) -> list[Row]:
        """All rows of one name, by step."""
        return list(self.columns.series(name))

    def points(self, name: str) -> tuple[tuple[int, float], ...]:
        """(step, value) of one name, by step; nothing where it was not recorded."""
        return tuple(self.columns.points(name))

    def not_finite(self) -> list[Row]:
        """The rows whose value is infinite or not a number."""
        return list(self.columns.not_finite())

    def last(self, name: str) -> float | None:
        """The latest value of one name, or None."""
        return self.columns.latest.get(name)

    @property
    def latest(self) -> Mapping[str, float]:
        """The latest value of each name."""
        return self.columns.latest

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a line per number: step, epoch, seconds, quantity, layer, value.

        `layer` is "" for quantities of the whole model. Needs pandas, which decaylab does not
        install by itself. `frame.query("quantity == 'rotation'").pivot(index="step",
        columns="layer", values="value").plot()` draws one quantity of every layer.
        """
        pandas = needed("pandas", extra="notebook", what="to_pandas()")
        names = ("step", "epoch", "seconds", "quantity", "layer", "value")
        lines = (
            (row.step, row.epoch, row.seconds, *row.name.partition("/")[::2], row.value)
            for row in self.rows
        )
        return pandas.DataFrame(lines, columns=names)


class Tracker(Protocol):
    """Receives rows as they are recorded; see `decaylab.integrations.trackers`."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order in which they were recorded."""


@dataclass(frozen=True)
class Event:
    """Something that happened to the recording itself, such as a resume or a changed optimizer."""

    step: int
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingsChange:
    """From step `step` on, `layer` is stepped like this."""

    step: int
    layer: str
    settings: LayerSettings


Entry = Row | SettingsChange | Event


@dataclass(frozen=True)
class Contents:
    """Everything in a file of records that still counts."""

    rows: Rows = Rows(())
    settings: tuple[SettingsChange, ...] = ()
    events: tuple[Event, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


class RowWriter:
    """Appends rows, settings and events; each call of `append` is on disk when it returns.

    What could not be written (a full disk) is tried again, in order, before the next entries.

    `resume(step)` appends a mark that voids all earlier rows past `step`, so that those written
    after the last checkpoint by a killed process do not count. Nothing is ever deleted.

    `shared`: whether another process has written to the file since this writer started. `check` is
    called before each write, and raises if the file now belongs to another process.
    """

    def __init__(self, path: Path, check: Callable[[], object] | None = None) -> None:
        self.path, self.shared, self._check = path, False, check
        self._waiting: list[str] = []
        self._end: int | None = None

    def resume(self, step: int) -> None:
        """Void existing rows after `step` (-1: all of them)."""
        if mark := self._mark(step):
            self._write(mark)

    def append(
        self,
        entries: Iterable[Entry] = (),
        *,
        anew: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Append entries and force them to disk; `anew` voids the existing ones.

        `meta`: facts about the run, added to the existing ones or replacing them.
        """
        facts = [] if meta is None else [json.dumps({"meta": dict(meta)})]
        self._write([*(self._mark(-1) if anew else []), *facts, *_lines(entries)])

    def _mark(self, step: int) -> list[str]:
        """What voids the rows past `step`; nothing where there are none."""
        has_rows = self.path.exists() and self.path.stat().st_size
        has_rows = has_rows or self.path.with_name(PACKED).exists()
        return [json.dumps({"resumed_from": step})] if has_rows else []

    def _write(self, lines: list[str]) -> None:
        # One write call, and a newline first where a killed process left a torn line.
        if self._check is not None:
            self._check()
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


def read_lines(path: Path, earlier: Contents = Contents()) -> Contents:  # noqa: B008 - frozen
    """The contents of a file of rows, after `earlier` ones: the last row per (step, name) counts.

    Damaged lines and voided rows are left out. Read line by line, so a large file needs no memory
    beyond its numbers, which are kept in columns.
    """
    parser = _Parser(path.name, earlier)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                line = b"too long"
            if not line.isspace():
                parser.take(number, line)
    return parser.contents()


class _Parser:
    def __init__(self, name: str, earlier: Contents) -> None:
        self.name = name
        self.numbers = ColumnBuilder()
        self.numbers.extend(earlier.rows.rows)
        self.settings = {(change.step, change.layer): change for change in earlier.settings}
        self.events = list(earlier.events)
        self.meta = dict(earlier.meta)
        self.damaged = list(earlier.rows.damaged)
        self.superseded = earlier.rows.superseded
        self._numbers: dict[tuple[str, ...], list[int]] = {}  # of the names of a line

    def take(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line.decode())
            if "value" in entry:
                self._add(entry, {entry["name"]: entry["value"]})
            elif "values" in entry:
                self._add(entry, entry["values"])
            elif "resumed_from" in entry:
                self._void(int(entry["resumed_from"]))
            elif "settings" in entry:
                settings = LayerSettings.from_json(entry["settings"])
                change = SettingsChange(int(entry["step"]), entry["layer"], settings)
                self.settings[change.step, change.layer] = change
            elif "event" in entry:
                event = Event(int(entry["step"]), entry["event"], entry.get("data", {}))
                self.events.append(event)
            else:
                self.meta |= entry["meta"]
        except MALFORMED:
            self.damaged.append(f"line {number} of {self.name} is damaged")

    def _add(self, entry: dict[str, Any], values: dict[str, Any]) -> None:
        step, epoch, names = entry["step"], entry["epoch"], tuple(values)
        if not (type(step) is int and type(epoch) is int):
            raise ValueError("not a row")
        if names not in self._numbers:
            current = {current_name(name): value for name, value in values.items()}
            if len(current) < len(values):  # an old name beside its new one
                self._add(entry, current)
                return
            self._numbers[names] = [self.numbers.number(name) for name in current]
        floats = [float(value) for value in values.values()]
        self.numbers.add(step, epoch, float(entry["seconds"]), self._numbers[names], floats)

    def _void(self, step: int) -> None:
        self.superseded += self.numbers.void_after(step)
        self.settings = {key: change for key, change in self.settings.items() if key[0] <= step}
        self.events = [event for event in self.events if event.step <= step]

    def contents(self) -> Contents:
        rows = Rows(self.numbers.rows(), tuple(self.damaged), self.superseded)
        return Contents(rows, tuple(self.settings.values()), tuple(self.events), self.meta)


def current_name(name: str) -> str:
    """The current name of a row.

    >>> current_name("norm/fc"), current_name("jacobian_norm")
    ('weight_norm/fc', 'jacobian_norm')
    """
    quantity, slash, layer = printable(name).partition("/")
    return f"{RENAMED[quantity]}/{layer}" if slash and quantity in RENAMED else printable(name)


def _lines(entries: Iterable[Entry]) -> list[str]:
    """Entries as lines; rows of one moment that follow each other are one line."""
    lines: list[str] = []
    moment, values = None, dict[str, Any]()
    for entry in entries:
        if isinstance(entry, Row):
            if moment != (now := (entry.step, entry.epoch, entry.seconds)):
                lines += _numbers(moment, values)
                moment, values = now, {}
            values[entry.name] = number_or_text(entry.value)
        elif isinstance(entry, SettingsChange):
            change = {"layer": entry.layer, "settings": entry.settings.to_json()}
            lines.append(json.dumps({"step": entry.step, **change}))
        else:
            event = {"event": entry.kind, "data": dict(entry.data)}
            lines.append(json_text({"step": entry.step, **event}))
    return lines + _numbers(moment, values)


def _numbers(moment: tuple[int, int, float] | None, values: dict[str, Any]) -> list[str]:
    if moment is None:
        return []
    step, epoch, seconds = moment
    entry = {"step": step, "epoch": epoch, "seconds": seconds, "values": values}
    return [json.dumps(entry)]
