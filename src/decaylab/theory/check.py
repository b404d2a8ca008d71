"""One line of the table: both sides of a statement, how far apart, and whether it holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["statement", "broken"]
Pairs = Iterator[tuple[Tensor, Tensor]]
"""Left and right sides, of one net after the other."""


@dataclass(frozen=True)
class Check:
    """Both sides of a numbered statement under a condition; the worst case over all nets tried.

    Attributes:
        id: T1 to T8.
        where: its place in the paper.
        condition: on what it was checked, and which condition was met or broken.
        left: norm of the left side, computed on its own.
        right: norm of the right side, computed on its own.
        error: |left - right| / |right|, of the vectors or matrices themselves.
        tolerance: how much is rounding.
        holds: whether the error is within it.
        kind: "statement", or "broken" where a condition is violated on purpose.
    """

    id: str
    where: str
    condition: str
    left: float
    right: float
    error: float
    tolerance: float
    holds: bool
    kind: Kind


@dataclass(frozen=True)
class Statement:
    """What the checks of one statement share."""

    id: str
    where: str
    tolerance: float

    def check(
        self, condition: str, pairs: Iterable[tuple[Tensor, Tensor]], kind: Kind = "statement"
    ) -> Check:
        """Compare pairs (left, right) and keep the worst: the largest error, or one not finite."""
        worst = (-1.0, 0.0, 0.0)
        for left_side, right_side in pairs:
            left, right = left_side.detach(), right_side.detach()
            size = torch.linalg.vector_norm(right)
            error = float(torch.linalg.vector_norm(left - right) / size)
            sides = (float(torch.linalg.vector_norm(left)), float(size))
            if not error <= worst[0]:
                worst = (error, *sides)
            if error != error:  # a nan stays the worst
                break
        error, left_size, right_size = worst
        holds = 0 <= error <= self.tolerance
        return Check(
            self.id,
            self.where,
            condition,
            left_size,
            right_size,
            error,
            self.tolerance,
            holds,
            kind,
        )

    def broken(self, condition: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> Check:
        """The same with a condition violated: how far the sides are then apart."""
        return self.check(condition, pairs, "broken")
