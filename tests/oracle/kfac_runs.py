"""Run `decaylab.KFAC` for a test, and compare its factors with the naive ones."""

import copy
from collections.abc import Callable, Mapping

import torch
from oracle.kfac import Factors
from oracle.plain_kfac import KFAC
from torch import Tensor, nn
from torch.nn import functional as F

# A refresh in every step, without sampling: what most exactness tests want.
EXACT = {"outputs": "exact", "refresh_every": 1, "invert_every": 1}


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Over all rows of [..., C]."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def labels_for(*shape: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model in float64 with weights that depend on the seed alone; biases are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def train_step(opt: KFAC, model: nn.Module, x: Tensor, y: Tensor, loss=cross_entropy) -> Tensor:
    """The loop that SGD has."""
    value = loss(model(x), y)
    value.backward()
    opt.step()
    opt.zero_grad()
    return value.detach()


def library_factors(model: nn.Module, x: Tensor, y: Tensor | None = None, **options) -> Mapping:
    """The factors after one refresh on one batch; the given model is not changed."""
    model = copy.deepcopy(model)
    opt = KFAC(model, lr=0.1, **({"outputs": "exact"} | options))
    logits = model(x)
    if y is None:
        logits.square().mean().backward()
    else:
        cross_entropy(logits, y).backward()
    opt.step()
    return opt.factors()


def with_group_axis(factors) -> Factors:
    """The library leaves the group axis out where there is one group."""
    A, S = (m if m.dim() == 3 else m[None] for m in (factors.A, factors.S))
    return Factors(A, S, float(factors.T))


def dense_block(factors) -> Tensor:
    """T * kron(S, A) of a layer with one group, from the library's factors."""
    (block,) = with_group_axis(factors).blocks()
    return block


def assert_same_factors(ours: Mapping, naive: dict[str, Factors], tolerance: float = 1e-10) -> None:
    """Relative to the largest entry of each factor, which must not be zero."""
    assert set(ours) == set(naive)
    for name, expected in naive.items():
        found = with_group_axis(ours[name])
        for factor in ("A", "S"):
            left, right = getattr(found, factor), getattr(expected, factor)
            assert left.shape == right.shape, (name, factor, left.shape, right.shape)
            scale = right.abs().max()
            assert scale > 0, (name, factor)
            assert (left - right).abs().max() <= tolerance * max(1.0, scale), (name, factor)
        assert abs(found.T - expected.T) <= 1e-12 * expected.T, name


def same_factors(left: KFAC, right: KFAC, tolerance: float = 1e-12) -> bool:
    """Whether two optimizers have measured the same."""
    pairs = zip(left.factors().values(), right.factors().values(), strict=True)
    return all(
        (a.A - b.A).abs().max() <= tolerance
        and (a.S - b.S).abs().max() <= tolerance
        and abs(a.T - b.T) <= tolerance
        for a, b in ((with_group_axis(x), with_group_axis(y)) for x, y in pairs)
    )
