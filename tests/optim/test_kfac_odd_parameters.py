"""Parameters that are lazy, empty, sparse, laid out in another way, or listed in another order."""

import copy

import pytest
import torch
from oracle.kfac_runs import cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.errors import BadValue, Lacks, Mismatch

CLASSES = 3
pytestmark = pytest.mark.filterwarnings("ignore:K-FAC covers")


class Mixed(nn.Module):
    """A covered layer behind a matrix that is in no block."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(matrix), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(x @ self.matrix)


def data():
    return random(8, 4), labels_for(8, classes=CLASSES)


def test_a_default_device_of_the_callers_changes_nothing():
    """On CUDA, where that is a common one, counters are copied to the host."""
    after = []
    for default in ("cpu", "meta"):
        model, (x, y) = seeded(lambda: Mixed(torch.randn(4, 6))), data()
        with torch.device(default):
            opt = KFAC(model, 0.1, weight_decay=0.1, kl_clip=1e-3, refresh_every=1)
            for _ in range(2):
                train_step(opt, model, x, y)
            opt.load_state_dict(opt.state_dict())
            train_step(opt, model, x, y)
        after.append(model.head.weight)
    assert torch.equal(*after)


def test_layers_that_are_not_built_yet_are_refused():
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, CLASSES))
    with refuses(Lacks, owner="parameter '0.weight'", what="shape yet"):
        KFAC(model, 0.1)
    model(torch.randn(2, 4))
    assert KFAC(model, 0.1).coverage()["0.weight"].block == "0"


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def test_layers_of_several_dtypes_move_apart(monkeypatch):
    """The fused step on CUDA takes one dtype at a time; on a CPU it would take all."""

    def net():
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Identity(), nn.Linear(5, CLASSES))

    fused, seen = torch._fused_sgd_, []

    def watched(params, *rest, **options):
        seen.append({p.dtype for p in params})
        return fused(params, *rest, **options)

    monkeypatch.setattr(torch, "_fused_sgd_", watched)
    plain, mixed = seeded(net), seeded(net)
    mixed[2] = Cast(torch.float32)
    mixed[3].float()
    for model in (plain, mixed):
        opt = KFAC(model, 0.1, weight_decay=0.1, outputs="exact", refresh_every=1)
        for _ in range(2):
            train_step(opt, model, *data())
    assert seen[2:] == 2 * [{torch.float64}, {torch.float32}]
    for p, q in zip(plain.parameters(), mixed.parameters(), strict=True):
        torch.testing.assert_close(p, q.double(), rtol=1e-5, atol=1e-6)


def test_complex_parameters_are_refused():
    class Complex(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x.to(torch.complex64)).abs())

    model = Complex(nn.Linear(4, 5, dtype=torch.complex64), nn.Linear(5, CLASSES))
    with refuses(BadValue, value=torch.complex64, wanted="real"):
        KFAC(model, 0.1)
    KFAC(model, 0.1, params=model[1].parameters())


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, CLASSES))
    opt = KFAC(model, 0.1)
    cross_entropy(model(torch.arange(6)), labels_for(6, classes=CLASSES)).backward()
    with refuses(BadValue, value="sparse", wanted="dense"):
        opt.step()


@pytest.mark.parametrize("others", ["adam", "sgd"])
@pytest.mark.parametrize("decay", ["l2", "decoupled"])
def test_a_parameter_without_entries(others, decay):
    class Lacks(Mixed):
        def forward(self, x):
            return super().forward(x) + self.nothing.sum()

    model = seeded(lambda: Lacks(torch.randn(4, 6)))
    plain = seeded(lambda: Mixed(torch.randn(4, 6)))
    model.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
    for each in (model, plain):
        named = sorted(each.parameters(), key=lambda p: p.numel())  # the empty one comes first
        opt = KFAC(each, 0.1, params=named, others=others, decay=decay, weight_decay=0.1)
        train_step(opt, each, *data())
    assert torch.equal(model.matrix, plain.matrix)
    assert torch.equal(model.head.weight, plain.head.weight)


@pytest.mark.parametrize("others", ["adam", "sgd"])
def test_gradients_in_another_order_in_memory(others):
    """As a loop that works on gradients may leave them."""
    after = []
    for turned in (False, True):
        model = seeded(lambda: Mixed(torch.randn(4, 6)))
        opt = KFAC(model, 0.1, others=others)
        for _ in range(2):
            cross_entropy(model(data()[0]), data()[1]).backward()
            for p in (model.matrix, model.head.weight) if turned else ():
                p.grad = p.grad.T.contiguous().T
            opt.step()
            opt.zero_grad()
        after.append(model)
    torch.testing.assert_close(after[0].matrix, after[1].matrix, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after[0].head.weight, after[1].head.weight, rtol=1e-12, atol=1e-14)


def test_a_parameter_with_gaps_in_memory_is_refused_outside_the_blocks():
    with refuses(BadValue, value=(12, 2), wanted="without gaps in memory"):
        KFAC(Mixed(torch.randn(4, 12)[:, ::2]), 0.1)
    model = Mixed(torch.randn(6, 4).T)  # in another order, but without gaps
    KFAC(model, 0.1)


def test_a_state_of_the_same_parameters_in_another_order_is_refused():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    opt = KFAC(model, 0.1)
    train_step(opt, model, random(8, 4), labels_for(8, classes=4))
    state = opt.state_dict()
    turned = copy.deepcopy(model)
    other = KFAC(turned, 0.1, params=[*turned[2].parameters(), *turned[0].parameters()])
    with refuses(Mismatch, what="the order of parameters"):
        other.load_state_dict(state)
    assert not other.state
    again = KFAC(copy.deepcopy(model), 0.1)
    again.load_state_dict(state)
    assert len(again.state) == 4


@pytest.mark.parametrize("methods", [("adam", "sgd"), ("sgd", "adam")])
def test_a_state_of_another_first_order_method_is_refused(methods):
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    saved, other = (KFAC(model, 0.1, others=method) for method in methods)
    values = dict(zip(("this state dict", "KFAC"), methods, strict=True))
    with refuses(Mismatch, values=values, remedy=f"build KFAC with others='{methods[0]}'"):
        other.load_state_dict(saved.state_dict())
    KFAC(model, 0.1, others=methods[0]).load_state_dict(saved.state_dict())
