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
from decaylab.diagnosis.runs import read_run
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
    """A run, or a folder that `watch` wrote."""
    path = Path(name)
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
    `decaylab train`, the run in its folder that differs in nothing but the decay. The verdict is
    based on the records alone. If something was not recorded, it says what, and which command
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
    mine: list[Any] = [found_records(name, runs) for name in run]
    others: list[Any] = [found_records(name, runs) for name in against or ()]
    if against is None and len(mine) == 1 and not alone:
        others = baseline_beside(mine[0])
    elif against is None:
        decays = [read_run(source).decays for source in mine]
        if any(decays):
            others = [source for source, decay in zip(mine, decays, strict=True) if not decay]
            mine = [source for source, decay in zip(mine, decays, strict=True) if decay]
    result = diagnose(mine, others)
    result = replace(result, places=with_what_was_left(result.places, mine[0], [*mine, *others]))
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


def baseline_beside(folder: RunFolder | Path) -> list[Path]:
    """The finished run of the same folder that differs from a finished one in the decay alone."""
    if not isinstance(folder, RunFolder) or not folder.is_finished():
        return []
    spec = RunSpec.of_run(folder)
    if spec.decay == "none":
        return []
    baseline = baseline_of(spec.resolved(), indexed_runs(RunStore(folder.path.parent))[0])
    return [] if baseline is None else [baseline.folder.path]


def with_what_was_left(places: Places, folder: Any, given: Sequence[Any]) -> Places:
    """`places` with whether finished runs beside `folder` belong to it, but were not given."""
    if not isinstance(folder, RunFolder):
        return places
    taken = {getattr(source, "path", source).resolve() for source in given}
    alike, baselines = _seeds_beside(folder)
    runs, others = ({run.folder.path.resolve() for run in side} for side in (alike, baselines))
    return replace(places, left_runs=not runs <= taken, left_baselines=not others <= taken)


def seeds_beside(name: str, runs: Path) -> tuple[list[str], list[str]]:
    """The finished runs that differ from this one in nothing but the seed; those without decay."""
    folder = found_records(name, runs)
    if not isinstance(folder, RunFolder):
        remedy = "name all folders: decaylab diagnose SEED SEED --against BASE BASE"
        raise Misplaced(["--all-seeds"], "runs of `decaylab train`", remedy)
    alike, baselines = _seeds_beside(folder)
    if not alike:
        raise NotFinished(name, "train it first; it has not started")
    return [str(run.folder.path) for run in alike], [str(run.folder.path) for run in baselines]


def _seeds_beside(folder: RunFolder) -> tuple[list[IndexedRun], list[IndexedRun]]:
    """Runs as `other_seeds` has them; none if the run has not started."""
    known, _ = indexed_runs(RunStore(folder.path.parent))
    indexed_run = next((run for run in known if run.folder.id == folder.id), None)
    return ([], []) if indexed_run is None else other_seeds(indexed_run, known)
