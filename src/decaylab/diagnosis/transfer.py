"""Norm transfer ("wn-conv", Sec. 4.1) for anybody's loop: another run's norms, step by step."""

from torch import nn

from decaylab.diagnosis.observed import Source, observe
from decaylab.errors import DecaylabError
from decaylab.training.transfer import rescale


class NormTransfer:
    """Gives the scale-invariant layers of a model the norms they had in another run.

    The function stays what it is; only the effective learning rate becomes the other run's (Fig. 4,
    recipe line 16). The optimizer's state is left alone. Call it between steps:

        transfer = NormTransfer(model, "runs/with-decay")
        for step, (x, y) in enumerate(loader, start=1):
            ...; optimizer.step()
            transfer(step)          # rescales where the source has a record of this step

    `source`: a run folder, a folder that `watch(folder=...)` wrote, a `Watch` or its records.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.model = model
        observed = observe(source)
        self.norms: dict[int, dict[str, float]] = {}  # step -> layer -> |W|
        for name, layer in observed.layers.items():
            for step, norm in layer.norms:
                self.norms.setdefault(step, {})[name] = norm
        if not self.norms:
            raise DecaylabError(f"{observed.name} has no recorded norms: nothing can be taken over")

    def __call__(self, step: int) -> bool:
        """Rescale if the source has a record of `step`; whether it did."""
        if step not in self.norms:
            return False
        rescale(self.model, self.norms[step])
        return True
