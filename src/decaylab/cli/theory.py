"""`decaylab theory`: the paper's numbered statements, both sides computed and compared."""

from dataclasses import asdict

import typer

from decaylab.cli import options
from decaylab.cli.terminal import print_json, say, show
from decaylab.text_table import Column, Styled, TextTable
from decaylab.theory import Check, all_checks


def theory_command(json_output: options.Json = False) -> None:
    """Check statements T1-T8 of the paper on random networks, and show what breaks them.

    Computes both sides of each statement. Takes seconds on a CPU; exits with 1 if one does not
    hold.
    """
    checks = all_checks()
    stated = [check for check in checks if check.kind == "statement"]
    held = sum(check.holds for check in stated)
    if json_output:
        print_json([asdict(check) for check in checks])
    else:
        show(_table(checks))
        say(
            f"{held} of {len(stated)} checks of the statements hold.",
            "broken: a condition of the statement was violated on purpose, so it need not hold",
        )
    if held < len(stated):
        raise typer.Exit(1)


def _table(checks: list[Check]) -> TextTable:
    numbers = [Column(heading, number=True) for heading in ("left", "right", "error")]
    table = TextTable([Column("statement, condition", words=True), *numbers, Column("")])
    previous = ""
    for check in checks:
        if check.id != previous:
            title = f"{check.id}  {check.where}, tolerance {check.tolerance:g}"
            table.add(Styled(title, "bold"))
        previous = check.id
        sides = (f"{check.left:.4g}", f"{check.right:.4g}", f"{check.error:.1e}")
        table.add("  " + check.condition, *sides, _verdict(check))
    return table


def _verdict(check: Check) -> Styled:
    if check.kind == "broken":
        return Styled("broken, but holds" if check.holds else "broken", "dim")
    return Styled("holds", "green") if check.holds else Styled("FAILS", "bold red")
