"""`decaylab report`: everything recorded, beside the paper's numbers, as one page."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from decaylab.cli import options
from decaylab.cli.output import print_json
from decaylab.errors import DecaylabError
from decaylab.report.blocks import refresh
from decaylab.report.write import Written, write_report

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder of the report; without it, RUNS/report."),
]
Pages = Annotated[
    list[Path] | None,
    typer.Option(
        "--page",
        metavar="FILE",
        help="Instead, update the blocks `<!-- results: NAME -->` of this Markdown file.",
    ),
]
REMEDY = "make runs with `decaylab demo`, or give their folder with --runs"
WATCHED = "there are records of `watch`: `decaylab diagnose FOLDER --report FILE.html` shows them"


def report_command(
    runs: options.Runs = options.RUNS,
    out: Out = None,
    page: Pages = None,
    json_output: options.Json = False,
) -> None:
    """Write a report of the runs in a folder: one offline HTML page, Markdown, CSV and figures.

    The report has each table and figure of the paper with the paper's numbers, ours and the
    difference, the claims, the theory, and where every number comes from. Numbers without a run
    are shown as missing.
    """
    if not runs.exists():  # misspelt, it would be made, or empty the pages
        raise DecaylabError(f"there is no folder {runs}: {REMEDY}")
    if not runs.is_dir():
        raise DecaylabError(f"{runs} is no folder: {REMEDY}")
    if page:
        _refresh(page, runs, json_output)
        return
    out = out or runs / "report"
    if out.exists() and not out.is_dir():
        raise DecaylabError(f"{out} is no folder: give one for the report's files with --out")
    written = write_report(runs, out)
    for note in written.left_out:
        print(f"left out: {note}", file=sys.stderr)
    if not written.runs:
        rows = runs.glob("*/rows.json*")
        watched = any(not path.with_name("spec.toml").exists() for path in rows)
        print(f"no runs in {runs}: {WATCHED if watched else REMEDY}", file=sys.stderr)
    if json_output:
        print_json(_plain(written))
        return
    for tier, artefacts in written.coverage.items():
        filled = ", ".join(f"{name} {done}/{all_}" for name, (done, all_) in artefacts.items())
        print(f"tier {tier}, cells with runs: {filled}")
    print(f"{written.runs} runs, {len(written.files)} files in {written.page.parent}")
    print(f"report: {written.page}")


def _refresh(pages: list[Path], runs: Path, json_output: bool) -> None:
    changed = refresh(pages, runs)
    if json_output:
        print_json([str(page) for page in changed])
    else:
        print(f"{len(changed)} changed")


def _plain(written: Written) -> dict[str, object]:
    return {
        "page": str(written.page),
        "files": [str(path) for path in written.files],
        "runs": written.runs,
        "coverage": written.coverage,
        "left_out": list(written.left_out),
    }
