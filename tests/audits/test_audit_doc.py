"""The adapters on docs/audit.md, for the package that the tests have anyway."""

import warnings

import pytest
import torch
from documented import snippet

from decaylab.audits import audit

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def adapters():
    names = {}
    exec(snippet("audit.md", "public K-FACs"), names)
    return names


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_curvlinops_passes(adapters, sharing):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on import: what its dependencies have deprecated
        import curvlinops  # noqa: F401
    report = audit(
        lambda model: adapters["curvlinops"](model, sharing), curvature="fisher", steps=1
    )
    assert report.passed, str(report)
    assert report.sharing == sharing
    assert all(check.passed is True for check in report.checks)


@pytest.mark.parametrize(("batch", "positions"), [(0, 0), (-2, -5)])
def test_factors_of_others(adapters, batch, positions):
    """`Factored` with right factors, and with those that the page works out for kfac-pytorch."""

    def factors(layer, inputs, g):
        a, T = inputs[:, None], 1
        if isinstance(layer, torch.nn.Conv2d):
            a = torch.nn.functional.unfold(inputs, layer.kernel_size, stride=layer.stride).mT
            g, T = g.flatten(2).mT, a.shape[1]
        else:
            g = g[:, None]
        if layer.bias is not None:
            a = torch.cat([a, torch.ones_like(a[..., :1])], 2)
        A = torch.einsum("bti,btj->ij", a, a) / (len(a) * T)
        S = torch.einsum("bti,btj->ij", g, g) * len(a)
        return A, S * float(len(a)) ** batch * float(T) ** positions

    report = audit(lambda model: adapters["Factored"](model, factors), steps=1)
    if not batch:
        assert report.passed, str(report)
        return
    failed = {c.name: c.data["power"] for c in report.checks if c.passed is False}
    assert failed == {
        "Linear: batch size B": -2,
        "Conv2d: batch size B": -2,
        "Conv2d: positions T": -5,
    }
