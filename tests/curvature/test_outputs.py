"""What is back-propagated from the logits, against the Hessian of the loss taken by autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.kfac import output_hessian
from refusals import refuses

from decaylab.curvature import outputs
from decaylab.errors import Lacks, UnknownName

KINDS = [
    ("fisher", "categorical"),
    ("fisher", "bernoulli"),
    ("fisher", "gaussian"),
    ("gauss-newton", "categorical"),
    ("gauss-newton", "bernoulli"),
    ("gauss-newton", "gaussian"),
]
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4)) | st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 4)
)


def logits_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("curvature", "likelihood"), KINDS)
@given(shape=shapes, seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_exact_vectors_sum_to_the_hessian(curvature, likelihood, shape, seed):
    z = logits_of(shape, seed)
    vectors = list(outputs.exact(z, curvature, likelihood))
    assert len(vectors) == shape[-1]
    assert all(v.shape == z.shape and v.dtype == z.dtype for v in vectors)
    rows = [v.reshape(-1, shape[-1]) for v in vectors]
    for r, row in enumerate(z.reshape(-1, shape[-1])):
        total = sum(torch.outer(v[r], v[r]) for v in rows)
        expected = output_hessian(row, curvature, likelihood)
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("curvature", "likelihood"), KINDS)
@given(shape=shapes, seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_hessian_product(curvature, likelihood, shape, seed):
    z, v = logits_of(shape, seed), logits_of(shape, seed + 1)
    product = outputs.hessian_product(z, v, curvature, likelihood).reshape(-1, shape[-1])
    for r, (row, vector) in enumerate(
        zip(z.reshape(-1, shape[-1]), v.reshape(-1, shape[-1]), strict=True)
    ):
        expected = output_hessian(row, curvature, likelihood) @ vector
        torch.testing.assert_close(product[r], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("curvature", "likelihood"), KINDS)
def test_sampled_vectors_have_the_hessian_as_second_moment(curvature, likelihood):
    """Within five standard errors of every entry; the mean is zero likewise."""
    row = torch.tensor([0.3, -1.2, 1.5, 0.0], dtype=torch.float64)
    draws = 100_000
    generator = torch.Generator().manual_seed(3)
    v = outputs.sampled(row.expand(draws, 4), curvature, likelihood, generator)
    products = v[:, :, None] * v[:, None, :]
    error = products.mean(0) - output_hessian(row, curvature, likelihood)
    assert (error.abs() <= 5 * products.std(0) / draws**0.5 + 1e-15).all()
    assert (v.mean(0).abs() <= 5 * v.std(0) / draws**0.5).all()


@pytest.mark.parametrize(("curvature", "likelihood"), KINDS)
def test_rows_are_sampled_independently(curvature, likelihood):
    """Two rows with equal logits: the mean product of their vectors vanishes."""
    z = torch.tensor([0.3, -1.2, 1.5], dtype=torch.float64).expand(50_000, 2, 3)
    v = outputs.sampled(z, curvature, likelihood, torch.Generator().manual_seed(4))
    products = v[:, 0, :, None] * v[:, 1, None, :]
    assert (products.mean(0).abs() <= 5 * products.std(0) / 50_000**0.5).all()


def test_the_fisher_sample_is_a_label():
    """v = p - onehot(y): it adds up to zero and has exactly one negative entry."""
    z = logits_of((200, 5))
    v = outputs.sampled(z, "fisher", "categorical", torch.Generator().manual_seed(0))
    one_hot = z.softmax(-1) - v
    torch.testing.assert_close(one_hot.sum(-1), torch.ones(200, dtype=torch.float64))
    assert ((one_hot - one_hot.round()).abs() < 1e-12).all()


def test_the_generator_alone_decides_the_sample():
    z = logits_of((7, 3))
    for curvature, likelihood in KINDS:
        torch.manual_seed(1)
        first = outputs.sampled(z, curvature, likelihood, torch.Generator().manual_seed(9))
        state = torch.get_rng_state()
        torch.manual_seed(2)
        again = outputs.sampled(z, curvature, likelihood, torch.Generator().manual_seed(9))
        assert torch.equal(first, again)
        torch.manual_seed(1)
        assert torch.equal(state, torch.get_rng_state())  # the global generator was not used


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_logits_stay_finite(extreme):
    z = torch.tensor([[extreme, 0.0, 1.0]], dtype=torch.float32)
    for curvature, likelihood in KINDS:
        generator = torch.Generator().manual_seed(0)
        assert outputs.sampled(z, curvature, likelihood, generator).isfinite().all()
        assert all(v.isfinite().all() for v in outputs.exact(z, curvature, likelihood))


def test_half_precision_logits_keep_their_dtype():
    z = logits_of((4, 3)).to(torch.bfloat16)
    for curvature, likelihood in KINDS:
        v = outputs.sampled(z, curvature, likelihood, torch.Generator().manual_seed(0))
        assert v.dtype == torch.bfloat16
        assert next(outputs.exact(z, curvature, likelihood)).dtype == torch.bfloat16


def test_half_precision_logits_have_the_hessian_of_their_values():
    """Up to the rounding of the result: 1 - p of a p that bfloat16 would round to 1 is not lost."""
    z = torch.tensor([[7.0, 0.0]])
    for curvature, likelihood in KINDS:
        for half, full in zip(
            outputs.exact(z.bfloat16(), curvature, likelihood),
            outputs.exact(z.double(), curvature, likelihood),
            strict=True,
        ):
            torch.testing.assert_close(half.double(), full, rtol=1e-2, atol=0)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_rare_labels_are_drawn_as_often_from_half_precision_logits(likelihood):
    """p = 1e-3, which is less than a random number in bfloat16 can tell from 0."""
    z = torch.tensor([0.0, 6.907]).bfloat16().repeat(200_000, 1)
    z = z if likelihood == "categorical" else -z
    v = outputs.sampled(z, "fisher", likelihood, torch.Generator().manual_seed(0))
    rare = 0 if likelihood == "categorical" else 1
    assert (v[:, rare] < -0.5).double().mean() == pytest.approx(1e-3, rel=0.3)


def test_vectors_are_constants():
    z = logits_of((2, 3)).requires_grad_()
    for curvature, likelihood in KINDS:
        vectors = [
            outputs.sampled(z, curvature, likelihood),
            *outputs.exact(z, curvature, likelihood),
        ]
        assert not any(v.requires_grad for v in vectors)


def test_unknown_names_are_refused_with_the_known_ones():
    z = logits_of((2, 3))
    with refuses(UnknownName, kind="curvature", name="hessian"):
        outputs.sampled(z, "hessian", "categorical")
    with refuses(UnknownName, kind="likelihood", name="poisson"):
        next(outputs.exact(z, "fisher", "poisson"))
    with refuses(Lacks, what="output Hessian"):
        outputs.hessian_product(z, z, "empirical-fisher", "categorical")
