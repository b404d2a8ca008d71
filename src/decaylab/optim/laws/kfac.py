"""K-FAC's law."""

from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.law import Law, momentum_correlation


@dataclass(frozen=True)
class Kfac(Law):
    """W -= lr (C + lambda I)^-1 g: C goes with 1/|W|^2, so that the undamped step goes with |W|.

    Undamped, a step turns W by lr, whatever the norm (Eq. 13): e = 1, without a balance. Where the
    damping dominates, the step is SGD's over lambda, e = -1. With a second-order share q (Eq. 14)
    e = 2 q - 1. With `step_rms` every layer's step has that root mean square before momentum:
    one length whatever |W|, as Adam's, e = 0; spectral steps are Muon's here, behind a momentum of
    gradients that is Nesterov's. L2 is preconditioned: no fixed fraction.
    """

    momentum: float = 0.9
    step_rms: float | None = None
    nesterov: bool = False
    name: ClassVar[str] = "kfac"

    @property
    def norm_power(self) -> int:
        """0 (Eq. 13), without damping; 1 where the step has a set length."""
        return 0 if self.step_rms is None else 1

    def elasticity(self, share: float | None = None) -> float:
        """2 q - 1, and 1 where the share is not known."""
        if self.step_rms is not None:
            return 0.0
        return 1.0 if share is None else 2.0 * share - 1.0

    def correlation(self) -> float | None:
        """That of its momentum (`momentum_correlation`), on either side of the preconditioner."""
        return momentum_correlation(self.momentum, nesterov=self.nesterov)
