"""The generalization gap (Sec. 4.2, Fig. 5): test loss minus training loss."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.curvature.untouched import BatchNormMode, check_inputs, check_logits, untouched
from decaylab.errors import DecaylabError
from decaylab.probes.reading import Reading

Batches = Iterable[tuple[Tensor, Tensor]]


def generalization_gap(
    model: nn.Module,
    train: Batches,
    test: Batches,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_norm: BatchNormMode = "eval",
) -> Reading:
    """Mean test loss minus mean training loss over all given (inputs, targets), in nats.

    `loss(logits, targets)` returns one value per row; cross entropy by default. The standard error
    is that of the difference of two means over independent rows. Cost: one forward pass.
    """
    of_rows = loss or (lambda logits, y: F.cross_entropy(logits, y, reduction="none"))
    means, variances = {}, {}
    with untouched(model, batch_norm=batch_norm) as bare_model, torch.no_grad():
        for name, batches in (("train", train), ("test", test)):
            parts = []
            for inputs, targets in batches:
                check_inputs(bare_model, inputs)
                parts.append(of_rows(check_logits(bare_model(inputs)), targets).double().flatten())
            if not parts:
                raise DecaylabError(f"the {name} batches are empty: give at least one batch")
            values = torch.cat(parts)
            means[name] = float(values.mean())
            variances[name] = float(values.var()) / len(values) if len(values) > 1 else math.nan
    gap = means["test"] - means["train"]
    error = math.sqrt(variances["test"] + variances["train"])
    return Reading("generalization_gap", "nat", total=gap, total_error=error)
