"""`decaylab diagnose`: did weight decay help, and through what."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from decaylab.cli import options
from decaylab.cli.output import console, print_json
from decaylab.diagnosis import Diagnosis, Finding, Verdict, diagnose, words
from decaylab.diagnosis.runs import read_run
from decaylab.records import RunFolder
from decaylab.report.diagnoses import write_diagnosis

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs with decay: one, or several seeds.")
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against", metavar="BASE...", help="The same without decay, of one or several seeds."
    ),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the result as Markdown.")]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Also write a page with figures, as one file."
    ),
]
COLOURS = {Verdict.ACTS: "green", Verdict.DOES_NOT_ACT: "dim", Verdict.CANNOT_TELL: "yellow"}


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
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
    markdown: Markdown = False,
    report: ReportFile = None,
) -> None:
    """Did weight decay help, through which of three mechanisms, and what to try next.

    RUN and BASE are runs of decaylab or folders written by watch(folder=...). Without --against,
    those of several runs that have no decay are the baselines. The verdict is made from the
    records alone. If something was not recorded, it says what, and which command records it.
    """
    mine: list[Any] = [found_records(name, runs) for name in run]
    others: list[Any] = [found_records(name, runs) for name in against or ()]
    if against is None and len(mine) > 1:
        decays = [read_run(source).decays for source in mine]
        if any(decays):
            others = [source for source, decay in zip(mine, decays, strict=True) if not decay]
            mine = [source for source, decay in zip(mine, decays, strict=True) if decay]
    result = write_diagnosis(report, mine, others) if report else judged(mine, others)
    if json_output:
        print_json(result.as_dict())
    elif markdown:
        print(result.to_markdown(), end="")
    else:
        console(100).print(card(result))
        if report:
            print(f"report: {report}")


def judged(runs: Sequence[Any], baselines: Sequence[Any]) -> Diagnosis:
    """The diagnosis of one run or several."""
    if len(runs) == 1 and len(baselines) <= 1:
        return diagnose(runs[0], baselines[0] if baselines else None)
    return diagnose(list(runs), list(baselines))


def card(diagnosis: Diagnosis) -> Panel:
    """The result as a card: the answer, what to know first, verdicts, layers, what follows."""
    parts: list[Text | Table] = [Text(words.headline(diagnosis), "bold")]
    parts += [Text(words.first_text(*item), "bold red") for item in diagnosis.first]
    if diagnosis.baselines:  # below the title, which is cut where it is too long
        parts.append(Text(f"against {', '.join(diagnosis.baselines)}", "dim"))
    for finding in diagnosis.findings:
        colour = COLOURS[finding.verdict]
        parts.append(Text.assemble("\n", (words.verdict_title(finding), f"bold {colour}")))
        parts.append(Text(words.finding_text(finding)))
        if finding.effect is not None:
            parts.append(Text(words.records_words(finding), "dim"))
        if finding.remedies:
            parts.append(Text(f"To decide it: {words.remedy_text(finding)}.", "yellow"))
        if any(row.effect for row in finding.layers):
            parts.append(_layers(finding))
    if diagnosis.motions:
        parts.append(Text("\nhow far each layer turns", "bold"))
        parts += [Text(line) for line in words.insight(diagnosis)]
        parts.append(_motions(diagnosis))
        parts.append(Text(words.motion_legend(diagnosis), "dim"))
    parts.append(Text("\nwhat follows", "bold"))
    parts += [Text(f"- {sentence}") for sentence in words.follow_texts(diagnosis)]
    parts += [Text(f"- left out: {k} ({why})") for why, k in words.left_out(diagnosis).items()]
    title = escape(f"weight decay in {', '.join(diagnosis.runs)}")
    return Panel(Group(*parts), title=title, title_align="left")


def _layers(finding: Finding) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "verdict", words.layer_heading(finding)):
        table.add_column(heading, style="dim")
    for row in words.layer_table(finding):
        table.add_row(*map(escape, row))
    return table


def _motions(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(words.MOTION_HEADINGS):
        table.add_column(heading, style="dim", justify="right" if place else "left")
    for row in words.motion_rows(diagnosis):
        table.add_row(*map(escape, row))
    return table
