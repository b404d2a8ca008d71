"""Everything that a watched run has recorded, on its way to memory, trackers, a file and the user.

What comes in (numbers, logged outcomes, settings, events, troubles) is kept in memory at once and
goes out in `flush`: rows to the trackers, then troubles as warnings, then all to the file, last,
since a disk may be full.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from decaylab.errors import warn_user
from decaylab.records.packing import read_contents
from decaylab.records.recording import LOGGED, Recording, recording_of
from decaylab.records.rows import (
    Contents,
    Entry,
    Event,
    Row,
    Rows,
    RowWriter,
    SettingsChange,
    Tracker,
)
from decaylab.records.settings import LayerSettings

VOIDED = (
    "this optimizer has stepped before, but the rows in this folder, up to step {}, no longer"
    " count: to continue them, call watched.resume(step) before the first step"
)
SHARED = "another watch or process writes to it too: give each its own folder"


class Recorder:
    """Keeps what is recorded and hands it on.

    Args:
        now: (step, epoch, seconds) of what comes in.
        meta: facts of the run, which begin the file.
        writer: of the file; None keeps everything in memory. Rows that are in it become void with
            the first that are written, unless the run is resumed.
        trackers: also shown all rows. One that fails, maybe after a long wait, is asked no more.
        warns: whether to warn of troubles; of several processes, one does.

    `continues` may be set before anything is written: the run goes on from an earlier one, so the
    user is told of rows that it voids.
    """

    def __init__(
        self,
        now: Callable[[], tuple[int, int, float]],
        meta: Mapping[str, Any],
        writer: RowWriter | None = None,
        trackers: Iterable[Tracker] = (),
        *,
        warns: bool = True,
    ) -> None:
        self._now, self._meta, self._warns = now, meta, warns
        self._writer, self._trackers = writer, list(trackers)
        self.continues = False
        self._voids = True  # whether the first rows that are written void those in the file
        self._begun = False  # whether any were written to it
        self._rows: list[Row] = []
        self._changes: list[SettingsChange] = []
        self._events: list[Event] = []
        self._logged: list[tuple[int, int, float, str, SupportsFloat]] = []  # not yet read
        self._unwritten: list[Entry] = []
        self._settings: Mapping[str, LayerSettings] = {}
        self._troubles: dict[str, Exception | str] = {}
        self._warned: set[str] = set()

    # ------------------------------------------------------------ what comes in

    def add(self, values: Mapping[str, float]) -> None:
        """Numbers, by row name."""
        now = self._now()
        # one string for all rows of a name: they stay in memory
        self._add_rows([Row(*now, sys.intern(name), value) for name, value in values.items()])

    def log(self, name: str, value: SupportsFloat) -> None:
        """An outcome; a tensor is read by the next `flush`, and nothing waits for it until then."""
        self._logged.append((*self._now(), name, value))

    def read_logged(self) -> None:
        """Make rows of the outcomes logged so far, which may wait for the device."""
        logged, self._logged = self._logged, []
        self._add_rows(
            [
                Row(step, epoch, seconds, sys.intern(LOGGED + name), float(value))
                for step, epoch, seconds, name, value in logged
            ]
        )

    def add_settings(self, step: int, settings: Mapping[str, LayerSettings]) -> None:
        """How layers are stepped from `step` on, of those for which that has changed."""
        changes = [
            SettingsChange(step, layer, own)
            for layer, own in settings.items()
            if own != self._settings.get(layer)
        ]
        self._settings = settings
        self._changes += changes
        self._unwritten += changes

    def note(self, kind: str, **data: Any) -> None:
        """An event: something that happened to the run or to its recording."""
        event = Event(self._now()[0], kind, data)
        self._events.append(event)
        self._unwritten.append(event)

    def trouble(self, name: str, what: Exception | str) -> None:
        """What is wrong with a probe; the user is warned of it by the next `flush`."""
        if name not in self._warned:
            self._troubles[name] = what
            if isinstance(what, Exception):
                self.note("probe-failed", probe=name, error=f"{type(what).__name__}: {what}")

    def _add_rows(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        self._unwritten += rows

    # ------------------------------------------------------------ what goes out

    @property
    def rows(self) -> Rows:
        """All numbers recorded so far."""
        self.read_logged()
        return Rows(tuple(self._rows))

    def __len__(self) -> int:
        """How many numbers were recorded, without waiting for outcomes that are not yet read."""
        return len(self._rows)

    @property
    def folder(self) -> Path | None:
        """Where the file is, if there is one."""
        return None if self._writer is None else self._writer.path.parent

    @property
    def recording(self) -> Recording:
        """The numbers with settings, outcomes and events."""
        contents = Contents(self.rows, tuple(self._changes), tuple(self._events), self._meta)
        name = str(self.folder or "the watched run")
        return recording_of(name, contents, folder=self.folder)

    def flush(self) -> None:
        """Show and write what has come in since; what cannot be written yet, the writer keeps."""
        self.read_logged()
        entries, self._unwritten = self._unwritten, []
        if not entries:
            return
        self._show([entry for entry in entries if isinstance(entry, Row)])
        troubles, self._troubles = self._troubles, {}
        for name, trouble in troubles.items():
            self.warn_once(name, trouble)
        if self._writer is not None:
            self._write(self._writer, entries)

    def warn_once(self, name: str, trouble: Exception | str) -> None:
        """Warn the user, unless that has been done under this name."""
        if name in self._warned:
            return
        self._warned.add(name)
        if not self._warns:
            return
        message = trouble if isinstance(trouble, str) else f"{type(trouble).__name__}: {trouble}"
        text = f"watch: {name} at step {self._now()[0]}: {message}"
        warn_user(f"{text} (shown once; training continues)")

    def _show(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        for tracker in tuple(self._trackers):
            try:
                tracker.log(rows)
            except Exception as error:
                self._trackers.remove(tracker)
                self.warn_once(f"{type(tracker).__name__} is dropped", error)

    # ------------------------------------------------------------ the file

    def write_to(self, writer: RowWriter) -> None:
        """From now on, append to this file, whose rows still count."""
        self._writer, self._voids, self._begun = writer, False, False

    def resume(self, step: int, rows: Sequence[Row] | None = None) -> None:
        """Go on from `step` (-1: from the start); what was recorded after it no longer counts.

        What counts is read from the file, where there is one. `rows`: those that count, as the
        process that has the file has read them.
        """
        self._rows = [row for row in self._rows if row.step <= step]
        self._changes = [change for change in self._changes if change.step <= step]
        self._events = [event for event in self._events if event.step <= step]
        self._logged, self._unwritten = [], []
        self._settings = {}  # those that changed past the checkpoint are to be recorded again
        self._voids = False
        if self._writer is not None:
            self._writer.resume(step)
            contents = read_contents(self._writer.path)
            self._rows, self._changes = list(contents.rows.rows), list(contents.settings)
            self._events = list(contents.events)
        if rows is not None:
            self._rows = list(rows)

    def _write(self, writer: RowWriter, entries: Sequence[Entry]) -> None:
        voids, begun = self._voids, self._begun
        self._voids, self._begun = False, True
        voided = read_contents(writer.path).rows.rows if voids and self.continues else ()
        writer.append(entries, anew=voids, meta=None if begun else self._meta)
        if voided:
            last = max(row.step for row in voided)
            self.note("rows-voided", last_step=last)
            self.warn_once("earlier rows", VOIDED.format(last))
        if writer.shared:
            self.warn_once("folder", SHARED)
