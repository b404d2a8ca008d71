"""What an optimizer from elsewhere does to a weight, found out by letting a new one step.

Two things decide what weight decay does under an optimizer, and its param groups rarely say them:
which kind of decay it has (`decaylab.optim.decay`), and how far its steps turn a scale-invariant
weight of another norm (the power of |W| in the effective learning rate, Eq. 9). Both can be seen. A
new optimizer of the same class, with the same settings, steps a small matrix of its own:

- with gradients of zero and a weight decay, what moves the matrix is the decay;
- with a matrix a times as large and gradients 1/a times as large, as a scale-invariant loss would
  give, a step turns the matrix a^-power times as far.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

LR, WEIGHT_DECAY = 1e-3, 0.1
LARGER = 4.0  # the a above
STEPS = 12  # RAdam begins as SGD: the power is that of the second half
TOLERANCE = 0.02  # relative; of the power: 0.05

_seen: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[Any, ...], Behaviour]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Behaviour:
    """What was seen; None where it fits nothing known, or the optimizer could not be tried.

    Attributes:
        decay: "l2", "decoupled" or "independent". Decay within a momentum counts as L2.
        power: 2 (SGD), 1 (Adam) or 0 (K-FAC, LAMB): the effective learning rate is lr/|W|^power.
        second_moment: whether it keeps a running mean of squared gradients, as Adam does.
    """

    decay: str | None = None
    power: int | None = None
    second_moment: bool = False


def behaviour(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Behaviour:
    """What this optimizer does with the settings of one of its param groups; tried once.

    The optimizer itself, its parameters and torch's generator are left alone. Numbers that a
    schedule may change do not count, but flags, betas and momentum do. Where several processes
    train, nothing is tried: a step may wait for the others.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Behaviour()
    telling = {
        name: value
        for name, value in group.items()
        if isinstance(value, bool | str) or name in ("betas", "momentum")
    }
    known, key = _seen.setdefault(optimizer, {}), tuple(sorted(map(str, telling.items())))
    if key not in known:
        known[key] = _tried(optimizer, group)
    return known[key]


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own, which are known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Behaviour:
    """On the CPU in double precision; else, some are written so, where the parameters are."""
    places = [(torch.device("cpu"), torch.float64)]
    places += [(parameter.device, torch.float32) for parameter in group["params"][:1]]
    for device, dtype in places:
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                return _experiment(_Trial(optimizer, group, device, dtype))
        except Exception:  # whatever somebody's optimizer may raise
            continue
    return Behaviour()


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
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        return drawn.to(self.device, self.dtype)

    def path(
        self, start: Tensor, gradients: Sequence[Tensor], weight_decay: float
    ) -> tuple[list[Tensor], bool]:
        """The matrix after each step, and whether squared gradients are remembered."""
        kind, defaults = type(self.optimizer), self.optimizer.defaults
        weight = start.clone().requires_grad_()
        own = {name: value for name, value in self.group.items() if name in defaults}
        own |= {"lr": LR} | ({"weight_decay": weight_decay} if "weight_decay" in defaults else {})
        wanted = inspect.signature(kind).parameters
        asked = {name: own[name] for name in defaults if name in wanted and name in own}
        stepped = kind([{**own, "params": [weight]}], **asked)
        points = [start]
        for gradient in gradients:
            weight.grad = gradient.clone()
            stepped.step()
            points.append(weight.detach().clone())
        return points, any("exp_avg_sq" in state for state in stepped.state.values())


def _experiment(trial: _Trial) -> Behaviour:
    start = trial.matrix()
    zeros = [torch.zeros_like(start)] * STEPS
    decayed, _ = trial.path(start, zeros, WEIGHT_DECAY)
    gradients = [trial.drawn(seed) for seed in range(1, STEPS + 1)]
    small, remembers = trial.path(start, gradients, 0.0)
    large, _ = trial.path(LARGER * start, [g / LARGER for g in gradients], 0.0)
    half = STEPS // 2
    turns = [float((path[-1] - path[half]).norm() / path[half].norm()) for path in (small, large)]
    return Behaviour(_decay(decayed), _power(*turns), remembers)


def _decay(points: Sequence[Tensor]) -> str | None:
    """The kind of decay that moves a matrix so, without gradients."""
    shrinks = [1 - after / before for before, after in pairwise(points)]
    means = [float(shrink.mean()) for shrink in shrinks]
    if not all(math.isfinite(mean) for mean in means) or max(map(abs, means)) < 1e-9:
        return None
    if any(float(s.std()) > TOLERANCE * abs(m) for s, m in zip(shrinks, means, strict=True)):
        return "l2"  # not in proportion to the weights: something stands between
    for kind, rate in (("decoupled", LR * WEIGHT_DECAY), ("independent", WEIGHT_DECAY)):
        if all(abs(mean / rate - 1) < TOLERANCE for mean in means):
            return kind
    return "l2" if _gathers(means) else None


def _gathers(shrinks: Sequence[float]) -> bool:
    """Whether they grow as a momentum does: by less every time, in a fixed proportion."""
    growths = [after - before for before, after in pairwise(shrinks)]
    if min(growths) <= 0:
        return False
    kept = [after / before for before, after in pairwise(growths)]
    return max(kept) < 1 and max(kept) - min(kept) < TOLERANCE


def _power(turned: float, turned_larger: float) -> int | None:
    if not (turned > 0 and turned_larger > 0 and math.isfinite(turned * turned_larger)):
        return None
    power = math.log(turned / turned_larger) / math.log(LARGER)
    return round(power) if abs(power - round(power)) < 0.05 and round(power) in (0, 1, 2) else None
