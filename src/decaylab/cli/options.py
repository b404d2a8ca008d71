"""The options that commands share, and what they stand for."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import torch
import typer

from decaylab.errors import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    DecaylabError,
    NoFolder,
    Range,
    UnknownName,
)
from decaylab.records import RunFolder, RunStore
from decaylab.records.packing import has_rows
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training.world import World, joined, launched


def option(
    flag: str, text: str, *, allowed: Range | None = None, why: str = "", **others: Any
) -> Any:
    """An option and its help; `allowed`: the range its number must be in."""

    def check(value: float | None) -> float | None:
        if allowed is not None and value is not None:
            allowed.check(flag, value, why)
        return value

    return typer.Option(flag, callback=check if allowed else None, help=text, **others)


Runs = Annotated[Path, option("--runs", "Folder that holds the runs.", metavar="DIR")]
DataDir = Annotated[
    Path | None,
    option(
        "--data-dir",
        "Folder of the data sets; by default $DECAYLAB_DATA and the user's cache.",
        metavar="DIR",
    ),
]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, the start or end of it, or a folder.")
]
Device = Annotated[str, option("--device", "cpu, cuda, or auto (cuda if there is one).")]
Compiled = Annotated[
    bool, option("--compiled", "Compile the network; pays off in long runs on CUDA.")
]
CheckpointEvery = Annotated[
    float,
    option(
        "--checkpoint-every",
        "Least number of seconds between checkpoints.",
        allowed=NOT_NEGATIVE,
        why="0 is after every step",
    ),
]
Processes = Annotated[
    int,
    option(
        "--processes",
        "How many copies of this command you run side by side on the device.",
        allowed=AT_LEAST_ONE,
    ),
]
AtOnce = Annotated[
    int,
    option(
        "--at-once",
        "How many runs to interleave on the device; 2 to 4 suit a GPU.",
        allowed=AT_LEAST_ONE,
    ),
]
WholeRuns = Annotated[
    bool, option("--whole-runs", "With --max-minutes: start only runs that should end in time.")
]
MaxMinutes = Annotated[
    float | None, option("--max-minutes", "Stop cleanly after this many minutes.", allowed=POSITIVE)
]
Json = Annotated[bool, option("--json", "Print the result as JSON.")]

RUNS = Path("runs")
WATCHED = "there are records of `watch`: `decaylab diagnose FOLDER --report FILE.html` shows them"
NO_RUNS = "make runs with `decaylab demo`, or give their folder with --runs"


@dataclass(frozen=True)
class TrainingOptions:
    """Where, on what and how long a command trains: the same for all that make runs."""

    panel: ClassVar[str] = "Training"
    runs: Runs = RUNS
    data_dir: DataDir = None
    device: Annotated[
        str | None,
        option("--device", "cpu, cuda, or auto (cuda if there is one; digits stay on the CPU)."),
    ] = None
    at_once: AtOnce = 1
    processes: Processes = 1
    compiled: Compiled = False
    max_minutes: MaxMinutes = None
    whole_runs: WholeRuns = False
    checkpoint_every: CheckpointEvery = 60.0
    keep_checkpoints: Annotated[
        bool,
        option(
            "--keep-checkpoints",
            "Keep the models of finished runs, for `decaylab probe` (K-FAC: gigabytes).",
        ),
    ] = False

    def device_for(self, *, digits: bool) -> torch.device:
        """The device that was asked for; by default, digits stay on the CPU."""
        return chosen_device(self.device or ("cpu" if digits else "auto"))

    def worker_options(self, device: torch.device) -> WorkerOptions:
        """For a worker in this process."""
        return WorkerOptions(
            device=device,
            data_dir=self.data_dir,
            seconds=None if self.max_minutes is None else 60 * self.max_minutes,
            whole_runs=self.whole_runs,
            keep_checkpoints=self.keep_checkpoints,
            checkpoint_every=self.checkpoint_every,
            at_once=self.at_once,
            processes=self.processes,
            compiled=self.compiled,
        )

    def words(self) -> list[str]:
        """The same options for a command that an engine starts, elsewhere."""
        return flags(
            runs=self.runs.resolve(),
            at_once=self.at_once,
            data_dir=self.data_dir and self.data_dir.resolve(),
            device=self.device,
            checkpoint_every=self.checkpoint_every,
            compiled=self.compiled,
            keep_checkpoints=self.keep_checkpoints,
        )


def flags(**values: Any) -> list[str]:
    """Options as words of a command line; of a list, one for each item.

    >>> flags(seeds=3, tier=None, only=["network=vgg16"], dry_run=True)
    ['--seeds', '3', '--only', 'network=vgg16', '--dry-run']
    """
    words = []
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item is not False:
                words.append("--" + name.replace("_", "-"))
                text = f"{item:g}" if isinstance(item, float) else str(item)
                words += [] if item is True else [text]
    return words


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of the dataclasses among its parameters as options, in panels."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            kind = hints[parameter.name]
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=kind))
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=item.default,
                annotation=_in_panel(types[item.name], group.panel),
            )
            for item in fields(group)
        ]

    @wraps(command)
    def spread_command(**values: Any) -> None:
        built_groups = {
            name: group(**{item.name: values.pop(item.name) for item in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **built_groups)

    del spread_command.__wrapped__
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {item.name: item.annotation for item in parameters}
    return spread_command


def _in_panel(annotation: Any, panel: str) -> Any:
    """An option, which other commands may have too, as one of a panel of this command's help."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel or option.rich_help_panel
    return Annotated[kind, option]


DEVICES = ("auto", "cpu", "cuda", "cuda:1")


def chosen_device(name: str) -> torch.device:
    """The device an option names; an error if torch does not have it.

    Of several GPUs that are not told apart, a process that torchrun or Slurm has started beside
    others takes that of its number on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.device_count() > 1:
        name = f"cuda:{local_rank() % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnknownName("device", name, DEVICES) from error
    if device.type not in DEVICES:
        raise UnknownName("device", name, DEVICES)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DecaylabError(
            f"there is no {name} here (torch sees {torch.cuda.device_count()} GPUs): use --device"
            " cpu, or a torch with CUDA"
        )
    return device


def local_rank() -> int:
    """Which of the processes that torchrun or Slurm has started on this machine this one is."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


@contextmanager
def together(name: str, device: torch.device) -> Iterator[World]:
    """The processes that torchrun has started to train together; one, where it has not.

    An error if they have fewer GPUs than they are; a GPU that is named (cuda:0) is shared.
    """
    shared = device.type == "cuda" and ":" in name
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if launched() and device.type == "cuda" and not shared:
        remedy = "torch sees no more GPUs; give torchrun as many, or --device cpu"
        Range(at_most=torch.cuda.device_count()).check("--nproc-per-node", here, remedy)
    with joined(device, shared=shared) as world:
        yield world


def found_run(name: str, runs: Path) -> RunFolder:
    """A run by its folder, else by its id in `runs`."""
    path = Path(name)
    if (path / "spec.toml").exists():
        return RunFolder(path.resolve())  # the folder's name is the id, and `.` has none
    watched = path if path.exists() else runs / name
    if has_rows(watched) and not (watched / "spec.toml").exists():
        raise DecaylabError(
            f"{name} holds records of `watch`, not a run of `decaylab train` with its network:"
            " `decaylab diagnose` and `decaylab advise` read them"
        )
    if not path.exists() and (len(path.parts) > 1 or not runs.exists()):
        raise NoFolder(path, "give a run's folder, or its id and the folder of the runs (--runs)")
    return RunStore(runs).find(name)


def instead_of_runs(runs: Path) -> str:
    """What to do with a folder that has no runs."""
    rows = runs.glob("*/rows.json*")
    watched = any(not path.with_name("spec.toml").exists() for path in rows)
    return WATCHED if watched else NO_RUNS


def check_folder(runs: Path) -> None:
    """Refuse a folder of runs that is not there: it may be misspelt."""
    if not runs.is_dir():
        raise NoFolder(runs, NO_RUNS)
