"""`attribute`: train the arms of every seed, in any loop, and work out the shares."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from decaylab.attribution import words
from decaylab.attribution.arms import (
    REHEARSED,
    WITH,
    Arm,
    ArmResult,
    Make,
    Plan,
    TrainedArm,
    as_state,
    of_state,
    plan_for,
    run_arm,
    targets_for,
)
from decaylab.attribution.progress import ArmProgress
from decaylab.attribution.result import Attribution
from decaylab.errors import AT_LEAST_ONE, BadValue, DecaylabError, Mismatch, check_name
from decaylab.records.files import disk_errors, json_text, replace_text
from decaylab.training.held_layers import Selection
from decaylab.training.paths import LayerPaths
from decaylab.training.world import World


def attribute(
    make: Make,
    *,
    steps: int,
    seeds: int | Sequence[int] = 3,
    metric: str | None = None,
    only: str | Sequence[str] = "all",
    extra: Sequence[Arm] = (),
    folder: str | Path | None = None,
    silent: bool = False,
) -> Attribution:
    """Find out by experiment which path weight decay acts through: size, rotation, damping.

    `make(seed)` returns `(model, optimizer or list, step, evaluate)`: a loop with weight decay on,
    not yet started. `step()` takes one training step and may return its loss; `evaluate()` returns
    a dict of numbers. `make` is called once per arm (one training run of the experiment), after
    torch's, numpy's and Python's generators have been seeded, and must give the same weights and
    batches each time. To start at a checkpoint, let it load one.

    Every arm takes `steps` steps: 4 arms per seed, 8 under K-FAC, one more if parameters decay
    that are not held, and one more if L2 enters before a preconditioner. See
    `decaylab.attribution.arms` for the design and `decaylab.attribution.shares` for the shares.

    Before the first arm, a few steps and an evaluation are rehearsed twice, which refuses a loop
    that differs from call to call, an optimizer that is not stepped once per `step()`, and an
    unknown metric. While arms train, stderr shows their progress and how long the rest will take.

    Args:
        make: sets up the loop for a seed.
        steps: training steps per arm.
        seeds: how many seeds, counted from 0, or a list of them.
        metric: the metric of `total` and `shares`; the first that `evaluate` returns by default.
        only: which layers are held: "all" that decay, "conv" (those before the last), "fc" (the
            last), or names.
        extra: further arms, such as `arms.SIZE_FREE_ROTATION`.
        folder: keeps the results and paths of finished arms, so they are not trained again.
            Processes that train other seeds may share it.
        silent: print nothing while arms are trained.
    """
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    AT_LEAST_ONE.check("seeds", len(numbers))
    AT_LEAST_ONE.check("steps", steps)
    if len(set(numbers)) < len(numbers):
        raise BadValue("seeds", list(numbers), "seeds that all differ")
    rehearsed = rehearse(make, numbers, min(steps, REHEARSED), only)
    rehearsal, selection, world = rehearsed.result, rehearsed.selection, rehearsed.world
    if metric is not None:
        check_name("metric", metric, list(rehearsal.metrics))
    plan = plan_for(selection, extra)
    setting = _setting(selection, plan, steps)
    files = None if folder is None else _ArmFiles(Path(folder), setting, world)
    progress = ArmProgress(len(numbers) * len(plan.arms()), silent=silent or not world.first)
    results: list[ArmResult] = []
    paths: dict[int, dict[str, LayerPaths]] = {}
    for seed in numbers:
        seed_paths = paths.setdefault(seed, {})
        first = rehearsal if seed == numbers[0] else None
        for arm in plan.arms():
            if arm.follows and not _can_follow(seed_paths, plan):
                continue
            name = f"seed {seed}, {arm.name}"
            stored = files.load(arm, seed) if files else None
            if stored is not None:
                result, seed_paths[arm.name] = stored
                progress.found(1)
            else:
                result, seed_paths[arm.name], *_ = run_arm(
                    *(make, arm, seed, steps),
                    only=only,
                    targets=targets_for(arm, plan, seed_paths),
                    progress=partial(progress.running, name),
                )
            first = first or result
            check_same_start(first, result, None if stored is None else folder)
            results.append(result)
            if stored is not None:
                continue
            if files is not None:
                files.save(arm, result, seed_paths[arm.name])
            shown = metric or next(iter(result.metrics))
            progress.ended(name, words.outcome(shown, result.metrics[shown]), result.seconds)
    return Attribution(
        plan=plan,
        layers=tuple(selection.weights),
        notes=selection.notes,
        others=tuple(selection.others),
        seeds=numbers,
        steps=steps,
        results=tuple(results),
        metric=metric or next(iter(results[0].metrics)),
        paths=paths,
    )


def rehearse(
    make: Make, seeds: Sequence[int], steps: int, only: str | Sequence[str] = "all"
) -> TrainedArm:
    """The first steps of the run with decay, taken twice; a second seed must give another run."""
    rehearsed = run_arm(make, WITH, seeds[0], steps, only=only)
    first = rehearsed.result
    check_same_start(first, run_arm(make, WITH, seeds[0], steps, only=only).result)
    for seed in seeds[1:2]:
        other = run_arm(make, WITH, seed, steps, only=only).result
        if replace(other, seed=first.seed, seconds=first.seconds) == first:
            raise DecaylabError(
                f"make({first.seed}) and make({seed}) are the same run: let make use its"
                " argument to seed its weights or its batches"
            )
    return rehearsed


def check_same_start(first: ArmResult, result: ArmResult, folder: Any = None) -> None:
    """Refuse an arm that started with other weights or batches than the first of its seed.

    All arms have the first loss in common, and runs with decay those after it. `folder`: where the
    arm was found, if it was.
    """

    def check(what: str, expected: float, value: float, tolerance: float, remedy: str) -> None:
        if math.isclose(expected, value, rel_tol=tolerance) or math.isnan(expected + value):
            return
        owners = (f"one call of make({result.seed})", "another")
        if folder is not None:
            owners, remedy = ("this loop", f"the arms in {folder}"), "give another folder"
        values = (f"{number:.6g}" for number in (expected, value))
        raise Mismatch(what, dict(zip(owners, values, strict=True)), remedy)

    remedy = "draw them from generators that make seeds, or from torch's, which is already seeded"
    check("a weighted sum of the weights they start from", first.start, result.start, 1e-6, remedy)
    remedy = "let make give the same batches in the same order for the same seed"
    shared = len(first.first_losses) if result.arm == first.arm else 1
    losses = zip(first.first_losses[:shared], result.first_losses, strict=False)
    for step, (expected, value) in enumerate(losses, start=1):
        check(f"the loss of step {step}", expected, value, 1e-3, remedy)


def _can_follow(paths: dict[str, LayerPaths], plan: Plan) -> bool:
    """Whether both runs that arms follow stayed finite."""
    return all(paths[arm.name].finite() for arm in (WITH, plan.base))


def _setting(selection: Selection, plan: Plan, steps: int) -> dict[str, Any]:
    """What must be the same for arms to be taken from a folder: what -> value, as in JSON."""
    setting: dict[str, Any] = {"steps": steps, "paths": list(plan.paths)}
    setting["layers"] = {
        layer: [list(part.shape) for part in parts] for layer, parts in selection.weights.items()
    }
    for optimizer in selection.optimizers:
        name = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            place = f"{name}'s group {index}" if len(optimizer.param_groups) > 1 else name
            for key, value in group.items():
                if isinstance(value, bool | int | float | str):
                    setting[f"{key} of {place}"] = value
    return setting


class _ArmFiles:
    """The finished arms of an attribution in a folder: one file of numbers and one of paths each.

    The numbers are written last: an arm that was killed is trained again. Of processes that train
    together, the first reads and writes for all.
    """

    def __init__(self, folder: Path, setting: dict[str, Any], world: World) -> None:
        self.folder, self._world = folder, world
        world.by_first(lambda: self._open(setting))

    def _open(self, setting: dict[str, Any]) -> None:
        path = self.folder / "attribution.json"
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            for key in dict.fromkeys([*setting, *stored]):
                if stored.get(key) != setting.get(key):
                    values = {f"the arms in {self.folder}": stored.get(key)}
                    raise Mismatch(
                        key, {**values, "this loop": setting.get(key)}, "give another folder"
                    )
            return
        with disk_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(setting, indent=2) + "\n")

    def _files(self, arm: Arm, seed: int) -> tuple[Path, Path]:
        name = arm.name.replace(" + ", "+").replace(", ", "-").replace(" ", "-")
        stem = self.folder / f"seed-{seed}"
        return stem / f"{name}.json", stem / f"{name}.safetensors"

    def load(self, arm: Arm, seed: int) -> tuple[ArmResult, LayerPaths] | None:
        numbers, paths = self._files(arm, seed)

        def read() -> list[dict[str, Any]] | None:
            if not numbers.exists():
                return None
            values = _with_nan(json.loads(numbers.read_text(encoding="utf-8")))
            return as_state(ArmResult(**values), LayerPaths.load(paths))

        state = self._world.by_first(read)
        return None if state is None else of_state(state)

    def save(self, arm: Arm, result: ArmResult, taken: LayerPaths) -> None:
        numbers, paths = self._files(arm, result.seed)

        def write() -> None:
            with disk_errors(numbers):
                numbers.parent.mkdir(exist_ok=True)
            taken.save(paths)
            replace_text(numbers, json_text(asdict(result), indent=2) + "\n")

        self._world.by_first(write)


def _with_nan(value: Any) -> Any:
    """What was written, where nothing is None: null was nan or inf."""
    if isinstance(value, dict):
        return {key: _with_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value
