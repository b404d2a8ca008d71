"""What commands print on stdout: tables that stay whole when piped, and results as JSON."""

import json
import math
import sys
from typing import Any

from rich.console import Console


def console(piped_width: int, *, markup: bool = True) -> Console:
    """Stdout as wide as the terminal; piped, a table must not be folded to 80 columns."""
    width = None if sys.stdout.isatty() else piped_width
    return Console(width=width, highlight=False, markup=markup)


def print_json(result: Any) -> None:
    """Print a result as JSON, which has no nan and no inf: they are null."""
    print(json.dumps(_finite(result), indent=2, allow_nan=False))


def in_words(seconds: float) -> str:
    """A duration for people.

    >>> in_words(42.4), in_words(200), in_words(9000)
    ('42 s', '3.3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
