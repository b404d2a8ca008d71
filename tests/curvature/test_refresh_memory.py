"""What a refresh holds at once: one layer's gradients, and logits part by part."""

import gc
import weakref

import pytest
import torch
from oracle.kfac import naive_factors, vectors_for
from oracle.kfac_runs import assert_same_factors, random, seeded
from torch import nn

from decaylab.curvature import outputs
from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.factors import Sums


def test_gradients_of_layers_are_not_there_all_at_once(monkeypatch):
    """Of a chain of layers, those of the ones before are freed when the next one's come."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))))
    alive, seen = [], []
    whole = Sums.add_gradients

    def watched(self, site, uses, gradients, sharing, scale):
        alive.append(sum(gradient() is not None for gradient in seen))
        seen.extend(weakref.ref(gradient) for gradient in gradients)
        whole(self, site, uses, gradients, sharing, scale)

    monkeypatch.setattr(Sums, "add_gradients", watched)
    gc.disable()
    try:
        KroneckerEstimator(model).add_batch(random(5, 4))
    finally:
        gc.enable()
    assert len(seen) == 6
    assert max(alive) <= 1


class Turning(nn.Module):
    """Two layers one behind the other, or beside each other: called in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.chain = nn.Linear(3, 3), nn.Linear(3, 3), True

    def forward(self, x):
        first = self.first(x).tanh()
        return self.second(first) if self.chain else first + self.second(x).tanh()


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_a_graph_that_changes_between_passes(order):
    model = seeded(Turning)
    estimator = KroneckerEstimator(model, outputs="exact")
    for model.chain in order:
        found = estimator.measure([random(5, 3)])
        naive = naive_factors(model, random(5, 3), vectors_for("fisher", "categorical"))
        assert_same_factors(found, naive)


def test_a_call_that_the_logits_ignore():
    class Aside(Turning):
        def forward(self, x):
            self.kept = self.second(self.first(x))
            return self.first(x)

    model = seeded(Aside)
    found = KroneckerEstimator(model, outputs="exact").measure([random(5, 3)])
    assert float(found["first"].T) == 1  # one of its two calls
    assert float(found["second"].T) == 0


@pytest.mark.parametrize("kind", [("fisher", "categorical"), ("fisher", "bernoulli")])
def test_logits_in_parts_have_the_same_distribution(monkeypatch, kind):
    """E[v v'] = H, within four standard errors, whatever the size of a part."""
    torch.manual_seed(0)
    row = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64)
    logits = row.expand(4000, 5, 3)
    monkeypatch.setattr(outputs, "SAMPLED_AT_ONCE", 70)  # not a multiple of a row
    generator = torch.Generator().manual_seed(1)
    vectors = outputs.sampled(logits, *kind, generator)
    assert vectors.shape == logits.shape
    outer = (vectors[..., :, None] * vectors[..., None, :]).reshape(-1, 9)
    expected = sum(torch.outer(v, v) for v in (w[0] for w in outputs.exact(row[None], *kind)))
    error = outer.std(0) / len(outer) ** 0.5
    assert ((outer.mean(0) - expected.flatten()).abs() <= 4 * error + 1e-12).all()
