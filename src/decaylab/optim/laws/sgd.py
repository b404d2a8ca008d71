"""SGD's law."""

from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.law import Law, momentum_correlation
from decaylab.optim.laws.unknown import Unknown


@dataclass(frozen=True)
class Sgd(Law):
    """W -= lr b, b = momentum b + (1 - dampening) g: the gradient is grad L(u) / |W|, u = W/|W|.

    A step turns W by lr / |W|^2 (Eq. 9), so that G = c / N. L2 stands in the gradient, and the
    momentum sums it up: s = lr weight_decay (1 - dampening) / (1 - momentum).
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    name: ClassVar[str] = "sgd"
    sums_l2: ClassVar[bool] = True

    @property
    def norm_power(self) -> int:
        """2 (Eq. 9)."""
        return 2

    def correlation(self) -> float | None:
        """(1 + m) / (1 - m), Nesterov's less (`momentum_correlation`)."""
        return momentum_correlation(self.momentum, nesterov=self.nesterov)

    def clipped(self) -> Law:
        """Between lr/|W|^2 and lr/|W|, where gradients are always cut: unknown."""
        return Unknown()

    def shrink(self, weight_decay: float, decay: str, lr: float) -> float:
        """L2 is summed up by the momentum; the other kinds stand beside it."""
        rate = super().shrink(weight_decay, decay, lr)
        if decay != "l2" or not self.momentum:
            return rate
        return rate * (1 - self.dampening) / (1 - self.momentum)
