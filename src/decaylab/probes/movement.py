"""What a step does to the weights: how far it moves them, how far it turns them."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from decaylab.errors import DecaylabError
from decaylab.networks.sharded import Parts, local
from decaylab.probes.layers import Layers, joined, layers_of, listed, places_in, summed
from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register

Snapshot = Mapping[str, Mapping[str, Tensor]]
"""The weights of every layer at one moment: layer name -> parameter name -> values."""


def snapshot(model: nn.Module | Layers) -> Snapshot:
    """Copy the weights, for `update_norms` and `rotations` after a step."""
    return {
        layer: {name: weight.detach().clone() for name, weight in weights.items()}
        for layer, weights in layers_of(model).weights.items()
    }


def update_norms(model: nn.Module | Layers, before: Snapshot) -> Reading:
    """|W_l - W_l(before)| of every layer: the length of what moved it, decay included."""
    return movement(model, before)[0]


def rotations(model: nn.Module | Layers, before: Snapshot) -> Reading:
    """Angle between the directions W_l / |W_l| before and now (Sec. 4.1), in radians, 0 to pi.

    tan(angle) = |d - (d.u) u| / (|W_l(before)| + d.u) for the move d and the old direction u:
    precise for small angles too. 0 where decay alone acted; a weight of zeros has no direction, and
    no row; nor has a single number (a temperature).
    """
    return movement(model, before)[1]


def movement(model: nn.Module | Layers, before: Snapshot) -> tuple[Reading, Reading]:
    """`update_norms` and `rotations` together."""
    now = layers_of(model).weights
    if now.keys() != before.keys():
        raise DecaylabError(
            "the snapshot is of another model, or of other trainable layers: take one of this model"
        )
    lengths: dict[str, float] = {}
    angles: dict[str, float] = {}
    places = places_in(before)
    if places:
        with torch.no_grad():
            parts = Parts.of(before[layer][name] for layer, name in places)
            w = [_wide(tensor) for tensor in parts.tensors]
            d = torch._foreach_sub([_wide(local(now[layer][name])) for layer, name in places], w)
            old, moved, dot = listed(parts.norms(w), parts.norms(d), parts.dots(d, w))
            norms, dots = joined(places, old), summed(places, dot)
            along = {k: dots[k] / norm**2 if norm else math.nan for k, norm in norms.items()}
            # the part of the move across the old direction, by subtraction of vectors, not of norms
            along_w = torch._foreach_mul(w, [-along[layer] for layer, _ in places])
            (rest,) = listed(parts.norms(torch._foreach_add(d, along_w)))
        lengths, across = joined(places, moved), joined(places, rest)
        sizes = summed(places, [before[layer][name].numel() for layer, name in places])
        angles = {
            k: math.atan2(across[k], norm * (1 + along[k]))
            for k, norm in norms.items()
            if norm and sizes[k] > 1
        }
    return (
        Reading("update_norm", "weight", lengths),
        Reading("rotation", "radian", angles),
    )


def _wide(tensor: Tensor) -> Tensor:
    """In at least 32 bits: products of 16-bit numbers leave their range."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def with_vectors(layers: Layers) -> Layers:
    """Gains and other vectors counted among the weights."""
    return replace(layers, weights={**layers.weights, **layers.vectors})


def _movement(moment: Moment) -> tuple[Reading, ...]:
    if moment.before is None:
        return ()
    return movement(with_vectors(moment.layers), moment.before)


def update_correlation(now: Snapshot, before: Snapshot, update: Snapshot) -> Reading:
    """Cosine between the last move, `now` - `before`, and `update`, the one before it, by layer.

    0 for steps of independent gradients; momentum mu brings about mu. Decay's own share of the
    moves, of the order of lr * weight_decay, is in it.
    """
    places = places_in(update)
    with torch.no_grad():
        parts = Parts.of(update[layer][name] for layer, name in places)
        earlier = [_wide(tensor) for tensor in parts.tensors]
        moves = torch._foreach_sub(
            [_wide(local(now[layer][name])) for layer, name in places],
            [_wide(local(before[layer][name])) for layer, name in places],
        )
        columns = listed(parts.dots(moves, earlier), parts.norms(moves), parts.norms(earlier))
    dots, (first, second) = summed(places, columns[0]), (joined(places, c) for c in columns[1:])
    lengths = {layer: first[layer] * second[layer] for layer in dots}
    values = {layer: dots[layer] / lengths[layer] for layer in dots if lengths[layer]}
    return Reading("update_correlation", "1", values)


def _update_correlation(moment: Moment) -> tuple[Reading, ...]:
    if moment.before is None or moment.earlier is None:
        return ()
    now = with_vectors(moment.layers).weights
    if now.keys() != moment.earlier.keys():
        return ()  # some were frozen or thawed in between
    return (update_correlation(now, moment.before, moment.earlier),)


register(
    Probe("movement", "free", _movement, unit="weight, radian", rows=("rotation", "update_norm"))
)
register(Probe("update_correlation", "free", _update_correlation, unit="1", follows=True))
