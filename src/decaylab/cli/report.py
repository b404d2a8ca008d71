"""`decaylab report`: everything recorded, next to the paper's numbers, as one page."""

import sys
from pathlib import Path
from typing import Annotated

from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.progress import stages
from decaylab.cli.terminal import print_json, say, warn
from decaylab.errors import Lacks, NoFolder
from decaylab.records import RunStore
from decaylab.report.write import Written, write_report

Out = Annotated[
    Path | None, option("--out", "Folder of the report; by default RUNS/report.", metavar="DIR")
]


def report_command(
    runs: options.Runs = options.RUNS, out: Out = None, json_output: options.Json = False
) -> None:
    """Write a report of the runs in a folder: one offline HTML page, Markdown, CSV and figures.

    The report has each table and figure of the paper with the paper's numbers, ours and the
    difference, the claims, the theory, and where every number comes from. Numbers without a run
    are shown as missing.
    """
    options.check_folder(runs)
    out = out or runs / "report"
    if out.exists() and not out.is_dir():
        raise NoFolder(out, "give one for the report's files with --out")
    _check_runs(runs)
    with stages(sys.stderr) as tell:
        written = write_report(runs, out, tell=tell)
    for note in written.left_out:
        warn(f"left out: {note}")
    if json_output:
        print_json(_plain(written))
        return
    for tier, artefacts in written.coverage.items():
        filled = ", ".join(f"{name} {done}/{all_}" for name, (done, all_) in artefacts.items())
        say(f"tier {tier}, cells with runs: {filled}")
    say(f"{written.runs} runs, {len(written.files)} files in {written.page.parent}")
    say(f"report: {written.page}")


def _check_runs(runs: Path) -> None:
    """Refuse a folder without a run: the report would have nothing to show."""
    if not RunStore(runs).runs():
        raise Lacks(runs, "runs", options.instead_of_runs(runs))


def _plain(written: Written) -> dict[str, object]:
    return {
        "page": str(written.page),
        "files": [str(path) for path in written.files],
        "runs": written.runs,
        "coverage": written.coverage,
        "left_out": list(written.left_out),
    }
