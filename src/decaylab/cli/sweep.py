"""Runs by an engine (`reproduce --engine ...`), and `decaylab sweep status | cancel`."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TextIO

import torch
import typer

from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.terminal import print_json, say, show, warn
from decaylab.errors import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    RUNS_LEFT,
    BadValue,
    DecaylabError,
    Lacks,
    Misplaced,
    check_name,
)
from decaylab.records import RunStore
from decaylab.sweeps.engines import Engine, JobStatus
from decaylab.sweeps.engines.local import LocalEngine
from decaylab.sweeps.engines.ray import RayEngine
from decaylab.sweeps.engines.slurm import SlurmEngine
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.plan import PlannedRun, has_ended
from decaylab.sweeps.sweep import (
    Submission,
    Sweep,
    assignments,
    check_owners,
    folder_of,
    make_jobs,
    pack,
    read_sweep,
    sweep_name,
    sweeps_in,
    under_way,
    write_sweep,
)
from decaylab.text_table import Column, TextTable, in_words
from decaylab.training.world import launched

ENGINES = ("local", "slurm", "ray")
SUBMISSIONS = 3  # by one command that stays: the first, and two of what was left

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="A sweep's name; by default all.")]

app = typer.Typer(help="Show or cancel the sweeps of an engine.", no_args_is_help=True)


@dataclass(frozen=True)
class EngineOptions:
    """Which engine trains the runs, and how they are divided."""

    panel: ClassVar[str] = "Engine"
    engine: Annotated[str, option("--engine", "Where to train: local, slurm or ray.")] = "local"
    jobs: Annotated[
        int | None,
        option(
            "--jobs",
            "Processes at a time (local: one per GPU), or fewest jobs.",
            allowed=AT_LEAST_ONE,
        ),
    ] = None
    job_minutes: Annotated[
        float, option("--job-minutes", "Longest estimated time of a job.", allowed=POSITIVE)
    ] = 60.0
    gpus: Annotated[
        float | None,
        option(
            "--gpus", "GPUs per job; for Ray also a fraction, such as 0.5.", allowed=NOT_NEGATIVE
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None, option("--sbatch", "An option of Slurm's sbatch.", metavar="KEY=VALUE")
    ] = None
    wait: Annotated[
        bool, option("--wait", "Slurm: keep running, and submit what is left once more.")
    ] = False
    dry_run: Annotated[
        bool, option("--dry-run", "Only print the plan, or the script, and how long it takes.")
    ] = False

    def __post_init__(self) -> None:
        check_name("engine", self.engine, ENGINES)
        if (self.sbatch or self.wait) and self.engine != "slurm":
            raise Misplaced(["--sbatch", "--wait"], "--engine slurm")
        if self.gpus is not None and self.engine == "local":
            remedy = "leave it out, because --jobs gives each process here its own GPU"
            raise Misplaced(["--gpus"], "--engine slurm or ray", remedy)
        if self.engine == "slurm" and self.gpus is not None and self.gpus % 1:
            raise BadValue("--gpus", self.gpus, "a whole number under --engine slurm")
        _ = self.sbatch_options

    @property
    def sbatch_options(self) -> dict[str, str]:
        """Options of Slurm's sbatch, by name."""
        by_name = {}
        for setting in self.sbatch or ():
            key, equals, value = setting.partition("=")
            if not key or key.startswith("-"):
                raise BadValue("--sbatch", setting, "KEY=VALUE, such as partition=gpu")
            by_name[key] = value if equals else ""
        return by_name

    @property
    def leaves(self) -> bool:
        """Whether the command ends before the runs do."""
        return self.dry_run or (self.engine == "slurm" and not self.wait)

    def count(self, training: options.TrainingOptions) -> int:
        """Jobs at least; local: a process per GPU unless it is said otherwise."""
        if self.jobs is not None:
            return self.jobs
        if self.engine != "local" or training.device == "cpu":
            return 1
        return max(1, torch.cuda.device_count())

    def in_this_process(self, training: options.TrainingOptions) -> bool:
        """Whether no other process is needed: not beside those that torchrun has started."""
        if launched():
            return True
        if self.engine == "local" and self.count(training) == 1:
            return True
        if training.max_minutes is not None or training.whole_runs:
            raise Misplaced(["--max-minutes", "--whole-runs"], "one process", "give --jobs 1")
        return False


@dataclass(frozen=True)
class Work:
    """Runs that an engine is to make, and the command that makes them.

    Attributes:
        command: words of `decaylab`, which makes all of them.
        planned: the runs, as far as they are known before.
        folder: of the store that holds them, in the folder of runs.
        shared: whether every job is the whole command, and each takes what the others have not
            begun (a search, whose runs follow from each other); else a job has runs of its own.
        left: gives what is left by now, where that is not what has not ended of `planned`.
    """

    command: Sequence[str]
    planned: Sequence[PlannedRun]
    folder: str = ""
    shared: bool = False
    left: Callable[[], Sequence[PlannedRun]] | None = None

    def left_in(self, store: RunStore) -> Sequence[PlannedRun]:
        """The runs that are left."""
        if self.left is not None:
            return self.left()
        return [run for run in self.planned if not has_ended(run, store)]


def submit(
    work: Work,
    training: options.TrainingOptions,
    how: EngineOptions,
    *,
    digits: bool,
    stream: TextIO,
) -> None:
    """Let an engine make what is left of some runs; exits with 1 or 75 where something is left.

    A job needs a GPU unless another device is asked for; by default, digits do without.
    """
    gpus = not digits if training.device in (None, "auto") else training.device != "cpu"
    runs = training.runs
    store = RunStore(runs / work.folder)
    command = [*work.command, *training.words()]
    name = sweep_name(command)
    sweep = read_sweep(name, runs) or Sweep(name, command, folder=work.folder)
    engine = _engine(name, folder_of(name, runs), training, how, gpus)
    statuses: list[JobStatus] = []
    before: Sequence[PlannedRun] | None = None
    for _ in range(SUBMISSIONS):
        # jobs first: one that ends between the two looks leaves its runs finished
        busy = under_way(sweep, runs) if how.engine == "slurm" else set()
        left = work.left_in(store)
        if left == before:  # what failed once more would do so again
            break
        before = left
        todo = [run for run in left if run.spec.id not in busy]
        if busy and work.left is not None:  # whatever a search comes to, its jobs make
            todo = []
        if not left:
            break
        if todo:
            estimator = Estimator(store)
            seconds = {run.spec.id: estimator.of(run.spec).seconds for run in todo}
            packs = pack(todo, seconds, jobs=how.count(training), longest=60 * how.job_minutes)
            words = [sys.executable, "-m", "decaylab", *command]
            gpus_per_job = float(gpus) if how.gpus is None else how.gpus
            jobs = make_jobs(packs, words, seconds, gpus=gpus_per_job, shared=work.shared)
            if how.dry_run and isinstance(engine, SlurmEngine):
                print(engine.script(jobs), end="")
                return
            total = in_words(sum(seconds.values()))
            say(
                f"sweep {name}: {len(todo)} runs in {len(jobs)} jobs, about {total} in all; what"
                f" they print is in {folder_of(name, runs)}",
                stream=stream,
            )
            if how.dry_run:
                return
            check_owners(todo, store)
            engine.check(jobs)
            ids = [[run.spec.id for run in runs_of_job] for runs_of_job in packs]
            handle = engine.start(jobs)
            sweep.submissions.append(Submission(how.engine, handle, ids, shared=work.shared))
            write_sweep(sweep, runs)
            if how.engine == "slurm":
                say(f"submitted as Slurm job {handle}", stream=stream)
            else:
                statuses = engine.wait()
        elif how.dry_run:
            say(f"sweep {name}: nothing to submit, {len(left)} runs are under way", stream=stream)
            return
        if how.engine == "slurm" and not how.wait:
            say(f"`decaylab sweep status {name} --runs {runs}` shows its progress", stream=stream)
            return
        while how.engine == "slurm" and under_way(sweep, runs):
            time.sleep(2.0)
    left = work.left_in(store)
    count = len(work.planned)
    say(f"{count - len(left)} of {count} runs ended, {len(left)} left", stream=stream)
    if how.engine == "slurm" and left:
        jobs_by_run = {a.run: a.job for a in assignments(sweep, runs) if a.job is not None}
        statuses = [jobs_by_run[run.spec.id] for run in left if run.spec.id in jobs_by_run]
    failed = dict.fromkeys(status for status in statuses if status.state == "failed")
    for status in failed if left else ():
        warn(f"job {status.number} failed: {status.reason}")
    if left:
        raise typer.Exit(1 if failed else RUNS_LEFT)


def _engine(
    name: str, folder: Path, training: options.TrainingOptions, how: EngineOptions, gpus: bool
) -> Engine:
    if how.engine == "slurm":
        return SlurmEngine(name, folder, how.sbatch_options)
    if how.engine == "ray":
        count = how.count(training)
        return RayEngine(folder, count if count > 1 else None)
    return LocalEngine(folder, how.count(training), torch.cuda.device_count() if gpus else 0)


@app.command("status")
def status_command(
    name: Name = None, runs: options.Runs = options.RUNS, json_output: options.Json = False
) -> None:
    """Show how far sweeps are, and why runs without a job were left."""
    entries = [_status(sweep, runs) for sweep in _sweeps(name, runs)]
    if json_output:
        print_json(entries)
        return
    if not entries:
        say(f"no sweeps in {runs}: `decaylab reproduce ... --engine slurm` makes one")
        return
    counts = ("finished", "diverged", "running", "waiting", "left", "runs")
    numbers = [Column(heading, number=True) for heading in counts]
    table = TextTable([Column("sweep"), Column("engine", drop=1), *numbers])
    for entry in entries:
        table.add(*(str(entry[column]) for column in ("sweep", "engine", *counts)))
    show(table)
    for entry in entries:
        for reason in entry["reasons"]:
            say(f"{entry['sweep']}: {reason}")
        if entry["left"]:
            command = " ".join(entry["command"])
            say(f"{entry['left']} runs have no job: `decaylab {command}` with its --engine again")


@app.command("cancel")
def cancel_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The sweep's name.")],
    runs: options.Runs = options.RUNS,
) -> None:
    """Stop a sweep's jobs; running ones save a checkpoint and can be resumed."""
    for sweep in _sweeps(name, runs):
        slurm = [part for part in sweep.submissions if part.engine == "slurm"]
        if not slurm:
            remedy = "stop a local or Ray sweep with Ctrl-C where it runs"
            raise Lacks(name, "Slurm jobs", remedy)
        engine = SlurmEngine(sweep.name, folder_of(sweep.name, runs), {})
        for submission in slurm:
            if engine.look(submission.handle):
                engine.cancel(submission.handle)
                say(f"cancelled Slurm job {submission.handle}")


def _sweeps(name: str | None, runs: Path) -> list[Sweep]:
    options.check_folder(runs)
    names = sweeps_in(runs)
    if name is not None:
        check_name("sweep", name, names)
    chosen = [read_sweep(known, runs) for known in names if name in (None, known)]
    return [sweep for sweep in chosen if sweep is not None]


def _status(sweep: Sweep, runs: Path) -> dict[str, Any]:
    """Counts of a sweep's runs, and the reasons why some are left."""
    store = RunStore(runs / sweep.folder)
    counts = dict.fromkeys(("finished", "diverged", "running", "waiting", "left"), 0)
    reasons: list[str] = []
    assigned = assignments(sweep, runs)
    for assignment in assigned:
        folder, job = store.folder(assignment.run), assignment.job
        status = ""
        try:
            manifest = folder.manifest()
            status = manifest.status if manifest else ""
        except DecaylabError as error:
            reasons.append(str(error))
        if status not in ("finished", "diverged"):
            status = "running" if folder.locked() else "left"
        if status == "left" and job is not None:
            if job.state in ("waiting", "running"):
                status = "waiting"
            if job.reason and job.state != "running":
                told = "jobs wait:" if job.state == "waiting" else f"job {job.number}"
                reasons.append(f"{told} {job.reason}")
        counts[status] += 1
    engines = dict.fromkeys(submission.engine for submission in sweep.submissions)
    return {
        "sweep": sweep.name,
        "engine": " ".join(engines),
        "runs": len(assigned),
        **counts,
        "reasons": list(dict.fromkeys(reasons)),
        "command": sweep.command,
    }
