"""K-FAC whose steps are as long as the formula makes them: what oracles compute."""

from typing import Any

from decaylab.optim import kfac


class KFAC(kfac.KFAC):
    """With `step_scaling="none"` and a fixed damping where nothing else is asked for."""

    def __init__(self, *args: Any, step_scaling: str = "none", **options: Any) -> None:
        super().__init__(*args, step_scaling=step_scaling, **options)
