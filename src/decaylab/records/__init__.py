"""Records: one folder per run, append-only rows, a manifest that says how the run went."""

from decaylab.records.hits import TestHits
from decaylab.records.recording import Meta, Recording, read_recording, recording_from_rows
from decaylab.records.rows import Event, Row, Rows, SettingsChange, Tracker
from decaylab.records.settings import LayerSettings
from decaylab.records.store import Manifest, RunFolder, RunStore, Start, Status

__all__ = [
    "Event",
    "LayerSettings",
    "Manifest",
    "Meta",
    "Recording",
    "Row",
    "Rows",
    "RunFolder",
    "RunStore",
    "SettingsChange",
    "Start",
    "Status",
    "TestHits",
    "Tracker",
    "read_recording",
    "recording_from_rows",
]
