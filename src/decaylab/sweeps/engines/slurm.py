"""Jobs as one Slurm job array. Needs `sbatch`, and run folders that the nodes see too.

Before its time limit a task is told (SIGUSR1): the run under way saves a checkpoint, and the task
is queued again by its own script. A task that fails is not: the same `decaylab` command, given
again, submits what it left.
"""

import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from decaylab.errors import (
    RUNS_LEFT,
    BadValue,
    DecaylabError,
    Failed,
    Lacks,
    UnknownName,
    check_name,
)
from decaylab.records.files import replace_text
from decaylab.sweeps.engines import Job, JobState, JobStatus
from decaylab.sweeps.engines.local import check_folder, why

ANSWERS_WITHIN = 60
UNREACHABLE = ("Unable to contact slurm controller", "Could not establish a configuration source")
WARNED = 120  # seconds before the time limit
STOPPED = 128 + 10  # exit code of a command that SIGUSR1 stopped
# Any other state of Slurm (SIGNALING, COMPLETING, ...) belongs to a job that is still under way.
STATES: dict[str, JobState] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"), "waiting"),
    **dict.fromkeys(("RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED"), "waiting"),
    "COMPLETED": "ended",
    **dict.fromkeys(("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "LAUNCH_FAILED"), "failed"),
    **dict.fromkeys(("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"), "failed"),
}

TEMPLATE = """\
#!/bin/bash
{options}
cd {workdir} || exit 1
case $SLURM_ARRAY_TASK_ID in
{tasks}
esac
"$@" &
worker=$!
trap 'kill -USR1 $worker 2>/dev/null' USR1
trap 'kill -TERM $worker 2>/dev/null' TERM
while true; do  # a trap ends a wait before the worker has ended
  wait $worker; code=$?
  kill -0 $worker 2>/dev/null || break
done
if [ $code = {stopped} ] || [ $code = {left} ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit $code
"""


class SlurmEngine:
    """One array of tasks; what they print goes to `folder`/N.out.

    `sbatch` are options of sbatch by name (partition, account, time, ...): they come before ours.
    """

    def __init__(self, name: str, folder: Path, sbatch: Mapping[str, str]) -> None:
        self.name, self.folder, self.sbatch = name, folder, dict(sbatch)

    def script(self, jobs: Sequence[Job]) -> str:
        """The batch script."""
        needs = jobs[0]
        minutes = max(2, round(1.5 * max(job.seconds for job in jobs) / 60 + 5))
        options = {
            "job-name": self.name,
            "array": f"0-{len(jobs) - 1}",
            "output": f"{self.folder.resolve()}/%a.out",
            "open-mode": "append",
            "requeue": "",
            "signal": f"B:USR1@{WARNED}",
            "time": str(minutes),
            "cpus-per-task": str(needs.cpus),
        }
        asks_for_gpus = any(key.startswith(("gpus", "gres")) for key in self.sbatch)
        if needs.gpus and not asks_for_gpus:
            options["gpus-per-task"] = f"{needs.gpus:g}"
            options["ntasks"] = "1"
        lines = [
            f"#SBATCH --{key}" + (f"={value}" if value else "")
            for key, value in (options | self.sbatch).items()
        ]
        tasks = [f"{n}) set -- {shlex.join(job.command)} ;;" for n, job in enumerate(jobs)]
        return TEMPLATE.format(
            options="\n".join(lines),
            workdir=shlex.quote(str(Path.cwd())),
            tasks="\n".join(tasks),
            stopped=STOPPED,
            left=RUNS_LEFT,
        )

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what no node of this Slurm can do, by its own list of partitions and GPUs."""
        answer = _slurm("sinfo", "-h", "-o", "%R|%G|%n")
        nodes = [line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2]
        partition = self.sbatch.get("partition", "") or self.sbatch.get("p", "")
        partitions = sorted({name for name, _, _ in nodes})
        for name in filter(None, partition.split(",")):
            check_name("partition in --sbatch", name, partitions)
        eligible = [n for n in nodes if not partition or n[0] in partition.split(",")]
        self._check_gpus(jobs, [resources for _, resources, _ in eligible])
        check_folder(self.folder)
        hosts = {host for _, _, host in eligible}
        if hosts - {socket.gethostname().split(".")[0]} and _in_memory(self.folder):
            remedy = "it is in this machine's memory"
            raise BadValue("--runs", str(self.folder), "a folder that the nodes share", remedy)

    def _check_gpus(self, jobs: Sequence[Job], resources: Sequence[str]) -> None:
        kinds = {
            part.split("(")[0].split(":")[1]
            for text in resources
            for part in text.split(",")
            if part.startswith("gpu:")
        }
        for key, value in self.sbatch.items():
            if key.startswith("gpus") or (key == "gres" and value.startswith("gpu")):
                words = [w for w in value.replace("=", ":").split(":") if w != "gpu"]
                kind = words[0] if words and not words[0].isdecimal() else ""
                if kind and kind not in kinds:
                    offered = sorted(k for k in kinds if not k.isdecimal())
                    raise UnknownName(f"GPU type in --sbatch {key}={value}", kind, offered)
        requested = any(key.startswith(("gpus", "gres")) for key in self.sbatch)
        if any(job.gpus for job in jobs) and not requested and not kinds:
            remedy = (
                "these runs are for one; give --device cpu, or what your cluster calls its GPUs"
                " with --sbatch gres=NAME"
            )
            raise Lacks("Slurm's list of nodes", "GPU", remedy)

    def start(self, jobs: Sequence[Job]) -> str:
        """Submit the array; returns its job id. What sbatch refuses is an error before that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "array.sh"
        replace_text(path, self.script(jobs))
        answer = _slurm("sbatch", "--parsable", str(path))
        return answer.strip().split(";")[0]

    def look(self, handle: str) -> list[JobStatus]:
        """Where the tasks stand that Slurm still knows; it forgets those that ended, in minutes."""
        try:
            answer = _slurm("squeue", "-h", "-r", "-t", "all", "-j", handle, "-o", "%K|%T|%N|%r")
        except DecaylabError as error:
            if "Invalid job id" in str(error):  # all of them ended long ago
                return []
            raise
        statuses = []
        for line in answer.splitlines():
            number, state, node, reason = line.split("|", 3)
            if not number.isdecimal():
                continue
            known = STATES.get(state, "running")
            if known == "failed":
                reason = f"{state.lower()}: {self._why(self.folder / f'{number}.out', node)}"
            statuses.append(JobStatus(int(number), known, "" if reason == "None" else reason))
        return statuses

    def _why(self, output: Path, node: str) -> str:
        """The last thing a failed task printed; where nothing came, what that means."""
        if reason := why(output):
            return reason
        return (
            f"it printed nothing, so {node or 'its node'} may not see {self.folder}: give a --runs"
            " folder that all nodes share"
        )

    def wait(self) -> list[JobStatus]:
        """Jobs of Slurm outlive the command that submits them: nothing to wait for."""
        return []

    def cancel(self, handle: str) -> None:
        """Cancel the tasks; one that runs gets SIGTERM, so that its run saves a checkpoint."""
        # those that wait come first, else they would begin in the places of the others
        for selected in (["--state=PENDING"], ["--state=RUNNING", "--batch", "--signal=TERM"]):
            try:
                _slurm("scancel", *selected, handle)
            except DecaylabError as error:
                if "already completing or completed" not in str(error):
                    raise


def _in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system that exists in memory only (Linux)."""
    with suppress(OSError):
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        above = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
        return max(above, key=lambda m: len(m[1]))[2] in ("tmpfs", "ramfs") if above else False
    return False


def _slurm(*words: str) -> str:
    """What a command of Slurm prints; its refusal as one sentence."""
    if shutil.which(words[0]) is None:
        remedy = "use --engine slurm on one that submits Slurm jobs, or --engine local"
        raise Lacks("this machine", words[0], remedy)
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=ANSWERS_WITHIN
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer in {ANSWERS_WITHIN} s"
        remedy = "is slurmctld running? Try `scontrol ping`, or use --engine local"
        raise Failed(f"Slurm's {words[0]}", reason, remedy) from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line]
        why = lines[-1].removeprefix(f"{words[0]}: ").removeprefix("error: ") if lines else "?"
        if any(words in done.stderr for words in UNREACHABLE):
            remedy = "try `scontrol ping`, wait until it is back, or use --engine local"
            raise Failed("reaching slurmctld", why, remedy)
        remedy = "check the options given by --sbatch, and that `sinfo` shows the partition"
        raise Failed(f"Slurm's {words[0]}", why, remedy)
    return done.stdout
