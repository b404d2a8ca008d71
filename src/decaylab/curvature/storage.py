"""Symmetric matrices in less memory than [n, d, d]: triangles of factors, halves of inverses.

A factor is kept as its lower triangle, in the rectangular full packed format (Gustavson et al.
2010): with k = ceil(d / 2) and the matrix in halves,

    [[P, Q'], [Q, R]]  ->  [n, 2 k + 1, k]:  R' on and above the diagonal of the first k rows, P
                           below it (one row further down), then Q

which loses nothing: factorisations read no more than a triangle.

An inverse is kept in float16 with a power of two for each matrix. It has the 11 significant bits
that TF32 would leave of it in a product, and half the size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from decaylab.curvature.kernels import packed_triangles

# Sides longer than this are kept as triangles.
PACKED_ABOVE = 1000
# The largest entry of a matrix in float16 lies below two to this power: its range ends at 16.
LARGEST_EXPONENT = 15
# Powers of two stay within float32's.
LARGEST_POWER = 120


def is_packed(side: Tensor) -> bool:
    """Whether [n, ...] are triangles; otherwise they are matrices or diagonals."""
    return side.dim() == 3 and side.shape[1] != side.shape[2]


def packed_shape(length: int) -> tuple[int, int]:
    """Of the triangle of a matrix of this length."""
    half = -(-length // 2)
    return 2 * half + 1, half


def pack(matrices: Tensor, room: Tensor | None = None) -> Tensor:
    """The lower triangles of [n, d, d], written to `room` if it is given."""
    length = matrices.shape[-1]
    rows, half = packed_shape(length)
    triangles = matrices.new_empty(len(matrices), rows, half) if room is None else room
    if matrices.is_cuda and matrices.is_contiguous() and packed_triangles(triangles, matrices):
        return triangles
    if length % 2:
        matrices = F.pad(matrices, (0, 1, 0, 1))
    triangles[:, :1] = 0
    triangles[:, 1 : half + 1] = matrices[:, :half, :half].tril()
    triangles[:, :half] += matrices[:, half:, half:].mT.triu()
    triangles[:, half + 1 :] = matrices[:, half:, :half]
    return triangles


def unpack(triangles: Tensor, length: int) -> Tensor:
    """The symmetric matrices [n, length, length], cut off the end of what was packed."""
    half = triangles.shape[2]
    matrices = triangles.new_empty(len(triangles), 2 * half, 2 * half)
    for here, lower in (
        (slice(half), triangles[:, 1 : half + 1].tril()),
        (slice(half, None), triangles[:, :half].triu().mT),
    ):
        matrices[:, here, here] = lower + lower.tril(-1).mT
    matrices[:, half:, :half] = triangles[:, half + 1 :]
    matrices[:, :half, half:] = triangles[:, half + 1 :].mT
    return matrices[:, :length, :length].contiguous()


def lower(triangles: Tensor, length: int) -> Tensor:
    """[n, length, length] whose lower triangles are the packed ones, with anything above them.

    They lie in memory by columns, which is how factorisations take them.
    """
    half = triangles.shape[2]
    first = min(half, length)
    rest = length - first
    matrices = triangles.new_empty(len(triangles), length, length).mT
    matrices[:, :first, :first] = triangles[:, 1 : first + 1, :first]
    matrices[:, first:, :first] = triangles[:, half + 1 : half + 1 + rest, :first]
    matrices[:, first:, first:] = triangles[:, :rest, :rest].mT
    return matrices


def diagonal_of(side: Tensor) -> Tensor:
    """The diagonal [n, d] of each factor; of packed ones of odd length with a zero behind it."""
    if is_packed(side):
        half = side.shape[2]
        parts = side[:, 1 : half + 1], side[:, :half]
        return torch.cat([part.diagonal(dim1=1, dim2=2) for part in parts], 1)
    return side if side.dim() == 2 else side.diagonal(dim1=1, dim2=2)


def halved(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """[n, r, c] in float16, and the powers of two [n] to multiply them with.

    What was halved before comes out the same again.
    """
    largest = torch.linalg.vector_norm(matrices, float("inf"), dim=(1, 2))
    mantissa, exponent = torch.frexp(largest)
    rounded_up = mantissa.half() == 1
    power = (exponent + rounded_up - LARGEST_EXPONENT).clamp(-LARGEST_POWER, LARGEST_POWER)
    scale = torch.ldexp(torch.ones_like(largest), power)
    halves = torch.empty_like(matrices, dtype=torch.float16)
    return torch.div(matrices, scale[:, None, None], out=halves), scale  # in one pass


class InverseStack:
    """The inverses, or their roots, of one side of a bank: [n, d, d], or diagonals [n, d].

    The identity at first. Kept with zeros behind each, up to `wide`; in float16 if `half`.
    """

    def __init__(
        self,
        count: int,
        length: int,
        wide: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        diagonal: bool,
        half: bool,
    ) -> None:
        self.length, self.half, self.diagonal = length, half, diagonal
        size = (count, *(wide,) * (2 - diagonal))
        stored_dtype = torch.float16 if half else dtype
        self.values = torch.zeros(size, dtype=stored_dtype, device=device)
        self.scale = torch.ones(count, dtype=dtype, device=device) if half else None
        diagonal_of(self.values)[:, :length].fill_(1)

    def read(self, here: slice = slice(None)) -> Tensor:
        """Those of some entries, without the zeros behind them; a copy if they are halved."""
        within = (here, *(slice(self.length),) * (2 - self.diagonal))
        if self.scale is None:
            return self.values[within]
        return self.values[within].to(self.scale.dtype) * self.scale[here, None, None]

    def write(self, here: slice, inverses: Tensor, sound: Tensor | None = None) -> None:
        """Replace those of some entries; where `sound` [n] is given, no others than these."""
        within = (here, *(slice(self.length),) * (2 - self.diagonal))
        new, scale = halved(inverses) if self.half else (inverses, None)
        values = self.values[within]
        if sound is None:
            values.copy_(new)
        else:
            mask = sound.view((-1,) + (1,) * (new.dim() - 1))
            torch.where(mask, new, values, out=values)
        if self.scale is not None and scale is not None:
            before = self.scale[here]
            before.copy_(scale if sound is None else torch.where(sound, scale, before))

    def reset(self, here: slice, known: Tensor) -> None:
        """Let those of some entries be the identity but where they are `known` [n]."""
        inverses = self.read(here).clone()
        identity = torch.zeros_like(inverses)
        diagonal_of(identity).fill_(1)
        mask = known.view((-1,) + (1,) * (inverses.dim() - 1))
        self.write(here, torch.where(mask, inverses, identity))

    def after(self, rows: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor | None]:
        """Rows [n, r, wide] times the inverse, to be multiplied by the numbers [n], if any.

        `transposed`: times its transpose, which matters for roots alone.
        """
        if self.diagonal:
            return rows * self.values[:, None, :], None
        values = self.values.mT if transposed else self.values
        if self.scale is None:
            return torch.bmm(rows, values), None
        halves, scale = halved(rows)
        return _half_product(halves, values, rows.dtype), scale * self.scale

    def before(self, columns: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor | None]:
        """The inverse, or its transpose, times columns [n, wide, c]; as `after`."""
        if self.diagonal:
            return columns * self.values[:, :, None], None
        values = self.values.mT if transposed else self.values
        if self.scale is None:
            return torch.bmm(values, columns), None
        halves, scale = halved(columns)
        return _half_product(values, halves, columns.dtype), scale * self.scale


def _half_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of float16 that is accumulated and returned in `dtype`."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))
