"""What is read off Kronecker factors: grouped and diagonal sides, normalised traces, spectra."""

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab import probes
from decaylab.errors import Damaged
from decaylab.probes.kronecker import eigenvalues

CLOSE = {"rel": 1e-9}


def square(side: torch.Tensor) -> torch.Tensor:
    return side.diag() if side.dim() == 1 else side


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("groups", [2, 4])
def test_groups_whose_sides_are_diagonal_or_not(groups, limit):
    """Every group's block written out; a limit of 1 makes both sides diagonal, 2 the input's.

    With four groups the convolution is depthwise: more groups than inputs of one.
    """
    torch.manual_seed(0)
    out = 2 * groups
    conv = nn.Conv1d(4, out, 2, groups=groups)
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(2 * out, 2)).double()
    x, y = torch.randn(5, 4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    kfac = KFAC(model, 0.0, max_factor_dim=limit, outputs="exact")
    nn.functional.cross_entropy(model(x), y).backward()
    kfac.step()
    factors = kfac.factors()
    of = factors["0"]
    assert (of.A.dim(), of.S.dim()) == {1: (2, 2), 2: (2, 3), 100: (3, 3)}[limit]
    norm, trace, own_trace, values = 0.0, 0.0, 0.0, []
    for group in range(groups):
        here = slice(2 * group, 2 * group + 2)
        weight = conv.weight[here].detach().flatten(1)
        joined = torch.cat([weight, conv.bias[here].detach()[:, None]], 1).flatten()
        A, S = square(of.A[group]), square(of.S[group])
        block, own = of.T * torch.kron(S, A), of.T * torch.kron(S, A[:-1, :-1])
        norm += float(joined @ block @ joined)
        trace += float(block.trace())
        own_trace += float(own.trace())
        values.append(torch.linalg.eigvalsh(own))
    spectrum = torch.cat(values).sort().values
    assert probes.kfac_norm(model, factors).layers["0"] == pytest.approx(norm, **CLOSE)
    traces = probes.kfac_traces(model, factors)
    assert traces.layers["0"] == pytest.approx(trace, **CLOSE)
    weights = float(conv.weight.detach().square().sum())
    assert traces.normalised["0"] == pytest.approx(weights * own_trace, **CLOSE)
    got = probes.spectrum(of).sort().values
    torch.testing.assert_close(got, spectrum, rtol=1e-9, atol=1e-12)
    share = probes.effective_damping(model, factors, 0.1).layers["0"]
    assert share == pytest.approx(float((spectrum / (spectrum + 0.1)).mean()), **CLOSE)


def regression() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.randn(6, 3, dtype=torch.float64)


def test_normalised_traces_of_a_net_with_one_output():
    model, x = regression()
    factors = probes.measured_factors(model, [x])
    got = probes.kfac_traces(model, factors)
    for layer, of in factors.items():
        weight = float(model.get_submodule(layer).weight.detach().square().sum())
        own = float(of.T * of.A[:-1, :-1].trace() * of.S.trace())
        assert got.layers[layer] == pytest.approx(float(of.T * of.A.trace() * of.S.trace()))
        assert got.normalised[layer] == pytest.approx(weight * own, **CLOSE)
    assert got.total == pytest.approx(sum(got.layers.values()), **CLOSE)


def test_a_layer_whose_weight_is_frozen_has_a_trace_but_no_directions():
    model, x = regression()
    model[0].weight.requires_grad_(False)
    factors = probes.measured_factors(model, [x])
    got = probes.kfac_traces(model, factors)
    assert got.layers.keys() == {"0", "2"}
    assert got.normalised.keys() == {"2"}
    damped = probes.effective_damping(model, factors, 1)  # a whole number is a damping too
    assert damped.layers.keys() == {"2"}
    assert damped.details["2"].damping == 1.0
    assert damped.total == pytest.approx(damped.layers["2"], **CLOSE)


def test_eigenvalues_of_a_factor_are_not_negative():
    """What rounding has put below zero is zero."""
    side = torch.diag(torch.tensor([2.0, -1e-17, 0.5], dtype=torch.float64))
    assert eigenvalues(side, grouped=False).tolist() == pytest.approx([0.0, 0.5, 2.0], abs=0)
    stacked = eigenvalues(torch.stack([side, 2 * side]), grouped=True)
    assert stacked.tolist() == [[0.0, 0.5, 2.0], [0.0, 1.0, 4.0]]


def test_the_norm_of_a_layer_whose_weight_is_frozen_is_that_of_its_bias():
    model, x = regression()
    model[0].weight.requires_grad_(False)
    of = probes.measured_factors(model, [x])["0"]
    bias = model[0].bias.detach()
    assert of.A.shape == (1, 1)
    want = float(of.T * of.A[0, 0] * (bias @ of.S @ bias))
    got = probes.kfac_norm(model, {"0": of}).layers["0"]
    assert got == pytest.approx(want, **CLOSE)


def test_a_bare_tensor_is_one_batch():
    model, x = regression()
    got, want = (probes.kfac_gauss_newton_norm(model, batches) for batches in (x, [x]))
    assert got.layers == want.layers
    assert got.total == want.total
    assert (got.errors, got.total_error) == ({}, None)  # exact: one draw, and no error


def test_the_units_of_both_norms():
    model, x = regression()
    assert probes.gauss_newton_norm(model, x).unit == "logit^2"
    assert probes.fisher_rao_norm(model, x, likelihood="gaussian").unit == "nat"


class Dropping(nn.Module):
    """Drops in a module and in its own forward; `norm` uses the batch's statistics all the same."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.drop, self.last = nn.Dropout(p), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), self.p, self.training)
        return self.last(self.drop(hidden))


@pytest.mark.parametrize("mode", [True, False])
def test_dropout_is_off_in_measured_factors(mode):
    inputs = torch.randn(6, 3, dtype=torch.float64)
    models = []
    for p in (0.5, 0.0):
        torch.manual_seed(0)
        models.append(Dropping(p).double().train(mode))
    modes = [module.training for module in models[0].modules()]
    found, expected = (probes.measured_factors(model, [inputs]) for model in models)
    assert [module.training for module in models[0].modules()] == modes
    kfac = KFAC(models[1], 0.1, curvature="gauss-newton", outputs="exact")
    kfac.generator.manual_seed(0)
    kfac.initialize([inputs])  # without dropout, K-FAC's own are the same
    for name, of in kfac.factors().items():
        for own in (found[name], expected[name]):
            assert torch.equal(own.A, of.A)
            assert torch.equal(own.S, of.S)


def test_a_model_that_is_one_layer_has_its_factors_under_no_name():
    layer, inputs = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    (factors,) = probes.measured_factors(layer, [inputs]).values()
    torch.testing.assert_close(factors.A[:3, :3], inputs.T @ inputs / 6, rtol=1e-12, atol=0)
    f = layer(inputs).detach().square().sum(1).mean()
    assert probes.kfac_gauss_newton_norm(layer, inputs).layers[""] == pytest.approx(float(f))


class Overwriting(nn.Module):
    """Changes the input of `first` behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.clone()
        hidden = self.first(own)
        own += 1
        return self.last(hidden + own)


def test_errors_name_layers_as_the_model_does():
    with refuses(Damaged, what="the input of layer 'first'"):
        probes.measured_factors(Overwriting(), [torch.randn(4, 3)])
