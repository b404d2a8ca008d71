"""The effective learning rate of scale-invariant layers (Eq. 9)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from decaylab.errors import DecaylabError
from decaylab.optim.decay import LawName, learning_rate
from decaylab.optim.laws import law_named, law_of
from decaylab.probes.layers import Layers, groups_of, joined_norms, layers_of
from decaylab.probes.reading import Reading, row_name
from decaylab.probes.registry import Moment, Probe, register


@dataclass(frozen=True)
class EffectiveLearningRate(Reading):
    """By scale-invariant layer; `defects`: how far from invariant each is (nan: not measured)."""

    law: str = ""
    defects: Mapping[str, float] = field(default_factory=dict)

    def rows(self) -> dict[str, float]:
        """As `Reading.rows`, with the measured defects under `invariance/layer`."""
        measured = {k: v for k, v in self.defects.items() if not math.isnan(v)}
        return super().rows() | {row_name("invariance", k): v for k, v in measured.items()}


def effective_learning_rate(
    model: nn.Module | Layers,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor | None = None,
    *,
    law: LawName | None = None,
) -> EffectiveLearningRate:
    """How fast each scale-invariant layer's direction turns, per unit of what drives it (Eq. 9).

    For an invariant layer the loss depends on the direction u = W/|W| alone, its gradient is
    orthogonal to W and grad L(W) = grad L(u) / |W|. A step W -= lr p then changes u by
    -(lr/|W|) (I - uu') p + O(lr^2), and it remains to see how p depends on |W|:

    - SGD: p = grad L(W) = grad L(u) / |W|, so the direction moves with **lr / |W|^2** (Eq. 9).
      Momentum mu multiplies that by 1/(1 - mu) in the long run; it is not included.
    - Adam: p = m / (sqrt(v) + eps) does not change when all gradients are multiplied by a number:
      the factor 1/|W| of the gradient cancels and **lr / |W|** is left (while |W| changes slowly
      against Adam's averages, and eps is negligible). The same holds for other optimizers that
      divide by a running gradient size.
    - K-FAC: p = C(W)^-1 grad L(W), and C(W) = C(u) / |W|^2 (Eq. 13): p = |W| C(u)^-1 grad L(u), and
      the direction moves with **lr** whatever the norm. That is the undamped step. With damping
      lambda (Eq. 14) p = |W| (C(u) + lambda |W|^2 I)^-1 grad L(u): as before where eigenvalues of
      C(u) exceed lambda |W|^2, and lr / (lambda |W|^2), SGD's law, where they do not.
      `effective_damping` measures which of the two it is.

    With `inputs`, invariant is what `invariance(model, inputs)` finds (LayerNorm, GroupNorm and
    weight-normalised nets included), with its defect: one forward pass per layer. Without, it is
    read off the order of the modules and costs nothing. `law` overrides the
    optimizer's kind.
    """
    layers = layers_of(model, inputs)
    groups = groups_of(layers, optimizer)
    weights = {
        layer: parameters
        for layer, parameters in layers.weights.items()
        if layer in layers.defects and layer in groups
    }
    values, used = {}, set()
    for layer, norm in joined_norms(weights).items():
        kind = law_named(law) if law else law_of(optimizer, groups[layer])
        power = kind.norm_power
        if power is None:
            raise DecaylabError(
                f"the effective learning rate of {type(optimizer).__name__} is not known: say which"
                " law it follows, 'sgd', 'adam' or 'kfac', as group['law'] in its param groups"
                " (docs/extend.md)"
            )
        lr = learning_rate(groups[layer], optimizer)
        if lr is None:
            raise DecaylabError(
                f"the effective learning rate of {type(optimizer).__name__} is not known: it finds"
                " its learning rate itself"
            )
        used.add((power, kind.name))
        values[layer] = _effective(power, float(lr), norm)
    units = {2: "lr / weight^2", 1: "lr / weight", 0: "lr"}
    kinds = sorted(used, reverse=True)
    return EffectiveLearningRate(
        "effective_lr",
        " or ".join(dict.fromkeys(units[power] for power, _ in kinds)),
        values,
        law=" and ".join(name for _, name in kinds),
        defects={layer: layers.defects[layer] for layer in values},
    )


def _effective(power: int, lr: float, norm: float) -> float:
    return math.inf if norm == 0.0 and power else lr / norm**power


def _measure(moment: Moment) -> list[Reading]:
    rates, unknown = [], None
    for optimizer in moment.optimizers:
        try:
            rates.append(effective_learning_rate(moment.layers, optimizer))
        except DecaylabError as error:  # its law is not known
            unknown = error
    if unknown is not None and not any(rate.layers for rate in rates):
        raise unknown
    layers = {layer: value for rate in rates for layer, value in rate.layers.items()}
    units = " or ".join(dict.fromkeys(rate.unit for rate in rates if rate.unit))
    return [Reading("effective_lr", units, layers)]


register(Probe("effective_lr", "free", _measure, unit="lr / weight^power"))
