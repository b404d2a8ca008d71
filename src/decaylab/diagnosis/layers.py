"""One layer in the records of a run: how it was stepped, and what was measured of it."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from decaylab.optim.decay import decay_rate
from decaylab.optim.laws.dynamics import Series
from decaylab.optim.laws.memory import by_step, effective_adam

# While decay has taken less than a twentieth of the weights, it cannot have done much.
TOO_LITTLE_EXPOSURE = 0.05


@dataclass(frozen=True)
class Setting:
    """How one layer's weight is stepped.

    Attributes:
        lr: learning rate. decay: its kind. weight_decay: its strength.
        memory: momentum, Adam: beta1. beta2: Adam's, else None. dampening: of SGD's momentum.
        power: the effective learning rate is lr/|W|^power; None where the law is not known.
        damping: K-FAC's lambda, else None. scale_free: whether it follows the norm.
        factor_decay, refresh_every, invert_every: what K-FAC's factors remember.
        rounding: how far apart its numbers are, relative, if they have fewer than 32 bits; else 0.
        clipped: whether its gradients are, so that Adam's second moment does not follow the norm.
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
    rounding: float = 0.0
    clipped: bool = False

    @property
    def remembered(self) -> float | None:
        """Which part of what it remembers of norms a step keeps (beta2); None where it has none."""
        return None if self.power != 1 or self.clipped else self.beta2

    @property
    def decays(self) -> bool:
        """Whether there is a decay term at all."""
        return self.decay != "none" and self.weight_decay > 0

    @property
    def unknown(self) -> str:
        """Why it is not known which part of W decay takes a step; "" where it is."""
        if self.decays and self.decay == "l2" and self.power != 2:
            return "the optimizer rescales L2"
        if 0 < self._rate < self.rounding:
            return "the weights have 16 bits, in which rounding may undo the decay"
        if self._rate >= 1:  # beyond 2, weights that change their sign grow
            return "decay is so strong that it takes all of the weights in a step"
        return ""

    @property
    def intake(self) -> float:
        """The part of the decay term that comes into the step: L2 is subject to the dampening."""
        return 1 - self.dampening if self.decay == "l2" else 1.0

    @property
    def rate(self) -> float:
        """What a step adds to the decay exposure (`decay_rate`); 0 where it is `unknown`."""
        return 0.0 if self.unknown else self._rate

    @property
    def _rate(self) -> float:
        return self.rate_at(self.weight_decay) if self.decays else 0.0

    def rate_at(self, weight_decay: float) -> float:
        """The rate at another strength, to which it is proportional."""
        strength = weight_decay * self.intake
        return decay_rate(strength, self.decay, law="sgd", lr=self.lr, momentum=self.memory)


@dataclass(frozen=True)
class LayerRecord:
    """One layer in the records. `skipped` says why it cannot be judged, "" where it can.

    `settings`: (from step, Setting); `norms`: above zero; `exposure`: decay exposure at the steps
    of `norms`; `size`: how many numbers the weight has, 0 where that is not recorded.
    """

    name: str
    invariant: bool = False
    settings: tuple[tuple[int, Setting], ...] = ()
    norms: Series = ()
    exposure: Series = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    skipped: str = ""
    size: int = 0

    @property
    def setting(self) -> Setting | None:
        """The first one: kind of decay, law and momentum, which do not change in a run."""
        return self.settings[0][1] if self.settings else None

    @property
    def unknown(self) -> str:
        """Why it is not known what decay took of it (`Setting.unknown`); "" where it is."""
        return next((setting.unknown for _, setting in self.settings if setting.unknown), "")

    @property
    def decayed(self) -> bool:
        """Whether any of its settings has a decay term."""
        return any(setting.decays for _, setting in self.settings)

    @property
    def kfac_clipped(self) -> bool:
        """Whether K-FAC is given clipped gradients: how its steps depend on the norm is unknown."""
        setting = self.setting
        return setting is not None and setting.damping is not None and setting.clipped

    def setting_at(self, step: int) -> Setting:
        """The setting that step `step` (from 1) was taken with."""
        after = bisect_right(self.settings, step, key=lambda of: of[0])
        return self.settings[max(after - 1, 0)][1]

    @property
    def moments(self) -> Series:
        """Adam's |v| (`second_moment`), if it counts and is recorded wherever the norm is."""
        recorded = self.series.get("second_moment", ())
        counts = self.setting is not None and self.setting.remembered is not None
        return recorded if counts and by_step(self.norms, recorded) else ()

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
        if setting.remembered is not None:
            return effective_adam(norms, (setting.memory, setting.remembered), moments)
        power = setting.power
        return tuple((step, norm**-power) for step, norm in norms)

    @property
    def total_exposure(self) -> float | None:
        """The decay exposure at the end; None where it is not known."""
        return self.exposure[-1][1] if self.exposure and not self.unknown else None
