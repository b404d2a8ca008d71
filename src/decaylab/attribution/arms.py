"""The arms of an attribution: each path follows the run with decay or the one without.

With k paths (size, rotation; under K-FAC also damping) there are 2^k arms. Two of them are
ordinary runs, one with decay and one without. The others have no decay on the held layers and
follow one run or the other in each path. All arms of a seed have the same starting weights and the
same batches.

Decay may also act on parameters that are not held (biases, gains, layers left out). These decay in
every arm but the run without decay; one more arm, in which only they decay, shows how much they
carry. L2 before a preconditioner changes the direction of a step, which no path carries. Then one
more arm, without decay, follows all paths of the run with decay, and what it does not recover is
due to the direction.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from decaylab.attribution.reasons import LIMIT, Fault, Unused
from decaylab.errors import BadValue, Lacks, WrongType
from decaylab.networks.sharded import whole
from decaylab.training.held_layers import Selection, select
from decaylab.training.interventions import Intervention
from decaylab.training.paths import LayerPaths, Targets
from decaylab.training.world import World, world_of

Path = Literal["size", "rotation", "damping"]
PATHS: tuple[Path, ...] = ("size", "rotation", "damping")
Loop = tuple[nn.Module, Any, Callable[[], Any], Callable[[], Mapping[str, float]]]
"""Model, optimizer or optimizers, a function that takes one step, one that evaluates."""
Make = Callable[[int], Loop]
REHEARSED = 3
"""So many steps are taken twice before the first arm, to see that they are the same."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: its name in results and files.
        as_with: the paths that are as with decay; the other followed ones are as without.
        follows: whether it follows paths at all; an ordinary run does not.
        decayed: the parameters that decay: all that do, those not held, or none.
        free: paths that are not followed.
        size_every: after how many steps the size is set.
    """

    name: str
    as_with: frozenset[Path] = frozenset()
    follows: bool = True
    decayed: Literal["all", "others", "none"] = "others"
    free: frozenset[Path] = frozenset()
    size_every: int = 1


WITH = Arm("with decay", follows=False, decayed="all")
WITHOUT = Arm("without decay", follows=False, decayed="none")
OTHERS = Arm("decay on the others", follows=False, decayed="others")
SIZE_FREE_ROTATION = Arm(
    "norms alone", frozenset({"size"}), decayed="none", free=frozenset({"rotation", "damping"})
)
"""No decay at all, but the norms of the run with it, at every step; all else is what follows.

With `only="conv"` it is the paper's wn-conv (Fig. 4), but that the paper sets norms once an epoch.
"""


def norms_alone(every: int = 1) -> Arm:
    """`SIZE_FREE_ROTATION` with norms set only at this interval of steps."""
    if every == 1:
        return SIZE_FREE_ROTATION
    return replace(SIZE_FREE_ROTATION, name="norms alone, each epoch", size_every=every)


@dataclass(frozen=True)
class Plan:
    """The arms of every seed, those that others follow first.

    Attributes:
        paths: the paths that are varied.
        others: whether parameters that are not held decay.
        direction: whether decay changes directions, so that an arm follows all paths.
        extra: arms outside the design.
    """

    paths: tuple[Path, ...]
    others: bool = False
    direction: bool = False
    extra: tuple[Arm, ...] = ()

    @property
    def base(self) -> Arm:
        """The run without decay on the held layers."""
        return OTHERS if self.others else WITHOUT

    @property
    def all_paths(self) -> Arm:
        """The arm with every path as with decay."""
        return self.crossed(self.paths) if self.direction else WITH

    def crossed(self, as_with: Sequence[Path]) -> Arm:
        """The arm with these paths as with decay, the others as without."""
        ordered = [path for path in self.paths if path in as_with]
        if not ordered:
            return self.base
        if len(ordered) == len(self.paths) and not self.direction:
            return WITH
        return Arm(" + ".join(ordered), frozenset(ordered))

    def arms(self) -> list[Arm]:
        """All of them."""
        subsets = [chosen for k in range(len(self.paths) + 1) for chosen in _chosen(self.paths, k)]
        arms = [WITH, WITHOUT, self.base, *(self.crossed(chosen) for chosen in subsets)]
        return list(dict.fromkeys([*arms, *self.extra]))


def _chosen(paths: Sequence[Path], count: int) -> list[tuple[Path, ...]]:
    return list(combinations(paths, count))


def plan_for(selection: Selection, extra: Sequence[Arm] = ()) -> Plan:
    """The plan for what was selected."""
    paths = PATHS if selection.damping else PATHS[:2]
    return Plan(paths, bool(selection.others), selection.direction, tuple(extra))


@dataclass(frozen=True)
class ArmResult:
    """The result of one arm of one seed.

    Attributes:
        metrics: the numbers of `evaluate` after the last step.
        errors: path -> layer -> relative error of the arm: the largest deviation of a size or a
            damping; for angles, the root mean square deviation relative to that of the angles.
        seconds: how long its steps took.
        start: a fingerprint of the weights before the first step.
        first_losses: what the first steps returned, if numbers.
        finite: whether its weights stayed finite.
    """

    arm: str
    seed: int
    metrics: Mapping[str, float]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    start: float = 0.0
    first_losses: Sequence[float] = ()
    finite: bool = True

    def unused_for(self, metric: str) -> Unused | None:
        """Why this arm is not used for a metric; None if it is."""
        if not self.finite:
            return Unused(self.arm, self.seed, Fault.DIVERGED)
        if not math.isfinite(self.metrics.get(metric, math.nan)):
            return Unused(self.arm, self.seed, Fault.NO_NUMBER, metric=metric)
        misses = [
            (e, path, layer)
            for path, by_layer in self.errors.items()
            for layer, e in by_layer.items()
        ]
        worst = max(misses, default=(0.0, "", ""))
        if not worst[0] <= LIMIT:
            return Unused(
                self.arm, self.seed, Fault.MISSED, path=worst[1], layer=worst[2], error=worst[0]
            )
        return None


class TrainedArm(NamedTuple):
    """An arm that was just trained.

    Attributes:
        result: its result. paths: what its held layers went through.
        selection: which they are. world: the processes that trained it together, all of which get
            the first one's result and paths.
    """

    result: ArmResult
    paths: LayerPaths
    selection: Selection
    world: World


def run_arm(
    make: Make,
    arm: Arm,
    seed: int,
    steps: int,
    *,
    only: str | Sequence[str] = "all",
    targets: Targets = Targets(),  # noqa: B008 - frozen
    progress: Callable[[float], None] = lambda part: None,
) -> TrainedArm:
    """Train one arm, which follows `targets`."""
    with seeded(seed):
        model, optimizers, step, evaluate = loop_from(make, seed)
        world = world_of(model)
        selection = select(model, optimizers, only)
        start = _fingerprint(selection.held)
        intervention = Intervention(
            selection.optimizers, selection.weights, steps, targets, undecayed(arm, selection)
        )
        began = time.perf_counter()
        first_losses = []
        with intervention:
            for taken in range(steps):
                try:
                    loss = step()
                except StopIteration as error:
                    remedy = f"let it start over, so that there are batches for all {steps}"
                    raise Lacks(f"step() after {taken} steps", "next batch", remedy) from error
                if taken < REHEARSED and (number := _number(loss)) is not None:
                    first_losses.append(number)
                progress((taken + 1) / steps)
            recorded = intervention.paths()
        seconds = time.perf_counter() - began
        metrics = _numbers(evaluate())
    result = ArmResult(
        arm=arm.name,
        seed=seed,
        metrics=metrics,
        errors=held_errors(recorded, targets),
        seconds=seconds,
        start=start,
        first_losses=first_losses,
        finite=recorded.finite(),
    )
    trained = of_state(world.from_first(as_state(result, recorded)))
    return TrainedArm(*trained, selection, world)


def as_state(result: ArmResult, paths: LayerPaths) -> list[dict[str, Any]]:
    """An arm's result and paths as nested lists, numbers and tensors."""
    return [asdict(result), paths.as_state()]


def of_state(state: Sequence[Mapping[str, Any]]) -> tuple[ArmResult, LayerPaths]:
    """Undo `as_state`."""
    numbers, paths = state
    return ArmResult(**numbers), LayerPaths.of_state(paths)


def targets_for(arm: Arm, plan: Plan, paths: Mapping[str, LayerPaths]) -> Targets:
    """The recorded paths that an arm follows."""
    if not arm.follows:
        return Targets()
    followed = {
        path: paths[WITH.name if path in arm.as_with else plan.base.name]
        for path in plan.paths
        if path not in arm.free
    }
    return Targets(**followed, size_every=arm.size_every)


def undecayed(arm: Arm, selection: Selection) -> list[Tensor]:
    """The parameters that do not decay in an arm."""
    if arm.decayed == "all":
        return []
    return selection.held + ([*selection.others.values()] if arm.decayed == "none" else [])


def held_errors(taken: LayerPaths, targets: Targets) -> dict[str, dict[str, float]]:
    """How far a run missed the paths it should follow: path -> layer -> relative error."""
    errors: dict[str, dict[str, float]] = {}
    steps, layers = taken.steps, taken.layers
    if targets.size is not None:
        aim = _columns(targets.size.sizes, targets.size, layers)[: steps + 1]
        deviations = ((taken.sizes - aim) / aim).abs()[:: targets.size_every]
        errors["size"] = _named(layers, deviations.max(0).values)
    if targets.rotation is not None:
        aim = _columns(targets.rotation.angles, targets.rotation, layers)[:steps]
        squares = (taken.angles - aim).square().sum(0)
        scale = aim.square().sum(0)
        relative = torch.where(scale > 0, squares / scale, torch.where(squares > 0, torch.inf, 0.0))
        errors["rotation"] = _named(layers, relative.sqrt())
    if targets.damping is not None and targets.damping.dampings is not None:
        assert taken.dampings is not None
        aim = _columns(targets.damping.dampings, targets.damping, layers)[: steps + 1]
        deviations = ((taken.dampings - aim) / aim).abs().nan_to_num(0.0)
        errors["damping"] = _named(layers, deviations.max(0).values)
    return errors


def _columns(table: Tensor, source: LayerPaths, layers: Sequence[str]) -> Tensor:
    return table[:, [source.layers.index(layer) for layer in layers]]


def _named(layers: Sequence[str], values: Tensor) -> dict[str, float]:
    return dict(zip(layers, values.tolist(), strict=True))


MADE = "(model, optimizer or list of optimizers, step, evaluate)"


def loop_from(make: Make, seed: int) -> Loop:
    """What `make(seed)` returns, checked."""
    made = make(seed)
    if not isinstance(made, tuple | list) or len(made) != len(get_args(Loop)):
        raise WrongType("what make(seed) returns", made, MADE)
    model, optimizers, step, evaluate = made
    if not isinstance(model, nn.Module) or not callable(step) or not callable(evaluate):
        types = (type(model), type(optimizers), type(step), type(evaluate))
        remedy = "step and evaluate must be functions without arguments"
        raise BadValue("what make(seed) returns", types, MADE, remedy)
    return model, optimizers, step, evaluate


def _numbers(evaluated: Any) -> dict[str, float]:
    """What `evaluate()` returns, checked."""
    wanted = 'a dict of numbers such as {"test loss": 0.3}'
    if not isinstance(evaluated, Mapping) or not evaluated:
        raise BadValue("what evaluate() returns", evaluated, wanted)
    numbers = {str(name): _number(value) for name, value in evaluated.items()}
    if wrong := [name for name, value in numbers.items() if value is None]:
        raise BadValue(f"{wrong[0]} in what evaluate() returns", evaluated[wrong[0]], "a number")
    return {name: value for name, value in numbers.items() if value is not None}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators; the caller's states are restored afterwards."""
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _fingerprint(parts: Sequence[Tensor]) -> float:
    """A number that tells the weights of two starts apart."""
    values = [whole(part.detach()).double().flatten().cpu() for part in parts]
    return float(sum(value @ torch.linspace(1, 2, len(value)).double() for value in values))


def _number(value: Any) -> float | None:
    """A number of Python, numpy or torch as a float; None if it is something else."""
    if isinstance(value, Tensor | np.ndarray):
        return float(value.item()) if math.prod(value.shape) == 1 else None
    return float(value) if isinstance(value, int | float | np.number) else None
