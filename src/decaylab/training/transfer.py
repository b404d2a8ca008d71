"""Norm transfer, "wn-conv" (Sec. 4.1, Fig. 4; recipe line 16): another run's effective lr."""

from collections.abc import Mapping

import torch
from torch import nn

from decaylab.errors import DecaylabError
from decaylab.networks import roles
from decaylab.records import RunStore

Norms = Mapping[int, Mapping[str, float]]
"""Epochs complete -> layer -> |W_l| (the weight without its bias) at that moment."""


def source_norms(store: RunStore | None, source: str, epochs: int) -> Norms:
    """The recorded norms of every layer of the run `source`, after each of `epochs` epochs."""
    if store is None:
        raise DecaylabError(f"norm_source names run {source}: give the store that holds it")
    folder = store.folder(source)
    manifest = folder.manifest() if folder.path.exists() else None
    if manifest is None or manifest.status != "finished":
        raise DecaylabError(
            f"norm_source names run {source}, which is not finished in {store.root}: train it first"
        )
    norms: dict[int, dict[str, float]] = {}
    for row in folder.rows().rows:
        if row.name.startswith("norm/"):
            norms.setdefault(row.epoch, {})[row.name.removeprefix("norm/")] = row.value
    if missing := [epoch for epoch in range(1, epochs) if epoch not in norms]:
        raise DecaylabError(
            f"run {source} has no norms after epoch {missing[0]}: norm_source must name a run of at"
            f" least {epochs - 1} epochs"
        )
    return norms


@torch.no_grad()
def rescale(model: nn.Module, norms: Mapping[str, float]) -> None:
    """Give every layer under BN the norm in `norms`: W_l and its bias times norm / |W_l|.

    The function stays what it was, up to BN's eps: in train mode by scale invariance, and in eval
    mode since BN's running statistics are carried along. The optimizer's state is left as it is.
    """
    modules = dict(model.named_modules())
    following = dict(zip(modules, list(modules.values())[1:], strict=False))
    parameters = dict(model.named_parameters())
    for layer in {r.module for r in roles(model).values() if r.role == "invariant"}:
        if layer not in norms:
            raise DecaylabError(f"norm_source recorded no norm of layer {layer}: is it this net's?")
        weight = parameters[f"{layer}.weight"]
        factor = norms[layer] / torch.linalg.vector_norm(weight.double())
        for parameter in modules[layer].parameters():
            parameter.mul_(factor.to(parameter.dtype))
        norm = following.get(layer)
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
            assert norm.running_var is not None
            norm.running_mean.mul_(factor.to(norm.running_mean.dtype))
            norm.running_var.mul_(factor.square().to(norm.running_var.dtype))
