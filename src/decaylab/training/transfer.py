"""Norm transfer, "wn-conv" (Sec. 4.1, Fig. 4; recipe line 16): another run's effective lr."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from decaylab.curvature.preserve import bare
from decaylab.errors import Lacks, NotFinished
from decaylab.networks import roles
from decaylab.networks.roles import normalised_layers
from decaylab.networks.sharded import Parts, local, put_back
from decaylab.records import RunStore
from decaylab.records.sources import Source, as_recording

Norms = Mapping[int, Mapping[str, float]]
"""Epochs complete -> layer -> |W_l| (the weight without its bias) at that moment."""


def source_norms(store: RunStore | None, source: str, epochs: int) -> Norms:
    """The recorded norms of every layer of the run `source`, after each of `epochs` epochs."""
    if store is None:
        raise Lacks("norm_source", "store", f"give the one that holds run {source}")
    folder = store.folder(source)
    if not folder.is_finished():
        raise NotFinished(source, f"train it in {store.root} first, because norm_source names it")
    norms: dict[int, dict[str, float]] = {}
    for row in folder.rows().rows:
        if row.name.startswith("weight_norm/"):
            norms.setdefault(row.epoch, {})[row.name.removeprefix("weight_norm/")] = row.value
    if missing := [epoch for epoch in range(1, epochs) if epoch not in norms]:
        remedy = f"norm_source must name a run of at least {epochs - 1} epochs"
        raise Lacks(f"run {source}", f"norms after epoch {missing[0]}", remedy)
    return norms


@torch.no_grad()
def rescale(model: nn.Module, norms: Mapping[str, float]) -> None:
    """Give every scale-invariant layer the norm in `norms`: W_l and its bias times norm / |W_l|.

    The function does not change, up to the eps of normalisation: in train mode by scale
    invariance, and in eval mode because running statistics are rescaled too. Frozen weights and the
    optimizer's state are left alone.
    """
    model = bare(model)
    put_back(model)
    normalised = normalised_layers(model)
    invariant = [role.layer for role in roles(model).values() if role.role == "invariant"]
    for name in dict.fromkeys(invariant):  # in the same order on every process: norms are sums
        layer, normalisation = normalised[name]
        if not any(weight.requires_grad for weight in layer.weights):
            continue
        if name not in norms:
            raise Lacks("the source", f"norm of layer {name}", "give a run of this network")
        lengths = Parts.of(layer.weights).norms(dtype=torch.float64)
        factor = norms[name] / torch.linalg.vector_norm(torch.stack(lengths))
        for parameter in layer.scaled:
            local(parameter).mul_(factor.to(parameter.dtype))
        mean, var = (getattr(normalisation, f"running_{part}", None) for part in ("mean", "var"))
        if mean is not None and var is not None:
            mean.mul_(factor.to(mean.dtype))
            var.mul_(factor.square().to(var.dtype))


class NormTransfer:
    """Gives the scale-invariant layers of a model the norms they had in another run, in any loop.

    The function does not change; only the effective learning rate becomes the other run's (Fig. 4,
    recipe line 16). The optimizer's state is left alone. Call it between steps:

        transfer = NormTransfer(model, "runs/with-decay")
        for step, (x, y) in enumerate(loader, start=1):
            ...; optimizer.step()
            transfer(step)          # rescales where the source has a record of this step

    `source`: a run folder, a folder that `watch(folder=...)` wrote, a `Watch` or its records.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.model = model
        recording = as_recording(source)
        self.norms: dict[int, dict[str, float]] = {}  # step -> layer -> |W|
        for row in recording.rows.rows:
            quantity, _, layer = row.name.partition("/")
            if quantity == "weight_norm" and layer and 0 < row.value < math.inf:
                self.norms.setdefault(row.step, {})[layer] = row.value
        if not self.norms:
            raise Lacks(recording.name, "recorded norms", "give records with weight_norm")

    def __call__(self, step: int) -> bool:
        """Rescale if the source has a record of `step`; whether it did."""
        if step not in self.norms:
            return False
        rescale(self.model, self.norms[step])
        return True
