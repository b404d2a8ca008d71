"""The layers that have a Kronecker-factored block: a registry, one file per kind."""

from torch import nn

from decaylab.curvature.kinds.conv import Conv
from decaylab.curvature.kinds.embedding import Embedding
from decaylab.curvature.kinds.grouped import Attention, Experts, TransposedExperts
from decaylab.curvature.kinds.kind import Kind
from decaylab.curvature.kinds.linear import Linear, TransposedLinear
from decaylab.curvature.kinds.recurrent import Recurrent
from decaylab.curvature.kinds.transposed_conv import TransposedConv

KINDS: list[Kind] = [
    Linear(),
    Conv(),
    TransposedConv(),
    Embedding(),
    TransposedLinear(),
    Attention(),
    Recurrent(),
    Experts(),
    TransposedExperts(),
]


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a layer; None for modules that are no layer, or compute something else."""
    return next((kind for kind in KINDS if kind.matches(module)), None)


def base_of(module: nn.Module) -> type[nn.Module] | None:
    """The known layer class that a module is an instance of, whatever it computes."""
    bases = (kind.base(module) for kind in KINDS)
    return next((base for base in bases if base is not None), None)
