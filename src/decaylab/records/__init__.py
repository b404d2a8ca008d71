"""Records: one folder per run, append-only rows, a manifest that tells how the run went."""

from decaylab.records.hits import TestHits
from decaylab.records.rows import Row, Rows, Tracker
from decaylab.records.store import Manifest, RunFolder, RunStore, Status

__all__ = ["Manifest", "Row", "Rows", "RunFolder", "RunStore", "Status", "TestHits", "Tracker"]
