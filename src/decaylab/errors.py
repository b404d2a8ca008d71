"""The errors that a user can mend: one sentence that says what is wrong and what to do about it."""

import importlib
from typing import Any

RUNS_LEFT = 75
"""Exit code of a command that stopped in time with work left: sysexits' EX_TEMPFAIL, try again."""


class DecaylabError(Exception):
    """Wrong input or a missing piece. The command line prints the sentence and exits with 2."""

    exit_code = 2


class Diverged(DecaylabError):
    """A loss that is not finite. Records are kept; the command line exits with 3."""

    exit_code = 3


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of decaylab brings; where it is missing, `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = (error.name or module).split(".")[0]
        raise DecaylabError(f"{what} needs {name}: pip install 'decaylab[{extra}]'") from error
