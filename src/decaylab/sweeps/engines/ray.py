"""Jobs as tasks of Ray Core, on a running cluster ($RAY_ADDRESS) or a local one (extra `ray`).

A task that is lost with its worker or node is started again by Ray; the run goes on from its
checkpoint, which lies in the run folder: all nodes must see it.
"""

import os
import socket
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decaylab.errors import Failed, Lacks, Range, needed
from decaylab.sweeps.engines import Job, JobStatus
from decaylab.sweeps.engines.local import check_folder, ending_with_parent, why
from decaylab.training.signals import requests

RETRIES = 3
CONNECTS_WITHIN, ANSWERS_WITHIN = 20.0, 300.0  # seconds


class RayEngine:
    """Tasks with GPUs, or parts of one; what they print goes to `folder`/N.out."""

    def __init__(self, folder: Path, cpus: int | None = None) -> None:
        self.folder = folder.resolve()
        self._ray = needed("ray", "ray", "--engine ray")
        self._tasks: dict[Any, int] = {}
        self._ended: list[JobStatus] = []
        self._cpus = cpus

    def check(self, jobs: Sequence[Job]) -> None:
        """Connect; refuse GPUs that nobody has, and a folder that a node does not see."""
        ray = self._ray
        check_folder(self.folder)
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "")
            local = {} if address else {"address": "local", "num_cpus": self._cpus}
            try:
                _check_answers(address)
                ray.init(log_to_driver=False, include_dashboard=False, **local)
            except (RuntimeError, OSError) as error:
                remedy = (
                    "check $RAY_ADDRESS, and that the cluster has the Ray"
                    f" ({ray.__version__}), Python and ~/.ray/auth_token of this machine"
                )
                raise Failed("reaching Ray", _why(error), remedy) from error
        self._check_gpus(jobs)
        self._check_folder()

    def start(self, jobs: Sequence[Job]) -> str:
        """Start all of them, on the cluster that `check` found."""
        if not self._ray.is_initialized():
            self.check(jobs)
        self._ended = []
        work = self._ray.remote(_work)
        for number, job in enumerate(jobs):
            options = {"num_cpus": job.cpus, "num_gpus": job.gpus, "max_retries": RETRIES}
            words = job.command, str(Path.cwd()), str(self.folder / f"{number}.out")
            self._tasks[work.options(**options).remote(*words)] = number
        return "ray"

    def look(self, timeout: float = 0.0) -> list[JobStatus]:
        """Where all tasks stand."""
        if self._tasks:
            ready, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=timeout)
            for task in ready:
                number = self._tasks.pop(task)
                try:
                    code, reason = self._ray.get(task), ""
                except self._ray.exceptions.RayError as error:
                    code, reason = 1, str(error).splitlines()[0]
                if code and not reason:
                    reason = why(self.folder / f"{number}.out", code)
                self._ended.append(JobStatus(number, "failed" if code else "ended", reason))
        running = [JobStatus(number, "running") for number in self._tasks.values()]
        return sorted([*self._ended, *running], key=lambda status: status.number)

    def wait(self, poll: float = 0.5) -> list[JobStatus]:
        """Until all have ended, or a signal stops them."""
        with requests.listening():
            try:
                while self._tasks:
                    self.look(timeout=poll)
                    requests.check()
                return self.look()
            except BaseException:
                self.cancel()
                raise

    def cancel(self) -> None:
        """Stop the tasks: a run under way goes on from its last checkpoint later."""
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._tasks = {}

    def _check_folder(self) -> None:
        """Refuse a folder that a node does not see: its runs would be lost there."""
        token = self.folder / f"seen-{uuid.uuid4().hex}"
        token.touch()
        try:
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            answers = []
            for node in self._ray.nodes():
                if node["Alive"]:
                    on_node = affinity(node["NodeID"], soft=False)
                    sees = self._ray.remote(_sees).options(num_cpus=0, scheduling_strategy=on_node)
                    answers.append((node["NodeManagerHostname"], sees.remote(str(token))))
            for host, answer in answers:
                try:
                    seen = self._ray.get(answer, timeout=ANSWERS_WITHIN)
                except self._ray.exceptions.RayError as error:
                    remedy = "wait until it answers, or take it out of the cluster"
                    raise Failed(f"reaching node {host} of Ray", _why(error), remedy) from error
                if not seen:
                    remedy = (
                        "give a --runs folder that all nodes share, or run decaylab on the nodes"
                        " and copy the run folders"
                    )
                    raise Lacks(f"node {host}", f"folder {self.folder}", remedy)
        finally:
            token.unlink()

    def _check_gpus(self, jobs: Sequence[Job]) -> None:
        in_cluster = self._ray.cluster_resources().get("GPU", 0)
        most = max(job.gpus for job in jobs)
        remedy = "the Ray cluster has no more; add a node, or give --device cpu"
        Range(at_most=in_cluster).check("the number of GPUs of a job", most, remedy)


def _check_answers(address: str) -> None:
    """Raise an OSError where nobody listens; Ray itself would try for minutes.

    "auto" is the cluster that `ray start` was last called for, also one that has ended since.
    """
    last = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if address == "auto" and last.exists():
        address = last.read_text(encoding="utf-8").strip()
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CONNECTS_WITHIN).close()


def _why(error: Exception) -> str:
    """What is wrong, in one line: of a mismatch, all versions."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _work(command: Sequence[str], workdir: str, out: str) -> int:
    """In a worker of Ray: a command to its end, which comes with the worker's at the latest."""
    with Path(out).open("ab") as file:
        return subprocess.run(
            ending_with_parent(command),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=workdir,
            check=False,
        ).returncode


def _sees(path: str) -> bool:
    return Path(path).exists()
