"""What a probe returns: numbers by layer, each with its standard error, unit and name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decaylab.errors import DecaylabWarning, warn_user

MOST_NAMES = 4  # in a sentence


class NonFiniteWarning(DecaylabWarning):
    """A probe measured something that is not a finite number; the message names some layers."""


@dataclass(frozen=True)
class Reading:
    """One quantity of a model.

    Attributes:
        name: the quantity's name in records; a layer's row is `name/layer`.
        unit: what the numbers are in; "1" for a pure number.
        layers: value by layer, layers named as `named_modules` names them.
        total: the whole model's value, where there is one. Not always the sum of the layers.
        errors: standard error by layer; empty if the values are exact on the given batch.
        total_error: standard error of the total; None if it is exact.
    """

    name: str
    unit: str
    layers: Mapping[str, float] = field(default_factory=dict)
    total: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    total_error: float | None = None

    def __post_init__(self) -> None:
        if self.non_finite:
            warn_user(self.not_finite_sentence(), NonFiniteWarning)

    @property
    def non_finite(self) -> tuple[str, ...]:
        """Where the value is nan or infinite: layers, and "the model" for the total."""
        bad = [_words(layer) for layer, value in self.layers.items() if not math.isfinite(value)]
        if self.total is not None and not math.isfinite(self.total):
            bad.append("the model")
        return tuple(bad)

    def not_finite_sentence(self) -> str:
        """What is not finite, with the names of some layers."""
        bad = self.non_finite
        more = f" and {len(bad) - MOST_NAMES} more" if len(bad) > MOST_NAMES else ""
        return f"{self.name} is not finite: {', '.join(bad[:MOST_NAMES])}{more}"

    def rows(self) -> dict[str, float]:
        """The values under the names they have in records: `name` and `name/layer`.

        >>> Reading("weight_norm", "1", {"fc": 2.0}, total=2.0).rows()
        {'weight_norm': 2.0, 'weight_norm/fc': 2.0}
        """
        total = {} if self.total is None else {self.name: self.total}
        return total | {row_name(self.name, layer): v for layer, v in self.layers.items()}


def row_name(name: str, layer: str) -> str:
    """The record name of one layer's value; the model's own parameters go under `model`."""
    return f"{name}/{layer or 'model'}"


def numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """0-d tensors as floats, with one host synchronisation for all."""
    if not values:
        return {}
    listed = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, listed, strict=True))


def standard_error(draws: Tensor) -> Tensor:
    """Standard error of the mean of independent draws along axis 0; nan for a single draw."""
    return draws.std(0) / math.sqrt(len(draws))


def _words(layer: str) -> str:
    return f"layer {layer!r}" if layer else "the model's own parameters"
