"""What Adam remembers of the gradients' size: the second moment, by layer."""

import torch
from torch import nn

from decaylab.probes.reading import Reading
from decaylab.probes.weights import Layers, layers_of


def second_moments(model: nn.Module | Layers, optimizer: torch.optim.Optimizer) -> list[Reading]:
    """|v| of every layer: Adam's second moment v = (1 - beta2) sum_k beta2^k g^2, summed (L1).

    As the optimizer holds it, not divided by 1 - beta2^step: of two records n steps apart, v - v'
    beta2^n is what the gradients in between were (`diagnosis.memory` asks for that). One number a
    layer, no pass; nothing where the optimizer keeps no `exp_avg_sq` (SGD, K-FAC's own layers).
    """
    found = {}
    for layer, weights in layers_of(model).weights.items():
        states = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in weights.values()]
        kept = [v.detach().sum(dtype=torch.float64) for v in states if v is not None]
        if kept and len(kept) == len(states):
            found[layer] = torch.stack(kept).sum()
    if not found:
        return []
    values = torch.stack(list(found.values())).tolist()
    return [Reading("second_moment", "gradient^2", dict(zip(found, values, strict=True)))]
