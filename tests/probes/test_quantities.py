"""Every probe against plain loops on nets of under 200 weights."""

import math

import pytest
import torch
from oracle import probes as oracle
from oracle.plain_kfac import KFAC
from oracle.tiny_nets import NAMES, tiny_net
from refusals import refuses
from torch import nn

from decaylab import probes
from decaylab.errors import Lacks

CLOSE = {"rel": 1e-8, "abs": 1e-12}


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", NAMES)
class TestAgainstLoops:
    def test_jacobian_norm(self, name, batch_norm):
        model, inputs, _ = tiny_net(name)
        J = oracle.input_jacobian(oracle.in_mode(model, batch_norm), inputs)
        got = probes.jacobian_norm(model, inputs, chunk=2, batch_norm=batch_norm)
        assert got.total == pytest.approx(float(J.square().sum()) / len(inputs), **CLOSE)
        assert got.total_error is None

    def test_gauss_newton_and_fisher_rao_norms(self, name, batch_norm):
        model, inputs, _ = tiny_net(name)
        oracle.in_mode(model, batch_norm)
        theta = oracle.flat(model)
        for curvature, probe in (
            ("gauss-newton", probes.gauss_newton_norm),
            ("fisher", probes.fisher_rao_norm),
        ):
            C = oracle.curvature_matrix(model, inputs, curvature)
            got = probe(model, inputs, chunk=2, batch_norm=batch_norm)
            assert got.total == pytest.approx(float(theta @ C @ theta), **CLOSE)
            for layer, own in oracle.layers(model).items():
                want = theta[own] @ C[own][:, own] @ theta[own]
                assert got.layers[layer] == pytest.approx(float(want), **CLOSE)

    def test_traces(self, name, batch_norm):
        model, inputs, _ = tiny_net(name)
        oracle.in_mode(model, batch_norm)
        for curvature in ("fisher", "gauss-newton"):
            C = oracle.curvature_matrix(model, inputs, curvature)
            got = probes.curvature_traces(model, inputs, curvature=curvature, batch_norm=batch_norm)
            assert got.total == pytest.approx(float(C.trace()), **CLOSE)
            for layer, own in oracle.layers(model).items():
                assert got.layers[layer] == pytest.approx(float(C[own][:, own].trace()), **CLOSE)


def test_normalised_trace_is_the_trace_of_the_normalised_weights():
    """Eq. 13, with BN's eps zero: rescale the layer to norm one and measure again, by loops."""
    model, inputs, _ = tiny_net("bn")
    got = probes.curvature_traces(model, inputs, curvature="fisher", batch_norm="train")
    place = oracle.places(model)["0.weight"]
    with torch.no_grad():
        model[0].weight /= model[0].weight.norm()
    C = oracle.curvature_matrix(oracle.in_mode(model, "train"), inputs, "fisher")
    assert got.normalised["0"] == pytest.approx(float(C[place, place].trace()), **CLOSE)


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", ["conv", "bn"])
def test_hutchinson_is_within_four_standard_errors(name, batch_norm):
    model, inputs, _ = tiny_net(name)
    exact = probes.jacobian_norm(model, inputs, batch_norm=batch_norm).total
    got = probes.jacobian_norm(model, inputs, samples=200, chunk=2, batch_norm=batch_norm)
    assert abs(got.total - exact) < 4 * got.total_error
    assert got.total_error < 0.1 * exact


def test_sampled_traces_are_within_four_standard_errors():
    model, inputs, _ = tiny_net("residual")
    for curvature in ("fisher", "gauss-newton"):
        exact = probes.curvature_traces(model, inputs, curvature=curvature)
        got = probes.curvature_traces(model, inputs, curvature=curvature, samples=300, chunk=2)
        assert abs(got.total - exact.total) < 4 * got.total_error
        for layer, want in exact.layers.items():
            assert abs(got.layers[layer] - want) < 4 * got.errors[layer]
        for layer, want in exact.normalised.items():
            assert abs(got.normalised[layer] - want) < 4 * got.normalised_errors[layer]


class Sequences(nn.Module):
    """Attention over [B, T, d] with logits for every position, and a tied input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(3, 1, batch_first=True)
        self.head = nn.Linear(3, 3)
        self.same = nn.Linear(3, 3, bias=False)
        self.same.weight = self.head.weight

    def forward(self, x):
        x = self.same(x)
        return self.head(x + self.mix(x, x, x, need_weights=False)[0])


def weight_normalised() -> nn.Module:
    inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    return nn.Sequential(inner, nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))


@pytest.mark.parametrize(("make", "shape"), [(Sequences, (3, 4, 3)), (weight_normalised, (6, 4))])
def test_sequences_tied_and_parametrised_weights(make, shape):
    torch.manual_seed(0)
    model = make().double().eval()
    inputs = torch.randn(shape, dtype=torch.float64)
    theta = oracle.flat(model)
    for curvature, probe in (
        ("gauss-newton", probes.gauss_newton_norm),
        ("fisher", probes.fisher_rao_norm),
    ):
        C = oracle.curvature_matrix(model, inputs, curvature)
        got = probe(model, inputs, chunk=2)
        assert got.total == pytest.approx(float(theta @ C @ theta), **CLOSE)
        traces = probes.curvature_traces(model, inputs, curvature=curvature)
        assert traces.total == pytest.approx(float(C.trace()), **CLOSE)
        assert traces.total == pytest.approx(sum(traces.layers.values()), **CLOSE)
    squares = []
    for row in inputs:
        J = torch.autograd.functional.jacobian(lambda x: model(x[None])[0], row)
        squares.append(float(J.square().sum()))
    got = probes.jacobian_norm(model, inputs, chunk=2)
    assert got.total == pytest.approx(sum(squares) / len(inputs), **CLOSE)
    assert probes.jacobian_norms(model, inputs, chunk=2).tolist() == pytest.approx(squares, **CLOSE)
    if make is weight_normalised:
        assert set(probes.gauss_newton_norm(model, inputs).layers) == {"0", "1", "3"}


def test_examples_that_share_statistics_have_no_jacobian_of_their_own():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with refuses(Lacks, owner="an example", what="Jacobian of its own"):
        probes.jacobian_norms(model, torch.randn(5, 4))


def test_one_hundred_classes():
    torch.manual_seed(0)
    model = nn.Linear(7, 100).double()
    inputs = torch.randn(3, 7, dtype=torch.float64)
    got = probes.jacobian_norm(model, inputs)
    assert got.total == pytest.approx(float(model.weight.detach().square().sum()), rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv", "residual"])
def test_kfac_norm_and_traces_equal_the_written_out_block(name):
    model, inputs, _ = tiny_net(name)
    factors = probes.measured_factors(model, [inputs])
    norm, traces = probes.kfac_norm(model, factors), probes.kfac_traces(model, factors)
    total = 0.0
    for layer, of in factors.items():
        module = model.get_submodule(layer)
        weight = module.weight.detach().flatten(1)
        if module.bias is not None:
            weight = torch.cat([weight, module.bias.detach()[:, None]], 1)
        block = of.T * torch.kron(of.S, of.A)  # rows of [weight, bias] one after the other
        theta = weight.flatten()
        want = float(theta @ block @ theta)
        assert norm.layers[layer] == pytest.approx(want, **CLOSE)
        assert traces.layers[layer] == pytest.approx(float(block.trace()), **CLOSE)
        total += want
    assert norm.total == pytest.approx(total, **CLOSE)


def test_kfac_norm_of_a_linear_layer_is_its_exact_gauss_newton_norm():
    """One linear layer: K-FAC's block is the whole matrix (Lemma 2 at depth 0, with a bias)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs = torch.randn(6, 4, dtype=torch.float64)
    got = probes.kfac_gauss_newton_norm(model, [(inputs, torch.zeros(6))])
    assert got.total == pytest.approx(float(model(inputs).detach().square().sum(1).mean()), **CLOSE)
    exact = probes.gauss_newton_norm(model, inputs)
    assert got.total == pytest.approx(exact.total, **CLOSE)


def test_grouped_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 2)).double()
    inputs = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    factors = probes.measured_factors(model, [inputs])
    norm, traces = probes.kfac_norm(model, factors), probes.kfac_traces(model, factors)
    damped = probes.effective_damping(model, factors, 0.1)
    of, conv = factors["0"], model[0]
    want_norm, want_trace, shares = 0.0, 0.0, []
    for group in range(2):
        own = slice(2 * group, 2 * group + 2)
        weight = conv.weight[own].detach().flatten(1)
        joined = torch.cat([weight, conv.bias[own].detach()[:, None]], 1).flatten()
        block = of.T * torch.kron(of.S[group], of.A[group])
        want_norm += float(joined @ block @ joined)
        want_trace += float(block.trace())
        alone = of.T * torch.kron(of.S[group], of.A[group][:-1, :-1])
        shares.append(torch.linalg.eigvalsh(alone))
    values = torch.cat(shares)
    assert norm.layers["0"] == pytest.approx(want_norm, **CLOSE)
    assert traces.layers["0"] == pytest.approx(want_trace, **CLOSE)
    share = float((values / (values + 0.1)).mean())
    assert damped.layers["0"] == pytest.approx(share, **CLOSE)


def test_sampled_kfac_norm_is_within_four_standard_errors():
    model, inputs, _ = tiny_net("conv")
    exact = probes.kfac_gauss_newton_norm(model, [inputs])
    got = probes.kfac_gauss_newton_norm(model, [inputs], outputs="sampled", draws=100)
    assert abs(got.total - exact.total) < 4 * got.total_error
    for layer, want in exact.layers.items():
        assert abs(got.layers[layer] - want) < 4 * got.errors[layer]


def test_effective_damping_equals_the_written_out_one():
    model, inputs, _ = tiny_net("bn")
    factors = probes.measured_factors(model, [inputs], curvature="fisher")
    damping = 0.02
    got = probes.effective_damping(model, factors, damping)
    of, weight = factors["0"], model[0].weight.detach()
    square = float(weight.square().sum())
    A = of.A[:-1, :-1]
    C_normalised = square * of.T * torch.kron(of.S, A)
    values = torch.linalg.eigvalsh(C_normalised)
    layer = got.details["0"]
    assert layer.effective == pytest.approx(damping * square, **CLOSE)
    assert layer.norm == pytest.approx(math.sqrt(square), **CLOSE)
    want = float((values / (values + damping * square)).mean())
    assert layer.share == got.layers["0"] == pytest.approx(want, **CLOSE)

    # what is really inverted (recipe line 7), in the directions of the undamped block
    r = math.sqrt(damping / float(of.T))
    pi = math.sqrt(float(of.A.trace() / len(of.A)) / float(of.S.trace() / len(of.S)))
    eye_A, eye_S = torch.eye(len(A)).double(), torch.eye(len(of.S)).double()
    used = square * of.T * torch.kron(of.S + r / pi * eye_S, A + pi * r * eye_A)
    want = float((used - C_normalised).diagonal().mean())
    assert layer.factored == pytest.approx(want, **CLOSE)
    share = float((C_normalised @ torch.linalg.inv(used)).trace() / len(used))
    assert layer.factored_share == pytest.approx(share, **CLOSE)
    assert layer.factored > layer.effective
    assert layer.factored_share < layer.share


def test_the_spectrum_is_that_of_the_written_out_block():
    model, inputs, _ = tiny_net("conv")
    factors = probes.measured_factors(model, [inputs])
    for layer, of in factors.items():
        module = model.get_submodule(layer)
        A = of.A if module.bias is None else of.A[:-1, :-1]
        want = torch.linalg.eigvalsh(of.T * torch.kron(of.S, A))
        got = probes.spectrum(of).sort().values
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-12)


def test_a_side_treated_as_diagonal():
    model, inputs, labels = tiny_net("mlp")
    kfac = KFAC(model, lr=0.1, max_factor_dim=5)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    kfac.step()
    of = kfac.factors()["0"]  # in 4 + 1, out 6: S is a vector
    assert (of.A.shape, of.S.shape) == ((5, 5), (6,))
    block = of.T * torch.kron(torch.diag(of.S), of.A)
    weight = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().flatten()
    norm = probes.kfac_norm(model, kfac.factors()).layers["0"]
    assert norm == pytest.approx(float(weight @ block @ weight), **CLOSE)
    trace = probes.kfac_traces(model, kfac.factors()).layers["0"]
    assert trace == pytest.approx(float(block.trace()), **CLOSE)
    values = torch.linalg.eigvalsh(of.T * torch.kron(torch.diag(of.S), of.A[:-1, :-1]))
    share = probes.effective_damping(model, kfac.factors(), 0.1).layers["0"]
    assert share == pytest.approx(float((values / (values + 0.1)).mean()), **CLOSE)


def test_damping_of_an_optimizer_follows_its_scaling():
    model, inputs, labels = tiny_net("bn")
    kfac = KFAC(model, lr=0.1, damping=0.5, damping_scaling="scale-free")
    nn.functional.cross_entropy(model(inputs), labels).backward()
    kfac.step()
    with torch.no_grad():
        model[0].weight.mul_(2)
    first = float(kfac.scale_free.norms["0"])
    got = probes.effective_damping(model, kfac.factors(), kfac.dampings())
    assert got.details["0"].effective == pytest.approx(0.5 * first**2, rel=1e-12)
    assert got.details["5"].damping == 0.5
    assert set(got.rows()) >= {"second_order_share", "effective_damping/0", "factored_share/5"}


def test_damping_where_every_weight_is_frozen():
    """Fine-tuned biases have factors, but no weight whose directions could be second-order."""
    model, inputs, _ = tiny_net("mlp")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    factors = probes.measured_factors(model, [inputs])
    with refuses(Lacks, owner="the model"):
        probes.effective_damping(model, factors, 0.1)


def test_generalization_gap():
    model, inputs, labels = tiny_net("mlp")
    model.eval()
    losses = [
        float(nn.functional.cross_entropy(model(x[None]).detach(), y[None]))
        for x, y in zip(inputs, labels, strict=True)
    ]
    train = [(inputs[:2], labels[:2]), (inputs[2:3], labels[2:3])]
    got = probes.generalization_gap(model, train, [(inputs[3:], labels[3:])])
    mean, other = sum(losses[:3]) / 3, sum(losses[3:]) / 2
    assert got.total == pytest.approx(other - mean, **CLOSE)
    variance = sum((v - mean) ** 2 for v in losses[:3]) / 2 / 3
    variance += sum((v - other) ** 2 for v in losses[3:]) / 1 / 2
    assert got.total_error == pytest.approx(math.sqrt(variance), **CLOSE)
