"""The arms of a spec as ordinary recorded runs: with ids, resumed where they were stopped.

They lie in a store of their own, `attribution/` in a folder of runs, since runs elsewhere did not
record their paths, and since an arm is not a run to compare others with.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from decaylab import probes
from decaylab.attribution import words
from decaylab.attribution.arms import WITH, WITHOUT, Arm, ArmResult, Plan, held_errors, plan_for
from decaylab.attribution.progress import ArmProgress
from decaylab.attribution.result import Attribution
from decaylab.data import Split, evaluation_batches
from decaylab.data.facts import facts_of
from decaylab.errors import RUNS_LEFT, BadValue, DecaylabError, Lacks, NotFinished
from decaylab.records import RunFolder, RunStore
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.training import RunSpec, TrainingRun, build_optimizer
from decaylab.training.build import build_network
from decaylab.training.held_layers import Selection, select
from decaylab.training.paths import LayerPaths, followed_paths, paths_file

METRICS = ("test/accuracy", "test/loss", "train/loss", "jacobian_norm")
FOLDER = "attribution"
CHUNK = 250  # test images whose Jacobians are made together
GRADIENTS = 100_000
"""Gradients of outputs that the Jacobian norm at the end may take: one per class and image."""


def arm_store(runs: Path) -> RunStore:
    """Where the arms in a folder of runs lie."""
    return RunStore(runs / FOLDER)


def arm_spec(spec: RunSpec, arm: Arm, plan: Plan, seed: int, only: str = "all") -> RunSpec:
    """The run that an arm is; `spec` is the run with decay."""
    if spec.followed or not spec.held_decay or spec.norm_source:
        why = "it already follows another one"
        raise BadValue("the run", spec.id, "an ordinary one with decay", why)
    ordinary = replace(spec.resolved(), seed=seed)
    if arm == WITH:
        return ordinary
    without = replace(ordinary, decay="none", weight_decay=0.0, decay_scope="all")
    if arm == WITHOUT:
        return without
    if arm.size_every > 1:
        if only not in ("all", "conv"):
            raise DecaylabError(
                "norms set once per epoch are those of all layers before the last (the"
                f" paper's wn-conv), not of {only}: leave --only out, or set them at every step"
            )
        return replace(without, norm_source=ordinary.id)
    others = replace(ordinary, held_decay=False, held_layers=only)
    if not arm.follows:
        return others
    sources = {True: ordinary.id, False: others.id if plan.others else without.id}
    followed = {
        f"{path}_source": sources[path in arm.as_with]
        for path in plan.paths
        if path not in arm.free
    }
    if arm.decayed == "none":  # then nothing says which layers are held but their names
        layers = ordinary.decay_scope if only == "all" else only
        return RunSpec.from_mapping({**_values(without), "held_layers": layers, **followed})
    return RunSpec.from_mapping({**_values(others), **followed})


def _values(spec: RunSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def selection_for(spec: RunSpec, only: str = "all") -> Selection:
    """What of a run with decay is held."""
    if not spec.weight_decay:
        raise Lacks("this run", "weight decay", "give one whose decay has effects to attribute")
    facts = facts_of(spec.data)
    model = build_network(spec, facts.classes, *facts.shape[:2])
    return select(model, build_optimizer(spec, model), only.split(",") if "," in only else only)


def attribute_spec(
    spec: RunSpec,
    *,
    store: RunStore,
    options: WorkerOptions,
    seeds: Sequence[int] = (0, 1, 2),
    only: str = "all",
    extra: Sequence[Arm] = (),
    metric: str = METRICS[0],
    tier: str = "custom",
    silent: bool = False,
) -> Attribution:
    """Train the arms of a spec that are not yet there, and work out the shares.

    `store` holds the arms (`arm_store`); the same call again continues. Those that others follow
    come first. `OutOfTime` where `options.seconds` were not enough.
    """
    selection = selection_for(spec, only)
    plan = plan_for(selection, extra)
    arms = _arms(spec, plan, seeds, only)
    clock, progress = Clock(options), ArmProgress(len(arms), silent=silent)
    results: dict[tuple[int, str], ArmResult] = {}
    paths_by_seed: dict[int, dict[str, LayerPaths]] = {seed: {} for seed in seeds}
    for follows in (False, True):
        stage = {key: s for key, (arm, s) in arms.items() if arm.follows == follows}
        lost = {seed for (seed, _), result in results.items() if not result.finite}
        stage = {key: s for key, s in stage.items() if key[0] not in lost}
        train_all(stage, store, clock.options(), progress, tier)
        for key, its_spec in stage.items():
            seed, name = key
            results[key], paths = arm_result(store, name, its_spec)
            if paths is not None:
                paths_by_seed[seed][name] = paths
    return Attribution(
        plan=plan,
        layers=tuple(selection.weights),
        notes=selection.notes,
        others=tuple(selection.others),
        seeds=tuple(seeds),
        steps=max(
            (paths.steps for by_arm in paths_by_seed.values() for paths in by_arm.values()),
            default=0,
        ),
        results=tuple(results[key] for key in arms if key in results),
        metric=metric,
        paths=paths_by_seed,
    )


def _arms(
    spec: RunSpec, plan: Plan, seeds: Sequence[int], only: str
) -> dict[tuple[int, str], tuple[Arm, RunSpec]]:
    """Seed and name -> an arm and its run."""
    return {
        (seed, arm.name): (arm, arm_spec(spec, arm, plan, seed, only))
        for seed in seeds
        for arm in plan.arms()
    }


def arm_specs(
    spec: RunSpec, seeds: Sequence[int], only: str, extra: Sequence[Arm]
) -> list[RunSpec]:
    """The runs of all arms, each once."""
    plan = plan_for(selection_for(spec, only), extra)
    return list({s.id: s for _, s in _arms(spec, plan, seeds, only).values()}.values())


class OutOfTime(DecaylabError):
    """The time was up with runs left; the same command again continues."""

    exit_code = RUNS_LEFT


class Clock:
    """The options of a worker, with the time that is left of them."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options, self._began = options, time.monotonic()

    def options(self) -> WorkerOptions:
        """As they were given, but for the seconds that have passed."""
        seconds = self._options.seconds
        if seconds is None:
            return self._options
        return replace(self._options, seconds=seconds - (time.monotonic() - self._began))


def planned_arms(specs: Iterable[RunSpec], tier: str) -> list[PlannedRun]:
    """Arms as runs to make: all record their paths, and their Jacobian norm at the end."""
    return [
        PlannedRun(
            spec,
            purposes=("attribution",),
            tier=tier,
            epoch_probe=_jacobian_at_end,
            record_paths=True,
        )
        for spec in specs
    ]


def train_all(
    specs: Mapping[tuple[int, str], RunSpec],
    store: RunStore,
    options: WorkerOptions,
    progress: ArmProgress,
    tier: str = "custom",
) -> None:
    """Train what is not finished, or wait for who does; a run that diverges is left."""
    names = {spec.id: f"seed {seed}, {arm}" for (seed, arm), spec in specs.items()}
    planned = planned_arms(
        [spec for spec in specs.values() if not _ended(store.folder(spec.id))], tier
    )
    progress.found(len(specs) - len(planned))
    worker = Worker(planned, store, replace(options, stay=True))
    worker.check_data()
    for event in worker.run():
        name, state = names[event.run.spec.id], event.progress
        if event.kind == "epoch" and state is not None:
            progress.running(name, state.step / state.steps)
        elif event.kind == "finished" and state is not None:
            outcome = words.outcome(METRICS[0], state.values.get(METRICS[0], math.nan))
            progress.ended(name, outcome, state.seconds)
        elif event.kind == "failed":
            progress.found(1)
    left = [run.spec.id for run in planned if not _ended(store.folder(run.spec.id))]
    if worker.outcome.out_of_time:
        raise OutOfTime(
            f"the time is up with {len(left)} of these runs left, and more may follow: run the"
            " same command again to resume"
        )
    if left:
        why = worker.outcome.failed.get(left[0], "another process trains it")
        raise NotFinished(left[0], f"run the same command again ({why})")


def _ended(folder: RunFolder) -> bool:
    manifest = folder.manifest()
    return manifest is not None and manifest.status in ("finished", "diverged")


def arm_result(store: RunStore, arm: str, spec: RunSpec) -> tuple[ArmResult, LayerPaths | None]:
    """What came of a recorded arm, and its paths if it came to its end."""
    folder = store.folder(spec.id)
    if not folder.is_finished():
        return ArmResult(arm, spec.seed, {}, finite=False), None
    rows = folder.rows().rows
    last = max(row.step for row in rows)
    values = {row.name: row.value for row in rows if row.step == last}
    taken = LayerPaths.load(paths_file(folder))
    result = ArmResult(
        arm=arm,
        seed=spec.seed,
        metrics={name: values[name] for name in METRICS if name in values},
        errors=held_errors(taken, followed_paths(store, spec.followed)),
        seconds=max(row.seconds for row in rows),
        finite=taken.finite(),
    )
    return result, taken


def _jacobian_at_end(run: TrainingRun) -> dict[str, float]:
    """Table 2's Jacobian norm at the end: exact, in eval mode, on the whole test set.

    On the first 1,000 test images of CIFAR-100, where each has a hundred gradients: all arms have
    the same, so what differs between arms is decay's doing.
    """
    if run.complete_epochs != run.epochs:
        return {}
    data = run.data
    count = GRADIENTS // data.classes
    test = Split(data.test.images[:count], data.test.labels[:count])
    batches = evaluation_batches(test, batch_size=8 * CHUNK, mean=data.mean, std=data.std)
    norms = [probes.jacobian_norms(run.model, images, chunk=CHUNK) for images, _ in batches]
    return {"jacobian_norm": float(torch.cat(norms).mean())}
