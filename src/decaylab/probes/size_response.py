"""How the outputs respond to the scale of each layer, measured on a batch.

The mode is train mode: batch statistics of the batch, running ones untouched (`networks.
scale_invariance`). It is measured again while a run goes on: gains that start at zero hide it. The
cost class is "many": two to five forward passes a layer; but it is due seldom, about three times in
a run, so that it is on wherever there is a batch to measure it on.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from decaylab.curvature.preserve import bare, untouched
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.networks.scale_invariance import Invariance, measure_invariance
from decaylab.probes.layers import Layers
from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register
from decaylab.records.settings import LayerRole

PERCENT = 0.01
BATCH = 32  # training images that it is measured on in runs of ours


def measured_invariance(model: nn.Module, inputs: Inputs, logits: LogitsRule = None) -> Invariance:
    """`measure_invariance` on a model that is being trained: a K-FAC attached to it is paused."""
    with untouched(model):
        return measure_invariance(bare(model), inputs, logits=logits)


def with_invariance(layers: Layers, measured: Invariance) -> Layers:
    """The layers with what was measured in place of what the order of modules says."""
    known = {
        layer: measured.invariant(layer) for layer in layers.weights if layer in measured.defects
    }
    defects = {layer: measured.defects[layer] for layer, yes in known.items() if yes}
    roles: dict[str, LayerRole] = {**layers.roles}
    roles |= {layer: "adapter" for layer in layers.weights if layer in measured.adapters}
    return replace(layers, defects=defects, scaled={}, measured=measured, roles=roles)


def size_responses(
    measured: Invariance, layers: Layers, rates: Mapping[str, float]
) -> list[Reading]:
    """Readings of what was measured, per percent of scale; `rates`: decay's, by layer.

    - `invariance/layer`: the relative change of the logits when the layer alone is doubled; left
      out where the logits do not depend on it now.
    - `size_response/layer`: d log|z| per percent of the layer's scale, `direction_response/layer`:
      the angle in radians by which the logits z turn. Exact invariance is 0 and 0.
    - `decay_response`: |dz|/|z| for each percent that decay takes off the layer that it shrinks
      fastest, all layers shrinking at its own rates: near 0 where the function sees nothing of it.
    """
    names = [layer for layer in (*layers.weights, *layers.vectors) if layer in measured.defects]
    defects = {k: measured.defects[k] for k in names if measured.invariant(k) is not None}
    responses = {layer: measured.size_response(layer) for layer in names}
    readings = [
        Reading("invariance", "1", defects),
        Reading("size_response", "1 / %", {k: PERCENT * r.size for k, r in responses.items()}),
        Reading(
            "direction_response",
            "radian / %",
            {k: PERCENT * r.direction for k, r in responses.items()},
        ),
    ]
    fastest = max(rates.values(), default=0.0)
    if fastest > 0 and not any(map(math.isnan, rates.values())):  # not found by the optimizer
        known = {k: rate / fastest for k, rate in rates.items() if k in measured.defects}
        total = PERCENT * measured.response_along(known).total
        readings.append(Reading("decay_response", "1 / %", total=total))
    return readings


def _measure(moment: Moment) -> list[Reading]:
    measured = moment.layers.measured
    if measured is None and moment.images is not None:
        measured = measured_invariance(moment.model, next(moment.images.train(BATCH)))
    return [] if measured is None else size_responses(measured, moment.layers, moment.rates)


register(
    Probe(
        "size_response",
        "many",
        _measure,
        needs_inputs=True,
        unit="1 / %",
        when="seldom",
        how={"batch_norm": "train"},
    )
)
