"""`decaylab theory`: the paper's numbered statements, both sides computed and compared."""

from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Table

from decaylab.cli import options
from decaylab.cli.output import console, print_json
from decaylab.report.sections import theory_checks
from decaylab.theory import Check


def theory_command(json_output: options.Json = False) -> None:
    """Check statements T1-T8 of the paper on random networks, and show what breaks them.

    Computes both sides of each statement. Takes seconds on a CPU; exits with 1 if one does not
    hold.
    """
    checks = theory_checks()
    stated = [check for check in checks if check.kind == "statement"]
    held = sum(check.holds for check in stated)
    if json_output:
        print_json([asdict(check) for check in checks])
    else:
        console(120).print(_table(checks))
        print(f"{held} of {len(stated)} checks of the statements hold")
        print("broken: a condition of the statement was violated on purpose, so it need not hold")
    if held < len(stated):
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("statement, condition")
    for heading in ("left", "right", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    previous = ""
    for check in checks:
        if check.id != previous:
            title = f"{check.id}  {check.where}, tolerance {check.tolerance:g}"
            table.add_row(f"[bold]{title}[/bold]")
        previous = check.id
        sides = (f"{check.left:.4g}", f"{check.right:.4g}", f"{check.error:.1e}")
        table.add_row("  " + escape(check.condition), *sides, _verdict(check))
    return table


def _verdict(check: Check) -> str:
    if check.kind == "broken":
        return "[dim]broken, but holds[/dim]" if check.holds else "[dim]broken[/dim]"
    return "[green]holds[/green]" if check.holds else "[bold red]FAILS[/bold red]"
