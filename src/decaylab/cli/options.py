"""The options that commands share, and what they stand for."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from decaylab.errors import DecaylabError
from decaylab.records import RunFolder, RunStore
from decaylab.records.packing import has_rows

Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that holds the runs.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Folder of the data sets; without it, $DECAYLAB_DATA and the user's cache.",
    ),
]
Run = Annotated[str, typer.Argument(help="A run's id, the start or end of it, or a folder.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto (cuda if there is one).")]
Compiled = Annotated[
    bool,
    typer.Option("--compiled", help="Compile the network; pays off in long runs on CUDA."),
]


def _not_negative(seconds: float) -> float:
    if not seconds >= 0:
        raise DecaylabError("--checkpoint-every must not be negative: 0 is after every step")
    return seconds


CheckpointEvery = Annotated[
    float,
    typer.Option(
        "--checkpoint-every",
        callback=_not_negative,
        help="Least number of seconds between checkpoints.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        help="How many copies of this command you run side by side on the device.",
    ),
]
AtOnce = Annotated[
    int,
    typer.Option("--at-once", min=1, help="Runs that take turns on the device; 2 to 4 suit a GPU."),
]
WholeRuns = Annotated[
    bool,
    typer.Option(
        "--whole-runs", help="With --max-minutes: start only runs that should end in time."
    ),
]


def _positive(minutes: float | None) -> float | None:
    if minutes is not None and not minutes > 0:
        raise DecaylabError(f"--max-minutes must be positive, not {minutes}")
    return minutes


MaxMinutes = Annotated[
    float | None,
    typer.Option("--max-minutes", callback=_positive, help="Stop cleanly after this many minutes."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

RUNS = Path("runs")


def chosen_device(name: str) -> torch.device:
    """The device an option names; an error where torch does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DecaylabError(f"unknown device {name!r}: use cpu, cuda, cuda:1 or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise DecaylabError(f"decaylab runs on cpu and cuda, not on {name!r}: use one of them")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DecaylabError(
            f"there is no {name} here (torch sees {torch.cuda.device_count()} GPUs): use --device"
            " cpu, or a torch with CUDA"
        )
    return device


def found_run(name: str, runs: Path) -> RunFolder:
    """A run by its folder, else by its id in `runs`."""
    path = Path(name)
    if (path / "spec.toml").exists():
        return RunFolder(path.resolve())  # the folder's name is the id, and `.` has none
    if has_rows(path):
        raise DecaylabError(
            f"{name} holds records of `watch`, not a run of `decaylab train` with its network:"
            " `decaylab diagnose` and `decaylab advise` read them"
        )
    return RunStore(runs).find(name)
