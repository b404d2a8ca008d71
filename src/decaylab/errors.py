"""Errors that a user can fix: one sentence that says what is wrong and what to do about it."""

import importlib
import math
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

RUNS_LEFT = 75
"""Exit code of a command that stopped in time with work left: sysexits' EX_TEMPFAIL, try again."""

MOST_CHOICES = 40
"""How many known names the sentence about an unknown one lists."""

_NOT_THE_USERS = {"decaylab", "torch", "contextlib"}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Text from a file, for a terminal: control characters are shown as escapes.

    >>> printable("fin\x1b[2Jished")
    'fin\\x1b[2Jished'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class DecaylabError(Exception):
    """Wrong or missing input. The command line prints the sentence and exits with 2."""

    exit_code = 2
    place = ""  # the file, or part of one, that it is about, if the sentence does not name it

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)

    def __str__(self) -> str:  # it may name a file, or quote one
        return printable(f"{self.place}: {self._sentence()}" if self.place else self._sentence())

    def _sentence(self) -> str:
        """What is wrong and what to do about it."""
        return str(self.args[0])


class Diverged(DecaylabError):
    """A loss that is not finite. Records are kept; the command line exits with 3."""

    exit_code = 3


class MadeElsewhere(DecaylabError):
    """A run that another process writes, or has taken over from this one."""


@dataclass(eq=False)
class TypedError(DecaylabError):
    """An error that many places raise: type and fields say what is wrong, `template` in words."""

    template: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())  # what pickle builds it from again

    def _sentence(self) -> str:
        return self.template.format(**vars(self))


@dataclass(eq=False)
class BadValue(TypedError):
    """A value other than what is wanted.

    >>> print(BadValue("--sbatch", "gpu", "KEY=VALUE, such as partition=gpu"))
    --sbatch must be KEY=VALUE, such as partition=gpu, not 'gpu'
    """

    name: str
    value: object
    wanted: object
    why: str = ""

    def _sentence(self) -> str:
        because = f": {self.why}" if self.why else ""
        return f"{self.name} must be {self.wanted}, not {self._shown()}{because}"

    def _shown(self) -> str:
        """The value as the sentence shows it."""
        return _short(self.value)


class OutOfRange(BadValue):
    """A number outside its range, or not a number at all."""


class WrongType(BadValue):
    """A value of the wrong type.

    >>> print(WrongType("the optimizer", "sgd", "a torch optimizer"))
    the optimizer must be a torch optimizer, not a str
    """

    def _shown(self) -> str:
        name = type(self.value).__name__
        return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


@dataclass(frozen=True)
class Range:
    """The finite numbers between two bounds.

    >>> print(Range(at_least=0, below=1))
    at least 0 and below 1
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def __contains__(self, value: Any) -> bool:
        return bool(
            -math.inf < value < math.inf  # nan is not, either
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        bounds = [(key, value) for key, value in vars(self).items() if value is not None]
        return " and ".join(f"{key.replace('_', ' ')} {value}" for key, value in bounds)

    def check(self, name: str, value: object, why: str = "") -> None:
        """Refuse a number that is not in this range."""
        if value not in self:
            raise OutOfRange(name, value, self, why)


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
AT_LEAST_ONE = Range(at_least=1)
FRACTION = Range(at_least=0, below=1)


@dataclass(eq=False)
class UnknownName(TypedError):
    """A name that is not known; the sentence suggests the nearest known one.

    >>> print(UnknownName("network", "vgg61", ["mlp", "vgg16"]))
    unknown network 'vgg61' (did you mean vgg16?): choose one of mlp, vgg16
    """

    kind: str
    name: object
    choices: Iterable[object]
    remedy: str = ""

    def __post_init__(self) -> None:
        self.choices = tuple(map(str, self.choices))
        super().__post_init__()

    def _sentence(self) -> str:
        choices = tuple(map(str, self.choices))
        near = did_you_mean(str(self.name), choices)
        listed = ", ".join(choices[:MOST_CHOICES]) + ", ..." * (len(choices) > MOST_CHOICES)
        remedy = self.remedy or (f"choose one of {listed}" if choices else "there are none")
        return f"unknown {self.kind} {_short(self.name)}{near}: {remedy}"


def check_name(kind: str, name: object, choices: Collection[object]) -> None:
    """Refuse a name that is not among the choices."""
    if name not in choices:
        raise UnknownName(kind, name, choices)


@dataclass(eq=False)
class NameTaken(TypedError):
    """A name that is already registered."""

    kind: str
    name: str
    template = "there is already a {kind} {name!r}: choose another name"


@dataclass(eq=False)
class Misplaced(TypedError):
    """Settings that do not apply here.

    >>> print(Misplaced(["--sbatch", "--wait"], "--engine slurm"))
    --sbatch and --wait apply only to --engine slurm: leave them out
    """

    settings: Sequence[str]
    owner: str
    remedy: str = ""

    def _sentence(self) -> str:
        several = len(self.settings) > 1
        remedy = self.remedy or f"leave {'them' if several else 'it'} out"
        verb = "apply" if several else "applies"
        return f"{_listing(self.settings)} {verb} only to {self.owner}: {remedy}"


@dataclass(eq=False)
class Conflict(TypedError):
    """Settings that cannot be combined.

    >>> print(Conflict(["step_rms", "kl_clip"], "both set how long steps are"))
    step_rms and kl_clip cannot be combined, because both set how long steps are: leave one out
    """

    settings: Sequence[str]
    why: str
    remedy: str = "leave one out"

    def _sentence(self) -> str:
        return f"{_listing(self.settings)} cannot be combined, because {self.why}: {self.remedy}"


@dataclass(eq=False)
class Mismatch(TypedError):
    """Things that must agree in something and do not.

    >>> print(Mismatch("device", {"the inputs": "cpu", "the model": "cuda"}, "move one of them"))
    the inputs (cpu) and the model (cuda) differ in device: move one of them
    """

    what: str
    values: Mapping[str, object]
    remedy: str

    def _sentence(self) -> str:
        owners = _listing([f"{owner} ({value})" for owner, value in self.values.items()])
        return f"{owners} differ in {self.what}: {self.remedy}"


@dataclass(eq=False)
class Lacks(TypedError):
    """Something that lacks what is needed.

    >>> print(Lacks("the batch", "examples", "give at least one"))
    the batch has no examples: give at least one
    """

    owner: object
    what: str
    remedy: str
    template = "{owner} has no {what}: {remedy}"


@dataclass(eq=False)
class NoFolder(TypedError):
    """A folder that does not exist, or is a file."""

    path: Path
    remedy: str

    def _sentence(self) -> str:
        if os.path.exists(self.path):  # Path's own raises if a name is too long
            return f"{self.path} is not a folder: {self.remedy}"
        return f"there is no folder {self.path}{path_did_you_mean(self.path)}: {self.remedy}"


@dataclass(eq=False)
class _Caused(TypedError):
    """An error with a reason; of an exception, only the words are kept."""

    what: object
    reason: str | BaseException
    remedy: str

    def __post_init__(self) -> None:
        self.reason = _in_words(self.reason)
        super().__post_init__()


class Failed(_Caused):
    """Something outside decaylab that raised an error."""

    template = "{what} failed ({reason}): {remedy}"


class Damaged(_Caused):
    """A file or tensor that does not hold what it should: truncated, overwritten or another one.

    >>> print(Damaged("rows.json", ValueError("not a row"), "put the whole file back"))
    rows.json is damaged (ValueError: not a row): put the whole file back
    """

    template = "{what} is damaged ({reason}): {remedy}"


class NotRead(_Caused):
    """A file or folder that cannot be read; the sentence suggests one with a similar name."""

    def _sentence(self) -> str:
        near = path_did_you_mean(Path(str(self.what)))
        return f"{self.what} cannot be read ({self.reason}){near}: {self.remedy}"


class NotWritten(_Caused):
    """A file or folder that cannot be written."""

    template = "{what} cannot be written ({reason}): {remedy}"


@dataclass(eq=False)
class NotFinished(TypedError):
    """A run that must be finished first."""

    run: str
    remedy: str
    template = "run {run} is not finished: {remedy}"


@dataclass(eq=False)
class NotInstalled(TypedError):
    """A missing package that an extra of decaylab installs."""

    package: str
    extra: str
    what: str
    template = "{what} needs {package}: pip install 'decaylab[{extra}]'"


def _short(value: object) -> str:
    """A value for a sentence, on one line: its beginning, if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _listing(names: Sequence[str]) -> str:
    """The names as English lists them.

    >>> _listing(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _in_words(reason: str | BaseException) -> str:
    """The reason itself, the system's words, or an exception's type and first line."""
    if isinstance(reason, str):
        return reason
    if isinstance(reason, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    first = str(reason).partition("\n")[0]
    return f"{type(reason).__name__}: {first}" if first else type(reason).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` if a known name is close to this one, else nothing."""
    by_lower = {other.lower(): other for other in known}
    close = _closest(name.lower(), list(by_lower))
    return f" (did you mean {by_lower[close]}?)" if close else ""


def path_did_you_mean(path: Path) -> str:
    """The same for a path that does not exist, whichever of its parts is misspelt."""
    near = _nearest_path(path)
    return f" (did you mean {near}?)" if near not in (None, path) else ""


def _nearest_path(path: Path) -> Path | None:
    if os.path.exists(path) or path == path.parent:
        return path
    folder = _nearest_path(path.parent)
    try:
        names = [] if folder is None else [entry.name for entry in folder.iterdir()]
    except OSError:
        return None
    close = path.name if path.name in names else _closest(path.name, names)
    return folder / close if folder is not None and close else None


def _closest(name: str, known: list[str]) -> str:
    """The known name nearest to this one; of the nearest, the one that shares most letters."""
    letters = Counter(name)
    near = get_close_matches(name[:100], known, n=3, cutoff=0.6)
    return max(near, key=lambda other: (letters & Counter(other)).total(), default="")


class DecaylabWarning(UserWarning):
    """What decaylab warns of."""


def warn_user(text: str, category: type[DecaylabWarning] = DecaylabWarning) -> None:
    """Warn at the user's own line, however much of decaylab and torch lies above it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Let errors name the file, or the part of one, that they are about."""
    try:
        yield
    except DecaylabError as error:
        error.place = str(place)
        raise


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra installs; if it is missing, say that `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = (error.name or module).split(".")[0]
        raise NotInstalled(name, extra, what) from error
