"""`decaylab compare --match`: two optimizers with the same rotation, norms or timescale."""

from typing import Annotated

import typer

from decaylab.attribution.matching import Matched, match
from decaylab.attribution.recorded_arms import arm_store
from decaylab.cli import options
from decaylab.cli.attribute import AtOnce, Keep, Seeds, TierOption, spec_from, tell_finished
from decaylab.cli.output import print_json
from decaylab.data import load
from decaylab.errors import DecaylabError
from decaylab.training import Execution

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
    at_once: AtOnce = 1,
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
        data=load(first.data, data_dir),
        store=arm_store(runs),
        seeds=range(seeds),
        device=options.chosen_device(device),
        execution=Execution(
            checkpoint_every=checkpoint_every,
            at_once=at_once,
            compiled=compiled,
            tier=tier or "custom",
        ),
        keep_checkpoints=keep_checkpoints,
        tell=None if json_output else tell_finished,
    )
    if json_output:
        print_json(result.as_dict())
    else:
        print(f"\n{result}")
