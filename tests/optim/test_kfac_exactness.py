"""Where K-FAC is exact, it is exact; where it is sampled, it is unbiased; Eq. 13 and damping."""

import contextlib
import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.kfac import exact_block, naive_factors, vectors_for
from oracle.kfac_runs import (
    EXACT,
    cross_entropy,
    dense_block,
    labels_for,
    library_factors,
    random,
    seeded,
    train_step,
)
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn import functional as F

from decaylab.optim.options import KFACOptions
from decaylab.optim.scale_free import ScaleFree

CLASSES = 3
SEEDED = {"options": KFACOptions(seed=0)}


def assert_blocks_are_exact(model, x, curvature, likelihood="categorical"):
    factors = library_factors(model, x, curvature=curvature, likelihood=likelihood)
    for name in factors:
        expected = exact_block(model, x, name, curvature, likelihood)
        found = dense_block(factors[name])
        assert expected.abs().max() > 0
        assert (found - expected).abs().max() <= 1e-8 * max(1.0, expected.abs().max()), name


@given(
    batch=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 4), max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_deep_linear_nets_under_gauss_newton(batch, sizes, bias, seed):
    """Gradients at a layer do not depend on the example, so the mean of the product factors."""
    widths = [3, *sizes, CLASSES]
    model = seeded(
        lambda: nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths))),
        seed,
    )
    assert_blocks_are_exact(model, random(batch, 3, seed=seed), "gauss-newton")


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
@given(
    sizes=st.lists(st.integers(1, 4), max_size=3),
    bias=st.booleans(),
    inplace=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_any_net_at_batch_one(curvature, likelihood, sizes, bias, inplace, seed):
    def build():
        layers, width = [], 3
        for size in sizes:
            layers += [nn.Linear(width, size, bias=bias), nn.LeakyReLU(0.2, inplace=inplace)]
            width = size
        return nn.Sequential(*layers, nn.Linear(width, CLASSES, bias=bias))

    assert_blocks_are_exact(seeded(build, seed), random(1, 3, seed=seed), curvature, likelihood)


def test_a_conv_with_one_position_at_batch_one_is_exact():
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3, CLASSES))
    )
    assert_blocks_are_exact(model, random(1, 2, 3, 3), "fisher")


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, CLASSES)
    )


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_conv_with_many_positions_is_the_naive_product_and_not_exact(curvature):
    model, x = seeded(conv_net), random(3, 2, 4, 4)
    factors = library_factors(model, x, curvature=curvature)
    naive = naive_factors(copy.deepcopy(model), x, vectors_for(curvature, "categorical"))
    for name in ("0", "2"):
        (expected,) = naive[name].blocks()
        found = dense_block(factors[name])
        assert (found - expected).abs().max() <= 1e-10
        true = exact_block(model, x, name, curvature, "categorical")
        assert (found - true).norm() > 0.01 * true.norm()


def test_the_curvature_is_that_of_the_mean_loss():
    """The same batch twice changes nothing: no factor of B is lost or gained anywhere."""
    model, x = seeded(conv_net), random(3, 2, 4, 4)
    once, twice = library_factors(model, x), library_factors(model, torch.cat([x, x]))
    for name in once:
        torch.testing.assert_close(dense_block(once[name]), dense_block(twice[name]))


def test_fisher_is_gauss_newton_with_a_gaussian_likelihood():
    model, x = seeded(conv_net), random(3, 2, 4, 4)
    fisher = library_factors(model, x, curvature="fisher", likelihood="gaussian")
    newton = library_factors(model, x, curvature="gauss-newton", likelihood="gaussian")
    for name in fisher:
        torch.testing.assert_close(fisher[name].S, newton[name].S, rtol=0, atol=1e-14)
        torch.testing.assert_close(fisher[name].A, newton[name].A, rtol=0, atol=1e-14)

    # ... and so are the steps with the squared loss
    def squared(z, y):
        return 0.5 * F.mse_loss(z, y, reduction="sum") / len(z)

    after = []
    for curvature in ("fisher", "gauss-newton"):
        net = copy.deepcopy(model)
        opt = KFAC(net, 0.1, curvature=curvature, likelihood="gaussian", **EXACT)
        for seed in range(3):
            train_step(opt, net, random(3, 2, 4, 4, seed=seed), random(3, 3, seed=seed), squared)
        after.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(*after, rtol=0, atol=1e-13)


# -- sampling --


@pytest.mark.parametrize(
    ("curvature", "likelihood"),
    [("fisher", "categorical"), ("fisher", "bernoulli"), ("gauss-newton", "categorical")],
)
def test_sampled_factors_agree_with_the_exact_ones(curvature, likelihood):
    """Frobenius error of the mean of 1,000 draws, within four of its own standard errors.

    With n independent draws of S, E |mean - S|^2 = E |draw - S|^2 / n. A wrong factor of two in S
    makes it twenty standard errors and more.
    """
    model, x = seeded(conv_net), random(4, 2, 4, 4)
    options = {"curvature": curvature, "likelihood": likelihood}
    exact = library_factors(model, x, **options)
    opt = KFAC(model, 1e-30, refresh_every=1, factor_decay=0.0, **options, **SEEDED)
    draws = {name: [] for name in exact}
    for _ in range(1000):
        train_step(opt, model, x, torch.zeros(4, dtype=torch.long))
        for name, factors in opt.factors().items():
            draws[name].append(factors.S.clone())
            assert torch.allclose(factors.A, exact[name].A, rtol=0, atol=1e-12)
    for name, samples in draws.items():
        S, samples = exact[name].S, torch.stack(samples)
        error = (samples.mean(0) - S).norm()
        standard_error = ((samples - S).square().sum((1, 2)).mean() / len(samples)).sqrt()
        assert error <= 4 * standard_error, (name, float(error / standard_error))
        assert standard_error <= 0.05 * S.norm()  # so that a wrong factor would be seen


class Attention(nn.Module):
    """Rows see each other: every token's logits depend on every token."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(3, 3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head((x @ x.mT).softmax(-1) @ self.value(x).tanh())


@pytest.mark.parametrize("outputs", ["sampled", "exact"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_rows_that_see_each_other(outputs, sharing):
    """With attention between tokens S is still unbiased: no cross terms between rows survive."""
    model, x = seeded(Attention), random(2, 3, 3)
    vectors = vectors_for("gauss-newton", "categorical")
    naive = naive_factors(copy.deepcopy(model), x, vectors, sharing=sharing)
    opt = KFAC(
        model,
        1e-30,
        curvature="gauss-newton",
        outputs=outputs,
        sharing=sharing,
        refresh_every=1,
        factor_decay=0.0,
        **SEEDED,
    )
    samples = []
    for _ in range(1000):
        train_step(opt, model, x, labels_for(2, 3, classes=CLASSES))
        samples.append(opt.factors()["value"].S.clone())
    samples, S = torch.stack(samples), naive["value"].S[0]
    standard_error = ((samples - S).square().sum((1, 2)).mean() / len(samples)).sqrt()
    assert (samples.mean(0) - S).norm() <= 4 * standard_error
    assert standard_error <= 0.05 * S.norm()


# -- scale invariance: Eq. 13, Eq. 14 and the third mechanism --


def normalised_net(bias: bool = False):
    """Both convolutions are followed by a batch norm with eps = 0: they are scale-invariant."""

    def norm():
        # torch wants a positive eps; added to a variance in float64 this one is exactly nothing
        return nn.BatchNorm2d(3, eps=1e-300, affine=False)

    return nn.Sequential(
        nn.Conv2d(2, 3, 2, bias=bias),
        norm(),
        nn.Tanh(),
        nn.Conv2d(3, 3, 2, bias=bias),
        norm(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def scaled(model: nn.Module, name: str, factor: float) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(factor)
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_equation_13(curvature, factor, bias):
    """W times 1/2 and 3: the curvature of that layer times 4 and 1/9, of the others times one."""
    model, x = seeded(lambda: normalised_net(bias)), random(6, 2, 4, 4)
    plain = library_factors(model, x, curvature=curvature)
    other = library_factors(scaled(model, "3", factor), x, curvature=curvature)
    for name in plain:
        expected = dense_block(plain[name]) * (factor**-2 if name == "3" else 1.0)
        found = dense_block(other[name])
        assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def change_of_direction(model, factor, **options) -> torch.Tensor:
    """Step a layer whose weight was scaled after the optimizer was built; change of W / |W|."""
    x, y = 3 * random(12, 2, 4, 4), labels_for(12, classes=CLASSES)
    model = copy.deepcopy(model)
    opt = KFAC(model, momentum=0.0, **EXACT, **({"lr": 0.05} | options))
    weight = model[3].weight
    with torch.no_grad():
        weight.mul_(factor)
    before = weight.detach() / weight.detach().norm()
    train_step(opt, model, x, y)
    change = weight.detach() / weight.detach().norm() - before
    assert change.norm() > 1e-3
    return change


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_without_damping_the_direction_moves_the_same(curvature, factor):
    """Sec. 4.2: K-FAC is invariant to the scale of a layer under batch norm."""
    model = seeded(normalised_net)
    options = {"damping": 1e-12, "curvature": curvature}
    # 1e-12 is negligible against a large curvature; the lr gives the step its length back
    options |= {"curvature_scale": 1e6, "lr": 5e4}
    plain = change_of_direction(model, 1.0, **options)
    other = change_of_direction(model, factor, **options)
    assert (plain - other).norm() <= 1e-6 * plain.norm()


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_scale_free_damping_keeps_the_direction_of_the_damped_step(curvature, factor):
    """Eq. 14: fixed damping acts more on large weights; the scale-free one acts the same."""
    model = seeded(normalised_net)
    options = {"damping": 0.1, "curvature": curvature}
    plain = change_of_direction(model, 1.0, damping_scaling="scale-free", **options)
    free = change_of_direction(model, factor, damping_scaling="scale-free", **options)
    fixed = change_of_direction(model, factor, damping_scaling="fixed", **options)
    at_start = change_of_direction(model, 1.0, damping_scaling="fixed", **options)
    assert (plain - free).norm() <= 1e-10 * plain.norm()
    assert (plain - fixed).norm() > 1e-2 * plain.norm()
    assert (plain - at_start).norm() <= 1e-12 * plain.norm()  # both settings agree at step 0


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_scale_free_steps_move_directions_as_if_the_norms_were_free(curvature, monkeypatch):
    """Steps are as long as the weights are: put back or not, the directions go the same way.

    Momentum, KL clip and decoupled decay included; of L2 that is not so.
    """
    x, y = 3 * random(12, 2, 4, 4), labels_for(12, classes=CLASSES)
    options = {"damping": 0.1, "damping_scaling": "scale-free", "curvature": curvature}
    options |= {"weight_decay": 0.3, "kl_clip": 0.1, "factor_decay": 0.0}

    def trained() -> list[torch.Tensor]:
        model = seeded(normalised_net)
        weights = [model[layer].weight for layer in (0, 3)]
        found = [torch.stack([w.detach().norm() for w in weights])]
        opt = KFAC(model, 0.5, **EXACT, **options)
        for _ in range(6):
            train_step(opt, model, x, y)
        found.append(torch.stack([w.detach().norm() for w in weights]))
        return (
            found + [w.detach() / w.detach().norm() for w in weights] + [model[7].weight.detach()]
        )

    start, end, *held = trained()
    torch.testing.assert_close(end, start, rtol=1e-12, atol=0)
    monkeypatch.setattr(ScaleFree, "held", lambda *_: contextlib.nullcontext())
    start, end, *free = trained()
    assert ((end / start - 1).abs() > 0.05).all()
    for one, other in zip(held, free, strict=True):
        assert (one - other).norm() <= 1e-7 * other.norm()


def test_scale_free_damping_leaves_other_layers_alone():
    """The classifier is not scale-invariant: its damping stays what was asked for."""
    model = seeded(normalised_net)
    x, y = random(12, 2, 4, 4), labels_for(12, classes=CLASSES)
    after = []
    for scaling in ("fixed", "scale-free"):
        net = copy.deepcopy(model)
        opt = KFAC(net, 0.05, damping=0.1, damping_scaling=scaling, **EXACT)
        with torch.no_grad():
            net[7].weight.mul_(3.0)
        train_step(opt, net, x, y)
        after.append(net[7].weight.detach())
    assert torch.equal(*after)


def test_identity_factors_make_k_fac_sgd():
    """Damping far above the curvature: the step is the gradient over the damping."""
    model, x = seeded(conv_net), random(3, 2, 4, 4)
    y = labels_for(3, classes=CLASSES)
    reference = copy.deepcopy(model)
    cross_entropy(reference(x), y).backward()
    opt = KFAC(model, 1e7, damping=1e8, momentum=0.0, **EXACT)
    train_step(opt, model, x, y)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), (q - 0.1 * q.grad).detach(), rtol=0, atol=1e-4)
