"""`decaylab reproduce --queue FILE`: work through a queue, in order, in the time available."""

import hashlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TextIO

from decaylab.cli.board import follow
from decaylab.cli.search import make_search
from decaylab.cli.terminal import print_json, say, show
from decaylab.data import find
from decaylab.errors import DecaylabError
from decaylab.paper import Cell
from decaylab.paper.finished_runs import REPEATS, FinishedRuns
from decaylab.paper.further_seeds import with_doubt
from decaylab.paper.plan import chosen_cells, plan
from decaylab.paper.searches import cell_plan
from decaylab.paper.superseded import is_listed, superseded
from decaylab.records import RunStore
from decaylab.records.files import disk_errors
from decaylab.records.ownership import Ownership
from decaylab.sweeps.engines.local import ending_with_parent
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.plan import PlannedRun, has_ended
from decaylab.sweeps.queue import ArtefactEntry, CommandEntry, Entry, QueueFile, SearchEntry
from decaylab.sweeps.search import SEARCHED, SearchPlan, made_and_left, read_winner
from decaylab.sweeps.worker import SOON, Worker, WorkerOptions
from decaylab.text_table import Column, TextTable, in_words
from decaylab.training import RunSpec
from decaylab.training.signals import requests

State = Literal["done", "to do", "held"]
GRACE = 30.0  # seconds a command has to end after SIGTERM
PROGRAMS = {"python": [sys.executable], "decaylab": [sys.executable, "-m", "decaylab"]}


@dataclass(frozen=True)
class Standing:
    """Where an entry stands: of its runs (a command is one), how many are done, and what is left.

    `lacking`: cells that have no run yet, since their settings must be searched first.
    """

    entry: Entry
    state: State
    done: int
    runs: int
    seconds: float
    lacking: int = 0


@dataclass(frozen=True)
class Work:
    """The runs of an entry, the store that they are made in, and those that are done.

    `lacking`: cells without a run, since their settings must be searched first.
    """

    store: RunStore
    planned: list[PlannedRun]
    done: frozenset[str]
    lacking: int = 0

    @property
    def left(self) -> list[PlannedRun]:
        """What is still to be made."""
        return [run for run in self.planned if run.spec.id not in self.done]


class Allowance:
    """Shares of a call's time, by estimate: no run is cut short for them.

    An artefact has one run at least, or a call shorter than that would never begin it.
    `refused`: names of the entries that would have had more runs.
    """

    def __init__(self, shares: Mapping[str, float], seconds: float, estimator: Estimator) -> None:
        self._most = {artefact: share * seconds for artefact, share in shares.items()}
        self._granted: dict[str, float] = {}
        self._estimator = estimator
        self._refused_runs: set[str] = set()
        self.refused: set[str] = set()

    def grants(self, entry: ArtefactEntry, spec: RunSpec) -> bool:
        """Whether a run is within the share, and the one whose norms it takes over was."""
        artefact = entry.reproduce
        if artefact not in self._most:
            return True
        seconds = self._granted.get(artefact, 0.0) + self._estimator.of(spec).seconds
        too_much = artefact in self._granted and seconds > self._most[artefact]
        if too_much or spec.norm_source in self._refused_runs:
            self._refused_runs.add(spec.id)
            self.refused.add(entry.name)
            return False
        self._granted[artefact] = seconds
        return True


class Queue:
    """The entries of a queue against the records in a folder of runs."""

    def __init__(self, file: QueueFile, runs: Path) -> None:
        self.entries, self.shares, self.runs = file.entries, file.shares, runs
        self.store, self.searches = RunStore(runs), RunStore(runs / "searched" / "runs")
        self.remade, self.repeats = RunStore(runs / "remade"), RunStore(runs / REPEATS)
        for entry in self.entries:  # what is wrong in any of them is said before the first begins
            if isinstance(entry, ArtefactEntry):
                self._cells(entry)
            elif isinstance(entry, SearchEntry):
                _search_plan(entry)

    def standing(self) -> list[Standing]:
        """Where each entry stands; a run that several want counts as left in the first only."""
        of_runs, of_searches = Estimator(self.store), Estimator(self.searches)
        counted: set[str] = set()
        standings = []
        for entry in self.entries:
            if isinstance(entry, CommandEntry):
                complete = Path(entry.writes).exists()
                done, runs, lacking, seconds = int(complete), 1, 0, 60 * entry.minutes
            else:
                work = self._work(entry)
                again = isinstance(entry, ArtefactEntry) and entry.again
                left = [r.spec for r in work.left if again or r.spec.id not in counted]
                counted |= {spec.id for spec in left}
                runs, lacking = len(work.planned), work.lacking
                done = runs - len(work.left)
                seconds = (of_searches if work.store is self.searches else of_runs).total(left)
                complete = done == runs and not lacking
                if isinstance(entry, SearchEntry):
                    complete = self.is_searched(_search_plan(entry))
            state: State = "done" if complete else "held" if entry.hold else "to do"
            seconds = 0.0 if complete else seconds
            standings.append(Standing(entry, state, done, runs, seconds, lacking))
        return standings

    def allowance(self, limits: WorkerOptions) -> Allowance | None:
        """The shares of this process's part of the device, where there are any."""
        if limits.seconds is None or not self.shares:
            return None
        return Allowance(self.shares, limits.seconds / limits.processes, Estimator(self.store))

    def planned(
        self,
        entries: Sequence[ArtefactEntry],
        allowance: Allowance | None = None,
        without: Collection[str] = (),
    ) -> list[PlannedRun]:
        """The runs of neighbouring entries that share the device, each once.

        `without`: data sets whose runs are left out, and take no part of a share.
        """
        runs: dict[str, PlannedRun] = {}
        for entry in entries:
            work = self._work(entry)
            for run in work.left if entry.again else work.planned:
                name = run.spec.id
                if (
                    name not in runs
                    and run.spec.data not in without
                    and (
                        allowance is None or name in work.done or allowance.grants(entry, run.spec)
                    )
                ):
                    runs[name] = run
        return list(runs.values())

    def _work(self, entry: Entry) -> Work:
        if isinstance(entry, SearchEntry):
            search = _search_plan(entry)
            made, left = made_and_left(search, self.runs / "searched")
            planned = [PlannedRun(s, (), ("search",), entry.tier) for s in (*made, *left)]
            return Work(self.searches, planned, frozenset(spec.id for spec in made))
        assert isinstance(entry, ArtefactEntry)
        if entry.again:
            return self.remaking(entry)
        chosen, planned = self._plan(entry)
        lacking = sum(bool(cell.missing) for cell in chosen)
        return Work(self.store, planned, _ended(planned, self.store), lacking)

    def remaking(self, entry: ArtefactEntry) -> Work:
        """The finished runs of an entry that are to be made again, and where."""
        chosen, planned = self._plan(entry)
        if entry.again == "superseded":
            planned = [run for run in planned if is_listed(run.spec.id)]
            manifests = {run.spec.id: self.store.folder(run.spec.id).manifest() for run in planned}
            done = {name for name, m in manifests.items() if m is not None and not superseded(m)}
            return Work(self.remade, planned, frozenset(done))
        runs, again = FinishedRuns(self.store), FinishedRuns(self.repeats)
        wanted = {spec.id: cell.probes for cell in chosen for spec in cell.runs}

        def lacking(spec: RunSpec, finished_runs: FinishedRuns) -> list[str] | None:
            """What a run lacks of what the artefact wants; None without a run."""
            run = finished_runs.of(spec)
            return None if run is None else run.lacking(wanted.get(spec.id, ()))

        lacks = [run for run in planned if lacking(run.spec, runs)]
        done = {run.spec.id for run in lacks if lacking(run.spec, again) == []}
        return Work(self.repeats, lacks, frozenset(done))

    def take_over(self, work: Work) -> None:
        """Put runs that were made again in the place of those with superseded numerics."""
        for run in work.planned:
            name = run.spec.id
            if work.store is not self.remade or not self.remade.folder(name).is_finished():
                continue
            old = self.store.root / name
            if old.exists():
                replaced = self.runs / "superseded"
                replaced.mkdir(exist_ok=True)
                old.rename(replaced / name)
            (self.remade.root / name).rename(old)

    def _plan(self, entry: ArtefactEntry) -> tuple[list[Cell], list[PlannedRun]]:
        chosen = self._cells(entry)
        everything = chosen_cells("all", entry.tier, entry.seeds, [], self.runs)
        return chosen, plan(chosen, everything, tier=entry.tier)

    def _cells(self, entry: ArtefactEntry) -> list[Cell]:
        chosen = chosen_cells(entry.reproduce, entry.tier, entry.seeds, entry.only, self.runs)
        if not entry.doubtful:
            return chosen
        return with_doubt(chosen, FinishedRuns(self.store), entry.tier)

    def is_searched(self, search: SearchPlan) -> bool:
        """Whether there is a winner of at least the values of this search, or of TPE's runs."""
        winner = read_winner(self.runs / "searched" / f"{search.name}.toml", search)
        if winner is not None and search.method == "tpe":
            return winner.trials >= search.trials
        return winner is not None and all(
            set(values) <= set(winner.tried.get(name, ())) for name, values in search.space.items()
        )


def print_queue(standing: Sequence[Standing], json_output: bool) -> None:
    """What is done and what is left, with an estimate."""
    left = sum(s.seconds for s in standing if s.state == "to do")
    if json_output:
        entries = [vars(s) | {"entry": s.entry.name} for s in standing]
        print_json({"entries": entries, "seconds_left": left})
        return
    columns = (Column("entry", words=True), Column("state", words=True), Column("runs", words=True))
    table = TextTable([*columns, Column("left", number=True)])
    for s in standing:
        lacking = f", {s.lacking} to be searched" if s.lacking else ""
        why = f": {s.entry.hold}" if s.state == "held" else ""
        minutes = in_words(s.seconds) if s.seconds else ""
        table.add(s.entry.name, s.state + why, f"{s.done} of {s.runs}{lacking}", minutes)
    show(table)
    to_do = sum(s.state == "to do" for s in standing)
    say(f"\n{to_do} of {len(standing)} entries to do, about {in_words(left)}")


def work_off(queue: Queue, limits: WorkerOptions, stream: Any) -> dict[str, str]:
    """Make what is left, in order; what failed, by run or entry, with the reason.

    Ends early when the time is up; a stage that fails does not keep the next from its turn. A
    signal is heeded between runs, too, while the next ones are planned.
    """
    failed: dict[str, str] = {}
    left = limits.running_out()
    allowance = queue.allowance(limits)
    entries = [entry for entry in queue.entries if not entry.hold]
    with requests.listening():
        while entries:
            for stage in stages(entries):
                requests.check()
                if left().seconds == SOON:
                    return failed
                try:
                    failed |= _work_on(queue, stage, left(), allowance, stream)
                except DecaylabError as error:
                    failed[stage[0].name] = str(error)
            # time is left and no other work: a share is no longer in anybody's way
            entries = [e for e in entries if allowance is not None and e.name in allowance.refused]
            allowance = None
    return failed


def stages(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """What is worked on together: runs of neighbouring entries share the device."""
    for company, group in groupby(entries, key=_company):
        stage = list(group)
        yield from [[entry] for entry in stage] if company is None else [stage]


def _work_on(
    queue: Queue,
    entries: Sequence[Entry],
    limits: WorkerOptions,
    allowance: Allowance | None,
    stream: Any,
) -> dict[str, str]:
    """Make what is left of a stage; what failed, with the reason."""
    first = entries[0]
    if isinstance(first, SearchEntry):
        search = _search_plan(first)
        if not queue.is_searched(search):
            make_search(search, queue.runs / "searched", limits, stream)
        return {}
    if _company(first) is not None:
        return _make_runs(queue, entries, limits, allowance, stream)
    with _alone(first, queue.runs) as mine:
        if not mine:
            return {}
        if isinstance(first, CommandEntry):
            reason = _run_command(first, limits, stream)
            return {first.name: reason} if reason else {}
        return _make_runs(queue, entries, limits, allowance, stream)


@contextmanager
def _alone(entry: Entry, runs: Path) -> Iterator[bool]:
    """Whether no other process works on this entry; none begins to before this ends."""
    digest = hashlib.sha256(entry.name.encode()).hexdigest()[:12]
    path = runs / "sweeps" / f"queue-{digest}.json"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    ownership = Ownership(path)
    mine = ownership.take() is None
    try:
        yield mine
    finally:
        ownership.release()


def _make_runs(
    queue: Queue,
    entries: Sequence[Entry],
    limits: WorkerOptions,
    allowance: Allowance | None,
    stream: Any,
) -> dict[str, str]:
    """Make the runs of some entries that share the device, or of one that has its own rules."""
    artefacts = [entry for entry in entries if isinstance(entry, ArtefactEntry)]
    first = artefacts[0]
    if first.alone:
        limits = replace(limits, at_once=1, compiled=False)
    elif first.at_once:
        limits = replace(limits, at_once=min(limits.at_once, first.at_once))
    work = queue.remaking(first) if first.again else None
    store = queue.store if work is None else work.store
    wanted = {run.spec.data for run in queue.planned(artefacts) if not has_ended(run, store)}
    if first.alone and limits.processes > 1 and wanted:
        why = "it needs the device to itself: run the queue without --processes"
        say(f"{first.name} waits: {why}", stream=stream)
        return {}
    missing = _missing_data(wanted, limits.data_dir)
    planned = queue.planned(artefacts, allowance, without=missing)
    requests.check()
    worker = Worker(planned, store, limits)
    worker.check_data()
    try:
        follow(worker, stream)
    finally:  # also when the time is up: what is finished counts
        if work is not None:
            queue.take_over(work)
    return missing | worker.outcome.failed


def _missing_data(needed: Collection[str], data_dir: Path | None) -> dict[str, str]:
    """Data sets that this machine lacks, or has a part of: their runs wait for another."""
    remedy = "is not on this machine: give the folder that holds it by --data-dir or DECAYLAB_DATA"
    missing = {}
    for name in sorted(set(needed) - {"digits"}):
        try:
            if find(name, data_dir) is None:
                missing[name] = f"{name} {remedy}"
        except DecaylabError as error:
            missing[name] = str(error)
    return missing


def _company(entry: Entry) -> int | None:
    """With how many others a run may share the device (0: as many as may be); None with none."""
    if not isinstance(entry, ArtefactEntry) or entry.alone or entry.again:
        return None
    return entry.at_once


def _ended(planned: Sequence[PlannedRun], store: RunStore) -> frozenset[str]:
    return frozenset(run.spec.id for run in planned if has_ended(run, store))


def _run_command(entry: CommandEntry, limits: WorkerOptions, stream: Any) -> str:
    """Run a command to its end or the end of the time; why it failed, else nothing."""
    if Path(entry.writes).exists():
        return ""
    if limits.whole_runs and limits.seconds is not None and 60 * entry.minutes > limits.seconds:
        return ""
    if missing := _missing_data(entry.needs, limits.data_dir):
        return "; ".join(missing.values())
    program = PROGRAMS.get(entry.command[0], [entry.command[0]])
    say(f"{entry.name}: {' '.join(entry.command)}", stream=stream)
    printed = Path(f"{entry.writes}.part")
    with ExitStack() as opened:
        output = None
        if entry.prints:
            with disk_errors(printed):
                printed.parent.mkdir(parents=True, exist_ok=True)
                output = opened.enter_context(printed.open("w", encoding="utf-8"))
        if shutil.which(program[0]) is None:
            return f"there is no program {program[0]} that can be started"
        code = _exit_code([*program, *entry.command[1:]], limits, output)
    if code is None:
        return ""  # out of time: the next call starts it again
    if code:
        return f"it ended with exit code {code}"
    if entry.prints:
        printed.replace(entry.writes)
    return "" if Path(entry.writes).exists() else f"it ended well but wrote no {entry.writes}"


def _exit_code(words: list[str], limits: WorkerOptions, output: TextIO | None) -> int | None:
    """Run a command; None where the time was up. It never outlives this process's wait for it."""
    until = math.inf if limits.seconds is None else time.monotonic() + limits.seconds
    environment = dict(os.environ)
    if limits.data_dir is not None:
        environment["DECAYLAB_DATA"] = str(limits.data_dir)
    with requests.listening():
        process = subprocess.Popen(ending_with_parent(words), stdout=output, env=environment)
        try:
            while process.poll() is None and time.monotonic() < until:
                requests.check()
                time.sleep(0.05)
            return process.poll()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _search_plan(entry: SearchEntry) -> SearchPlan:
    space = {name: values for name in SEARCHED if (values := getattr(entry, name))}
    return cell_plan(entry.search, entry.scheme, entry.tier, space, method=entry.method)
