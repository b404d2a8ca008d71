"""Lion's law."""

import math
from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.law import Law

NEGLIGIBLE = 1e-6  # of a correlation


@dataclass(frozen=True)
class Lion(Law):
    """W -= lr sign(c), c = beta1 m + (1 - beta1) g, m a mean of g with the weights beta2^k.

    Every entry moves by lr (Chen et al. 2023, arXiv:2302.06675): |d|^2 = lr^2 n for n weights,
    whatever |W|. Of independent Gaussian gradients, c has the weights 1 - beta1, then beta1 (1 -
    beta2) beta2^(k-1), and so with a = beta1 (1 - beta2), b = beta1^2 (1 - beta2) / (1 + beta2)

        r_k = ((1 - beta1) a beta2^(k-1) + b beta2^k) / ((1 - beta1)^2 + b)

    as its correlation k steps apart. Signs of Gaussians with correlation r have (2/pi) arcsin r:
    C = 1 + 2 sum_k (2/pi) arcsin r_k.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    name: ClassVar[str] = "lion"

    @property
    def norm_power(self) -> int:
        """1: the step has one length."""
        return 1

    def correlation(self) -> float:
        """C above: 44 at the usual betas of 0.9 and 0.99."""
        a = self.beta1 * (1 - self.beta2)
        b = self.beta1**2 * (1 - self.beta2) / (1 + self.beta2)
        first = ((1 - self.beta1) * a + b * self.beta2) / ((1 - self.beta1) ** 2 + b)
        total, r = 1.0, first
        while r > NEGLIGIBLE:  # it falls by beta2 a step
            total += 4 / math.pi * math.asin(min(r, 1.0))
            r *= self.beta2
        return total
