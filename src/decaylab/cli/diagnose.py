"""`decaylab diagnose`: did weight decay help, and through what."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.terminal import console, print_json
from decaylab.diagnosis import diagnose
from decaylab.diagnosis.card import card
from decaylab.diagnosis.commands import Places
from decaylab.diagnosis.runs import Run, read_run
from decaylab.errors import Conflict, Misplaced, NotFinished
from decaylab.records import RunFolder, RunStore
from decaylab.report.diagnoses import baseline_of, other_seeds
from decaylab.report.page import check_page
from decaylab.sweeps.run_index import IndexedRun, indexed_runs
from decaylab.training import RunSpec

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN", help="Runs with decay: one, or several seeds.")
]
Against = Annotated[
    list[str] | None,
    option("--against", "The same without decay: one, or several seeds.", metavar="BASE..."),
]
Markdown = Annotated[bool, option("--markdown", "Print the result as Markdown.")]
AllSeeds = Annotated[
    bool, option("--all-seeds", "Add RUN's other seeds and its baselines from the same folder.")
]
Alone = Annotated[
    bool, option("--alone", "Judge RUN by itself: look for no run without decay in its folder.")
]
ReportFile = Annotated[
    Path | None,
    option("--report", "Also write a page with figures, as one file.", metavar="FILE.html"),
]


class SeveralAgainst(TyperCommand):
    """Lets `--against` be followed by several runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--against A B` as `--against A --against B`."""
        spread: list[str] = []
        following = False
        for word in args:
            if word == "--against":
                following = True
            elif word.startswith("-"):
                following = False
                spread.append(word)
            else:
                spread += ["--against", word] if following else [word]
        return super().parse_args(ctx, spread)


def found_records(name: str, runs: Path) -> RunFolder | Path:
    """A run, or a folder that `watch` wrote, which may be named within `runs`."""
    path = Path(name) if Path(name).exists() else runs / name
    watched = path.exists() and not (path / "spec.toml").exists()
    return path if watched else options.found_run(name, runs)


def diagnose_command(
    run: Runs,
    against: Against = None,
    all_seeds: AllSeeds = False,
    alone: Alone = False,
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
    markdown: Markdown = False,
    report: ReportFile = None,
) -> None:
    """Say whether weight decay helped, through which mechanism, and what to try next.

    RUN and BASE are runs of `decaylab train` or folders written by watch(folder=...). If you give
    several runs without --against, those without decay serve as baselines; for one run of
    `decaylab train`, the same without decay in its folder, of another seed if need be. The verdict
    is based on the records alone. If something was not recorded, it says what, and which command
    records it.
    """
    if json_output and markdown:
        raise Conflict(["--json", "--markdown"], "a result is printed once")
    if alone and (against or all_seeds or len(run) > 1):
        raise Conflict(["--alone", "other runs"], "a run alone is compared with none")
    if report:
        check_page(report)  # before the work, not after it
    if all_seeds:
        run, against = seeds_beside(run[0], runs)
    if against is None and len(run) == 1 and not alone:
        against = baseline_beside(run[0], runs)
    mine = [read_run(found_records(name, runs)) for name in run]
    others = [read_run(found_records(name, runs)) for name in against or ()]
    if against is None and any(each.decays for each in mine):
        others = [each for each in mine if not each.decays]
        mine = [each for each in mine if each.decays]
    result = diagnose(mine, others)
    result = replace(result, places=with_what_was_left(result.places, [*mine, *others]))
    if report:
        result.report(report)
    if json_output:
        print_json(result.as_dict())
    elif markdown:
        print(result.to_markdown(), end="")
    else:
        console(100).print(card(result))
        if report:
            print(f"report: {report}")


def baseline_beside(name: str, runs: Path) -> list[str]:
    """The finished run beside a finished one that differs in the decay, and at most in the seed."""
    folder = found_records(name, runs)
    if not isinstance(folder, RunFolder) or not folder.is_finished():
        return []
    chosen, known = with_those_beside(folder)
    if chosen is None or chosen.spec.decay == "none":
        return []
    baseline = baseline_of(chosen.spec, known)
    return [] if baseline is None else [str(baseline.folder.path)]


def with_what_was_left(places: Places, given: Sequence[Run]) -> Places:
    """`places` with whether finished runs beside the first belong to it, but were not given."""
    folders = [run.recording.meta.folder for run in given]
    if given[0].spec is None or folders[0] is None:
        return places
    chosen, known = with_those_beside(RunFolder(folders[0]))
    if chosen is None:
        return places
    taken = {folder.resolve() for folder in folders if folder is not None}
    runs, others = ({r.folder.path.resolve() for r in side} for side in other_seeds(chosen, known))
    return replace(places, left_runs=not runs <= taken, left_baselines=not others <= taken)


def seeds_beside(name: str, runs: Path) -> tuple[list[str], list[str]]:
    """The finished runs that differ from this one in nothing but the seed; those without decay."""
    folder = found_records(name, runs)
    if not isinstance(folder, RunFolder):
        remedy = "name all folders: decaylab diagnose SEED SEED --against BASE BASE"
        raise Misplaced(["--all-seeds"], "runs of `decaylab train`", remedy)
    chosen, known = with_those_beside(folder)
    if chosen is None:
        RunSpec.of_run(folder)  # says why, if it cannot be read
        raise NotFinished(name, "train it first; it has not started")
    alike, baselines = other_seeds(chosen, known)
    return [str(run.folder.path) for run in alike], [str(run.folder.path) for run in baselines]


def with_those_beside(folder: RunFolder) -> tuple[IndexedRun | None, list[IndexedRun]]:
    """A run, None if it cannot be read or has not started, and all of its folder that can."""
    known, _ = indexed_runs(RunStore(folder.path.parent))
    return next((run for run in known if run.folder.id == folder.id), None), known
