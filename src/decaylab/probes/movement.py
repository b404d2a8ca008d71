"""What a step does to the weights: how far it moves them, how far it turns them."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from decaylab.errors import DecaylabError
from decaylab.probes.layers import Layers, joined, layers_of, listed, places_in, real, summed
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
        raise DecaylabError("the snapshot is of another model, or of other trainable layers")
    lengths: dict[str, float] = {}
    angles: dict[str, float] = {}
    places = places_in(before)
    if places:
        with torch.no_grad():
            w = [_wide(before[layer][name]) for layer, name in places]
            d = torch._foreach_sub([_wide(now[layer][name]) for layer, name in places], w)
            products = [torch.dot(a.flatten(), b.flatten()) for a, b in zip(d, w, strict=True)]
            old, moved, dot = listed(torch._foreach_norm(w), torch._foreach_norm(d), products)
            norms, dots = joined(places, old), summed(places, dot)
            along = {k: dots[k] / norm**2 if norm else math.nan for k, norm in norms.items()}
            # the part of the move across the old direction, by subtraction of vectors, not of norms
            parts = torch._foreach_mul(w, [-along[layer] for layer, _ in places])
            (rest,) = listed(torch._foreach_norm(torch._foreach_add(d, parts)))
        lengths, across = joined(places, moved), joined(places, rest)
        sizes = summed(places, [tensor.numel() for tensor in w])
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
    """Real, and in at least 32 bits: products of 16-bit numbers leave their range."""
    tensor = real(tensor)
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
        moves = torch._foreach_sub(
            [_wide(now[layer][name]) for layer, name in places],
            [_wide(before[layer][name]) for layer, name in places],
        )
        earlier = [_wide(update[layer][name]) for layer, name in places]
        pairs = zip(moves, earlier, strict=True)
        products = [torch.dot(a.flatten(), b.flatten()) for a, b in pairs]
        columns = listed(products, torch._foreach_norm(moves), torch._foreach_norm(earlier))
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
