"""The options that every command shares, and what they stand for."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from decaylab.errors import DecaylabError

Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where run folders live.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Where data sets lie; else $DECAYLAB_DATA, else the user's cache.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Passes over the training data.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: cuda where there is.")]
Compiled = Annotated[
    bool,
    typer.Option("--compiled", help="Compile networks: for long runs on CUDA."),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        help="How often you start this command on the device, to run side by side.",
    ),
]
WholeRuns = Annotated[
    bool,
    typer.Option(
        "--whole-runs", help="With --max-minutes: begin only runs that should end in time."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]

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
