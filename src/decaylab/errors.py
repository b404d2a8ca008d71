"""Errors that a user can fix: one sentence that says what is wrong and what to do about it."""

import importlib
import re
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

RUNS_LEFT = 75
"""Exit code of a command that stopped in time with work left: sysexits' EX_TEMPFAIL, try again."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Text from a file, for a terminal: what would steer it is shown as an escape.

    >>> printable("fin\x1b[2Jished")
    'fin\\x1b[2Jished'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class DecaylabError(Exception):
    """Wrong or missing input. The command line prints the sentence and exits with 2."""

    exit_code = 2

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))  # it may name a file, or quote one


class Diverged(DecaylabError):
    """A loss that is not finite. Records are kept; the command line exits with 3."""

    exit_code = 3


def unknown(kind: str, name: object, known: Iterable[str]) -> DecaylabError:
    """The error for a name that is none of those known, with the nearest of them.

    >>> print(unknown("network", "vgg61", ["mlp", "vgg16"]))
    unknown network 'vgg61' (did you mean vgg16?): choose one of mlp, vgg16
    """
    choices = [str(choice) for choice in known]
    shown = repr(name) if len(repr(name)) <= 60 else f"{repr(name)[:60]}..."
    return DecaylabError(
        f"unknown {kind} {shown}{did_you_mean(str(name), choices)}: choose one of"
        f" {', '.join(choices)}"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` where a known name is close to this one, else nothing."""
    close = _closest(name.lower(), list(known))
    return f" (did you mean {close}?)" if close else ""


def path_did_you_mean(path: Path) -> str:
    """The same for a path that does not exist, whichever of its parts is misspelt."""
    near = _nearest_path(path)
    return f" (did you mean {near}?)" if near is not None else ""


def _nearest_path(path: Path) -> Path | None:
    if path.exists() or path == path.parent:
        return path
    folder = _nearest_path(path.parent)
    try:
        names = [] if folder is None else [entry.name for entry in folder.iterdir()]
    except OSError:
        return None
    close = path.name if path.name in names else _closest(path.name, names)
    return folder / close if folder is not None and close else None


def _closest(name: str, known: list[str]) -> str:
    """The known name nearest to this one, of equally near ones that of the same letters."""
    letters = Counter(name)
    near = get_close_matches(name[:100], known, n=3, cutoff=0.6)
    return max(near, key=lambda other: (letters & Counter(other)).total(), default="")


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra installs; if it is missing, say that `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = (error.name or module).split(".")[0]
        raise DecaylabError(f"{what} needs {name}: pip install 'decaylab[{extra}]'") from error
