"""What commands print on stdout: tables that stay whole when piped, and results as JSON."""

import json
import sys
from typing import Any

from rich.console import Console

from decaylab.cli.terminal import width_of
from decaylab.records.files import without_nan
from decaylab.text_table import in_words

__all__ = ["console", "in_words", "print_json"]


def console(piped_width: int, *, markup: bool = True) -> Console:
    """Stdout as wide as the terminal; piped, as wide as $COLUMNS says, else as given."""
    width = None if sys.stdout.isatty() else min(piped_width, width_of(sys.stdout))
    return Console(width=width, highlight=False, markup=markup)


def print_json(result: Any) -> None:
    """Print a result as JSON, which has no nan and no inf: they are null."""
    print(json.dumps(without_nan(result), indent=2, allow_nan=False))
