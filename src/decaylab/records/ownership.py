"""Who writes a run: one process at a time, even if hosts share a folder without working locks.

The owner's file is created atomically (as a link) and says host, process and a token of its own.
The owner writes to it every `BEAT` seconds. It is stale, and may be replaced,

- at once, where its process ran on this host and is gone;
- after `STALE` seconds without a beat, where it runs elsewhere. Both times are the file system's: a
  new file's time against the owner file's, so that clocks of hosts may differ.

A process that was suspended for longer than that finds another token in the file when it wakes, and
writes nothing more.
"""

import errno
import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from decaylab.errors import DecaylabError, MadeElsewhere
from decaylab.records.files import disk_errors

BEAT, STALE = 15.0, 120.0


@dataclass(frozen=True)
class Owner:
    """A process: `host` tells machines and containers apart, `started` processes with one id."""

    token: str
    host: str
    name: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.name}"


UNKNOWN = Owner("", "", "another host", 0, 0)


class Ownership:
    """The right to write a folder, from `take` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner: Owner | None = None

    def take(self) -> Owner | None:
        """Become the owner; None, or the one who is and lives."""
        pid = os.getpid()
        mine = Owner(uuid.uuid4().hex, _host(), socket.gethostname(), pid, _started(pid))
        for _ in range(3):
            if self._create(mine):
                self._owner = mine
                _heart.add(self)
                return None
            if not _is_stale(self.path):
                break
            _remove_stale(self.path, mine)
        return read_owner(self.path) or UNKNOWN  # gone this moment: whoever removed it comes first

    def check(self) -> None:
        """Raise if the folder has another owner by now."""
        holder = read_owner(self.path)
        if self._owner is not None and (holder is None or holder.token != self._owner.token):
            who = "somebody removed its owner file" if holder is None else f"{holder} has it now"
            raise MadeElsewhere(
                f"{self.path.parent.name} was taken over while this process was suspended ({who}):"
                " nothing more is written here; that process goes on from the last checkpoint"
            )

    def beat(self) -> None:
        """Show that the owner lives."""
        if self._owner is not None:
            with suppress(OSError, DecaylabError):
                self.check()
                with self.path.open("r+b") as file:
                    file.write(b"{")  # the byte that is there: the file's time is what counts

    def release(self) -> None:
        """Give the folder up; another's file stays, and a fork gives nothing up."""
        if self._owner is None or self._owner.pid != os.getpid():
            return
        _heart.remove(self)
        with suppress(OSError, DecaylabError):
            self.check()
            self.path.unlink()
        self._owner = None

    def _create(self, owner: Owner) -> bool:
        with disk_errors(self.path):
            return _create(self.path, owner)


def _create(path: Path, owner: Owner) -> bool:
    """Create an owner's file, whole; False if there is one.

    By a link, which either is there or not, with all that the file says: a process that is killed
    leaves none without a name in it. Where a file system knows no links, by O_EXCL.
    """
    text = json.dumps(asdict(owner)).encode()
    temporary = path.with_name(f"{path.name}.{owner.token[:12]}.part")
    temporary.write_bytes(text)
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # not found: an owner tidied its folder
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    else:
        return True
    finally:
        with suppress(OSError):
            temporary.unlink()
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return True


def _remove_stale(path: Path, mine: Owner) -> None:
    """Remove a stale owner's file, unless another process does so or has done so.

    Who may has an owner's file for that, which may be a killed process's and stale itself.
    """
    takeover = path.with_name(path.name + ".takeover")
    if not _create(takeover, mine):
        if _is_stale(takeover):
            _remove_stale(takeover, mine)
        return
    try:
        if _is_stale(path):  # still: nobody else removes it now
            path.unlink(missing_ok=True)
    finally:
        takeover.unlink(missing_ok=True)


class _Heart:
    """One thread that beats for all folders that this process owns, while there are some."""

    def __init__(self) -> None:
        self._owned: set[Ownership] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, ownership: Ownership) -> None:
        if self._pid != os.getpid():  # a fork: the other process beats for what is its own
            self.__init__()  # type: ignore[misc]
        self._owned.add(ownership)
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._beat, name="decaylab-owner", daemon=True)
            self._thread.start()

    def remove(self, ownership: Ownership) -> None:
        self._owned.discard(ownership)
        if self._pid == os.getpid() and not self._owned and self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            for ownership in list(self._owned):
                ownership.beat()


_heart = _Heart()


def read_owner(path: Path) -> Owner | None:
    """The owner that a file names; None if there is no file, or nothing readable in it."""
    try:
        entry = json.loads(path.read_bytes())
        token, host, name = (str(entry[key]) for key in ("token", "host", "name"))
        return Owner(token, host, name, int(entry["pid"]), int(entry["started"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_alive(owner: Owner, path: Path) -> bool:
    """Whether an owner still writes: its process, on this host; its beats, elsewhere."""
    if owner.host == _host():
        return _started(owner.pid) == owner.started
    return _age(path) < STALE


def is_owned(path: Path) -> bool:
    """Whether a folder, by its owner's file, is being written now."""
    owner = read_owner(path)
    if owner is None:
        return path.exists() and _age(path) < STALE
    return is_alive(owner, path)


def _is_stale(path: Path) -> bool:
    """Whether there is an owner's file, of an owner that is gone."""
    owner = read_owner(path)
    if owner is None:  # none there, created this moment, or damaged: not for us to judge
        return _age(path) >= STALE
    return not is_alive(owner, path)


def _age(path: Path) -> float:
    """Seconds since a file was written, by the clock of its file system."""
    probe = path.with_name(f".now-{uuid.uuid4().hex}")
    try:
        with probe.open("xb") as file:
            file.write(b".")
            file.flush()
            now = os.fstat(file.fileno()).st_mtime
    except OSError:  # a folder that can only be read: nobody will take it over from here
        return 0.0
    finally:
        with suppress(OSError):
            probe.unlink()
    try:
        with path.open("rb") as file:  # opened: a network file system asks its server again
            return now - os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


@cache
def _host() -> str:
    """A name of this machine since it was started, and of the container on it."""
    parts = [socket.gethostname(), f"{uuid.getnode():x}"]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> int:
    """When a process of this host was started, in ticks since boot; 0 where there is none.

    1 where the system does not say more than that it is there.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return 0 if state in "ZX" else max(int(fields[18]), 1)  # 0: it is not known here
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return 0
    except (OSError, IndexError, ValueError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except OSError:
        pass
    return 1
