"""Run folders: one folder per run, found by the id of its spec.

    runs/<id>/spec.toml               what was asked for
              rows.jsonl              numbers and settings, append-only
              rows.json.gz            the same of a packed run (`records.packing`)
              manifest.json           status, versions, device, times
              checkpoint.safetensors  tensors, and the rest as JSON in its header
              lock                    held by the process that writes

Same spec = same id = same folder = continue. A killed run is never taken for a finished one: only
the manifest says `finished`, and it is written last.
"""

import fcntl
import json
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Literal, get_args

from decaylab.errors import DecaylabError
from decaylab.records.files import disk_errors, replace_text
from decaylab.records.hits import TestHits
from decaylab.records.packing import read_rows
from decaylab.records.rows import Rows, RowWriter

FORMAT = 1
Status = Literal["running", "finished", "diverged", "interrupted", "failed", "pruned"]


@dataclass(frozen=True)
class Manifest:
    """How a run went: status, code, torch, device, seed, tier, times (UTC seconds since 1970).

    `at_once`: how many runs shared the device with it, itself included. Beyond 1 its seconds say
    little, since the others' work is among its own. `compiled`: whether its network was.
    `test_hits`: which test images it classified correctly when it finished; None before that, and
    for runs of versions that did not record it.
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
    format: int = FORMAT


class RunFolder:
    """One run on disk. Reading needs no lock; writing happens inside `writing()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.rows_writer = RowWriter(path / "rows.jsonl")

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint lies, if there is one."""
        return self.path / "checkpoint.safetensors"

    def spec_text(self) -> str:
        """The TOML text of the spec."""
        try:
            return (self.path / "spec.toml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DecaylabError(
                f"{self.path} has no readable spec.toml: give another run folder, or delete this"
                " one and train again"
            ) from error

    def spec_values(self) -> dict[str, Any]:
        """The spec as it stands there, key by key."""
        try:
            return tomllib.loads(self.spec_text())
        except tomllib.TOMLDecodeError as error:
            raise DecaylabError(
                f"{self.path / 'spec.toml'} is damaged ({error}): move the folder away and train"
                " again"
            ) from error

    def rows(self) -> Rows:
        """The rows that count, and what was left out."""
        return read_rows(self.path / "rows.jsonl")

    def manifest(self) -> Manifest | None:
        """The manifest, None where the run has not got that far, an error where it is unreadable.

        A status `running` whose process is gone reads as `interrupted`.
        """
        path = self.path / "manifest.json"
        if not path.exists():
            return None
        manifest = _parse_manifest(path)
        if manifest.status == "running" and not self.locked():
            manifest = _parse_manifest(path)  # it may have ended since the first look
            if manifest.status == "running":
                message = "its process ended unexpectedly"
                return replace(manifest, status="interrupted", message=message)
        return manifest

    def is_finished(self) -> bool:
        """Whether the run, which need not be there, came to its end."""
        manifest = self.manifest()
        return manifest is not None and manifest.status == "finished"

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, atomically."""
        stamped = replace(manifest, updated=time.time())
        replace_text(self.path / "manifest.json", json.dumps(asdict(stamped), indent=2) + "\n")

    def locked(self) -> bool:
        """Whether a process writes this run now."""
        path = self.path / "lock"
        if not path.exists():
            return False
        with path.open("rb") as file:
            return not _try_lock(file, exclusive=False)

    @contextmanager
    def writing(self, spec_text: str) -> Iterator["RunFolder"]:
        """Create the folder or check that it holds the same spec, and keep other writers out.

        The lock is the operating system's (`flock`): it goes when the process does, even by a kill.
        """
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("ab")
        with file:
            if not _lock_within_a_second(file):
                raise DecaylabError(
                    f"run {self.id} is being written by another process: wait for it to end, or"
                    " use another --runs folder"
                )
            spec = self.path / "spec.toml"
            if spec.exists():
                self.check_same_spec(spec_text)
            else:
                if (self.path / "manifest.json").exists() or self.checkpoint.exists():
                    self.spec_text()  # raises: results without the spec that made them
                replace_text(spec, spec_text)
            yield self

    def check_same_spec(self, spec_text: str) -> None:
        """Refuse a folder whose spec differs; keys that an older version lacked may be missing."""
        now = tomllib.loads(spec_text)
        for key, value in self.spec_values().items():
            if key not in now or now[key] != value or type(now[key]) is not type(value):
                raise DecaylabError(
                    f"the spec under {self.path} has changed: {key} is {value!r} there and"
                    f" {now.get(key)!r} now; use another --runs folder, or move that one away"
                )


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
        """The folder of a run, there or not."""
        return RunFolder(self.root / run_id)

    def runs(self) -> list[RunFolder]:
        """All run folders, by name."""
        if not self.root.is_dir():
            return []
        return [RunFolder(path.parent) for path in sorted(self.root.glob("*/spec.toml"))]

    def find(self, name: str) -> RunFolder:
        """The run whose id is, starts or ends with `name`; an error unless there is one only."""
        runs = self.runs()
        exact = [run for run in runs if run.id == name]
        found = exact or [run for run in runs if run.id.startswith(name) or run.id.endswith(name)]
        if len(found) == 1:
            return found[0]
        if not runs:
            raise DecaylabError(
                f"no run {name!r}: there is none in {self.root}; give the folder of your runs with"
                " --runs"
            )
        if not found:
            raise DecaylabError(
                f"no run {name!r} in {self.root}: `decaylab runs list --runs {self.root}` shows"
                f" the {len(runs)} that are there"
            )
        some = ", ".join(run.id for run in found[:4])
        raise DecaylabError(f"{len(found)} runs match {name!r} ({some} ...): give more of the id")


def _try_lock(file: IO[bytes], *, exclusive: bool) -> bool:
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems keep none, or not unless mounted so
        raise DecaylabError(
            f"{file.name} cannot be locked ({error.strerror}): use a --runs folder on a file system"
            " that keeps locks"
        ) from error
    return True


def _lock_within_a_second(file: IO[bytes]) -> bool:
    # `locked()` of a reader holds a shared lock for an instant: that is no other writer.
    for _ in range(20):
        if _try_lock(file, exclusive=True):
            return True
        time.sleep(0.05)
    return False


def _parse_manifest(path: Path) -> Manifest:
    advice = "move the folder away, or read it with the version that wrote it"
    try:
        entry = json.loads(path.read_bytes())
        if entry["format"] != FORMAT:
            raise DecaylabError(
                f"{path.parent} was written in format {entry['format']} by decaylab"
                f" {entry.get('version')}, this version reads format {FORMAT}: {advice}"
            )
        known = {field.name for field in fields(Manifest)}
        if entry.get("test_hits") is not None:
            entry["test_hits"] = TestHits(**entry["test_hits"])
        manifest = Manifest(**{key: value for key, value in entry.items() if key in known})
        if manifest.status not in get_args(Status):
            raise ValueError(f"status {manifest.status!r}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"{type(error).__name__}: {error}"  # repr has all bytes that are no text
        raise DecaylabError(f"{path} is damaged ({what}): {advice}") from error
    return manifest
