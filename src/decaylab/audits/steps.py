"""Taking the steps of an audit: an optimizer on tiny nets, from the same weights every time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.audits.building import build_optimizer
from decaylab.audits.reference import (
    CURVATURES,
    DAMPINGS,
    Case,
    joined,
    reference_factors,
    reference_step,
)
from decaylab.errors import BadValue, DecaylabError, Failed, Lacks
from decaylab.optim.decay_operator import restore

Factory = Callable[[nn.Module], Any]
Key = tuple[str, str, str]
"""Of a reference: curvature, sharing, kind of damping."""

# Beside factors 1e6 times as large a damping of 1e-3 is nothing, though it be added to a factor as
# such or as its root, and though the block be too small by B^2 T^5 at these sizes.
LARGE = 1e3
# What makes steps other than the block's, or the damping other than lambda, and how it is left out.
PLAIN = {"kl_clip": None, "step_scaling": "none", "damping_scaling": "fixed"}


@dataclass(frozen=True)
class Options:
    """How steps are taken: how many before the one that counts, repeats, larger batches."""

    factory: Factory
    steps: int
    repeats: int = 1
    larger: int = 1


@dataclass(frozen=True)
class MeasuredStep:
    """A case with the optimizer's step (per unit of lr, momentum taken out) and references."""

    case: Case
    step: Tensor
    references: dict[Key, Tensor]

    def ratio(self, key: Key) -> float:
        """How much longer the step is than the reference's."""
        return float(self.step.norm() / self.references[key].norm())

    def off(self, key: Key) -> float:
        """Sine of the angle to the reference; 1 and more if it points the other way."""
        a, b = self.step.flatten(), self.references[key].flatten()
        cosine = float(a @ b / (a.norm() * b.norm()))
        return math.sqrt(max(1 - cosine**2, 0.0)) if cosine > 0 else 1 - cosine


def linear_cases(larger: int) -> list[Case]:
    """A Linear layer at several batch sizes and two scales."""
    cases = [Case("Linear", larger * batch, scale=LARGE) for batch in (4, 8, 16, 32)]
    cases.append(Case("Linear", larger * 8, scale=LARGE / 10))
    return [replace(case, gain=LARGE) for case in cases]


def conv_cases(larger: int) -> list[Case]:
    """A convolution at several batch sizes, numbers of positions, strides and scales."""
    cases = [Case("Conv2d", larger * b, side=2, scale=LARGE) for b in (4, 8, 16)]
    cases += [Case("Conv2d", larger * 8, side=side, scale=LARGE) for side in (1, 3)]
    cases += [Case("Conv2d", larger * 8, side=2, stride=2, scale=LARGE)]
    cases.append(Case("Conv2d", larger * 8, side=2, scale=LARGE / 10))
    return [replace(case, gain=LARGE) for case in cases]


def measure(options: Options, case: Case, damping: float = 0.0) -> MeasuredStep:
    """The mean step over repeats, and the steps of every reference."""
    steps = [take_step(options, case, seed)[1] for seed in range(options.repeats)]
    model, inputs, labels = case.build()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    gradient = joined(model[0], gradient=True)
    references: dict[Key, Tensor] = {}
    for curvature in CURVATURES:
        for sharing, factors in reference_factors(case, model, inputs, labels, curvature).items():
            for kind in DAMPINGS if damping else ("added",):
                step = reference_step(factors, gradient, damping, kind)
                references[curvature, sharing, kind] = step
    references["none", "none", "added"] = gradient
    return MeasuredStep(case, torch.stack(steps).mean(0), references)


def take_step(options: Options, case: Case, seed: int) -> tuple[Any, Tensor]:
    """The optimizer, and its last step on the first layer: (before - after) / lr, [out, in(+1)].

    `seed` sets torch's generator and the order of the examples: one that samples by a generator of
    its own, with a fixed seed, gives them other samples too.
    """
    model, inputs, labels = case.build()
    order = torch.randperm(case.batch, generator=torch.Generator().manual_seed(seed))
    inputs, labels = inputs[order], labels[order]
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        optimizer = _built(options.factory, model)
        group = next(
            (g for g in optimizer.param_groups if any(p is model[0].weight for p in g["params"])),
            None,
        )
        if group is None:
            raise Lacks("the optimizer", "first layer of the model", "give it all layers")
        if group.get("lr") is None:
            raise Lacks("a param group", "lr", "name the one that the optimizer's steps go by")
        initial = [p.detach().clone() for p in model.parameters()]
        moved = joined(model[0], gradient=False)
        for _ in range(options.steps):
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            before = joined(model[0], gradient=False)
            _stepped(optimizer, case)
            moved = before - joined(model[0], gradient=False)
            restore(model.parameters(), initial)
    if not torch.isfinite(moved).all() or not moved.any():
        what, remedy = "finite values", "audit it with more damping"
        if not moved.any():
            what, remedy = "effect", "the audit needs one that steps Linear and Conv2d layers"
        step = f"the step of {type(optimizer).__name__}"
        raise Lacks(step, f"{what} on {case.kind} at batch {case.batch}", remedy)
    return optimizer, moved / (float(group["lr"]) * _gain(group, options.steps))


def _gain(group: dict[str, Any], steps: int) -> float:
    """How many times a gradient that stays the same is in the last step, by torch's momentum."""
    momentum, gain = float(group.get("momentum") or 0.0), 1.0
    for _ in range(steps - 1 if momentum else 0):
        gain = momentum * gain + 1 - float(group.get("dampening") or 0.0)
    return 1 + momentum * gain if group.get("nesterov") else gain


def _stepped(optimizer: Any, case: Case) -> None:
    try:
        optimizer.step()
    except DecaylabError:
        raise
    except Exception as error:
        what = f"the step of {type(optimizer).__name__} on {case.kind} at batch {case.batch}"
        raise Failed(what, error, "it cannot be audited") from error


def _built(factory: Factory, model: nn.Module) -> Any:
    optimizer = build_optimizer(
        lambda: factory(model),
        "an audit needs a function of the model alone, so wrap it in one that sets lr and the rest",
    )
    for decay in filter(None, (group.get("weight_decay") for group in optimizer.param_groups)):
        raise BadValue("the weight_decay of an audited optimizer", decay, 0)
    for setting, plain in PLAIN.items():
        value = getattr(optimizer, setting, None) or plain
        if value != plain:
            raise BadValue(f"the {setting} of an audited optimizer", value, plain)
    return optimizer


def damping_of(optimizer: Any) -> float | None:
    """Its lambda, from the optimizer, its first group or its defaults; None if it is not told."""
    places = [vars(optimizer), optimizer.param_groups[0], getattr(optimizer, "defaults", {})]
    for place in places:
        value = place.get("damping")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
