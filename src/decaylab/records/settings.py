"""How one layer is stepped, as a typed value that records hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

LayerRole = Literal["weight", "gain", "vector", "bias", "embedding", "head", "adapter"]
VECTORS: tuple[LayerRole, ...] = ("gain", "vector")
"""Roles of what is no weight, and part of the function whatever its direction."""


@dataclass(frozen=True)
class LayerSettings:
    """How the weight of one layer is stepped; None if a setting does not apply or is not known.

    Attributes:
        optimizer: the class that steps it. law: how its steps depend on the norm (`optim.laws`):
            "sgd", "adam", "kfac", ..., "unknown" where that cannot be told.
        lr: learning rate; None if the optimizer finds its own.
        decay: the kind of weight decay, "none" where nothing decays. weight_decay: its strength.
        momentum, dampening, nesterov: of SGD's kind, Muon's and K-FAC's. beta1, beta2, eps: of
            Adam's kind; beta2 is the part of the second moment (Lion: of its only moment) that a
            step keeps.
        damping, curvature, scale_free, kl_clip, factor_decay, refresh_every, invert_every: K-FAC's;
            scale_free is whether the damping follows this layer's norm or curvature.
        step_rms: the root mean square to which K-FAC scales each step; None if it does not.
        momentum_first: whether K-FAC preconditions a momentum of gradients.
        floor: the norm below which steps do not follow the norm any more (Adafactor).
        role: what it is in the network; a "vector" stands alone, as a class token does.
        invariant: whether the logits do not depend on its scale, as far as that is known: measured
            where there are rows `invariance/layer`, else by the order of modules.
        together: the layers, this one included, that are scale-invariant only together.
        size: how many numbers the weight has; 0 where that was not recorded.
        rounding: how far apart its numbers are, relative, if they have fewer than 32 bits; else 0.
        lost: whether rounding undoes its decay (`optim.decay.lost_to_rounding`).
        frozen: whether it is not trained. stepped: False for layers no watched optimizer steps.
    """

    optimizer: str = ""
    law: str = "unknown"
    lr: float | None = None
    decay: str = "none"
    weight_decay: float = 0.0
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    damping: float | None = None
    curvature: str | None = None
    scale_free: bool | None = None
    kl_clip: float | None = None
    factor_decay: float | None = None
    refresh_every: int | None = None
    invert_every: int | None = None
    step_rms: float | None = None
    momentum_first: bool = False
    floor: float | None = None
    role: LayerRole = "weight"
    invariant: bool | None = None
    together: tuple[str, ...] = ()
    size: int = 0
    rounding: float = 0.0
    lost: bool = False
    frozen: bool = False
    stepped: bool = True

    @property
    def decays(self) -> bool:
        """Whether there is a decay term at all."""
        return self.decay != "none" and self.weight_decay > 0

    @property
    def recorded(self) -> bool:
        """Whether it is known how it is stepped; by an lr or, where there is none, an optimizer."""
        return self.lr is not None or bool(self.optimizer)

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults; numbers that are not finite as the words float() reads.

        >>> LayerSettings(law="sgd", lr=0.1).to_json()
        {'law': 'sgd', 'lr': 0.1}
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
            if value != DEFAULTS[name]
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LayerSettings":
        """The inverse of `to_json`; keys that this version does not know are left out."""
        return cls(**{name: _read(name, v) for name, v in values.items() if name in DEFAULTS})


DEFAULTS = {item.name: item.default for item in fields(LayerSettings)}
_FLOATS = {f.name for f in fields(LayerSettings) if f.type is float or float in get_args(f.type)}


def _read(name: str, value: Any) -> Any:
    if name in _FLOATS and isinstance(value, str | int):
        return float(value)
    return tuple(value) if isinstance(value, list) else value
