"""Exact products and traces against matrices written out by plain loops."""

import pytest
import torch
from oracle import probes as oracle
from oracle.tiny_nets import CLASSES, NAMES, tiny_net
from refusals import refuses
from torch import nn

from decaylab.curvature import products
from decaylab.errors import BadValue, DecaylabError, Lacks, Mismatch, OutOfRange, UnknownName

KINDS = [
    ("gauss-newton", "categorical"),
    ("fisher", "categorical"),
    ("fisher", "bernoulli"),
    ("fisher", "gaussian"),
    ("empirical-fisher", "categorical"),
    ("empirical-fisher", "bernoulli"),
    ("empirical-fisher", "gaussian"),
]


def targets_for(likelihood: str, labels: torch.Tensor) -> torch.Tensor:
    if likelihood == "categorical":
        return labels
    return nn.functional.one_hot(labels, CLASSES).double()


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("curvature", "likelihood"), KINDS)
def test_product_and_traces_equal_the_matrix(name, batch_norm, curvature, likelihood):
    model, inputs, labels = tiny_net(name)
    kind = {"curvature": curvature, "likelihood": likelihood}
    kind["targets"] = targets_for(likelihood, labels)
    oracle.in_mode(model, batch_norm)
    C = oracle.curvature_matrix(model, inputs, **kind)
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    flat = torch.cat([v.flatten() for v in vector.values()])

    product = products.curvature_product(model, inputs, vector, batch_norm=batch_norm, **kind)
    traces = products.exact_traces(model, inputs, batch_norm=batch_norm, **kind)

    got = torch.cat([product[n].flatten() for n in vector])
    torch.testing.assert_close(got, C @ flat, rtol=1e-10, atol=1e-10)
    for n, place in oracle.places(model).items():
        want = C[place, place].trace()
        torch.testing.assert_close(traces[n], want, rtol=1e-10, atol=1e-10)


def no_forward_mode(*arguments):
    raise NotImplementedError


@pytest.mark.parametrize("forward_mode", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_jacobian_product_equals_the_jacobian(name, forward_mode, monkeypatch):
    if not forward_mode:  # as for operations without a rule for it
        monkeypatch.setattr(products, "jvp", no_forward_mode)
    model, inputs, _ = tiny_net(name)
    J = oracle.parameter_jacobian(model.eval(), inputs)
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    flat = torch.cat([v.flatten() for v in vector.values()])
    logits, tangent = products.jacobian_product(model, inputs, vector)
    torch.testing.assert_close(logits, model(inputs).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tangent, J @ flat, rtol=1e-10, atol=1e-10)


class _Square(torch.autograd.Function):
    """As functions were written before `setup_context`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class _CutSquare(_Square):
    """Its backward hides from autograd, as kernels of others do."""

    @staticmethod
    def backward(ctx, gradient):
        return _Square.backward(ctx, gradient.detach())


class _OnceSquare(_Square):
    """Its backward says so."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return _Square.backward(ctx, gradient)


class _RuledSquare(torch.autograd.Function):
    """As the refusal of the two above says to write it."""

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent


class _Squared(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def squared(function) -> nn.Module:
    torch.manual_seed(0)
    return _Squared(function).double()


@pytest.mark.parametrize("curvature", ["gauss-newton", "fisher"])
@pytest.mark.parametrize("function", [_Square, _RuledSquare])
def test_products_through_functions_of_others(function, curvature):
    """torch.func refuses those of the old style."""
    inputs = torch.randn(6, 4).double()
    model, plain = squared(function.apply), squared(torch.square)
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for one, other in zip(
        products.jacobian_product(model, inputs, vector),
        products.jacobian_product(plain, inputs, vector),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    found = products.curvature_product(model, inputs, vector, curvature=curvature)
    wanted = products.curvature_product(plain, inputs, vector, curvature=curvature)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [_CutSquare, _OnceSquare])
def test_functions_whose_backward_hides_from_autograd_are_refused(function):
    """Their part of J v would be missing without a word."""
    model, inputs = squared(function.apply), torch.randn(6, 4).double()
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    with refuses(Lacks, owner="an operation of the model"):
        products.jacobian_product(model, inputs, vector)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_that_hides_is_seen_among_many_parameters_and_rounding(dtype):
    """In most draws of u, and one that does not hide in none."""
    refused = {}
    for function in (_CutSquare, _Square):
        model, inputs = _Squared(function.apply), torch.randn(6, 400, dtype=dtype)
        model.first = nn.Linear(400, 5)
        vector = {"first.weight": torch.randn_like(model.to(dtype).first.weight)}
        refused[function] = 0
        for seed in range(20):
            torch.manual_seed(seed)
            try:
                products.jacobian_product(model, inputs, vector)
            except DecaylabError:
                refused[function] += 1
    assert refused[_CutSquare] > 14
    assert refused[_Square] == 0


def test_an_autocast_of_the_models_own_is_not_taken_for_something_that_hides(monkeypatch):
    """As accelerate gives one to a model."""
    monkeypatch.setattr(products, "jvp", no_forward_mode)
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())]
    model, inputs = nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(16, 64)
    vector = {"0.bias": torch.randn(64)}
    exact = products.jacobian_product(model, inputs, vector)[1]
    rounded = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model.forward = lambda x: rounded(x).float()
    for seed in range(20):
        torch.manual_seed(seed)
        tangent = products.jacobian_product(model, inputs, vector)[1]
        assert (tangent - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_that_is_zero_but_for_rounding_is_not_refused(dtype, monkeypatch):
    """Batch statistics take a bias in front of BN away."""
    monkeypatch.setattr(products, "jvp", no_forward_mode)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    inputs, vector = torch.randn(16, 4, dtype=dtype), {"0.bias": torch.randn(8, dtype=dtype)}
    tangent = products.jacobian_product(model, inputs, vector, batch_norm="train")[1]
    assert tangent.abs().max() < 100 * torch.finfo(dtype).eps


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError


class _FullSquare(_Square):
    """Finds no memory when its backward pass is differentiated."""

    @staticmethod
    def backward(ctx, gradient):
        return _Full.apply(_Square.backward(ctx, gradient))


def test_a_device_without_memory_is_not_taken_for_an_operation_without_a_rule():
    calls = []

    def full(x):
        calls.append(x)
        raise torch.OutOfMemoryError

    inputs = torch.randn(6, 4).double()
    for function in (full, _FullSquare.apply):
        model = squared(function)
        vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        with pytest.raises(torch.OutOfMemoryError):
            products.jacobian_product(model, inputs, vector)
    assert len(calls) == 1  # not tried in a way that needs more


def with_a_spare_layer() -> nn.Module:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)}).double()
    model.forward = lambda x: model["used"](x)
    return model


def test_traces_of_what_the_logits_ignore_are_zero_and_need_no_grad_mode():
    model, inputs = with_a_spare_layer(), torch.ones(4, 3).double()
    with torch.no_grad():
        traces = products.exact_traces(model, inputs)
        draws = products.sampled_traces(
            model, inputs, samples=2, generator=torch.Generator().manual_seed(0)
        )
    found = {name: float(trace) for name, trace in traces.items()}
    want = {"used.weight": 6.0, "used.bias": 2.0, "spare.weight": 0.0, "spare.bias": 0.0}
    assert found == pytest.approx(want, rel=1e-12)
    assert not draws["spare.weight"].any()
    assert draws["used.weight"].all()


def test_a_direction_that_does_not_reach_the_logits_does_not_move_them(monkeypatch):
    model = with_a_spare_layer()
    monkeypatch.setattr(products, "jvp", no_forward_mode)
    direction = {"spare.weight": torch.ones(2, 3).double(), "used.bias": torch.ones(2).double()}
    tangent = products.jacobian_product(model, torch.ones(4, 3).double(), direction)[1]
    assert torch.equal(tangent, torch.ones(4, 2).double())


@pytest.mark.parametrize("forward_mode", [True, False])
def test_products_of_what_the_logits_ignore_are_zero(forward_mode, monkeypatch):
    if not forward_mode:
        monkeypatch.setattr(products, "jvp", no_forward_mode)
    model, inputs = with_a_spare_layer(), torch.ones(4, 3).double()
    direction = {"spare.weight": torch.ones(2, 3).double()}
    assert not products.jacobian_product(model, inputs, direction)[1].any()
    assert not products.curvature_product(model, inputs, direction)["spare.weight"].any()


def test_a_part_of_the_parameters_gives_its_own_block():
    model, inputs, _ = tiny_net("conv")
    C = oracle.curvature_matrix(model.eval(), inputs, "fisher")
    place = oracle.places(model)["2.weight"]
    direction = torch.randn_like(model[2].weight)
    product = products.curvature_product(model, inputs, {"2.weight": direction}, curvature="fisher")
    want = C[place, place] @ direction.flatten()
    torch.testing.assert_close(product["2.weight"].flatten(), want, rtol=1e-10, atol=1e-12)
    assert set(product) == {"2.weight"}


def test_rows_of_a_sequence_are_averaged():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    inputs = torch.randn(4, 5, 3, dtype=torch.float64)
    traces = products.exact_traces(model, inputs)
    # J_r of a linear layer is x_r (x) I, and 1 (x) I for the bias: two classes
    want = 2 * inputs.square().sum(-1).mean()
    torch.testing.assert_close(traces["weight"], want.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(traces["bias"], torch.tensor(2.0).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_sampled_traces_are_unbiased(curvature, batch_norm):
    model, inputs, _ = tiny_net("bn")
    kind = {"curvature": curvature, "batch_norm": batch_norm}
    exact = products.exact_traces(model, inputs, **kind)
    generator = torch.Generator().manual_seed(1)
    draws = products.sampled_traces(model, inputs, samples=800, generator=generator, **kind)
    for name, want in exact.items():
        if want > 1e-20:  # the bias in front of BN has none
            error = draws[name].std() / 800**0.5
            assert abs(draws[name].mean() - want) < 4 * error


class Labels(nn.Linear):
    """Returns labels instead of logits."""

    def __init__(self) -> None:
        super().__init__(1, 1, dtype=torch.float64)

    def forward(self, x):
        return (x > 0).long()


def test_bad_input_gets_one_sentence():
    model, inputs, _ = tiny_net("mlp")
    direction = {"0.weight": torch.zeros_like(model[0].weight)}
    with refuses(UnknownName, kind="parameter", name="nope"):
        products.curvature_product(model, inputs, {"nope": inputs})
    with refuses(Mismatch, what="shape"):
        products.curvature_product(model, inputs, {"0.weight": inputs})
    with refuses(Lacks, owner="the direction"):
        products.curvature_product(model, inputs, {})
    with refuses(Lacks, what="targets"):
        products.curvature_product(model, inputs, direction, curvature="empirical-fisher")
    with refuses(Mismatch, what="shape"):
        products.curvature_product(
            model, inputs, direction, curvature="empirical-fisher", targets=torch.zeros(2)
        )
    with refuses(UnknownName, name="hessian"):
        products.curvature_product(model, inputs, direction, curvature="hessian")
    with refuses(UnknownName, name="frozen"):
        products.curvature_product(model, inputs, direction, batch_norm="frozen")
    with refuses(BadValue, name="the model's output"):
        products.exact_traces(Labels(), inputs)
    with refuses(OutOfRange, name="samples", value=1):
        products.sampled_traces(model, inputs, samples=1, generator=torch.Generator())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_traces_of_16_bit_models_are_added_up_in_double(dtype):
    """Inputs that 16 bits hold exactly: tr G = C E|x|^2 for a linear layer of C classes."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(20, 10, bias=False).to(dtype), 30 * torch.randn(64, 20).to(dtype)
    expected = 10 * float(inputs.double().square().sum(1).mean())
    found = products.exact_traces(layer, inputs)["weight"]
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_hooks_on_parameters_are_no_part_of_the_curvature():
    """Clips and masks act on the training's gradients alone."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3).double(), torch.randn(5, 4).double()

    def traces():
        generator = torch.Generator().manual_seed(0)
        return (
            products.exact_traces(model, inputs),
            products.sampled_traces(model, inputs, samples=3, generator=generator),
        )

    expected = traces()
    model.weight.register_hook(lambda gradient: 0.1 * gradient)
    for found, wanted in zip(traces(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
