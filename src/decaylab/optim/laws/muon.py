"""Muon's law."""

from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.law import Law, momentum_correlation


@dataclass(frozen=True)
class Muon(Law):
    """W -= lr a O, O the nearest orthogonal matrix to the momentum (Jordan et al. 2024).

    O has one length, about sqrt(min(rows, columns)), whatever |W| and the gradients; a is the
    factor on lr for the shape. Orthogonal factors of two matrices with correlation r correlate by
    nearly r, more nearly the less square they are, so that C is that of the momentum: within 15 %
    (tests/optim/test_laws.py measures it). Its decay is decoupled: s = lr weight_decay, without a.
    """

    momentum: float = 0.95
    nesterov: bool = True
    name: ClassVar[str] = "muon"

    @property
    def norm_power(self) -> int:
        """1: the step has one length."""
        return 1

    def correlation(self) -> float | None:
        """That of its momentum (`momentum_correlation`)."""
        return momentum_correlation(self.momentum, nesterov=self.nesterov)
