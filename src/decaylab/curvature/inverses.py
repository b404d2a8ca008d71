"""Damped inverses of Kronecker factors, without a host synchronisation.

The block A (x) G (with G = T S, so that the number of positions T is inside) is damped by lambda
in factored form (Martens & Grosse 2015, Sec. 6.3; recipe: r = sqrt(lambda / T) on A and S, then a
division by T, which is the same thing):

    pi = sqrt((tr A / dim A) / (tr G / dim G)),    A + pi sqrt(lambda) I,    G + sqrt(lambda) / pi I

A side may be a matrix [n, d, d] or, where it is too long, a diagonal [n, d].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decaylab.curvature.storage import diagonal_of

# Above this size factorisations one by one are faster than a batch of them.
LARGEST_BATCHED = 1200
# Triangular matrices above it are inverted by blocks of this size.
BLOCK = 512


def factored_damping(mean_A: Tensor, mean_G: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to the diagonals of A and of G: (pi sqrt(lambda), sqrt(lambda) / pi), each [n].

    By the means of their diagonals. Where one is zero (a dead layer) pi is 1, so that both sides
    stay finite.
    """
    sound = (mean_A > 0) & (mean_G > 0)
    ones = torch.ones_like(mean_A)
    pi = (torch.where(sound, mean_A, ones) / torch.where(sound, mean_G, ones)).sqrt()
    root = damping.sqrt()
    return pi * root, root / pi


def mean_diagonal(side: Tensor) -> Tensor:
    """Trace over dimension of each factor: [n, d, d] or [n, d] to [n]."""
    return diagonal_of(side).mean(1)


def damped(side: Tensor, damping: Tensor) -> Tensor:
    """A new tensor: side + damping I, for each of the n."""
    if side.dim() == 2:
        return side + damping[:, None]
    result = side.clone()
    result.diagonal(dim1=1, dim2=2).add_(damping[:, None])
    return result


def invert_(sides: Tensor, *, roots: bool = False) -> Tensor:
    """Replace each of the n damped factors by its inverse, in place; returns which are sound, [n].

    By Cholesky, of which only lower triangles are read, without a copy if the matrices lie in
    memory by columns. `cholesky_ex` does not check on the host: a factor that is not positive
    definite gives False (and whatever numbers), not an error.

    `roots`: by a root R of its inverse, R' R, instead: the inverse of its Cholesky factor.
    """
    if sides.dim() == 2:
        sound = (sides > 0).all(1)
        sides.rsqrt_() if roots else sides.reciprocal_()
        return sound & sides.isfinite().all(1)
    with ieee_products(sides.device):  # TF32 would cost an inverse its digits
        info = _factorise_(sides)
        # cholesky_inverse and a batched cholesky_solve wait for the device, and are slower
        _invert_triangle_(sides)
        if roots:
            return (info == 0) & (torch.linalg.vector_norm(sides, dim=(1, 2)) < torch.inf)
        _square_triangle_(sides)
    # no entry of a positive definite matrix is larger than those of its diagonal
    return (info == 0) & (sides.diagonal(dim1=1, dim2=2).sum(1) < torch.inf)


def _factorise_(sides: Tensor) -> Tensor:
    """Replace [n, d, d] by their lower Cholesky factors; returns 0 for each that exists."""
    info = sides.new_empty(len(sides), dtype=torch.int32)
    if len(sides) == 1 or sides.shape[1] <= LARGEST_BATCHED:
        torch.linalg.cholesky_ex(sides, check_errors=False, out=(sides, info))
        return info
    for side, code in zip(sides, info, strict=True):
        torch.linalg.cholesky_ex(side, check_errors=False, out=(side, code))
    return info


def _invert_triangle_(L: Tensor) -> None:
    """Replace lower triangular L [n, d, d] by its inverse, as accurate as one solve.

    The blocks on the diagonal at once, by solving, and then by halves
    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]: d^3 / 3 multiplications in products.
    """
    count, size = len(L), L.shape[1]
    blocks = -(-size // BLOCK)
    identity = torch.eye(min(BLOCK, size), dtype=L.dtype, device=L.device)
    if blocks == 1:
        L.copy_(torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False))
        return
    diagonal = identity.repeat(blocks, count, 1, 1)
    places = list(_on_the_diagonal(L))
    for those, place in places:
        diagonal[those, :, : place.shape[2], : place.shape[3]] = place
    solved = torch.linalg.solve_triangular(
        diagonal.flatten(0, 1), identity.expand(blocks * count, -1, -1), upper=False
    ).view_as(diagonal)
    for those, place in places:
        place.copy_(solved[those, :, : place.shape[2], : place.shape[3]])
    _join_inverses_(L)


def _on_the_diagonal(L: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Views [blocks, n, length, length] of the blocks on L's diagonal: whole ones, then the rest.

    Each with the numbers of its blocks.
    """
    by_entry, by_row, by_column = L.stride()
    whole, rest = divmod(L.shape[1], BLOCK)
    for first, count, length in ((0, whole, BLOCK), (whole, 1, rest)):
        if count and length:
            corner = L[:, first * BLOCK :, first * BLOCK :]
            strides = (BLOCK * (by_row + by_column), by_entry, by_row, by_column)
            view = corner.as_strided((count, len(L), length, length), strides)
            yield slice(first, first + count), view


def _join_inverses_(L: Tensor) -> None:
    """Finish the inverse of lower triangular L [n, d, d] whose diagonal blocks are inverted."""
    if L.shape[1] > BLOCK:
        P, Q, R = _halves(L)
        _join_inverses_(P)
        _join_inverses_(R)
        torch.baddbmm(Q, torch.bmm(R, Q), P, beta=0, alpha=-1, out=Q)


def _square_triangle_(L: Tensor) -> None:
    """Replace lower triangular L [n, d, d] by L' L, by halves: d^3 / 3 multiplications.

    [[P, 0], [Q, R]]' [[P, 0], [Q, R]] = [[P'P + Q'Q, Q'R], [R'Q, R'R]].
    """
    if L.shape[1] <= 2 * BLOCK:
        L.mT.copy_(torch.bmm(L.mT, L))  # symmetric, and L lies in memory by columns
        return
    P, Q, R = _halves(L)
    _square_triangle_(P)
    torch.baddbmm(P, Q.mT, Q, out=P)
    Q.copy_(torch.bmm(R.mT, Q))
    half = P.shape[1]
    L[:, :half, half:] = Q.mT
    _square_triangle_(R)


def _halves(square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first, the lower left and the last part of [n, d, d], cut between blocks."""
    blocks = -(-square.shape[1] // BLOCK)
    half = -(-blocks // 2) * BLOCK
    return square[:, :half, :half], square[:, half:, :half], square[:, half:, half:]


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Products of float32 in full precision: neither TF32 nor autocast."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        matmul.fp32_precision = before
