"""Norms of the weights."""

import math

from torch import nn

from decaylab.probes.layers import Layers, joined_norms, layers_of
from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register


def weight_norms(model: nn.Module | Layers) -> Reading:
    """|W_l| of every layer: Euclidean norm of the weight without bias. The total is of all."""
    values = joined_norms(layers_of(model).weights)
    total = math.sqrt(sum(value**2 for value in values.values()))
    return Reading("weight_norm", "weight", values, total)


def _measure(moment: Moment) -> Reading:
    """Of gains and other vectors too, which are not in the total."""
    weights, vectors = weight_norms(moment.layers), joined_norms(moment.layers.vectors)
    return Reading("weight_norm", "weight", {**weights.layers, **vectors}, weights.total)


register(Probe("weight_norm", "free", _measure, unit="weight"))
