"""The law of schedule-free optimizers."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from decaylab.optim.laws.law import Law
from decaylab.optim.laws.sgd import Sgd


@dataclass(frozen=True)
class ScheduleFree(Law):
    """z -= lr p(y), x the mean of all z so far, y = (1 - beta) z + beta x, which is trained.

    p is the step of the law `inside` without momentum, SGD's or Adam's (Defazio et al. 2024,
    arXiv:2405.15682). Decay takes lr weight_decay of y from z. What it took at step j has reached
    x at step t by the part 1 - j/t, and y by 1 - beta j/t: in the mean over the steps so far, at
    any t, by 1 - beta/2. So y, which is recorded, loses that part of what z loses. (The mean is
    one with equal weights, as by default: with the option r it is 1 - beta / (r + 2).) Since x
    averages over ever more steps, single steps have no fixed correlation: it is not given.
    """

    beta: float = 0.9
    inside: Law = field(default_factory=Sgd)
    name: ClassVar[str] = "schedule-free"

    @property
    def norm_power(self) -> int | None:
        """That of the law inside: 2 for SGD, 1 for Adam."""
        return self.inside.norm_power

    @property
    def adam_betas(self) -> tuple[float, float] | None:
        """Those of the law inside."""
        return self.inside.adam_betas

    def correlation(self) -> None:
        """It changes all along."""
        return

    def shrink(self, weight_decay: float, decay: str, lr: float) -> float:
        """The part 1 - beta/2 of what z loses."""
        return (1 - self.beta / 2) * super().shrink(weight_decay, decay, lr)

    def clipped(self) -> Law:
        """The law inside is clipped."""
        return replace(self, inside=self.inside.clipped())
