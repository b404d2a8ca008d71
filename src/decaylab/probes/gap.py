"""The generalization gap (Sec. 4.2, Fig. 5): test loss minus training loss."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.curvature.preserve import BatchNormMode, check_inputs, check_logits, untouched
from decaylab.errors import BadValue, Lacks
from decaylab.probes.reading import Reading

Batches = Iterable[tuple[Tensor, Tensor]]
PADDING = -100


def generalization_gap(
    model: nn.Module,
    train: Batches,
    test: Batches,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_norm: BatchNormMode = "eval",
) -> Reading:
    """Mean test loss minus mean training loss over all given (inputs, targets), in nats.

    `loss(logits, targets)` returns one value per row; by default the cross entropy of logits
    [..., C], without the rows whose target is -100 (torch's mark for padding). The standard error
    is that of the difference of two means over independent rows. Cost: one forward pass.
    """
    of_rows = loss or _cross_entropy
    means, variances = {}, {}
    with untouched(model, batch_norm=batch_norm) as bare_model, torch.no_grad():
        for name, batches in (("train", train), ("test", test)):
            parts = []
            for inputs, targets in batches:
                check_inputs(bare_model, inputs)
                losses = of_rows(check_logits(bare_model(inputs)), targets)
                if losses.ndim == 0:
                    wanted = "one number per row, as reduction='none' gives"
                    raise BadValue("the loss of a batch", float(losses), wanted)
                parts.append(losses.double().flatten())
            if not any(map(len, parts)):
                raise Lacks(f"the {name} set", "batches", "give at least one")
            values = torch.cat(parts)
            means[name] = float(values.mean())
            variances[name] = float(values.var()) / len(values) if len(values) > 1 else math.nan
    gap = means["test"] - means["train"]
    error = math.sqrt(variances["test"] + variances["train"])
    return Reading("generalization_gap", "nat", total=gap, total_error=error)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each row: of [..., C], or where the targets say so of torch's [N, C, ...]."""
    if targets.shape in (logits.shape, logits.shape[:-1]):
        targets = targets.flatten(0, logits.ndim - 2)
        logits = logits.flatten(0, -2)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses if targets.is_floating_point() else losses[targets != PADDING]
