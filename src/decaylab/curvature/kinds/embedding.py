"""nn.Embedding: a Linear of one-hot vectors, whose input factor is diagonal: token counts.

    s = W' e_token,    A = diag(count of each token / positions),    S = mean of g g'

Every position is a row, whatever `sharing` says: an average of one-hot vectors is none.
"""

from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.kinds.kind import Kind, Reason, Site, Use
from decaylab.curvature.kinds.rows import Sharing, product_ready, second_moment


class Embedding(Kind):
    """A row of W for each number; `padding_idx`, whose row does not learn, does not count."""

    bases = (nn.Embedding,)
    functional = False
    input_diagonal = True
    transposed = True

    def refusal(self, module: Any) -> Reason | None:
        """What torch does to the weight or its gradient behind the scenes."""
        if module.sparse:
            return Reason.SPARSE
        if module.max_norm is not None:
            return Reason.RENORMALISED
        return Reason.BY_FREQUENCY if module.scale_grad_by_freq else None

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """The weight is [tokens, width]."""
        return 1, weight.shape[0], weight.shape[1]

    def as_weight(self, site: Site, rows: Tensor) -> Tensor:
        """A transposed view."""
        return rows[0].mT

    def input_moment(
        self, site: Site, uses: list[Use], sharing: Sharing
    ) -> tuple[Tensor, Tensor | float]:
        """How often each token is met: [1, tokens]."""
        device = uses[0].inputs.device
        total = torch.zeros(site.shape.wide(device), dtype=site.shape.dtype, device=device)
        count: Tensor | float = 0.0
        for use in uses:
            weights = _weights(site, use)
            numbers = use.inputs.reshape(-1)
            if weights is None:
                total.index_add_(0, numbers, total.new_ones(()).expand(len(numbers)))
                count = count + len(numbers)
            else:
                total.index_add_(0, numbers, weights.to(total.dtype))
                count = count + weights.sum().to(total.dtype)
        return total[None], count

    def gradient_moment(
        self, site: Site, uses: list[Use], gradients: list[Tensor], sharing: Sharing
    ) -> Tensor:
        """Sum of g g' over positions: [1, width, width]."""
        rows = []
        for use, gradient in zip(uses, gradients, strict=True):
            ready = product_ready(gradient, site.shape.dtype).reshape(-1, gradient.shape[-1])
            padding: Any = site.module.padding_idx
            if padding is not None:
                ready = ready * (use.inputs.reshape(-1, 1) != padding).to(ready.dtype)
            rows.append(ready)
        vectors = torch.cat(rows)[None]
        return second_moment(vectors, site.shape.dtype, diagonal=site.shape.output_diagonal)


def _weights(site: Site, use: Use) -> Tensor | None:
    """Which positions count, [positions]; None: all."""
    padding: Any = site.module.padding_idx
    weights = None if use.counted is None else use.counted.reshape(-1)
    if padding is None:
        return weights
    real = use.inputs.reshape(-1) != padding
    return real if weights is None else real & (weights != 0)
