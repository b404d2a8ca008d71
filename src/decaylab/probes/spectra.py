"""Spectra of the weights, by layer: largest singular value, stable rank, outliers, heads.

Optional: a singular value decomposition per layer. Weights are matrices [out, rest]; those longer
than `LONGEST` on both sides are left out. A sharded weight is gathered on every process, one at a
time.
"""

import math

import torch
from torch import Tensor, nn

from decaylab.networks.sharded import whole
from decaylab.probes.layers import layers_of
from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register

LONGEST = 4096
HEAD_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
QUERY_KEY = (("q_proj", "k_proj"), ("query", "key"), ("wq", "wk"), ("to_q", "to_k"))
JOINED = ("in_proj_weight", "c_attn", "qkv", "qkv_proj")
RANK_SHARE = 0.99  # the part of the sum of squares that the effective rank of a head's product has


def spectra(model: nn.Module) -> list[Reading]:
    """`spectral_norm`, `stable_rank` and `outlier_share` of every layer's weight.

    With singular values s_1 >= s_2 >= ...: s_1; |W|_F^2 / s_1^2, which lies between 1 and the rank;
    and the part of |W|_F^2 in singular values beyond the edge that a matrix of independent entries
    of the same size has, (sqrt(m) + sqrt(n)) |W|_F / sqrt(m n) (Marchenko and Pastur): what
    training has put there. Of a layer with several weights, of the largest one.
    """
    norms, ranks, outliers = {}, {}, {}
    for layer, weights in layers_of(model).weights.items():
        largest_weight = max(weights.values(), key=Tensor.numel).detach()
        m = largest_weight.shape[0]
        n = largest_weight.numel() // m
        if min(m, n) > LONGEST:
            continue
        matrix = whole(largest_weight).flatten(1)
        squares = torch.linalg.svdvals(_single(matrix)).double().square()
        total, largest = float(squares.sum()), float(squares[0])
        if not (math.isfinite(total) and largest > 0):
            continue
        edge = (math.sqrt(m) + math.sqrt(n)) ** 2 * total / (m * n)
        norms[layer], ranks[layer] = math.sqrt(largest), total / largest
        outliers[layer] = float(squares[squares > edge].sum()) / total
    return [
        Reading("spectral_norm", "weight", norms),
        Reading("stable_rank", "1", ranks),
        Reading("outlier_share", "1", outliers),
    ]


def head_ranks(model: nn.Module) -> Reading:
    """Effective rank of W_Q W_K' of each attention head, as `layer.head`.

    So many singular values have 99 % of its sum of squares; at most the width of a head. Found are
    `nn.MultiheadAttention` and modules with their number of heads and one of the usual names for
    query and key projections, apart or joined (`QUERY_KEY`, `JOINED`); of grouped keys, each query
    head with the key head that it shares.
    """
    values = {}
    for name, module in model.named_modules():
        for head, (query, key) in enumerate(_heads(module)):
            squares = torch.linalg.svdvals(_single(query).mH @ _single(key)).double().square()
            reached = torch.cumsum(squares, 0) >= RANK_SHARE * squares.sum()
            values[f"{name or 'model'}.{head}"] = float(reached.double().argmax() + 1)
    return Reading("head_rank", "1", values)


def _heads(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """W_Q and W_K of each head, [width of a head, in]; nothing where these are not found."""
    counts = [getattr(module, name, None) for name in HEAD_COUNTS]
    count = next((n for n in counts if isinstance(n, int) and n > 0), None)
    projections = None if count is None else _projections(module)
    if count is None or projections is None:
        return []
    query, key = projections
    width = query.shape[0] // count
    if not width or query.shape[0] % count or key.shape[0] % width:
        return []
    shared = max(count * width // key.shape[0], 1)  # query heads for each key head
    heads = [(query[i * width :][:width], key[i // shared * width :][:width]) for i in range(count)]
    return [(q.detach(), k.detach()) for q, k in heads]


def _projections(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """W_Q and W_K, [out, in] each."""
    for names in QUERY_KEY:
        apart = [_matrix(getattr(module, name, None)) for name in names]
        if apart[0] is not None and apart[1] is not None:
            return apart[0], apart[1]
    for name in JOINED:
        part = getattr(module, name, None)
        joined = whole(part) if isinstance(part, Tensor) else _matrix(part)
        if joined is not None and joined.ndim == 2 and joined.shape[0] == 3 * joined.shape[1]:
            query, key, _ = joined.chunk(3)
            return query, key
    return None


def _matrix(module: object) -> Tensor | None:
    """The weight [out, in] of a linear layer; transformers' Conv1D has it the other way round."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    weight = whole(weight)
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _single(matrix: Tensor) -> Tensor:
    """In 32 bits, or pairs of 32 where complex: of 16, torch has no singular values."""
    return matrix.to(torch.cfloat if matrix.is_complex() else torch.float)


def _measure(moment: Moment) -> list[Reading]:
    return [*spectra(moment.model), head_ranks(moment.model)]


register(Probe("spectra", "many", _measure, unit="weight, 1", when="tenth"))
