"""Polar factors: the matrices with the same singular vectors, whose singular values are one."""

import torch
from torch import Tensor

# Of a x + b x^3 + c x^5, which lifts small singular values fast (Jordan et al. 2024: Muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def polar_factors(matrices: Tensor) -> Tensor:
    """About U V' of each matrix U S V' in [n, rows, columns]; zero matrices stay zero.

    By five Newton-Schulz iterations, as in Muon: singular values of more than a hundredth of the
    norm end between 0.68 and 1.14, smaller ones at 1.21 at most; those of zero stay. It commutes
    with rotations on both sides. On CUDA float32 is computed in bfloat16, as Muon does. Cost:
    fifteen products, of which ten are of the size min(rows, columns)^2 max(rows, columns).
    """
    fast = matrices.is_cuda and matrices.dtype == torch.float32
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=1e-30)
    x = x.bfloat16() if fast else x
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        squares = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
