"""`decaylab compare --match`: two optimizers with the same rotation, norms or timescale."""

from typing import Annotated

import typer

from decaylab.attribution.matching import Matched, match
from decaylab.attribution.recorded_arms import arm_store
from decaylab.cli import options
from decaylab.cli.attribute import (
    Keep,
    Seeds,
    TierOption,
    spec_from,
    tell_finished,
)
from decaylab.cli.output import print_json
from decaylab.errors import DecaylabError
from decaylab.sweeps.worker import WorkerOptions

First = Annotated[str, typer.Argument(metavar="A", help="A spec in TOML, or a run.")]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one; it is made to follow A.")]
Path = Annotated[
    str, typer.Option("--match", help="What B takes over from A: rotation, norm or timescale.")
]


def compare_command(
    a: First,
    b: Second,
    path: Path = "rotation",
    seeds: Seeds = 3,
    tier: TierOption = None,
    runs: options.Runs = options.RUNS,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    at_once: options.AtOnce = 1,
    max_minutes: options.MaxMinutes = None,
    compiled: options.Compiled = False,
    checkpoint_every: options.CheckpointEvery = 60.0,
    keep_checkpoints: Keep = False,
    json_output: options.Json = False,
) -> None:
    """Compare two optimizers at the same decay: what is left of their difference is not decay.

    Trains A, B, and a B whose layers turn as far per step as A's (rotation), have A's norms (norm),
    or whose decay has A's timescale. They are recorded in RUNS/attribution. Giving the same command
    again continues.
    """
    first, second = spec_from(a, runs, tier), spec_from(b, runs, tier)
    if first.data != second.data:
        raise DecaylabError(f"A is on {first.data} and B on {second.data}: give one data set")
    chosen: Matched = path  # type: ignore[assignment]  # an unknown one is refused by match
    result = match(
        first,
        second,
        chosen,
        store=arm_store(runs),
        options=WorkerOptions(
            device=options.chosen_device(device),
            data_dir=data_dir,
            seconds=None if max_minutes is None else 60 * max_minutes,
            keep_checkpoints=keep_checkpoints,
            checkpoint_every=checkpoint_every,
            at_once=at_once,
            compiled=compiled,
        ),
        seeds=range(seeds),
        tier=tier or "custom",
        tell=None if json_output else tell_finished,
    )
    if json_output:
        print_json(result.as_dict())
    else:
        print(f"\n{result}")
