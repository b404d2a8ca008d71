"""The theory's checks, computed in another process while this one reads and draws."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from decaylab.report.beside import module_beside
from decaylab.report.sections import theory_checks
from decaylab.theory import Check

NAMES = tuple(field.name for field in fields(Check))


@contextmanager
def theory_beside() -> Iterator[Callable[[], list[Check]]]:
    """Begin the checks; what is given waits for them, or computes them where that failed."""
    with module_beside("decaylab", "theory", "--json") as output:
        yield lambda: _read(output()) or theory_checks()


def _read(text: bytes) -> list[Check]:
    """The checks that `decaylab theory --json` prints; none where something is missing in them."""
    try:
        entries = json.loads(text)
        whole = all(entry[name] is not None for entry in entries for name in NAMES)
        return [Check(**entry) for entry in entries] if whole else []
    except (ValueError, TypeError, KeyError):
        return []
