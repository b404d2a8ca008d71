"""What a law is: how a step depends on the norm of the weights, and where decay balances it.

Let W be a scale-invariant weight, N = |W|^2, s the fraction of W that decay removes per step
(`Law.shrink`), and d the rest of the step, orthogonal to W (Eq. 8). With rho_k the correlation of d
with itself k steps later and C = 1 + 2 (rho_1 + rho_2 + ...) (`Law.correlation`), over many steps

    N' = N - 2 s N + G,     G = C |d|^2 = c N^e     (`Law.elasticity`)

so that N comes to rest at G = 2 s N, and a step turns W there by |d| / |W| = **sqrt(2 s / C)**,
whatever the gradients are. For a momentum m, C = (1 + m) / (1 - m): SGD with L2, s = lr wd / (1 -
m), turns by sqrt(2 lr wd / (1 + m)), AdamW by sqrt(2 lr wd (1 - m) / (1 + m)) (Kosson, Messmer and
Jaggi 2024, arXiv:2305.17212). Both take W to be scale-invariant and gradients to be independent
from step to step; gradients that agree turn it further.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from decaylab.errors import Range
from decaylab.optim.decay import check_decay
from decaylab.optim.laws.dynamics import FARTHEST, Series
from decaylab.optim.laws.memory import effective_adam


@dataclass(frozen=True)
class Equilibrium:
    """Where pushes and decay balance.

    Attributes:
        norm: |W| there. rotation: radians that a step turns W by there; None where not known.
        steps: the distance of |W|^2 from its balance falls to 1/e in so many steps.
    """

    norm: float
    rotation: float | None
    steps: float


class Law(ABC):
    """One family of optimizers, with the settings that its rule depends on."""

    name: ClassVar[str]
    sums_l2: ClassVar[bool] = False
    """Whether L2 in the gradient removes a fixed fraction of W per step, as under SGD alone."""

    @property
    @abstractmethod
    def norm_power(self) -> int | None:
        """The p of the effective learning rate lr / |W|^p (Eq. 9); None if it is not known."""

    @abstractmethod
    def correlation(self) -> float | None:
        """C above, for independent gradients; None if it is not known."""

    @property
    def adam_betas(self) -> tuple[float, float] | None:
        """beta1 and beta2 of the averages that Adam's steps are made of (`memory`); else None."""
        return None

    def elasticity(self, share: float | None = None) -> float | None:
        """The e of G = c N^e: 1 - p. `share`: K-FAC's second-order share."""
        return None if self.norm_power is None else 1.0 - self.norm_power

    def effective_per_lr(self, norms: Series, moments: Series = ()) -> Series:
        """At these norms, what lr is to be multiplied by; `moments`: the recorded |v| of Adam.

        |W|^-p; of Adam, N_v / (|W| N_m), with the norms that its averages remember (`memory`).
        """
        if self.adam_betas is not None and norms:
            return effective_adam(norms, self.adam_betas, moments)
        power = self.norm_power
        return () if power is None else tuple((step, norm**-power) for step, norm in norms)

    def clipped(self) -> "Law":
        """The law where gradients are cut to a length: the same, where their size cancels."""
        return self

    def shrink(self, weight_decay: float, decay: str, lr: float) -> float:
        """The fraction of W that decay removes per step, in the long run, to first order.

        Independent: weight_decay; decoupled: lr weight_decay; L2: the same before preconditioner
        and momentum (SGD sums it up: `Sgd.shrink`).
        """
        check_decay(decay, weight_decay)
        if decay == "none":
            return 0.0
        return weight_decay if decay == "independent" else lr * weight_decay

    def weight_decay_for(self, shrink: float, decay: str, lr: float) -> float:
        """The weight decay that removes the fraction `shrink` per step: the inverse of `shrink`."""
        return shrink / self.shrink(1.0, decay, lr)

    def rotation(self, shrink: float) -> float | None:
        """Radians per step at equilibrium: sqrt(2 s / C); None where C is not known."""
        correlation = self.correlation()
        return None if correlation is None else math.sqrt(2 * shrink / correlation)

    def shrink_for_rotation(self, rotation: float) -> float | None:
        """The s whose equilibrium turns W by `rotation` per step: the inverse of `rotation`."""
        Range(above=0, below=1).check("rotation", rotation, "it is in radians per step")
        correlation = self.correlation()
        return None if correlation is None else rotation**2 * correlation / 2

    def equilibrium(
        self, growth: float, norm: float, shrink: float, share: float | None = None
    ) -> Equilibrium | None:
        """The balance of a layer that grows by `growth` in |W|^2 per step while at `norm`."""
        e = self.elasticity(share)
        balanced = None if e is None else balance(growth, norm, shrink, e)
        if balanced is None:
            return None
        return Equilibrium(balanced[0], self.rotation(shrink), balanced[1])


def balance(growth: float, norm: float, shrink: float, e: float) -> tuple[float, float] | None:
    """(|W| at G = 2 s N, steps to get there by 1/e), for G = growth (N / norm^2)^e.

    N^(1-e) = growth norm^(-2e) / (2 s), for e < 1; near it N returns at the rate 2 s (1 - e). None
    where there is no balance: no decay, no growth, or e >= 1 (undamped K-FAC).
    """
    if shrink <= 0 or e >= 1 or growth <= 0:
        return None
    log_n = math.log(growth * norm ** (-2 * e) / (2 * shrink)) / (1 - e)
    squared = math.exp(min(max(log_n, -FARTHEST), FARTHEST))
    return math.sqrt(squared), 1 / (2 * shrink * (1 - e))


def shrink_for_norm(growth: float, at: float, norm: float, e: float) -> float:
    """The s that holds a layer at `norm`, when it grows by `growth` in |W|^2 per step at `at`."""
    return growth * (norm / at) ** (2 * e) / (2 * norm**2)


def momentum_correlation(momentum: float, *, nesterov: bool = False) -> float | None:
    """C of a momentum m over independent gradients: (sum of its weights)^2 / (sum of squares).

    Plain, with weights m^k: (1 + m) / (1 - m). Nesterov's g + m buffer has the weights 1 + m, m^2,
    m^3, ...: 1 / (1 - m)^2 over (1 + m)^2 + m^4 / (1 - m^2).

    >>> round(momentum_correlation(0.9), 6), round(momentum_correlation(0.9, nesterov=True), 6)
    (19.0, 14.157973)
    """
    m = momentum
    if math.isnan(m):
        return None
    if not nesterov:
        return (1 + m) / (1 - m)
    return 1 / (1 - m) ** 2 / ((1 + m) ** 2 + m**4 / (1 - m**2))
