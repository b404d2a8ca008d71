"""KFAC in data-parallel training: torchrun, `torch.distributed`, DistributedDataParallel.

    model = DistributedDataParallel(network)
    optimizer = KFAC(model, lr=0.03)            # the rest of the loop is that of any optimizer

Factors are those of all ranks' rows together, each row counting alike, also where ranks have
different numbers of them. Gradients are DistributedDataParallel's, a mean over ranks. As factors,
inverses and gradients are the same bits on every rank, so are the steps, where the ranks compute
alike: the same kind of device, and the same software. Without DistributedDataParallel (a group
named in `KFACOptions`), the loop must see to it that weights and gradients are the same everywhere.

A layer may be used by some ranks only, a batch may be empty, and the ranks may give `initialize`
different batches, but for SyncBatchNorm, whose ranks wait for each other in every pass.

The empirical Fisher takes a mean loss to be the mean over the rank's own rows. Sampled outputs are
drawn by each rank for its own rows, from numbers that depend on seed, step and rank alone:
what the first rank's `state_dict()` holds lets all ranks go on bit for bit (load it on every rank);
another number of ranks, or one, goes on with other samples.

Cost, beside that of one process: at a refresh the sums of A and G are added up over the ranks, and
the host waits once; each rank inverts a share of the blocks, and inverses are sent around.

Not covered, and refused: parameters in shards (FSDP, tensor parallelism), layers that
DistributedDataParallel was told to ignore, or met frozen, `model.join()`, CUDA graphs of a step.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decaylab.curvature.capture import wrappings
from decaylab.curvature.ranks import Ranks, several
from decaylab.errors import DecaylabError


def ranks_of(model: nn.Module, group: Any) -> Ranks:
    """The ranks that train a model together: of `group`, or of its DistributedDataParallel."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(early=True)
    _refuse_shards(model)
    parallel = nn.parallel.DistributedDataParallel
    wrapper: Any = next((m for m in wrappings(model) if isinstance(m, parallel)), None)
    if group is None and wrapper is not None:
        group = wrapper.process_group
    if group is not None:
        return Ranks.of(group, wrapper)
    if several():
        warnings.warn(
            "there are several processes, and KFAC was given a model that is not in a "
            "DistributedDataParallel: its factors are those of this process's rows. For a model of "
            "its own that is right; where the processes train one together, build "
            "KFAC(DistributedDataParallel(model), ...), or "
            "options=KFACOptions(process_group=torch.distributed.group.WORLD)",
            stacklevel=3,
        )
    return Ranks()


def together(
    ranks: Ranks, seed: int, norms: Mapping[str, Tensor], generator: torch.Generator
) -> int:
    """Let all ranks begin with the first one's seed, which is returned, and norms.

    They may differ where a rank has a seed of its own, and has yet to get its weights from the
    first.
    """
    if ranks.group is None:
        return seed
    common = torch.tensor(seed % 2**63, device=generator.device)
    ranks.from_first([common, *norms.values()])
    seed = int(common)
    ranks.seed(generator, seed, 0)
    return seed


def _refuse_shards(model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(p, DTensor) for p in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    ):
        raise DecaylabError(
            "the model's parameters are in shards (FSDP or tensor parallelism), and K-FAC needs "
            "whole layers: use DistributedDataParallel, or another optimizer"
        )
