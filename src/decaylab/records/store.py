"""Run folders: one folder per run, found by the id of its spec.

    runs/<id>/spec.toml               what was asked for
              rows.jsonl              numbers and settings, append-only
              rows.json.gz            the same of a packed run (`records.packing`)
              manifest.json           status, versions, device, times
              checkpoint.safetensors  tensors, and the rest as JSON in its header; and
                                      checkpoint.previous.safetensors, the one before it
              owner.json              the process that writes, while it does

The same spec has the same id and folder, and resumes there. A killed run is never taken for a
finished one: only the manifest says `finished`, and it is written last.
"""

import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from decaylab.errors import (
    BadValue,
    Damaged,
    DecaylabError,
    Lacks,
    MadeElsewhere,
    Mismatch,
    NoFolder,
    NotRead,
    UnknownName,
    printable,
)
from decaylab.records.files import (
    MALFORMED,
    READABLE,
    TRAIN_AGAIN,
    UNREADABLE,
    disk_errors,
    replace_text,
)
from decaylab.records.hits import TestHits
from decaylab.records.ownership import Ownership, is_owned
from decaylab.records.packing import read_rows
from decaylab.records.rows import Rows, RowWriter

FORMAT = 1
PLAIN = (str, int, float)
"""What a spec holds, and lists of it."""
Status = Literal["running", "finished", "diverged", "interrupted", "failed", "pruned"]


@dataclass(frozen=True)
class Start:
    """One start of a run: when, by which code, torch and device, from which step.

    `fallback`: from the checkpoint before the last one, which was damaged.
    """

    time: float
    version: str
    commit: str | None
    torch: str
    device: str
    step: int = 0
    fallback: bool = False


@dataclass(frozen=True)
class Manifest:
    """How a run went: status, code, torch, device, seed, tier, times (UTC seconds since 1970).

    `at_once`: how many runs shared the device, including this one. Above 1 its seconds say little,
    since they include the others' work. `compiled`: whether its network was.
    `test_hits`: which test images it classified correctly when it finished; None before that, and
    for runs of versions that did not record it. `starts`: the first start and every resume; the
    fields above are the last one's, except that all devices are listed.
    """

    id: str
    status: Status
    version: str
    commit: str | None
    torch: str
    device: str
    seed: int
    tier: str
    started: float
    updated: float
    message: str = ""
    resumes: int = 0
    at_once: int = 1
    compiled: bool = False
    test_hits: TestHits | None = None
    starts: tuple[Start, ...] = ()
    format: int = FORMAT


_MANIFEST_FIELDS = frozenset(item.name for item in fields(Manifest))


class RunFolder:
    """One run on disk. Reading needs no lock; writing happens inside `writing()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.rows_writer = RowWriter(path / "rows.jsonl", self.check_ownership)
        self._ownership: Ownership | None = None

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint is, if there is one."""
        return self.path / "checkpoint.safetensors"

    @property
    def previous_checkpoint(self) -> Path:
        """Where the previous checkpoint is, which is used if the last one is damaged."""
        return self.path / "checkpoint.previous.safetensors"

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        return self.checkpoint.exists() or self.previous_checkpoint.exists()

    def remove_checkpoints(self) -> None:
        """Delete what a finished run no longer needs."""
        self.checkpoint.unlink(missing_ok=True)
        self.previous_checkpoint.unlink(missing_ok=True)

    def spec_text(self) -> str:
        """The TOML text of the spec."""
        try:
            return (self.path / "spec.toml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "give another run folder, or delete this one and train again"
            raise NotRead(self.path / "spec.toml", error, remedy) from error

    def spec_values(self) -> dict[str, Any]:
        """The spec as written, key by key: numbers, text and lists of them."""
        text = self.spec_text()
        try:
            values = tomllib.loads(text)
            for key, value in values.items():
                items = value if isinstance(value, list) else [value]
                if not all(isinstance(item, PLAIN) for item in items):
                    raise ValueError(f"{key} is {value!r}")
            return values
        except MALFORMED as error:  # no TOML, or not what a spec holds
            raise Damaged(self.path / "spec.toml", error, TRAIN_AGAIN) from error

    def rows(self) -> Rows:
        """The rows that count, and what was left out; an error if nothing can be read."""
        with self.reading("rows.jsonl"):
            return read_rows(self.path / "rows.jsonl")

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn whatever is wrong with a file into one sentence, so that a list of runs goes on."""
        try:
            yield
        except UNREADABLE as error:
            raise NotRead(self.path / name, error, READABLE) from error

    def manifest(self) -> Manifest | None:
        """The manifest, None if the run has not got that far, an error if it is unreadable.

        A status `running` whose process is gone reads as `interrupted`.
        """
        path = self.path / "manifest.json"
        with self.reading("manifest.json"):
            if not path.exists():
                return None
        manifest = _parse_manifest(path)
        if manifest.status != "running" or self.locked():
            return manifest
        manifest = _parse_manifest(path)  # it may have ended since the first look
        if manifest.status != "running":
            return manifest
        return replace(manifest, status="interrupted", message="its process ended unexpectedly")

    def is_finished(self) -> bool:
        """Whether the run exists and is finished."""
        manifest = self.manifest()
        return manifest is not None and manifest.status == "finished"

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, atomically."""
        self.check_ownership()
        stamped = replace(manifest, updated=time.time())
        replace_text(self.path / "manifest.json", json.dumps(asdict(stamped), indent=2) + "\n")

    def locked(self) -> bool:
        """Whether a process writes this run now, on this host or another."""
        return is_owned(self.path / "owner.json")

    @contextmanager
    def writing(self, spec_text: str) -> Iterator["RunFolder"]:
        """Create the folder or check that it holds the same spec, and keep other writers out.

        See `records.ownership`: a process that is gone, even killed, keeps nobody out.
        """
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        ownership = Ownership(self.path / "owner.json")
        if (owner := ownership.take()) is not None:
            raise MadeElsewhere(
                f"run {self.id} is being written by another process ({owner}): wait for it to end,"
                " or use another --runs folder"
            )
        self._ownership = ownership
        try:
            spec = self.path / "spec.toml"
            if spec.exists():
                self.check_same_spec(spec_text)
            else:
                if (self.path / "manifest.json").exists() or self.has_checkpoint():
                    self.spec_text()  # raises: results without the spec that made them
                replace_text(spec, spec_text)
            for leftover in self.path.glob("*.part"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            yield self
        finally:
            self._ownership = None
            ownership.release()

    def check_ownership(self) -> None:
        """Raise if another process has taken this folder over from us."""
        if self._ownership is not None:
            self._ownership.check()

    def check_same_spec(self, spec_text: str) -> None:
        """Refuse a folder whose spec differs; keys that an older version lacked may be missing."""
        if self.spec_text() == spec_text:
            return
        now = tomllib.loads(spec_text)
        for key, value in self.spec_values().items():
            if key not in now or now[key] != value or type(now[key]) is not type(value):
                values = {f"the spec in {self.path}": repr(value), "this run": repr(now.get(key))}
                raise Mismatch(key, values, "use another --runs folder, or move that one away")


class RunStore:
    r"""A folder of runs.

    >>> import tempfile
    >>> store = RunStore(Path(tempfile.mkdtemp()))
    >>> with store.folder("digits-mlp-sgd-none-00000000").writing('data = "digits"\n') as folder:
    ...     folder.locked()
    True
    >>> [folder.id for folder in store.runs()]
    ['digits-mlp-sgd-none-00000000']
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def folder(self, run_id: str) -> RunFolder:
        """The folder of a run, existing or not; never one outside the store."""
        if run_id in ("", ".", "..") or "/" in run_id or "\0" in run_id or len(run_id) > 255:
            raise BadValue("the id of a run", run_id, f"the name of a folder in {self.root}")
        return RunFolder(self.root / run_id)

    def runs(self) -> list[RunFolder]:
        """All run folders, by name."""
        if not self.root.is_dir():
            return []
        return [RunFolder(path.parent) for path in sorted(self.root.glob("*/spec.toml"))]

    def find(self, name: str) -> RunFolder:
        """The run whose id is, starts or ends with `name`; an error unless there is exactly one."""
        runs = self.runs()
        exact = [run for run in runs if run.id == name]
        matches = exact or [run for run in runs if run.id.startswith(name) or run.id.endswith(name)]
        if len(matches) == 1:
            return matches[0]
        if not runs:
            remedy = f"give the folder of run {name!r} with --runs"
            if not self.root.exists():
                raise NoFolder(self.root, remedy)
            raise Lacks(self.root, "runs", remedy)
        if not matches:
            remedy = f"`decaylab runs list --runs {self.root}` shows the {len(runs)} there are"
            raise UnknownName("run", name, [run.id for run in runs], remedy)
        examples = ", ".join(run.id for run in matches[:4])
        raise DecaylabError(
            f"{len(matches)} runs match {name!r} ({examples} ...): give more of the id"
        )


def _parse_manifest(path: Path) -> Manifest:
    advice = "move the folder away, or read it with the version that wrote it"
    try:
        entry = json.loads(path.read_bytes())
        if entry["format"] != FORMAT:
            writer = f"{path.parent} of decaylab {entry.get('version')}"
            raise Mismatch("format", {writer: entry["format"], "this version": FORMAT}, advice)
        manifest = manifest_from(entry)
        if manifest.status not in get_args(Status):
            raise ValueError(f"status {manifest.status!r}")
    except UNREADABLE as error:
        raise Damaged(path, error, advice) from error
    return manifest


def manifest_from(entry: Mapping[str, Any]) -> Manifest:
    """A manifest from plain values; a TypeError if no version wrote them."""
    values: dict[str, Any] = {
        key: printable(value) if isinstance(value, str) else value
        for key, value in entry.items()
        if key in _MANIFEST_FIELDS
    }
    if values.get("test_hits") is not None:
        values["test_hits"] = TestHits(**values["test_hits"])
    values["starts"] = tuple(Start(**start) for start in values.get("starts", ()))
    manifest = Manifest(**values)
    _check_types(manifest)
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Refuse values that no version has written: what reads them expects numbers and text."""
    for name in ("id", "version", "torch", "device", "tier", "message", "commit"):
        text = getattr(manifest, name)
        if not isinstance(text, str) and (name, text) != ("commit", None):
            raise TypeError(f"{name} is no text")
    for name in ("started", "updated", "seed", "resumes", "at_once"):
        number = getattr(manifest, name)
        if not (isinstance(number, (int, float)) and abs(number) < 2**53):  # a float can hold it
            raise TypeError(f"{name} is no number")
