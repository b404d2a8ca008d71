"""Stdout and stderr: sentences wrap at words, tables fit the width, results can be JSON.

Piped output is not wrapped, unless $COLUMNS says how wide it should be.
"""

import os
import sys
from typing import Any, TextIO

from rich.console import Console

from decaylab.records.files import json_text
from decaylab.text_table import TextTable, wrapped

UNLIMITED = 10_000


def width_of(stream: TextIO) -> int:
    """How many columns a stream has."""
    if stream.isatty():
        return Console(file=stream).width
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else UNLIMITED


def say(*sentences: str, stream: TextIO | None = None, indent: str = "") -> None:
    """Print sentences, each on lines of its own that break between words."""
    stream = stream or sys.stdout
    width = max(width_of(stream) - len(indent), 20)
    for sentence in sentences:
        for line in wrapped(sentence, width):
            print(f"{indent}{line}" if line else "", file=stream)
    stream.flush()


def warn(*sentences: str) -> None:
    """The same on stderr."""
    say(*sentences, stream=sys.stderr)


def show(table: TextTable) -> None:
    """Print a table as wide as stdout is, with its styles on a terminal."""
    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(table)
    else:
        print(table.text(width_of(sys.stdout)), flush=True)


def console(piped_width: int, *, markup: bool = True) -> Console:
    """Stdout as wide as the terminal; piped, as wide as $COLUMNS says, else as given."""
    width = None if sys.stdout.isatty() else min(piped_width, width_of(sys.stdout))
    return Console(width=width, highlight=False, markup=markup)


def print_json(result: Any) -> None:
    """Print a result as JSON, which has no nan and no inf: they are null."""
    print(json_text(result, indent=2))
