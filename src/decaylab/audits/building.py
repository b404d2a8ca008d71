"""Building the optimizer that is audited; a failure is a sentence with the remedy."""

from collections.abc import Callable
from typing import Any, TypeVar

from decaylab.errors import DecaylabError

Built = TypeVar("Built")


def build(make: Callable[[], Built], remedy: str) -> Built:
    """What `make` returns."""
    try:
        return make()
    except ImportError as error:
        raise DecaylabError(
            f"building the optimizer failed ({error}): install what it imports"
        ) from error
    except Exception as error:
        raise DecaylabError(
            f"building the optimizer failed ({type(error).__name__}: {error}): {remedy}"
        ) from error


def build_optimizer(make: Callable[[], Any], remedy: str) -> Any:
    """What `make` returns, which must be an optimizer."""
    optimizer = build(make, remedy)
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        raise DecaylabError(
            f"{type(optimizer).__name__} is not an optimizer: it needs step() and param_groups"
        )
    return optimizer
