"""Another process that works alongside this one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import decaylab


@contextmanager
def module_beside(*arguments: str, text: bytes = b"") -> Iterator[Callable[[], bytes]]:
    """Begin `python -m ARGUMENTS` with a text as its input; what is given waits for its output.

    With one core there is no other process; then, and where it fails, the output is empty.
    """
    if (os.cpu_count() or 1) < 2:
        yield lambda: b""
        return
    package_root = str(Path(decaylab.__file__).parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with TemporaryFile() as stdin:  # unlike a pipe, it need not be read before this goes on
        stdin.write(text)
        stdin.seek(0)
        with subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        ) as process:
            try:
                yield lambda: process.communicate()[0]
            finally:
                process.kill()
