"""Jobs as processes on this machine, one per GPU, or as many at a time as asked for."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from decaylab.errors import Lacks, printable
from decaylab.records.files import disk_errors
from decaylab.sweeps.engines import Job, JobStatus
from decaylab.training.signals import requests

ERROR = re.compile(r"error: |failed: |bash: |slurmstepd\S*: |[\w.]+(Error|Exception)\b")


# Said by the command's process itself: the parent has threads, and what runs between its fork and
# exec may hang.
END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class LocalEngine:
    """At most `slots` processes at a time; with GPUs, each slot has one of them for itself.

    `start` begins the first ones, `look` begins others where some have ended. What they print goes
    to `folder`/N.out. Ended with this process: by a signal it passes on, so that they save
    checkpoints.
    """

    def __init__(self, folder: Path, slots: int, gpus: int = 0) -> None:
        self.folder, self.slots, self.gpus = folder, slots, gpus
        self._waiting: list[tuple[int, Job]] = []
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # slot -> number, ...
        self._ended: list[JobStatus] = []

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse GPUs that are not here, and a folder that cannot be written."""
        check_folder(self.folder)
        if any(job.gpus for job in jobs) and not self.gpus:
            remedy = (
                "torch sees none, but these runs need one; use --device cpu, or --engine slurm or"
                " ray on a cluster that has some"
            )
            raise Lacks("this machine", "GPU", remedy)

    def start(self, jobs: Sequence[Job]) -> str:
        """Start as many as there are slots; the others wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting, self._ended = list(enumerate(jobs)), []
        self._fill()
        return str(os.getpid())

    def look(self) -> list[JobStatus]:
        """Where all jobs stand."""
        for slot, (number, process) in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[slot]
                reason = "" if code == 0 else why(self.folder / f"{number}.out", code)
                self._ended.append(JobStatus(number, "failed" if code else "ended", reason))
        self._fill()
        running = [JobStatus(number, "running") for number, _ in self._running.values()]
        waiting = [JobStatus(number, "waiting") for number, _ in self._waiting]
        return sorted([*self._ended, *running, *waiting], key=lambda status: status.number)

    def wait(self, poll: float = 0.1) -> list[JobStatus]:
        """Until all have ended; a signal is passed on, and raised when they have."""
        with requests.listening():
            try:
                while True:
                    states = self.look()
                    if not self._running and not self._waiting:
                        return states
                    requests.check()
                    time.sleep(poll)
            except BaseException:
                self.cancel()
                raise

    def cancel(self) -> None:
        """Ask all to stop, and wait until they have."""
        self._waiting = []
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for _, process in self._running.values():
            process.wait()

    def _fill(self) -> None:
        for slot in range(self.slots):
            if slot in self._running or not self._waiting:
                continue
            number, job = self._waiting.pop(0)
            environment = dict(os.environ)
            if self.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = _visible(slot % self.gpus)
            with (self.folder / f"{number}.out").open("ab") as out:
                # a session of its own: a Ctrl-C is passed on once, by `cancel`
                process = subprocess.Popen(
                    job.command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            self._running[slot] = (number, process)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command as a child of this process that, on Linux, is killed where this one is."""
    return [sys.executable, "-c", END_WITH_PARENT, str(os.getpid()), *command]


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written: no permission, no space, a quota reached."""
    probe = folder / f"written-{uuid.uuid4().hex}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)


def why(output: Path, code: int | None = None) -> str:
    """Why a job ended, by the last error that it printed, or else its last line."""
    if code is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    lines = _lines(output)
    return error_line(output) or next(reversed(lines), "" if code is None else f"exit code {code}")


def error_line(output: Path) -> str:
    """The last error that a job printed: its own, Python's, the shell's or Slurm's."""
    return next((line for line in reversed(_lines(output)) if ERROR.match(line)), "")


def _lines(output: Path) -> list[str]:
    with suppress(OSError):
        text = output.read_text(encoding="utf-8", errors="replace")
        return [printable(line) for line in text.splitlines() if line.strip()]
    return []


def _visible(index: int) -> str:
    """The name of a GPU of those that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[index] if named else str(index)
