"""`decaylab compare --match`: two optimizers with the same rotation, norms or timescale."""

from typing import Annotated

import typer

from decaylab.attribution.matching import Matched, match, matched_runs
from decaylab.attribution.recorded_arms import arm_store
from decaylab.cli import options
from decaylab.cli.attribute import Seeds, TierOption, spec_from, submit_arms
from decaylab.cli.options import option
from decaylab.cli.sweep import EngineOptions
from decaylab.cli.terminal import print_json, say
from decaylab.errors import Mismatch

First = Annotated[str, typer.Argument(metavar="A", help="A spec in TOML, or a run.")]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one; it is made to follow A.")]
Path = Annotated[str, option("--match", "What B takes over from A: rotation, norm or timescale.")]


@options.spread
def compare_command(
    a: First,
    b: Second,
    path: Path = "rotation",
    seeds: Seeds = 3,
    tier: TierOption = None,
    json_output: options.Json = False,
    *,
    training: options.TrainingOptions,
    engine: EngineOptions,
) -> None:
    """Compare two optimizers at the same decay; any remaining difference is not due to it.

    Trains A, B, and a B whose layers turn as far per step as A's (rotation), have A's norms (norm),
    or whose decay has A's timescale. They are recorded in RUNS/attribution. Running the same
    command again resumes.
    """
    runs = training.runs
    first, second = spec_from(a, runs, tier), spec_from(b, runs, tier)
    if first.data != second.data:
        raise Mismatch("data", {"A": first.data, "B": second.data}, "give one data set")
    chosen: Matched = path  # type: ignore[assignment]  # an unknown one is refused by match
    if engine.dry_run or not engine.in_this_process(training):
        words = ["compare", a, b, *options.flags(match=path, seeds=seeds, tier=tier)]
        specs = list(matched_runs(first, second, chosen, range(seeds)).values())
        submit_arms(words, specs, tier, training, engine, json_output)
        if engine.leaves:
            return
    result = match(
        first,
        second,
        chosen,
        store=arm_store(runs),
        options=training.worker_options(options.chosen_device(training.device or "auto")),
        seeds=range(seeds),
        tier=tier or "custom",
    )
    if json_output:
        print_json(result.as_dict())
    else:
        say(f"\n{result}")
