"""Processes of a sweep: found by the run they train, and stopped in the middle of it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def stop_a_run(store, taken=()):
    """The id and process of a run under way that has a checkpoint, stopped there; or None.

    It stays stopped until somebody ends or continues it. `taken`: runs to leave alone.
    """
    for folder in store.runs():
        if folder.id in taken or not folder.checkpoint.exists():  # without one, it would begin anew
            continue
        pid = process_of(store.root, folder.id)
        if pid is None or not stop(pid):
            continue
        if folder.locked() and not folder.is_finished() and folder.checkpoint.exists():
            return folder.id, pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return None


def process_of(runs, run_id):
    """The process whose command makes a run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            parts = path.read_bytes().split(b"\0")
            ours = {run_id.encode(), str(runs).encode()} <= set(parts)
            if ours and parts[0].endswith(b"python"):
                return int(path.parent.name)
    return None


def stop(pid):
    """Stop a process; False if it ended before."""
    while True:
        try:
            os.kill(pid, signal.SIGSTOP)
            state, _ = state_and_parent(pid)
        except OSError:
            return False
        if state in "TZX":
            return state == "T"
        time.sleep(0.005)


def state_and_parent(pid):
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return state, int(parent)
