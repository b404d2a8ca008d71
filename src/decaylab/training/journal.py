"""What a training run writes: its manifest, rows and checkpoints, in the folder of its spec."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import decaylab
from decaylab.errors import Damaged, DecaylabError, Lacks
from decaylab.records import Manifest, RunFolder, RunStore, Start, Status, TestHits
from decaylab.training import checkpoint
from decaylab.training.execution import Execution
from decaylab.training.run import TrainingRun
from decaylab.training.spec import RunSpec


class Journal:
    """Writes one run; made by `open_journal`, which holds the run's lock."""

    def __init__(self, folder: RunFolder, spec: RunSpec, *, device: str, how: Execution) -> None:
        self.folder = folder
        self.previous = folder.manifest()
        self._device, self._fell_back = device, False
        now = time.time()
        self._manifest = Manifest(
            id=spec.id,
            status="running",
            version=decaylab.__version__,
            commit=code_commit(),
            torch=torch.__version__,
            device=device,
            seed=spec.seed,
            tier=how.tier,
            started=now,
            updated=now,
            at_once=how.at_once,
            compiled=how.compiled,
        )
        if self.previous is not None and folder.has_checkpoint():  # else it begins anew
            devices = dict.fromkeys([*self.previous.device.split(" + "), device])
            self._manifest = replace(
                self._manifest,
                started=self.previous.started,
                device=" + ".join(devices),
                resumes=self.previous.resumes + 1,
                at_once=max(self.previous.at_once, how.at_once),
                compiled=self.previous.compiled or how.compiled,
            )
        self._last_save = time.monotonic()
        self._writer = checkpoint.Writer(folder.checkpoint, folder.check_ownership)
        self.ended = False

    def last_state(self) -> dict[str, Any] | None:
        """What the last checkpoint holds, or the one before if that is damaged; None: no such."""
        path = self.folder.checkpoint
        if not self.folder.has_checkpoint():
            return None
        try:
            return checkpoint.load(path)
        except Damaged:
            path = self.folder.previous_checkpoint
            if not path.exists():
                raise
            self._fell_back = self.folder.checkpoint.exists()
            return checkpoint.load(path)

    def check_rows(self, run: TrainingRun) -> None:
        """Refuse to go on without the rows of an epoch before the checkpoint.

        They were on disk before it was, but a copy of a folder that is being written may have an
        older file of them.
        """
        path = self.folder.checkpoint
        epochs = {row.epoch for row in self.folder.rows().rows}
        lost = [epoch for epoch in range(run.epoch + 1) if epoch not in epochs]
        if lost:
            remedy = (
                f"put the whole file back, or delete the checkpoint {path}, which is past it, and"
                " run the same command again to train from the start"
            )
            raise Lacks(self.folder.rows_writer.path, f"rows of epoch {lost[0]}", remedy)

    def begin(self, run: TrainingRun, *, continued: bool) -> None:
        """Declare the run running, from where it is or from the start; later rows are void."""
        now = self._manifest
        start = Start(
            time=time.time(),
            version=now.version,
            commit=now.commit,
            torch=now.torch,
            device=self._device,
            step=run.step if continued else 0,
            fallback=self._fell_back,
        )
        before = self.previous.starts if continued and self.previous is not None else ()
        self._manifest = replace(now, starts=(*before, start))
        self.folder.write_manifest(self._manifest)
        run.watched.write_to(self.folder.rows_writer)
        # rows stand at the ends of epochs, where the steps of the running one will be counted
        run.watched.resume(run.epoch * run.steps_per_epoch if continued else -1)

    def values(self, step: int) -> dict[str, float]:
        """What was recorded after `step` steps."""
        return {row.name: row.value for row in self.folder.rows().rows if row.step == step}

    def due(self, every: float) -> bool:
        """Whether the last checkpoint is at least `every` seconds old."""
        return time.monotonic() - self._last_save >= every

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; it is on disk when `settle` or `end` returns, or the next begins.

        An error of the one before is raised here.
        """
        self._writer.save(state)
        self._last_save = time.monotonic()

    def settle(self) -> None:
        """Wait until the checkpoint is on disk; raises what went wrong with it."""
        self._writer.wait()

    def end(
        self,
        status: Status,
        message: str = "",
        hits: TestHits | None = None,
        *,
        keep_checkpoint: bool = True,
    ) -> None:
        """Say how the run ended; where even that cannot be written, it reads as interrupted."""
        self.ended = True
        ended = replace(self._manifest, status=status, message=message, test_hits=hits)
        if status == "finished":
            self.settle()
            if not keep_checkpoint:  # an earlier one: what reads a finished run must not find it,
                with suppress(FileNotFoundError):  # but without this manifest, the run needs it
                    self.folder.checkpoint.replace(self.folder.previous_checkpoint)
            self.folder.write_manifest(ended)
            self.folder.previous_checkpoint.unlink(missing_ok=True)
        else:
            with suppress(DecaylabError):
                self.folder.write_manifest(ended)


@contextmanager
def open_journal(
    store: RunStore, spec: RunSpec, *, device: str, how: Execution
) -> Iterator[Journal]:
    """The journal of a spec's run, locked while inside."""
    with store.folder(spec.id).writing(spec.to_toml()) as folder:
        journal = Journal(folder, spec, device=device, how=how)
        try:
            yield journal
        finally:  # nothing is written behind the lock; the run has ended with an error of its own
            with suppress(Exception):
                journal.settle()


def code_commit() -> str | None:
    """The git commit of this code where it runs from a checkout, with `+` if files were changed.

    A copy (on a cluster node, in a container), whose .git folder is missing or of another day, is
    told by $DECAYLAB_COMMIT.
    """
    if commit := os.environ.get("DECAYLAB_COMMIT"):
        return commit
    with suppress(OSError, subprocess.SubprocessError):
        return _checked_out()
    return None


@cache
def _checked_out() -> str | None:
    """Looked up once: commits made while a process runs do not change the code it has loaded."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    return head + ("+" if _git(root, "status", "--porcelain", "-uno") else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    )
    return done.stdout.strip()
