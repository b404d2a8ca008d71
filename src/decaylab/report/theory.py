"""The theory's checks, computed in another process while this one reads and draws."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import decaylab
from decaylab.report.sections import theory_checks
from decaylab.theory import Check

NAMES = tuple(field.name for field in fields(Check))


@contextmanager
def theory_beside() -> Iterator[Callable[[], list[Check]]]:
    """Begin the checks; what is given waits for them.

    With one core, or where the other process fails, they are computed by that call.
    """
    if (os.cpu_count() or 1) < 2:
        yield theory_checks
        return
    package_root = str(Path(decaylab.__file__).parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", "decaylab", "theory", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        try:
            yield lambda: _read(process.communicate()[0]) or theory_checks()
        finally:
            process.kill()


def _read(text: bytes) -> list[Check]:
    """The checks that `decaylab theory --json` prints; none where something is missing in them."""
    try:
        entries = json.loads(text)
        whole = all(entry[name] is not None for entry in entries for name in NAMES)
        return [Check(**entry) for entry in entries] if whole else []
    except (ValueError, TypeError, KeyError):
        return []
