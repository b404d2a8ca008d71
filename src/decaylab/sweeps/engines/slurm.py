"""Jobs as one Slurm job array. Needs `sbatch`, and run folders that the nodes see too.

Before its time limit a task is told (SIGUSR1): the run under way saves a checkpoint, and the task
is queued again by its own script. A task that fails is not: the same `decaylab` command, given
again, submits what it left.
"""

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from decaylab.errors import RUNS_LEFT, DecaylabError
from decaylab.sweeps.engines import Job, JobState, JobStatus
from decaylab.sweeps.engines.local import last_line

WARNED = 120  # seconds before the time limit
STOPPED = 128 + 10  # exit code of a command that SIGUSR1 stopped
STATES: dict[str, JobState] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "RUNNING": "running",
    "CONFIGURING": "running",
    "COMPLETING": "running",
    "COMPLETED": "ended",
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

    def start(self, jobs: Sequence[Job]) -> str:
        """Submit the array; returns its job id. What sbatch refuses is an error before that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "array.sh"
        path.write_text(self.script(jobs), encoding="utf-8")
        answer = _slurm("sbatch", "--parsable", str(path))
        return answer.strip().split(";")[0]

    def look(self, handle: str) -> list[JobStatus]:
        """Where the tasks stand that Slurm still knows; it forgets those that ended, in minutes."""
        try:
            answer = _slurm("squeue", "-h", "-r", "-t", "all", "-j", handle, "-o", "%K|%T|%r")
        except DecaylabError as error:
            if "Invalid job id" in str(error):  # all of them ended long ago
                return []
            raise
        found = []
        for line in answer.splitlines():
            number, state, reason = line.split("|", 2)
            if not number.isdecimal():
                continue
            known = STATES.get(state, "failed")
            if known == "failed":
                reason = f"{state.lower()}: {last_line(self.folder / f'{number}.out')}"
            found.append(JobStatus(int(number), known, "" if reason == "None" else reason))
        return found

    def cancel(self, handle: str) -> None:
        """Cancel the tasks; one that runs gets SIGTERM, so that its run saves a checkpoint."""
        for status in self.look(handle):
            task = f"{handle}_{status.number}"
            if status.state == "waiting":
                _slurm("scancel", task)
            elif status.state == "running":
                _slurm("scancel", "--batch", "--signal=TERM", task)


def _slurm(*words: str) -> str:
    """What a command of Slurm prints; its refusal as one sentence."""
    if shutil.which(words[0]) is None:
        raise DecaylabError(
            f"there is no {words[0]} here: use --engine slurm on a machine that submits Slurm jobs,"
            " or --engine local"
        )
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line]
        why = lines[0].removeprefix(f"{words[0]}: ").removeprefix("error: ") if lines else "?"
        raise DecaylabError(
            f"Slurm's {words[0]} refuses ({why}): check the options given by --sbatch, and that"
            " `sinfo` shows the partition"
        )
    return done.stdout
