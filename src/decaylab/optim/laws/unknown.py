"""The law of an optimizer whose steps fit no known law."""

from dataclasses import dataclass
from typing import ClassVar

from decaylab.optim.laws.law import Law


@dataclass(frozen=True)
class Unknown(Law):
    """Nothing but what the kind of decay says: decoupled decay takes lr weight_decay."""

    name: ClassVar[str] = "unknown"

    @property
    def norm_power(self) -> None:
        """Not known."""
        return

    def correlation(self) -> None:
        """Not known."""
        return
