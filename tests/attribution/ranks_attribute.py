"""Attributions in every process of a training, under torchrun: `ranks_attribute.py FOLDER KIND ...`

KIND is ddp, ddp-kfac, fsdp (fully_shard), fsdp-kfac, tp (tensor parallelism) or seeds (a model of
its own for each). Writes each process's answers, by kind, to FOLDER/answers-RANK.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from decaylab import KFAC, attribute
from decaylab.training.world import leave

INPUTS, OUTPUTS, ROWS = 6, 3, 8
EXACT = {
    **{"curvature": "gauss-newton", "outputs": "exact", "likelihood": "gaussian"},
    **{"damping": 0.1, "damping_scaling": "fixed", "weight_decay": 0.5, "refresh_every": 2},
}


def spread(net, kind, size):
    """The model as the processes of a training hold it."""
    mesh = init_device_mesh("cpu", (size,))
    if "ddp" in kind:
        return DistributedDataParallel(net)
    if kind == "tp":
        return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    return net


def maker(kind, rank=0, size=1):
    """A loop in one of `size` processes, each with its part of a batch (under tp, all of it)."""
    hidden = 8 if kind == "tp" else 7  # no multiple of two processes where that is possible

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(INPUTS, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, OUTPUTS)
        ).double()
        teacher = torch.randn(INPUTS, OUTPUTS, generator=generator).double()
        inputs = torch.randn(16, INPUTS, generator=generator).double()
        model = net if size == 1 else spread(net, kind, size)
        if "kfac" in kind:
            optimizer = KFAC(model, 0.03, **EXACT)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.5)

        def step():
            batch = torch.randn(ROWS, INPUTS, generator=generator).double()
            batch = batch if kind == "tp" else batch[rank::size]
            loss = (model(batch) - batch @ teacher).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def evaluate():
            with torch.no_grad():
                return {"test loss": (model(inputs) - inputs @ teacher).square().mean().item()}

        return model, optimizer, step, evaluate

    return make


def answer(make, folder, seeds):
    result = attribute(make, seeds=seeds, steps=12, folder=folder)
    return {
        "arms": {f"{r.arm} {r.seed}": [r.metrics["test loss"], r.errors] for r in result.results},
        "sizes": {
            f"{arm} {seed}": paths.sizes.tolist()
            for seed, by_arm in result.paths.items()
            for arm, paths in by_arm.items()
        },
    }


def answers_of(kind, folder, rank, size):
    if kind == "seeds":
        return answer(maker(kind), folder / f"arms-{rank}", [rank])
    make, arms = maker(kind, rank, size), folder / kind
    trained = answer(make, arms, [0, 1])
    dist.barrier()
    if rank == 0:  # all train it again, though only the first one can see that it is gone
        (arms / "seed-1" / "size.json").unlink()
    assert answer(make, arms, [0, 1])["sizes"] == trained["sizes"]
    return trained


def main():
    folder, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    answers = {kind: answers_of(kind, Path(folder), rank, size) for kind in kinds}
    Path(folder, f"answers-{rank}.json").write_text(json.dumps(answers))
    leave(0)


if __name__ == "__main__":
    main()
