"""Experts by torch's grouped product on CUDA: in bfloat16, with rows behind the last expert's."""

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn import functional as F

EXPERTS, WIDTH, CLASSES = 4, 32, 8


class Experts(nn.Module):
    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.num_experts, self.grouped = EXPERTS, grouped
        self.proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        chosen = torch.arange(len(x), device=x.device) % (EXPERTS - 1)  # the last has no row
        order = chosen.argsort(stable=True)
        rows = torch.cat([x[order], x.new_ones(8, WIDTH)])
        counts = torch.bincount(chosen, minlength=EXPERTS)
        if self.grouped:
            ends = counts.cumsum(0, dtype=torch.int32)
            outputs = F.grouped_mm(rows, self.proj.mT, offs=ends)[: len(x)]
        else:
            parts = rows[: len(x)].split(counts.tolist())
            outputs = [F.linear(part, self.proj[i]) for i, part in enumerate(parts) if len(part)]
            outputs = torch.cat(outputs)
        return torch.zeros_like(outputs).index_put((order,), outputs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_grouped_product_has_the_factors_of_products_one_by_one(device):
    factors = []
    for grouped in (False, True):
        torch.manual_seed(0)
        experts = Experts(grouped=grouped)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), experts, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )
        model = model.to(device, torch.bfloat16)
        x = torch.randn(48, WIDTH).to(device, torch.bfloat16)
        opt = KFAC(model, 0.01, kl_clip=1e-3, curvature="empirical-fisher")
        for _ in range(2):
            F.cross_entropy(model(x).float(), torch.arange(48, device=device) % CLASSES).backward()
            opt.step()
            opt.zero_grad()
        factors.append(opt.factors())
        opt.detach()
        assert all(p.isfinite().all() for p in model.parameters())
    one_by_one, grouped = factors
    assert one_by_one.keys() == grouped.keys() == {"0", "1.proj", "3"}
    for name in grouped:
        for side in ("A", "S"):
            found, wanted = (getattr(f[name], side).float() for f in (grouped, one_by_one))
            assert (found - wanted).norm() <= 0.02 * wanted.norm()
    assert not grouped["1.proj"].A[-1].any()
