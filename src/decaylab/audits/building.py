"""Building the optimizer that is audited; a failure is a sentence with the remedy."""

from collections.abc import Callable
from typing import Any, TypeVar

from decaylab.errors import Failed, WrongType

Built = TypeVar("Built")


def build(make: Callable[[], Built], remedy: str) -> Built:
    """What `make` returns."""
    try:
        return make()
    except Exception as error:
        if isinstance(error, ImportError):
            remedy = "install what it imports"
        raise Failed("building the optimizer", error, remedy) from error


def build_optimizer(make: Callable[[], Any], remedy: str) -> Any:
    """What `make` returns, which must be an optimizer."""
    optimizer = build(make, remedy)
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        raise WrongType("the optimizer", optimizer, "one with step() and param_groups")
    return optimizer
