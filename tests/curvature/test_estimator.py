"""The estimator alone: factors of the optimizer and of the naive oracle, nothing left behind."""

import copy
import gc
import weakref

import pytest
import torch
from oracle.kfac import naive_factors, vectors_for
from oracle.kfac_runs import assert_same_factors, cross_entropy, labels_for, random, seeded
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.errors import Lacks, UnknownName
from decaylab.probes import measured_factors

CLASSES = 3
KINDS = [("fisher", "categorical"), ("fisher", "bernoulli"), ("gauss-newton", "categorical")]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def images(size: int = 6, seed: int = 0) -> torch.Tensor:
    return random(size, 2, 3, 3, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_factors_are_the_optimizers_and_the_naive_ones(kind, training):
    model = seeded(net).train(training)
    curvature, likelihood = kind
    options = {"curvature": curvature, "likelihood": likelihood, "outputs": "exact"}
    estimator = KroneckerEstimator(model, **options)
    estimator.add_batch(images())
    estimator.update()
    naive = naive_factors(copy.deepcopy(model), images(), vectors_for(*kind))
    assert_same_factors(estimator.factors(), naive)
    optimizer = KFAC(model.train(), 0.1, **options)
    cross_entropy(model(images()), labels_for(6, classes=CLASSES)).backward()
    optimizer.step()
    for name, factor in optimizer.factors().items():
        own = estimator.factors()[name]
        for side in ("A", "S", "T"):
            torch.testing.assert_close(
                getattr(factor, side), getattr(own, side), rtol=1e-12, atol=0
            )


def test_several_batches_are_one():
    """By `measure`, by `add_batch` and by passes of the caller's own in `listening`."""
    model = seeded(net)
    whole = images(10)
    parts = [whole[:3], whole[3:4], whole[4:]]
    one, *others = (KroneckerEstimator(model, outputs="exact") for _ in range(4))
    expected = one.measure([whole])
    others[0].measure(parts)
    for part in parts:
        others[1].add_batch(part)
        with others[2].listening():
            model(part)
    for estimator in others[1:]:
        estimator.update()
    for estimator in others:
        for name, factor in estimator.factors().items():
            torch.testing.assert_close(factor.A, expected[name].A, rtol=1e-10, atol=1e-14)
            torch.testing.assert_close(factor.S, expected[name].S, rtol=1e-10, atol=1e-14)


def test_an_update_averages_with_those_before():
    model = seeded(net)
    estimator = KroneckerEstimator(model, outputs="exact")
    seen = []
    for seed in range(2):
        seen.append(KroneckerEstimator(model, outputs="exact").measure([images(seed=seed)])["3"].A)
        estimator.add_batch(images(seed=seed))
        estimator.update(0.75)
    expected = 0.75 * seen[0] + 0.25 * seen[1]
    torch.testing.assert_close(estimator.factors()["3"].A, expected, rtol=1e-12, atol=1e-14)


def test_passes_outside_are_not_observed_and_gradients_are_left_alone():
    model = seeded(net)
    estimator = KroneckerEstimator(model)
    model(images())
    assert not estimator.sums
    model[0].weight.grad = torch.ones_like(model[0].weight)
    estimator.measure([images()])
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[3].weight.grad is None


def test_it_goes_with_the_last_reference_and_takes_its_hooks_along():
    model = seeded(net)
    estimator = KroneckerEstimator(model)
    running = weakref.ref(estimator.running)
    gc.disable()
    try:
        del estimator
        assert running() is None
    finally:
        gc.enable()
    assert not model._forward_hooks
    assert not model[0]._forward_hooks


def test_a_choice_of_parameters_and_layers():
    model = seeded(net)
    chosen = [model[3].weight, *model[5].parameters()]
    factors = KroneckerEstimator(model, parameters=chosen, exclude=["5"]).measure([images()])
    assert {name: factor.A.shape for name, factor in factors.items()} == {"3": (12, 12)}


def test_two_estimators_and_an_optimizer_listen_to_one_model():
    """Functional calls, too, are heard by all that listen."""

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0].mean(0))

    model = seeded(Attending)
    x = random(5, 6, 4)
    both = [KroneckerEstimator(model, outputs="exact") for _ in range(2)]
    optimizer = KFAC(model, 0.1, outputs="exact")
    with both[0].listening(), both[1].listening():
        cross_entropy(model(x), labels_for(6, classes=CLASSES)).backward()
    optimizer.step()
    for estimator in both:
        estimator.update()
        found, expected = estimator.factors()["attention"], optimizer.factors()["attention"]
        torch.testing.assert_close(found.A, expected.A, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.S, expected.S, rtol=1e-12, atol=1e-14)


def test_probes_measure_by_it():
    """Without dropout, and with the batch's own statistics."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    x = random(6, 4)
    found = measured_factors(model, [x], outputs="sampled", seed=3)
    estimator = KroneckerEstimator(model, curvature="gauss-newton", seed=3)
    expected = estimator.measure([x])
    for name, factor in found.items():
        assert torch.equal(factor.A, expected[name].A)
        assert torch.equal(factor.S, expected[name].S)


def test_what_is_refused():
    model = seeded(net)
    with refuses(UnknownName, kind="sharing", name="both"):
        KroneckerEstimator(model, sharing="both")
    with refuses(Lacks, what="batches"):
        KroneckerEstimator(model).measure([])
    with refuses(Lacks, what="layer that K-FAC covers"):
        KroneckerEstimator(nn.LayerNorm(3))
