"""nn.Linear, and Hugging Face's Conv1D: a Linear whose weight is transposed."""

import sys
from typing import Any

from torch import Tensor, nn

from decaylab.curvature.kinds.kind import Kind, Site
from decaylab.networks.layers import NormalisedLinear


class Linear(Kind):
    """s = W a + b for vectors along the last axis."""

    bases = (nn.Linear,)
    known = (NormalisedLinear,)


class TransposedLinear(Kind):
    """s = a W + b: `transformers.pytorch_utils.Conv1D`, in GPT-2 and its like."""

    functional = False
    transposed = True

    def base(self, module: nn.Module) -> type[nn.Module] | None:
        """Conv1D, where somebody has imported it."""
        library: Any = sys.modules.get("transformers.pytorch_utils")
        known = getattr(library, "Conv1D", None)
        return known if known is not None and isinstance(module, known) else None

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """The weight is [in, out]."""
        return 1, weight.shape[0], weight.shape[1]

    def as_weight(self, site: Site, rows: Tensor) -> Tensor:
        """A transposed view."""
        return rows[0].mT
