"""Agreement with curvlinops, an independent library of curvature operators, on a conv net.

Its operators are of the loss as given (a mean over rows), like ours; its "type-2" Fisher is our
`outputs="exact"`. Its squared loss has the Hessian 2 / C * I per row when averaged, so the
Gauss-Newton matrix is C / 2 of its GGN.
"""

import warnings

import pytest
import torch
from oracle.kfac_runs import labels_for, library_factors, random, seeded
from torch import Tensor, nn

from decaylab.curvature.products import curvature_product

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies use what Python and torch have deprecated
    from curvlinops import EFLinearOperator, GGNLinearOperator, KFACLinearOperator

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CLASSES = 3


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.ReLU(),
        nn.Linear(5, CLASSES),
    )


MODEL, X, Y = seeded(conv_net), random(4, 2, 6, 6), labels_for(4, classes=CLASSES)
CROSS_ENTROPY = nn.CrossEntropyLoss()
SQUARED = nn.MSELoss()


def parameters() -> list[nn.Parameter]:
    return list(MODEL.parameters())


def random_vector() -> list[Tensor]:
    return [random(*p.shape, seed=i) for i, p in enumerate(parameters())]


def times(factors, vector: list[Tensor]) -> list[Tensor]:
    """The K-FAC approximation times a vector, layer by layer: T * S V A."""
    products = []
    parts = iter(vector)
    for name, module in MODEL.named_modules():
        if name not in factors:
            continue
        f, weight = factors[name], next(parts)
        columns = [weight.flatten(1)]
        if module.bias is not None:
            columns.append(next(parts)[:, None])
        product = f.T * f.S @ torch.cat(columns, 1) @ f.A
        products.append(product[:, : columns[0].shape[1]].reshape(weight.shape))
        if module.bias is not None:
            products.append(product[:, -1])
    return products


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 0
        assert (a - b).abs().max() <= 1e-9 * b.abs().max()


def their_kfac(loss, target, sharing, fisher_type="type-2") -> KFACLinearOperator:
    return KFACLinearOperator(
        MODEL,
        loss,
        parameters(),
        [(X, target)],
        fisher_type=fisher_type,
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_of_the_fisher(sharing):
    ours = library_factors(MODEL, X, curvature="fisher", sharing=sharing)
    theirs = their_kfac(CROSS_ENTROPY, Y, sharing) @ random_vector()
    assert_close(times(ours, random_vector()), theirs)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_of_the_gauss_newton_matrix(sharing):
    ours = library_factors(MODEL, X, curvature="gauss-newton", sharing=sharing)
    theirs = their_kfac(SQUARED, random(4, CLASSES), sharing) @ random_vector()
    assert_close(times(ours, random_vector()), [CLASSES / 2 * t for t in theirs])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_of_the_empirical_fisher(sharing):
    ours = library_factors(MODEL, X, Y, curvature="empirical-fisher", sharing=sharing)
    theirs = their_kfac(CROSS_ENTROPY, Y, sharing, "empirical") @ random_vector()
    assert_close(times(ours, random_vector()), theirs)


def our_product(curvature: str, targets: Tensor | None = None) -> list[Tensor]:
    names = [name for name, _ in MODEL.named_parameters()]
    vector = dict(zip(names, random_vector(), strict=True))
    product = curvature_product(MODEL, X, vector, curvature=curvature, targets=targets)
    return [product[name] for name in names]


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_products_with_the_whole_matrix(curvature):
    if curvature == "fisher":
        operator = GGNLinearOperator(MODEL, CROSS_ENTROPY, parameters(), [(X, Y)])
        theirs = operator @ random_vector()
    else:
        data = [(X, random(4, CLASSES))]
        operator = GGNLinearOperator(MODEL, SQUARED, parameters(), data)
        theirs = [CLASSES / 2 * t for t in operator @ random_vector()]
    assert_close(our_product(curvature), theirs)


def test_products_with_the_empirical_fisher():
    operator = EFLinearOperator(MODEL, CROSS_ENTROPY, parameters(), [(X, Y)])
    assert_close(our_product("empirical-fisher", Y), operator @ random_vector())
