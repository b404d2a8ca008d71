"""`decaylab reproduce --queue FILE`: the work of a queue, in order, in the time there is."""

import math
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from decaylab.cli.board import follow
from decaylab.cli.output import console, in_words, print_json
from decaylab.cli.search import make_search
from decaylab.paper import Cell
from decaylab.paper.plan import chosen_cells, plan
from decaylab.paper.searches import cell_plan
from decaylab.records import RunStore
from decaylab.sweeps.estimate import Estimator
from decaylab.sweeps.plan import PlannedRun, has_ended
from decaylab.sweeps.queue import ArtefactEntry, CommandEntry, Entry, SearchEntry
from decaylab.sweeps.search import SearchPlan, first_specs
from decaylab.sweeps.worker import Worker, WorkerOptions

State = Literal["done", "to do", "held"]
GRACE = 30.0  # seconds a command has to end after SIGTERM


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


class Queue:
    """The entries of a queue against the records in a folder of runs."""

    def __init__(self, entries: list[Entry], runs: Path) -> None:
        self.entries, self.runs = entries, runs
        self.store, self.searches = RunStore(runs), RunStore(runs / "searched" / "runs")
        for entry in entries:  # what is wrong in any of them is said before the first begins
            if isinstance(entry, ArtefactEntry):
                self._cells(entry)
            elif isinstance(entry, SearchEntry):
                _search_plan(entry)

    def standing(self) -> list[Standing]:
        """Where each entry stands; a run that several want counts as left in the first only."""
        estimators = {store.root: Estimator(store) for store in (self.store, self.searches)}
        counted: set[str] = set()
        found = []
        for entry in self.entries:
            if isinstance(entry, CommandEntry):
                done, runs, lacking, seconds = int(self._is_there(entry)), 1, 0, 60 * entry.minutes
            else:
                store, planned, lacking = self._runs(entry)
                ended = {run.spec.id for run in planned if has_ended(run, store)}
                left = [r.spec for r in planned if r.spec.id not in ended | counted]
                counted |= {spec.id for spec in left}
                done, runs = len(ended), len(planned)
                seconds = estimators[store.root].total(left)
            if isinstance(entry, SearchEntry):
                complete = self._is_there(entry)
            else:
                complete = done == runs and not lacking
            state: State = "done" if complete else "held" if entry.hold else "to do"
            seconds = 0.0 if complete else seconds
            found.append(Standing(entry, state, done, runs, seconds, lacking))
        return found

    def _is_there(self, entry: CommandEntry | SearchEntry) -> bool:
        """Whether there is what an entry ends with: a file, or a winner."""
        if isinstance(entry, CommandEntry):
            return Path(entry.writes).exists()
        return self.is_searched(_search_plan(entry))

    def stages(self) -> Iterator[list[Entry]]:
        """What is worked on together: runs of neighbouring entries share the device."""
        ready = [entry for entry in self.entries if not entry.hold]
        for of_runs, entries in groupby(ready, key=lambda e: isinstance(e, ArtefactEntry)):
            group = list(entries)
            yield from [group] if of_runs else [[entry] for entry in group]

    def planned(self, entries: Sequence[Entry]) -> list[PlannedRun]:
        """The runs of neighbouring entries, each once."""
        runs: dict[str, PlannedRun] = {}
        for entry in entries:
            for run in self._runs(entry)[1]:
                runs.setdefault(run.spec.id, run)
        return list(runs.values())

    def _runs(self, entry: Entry) -> tuple[RunStore, list[PlannedRun], int]:
        if isinstance(entry, SearchEntry):
            specs = first_specs(_search_plan(entry))
            return self.searches, [PlannedRun(s, (), ("search",), entry.tier) for s in specs], 0
        assert isinstance(entry, ArtefactEntry)
        chosen = self._cells(entry)
        everything = chosen_cells("all", entry.tier, entry.seeds, [], self.runs)
        planned = plan(chosen, everything, tier=entry.tier)
        return self.store, planned, sum(bool(cell.missing) for cell in chosen)

    def _cells(self, entry: ArtefactEntry) -> list[Cell]:
        return chosen_cells(entry.reproduce, entry.tier, entry.seeds, entry.only, self.runs)

    def is_searched(self, search: SearchPlan) -> bool:
        """Whether there is a winner, chosen among at least the values of this search."""
        path = self.runs / "searched" / f"{search.name}.toml"
        if not path.exists():
            return False
        recorded = tomllib.loads(path.read_text(encoding="utf-8")).get("search", {})
        return all(
            set(values) <= set(recorded.get(f"{name}_tried", ()))
            for name, values in search.space.items()
        )


def print_queue(queue: Queue, json_output: bool) -> None:
    """What is done and what is left, with an estimate."""
    standing = queue.standing()
    left = sum(s.seconds for s in standing if s.state == "to do")
    if json_output:
        print_json({"entries": [_plain(s) for s in standing], "seconds_left": left})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("entry", "state", "runs", "left"):
        table.add_column(heading)
    for s in standing:
        lacking = f", {s.lacking} to be searched" if s.lacking else ""
        why = f": {s.entry.hold}" if s.state == "held" else ""
        minutes = in_words(s.seconds) if s.seconds else ""
        table.add_row(s.entry.name, s.state + why, f"{s.done} of {s.runs}{lacking}", minutes)
    console(160, markup=False).print(table)
    entries = sum(s.state == "to do" for s in standing)
    print(f"\n{entries} of {len(standing)} entries to do, about {in_words(left)}")


def work_off(queue: Queue, limits: WorkerOptions, stream: Any) -> dict[str, str]:
    """Make what is left, in order; what failed, by run or entry, with the reason.

    Ends early when the time is up; a stage that fails does not keep the next from its turn.
    """
    failed: dict[str, str] = {}
    until = math.inf if limits.seconds is None else time.monotonic() + limits.seconds
    for entries in queue.stages():
        left = until - time.monotonic()
        if left <= 0:
            break
        limited = replace(limits, seconds=None if math.isinf(left) else left)
        first = entries[0]
        if isinstance(first, CommandEntry):
            if reason := _run_command(first, limited, stream):
                failed[first.name] = reason
        elif isinstance(first, SearchEntry):
            search = _search_plan(first)
            if not queue.is_searched(search):
                make_search(search, queue.runs / "searched", limited, stream)
        else:
            worker = Worker(queue.planned(entries), queue.store, limited)
            worker.check_data()
            follow(worker, stream)
            failed |= worker.outcome.failed
    return failed


def _run_command(entry: CommandEntry, limits: WorkerOptions, stream: Any) -> str:
    """Run a command to its end or the end of the time; why it failed, else nothing."""
    if Path(entry.writes).exists():
        return ""
    if limits.whole_runs and limits.seconds is not None and 60 * entry.minutes > limits.seconds:
        return ""
    words = [sys.executable if entry.command[0] == "python" else entry.command[0]]
    print(f"{entry.name}: {' '.join(entry.command)}", file=stream, flush=True)
    try:
        process = subprocess.Popen([*words, *entry.command[1:]])
    except OSError as error:
        return f"{words[0]} cannot be started ({error.strerror})"
    try:
        code = process.wait(limits.seconds)
    except subprocess.TimeoutExpired:
        return ""  # it is begun anew by the next call
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if code:
        return f"it ended with exit code {code}"
    return "" if Path(entry.writes).exists() else f"it ended well but wrote no {entry.writes}"


def _search_plan(entry: SearchEntry) -> SearchPlan:
    given = {"lr": entry.lr, "weight_decay": entry.weight_decay, "damping": entry.damping}
    given["kl_clip"] = entry.kl_clip
    space = {name: values for name, values in given.items() if values}
    return cell_plan(entry.search, entry.scheme, entry.tier, space, method=entry.method)


def _plain(s: Standing) -> dict[str, Any]:
    return vars(s) | {"entry": s.entry.name}
