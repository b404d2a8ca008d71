"""One layer in the records of a run: how it was stepped, and what was measured of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decaylab.diagnosis.dynamics import Series
from decaylab.diagnosis.memory import by_step, effective_adam
from decaylab.optim.decay import decay_rate, steady_shrink


@dataclass(frozen=True)
class Setting:
    """How one layer's weight is stepped.

    Attributes:
        lr: learning rate. decay: its kind. weight_decay: its strength.
        memory: momentum, Adam: beta1. beta2: Adam's, else None. dampening: of SGD's momentum.
        power: the effective learning rate is lr/|W|^power; None where the law is not known.
        damping: K-FAC's lambda, else None. scale_free: whether it follows the norm.
        factor_decay, refresh_every, invert_every: what K-FAC's factors remember.
    """

    lr: float
    decay: str
    weight_decay: float
    memory: float = 0.0
    dampening: float = 0.0
    beta2: float | None = None
    power: int | None = None
    damping: float | None = None
    scale_free: bool = False
    factor_decay: float = 0.0
    refresh_every: int = 1
    invert_every: int = 1

    @property
    def decays(self) -> bool:
        """Whether there is a decay term at all."""
        return self.decay != "none" and self.weight_decay > 0

    @property
    def preconditioned(self) -> bool:
        """L2 inside Adam or K-FAC: no fixed part of W is taken a step."""
        return self.decays and self.decay == "l2" and self.power != 2

    @property
    def intake(self) -> float:
        """The part of the decay term that comes into the step: L2 is subject to the dampening."""
        return 1 - self.dampening if self.decay == "l2" else 1.0

    @property
    def shrink(self) -> float:
        """The part of W that decay takes a step in the long run; 0 for preconditioned L2."""
        if not self.decays or self.preconditioned:
            return 0.0
        strength = self.weight_decay * self.intake
        return steady_shrink(strength, self.decay, lr=self.lr, momentum=self.memory)

    @property
    def rate(self) -> float:
        """What a step adds to the decay exposure (`decay_rate`); 0 for preconditioned L2."""
        if not self.decays or self.preconditioned:
            return 0.0
        strength = self.weight_decay * self.intake
        return decay_rate(strength, self.decay, optimizer="sgd", lr=self.lr, momentum=self.memory)


@dataclass(frozen=True)
class LayerRecord:
    """One layer in the records. `skipped` says why it cannot be judged, "" where it can.

    `settings`: (from step, Setting); `norms`: above zero; `exposure`: decay exposure at the steps
    of `norms`.
    """

    name: str
    invariant: bool = False
    settings: tuple[tuple[int, Setting], ...] = ()
    norms: Series = ()
    exposure: Series = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    skipped: str = ""

    @property
    def setting(self) -> Setting | None:
        """The first one: kind of decay, law and momentum, which do not change in a run."""
        return self.settings[0][1] if self.settings else None

    @property
    def decayed(self) -> bool:
        """Whether any of its settings has a decay term."""
        return any(setting.decays for _, setting in self.settings)

    def setting_at(self, step: int) -> Setting:
        """The setting that step `step` (from 1) was taken with."""
        return [s for start, s in self.settings if start <= max(step, self.settings[0][0])][-1]

    @property
    def moments(self) -> Series:
        """Adam's |v| (`second_moment`), if it is recorded wherever the norm is."""
        recorded = self.series.get("second_moment", ())
        return recorded if by_step(self.norms, recorded) else ()

    @property
    def effective(self) -> Series:
        """At the recorded norms, lr/|W|^power (Eq. 9), Adam's with what it remembers (`memory`).

        Nothing where the law is not known, or the layer is not scale-invariant.
        """
        if not self.invariant:
            return ()
        return tuple(
            (step, self.setting_at(step).lr * value)
            for step, value in self.effective_per_lr(self.norms, self.moments)
        )

    def effective_per_lr(self, norms: Series, moments: Series = ()) -> Series:
        """By the layer's law, what lr is to be multiplied by at these norms; `moments`: Adam's."""
        setting = self.setting
        if setting is None or setting.power is None or not norms:
            return ()
        if setting.power == 1 and setting.beta2 is not None:
            return effective_adam(norms, (setting.memory, setting.beta2), moments)
        power = setting.power
        return tuple((step, norm**-power) for step, norm in norms)

    @property
    def total_exposure(self) -> float | None:
        """The decay exposure at the end; None where it is not known (L2 inside Adam or K-FAC)."""
        if self.setting is not None and self.setting.preconditioned:
            return None
        return self.exposure[-1][1] if self.exposure else None
