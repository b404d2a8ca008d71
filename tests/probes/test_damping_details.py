"""Effective damping where a layer has groups, and over several layers."""

import math

import pytest
import torch
from torch import nn

from decaylab import KFAC, probes

CLOSE = {"rel": 1e-9}


@pytest.fixture
def grouped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(24, 2)).double()
    inputs = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    return model, probes.measured_factors(model, [inputs])


def test_factored_damping_of_groups(grouped):
    """Each group is a block of its own, with a pi of its own (recipe line 7)."""
    model, factors = grouped
    of, damping = factors["0"], 0.3
    square = float(model[0].weight.detach().square().sum())
    r = math.sqrt(damping / float(of.T))
    added, shares = [], []
    for A, S in zip(of.A, of.S, strict=True):
        pi = math.sqrt(float(A.trace() / len(A)) / float(S.trace() / len(S)))
        own = A[:-1, :-1]
        plain = of.T * torch.kron(S, own)
        used = of.T * torch.kron(
            S + r / pi * torch.eye(len(S)).double(), own + pi * r * torch.eye(len(own)).double()
        )
        added.append((used - plain).diagonal())
        shares.append(torch.linalg.eigvals(plain @ torch.linalg.inv(used)).real)
    layer = probes.effective_damping(model, factors, damping).details["0"]
    assert layer.factored == pytest.approx(square * float(torch.cat(added).mean()), **CLOSE)
    assert layer.factored_share == pytest.approx(float(torch.cat(shares).mean()), **CLOSE)


def test_groups_with_dampings_of_their_own(grouped):
    """KFAC raises the damping of a group whose inverse fails, and gives one for each."""
    model, factors = grouped
    dampings = torch.tensor([0.3, 0.1], dtype=torch.float64)
    layer = probes.effective_damping(model, factors, {"0": dampings, "2": 0.02}).details["0"]
    values = probes.spectrum(factors["0"]).view(2, -1)
    shares = values / (values + dampings[:, None])
    assert layer.share == pytest.approx(float(shares.mean()), **CLOSE)
    assert layer.damping == pytest.approx(0.2)
    both = [probes.effective_damping(model, factors, each).details["0"] for each in (0.3, 0.1)]
    assert both[0].factored_share < layer.factored_share < both[1].factored_share


def test_the_total_weighs_layers_by_their_directions(grouped):
    model, factors = grouped
    found = probes.effective_damping(model, factors, {"0": 0.3, "2": 0.02})
    shares = []
    for layer, damping in (("0", 0.3), ("2", 0.02)):
        values = probes.spectrum(factors[layer])
        assert len(values) == model.get_submodule(layer).weight.numel()
        shares.append(values / (values + damping))
    assert found.total == pytest.approx(float(torch.cat(shares).mean()), **CLOSE)


def test_eigenvalues_are_taken_as_often_as_a_foreign_loop_inverts(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    kfac = KFAC(model, lr=0.1, damping=0.1, refresh_every=2, invert_every=4, weight_decay=0.1)
    taken = []

    def measured(*arguments):
        taken.append(kfac.steps)
        return probes.effective_damping(*arguments)

    monkeypatch.setattr("decaylab.probes.damping.effective_damping", measured)
    inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
    with probes.watch(model, kfac, every=1, probes=["second_order_share"]) as watched:
        for _ in range(12):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            kfac.step()
            kfac.zero_grad()
    assert taken == [1, 2, 3, 4, 5, 9]
    shares = [row.value for row in watched.records.series("second_order_share/0")]
    assert shares[8] == shares[11] != shares[7]
    square = float(model[0].weight.detach().square().sum())
    assert watched.records.last("effective_damping/0") == pytest.approx(0.1 * square)
