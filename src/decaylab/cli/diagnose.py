"""`decaylab diagnose`: which mechanism weight decay acts through in a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from decaylab.cli import options
from decaylab.cli.output import console, print_json
from decaylab.diagnosis import Diagnosis, Finding, diagnose
from decaylab.diagnosis.result import layer_table, records_words
from decaylab.records import RunFolder
from decaylab.report.diagnoses import write_diagnosis

Baseline = Annotated[str | None, typer.Argument(help="The same run without decay.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the result as Markdown.")]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Also write a page with figures, as one file."
    ),
]
COLOURS = {"acts": "green", "does not act": "dim", "cannot tell": "yellow"}


def found_records(name: str, runs: Path) -> RunFolder | Path:
    """A run, or a folder that `watch` wrote."""
    path = Path(name)
    watched = path.exists() and not (path / "spec.toml").exists()
    return path if watched else options.found_run(name, runs)


def diagnose_command(
    run: options.Run,
    baseline: Baseline = None,
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
    markdown: Markdown = False,
    report: ReportFile = None,
) -> None:
    """Find out which of the three mechanisms weight decay acts through in a run.

    RUN and BASELINE are runs of decaylab or folders written by watch(folder=...). The verdict is
    made from the records alone. If something was not recorded, it says what, and which command
    records it.
    """
    other = found_records(baseline, runs) if baseline is not None else None
    mine = found_records(run, runs)
    result = write_diagnosis(report, mine, other) if report else diagnose(mine, other)
    if json_output:
        print_json(result.as_dict())
    elif markdown:
        print(result.to_markdown(), end="")
    else:
        console(110).print(card(result))
        if report:
            print(f"report: {report}")


def card(diagnosis: Diagnosis) -> Panel:
    """The result as a card: what to know first, the verdicts, the layers, what follows."""
    parts: list[Text | Table] = [Text(sentence, "bold red") for sentence in diagnosis.first]
    for finding in diagnosis.findings:
        colour = COLOURS[finding.verdict]
        parts.append(
            Text.assemble(
                "\n", (finding.mechanism, "bold"), ": ", (finding.verdict, f"bold {colour}")
            )
        )
        parts.append(Text(finding.reason))
        if finding.effect is not None:
            parts.append(Text(records_words(finding), "dim"))
        if finding.would_decide:
            parts.append(Text(f"To decide it: {finding.would_decide}.", "yellow"))
        if any(row.effect for row in finding.layers):
            parts.append(_layers(finding))
    parts.append(Text("\nwhat follows", "bold"))
    parts += [Text(f"- {sentence}") for sentence in diagnosis.consequences]
    parts += [Text(f"- left out: {k} ({why})") for why, k in diagnosis.left_out().items()]
    if diagnosis.baseline:  # below the title, which is cut where it is too long
        parts.insert(0, Text(f"against {diagnosis.baseline}", "dim"))
    title = escape(f"weight decay in {diagnosis.run}")
    return Panel(Group(*parts), title=title, title_align="left")


def _layers(finding: Finding) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "verdict", finding.layer_heading):
        table.add_column(heading, style="dim")
    for row in layer_table(finding):
        table.add_row(*map(escape, row))
    return table
