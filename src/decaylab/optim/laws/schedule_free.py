"""The law of schedule-free optimizers."""

from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.law import Law


@dataclass(frozen=True)
class ScheduleFree(Law):
    """z -= lr p(y), x the mean of all z so far, y = (1 - beta) z + beta x, which is trained.

    p is SGD's gradient, or Adam's where there is a `beta2` (Defazio et al. 2024, arXiv:2405.15682).
    Decay takes lr weight_decay of y from z. x averages over ever more steps, so that |y| has no
    balance that it comes to and steps no fixed correlation: neither is given.
    """

    beta2: float | None = None
    name: ClassVar[str] = "schedule-free"

    @property
    def norm_power(self) -> int:
        """That of the optimizer inside: 2 for SGD, 1 for Adam."""
        return 2 if self.beta2 is None else 1

    def correlation(self) -> None:
        """It changes all along."""
        return
