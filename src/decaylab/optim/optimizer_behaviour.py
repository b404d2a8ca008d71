"""What an optimizer that is not torch's does to a weight, found by letting a new one step.

Two things decide what weight decay does under an optimizer, and its param groups rarely say them:
which operator its decay is (`decaylab.optim.decay_operator`), and how far its steps turn a
scale-invariant weight of another norm (the power of |W| in the effective learning rate, Eq. 9).
Both can be measured: a new optimizer of the same class, with the same settings, steps a small
matrix. With a matrix a times as large and gradients 1/a times as large, as a scale-invariant loss
would give, a step turns the matrix a^-power times as far.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from decaylab.curvature.guards import several
from decaylab.optim.decay_operator import (
    HALVED,
    LR,
    NEARLY_NONE,
    NONE,
    STEPS,
    UNKNOWN,
    WEIGHT_DECAY,
    DecayOperator,
    Place,
    decay_operator,
    set_rate,
    times_among,
)

LARGER = 4.0  # the a above
SIZES = ((1.0, 0.1, 0.0), (0.3, 1.0, 0.3))
"""Of the matrix, of gradients, and how much of the matrix is in these (0: an invariant loss).

What depends on them, as a clip, an eps or AdamP's projection does, is neither law nor kind."""
SETTING = bool | str | float | tuple  # of a group; whole numbers may count steps
MOMENTUM_STEPS = 200  # after which the corrections of a beginning are small
TOLERANCE = 0.02  # relative; of the power: 0.05
WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")
ZERO = "torch.distributed.optim.zero_redundancy_optimizer"

USUAL_SETTING = "weight_decay"
NO_DECAY = ("none", "ignored", "rescaled", "unknown")

_settings: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()
_measured: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[Any, ...], Behaviour]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Behaviour:
    """What was found; None if it fits nothing known, or the optimizer could not be tested.

    Attributes:
        decay: "l2", "decoupled" or "independent", each as it is usually meant; None for others.
        power: 2 (SGD), 1 (Adam) or 0 (K-FAC, LAMB): the effective learning rate is lr/|W|^power.
        second_moment: whether it keeps a running mean of squared gradients, as Adam does.
        as_sgd: whether its steps are those of torch's SGD with the same decay and momentum.
        momentum: the part of a step that the next one keeps, but for a factor of both.
        operator: what its decay is in full.
    """

    decay: str | None = None
    power: int | None = None
    second_moment: bool = False
    as_sgd: bool = False
    momentum: float | None = field(default=None, compare=False)
    operator: DecayOperator = field(default=UNKNOWN, compare=False, repr=False)


USUAL = ("l2", "decoupled", "independent")


def behaviour(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Behaviour:
    """What this optimizer does with the settings of one of its param groups; tested once.

    The optimizer itself, its parameters and the random generators are left alone. The result is
    reused while flags, the presence of momentum and decay, and whether all parameters are vectors
    stay the same; numbers that a schedule may change do not matter. One that sends something
    to other processes, or makes a process group, cannot be tested by one of them: it is not known.
    """
    telling = [item for item in group.items() if isinstance(item[1], bool | str)]
    names = ("momentum", decay_setting(optimizer, group))
    telling += [(name, bool(group.get(name))) for name in names]
    telling += [("vectors", _vectors(group)), ("formats", _formats(optimizer, group))]
    by_settings, key = _measured.setdefault(optimizer, {}), tuple(sorted(map(str, telling)))
    if key not in by_settings:
        by_settings[key] = _tried(optimizer, group)
    return by_settings[key]


def decay_setting(optimizer: torch.optim.Optimizer | None, group: Mapping[str, Any]) -> str:
    """The setting of a param group that says how strong its decay is: "weight_decay".

    Some name it otherwise (`wd`): where there is none of that name, the one that a new optimizer's
    decay is found to follow.
    """
    if optimizer is None or USUAL_SETTING in group:
        return USUAL_SETTING
    optimizer = unwrapped(optimizer)
    if is_torchs(optimizer):
        return USUAL_SETTING
    if optimizer not in _settings:
        numbers = [name for name, value in group.items() if type(value) in (int, float)]
        tried = {
            name: _in_some_place(optimizer, group, _operator, name)
            for name in numbers
            if name != "lr"
        }
        decaying = (name for name, seen in tried.items() if seen and seen.kind not in NO_DECAY)
        _settings[optimizer] = next(decaying, USUAL_SETTING)
    return _settings[optimizer]


def momentum_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | None:
    """Its setting; of one that names it otherwise, or not at all, what was measured, or None."""
    optimizer = unwrapped(optimizer)
    named = group.get("momentum")
    if named is not None or is_torchs(optimizer):
        return float(named or 0.0)
    return behaviour(optimizer, group).momentum


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one of torch's own, which are known."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim.")


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that a wrapper of accelerate or Lightning holds; others may change what it does.

    Of torch's ZeroRedundancyOptimizer too, whose own has the parameters of this process alone: of
    the optimizer returned, take what it is and its state, not its param groups.
    """
    while type(optimizer).__module__.split(".")[0] in WRAPPERS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if type(optimizer).__module__ == ZERO:
        return unwrapped(vars(optimizer)["optim"])
    return optimizer


def _vectors(group: Mapping[str, Any]) -> bool:
    return bool(group["params"]) and all(parameter.ndim < 2 for parameter in group["params"])


def _formats(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[torch.dtype]:
    """The number formats of all parameters that are stepped together with the group's."""
    chosen = {id(parameter) for parameter in group["params"]}
    param_lists = [g["params"] for g in optimizer.param_groups]
    together = [
        params for params in param_lists if any(id(parameter) in chosen for parameter in params)
    ]
    return sorted({parameter.dtype for params in together for parameter in params}, key=str)


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Behaviour:
    setting = decay_setting(optimizer, group)
    operator = _in_some_place(optimizer, group, _operator, setting) or UNKNOWN
    measured = _in_some_place(optimizer, group, _experiment, setting) or Behaviour()
    usual = operator.kind in USUAL and operator.factor is not None
    usual = usual and abs((operator.factor or 0.0) - 1) < TOLERANCE
    return replace(measured, decay=operator.kind if usual else None, operator=operator)


Seen = TypeVar("Seen")


def _in_some_place(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    look: Callable[[Replica], Seen],
    setting: str,
) -> Seen | None:
    """On the CPU in double precision; else, some are written so, where the parameters are."""
    places = [(torch.device("cpu"), torch.float64)]
    places += [(parameter.device, torch.float32) for parameter in group["params"][:1]]
    for device, dtype in places:
        try:
            with undisturbed():
                return look(Replica(optimizer, group, device, dtype, setting))
        except Exception:  # whatever somebody's optimizer may raise
            continue
    return None


def _operator(replica: Replica) -> DecayOperator:
    if replica.decay_setting not in replica.group:
        return NONE
    shape = tuple(replica.matrix().shape)
    operator = decay_operator(replica.new, Place(shape, replica.device, replica.dtype))
    formats = _formats(replica.optimizer, replica.group)
    if len(formats) > 1 and operator.kind == "decoupled":
        places = [Place(shape, replica.device, dtype) for dtype in formats]
        times = times_among(replica.new, places)
        return operator if times is None else replace(operator, times=(times, times))
    return operator


class _NothingSent(TorchDispatchMode):
    """Refuses to send to other processes, which do not take part in a trial."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            _refuse()
        return function(*args, **(kwargs or {}))


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("the optimizer waits for other processes")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Nothing is sent in here, and no process group made, which others would have to make too."""
    if not several():
        yield
        return
    # every way to make a group names it, and not all ways are looked up in `torch.distributed`
    with (
        _NothingSent(),
        mock.patch.object(dist.distributed_c10d, "_process_group_name", _refuse),
    ):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing of a trial is noticed outside, and nothing from there acts on it."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng(devices=gpus),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),  # compiling would take longer than the steps
            mock.patch.dict(_global_optimizer_pre_hooks, clear=True),
            mock.patch.dict(_global_optimizer_post_hooks, clear=True),
            contextlib.redirect_stdout(io.StringIO()),
            _alone(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


@dataclass(frozen=True)
class Replica:
    """New optimizers like one group of `optimizer`, and matrices for them.

    decay_setting: the setting of the group that says how strong the decay is.
    """

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype
    decay_setting: str

    def matrix(self) -> Tensor:
        """Its entries are between 0.5 and 1.5, of either sign."""
        drawn = self.drawn(seed=0)
        return drawn.sign() * (0.5 + drawn.abs() % 1)

    def drawn(self, seed: int) -> Tensor:
        """Normal numbers in the shape of the matrix."""
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randn(8, 6, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn.flatten() if _vectors(self.group) else drawn).to(self.device, self.dtype)

    def new(self, weights: Sequence[Tensor], weight_decay: float) -> torch.optim.Optimizer:
        """One that steps these weights, with the settings of the group."""
        kind, defaults = type(self.optimizer), self.optimizer.defaults
        settings = {
            name: value
            for name, value in self.group.items()
            if name in defaults or (isinstance(value, SETTING) and name != "initial_lr")
        }
        settings["lr"] = LR
        if self.decay_setting in settings:
            settings[self.decay_setting] = weight_decay
        settings = copy.deepcopy(settings)
        available = _flags(self.optimizer) | settings
        arguments = {
            name: available[name]
            for name in inspect.signature(kind).parameters
            if name in available
        }
        replica = kind([{**settings, "params": list(weights)}], **arguments)
        if not _flags(replica).items() <= _flags(self.optimizer).items():
            raise TypeError("it was made in another way")
        if callable(train := getattr(replica, "train", None)):
            train()  # schedule-free ones step in this mode alone
        return replica

    def of_sgd(self, weight: Tensor, momentum: float | None) -> Replica:
        """The same of torch's SGD, with this momentum."""
        sgd = torch.optim.SGD([weight], weight_decay=WEIGHT_DECAY)
        if momentum:
            more = {name: self.group.get(name) or 0 for name in ("dampening", "nesterov")}
            sgd.param_groups[0].update(momentum=momentum, **more)
        group = sgd.param_groups[0]
        return replace(self, optimizer=sgd, group=group, decay_setting=USUAL_SETTING)

    def path(
        self,
        start: Tensor,
        gradients: Sequence[Tensor],
        weight_decay: float = 0.0,
    ) -> tuple[list[Tensor], bool]:
        """The matrix after each step, and whether squared gradients are remembered."""
        torch.default_generator.manual_seed(0)
        weight = start.clone().requires_grad_()
        nearly = NEARLY_NONE if self.group.get(self.decay_setting) else 0.0
        stepped = self.new([weight], weight_decay or nearly)
        points = [start]
        for gradient, lr in zip(gradients, HALVED, strict=True):
            set_rate(stepped, lr)
            weight.grad = gradient.clone()
            stepped.step()
            points.append(weight.detach().clone())
        return points, any("exp_avg_sq" in state for state in stepped.state.values())

    def momentum(self) -> float | None:
        """The a of step = a (step before) + b gradient; None if steps are of another form.

        The gradient's entries are 1 and -1, so that dividing by their sizes changes nothing.
        """
        weight = self.matrix().requires_grad_()
        optimizer, before = self.new([weight], 0.0), torch.zeros_like(weight)
        step = before
        for seed in range(MOMENTUM_STEPS):
            before, start = step, weight.detach().clone()
            weight.grad = self.drawn(seed).sign()
            optimizer.step()
            step = weight.detach() - start
        parts = torch.stack([before.flatten(), self.drawn(seed).sign().flatten()], dim=1)
        fitted = torch.linalg.lstsq(parts, step.flatten()).solution
        fits = _close(parts @ fitted, step.flatten())
        return max(0.0, round(float(fitted[0]), 4)) if fits else None


def _flags(optimizer: torch.optim.Optimizer) -> dict[str, bool | str]:
    """Those that some keep beside their param groups."""
    attributes = vars(optimizer).items()
    return {k: v for k, v in attributes if isinstance(v, bool | str) and not k.startswith("_")}


def _experiment(trial: Replica) -> Behaviour:
    """What is the same at matrices and gradients of two sizes."""
    named = trial.group.get("momentum")
    momentum = trial.momentum() if named is None else float(named)
    first, second = (_at(trial, momentum, *sizes) for sizes in SIZES)
    return Behaviour(
        power=first.power if first.power == second.power else None,
        second_moment=first.second_moment,
        as_sgd=first.as_sgd and second.as_sgd,
        momentum=momentum,
    )


def _at(
    trial: Replica, momentum: float | None, matrix: float, size: float, along: float
) -> Behaviour:
    start = matrix * trial.matrix()
    drawn = [size * trial.drawn(seed) for seed in range(1, STEPS + 1)]
    gradients = [g + (along - (g * start).sum() / start.square().sum()) * start for g in drawn]
    plain, remembers = trial.path(start, gradients)
    larger, _ = trial.path(LARGER * start, [gradient / LARGER for gradient in gradients])
    decayed, _ = trial.path(start, gradients, weight_decay=WEIGHT_DECAY)
    by_sgd, _ = trial.of_sgd(start, momentum).path(start, gradients, weight_decay=WEIGHT_DECAY)
    return Behaviour(
        power=_power(plain, larger),
        second_moment=remembers,
        as_sgd=_close(decayed[-1] - start, by_sgd[-1] - start),
    )


def _close(measured: Tensor, expected: Tensor) -> bool:
    return bool((measured - expected).norm() < TOLERANCE * expected.norm())


def _power(small: Sequence[Tensor], large: Sequence[Tensor]) -> int | None:
    turned, turned_larger = _turn(small), _turn(large)
    sizes = float(large[-1].norm() / small[-1].norm())
    if not (turned > 0 and turned_larger > 0 and abs(sizes / LARGER - 1) < 0.1):
        return None
    power = math.log(turned / turned_larger) / math.log(LARGER)
    return round(power) if abs(power - round(power)) < 0.05 and round(power) in (0, 1, 2) else None


def _turn(path: Sequence[Tensor]) -> float:
    """How far the second half of a path goes, seen from the origin."""
    before, after = (normalize(point.flatten(), dim=0) for point in (path[STEPS // 2], path[-1]))
    return float((after - before).norm())
