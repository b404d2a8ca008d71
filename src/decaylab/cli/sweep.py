"""Runs by an engine (`reproduce --engine ...`), and `decaylab sweep status | cancel`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer
from rich.table import Table

from decaylab.cli import options
from decaylab.cli.output import console, in_words, print_json
from decaylab.errors import RUNS_LEFT, DecaylabError
from decaylab.records import RunStore
from decaylab.sweeps.engines import JobStatus
from decaylab.sweeps.engines.local import LocalEngine
from decaylab.sweeps.engines.ray import RayEngine
from decaylab.sweeps.engines.slurm import SlurmEngine
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.sweep import (
    Submission,
    Sweep,
    assignments,
    estimates,
    folder_of,
    left_of,
    make_jobs,
    pack,
    read_sweep,
    sweep_name,
    sweeps_in,
    under_way,
    write_sweep,
)

ENGINES = ("local", "slurm", "ray")
SUBMISSIONS = 3  # by one command that stays: the first, and two of what was left

Name = Annotated[str | None, typer.Argument(help="A sweep's name; without it, all.")]

app = typer.Typer(help="Sweeps that an engine works on.", no_args_is_help=True)


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, and how runs are shared out.

    Attributes:
        jobs: how many jobs at least (local: processes at a time).
        job_minutes: how long a job may be, by the estimates.
        sbatch: options of Slurm's sbatch, by name.
        wait: Slurm: stay until all have ended, and submit once more what is left.
    """

    engine: str = "local"
    jobs: int = 1
    job_minutes: float = 60.0
    sbatch: dict[str, str] = field(default_factory=dict)
    wait: bool = False

    @property
    def in_this_process(self) -> bool:
        """Whether no other process is needed."""
        return self.engine == "local" and self.jobs == 1


def engine_options(
    engine: str, jobs: int | None, job_minutes: float, sbatch: Sequence[str], wait: bool, cpu: bool
) -> EngineOptions:
    """The options of a command, checked; local: a process per GPU unless it is said otherwise."""
    if engine not in ENGINES:
        raise DecaylabError(f"unknown engine {engine!r}: choose one of {', '.join(ENGINES)}")
    if (sbatch or wait) and engine != "slurm":
        raise DecaylabError("--sbatch and --wait are for --engine slurm")
    given = {}
    for option in sbatch:
        key, equals, value = option.partition("=")
        if not key or key.startswith("-"):
            raise DecaylabError(f"--sbatch {option!r}: give KEY=VALUE, such as partition=gpu")
        given[key] = value if equals else ""
    if jobs is None:
        jobs = 1 if cpu or engine != "local" else max(1, torch.cuda.device_count())
    return EngineOptions(engine, jobs, job_minutes, given, wait)


def submit(
    planned: Sequence[PlannedRun],
    runs: Path,
    command: Sequence[str],
    how: EngineOptions,
    *,
    gpus: float,
    dry_run: bool,
    stream: TextIO,
) -> None:
    """Let an engine make what is left of some runs; exits with 1 or 75 where something is left."""
    store = RunStore(runs)
    words = [sys.executable, "-m", "decaylab", *command]
    name = sweep_name(command)
    sweep = read_sweep(name, runs) or Sweep(name, list(command))
    folder = folder_of(name, runs)
    statuses: list[JobStatus] = []
    before: list[PlannedRun] | None = None
    for _ in range(SUBMISSIONS):
        left = left_of(planned, store)
        if left == before:  # what failed once more would do so again
            break
        before = left
        busy = under_way(sweep, runs) if how.engine == "slurm" else set()
        todo = [run for run in left if run.spec.id not in busy]
        if not left:
            break
        if todo:
            seconds = estimates(todo, store)
            packs = pack(todo, seconds, jobs=how.jobs, longest=60 * how.job_minutes)
            jobs = make_jobs(packs, words, seconds, gpus=gpus)
            if how.engine == "slurm":
                slurm = SlurmEngine(name, folder, how.sbatch)
                if dry_run:
                    print(slurm.script(jobs), end="")
                    return
            total = in_words(sum(seconds.values()))
            print(
                f"sweep {name}: {len(todo)} runs in {len(jobs)} jobs, about {total} in all; what"
                f" they print is in {folder}",
                file=stream,
                flush=True,
            )
            if dry_run:
                return
            ids = [[run.spec.id for run in runs_of_job] for runs_of_job in packs]
            if how.engine == "slurm":
                handle = slurm.start(jobs)
                sweep.submissions.append(Submission("slurm", handle, ids))
                write_sweep(sweep, runs)
                print(f"submitted as Slurm job {handle}", file=stream, flush=True)
            else:
                sweep.submissions.append(Submission(how.engine, "", ids))
                write_sweep(sweep, runs)
                engine: Any
                if how.engine == "local":
                    visible = torch.cuda.device_count() if gpus else 0
                    engine = LocalEngine(folder, how.jobs, visible)
                else:
                    engine = RayEngine(folder, how.jobs if how.jobs > 1 else None)
                engine.start(jobs)
                statuses = engine.wait()
        elif dry_run:
            print(f"sweep {name}: nothing to submit, {len(left)} runs are under way", file=stream)
            return
        if how.engine == "slurm" and not how.wait:
            print(f"`decaylab sweep status {name} --runs {runs}` shows how it goes", file=stream)
            return
        if how.engine == "slurm":
            while under_way(sweep, runs):
                time.sleep(2.0)
    left = left_of(planned, store)
    print(f"{len(planned) - len(left)} of {len(planned)} runs ended, {len(left)} left", file=stream)
    failed = [status for status in statuses if status.state == "failed"]
    for status in failed if left else ():
        print(f"job {status.number} failed: {status.reason}", file=sys.stderr)
    if left:
        raise typer.Exit(1 if failed else RUNS_LEFT)


@app.command("status")
def status_command(
    name: Name = None, runs: options.Runs = options.RUNS, json_output: options.Json = False
) -> None:
    """Show how far sweeps are, and why runs that no job has were left."""
    entries = [_status(sweep, runs) for sweep in _sweeps(name, runs)]
    if json_output:
        print_json(entries)
        return
    if not entries:
        print(f"no sweeps in {runs}: `decaylab reproduce ... --engine slurm` makes one")
        return
    table = Table(box=None, pad_edge=False)
    columns = ("sweep", "engine", "finished", "diverged", "running", "waiting", "left", "runs")
    for heading in columns:
        table.add_column(heading, no_wrap=heading == "sweep")
    for entry in entries:
        table.add_row(*(str(entry[column]) for column in columns))
    console(160, markup=False).print(table)
    for entry in entries:
        for reason in entry["reasons"]:
            print(f"{entry['sweep']}: {reason}")
        if entry["left"]:
            command = " ".join(entry["command"])
            print(f"{entry['left']} runs have no job: `decaylab {command}` with its --engine again")


@app.command("cancel")
def cancel_command(
    name: Annotated[str, typer.Argument(help="The sweep's name.")],
    runs: options.Runs = options.RUNS,
) -> None:
    """Stop a sweep's jobs; runs under way save a checkpoint, and can be continued."""
    for sweep in _sweeps(name, runs):
        slurm = [part for part in sweep.submissions if part.engine == "slurm"]
        if not slurm:
            raise DecaylabError(
                f"{name} has no Slurm jobs: stop a local or Ray sweep with Ctrl-C where it runs"
            )
        engine = SlurmEngine(sweep.name, folder_of(sweep.name, runs), {})
        for submission in slurm:
            if engine.look(submission.handle):
                engine.cancel(submission.handle)
                print(f"cancelled Slurm job {submission.handle}")


def _sweeps(name: str | None, runs: Path) -> list[Sweep]:
    names = sweeps_in(runs)
    if name is not None and name not in names:
        there = f"there are {', '.join(names)}" if names else "there is none"
        raise DecaylabError(f"no sweep {name!r} in {runs}: {there}")
    found = [read_sweep(one, runs) for one in names if name in (None, one)]
    return [sweep for sweep in found if sweep is not None]


def _status(sweep: Sweep, runs: Path) -> dict[str, Any]:
    """Counts of a sweep's runs, and the reasons why some are left."""
    store = RunStore(runs)
    counts = dict.fromkeys(("finished", "diverged", "running", "waiting", "left"), 0)
    reasons: dict[str, None] = {}
    assigned = assignments(sweep, runs)
    for assignment in assigned:
        folder, job = store.folder(assignment.run), assignment.job
        try:
            manifest = folder.manifest()
            status = manifest.status if manifest else ""
        except DecaylabError as error:
            status = ""
            reasons[str(error)] = None
        if status in ("finished", "diverged"):
            counts[status] += 1
        elif folder.locked():
            counts["running"] += 1
        elif job is not None and job.state in ("waiting", "running"):
            counts["waiting"] += 1
            if job.state == "waiting" and job.reason:
                reasons[f"jobs wait: {job.reason}"] = None
        else:
            counts["left"] += 1
            if job is not None and job.reason:
                reasons[f"job {job.number} {job.reason}"] = None
    engines = dict.fromkeys(submission.engine for submission in sweep.submissions)
    return {
        "sweep": sweep.name,
        "engine": " ".join(engines),
        "runs": len(assigned),
        **counts,
        "reasons": list(reasons),
        "command": sweep.command,
    }
