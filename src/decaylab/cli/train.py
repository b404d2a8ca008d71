"""`decaylab train`: every field of a run's spec as an option, from a TOML file or from both."""

import sys
from dataclasses import Field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.progress import follow
from decaylab.cli.runs import summary
from decaylab.cli.terminal import print_json, say
from decaylab.data import load
from decaylab.errors import Diverged, Lacks
from decaylab.records import RunFolder, RunStore
from decaylab.training import Execution, RunSpec, train
from decaylab.training.run import DIAGNOSED
from decaylab.training.spec import field_kinds

Config = Annotated[
    Path | None,
    option("--config", "A spec in TOML; options on the command line override it.", metavar="FILE"),
]
TrainSet = Annotated[
    bool, option("--train-set", "Also evaluate the training set after each epoch.")
]
Tier = Annotated[str, option("--tier", "A label stored with the results.")]

# Else a newcomer takes 10 % accuracy beside a training loss of 0.01 for a bug.
LAGGING = (
    "with the statistics of each batch, {:.0%} of the last epoch was right. Evaluation uses batch"
    " norm's running averages, which are slow (about 100 steps, as in the paper) and lag behind"
    " after {} steps: train for longer, or drop the learning rate earlier"
)


def _say_result(spec: RunSpec, result: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(result)
        return
    values = result["values"]
    say(
        f"finished: test accuracy {100 * values['test/accuracy']:.2f} %, train accuracy"
        f" {100 * values['train/accuracy']:.2f} %, train loss {values['train/loss']:.4g}"
    )
    if spec.batch_norm and values["train/accuracy"] < values["train/running_accuracy"] - 0.1:
        say(LAGGING.format(values["train/running_accuracy"], result["step"]))


def _ended_before(folder: RunFolder, spec: RunSpec) -> bool:
    """Whether the run is finished; a run that diverged says so again."""
    manifest = folder.manifest()
    if manifest is None:  # no folder, or a process that died before it had begun
        return False
    folder.check_same_spec(spec.to_toml())
    if manifest.status == "diverged":
        raise Diverged(f"run {spec.id} ended before: {manifest.message}")
    return manifest.status == "finished"


def _numbers(text: str) -> tuple[float, ...] | tuple[int, ...]:
    """`128,64` or `0.9,0.999` as a tuple; the spec checks how many there are, and their type."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tuple(map(int, parts))
    except ValueError:
        try:
            return tuple(map(float, parts))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,2") from None


def _spec_option(item: "Field[Any]") -> Any:
    """A field of the spec as an option: None if it is not given."""
    kind: Any = field_kinds()[item.name][0]
    flag = "--" + item.name.replace("_", "-")
    details = {"rich_help_panel": item.metadata["panel"], "show_default": _shown(item.default)}
    if get_origin(kind) is tuple:
        kind, details = Any, {**details, "parser": _numbers, "metavar": "A,B,..."}
    elif kind is bool:
        flag += f"/--no-{flag[2:]}"
    return Annotated[kind | None, option(flag, item.metadata["help"], **details)]


def _shown(default: Any) -> str | bool:
    """A default as help shows it; not where the optimizer decides it (None), nor "off"."""
    if isinstance(default, bool):
        return "yes" if default else False
    return f"{default:g}" if isinstance(default, float) else str(default) if default else False


SpecOptions = make_dataclass(
    "SpecOptions",
    [(item.name, _spec_option(item), None) for item in fields(RunSpec)],
    namespace={"panel": ""},  # each field has its own
)


@options.spread
def train_command(
    *,
    spec_options: SpecOptions,  # type: ignore[valid-type]
    config: Config = None,
    runs: options.Runs = options.RUNS,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    compiled: options.Compiled = False,
    checkpoint_every: options.CheckpointEvery = 60.0,
    train_set: TrainSet = False,
    tier: Tier = "custom",
    json_output: options.Json = False,
) -> None:
    """Train a network and record the run.

    Options without a default take the paper's settings for the optimizer. Running the same command
    again resumes a stopped run, and does nothing if the run is finished.
    """
    options_set = {name: value for name, value in vars(spec_options).items() if value is not None}
    spec = RunSpec.from_file(config, options_set) if config else RunSpec.from_mapping(options_set)
    if spec.decay != "none" and not spec.weight_decay and "weight_decay" not in options_set:
        remedy = "add --weight-decay (0 trains without it)"
        raise Lacks(f"decay {spec.decay}", "strength", remedy)
    where = options.chosen_device(device)
    stream = sys.stderr if json_output else sys.stdout
    store = RunStore(runs)
    folder = store.folder(spec.id)
    if _ended_before(folder, spec):
        say(f"run {spec.id} is already finished: nothing to train", stream=stream)
    else:
        data = load(spec.data, data_dir)
        with options.together(device, where) as world, world.output(stream) as shown:
            execution = Execution(
                probes=DIAGNOSED,
                checkpoint_every=checkpoint_every,
                every_step=shown.isatty(),  # for the bar
                train_set_each_epoch=train_set,
                tier=tier,
                compiled=compiled,
                world=world,
            )
            training = train(spec, data=data, device=where, store=store, execution=execution)
            begun = " (continued)" if folder.has_checkpoint() else ""
            together = f" by {world.size} processes" if world.size > 1 else ""
            say(f"run {spec.id}{begun} in {folder.path}{together}", stream=shown)
            follow(training, shown)
        if not world.first:
            return
    _say_result(spec, summary(folder), json_output)
