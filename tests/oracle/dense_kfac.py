"""The K-FAC optimizer with dense matrices: every step in the order of the recipe, nothing clever.

For each layer the damped block T * kron(S + r/pi I, A + pi r I) is formed and inverted as one
matrix.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from oracle.kfac import Factors, layers_of, naive_factors, trainable, vectors_for
from torch import Tensor, nn


@dataclass
class Settings:
    """As the arguments of `decaylab.KFAC`; `own` overrides (lr, weight_decay) by parameter name."""

    lr: float
    curvature: str = "fisher"
    likelihood: str = "categorical"
    curvature_scale: float = 1.0
    weight_decay: float = 0.0
    decay: str = "decoupled"
    momentum: float = 0.9
    damping: float = 1e-3
    kl_clip: float | None = None
    refresh_every: int = 10
    invert_every: int = 100
    factor_decay: float = 0.95
    sharing: str = "expand"
    inversion_lag: int = 0
    own: dict[str, tuple[float, float]] = field(default_factory=dict)


def damped_inverses(factors: Factors, damping: float) -> list[Tensor]:
    """Factored Tikhonov damping: one dense inverse per group."""
    inverses = []
    for A, S in zip(factors.A, factors.S, strict=True):
        r = math.sqrt(damping / factors.T)
        pi = math.sqrt((A.trace() / len(A)) / (S.trace() / len(S)))
        left = S + (r / pi) * torch.eye(len(S), dtype=S.dtype)
        right = A + (pi * r) * torch.eye(len(A), dtype=A.dtype)
        inverses.append(torch.linalg.inv(factors.T * torch.kron(left, right)))
    return inverses


class DenseKFAC:
    """Steps `model` in place; `loss(logits, labels)` is the mean over rows."""

    def __init__(self, model: nn.Module, loss: Callable, settings: Settings) -> None:
        self.model, self.loss, self.settings = model, loss, settings
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.velocity = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
        self.factors: dict[str, Factors] = {}
        self.inverses: dict[str, list[Tensor]] = {}
        self.pending: dict[int, dict[str, list[Tensor]]] = {}  # by the step that may use them
        self.steps = 0
        self.clip = 1.0  # the last factor of the KL clip

    def refresh(self, x: Tensor, y: Tensor) -> None:
        """The first refresh sets the factors, later ones join the running average."""
        s = self.settings
        vectors = vectors_for(s.curvature, s.likelihood, y, s.curvature_scale)
        fresh = naive_factors(self.model, x, vectors, sharing=s.sharing)
        for name, new in fresh.items():
            old = self.factors.get(name)
            if old is not None:
                keep = s.factor_decay
                new = Factors(
                    keep * old.A + (1 - keep) * new.A, keep * old.S + (1 - keep) * new.S, new.T
                )
            self.factors[name] = new

    def precondition(self, gradient: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """For each layer, the dense inverse times the gradient [out, in(+1)] read row by row."""
        steps = {}
        for name, module in layers_of(self.model).items():
            parameters = trainable(module)
            matrix = torch.cat([gradient[p].reshape(len(p), -1) for p in parameters], 1)
            groups = len(self.inverses[name])
            pieces = [
                (inverse @ part.flatten()).reshape(part.shape)
                for inverse, part in zip(self.inverses[name], matrix.chunk(groups), strict=True)
            ]
            widths = [p[0].numel() for p in parameters]
            columns = torch.cat(pieces).split(widths, 1)
            for p, column in zip(parameters, columns, strict=True):
                steps[p] = column.reshape(p.shape)
        return steps

    def own(self, p: nn.Parameter) -> tuple[float, float]:
        """The learning rate and the weight decay of one parameter."""
        return self.settings.own.get(self.names[p], (self.settings.lr, self.settings.weight_decay))

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step on one batch; returns the loss before it."""
        s = self.settings
        if self.steps % s.refresh_every == 0:
            self.refresh(x, y)
        idle = not any(step > self.steps for step in self.pending)
        early = idle and self.steps + s.inversion_lag <= s.invert_every
        if self.steps % s.invert_every == 0 or (early and self.steps % s.refresh_every == 0):
            lag = s.inversion_lag if self.inverses else 0  # the first is used at once
            self.pending[self.steps + lag] = {
                name: damped_inverses(factors, s.damping) for name, factors in self.factors.items()
            }
        self.inverses = self.pending.pop(self.steps, self.inverses)
        self.steps += 1

        loss = self.loss(self.model(x), y)
        parameters = list(self.velocity)
        gradient = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        if s.decay == "l2":
            gradient = {p: g + self.own(p)[1] * p.detach() for p, g in gradient.items()}
        step = self.precondition(gradient)
        if s.kl_clip is not None:
            change = sum(self.own(p)[0] ** 2 * (gradient[p] * step[p]).sum() for p in step)
            self.clip = min(1.0, math.sqrt(s.kl_clip / change))
            step = {p: self.clip * v for p, v in step.items()}
        with torch.no_grad():
            for p, v in step.items():
                lr, weight_decay = self.own(p)
                self.velocity[p] = s.momentum * self.velocity[p] + v
                old = p.clone()
                p -= lr * self.velocity[p]
                if s.decay == "decoupled":
                    p -= lr * weight_decay * old
                if s.decay == "independent":
                    p -= weight_decay * old
        return float(loss.detach())
