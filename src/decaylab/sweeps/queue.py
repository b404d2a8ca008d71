"""A queue: work for a device in one TOML file, done in order, in several sessions.

    [[entry]]
    name = "Table 1: ResNet32 on CIFAR-10, without BN"
    reproduce = "table1"                  # an artefact; or `search`, or `command`
    only = ["dataset=cifar10", "network=resnet32", "batch_norm=0"]
    tier = "full"
    at_once = 2                           # at most so many runs beside each other
    alone = true                          # one run at a time, not compiled: its seconds count
    again = "superseded"                  # only runs whose numerics were fixed since
    seeds = 2                             # seeds 0 and 1
    doubtful = true                       # only cells of which a further seed would tell something

    [[entry]]
    name = "Fig. 1: L2 of Adam"
    search = ["dataset=cifar10", "network=vgg16", "batch_norm=0", "augment=0", "optimizer=adam"]
    tier = "short"

    [[entry]]
    name = "speed of the inverses"
    command = ["python", "benchmarks/inverses.py", "--json", "results/inverses.json"]
    writes = "results/inverses.json"      # done once it is there
    minutes = 4
    needs = ["cifar10"]                   # data sets without which it is not started
    hold = "waits for the new kernels"    # any entry: listed, not run, until the line is gone

    [shares]
    table1 = 0.66                         # of the time of one call, at most so much for Table 1

Nothing in the file says what is done: that is read from the records.
"""

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from decaylab.data import DATA_SETS
from decaylab.errors import (
    NOT_NEGATIVE,
    BadValue,
    DecaylabError,
    Lacks,
    NameTaken,
    NotRead,
    Range,
    check_name,
    naming,
)


@dataclass(frozen=True, kw_only=True)
class ArtefactEntry:
    """The runs of some cells of a table or figure.

    Attributes:
        at_once: the most runs beside each other, however many the command line allows; 0 is as it
            says.
        alone: each run has the device to itself and is not compiled, whatever the command line
            says, and is left to calls without other processes: for runs whose seconds count.
        again: which finished runs to make again, and no others: "superseded", those whose numerics
            were fixed since (the new run takes the place of the old, which goes to `superseded/`),
            or "lacking", those without what the artefact wants measured (the new run goes to
            `repeats/`, the old stays).
        doubtful: only cells that seed 0 leaves in doubt: over a point off the paper, or of a pair
            whose effect of decay may be noise.
    """

    name: str
    reproduce: str
    only: list[str] = field(default_factory=list)
    tier: str = "full"
    seeds: int = 1
    at_once: int = 0
    alone: bool = False
    again: str = ""
    doubtful: bool = False
    hold: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchEntry:
    """A search of a cell's settings, as by `decaylab search`."""

    name: str
    search: list[str]
    scheme: str = "l2"
    tier: str = "short"
    method: str = "grid"
    lr: list[float] = field(default_factory=list)
    weight_decay: list[float] = field(default_factory=list)
    damping: list[float] = field(default_factory=list)
    kl_clip: list[float] = field(default_factory=list)
    hold: str = ""


@dataclass(frozen=True, kw_only=True)
class CommandEntry:
    """Any command, run in the current folder; done once the file that it writes is there.

    `python` and `decaylab` are those that work off the queue. A command that writes its file bit by
    bit writes it elsewhere first, or it counts as done when it is killed.

    Attributes:
        prints: the file is what the command prints, written here once it has ended well.
        needs: data sets; on a machine without one of them the command is not started.
    """

    name: str
    command: list[str]
    writes: str
    minutes: float
    prints: bool = False
    needs: list[str] = field(default_factory=list)
    hold: str = ""


SHARE = Range(above=0, at_most=1)
Entry = ArtefactEntry | SearchEntry | CommandEntry
KINDS = {"reproduce": ArtefactEntry, "search": SearchEntry, "command": CommandEntry}


@dataclass(frozen=True)
class QueueFile:
    """What a queue's file says.

    Attributes:
        entries: in order, each with a name of its own.
        shares: by artefact, the most of a call's time that its runs are given while there is other
            work.
    """

    entries: list[Entry]
    shares: dict[str, float]


def read_queue(path: Path) -> QueueFile:
    """A queue; an error that names the entry that is wrong."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NotRead(path, error, "give a queue in TOML") from error
    entries, shares = values.pop("entry", None), values.pop("shares", {})
    if values or not isinstance(entries, list) or not entries or not isinstance(shares, dict):
        raise DecaylabError(f"{path} must hold [[entry]] tables, [shares], and nothing else")
    read: list[Entry] = []
    for number, entry in enumerate(entries, start=1):
        with naming(f"{path}, entry {number}"):
            read.append(_entry(entry))
            if read[-1].name in [other.name for other in read[:-1]]:
                raise NameTaken("queue entry", read[-1].name)
    artefacts = {entry.reproduce for entry in read if isinstance(entry, ArtefactEntry)}
    for artefact, share in shares.items():
        with naming(f"{path}, shares"):
            check_name("artefact of this queue", artefact, sorted(artefacts))
            SHARE.check(artefact, share)
    return QueueFile(read, shares)


def _entry(values: dict[str, Any]) -> Entry:
    kinds = [kind for kind in KINDS if kind in values]
    if len(kinds) != 1:
        raise BadValue("what it does", kinds, f"one of {', '.join(KINDS)}")
    entry_type = KINDS[kinds[0]]
    types = get_type_hints(entry_type)
    required = [item.name for item in fields(entry_type) if item.name in ("name", "writes")]
    required += ["minutes"] if entry_type is CommandEntry else []
    for name in required:
        if name not in values:
            raise Lacks("it", name, f"give {name} = ...")
    for key, value in values.items():
        check_name("key", key, types)
        if not _fits(value, types[key]):
            raise BadValue(key, value, _in_words(types[key]))
    if again := values.get("again"):
        check_name("again", again, ("superseded", "lacking"))
    for name in values.get("needs", []):
        check_name("data set", name, DATA_SETS)
    NOT_NEGATIVE.check("at_once", values.get("at_once", 0))
    return entry_type(**values)


def _fits(value: Any, expected: Any) -> bool:
    if get_origin(expected) is list:
        (item,) = get_args(expected)
        return isinstance(value, list) and all(_fits(part, item) for part in value)
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return type(value) is expected


def _in_words(expected: Any) -> str:
    if get_origin(expected) is list:
        return f"a list, each {_in_words(get_args(expected)[0])}"
    names = {str: "text", int: "a whole number", float: "a positive number", bool: "true or false"}
    return names[expected]
