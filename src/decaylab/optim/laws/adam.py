"""Adam's law, also that of RMSprop, Adagrad, NAdam and others that divide by gradient sizes."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from decaylab.optim.laws.law import Law, momentum_correlation


@dataclass(frozen=True)
class Adam(Law):
    """W -= lr m / sqrt(v): the size of the gradients cancels, so that G does not depend on |W|.

    For independent gradients each weight has E[m^2] = v (1 - beta1) / (1 + beta1): |d|^2 = lr^2 n
    (1 - beta1) / (1 + beta1) and G = lr^2 n, for n weights. A step turns W by lr / |W| once |W| has
    stood still for 1 / (1 - beta2) steps; before, v remembers other norms (`memory`). `beta2` is
    None if nothing like v is remembered.
    """

    beta1: float = 0.9
    beta2: float | None = 0.999
    nesterov: bool = False
    name: ClassVar[str] = "adam"

    @property
    def norm_power(self) -> int:
        """1."""
        return 1

    def correlation(self) -> float | None:
        """(1 + beta1) / (1 - beta1); NAdam's less (`momentum_correlation`)."""
        return momentum_correlation(self.beta1, nesterov=self.nesterov)

    @property
    def adam_betas(self) -> tuple[float, float] | None:
        """None if nothing like v is remembered; a beta1 that is not known, nan, counts as 0."""
        beta1 = 0.0 if math.isnan(self.beta1) else self.beta1
        return None if self.beta2 is None else (beta1, self.beta2)

    def clipped(self) -> Law:
        """Its second moment does not follow the norm."""
        return replace(self, beta2=None)
