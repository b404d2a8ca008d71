"""Damped inverses of Kronecker factors, without a host synchronisation.

The block A (x) G (with G = T S, so that the number of positions T is inside) is damped by lambda
in factored form (Martens & Grosse 2015, Sec. 6.3; recipe: r = sqrt(lambda / T) on A and S, then a
division by T, which is the same thing):

    pi = sqrt((tr A / dim A) / (tr G / dim G)),    A + pi sqrt(lambda) I,    G + sqrt(lambda) / pi I

A side may be a matrix [n, d, d] or, where it is too long, a diagonal [n, d].
"""

import torch
from torch import Tensor

# Above this size a batched factorisation gains nothing and triples the workspace.
LARGEST_BATCHED = 512


def factored_damping(A: Tensor, G: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to the diagonals of A and of G: (pi sqrt(lambda), sqrt(lambda) / pi), each [n].

    Where a trace is zero (a dead layer) pi is 1, so that both sides stay finite.
    """
    mean_A, mean_G = mean_diagonal(A), mean_diagonal(G)
    sound = (mean_A > 0) & (mean_G > 0)
    one = torch.ones_like(mean_A)
    pi = (torch.where(sound, mean_A, one) / torch.where(sound, mean_G, one)).sqrt()
    root = damping.sqrt()
    return pi * root, root / pi


def mean_diagonal(side: Tensor) -> Tensor:
    """Trace over dimension of each factor: [n, d, d] or [n, d] to [n]."""
    return (side if side.dim() == 2 else side.diagonal(dim1=1, dim2=2)).mean(1)


def damped_inverse(side: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """(side + damping I)^-1 by Cholesky, and which of the n are sound: [n, ...], bool [n].

    `cholesky_ex` does not check on the host: a factor that is not positive definite gives False,
    not an error.
    """
    if side.dim() == 2:
        inverse = (side + damping[:, None]).reciprocal()
        return inverse, inverse.isfinite().all(1) & (inverse > 0).all(1)
    if side.shape[1] > LARGEST_BATCHED and side.shape[0] > 1:
        each = [damped_inverse(side[i : i + 1], damping[i : i + 1]) for i in range(len(side))]
        return torch.cat([inverse for inverse, _ in each]), torch.cat([ok for _, ok in each])
    damped = side.clone()
    damped.diagonal(dim1=1, dim2=2).add_(damping[:, None])
    root, info = torch.linalg.cholesky_ex(damped, check_errors=False)
    inverse = torch.cholesky_inverse(root)
    return inverse, (info == 0) & inverse.isfinite().flatten(1).all(1)
