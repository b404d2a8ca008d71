"""A model that `fully_shard` holds in one part, over NCCL: as the model without it.

Parts of several processes, over gloo on a CPU: tests/optim/shard_cases.py, tests/probes.
"""

import pytest
import torch
import torch.distributed as dist
from oracle.kfac_runs import cross_entropy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from decaylab import KFAC, watch
from decaylab.networks.sharded import is_sharded
from decaylab.optim.options import KFACOptions

CLASSES, WIDTH, EVERY = 7, 16, 2
PROBES = ("movement", "weight_norm", "second_moment", "size_response", "spectra", "gn_norm")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where this process is a group by itself."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def model_on(device, *, shard):
    torch.manual_seed(0)
    model = Net().double().to(device)
    if shard:
        mesh = init_device_mesh(device, (1,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        assert all(map(is_sharded, model.parameters()))
    return model


def batch(device, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(device), torch.randint(CLASSES, (32,), generator=generator).to(device)


def weights(model):
    parts = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return torch.cat([part.detach().flatten() for part in parts])


@pytest.mark.parametrize("spectral", [False, True])
def test_kfacs_steps(device, spectral):
    found = []
    for shard in (False, True):
        model = model_on(device, shard=shard)
        scaling = {"step_scaling": "spectral"} if spectral else {"kl_clip": 1e-3}
        options = KFACOptions(seed=0)
        opt = KFAC(model, 0.05, refresh_every=2, invert_every=4, options=options, **scaling)
        for step in range(12):
            x, y = batch(device, step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        found.append(weights(model))
        opt.detach()
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_what_is_watched(device, tmp_path):
    records = []
    for shard in (False, True):
        model = model_on(device, shard=shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        inputs, folder = batch(device, -1)[0], tmp_path / str(shard)
        options = {"every": EVERY, "probes": PROBES, "inputs": inputs, "folder": folder}
        with watch(model, optimizer, **options) as watched:
            for step in range(3 * EVERY):
                x, y = batch(device, step)
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        records.append({(row.step, row.name): row.value for row in watched.records.rows})
    alone, sharded = records
    kinds = {name.partition("/")[0] for _, name in alone}
    assert kinds >= {"rotation", "weight_norm", "size_response", "spectral_norm", "gn_norm"}
    assert sharded == pytest.approx(alone, rel=1e-6, abs=1e-9)
