"""What lists of many runs need to know of each, in one file: RUNS/.index.json.

It is a cache: an entry counts while the files of its run are those it was made from (names, sizes
and times), and a file that is missing or damaged is made again. A run that is being written is
always read itself.
"""

import gc
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decaylab
from decaylab.errors import DecaylabError, NotRead
from decaylab.records.files import READABLE, UNREADABLE, number_or_text, replace_text
from decaylab.records.store import Manifest, RunFolder, RunStore, manifest_from

FORMAT = 2
FACTS = ("spec", "epoch", "step", "seconds", "damaged", "left_out")
"""What of a `RunSummary` is JSON as it stands."""
UNSTABLE = ("owner.json", "checkpoint", ".now-")
"""How files begin that come and go without changing what a run says."""
ENDED = ("finished", "diverged", "pruned")


@dataclass(frozen=True)
class RunSummary:
    """A run without its curves: spec, manifest (None: not begun), how far it came, last values.

    `damaged` and `left_out` are those of its rows.
    """

    folder: RunFolder
    spec: Mapping[str, Any]
    manifest: Manifest | None
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def summaries(store: RunStore) -> tuple[list[RunSummary], dict[str, str]]:
    """All runs of a store by name, and those that cannot be read with the reason."""
    collects = gc.isenabled()
    gc.disable()  # there are no cycles, and looking for them in so many objects takes long
    try:
        return _summaries(store)
    finally:
        if collects:
            gc.enable()


def _summaries(store: RunStore) -> tuple[list[RunSummary], dict[str, str]]:
    path = store.root / ".index.json"
    cached, fresh = _read(path), {}
    readable, unreadable = [], {}
    for folder in store.runs():
        try:
            signature = _signature(folder.path)
            entry = cached.get(folder.id)
            if entry is None or entry["signature"] != signature:
                summary = summarise(folder)
                entry = _entry(summary, signature)
            else:
                summary = _summary(folder, entry)
        except (DecaylabError, OSError) as error:
            if isinstance(error, OSError):
                error = NotRead(folder.path, error, READABLE)
            unreadable[folder.id] = str(error)
            continue
        readable.append(summary)
        if summary.manifest is not None and summary.manifest.status in ENDED:
            fresh[folder.id] = entry
    if fresh != cached and len(fresh) > 20:  # fewer are read as fast as their index
        text = json.dumps({"format": FORMAT, "version": decaylab.__version__, "runs": fresh})
        with suppress(DecaylabError):  # a folder that can only be read
            replace_text(path, text)
    return readable, unreadable


def summarise(folder: RunFolder) -> RunSummary:
    """One run, from its own files."""
    manifest, rows, spec = folder.manifest(), folder.rows(), folder.spec_values()
    latest = rows.rows[-1] if rows.rows else None
    reached = (latest.epoch, latest.step, latest.seconds) if latest else (0, 0, 0.0)
    values = rows.latest
    return RunSummary(folder, spec, manifest, *reached, values, rows.damaged, rows.left_out)


def _signature(path: Path) -> list[list[Any]]:
    """Name, size and time of a run's files."""
    with os.scandir(path) as files:
        stats = [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns]
            for file in files
            if not file.name.startswith(UNSTABLE) and not file.name.endswith(".part")
        ]
    return sorted(stats)


def _read(path: Path) -> dict[str, Any]:
    try:
        entry = json.loads(path.read_bytes())
        if entry["format"] == FORMAT and entry["version"] == decaylab.__version__:
            return dict(entry["runs"])
    except UNREADABLE:
        pass
    return {}


def _entry(summary: RunSummary, signature: list[list[Any]]) -> dict[str, Any]:
    values = {name: number_or_text(value) for name, value in summary.values.items()}
    facts = {name: getattr(summary, name) for name in FACTS}
    return facts | {
        "signature": signature,
        "manifest": summary.manifest and _fields(summary.manifest),
        "values": values,
    }


def _fields(manifest: Manifest) -> dict[str, Any]:
    """As `asdict`, which copies each value."""
    hits, starts = manifest.test_hits, [vars(start) for start in manifest.starts]
    return {**vars(manifest), "test_hits": hits and vars(hits), "starts": starts}


def _summary(folder: RunFolder, entry: Mapping[str, Any]) -> RunSummary:
    facts = {name: entry[name] for name in FACTS}
    facts |= {name: tuple(facts[name]) for name in ("damaged", "left_out")}
    manifest = entry["manifest"] and manifest_from(entry["manifest"])
    values = {name: float(value) for name, value in entry["values"].items()}
    return RunSummary(folder, manifest=manifest, values=values, **facts)
