"""What an optimizer from elsewhere does to a weight, found out by letting a new one step.

Two things decide what weight decay does under an optimizer, and its param groups rarely say them:
which kind of decay it has (`decaylab.optim.decay`), and how far its steps turn a scale-invariant
weight of another norm (the power of |W| in the effective learning rate, Eq. 9). Both can be seen. A
new optimizer of the same class, with the same settings, steps a small matrix of its own:

- decoupled decay takes lr * weight_decay * W from each step without decay, independent decay
  weight_decay * W, and L2 does what weight_decay * W in the gradient does (Eq. 6, 7);
- with a matrix a times as large and gradients 1/a times as large, as a scale-invariant loss would
  give, a step turns the matrix a^-power times as far.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

LR, WEIGHT_DECAY = 1e-3, 0.1
NEARLY_NONE = 1e-12  # LAMB and LARS have their trust ratio only where there is a weight decay
LARGER = 4.0  # the a above
STEPS = 12  # some begin otherwise (RAdam as SGD): the second half is what counts
RATES = [LR] * 9 + [LR / 2] * 3  # decay that follows lr follows a schedule
SIZES = ((1.0, 0.1, 0.0), (0.3, 1.0, 0.3))
"""Of the matrix, of gradients, and how much of the matrix is in these (0: an invariant loss).

What depends on them, as a clip, an eps or AdamP's projection does, is neither law nor kind."""
SETTING = bool | str | float | tuple  # of a group; whole numbers may count steps
TOLERANCE = 0.02  # relative; of the power: 0.05
WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")

_seen: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[Any, ...], Behaviour]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Behaviour:
    """What was seen; None where it fits nothing known, or the optimizer could not be tried.

    Attributes:
        decay: "l2", "decoupled" or "independent". Decay that stands in the gradient is L2.
        power: 2 (SGD), 1 (Adam) or 0 (K-FAC, LAMB): the effective learning rate is lr/|W|^power.
        second_moment: whether it keeps a running mean of squared gradients, as Adam does.
        as_sgd: whether its steps are those of torch's SGD with the same decay and momentum.
    """

    decay: str | None = None
    power: int | None = None
    second_moment: bool = False
    as_sgd: bool = False


def behaviour(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Behaviour:
    """What this optimizer does with the settings of one of its param groups; tried once.

    The optimizer itself, its parameters and the random generators are left alone. Numbers that a
    schedule may change do not count, but flags do, whether there is a momentum or a decay, and
    whether all the parameters are vectors, which some treat otherwise. Where several processes
    train, nothing is tried: a step may wait for the others.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Behaviour()
    telling = [item for item in group.items() if isinstance(item[1], bool | str)]
    telling += [(name, bool(group.get(name))) for name in ("momentum", "weight_decay")]
    telling += [("vectors", _vectors(group))]
    known, key = _seen.setdefault(optimizer, {}), tuple(sorted(map(str, telling)))
    if key not in known:
        known[key] = _tried(optimizer, group)
    return known[key]


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one of torch's own, which are known."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim.")


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that a wrapper of accelerate or Lightning holds; others may change what it does."""
    while type(optimizer).__module__.split(".")[0] in WRAPPERS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _vectors(group: Mapping[str, Any]) -> bool:
    return bool(group["params"]) and all(parameter.ndim < 2 for parameter in group["params"])


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Behaviour:
    """On the CPU in double precision; else, some are written so, where the parameters are."""
    places = [(torch.device("cpu"), torch.float64)]
    places += [(parameter.device, torch.float32) for parameter in group["params"][:1]]
    for device, dtype in places:
        try:
            with _undisturbed():
                return _experiment(_Trial(optimizer, group, device, dtype))
        except Exception:  # whatever somebody's optimizer may raise
            continue
    return Behaviour()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing of a trial is noticed outside, and nothing from there acts on it."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng(devices=gpus),
            torch.inference_mode(False),
            torch.enable_grad(),
            mock.patch.dict(_global_optimizer_pre_hooks, clear=True),
            mock.patch.dict(_global_optimizer_post_hooks, clear=True),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


@dataclass(frozen=True)
class _Trial:
    """New optimizers like one group of `optimizer`, and matrices for them."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype

    def matrix(self) -> Tensor:
        """Its entries are between 0.5 and 1.5, of either sign."""
        drawn = self.drawn(seed=0)
        return drawn.sign() * (0.5 + drawn.abs() % 1)

    def drawn(self, seed: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randn(8, 6, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn.flatten() if _vectors(self.group) else drawn).to(self.device, self.dtype)

    def new(self, weight: Tensor, weight_decay: float) -> torch.optim.Optimizer:
        kind, defaults = type(self.optimizer), self.optimizer.defaults
        own = {
            name: value
            for name, value in self.group.items()
            if name in defaults or (isinstance(value, SETTING) and name != "initial_lr")
        }
        own["lr"] = LR
        if "weight_decay" in own:
            own["weight_decay"] = weight_decay or (NEARLY_NONE if own["weight_decay"] else 0.0)
        own = copy.deepcopy(own)
        known = _flags(self.optimizer) | own
        asked = {name: known[name] for name in inspect.signature(kind).parameters if name in known}
        made = kind([{**own, "params": [weight]}], **asked)
        if not _flags(made).items() <= _flags(self.optimizer).items():
            raise TypeError("it was made in another way")
        return made

    def of_sgd(self, weight: Tensor) -> _Trial:
        """The same of torch's SGD, with this one's momentum."""
        sgd = torch.optim.SGD([weight], weight_decay=WEIGHT_DECAY)
        if momentum := self.group.get("momentum"):
            more = {name: self.group.get(name) or 0 for name in ("dampening", "nesterov")}
            sgd.param_groups[0].update(momentum=momentum, **more)
        return replace(self, optimizer=sgd, group=sgd.param_groups[0])

    def path(
        self,
        start: Tensor,
        gradients: Sequence[Tensor],
        weight_decay: float = 0.0,
        in_gradient: float = 0.0,
    ) -> tuple[list[Tensor], bool]:
        """The matrix after each step, and whether squared gradients are remembered."""
        torch.default_generator.manual_seed(0)
        weight = start.clone().requires_grad_()
        stepped = self.new(weight, weight_decay)
        points = [start]
        for gradient, lr in zip(gradients, RATES, strict=True):
            stepped.param_groups[0]["lr"] = lr
            weight.grad = gradient + in_gradient * points[-1]
            stepped.step()
            points.append(weight.detach().clone())
        return points, any("exp_avg_sq" in state for state in stepped.state.values())


def _flags(optimizer: torch.optim.Optimizer) -> dict[str, bool | str]:
    """Those that some keep beside their param groups."""
    kept = vars(optimizer).items()
    return {k: v for k, v in kept if isinstance(v, bool | str) and not k.startswith("_")}


def _experiment(trial: _Trial) -> Behaviour:
    """What is the same at matrices and gradients of two sizes."""
    first, second = (_at(trial, *sizes) for sizes in SIZES)
    return Behaviour(
        decay=first.decay if first.decay == second.decay else None,
        power=first.power if first.power == second.power else None,
        second_moment=first.second_moment,
        as_sgd=first.as_sgd and second.as_sgd,
    )


def _at(trial: _Trial, matrix: float, size: float, along: float) -> Behaviour:
    start = matrix * trial.matrix()
    drawn = [size * trial.drawn(seed) for seed in range(1, STEPS + 1)]
    gradients = [g + (along - (g * start).sum() / start.square().sum()) * start for g in drawn]
    plain, remembers = trial.path(start, gradients)
    larger, _ = trial.path(LARGER * start, [gradient / LARGER for gradient in gradients])
    decayed, _ = trial.path(start, gradients, weight_decay=WEIGHT_DECAY)
    in_gradient, _ = trial.path(start, gradients, in_gradient=WEIGHT_DECAY)
    by_sgd, _ = trial.of_sgd(start).path(start, gradients, weight_decay=WEIGHT_DECAY)
    return Behaviour(
        decay=_decay(plain, decayed, in_gradient),
        power=_power(plain, larger),
        second_moment=remembers,
        as_sgd=_close(decayed[-1] - start, by_sgd[-1] - start),
    )


def _decay(
    plain: Sequence[Tensor], decayed: Sequence[Tensor], in_gradient: Sequence[Tensor]
) -> str | None:
    """The kind of decay by which the second path differs from the first."""
    for kind, rates in (
        ("decoupled", [lr * WEIGHT_DECAY for lr in RATES]),
        ("independent", [WEIGHT_DECAY] * STEPS),
    ):
        if all(
            _close((plain[t + 1] - plain[t]) - (decayed[t + 1] - decayed[t]), rates[t] * decayed[t])
            for t in range(STEPS // 2, STEPS)
        ):
            return kind
    return "l2" if _close(decayed[-1] - plain[-1], in_gradient[-1] - plain[-1]) else None


def _close(seen: Tensor, expected: Tensor) -> bool:
    return bool((seen - expected).norm() < TOLERANCE * expected.norm())


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
