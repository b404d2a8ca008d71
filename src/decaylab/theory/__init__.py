"""The paper's numbered statements T1 to T8, both sides computed on random nets."""

import torch

from decaylab.theory.check import Check
from decaylab.theory.decay import decay_as_descent
from decaylab.theory.identities import (
    gauss_newton_norms,
    gradient_structure,
    jacobian_norms,
    norm_gradient,
)
from decaylab.theory.invariance import curvature_scaling, direction_updates
from decaylab.theory.reparametrisation import affine_invariance

STATEMENTS = {
    "T1": gradient_structure,
    "T2": gauss_newton_norms,
    "T3": jacobian_norms,
    "T4": norm_gradient,
    "T5": curvature_scaling,
    "T6": direction_updates,
    "T7": decay_as_descent,
    "T8": affine_invariance,
}

__all__ = ["STATEMENTS", "Check", "all_checks"]


def all_checks() -> list[Check]:
    """T1-T8 computed now. The matrices are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [check for statement in STATEMENTS.values() for check in statement()]
    finally:
        torch.set_num_threads(threads)
