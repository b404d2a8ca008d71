"""`attribute`: train the arms of every seed, in any loop, and work out the shares."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decaylab.attribution.arms import (
    OTHERS,
    WITH,
    WITHOUT,
    Arm,
    ArmResult,
    Make,
    Plan,
    loop_from,
    plan_for,
    run_arm,
    seeded,
)
from decaylab.attribution.result import Attribution, check_same_start
from decaylab.errors import AT_LEAST_ONE, Mismatch
from decaylab.records.files import disk_errors, replace_text
from decaylab.training.held_layers import Selection, select
from decaylab.training.paths import LayerPaths

REFERENCES = (WITH, WITHOUT, OTHERS)


def attribute(
    make: Make,
    *,
    steps: int,
    seeds: int | Sequence[int] = 3,
    metric: str | None = None,
    only: str | Sequence[str] = "all",
    extra: Sequence[Arm] = (),
    folder: str | Path | None = None,
    report: Callable[[ArmResult], None] | None = None,
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

    Args:
        make: sets up the loop for a seed.
        steps: training steps per arm.
        seeds: how many, from 0, or which.
        metric: the metric of `total` and `shares`; the first that `evaluate` returns by default.
        only: which layers are held: "all" that decay, "conv" (those before the last), "fc" (the
            last), or names.
        extra: further arms, such as `arms.SIZE_FREE_ROTATION`.
        folder: keeps the results and paths of finished arms, which are then not trained again.
        report: called with each arm's result as it finishes.
    """
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    AT_LEAST_ONE.check("seeds", len(numbers))
    AT_LEAST_ONE.check("steps", steps)
    with seeded(numbers[0]):
        model, optimizers, *_ = loop_from(make, numbers[0])
        selection = select(model, optimizers, only)
        del model, optimizers
    plan = plan_for(selection, extra)
    files = None if folder is None else _ArmFiles(Path(folder), _setting(selection, plan, steps))
    results: list[ArmResult] = []
    paths: dict[int, dict[str, LayerPaths]] = {}
    for seed in numbers:
        seed_paths = paths.setdefault(seed, {})
        for arm in plan.arms():
            if arm.follows and not _can_follow(seed_paths, plan):
                continue
            stored = files.load(arm, seed) if files else None
            result, seed_paths[arm.name] = stored or run_arm(
                make, arm, seed, steps, seed_paths, plan, only
            )
            if files and stored is None:
                files.save(arm, result, seed_paths[arm.name])
            results.append(result)
            check_same_start(results)
            if report is not None:
                report(result)
    chosen = metric or next(iter(results[0].metrics))
    attribution = Attribution(
        plan=plan,
        layers=tuple(selection.weights),
        notes=selection.notes,
        others=tuple(selection.others),
        seeds=numbers,
        steps=steps,
        results=tuple(results),
        metric=chosen,
        paths=paths,
    )
    attribution.shares_of(chosen)  # an unknown metric is refused here
    return attribution


def _can_follow(paths: dict[str, LayerPaths], plan: Plan) -> bool:
    """Whether both runs that arms follow stayed finite."""
    return all(paths[arm.name].finite() for arm in (WITH, plan.base))


def _setting(selection: Selection, plan: Plan, steps: int) -> dict[str, Any]:
    """What must be the same for arms to be taken from a folder."""
    optimizers = [type(optimizer).__name__ for optimizer in selection.optimizers]
    shapes = {n: [list(p.shape) for p in parts] for n, parts in selection.weights.items()}
    return {"steps": steps, "paths": list(plan.paths), "optimizers": optimizers, "layers": shapes}


class _ArmFiles:
    """The finished arms of an attribution in a folder: one file of numbers and one of paths each.

    The numbers are written last: an arm that was killed is trained again.
    """

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.folder = folder
        path = folder / "attribution.json"
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            for key, value in setting.items():
                if stored.get(key) != value:
                    values = {f"the attribution in {folder}": stored.get(key), "this one": value}
                    raise Mismatch(key, values, "give another folder")
            return
        with disk_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(setting, indent=2) + "\n")

    def _files(self, arm: Arm, seed: int) -> tuple[Path, Path]:
        name = arm.name.replace(" + ", "+").replace(", ", "-").replace(" ", "-")
        stem = self.folder / f"seed-{seed}"
        return stem / f"{name}.json", stem / f"{name}.safetensors"

    def load(self, arm: Arm, seed: int) -> tuple[ArmResult, LayerPaths] | None:
        numbers, paths = self._files(arm, seed)
        if not numbers.exists():
            return None
        return ArmResult(**json.loads(numbers.read_text(encoding="utf-8"))), LayerPaths.load(paths)

    def save(self, arm: Arm, result: ArmResult, taken: LayerPaths) -> None:
        numbers, paths = self._files(arm, result.seed)
        with disk_errors(numbers):
            numbers.parent.mkdir(exist_ok=True)
        taken.save(paths)
        replace_text(numbers, json.dumps(asdict(result), indent=2) + "\n")
