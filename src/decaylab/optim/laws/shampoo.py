"""The law of Shampoo and SOAP."""

from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.adam import Adam


@dataclass(frozen=True)
class Shampoo(Adam):
    """W -= lr L^-1/4 M R^-1/4, with L and R running means of g g' and g' g.

    L and R go with |g|^2, so that the step does not change when all gradients are multiplied by a
    number (Gupta, Koren and Singer 2018, arXiv:1802.09568): Adam's law, with the memory of L and R
    in the place of v's. SOAP is Adam in the basis of L and R (Vyas et al. 2024, arXiv:2409.11321).
    A grafted step has the length of the optimizer it is grafted from, Adam as a rule.
    """

    name: ClassVar[str] = "shampoo"
