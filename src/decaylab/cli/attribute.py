"""`decaylab attribute`: which path carries decay's effect, by experiment."""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from decaylab import __version__
from decaylab.attribution import Arm, Attribution, attribute
from decaylab.attribution.arms import norms_alone as norms_alone_arm
from decaylab.attribution.branches import branch_from, train_to
from decaylab.attribution.recorded_arms import (
    FOLDER,
    METRICS,
    arm_specs,
    arm_store,
    attribute_spec,
    planned_arms,
)
from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.sweep import EngineOptions, Work, submit
from decaylab.cli.terminal import print_json, say
from decaylab.data import load
from decaylab.errors import AT_LEAST_ONE, BadValue, DecaylabError, Lacks, Misplaced, check_name
from decaylab.paper.tiers import sized, tier_of
from decaylab.report.attributions import write_attribution
from decaylab.report.drawing import check_extra
from decaylab.report.names import named
from decaylab.sweeps.estimate import steps_per_epoch
from decaylab.training import RunSpec
from decaylab.training.journal import code_commit
from decaylab.training.loop import device_name

Spec = Annotated[
    str | None,
    typer.Argument(metavar="SPEC", help="A spec in TOML, or a run with decay: its id or folder."),
]
Seeds = Annotated[int, option("--seeds", "How many seeds, from 0.", allowed=AT_LEAST_ONE)]
Only = Annotated[
    str,
    option(
        "--only",
        "Which layers are held: all that decay, conv (those before the last), fc, or names.",
        metavar="layers=WHICH",
    ),
]
Metric = Annotated[str, option("--metric", f"One of {', '.join(METRICS)}.")]
TierOption = Annotated[
    str | None, option("--tier", "Size the spec for a tier: smoke, quick, short or full.")
]
From = Annotated[str | None, option("--from", "Branch from this run with decay.", metavar="RUN")]
At = Annotated[int | None, option("--at", "The epoch to branch at.", metavar="EPOCH")]
For = Annotated[int | None, option("--for", "How many steps each arm takes.", metavar="STEPS")]
NormsAlone = Annotated[
    str | None,
    option(
        "--norms-alone",
        "One more arm: no decay, but its norms, set at each step or epoch (Fig. 4).",
        metavar="WHEN",
    ),
]
ReportFile = Annotated[
    Path | None, option("--report", "Also write a page with figures.", metavar="FILE.html")
]


@options.spread
def attribute_command(
    spec: Spec = None,
    seeds: Seeds = 3,
    only: Only = "layers=all",
    metric: Metric = METRICS[0],
    tier: TierOption = None,
    start: From = None,
    at: At = None,
    steps: For = None,
    norms_alone: NormsAlone = None,
    report: ReportFile = None,
    json_output: options.Json = False,
    *,
    training: options.TrainingOptions,
    engine: EngineOptions,
) -> None:
    """Find out how much of decay's effect goes through size, rotation and damping.

    Trains the run with decay, the run without, and arms in which each path follows one or the
    other: 4 per seed, 8 under K-FAC, and one more if biases and gains decay too. They are recorded
    in RUNS/attribution. Running the same command again resumes. Exit code 75: time ran out with
    work left.
    """
    if (spec is None) == (start is None):
        raise DecaylabError(
            "give a spec or a run, or branch with --from RUN --at EPOCH --for STEPS"
        )
    check_name("metric", metric, METRICS)
    if report is not None:
        check_extra()
    runs = training.runs
    where = options.chosen_device(training.device or "auto")
    base = spec_from(start or spec or "", runs, tier)
    extra, layers = _norms_alone(norms_alone, base), _layers(only)
    if start is not None:
        if training.at_once > 1 or training.max_minutes is not None or training.compiled:
            settings = ["--at-once", "--max-minutes", "--compiled"]
            raise Misplaced(settings, "arms that do not branch")
        if not engine.in_this_process(training):
            raise Misplaced(["--engine", "--jobs"], "arms that do not branch")
        if at is None or steps is None:
            raise Lacks("--from RUN", "--at EPOCH or no --for STEPS", "give both")
        data = load(base.data, training.data_dir)
        folder = runs / "attribution" / f"{base.id}-at-{at}"
        path = train_to(base, at, data=data, folder=folder, device=where)
        result = attribute(
            branch_from(path, base, data, where),
            steps=steps,
            seeds=seeds,
            only=layers.split(",") if "," in layers else layers,
            extra=extra,
            metric=metric,
            folder=folder / f"{steps}-steps-{layers.replace(',', '+')}",
        )
    else:
        if at is not None or steps is not None:
            raise Misplaced(["--at", "--for"], "--from RUN")
        specs = arm_specs(base, range(seeds), layers, extra)
        if engine.dry_run or not engine.in_this_process(training):
            chosen = options.flags(
                seeds=seeds, only=only, metric=metric, tier=tier, norms_alone=norms_alone
            )
            words = ["attribute", spec or "", *chosen]
            submit_arms(words, specs, tier, training, engine, json_output)
            if engine.leaves:
                return
        result = attribute_spec(
            base,
            store=arm_store(runs),
            seeds=range(seeds),
            only=layers,
            extra=extra,
            metric=metric,
            options=training.worker_options(where),
            tier=tier or "custom",
        )
    _show(result, base, layers, where, report, json_output)


def submit_arms(
    words: list[str],
    specs: Sequence[RunSpec],
    tier: str | None,
    training: options.TrainingOptions,
    engine: EngineOptions,
    json_output: bool,
) -> None:
    """Let an engine train arms, every job any of them."""
    work = Work(words, planned_arms(specs, tier or "custom"), FOLDER, shared=True)
    digits = all(spec.data == "digits" for spec in specs)
    stream = sys.stderr if json_output else sys.stdout
    submit(work, training, engine, digits=digits, stream=stream)


def spec_from(name: str, runs: Path, tier: str | None) -> RunSpec:
    """A spec from a TOML file, or that of a run; sized for a tier if one is given."""
    path = Path(name)
    if path.suffix == ".toml":
        spec = RunSpec.from_file(path)
    else:
        spec = RunSpec.of_run(options.found_run(name, runs))
    if tier is None:
        return spec
    values = {item.name: getattr(spec.resolved(), item.name) for item in fields(RunSpec)}
    return RunSpec.from_mapping(sized(values, tier_of(tier)))


def _layers(only: str) -> str:
    key, equals, value = only.partition("=")
    if key != "layers" or not equals or not value:
        raise BadValue("--only", only, "layers=all, layers=conv, layers=fc or layers=NAMES")
    return value


def _norms_alone(when: str | None, spec: RunSpec) -> list[Arm]:
    """The arm that Fig. 4 has, where it is asked for."""
    if when is None:
        return []
    check_name("--norms-alone", when, ("step", "epoch"))
    return [norms_alone_arm(1 if when == "step" else steps_per_epoch(spec))]


def _show(
    result: Attribution,
    spec: RunSpec,
    layers: str,
    device: torch.device,
    report: Path | None,
    json_output: bool,
) -> None:
    result.shares_of(result.metric)
    if report is not None:
        write_attribution(report, result, f"What carries the effect of decay in {spec.id}")
    if json_output:
        about = {
            "device": device_name(device),
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "version": __version__,
            "commit": code_commit(),
        }
        extra = [name for name, on in (("BN", spec.batch_norm), ("Aug", spec.augment)) if on]
        words = f"{named(spec.optimizer)}, {named(spec.network)} {' + '.join(extra)}".strip()
        title = f"{words} on {named(spec.data)}"
        title += "" if layers == "all" else f", held: {layers}"
        settings = tomllib.loads(spec.to_toml())
        named_by = {"title": title, "id": spec.id, "spec": settings, "about": about}
        print_json({**named_by, **result.as_dict()})
        return
    say(f"\n{result}")
    if report is not None:
        say(f"\nreport: {report}")
