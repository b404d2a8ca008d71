"""A sweep: planned runs divided among the jobs of an engine, and how they ended.

RUNS/sweeps/NAME/sweep.json says which engine has which runs; the runs themselves say the rest.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from decaylab.errors import Damaged, NotWritten
from decaylab.records import RunStore
from decaylab.records.files import replace_text
from decaylab.sweeps.engines import Job, JobStatus
from decaylab.sweeps.engines.local import error_line
from decaylab.sweeps.engines.slurm import SlurmEngine
from decaylab.sweeps.plan import PlannedRun


@dataclass(frozen=True)
class Submission:
    """What was given to an engine at one time: a job's runs, by id.

    `shared`: any of its jobs makes any of the runs.
    """

    engine: str
    handle: str
    jobs: list[list[str]]
    shared: bool = False


@dataclass
class Sweep:
    """All that was submitted for one command; its runs lie in `folder` of the folder of runs."""

    name: str
    command: list[str]
    submissions: list[Submission] = field(default_factory=list)
    folder: str = ""


@dataclass(frozen=True)
class Assignment:
    """A run, with the last job that has or had it."""

    run: str
    engine: str
    job: JobStatus | None


def sweep_name(command: Sequence[str]) -> str:
    """A short name of a command: its words that are names, and a hash of all.

    >>> sweep_name(["reproduce", "table1", "--tier", "full"])
    'reproduce-table1-full-30c6'
    """
    words = [word for word in command if word.isalnum()]
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:4]
    return "-".join([*words[:4], digest])


def folder_of(name: str, runs: Path) -> Path:
    """Where a sweep's file and its jobs' output lie."""
    return runs / "sweeps" / name


def read_sweep(name: str, runs: Path) -> Sweep | None:
    """A sweep by name, None if there is none."""
    path = folder_of(name, runs) / "sweep.json"
    if not path.exists():
        return None
    try:
        entry = json.loads(path.read_bytes())
        submissions = [Submission(**submission) for submission in entry.pop("submissions")]
        return Sweep(**entry, submissions=submissions)
    except (OSError, ValueError, TypeError, KeyError) as error:
        remedy = "delete it; the runs are unharmed, and the same command submits what is left"
        raise Damaged(path, error, remedy) from error


def write_sweep(sweep: Sweep, runs: Path) -> None:
    """Keep a sweep in its folder."""
    folder = folder_of(sweep.name, runs)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "sweep.json", json.dumps(asdict(sweep), indent=1) + "\n")


def sweeps_in(runs: Path) -> list[str]:
    """The names of all sweeps of a folder of runs."""
    return sorted(path.parent.name for path in (runs / "sweeps").glob("*/sweep.json"))


def pack(
    planned: Iterable[PlannedRun], seconds: Mapping[str, float], *, jobs: int, longest: float
) -> list[list[PlannedRun]]:
    """Share out runs: longest first, each to the job with the least so far.

    At least `jobs` jobs where there are so many runs, and as many as keep each under `longest`
    seconds. A run stays with the one whose norms it takes over.
    """
    groups: dict[str, list[PlannedRun]] = {}
    for run in planned:
        groups.setdefault(run.spec.norm_source or run.spec.id, []).append(run)

    def lasts(group: Sequence[PlannedRun]) -> float:
        return sum(seconds[run.spec.id] for run in group)

    ordered = sorted(groups.values(), key=lasts, reverse=True)
    total = sum(map(lasts, ordered))
    count = min(len(ordered), max(jobs, -int(-total // longest)))
    packs: list[list[PlannedRun]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for group in ordered:
        least = loads.index(min(loads))
        packs[least] += group
        loads[least] += lasts(group)
    return packs


def make_jobs(
    packs: Sequence[Sequence[PlannedRun]],
    command: Sequence[str],
    seconds: Mapping[str, float],
    *,
    gpus: float,
    shared: bool = False,
) -> list[Job]:
    """A job for each pack: the command, with the runs that are its own unless they are shared."""
    jobs = []
    for runs in packs:
        ids = [run.spec.id for run in runs]
        own = [word for name in ids for word in ("--run", name)]
        words = ["--engine", "local", "--jobs", "1"] if shared else own
        jobs.append(Job((*command, *words), sum(seconds[name] for name in ids), gpus))
    return jobs


def check_owners(planned: Iterable[PlannedRun], store: RunStore) -> None:
    """Refuse runs that are another user's: a job would train and could not write."""
    for run in planned:
        path = store.folder(run.spec.id).path
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            try:
                owner = path.owner()
            except (KeyError, OSError):
                owner = "another user"
            remedy = "let your group write there (chmod -R g+rwX), or give another --runs folder"
            raise NotWritten(path, f"it belongs to {owner}", remedy)


def assignments(sweep: Sweep, runs: Path) -> list[Assignment]:
    """Each run of a sweep with where its last job stands; None if no engine knows it now."""
    latest: dict[str, Assignment] = {}
    folder = folder_of(sweep.name, runs)
    for submission in sweep.submissions:
        known: dict[int, JobStatus] = {}
        if submission.engine == "slurm":
            engine = SlurmEngine(sweep.name, folder, {})
            known = {status.number: status for status in engine.look(submission.handle)}
        at_work = [status for status in known.values() if status.state in ("waiting", "running")]
        for number, ids in enumerate(submission.jobs):
            job = at_work[0] if submission.shared and at_work else known.get(number)
            if job is None and (error := error_line(folder / f"{number}.out")):
                job = JobStatus(number, "failed", error)
            for run in ids:
                latest[run] = Assignment(run, submission.engine, job)
    return list(latest.values())


def under_way(sweep: Sweep, runs: Path) -> set[str]:
    """The runs that a job of an engine has now, or will have."""
    assigned = assignments(sweep, runs)
    return {a.run for a in assigned if a.job and a.job.state in ("waiting", "running")}
