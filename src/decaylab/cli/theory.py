"""`decaylab theory`: the paper's numbered statements, both sides computed and compared."""

import json

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decaylab.cli import options
from decaylab.theory import STATEMENTS, Check


def theory_command(json_output: options.Json = False) -> None:
    """Check statements T1-T7 of the paper on random nets, and what becomes of broken ones.

    Exits with 0 only if every statement holds, else with 1. Seconds on a CPU.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the nets are tiny: threads would only wait for each other
    try:
        checks = [check for statement in STATEMENTS.values() for check in statement()]
    finally:
        torch.set_num_threads(threads)
    if json_output:
        print(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        console = Console()  # piped, the table must not be folded to 80 columns
        Console(width=None if console.is_terminal else 120).print(_table(checks))
    failed = [c for c in checks if c.kind == "statement" and not c.holds]
    if not json_output:
        stated = sum(c.kind == "statement" for c in checks)
        print(f"{stated - len(failed)} of {stated} statements hold")
    if failed:
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
