"""What commands print on stdout: tables that stay whole when piped, and results as JSON."""

import json
import math
import sys
from typing import Any

from rich.console import Console

from decaylab.cli.terminal import width_of
from decaylab.report.names import in_words

__all__ = ["console", "in_words", "print_json"]


def console(piped_width: int, *, markup: bool = True) -> Console:
    """Stdout as wide as the terminal; piped, as wide as $COLUMNS says, else as given."""
    width = None if sys.stdout.isatty() else min(piped_width, width_of(sys.stdout))
    return Console(width=width, highlight=False, markup=markup)


def print_json(result: Any) -> None:
    """Print a result as JSON, which has no nan and no inf: they are null."""
    print(json.dumps(_finite(result), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
