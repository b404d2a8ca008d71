"""Whatever holds a recording: a folder, a file of rows, a `Watch`, rows in memory."""

from pathlib import Path
from typing import Any

from decaylab.errors import WrongType
from decaylab.records.recording import Recording, read_recording, recording_from_rows
from decaylab.records.rows import Rows
from decaylab.records.store import RunFolder

Source = Any
"""A run folder or a folder that `watch(folder=...)` wrote, a `Watch`, a `Recording` or `Rows`."""


def as_recording(source: Source) -> Recording:
    """The recording of whatever holds one."""
    if isinstance(source, Recording):
        return source
    if isinstance(source, Rows):
        return recording_from_rows(source)
    if isinstance(source, str | Path | RunFolder):
        return read_recording(source)
    held = getattr(source, "recording", None)
    if isinstance(held, Recording):
        return held
    wanted = "what `watch(...)` returned, or a folder of records"
    raise WrongType("the source of records", source, wanted)
