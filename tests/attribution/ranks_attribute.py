"""An attribution in every process of a training: `ranks_attribute.py FOLDER KIND`, under torchrun.

KIND is ddp, ddp-kfac, fsdp (fully_shard) or seeds (a model of its own for each). Writes each process's answer
to FOLDER/answer-RANK.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from decaylab import KFAC, attribute
from decaylab.training.world import leave

WIDTHS = (6, 7, 3)  # 7 rows are no multiple of two processes
ROWS = 8
EXACT = {
    **{"curvature": "gauss-newton", "outputs": "exact", "likelihood": "gaussian"},
    **{"damping": 0.1, "damping_scaling": "fixed", "weight_decay": 0.5, "refresh_every": 2},
}


def maker(kind, rank, size):
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(*WIDTHS[:2], bias=False), nn.Tanh(), nn.Linear(*WIDTHS[1:])
        ).double()
        teacher = torch.randn(WIDTHS[0], WIDTHS[2], generator=generator).double()
        inputs = torch.randn(16, WIDTHS[0], generator=generator).double()
        model = net
        if "ddp" in kind:
            model = DistributedDataParallel(net)
        elif kind == "fsdp":
            mesh = init_device_mesh("cpu", (size,))
            for layer in (net[0], net[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        if "kfac" in kind:
            optimizer = KFAC(model, 0.03, **EXACT)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.5)

        def step():
            batch = torch.randn(ROWS, WIDTHS[0], generator=generator).double()
            if size > 1 and kind != "seeds":
                batch = batch[rank::size]
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


def main():
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own = kind == "seeds"
    make = maker(kind, rank, size)
    arms = folder / "arms" if not own else folder / f"arms-{rank}"
    got = answer(make, arms, [rank] if own else [0, 1])
    if not own:  # one arm is gone on the first process's disk: all train it again
        torch.distributed.barrier()
        if rank == 0:
            (arms / "seed-1" / "size.json").unlink()
        assert answer(make, arms, [0, 1])["arms"].keys() == got["arms"].keys()
    (folder / f"answer-{rank}.json").write_text(json.dumps(got))
    leave(0)


if __name__ == "__main__":
    main()
