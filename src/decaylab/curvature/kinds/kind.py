"""What a kind of layer must know: its matrix, the vectors that meet it, and what comes back.

A new kind of layer is a subclass of `Kind` in a file of its own, and an entry in `KINDS`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from decaylab.curvature.kinds.rows import (
    Columns,
    Sharing,
    by_example,
    counted_rows,
    joined,
    product_ready,
    second_moment,
    shared,
    vector_rows,
)
from decaylab.curvature.storage import PACKED_ABOVE, packed_shape


class Reason(Enum):
    """Why a parameter is in a block, or in none."""

    COVERED = "covered"
    FROZEN = "frozen"
    TIED = "tied"
    EXCLUDED = "excluded"
    OWN_CODE = "own code"
    NO_BLOCK = "no block"
    NO_PART = "no part"
    COMPUTED = "computed"
    SPARSE = "sparse"
    RENORMALISED = "renormalised"
    BY_FREQUENCY = "by frequency"
    SHARED_BIAS = "shared bias"
    OTHER_PRODUCT = "other product"


class Shape(NamedTuple):
    """What blocks must share to be stacked: the lengths of both sides, and which are diagonal.

    `input_dim` counts the bias (the homogeneous 1), where there is one: it comes last.
    `transposed`: the weight lies in memory as [in, out].
    """

    input_dim: int
    output_dim: int
    bias: bool
    input_diagonal: bool
    output_diagonal: bool
    dtype: torch.dtype
    transposed: bool = False

    @property
    def width(self) -> int:
        """The input side without the bias."""
        return self.input_dim - self.bias

    def stored(self, device: torch.device) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How both sides of an entry are kept: as diagonals, matrices or triangles."""
        sides = (self.wide(device), self.input_diagonal), (self.output_dim, self.output_diagonal)
        return tuple(  # type: ignore[return-value]
            (length,)
            if diagonal
            else packed_shape(length)
            if length > PACKED_ABOVE
            else (length, length)
            for length, diagonal in sides
        )

    def wide(self, device: torch.device) -> int:
        """The input side with zeros behind it, to a size that tensor cores take."""
        return -(-self.input_dim // 32) * 32 if device.type == "cuda" else self.input_dim


class Use(Protocol):
    """One product of a site's matrix in a forward pass.

    Attributes:
        inputs: what the matrix was multiplied with.
        counted: [output's axes but the last] the positions that take part, in a masked pass.
        offset: where the matrix used begins in the parameter, in numbers: of a part of it.
        shape: of the output.
        ends: where the rows of each group end, of a product of all groups; None: of one product.
            To ask for it may wait for the device, once.
    """

    inputs: Tensor
    counted: Tensor | None
    offset: int
    shape: torch.Size

    @property
    def ends(self) -> list[int] | None:
        """See above."""


@dataclass(frozen=True, eq=False)
class Site:
    """A place in a model where a matrix meets vectors.

    Attributes:
        name: of the layer, as `named_modules` has it; of a bare parameter, its own.
        kind: what the layer does.
        module: the layer.
        weight, bias: its parameters, as they were when this was planned.
        weight_name, bias_name: what `named_parameters` calls them, tied ones included.
        trains_weight, trains_bias: which of them the block is of.
        groups: number of matrices: of a grouped convolution, of query, key and value, of experts.
        shape: of each.
        order: for each entry of `weight.flatten(1)`, where it is stored; None if that is so.
    """

    name: str
    kind: "Kind"
    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    weight_name: str
    bias_name: str
    trains_weight: bool
    trains_bias: bool
    groups: int
    shape: Shape
    order: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The parameters in the block."""
        pairs = ((self.trains_weight, self.weight), (self.trains_bias, self.bias))
        return [part for trained, part in pairs if trained and part is not None]

    @property
    def trained(self) -> bool:
        """Whether anything of it is not frozen now."""
        return any(part.requires_grad for part in self.parts)

    @property
    def is_embedding(self) -> bool:
        """Whether it looks rows of its weight up, by numbers."""
        return self.kind.input_diagonal and self.kind.transposed

    @cached_property
    def columns(self) -> Columns:
        """What a row of inputs holds."""
        return Columns(self.trains_weight, self.trains_bias, self.shape.wide(self.weight.device))

    @cached_property
    def stored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How both sides of an entry are kept; see `Shape`."""
        return self.shape.stored(self.weight.device)

    def as_weight(self, rows: Tensor) -> Tensor:
        """A view of rows [groups, out, in] in the shape of the weight."""
        return self.kind.as_weight(self, rows)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """A tensor in the shape of the weight as [groups, out, in], in the order of `weight`."""
        if self.shape.transposed:
            return weight.reshape(self.groups, self.shape.width, -1).mT
        return weight.reshape(self.groups, self.shape.output_dim, -1)

    def in_weight_order(self, side: Tensor) -> Tensor:
        """A stored input side [groups, dim(, dim)] in the order of `weight.flatten(1)`."""
        return side if self.order is None else _reordered(side, self._stored_at(side))

    def in_stored_order(self, side: Tensor) -> Tensor:
        """What undoes `in_weight_order`."""
        return side if self.order is None else _reordered(side, self._stored_at(side).argsort())

    def _stored_at(self, side: Tensor) -> Tensor:
        assert self.order is not None
        behind = torch.arange(len(self.order), side.shape[1])
        return torch.cat([self.order, behind]).to(side.device)


class Part(NamedTuple):
    """Which parameters of which module make a site: attributes of the module, named `home`."""

    name: str
    module: nn.Module
    kind: "Kind"
    weight: str = "weight"
    bias: str | None = "bias"
    home: str = ""


class Kind:
    """A kind of layer: s = W a + b. As it stands, that of nn.Linear.

    Attributes:
        bases: the classes whose `forward` it knows; a subclass counts while it inherits that.
        known: subclasses with a `forward` of their own that is known to be the same map.
        hooked: whether calls of the module are observed.
        functional: whether calls of `F.linear` and the like with its weight are observed.
        unrolled: whether torch multiplies in a fused kernel, to be made from such calls.
        masked: whether positions of a masked pass can be told apart in its inputs.
        classes_last: whether the output's last axis is that of its channels.
        input_diagonal: whether its input side is diagonal by itself.
        transposed: whether its weight lies in memory as [in, out].
        counts_groups: whether each group has rows of its own, in number.
    """

    bases: tuple[type[nn.Module], ...] = ()
    known: tuple[type[nn.Module], ...] = ()
    hooked = True
    functional = True
    unrolled = False
    masked = True
    classes_last = True
    input_diagonal = False
    transposed = False
    counts_groups = False

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is of this kind."""
        kind: Any = type(module)
        base: Any = self.base(module)
        classes = self.known if base is None else (*self.known, base)
        return any(kind.forward is known.forward for known in classes)

    def base(self, module: nn.Module) -> type[nn.Module] | None:
        """The class of this kind that a module is an instance of, if any."""
        return next((base for base in self.bases if isinstance(module, base)), None)

    def refusal(self, module: nn.Module) -> Reason | None:
        """Why a module of this kind has no block all the same."""
        return None

    def parts(self, name: str, module: nn.Module) -> Iterator[Part]:
        """The sites of a module: one, of its weight and bias."""
        yield Part(name, module, self)

    def sides(self, module: Any, weight: Tensor) -> tuple[int, int, int]:
        """Groups, inputs and outputs of each."""
        return 1, weight.shape[1], weight.shape[0]

    def stored_order(self, module: Any) -> Tensor | None:
        """See `Site.order`."""
        return None

    def as_weight(self, site: Site, rows: Tensor) -> Tensor:
        """A view of rows [groups, out, in] in the shape of the weight."""
        return rows.view(site.weight.shape)

    def input_moment(
        self, site: Site, uses: list[Use], sharing: Sharing
    ) -> tuple[Tensor, Tensor | float]:
        """Sum of a a' over the rows of all uses in one pass, and how many rows count.

        [groups, in (+ 1), in (+ 1)], or its diagonal; the count is a number, or one per group.
        """
        columns, shape = site.columns, site.shape
        inputs = [product_ready(use.inputs.to_dense(), shape.dtype) for use in uses]
        masks = [use.counted for use in uses if use.counted is not None]
        counted = masks if self.masked and len(masks) == len(uses) else None
        rows, count = counted_rows([vector_rows(x, columns) for x in inputs], counted, sharing)
        return second_moment(rows, shape.dtype, diagonal=shape.input_diagonal), count

    def gradient_moment(
        self, site: Site, uses: list[Use], gradients: list[Tensor], sharing: Sharing
    ) -> Tensor:
        """Sum of g g' over the rows of the gradients at their outputs: [groups, out, out]."""
        shape = site.shape
        vectors = [by_example(product_ready(g, shape.dtype))[None] for g in gradients]
        rows = shared(joined(vectors, sharing), sharing, torch.sum)
        return second_moment(rows, shape.dtype, diagonal=shape.output_diagonal)

    def same_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a functional call with these arguments, behind the bias, is the module's own."""
        return not args and not kwargs


def _reordered(side: Tensor, order: Tensor) -> Tensor:
    """Rows, and in a matrix columns too, of [n, dim(, dim)] taken in another order."""
    side = side[:, order]
    return side if side.dim() == 2 else side[:, :, order]
