"""Squares of 16-bit numbers leave their range: probes of such models take them in double."""

import pytest
import torch
from torch import nn

from decaylab import probes


def pair(dtype, scale):
    """A linear classifier in 16 bits, the same numbers in double, and inputs for both."""
    torch.manual_seed(0)
    narrow = nn.Linear(20, 5, bias=False)
    with torch.no_grad():
        narrow.weight.mul_(scale)
    narrow = narrow.to(dtype)
    wide = nn.Linear(20, 5, bias=False).double().requires_grad_(False)
    with torch.no_grad():
        wide.weight.copy_(narrow.weight)
    inputs = torch.randn(6, 20).to(dtype)
    return narrow, wide, inputs


# in float16 the squares of the first are zero, those of the last infinite
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float16, 1e-3), (torch.float16, 1e4), (torch.bfloat16, 1.0)],
)
class TestAsInDouble:
    def test_gauss_newton_norm(self, dtype, scale):
        narrow, wide, inputs = pair(dtype, scale)
        got = probes.gauss_newton_norm(narrow, inputs).total
        want = wide(inputs.double()).square().sum(1).mean()  # J theta = f for a linear net
        assert got == pytest.approx(float(want), rel=5e-3)

    def test_jacobian_norm(self, dtype, scale):
        narrow, wide, inputs = pair(dtype, scale)
        got = probes.jacobian_norm(narrow, inputs).total
        assert got == pytest.approx(float(wide.weight.square().sum()), rel=1e-10)

    def test_normalised_traces(self, dtype, scale):
        narrow, wide, inputs = pair(dtype, scale)
        factors = probes.measured_factors(narrow, [inputs])
        trace = 5 * inputs.double().square().sum(1).mean()  # an identity for each class
        want = float(trace * wide.weight.square().sum())
        got = probes.kfac_traces(narrow, factors).normalised[""]
        assert got == pytest.approx(want, rel=0.01)
        exact = probes.curvature_traces(narrow, inputs[:1], curvature="gauss-newton")
        assert exact.normalised[""] / exact.total == pytest.approx(
            float(wide.weight.square().sum()), rel=1e-3
        )


def test_fisher_rao_norm_where_the_classes_nearly_cancel():
    """Var_p(z) with z far from zero: of products of 8 bits next to nothing is left."""
    torch.manual_seed(0)
    narrow = nn.Linear(3, 4, bias=False).bfloat16()
    inputs = torch.eye(3).bfloat16()
    with torch.no_grad():
        narrow.weight.copy_(100 + torch.randn(4, 3))
    z = narrow.weight.detach().double().T
    p = z.softmax(1)
    want = ((p * z.square()).sum(1) - (p * z).sum(1).square()).mean()
    got = probes.fisher_rao_norm(narrow, inputs).total
    assert got == pytest.approx(float(want), rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_movement_is_that_of_the_rounded_weights(dtype):
    """A step that halves a large weight and turns it: products beyond the range of float16."""
    torch.manual_seed(0)
    model = nn.Linear(200, 200, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(3 + torch.randn(200, 200))
        before, old = probes.snapshot(model), model.weight.double()
        model.weight.mul_(0.5).add_(torch.randn(200, 200).to(dtype))
        new = model.weight.double()
    moved = probes.update_norms(model, before).layers[""]
    assert moved == pytest.approx(float((new - old).norm()), rel=1e-5)
    cosine = (old * new).sum() / old.norm() / new.norm()
    angle = probes.rotations(model, before).layers[""]
    assert angle == pytest.approx(float(cosine.acos()), rel=1e-5)
