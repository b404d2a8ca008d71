"""The compact form of a finished run's rows: the same contents, by name instead of by line.

    rows.json.gz  {"moments": [[step, epoch, seconds], ...],
                   "places": [[0, 1, ...], ...],
                   "series": {name: [place, [value, ...]]},
                   "settings": [[step, layer, {...}], ...], "events": [[step, kind, {...}], ...],
                   "meta": {...}, "damaged": [...], "superseded": 0}

`places` are lists of moments; a series names the one at which it has its values. Nothing is
rounded. What is recorded later goes to `rows.jsonl` beside it, and both are read as one.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from decaylab.errors import Damaged, DecaylabError
from decaylab.records.columns import RowColumns
from decaylab.records.files import UNREADABLE, number_or_text, replace_file
from decaylab.records.rows import PACKED, Contents, Event, Rows, SettingsChange, read_lines
from decaylab.records.settings import LayerSettings


def read_rows(path: Path) -> Rows:
    """The numbers in a file of rows and in its compact form."""
    return read_contents(path).rows


def read_contents(path: Path) -> Contents:
    """Everything in a file of rows; of `rows.jsonl` also what is in its compact form beside it.

    Where one of the two is missing the other is all; nothing where both are.
    """
    packed = path.with_name(PACKED)
    whole = path.name != "rows.jsonl" or not packed.exists()
    contents = Contents() if whole else read_packed(packed)
    return read_lines(path, contents) if path.exists() else contents


def has_rows(folder: Path) -> bool:
    """Whether a folder has rows in either form."""
    return any((folder / name).exists() for name in ("rows.jsonl", PACKED))


def pack(folder: Path) -> int:
    """Put a folder's rows into their compact form; returns how many bytes that saves.

    The compact file is read back and compared before `rows.jsonl` is deleted.
    """
    path = folder / "rows.jsonl"
    if not path.exists():
        return 0
    packed, contents = folder / PACKED, read_contents(path)
    before = path.stat().st_size + (packed.stat().st_size if packed.exists() else 0)
    write_packed(packed, contents)
    again = read_packed(packed)
    if not _same(again, contents):
        raise DecaylabError(f"{packed} does not read as {path}: nothing was deleted")
    shutil.copystat(path, packed)  # records are as old as before
    path.unlink()
    return before - packed.stat().st_size


def _same(first: Contents, second: Contents) -> bool:
    """Whether two contents say the same, whatever the order of rows."""

    def plain(contents: Contents) -> Any:
        rows = {(r.step, r.epoch, r.seconds, r.name, repr(r.value)) for r in contents.rows.rows}
        return rows, set(contents.settings), contents.rows.left_out, dict(contents.meta)

    return bool(plain(first) == plain(second) and len(first.events) == len(second.events))


def write_packed(path: Path, contents: Contents) -> None:
    """Write contents in their compact form, in place of what is there."""
    moments: dict[tuple[int, int, float], int] = {}
    columns: dict[str, tuple[list[int], list[float | str]]] = {}
    for row in contents.rows.rows:
        at = moments.setdefault((row.step, row.epoch, row.seconds), len(moments))
        where, values = columns.setdefault(row.name, ([], []))
        where.append(at)
        values.append(number_or_text(row.value))
    places: dict[tuple[int, ...], int] = {}
    series = {
        name: [places.setdefault(tuple(where), len(places)), values]
        for name, (where, values) in columns.items()
    }
    entry = {
        "moments": list(moments),
        "places": list(places),
        "series": series,
        "settings": [[c.step, c.layer, c.settings.to_json()] for c in contents.settings],
        "events": [[event.step, event.kind, dict(event.data)] for event in contents.events],
        "meta": dict(contents.meta),
        "damaged": list(contents.rows.damaged),
        "superseded": contents.rows.superseded,
    }
    data = json.dumps(entry, separators=(",", ":")).encode()
    # no time stamp: the same contents are the same file
    replace_file(path, lambda part: part.write_bytes(gzip.compress(data, 9, mtime=0)))


def read_packed(path: Path) -> Contents:
    """The contents of a compact file; one that is damaged is an error."""
    try:
        entry = json.loads(gzip.decompress(path.read_bytes()))
        return Contents(
            Rows(_rows(entry), tuple(entry["damaged"]), entry["superseded"]),
            tuple(
                SettingsChange(step, layer, LayerSettings.from_json(settings))
                for step, layer, settings in entry["settings"]
            ),
            tuple(Event(step, kind, data) for step, kind, data in entry["events"]),
            dict(entry["meta"].items()),
        )
    except UNREADABLE as error:
        raise Damaged(path, error, "put the whole file back") from error


def _rows(entry: dict[str, Any]) -> RowColumns:
    """By moment, and at each in the order of the names."""
    steps, epochs, seconds = zip(*entry["moments"], strict=True) if entry["moments"] else ((),) * 3
    moments = np.array(steps, np.int64), np.array(epochs, np.int64), np.array(seconds, np.float64)
    places = [np.array(place, np.uint32) for place in entry["places"]]
    series = entry["series"].values()
    moment = _joined([places[place] for place, _ in series], np.uint32)
    lengths = [len(values) for _, values in series]
    name = np.repeat(np.arange(len(lengths), dtype=np.uint32), lengths)
    value = _joined([np.array(list(map(float, values))) for _, values in series], np.float64)
    if len(moment) != len(value) or (len(moment) and moment.max() >= len(steps)):
        raise ValueError("values without a moment")
    order = np.lexsort((name, moment))
    return RowColumns(moments, list(entry["series"]), (moment[order], name[order], value[order]))


def _joined(parts: list[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate(parts).astype(kind) if parts else np.empty(0, kind)
