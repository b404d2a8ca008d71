"""Writing files so that a kill, a crash or a full disk leaves the previous content whole.

And what reading one that is not whole can raise, with what to do about it.
"""

import errno
import json
import math
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from decaylab.errors import NotWritten

MALFORMED: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError, IndexError)
MALFORMED += (AttributeError, OverflowError, RecursionError)
"""What comes of a text that is no JSON or TOML, or holds other values than were written."""
UNREADABLE: tuple[type[Exception], ...] = (*MALFORMED, OSError, EOFError, zlib.error)
"""The same of a file, which may not even be one."""
READABLE = "see to its owner and mode, or move the folder away"
TRAIN_AGAIN = "move the folder away and train again"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` while writing `path` into one sentence with the remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "choose a folder that can be written"
        remedy += " and run the same command again; what was there is unharmed"
        raise NotWritten(path, error, remedy) from error


def replace_file(
    path: Path, write: Callable[[Path], object], check: Callable[[], object] | None = None
) -> None:
    """Let `write` fill a temporary file, force it to disk, then put it in the place of `path`.

    A reader sees the old content or the new one, never a part: the rename is the only step that
    touches `path`, and the temporary file has a name of its own: two writers never share one.
    `check` is called right before it, and raises where the file must not be replaced after all.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.part")
    with disk_errors(path):
        try:
            write(temporary)
            _sync(temporary)
            if check is not None:
                check()
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def replace_text(path: Path, text: str) -> None:
    """`replace_file` for a text."""
    replace_file(path, partial(Path.write_text, data=text, encoding="utf-8"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    """Force a rename to disk, where the file system can: some network ones sync no folders."""
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON for others to read: what it has no number for, nan and inf, is null.

    >>> json_text({"loss": math.inf})
    '{"loss": null}'
    """
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def number_or_text(value: float) -> float | str:
    """A number for JSON that is read back with `float`: nan and inf are texts.

    >>> number_or_text(0.5), number_or_text(math.inf)
    (0.5, 'inf')
    """
    return value if math.isfinite(value) else str(value)


def without_nan(value: Any) -> Any:
    """A value for JSON, which has no nan and no inf: they are None.

    >>> without_nan({"loss": math.nan, "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return [without_nan(inner) for inner in value] if isinstance(value, list | tuple) else value
