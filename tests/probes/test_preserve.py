"""Probes leave a model exactly as it was, and say in one sentence what they cannot measure."""

import copy

import pytest
import torch
from oracle.plain_kfac import KFAC
from oracle.tiny_nets import NAMES, tiny_net
from refusals import refuses
from torch import nn

from decaylab import probes
from decaylab.curvature import products
from decaylab.curvature.preserve import as_function, bare, tied, untouched
from decaylab.errors import BadValue, Lacks, Mismatch, OutOfRange, WrongType

WITH_INPUTS = {
    "jacobian": probes.jacobian_norm,
    "jacobian sampled": lambda m, x, **k: probes.jacobian_norm(m, x, samples=2, **k),
    "gauss-newton": probes.gauss_newton_norm,
    "fisher-rao": probes.fisher_rao_norm,
    "traces": probes.curvature_traces,
    "traces sampled": lambda m, x, **k: probes.curvature_traces(m, x, samples=2, **k),
    "kfac": lambda m, x, **k: probes.kfac_gauss_newton_norm(m, [x], outputs="sampled", draws=2),
    "gap": lambda m, x, **k: probes.generalization_gap(
        m, [(x, torch.zeros(len(x)).long())], [(x, torch.zeros(len(x)).long())], **k
    ),
    "product": lambda m, x, **k: products.curvature_product(
        m, x, {n: p.detach() for n, p in m.named_parameters()}, **k
    ),
    "effective lr": lambda m, x, **k: probes.effective_learning_rate(
        m, torch.optim.SGD(m.parameters(), lr=1.0), x
    ),
}


def everything(model: nn.Module) -> dict[str, object]:
    """All that a probe might change, as values and as identities."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "modes": [m.training for m in model.modules()],
        "grads": [p.grad for p in model.parameters()],
        "grad values": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [id(b) for b in model.buffers()],
        "requires": [p.requires_grad for p in model.parameters()],
        "options": [
            (m.momentum, m.track_running_stats)
            for m in model.modules()
            if isinstance(m, nn.BatchNorm2d)
        ],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("probe", WITH_INPUTS)
def test_the_model_is_left_bit_for_bit(probe, name, batch_norm):
    model, inputs, labels = tiny_net(name)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    model[0].eval() if isinstance(model, nn.Sequential) else model.norm.eval()  # mixed modes
    before = everything(model)
    WITH_INPUTS[probe](model, inputs, batch_norm=batch_norm)
    assert same(before, everything(model))
    assert not inputs.requires_grad


def test_a_graph_that_waits_for_its_backward_stays_valid():
    model, inputs, labels = tiny_net("residual")
    other = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    for probe in WITH_INPUTS.values():
        probe(model, inputs, batch_norm="train")
    loss.backward()
    nn.functional.cross_entropy(other(inputs), labels).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_it_is_restored_when_the_model_fails():
    model, inputs, _ = tiny_net("residual")
    before = everything(model)
    with pytest.raises(RuntimeError):
        probes.jacobian_norm(model, inputs[:, :1], batch_norm="train")
    assert same(before, everything(model))


def test_works_under_no_grad_inference_mode_and_autocast():
    model, inputs, _ = tiny_net("mlp")
    want = probes.jacobian_norm(model, inputs).total
    with torch.no_grad():
        assert probes.jacobian_norm(model, inputs).total == want
    with torch.inference_mode():
        assert probes.jacobian_norm(model, inputs).total == want
    with torch.autocast("cpu", torch.bfloat16):
        assert probes.jacobian_norm(model, inputs).total == want


def test_in_single_precision_an_autocast_changes_no_number():
    model, inputs, _ = tiny_net("mlp")
    model, inputs = model.float(), inputs.float()

    def numbers():
        factors = probes.measured_factors(model, [inputs])
        readings = (
            probes.jacobian_norm(model, inputs),
            probes.gauss_newton_norm(model, inputs),
            probes.fisher_rao_norm(model, inputs),
            probes.curvature_traces(model, inputs),
            probes.curvature_traces(model, inputs, samples=3),
            probes.kfac_norm(model, factors),
            probes.kfac_traces(model, factors),
            probes.effective_damping(model, factors, 0.1),
            probes.weight_norms(model),
        )
        return [reading.rows() for reading in readings]

    want = numbers()
    with torch.autocast("cpu", torch.bfloat16):
        assert numbers() == want


def test_a_kfac_on_the_model_does_not_notice():
    def run(probing: bool) -> list[torch.Tensor]:
        model, inputs, labels = tiny_net("residual")
        kfac = KFAC(model, lr=0.1, refresh_every=1, invert_every=1)
        for _ in range(3):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if probing:
                for probe in WITH_INPUTS.values():
                    probe(model, inputs, batch_norm="train")
            kfac.step()
            kfac.zero_grad()
        return [*model.parameters(), *(f.A for f in kfac.factors().values())]

    for with_probes, without in zip(run(True), run(False), strict=True):
        assert torch.equal(with_probes, without)


def test_dropout_is_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
    got = probes.jacobian_norm(model, torch.ones(3, 4), batch_norm="train").total
    assert got == pytest.approx(float(model[1].weight.detach().square().sum()), rel=1e-6)


class Recurrent(nn.Module):
    """Notes whether cuDNN may run its layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.head, self.allowed = kind(4, 5), nn.Linear(5, 3), set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.allowed.add(torch.backends.cudnn.enabled)
        hidden = self.body(x)
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


@pytest.mark.parametrize("probe", WITH_INPUTS)
def test_recurrent_layers_do_without_cudnn(probe):
    """Its backward pass asks for train mode, and cannot be differentiated."""
    model = Recurrent(nn.LSTM)
    WITH_INPUTS[probe](model, torch.randn(2, 4))
    assert model.allowed == {False}
    assert torch.backends.cudnn.enabled
    plain = Recurrent(nn.Linear)
    WITH_INPUTS[probe](plain, torch.randn(2, 4))
    assert plain.allowed == {True}


MEASURE_WEIGHTS = [k for k in WITH_INPUTS if k not in ("jacobian", "jacobian sampled", "gap")]


@pytest.mark.parametrize("probe", WITH_INPUTS)
class TestBadInput:
    def test_empty_batch(self, probe):
        model, inputs, _ = tiny_net("mlp")
        with refuses(Lacks, owner="the batch"):
            WITH_INPUTS[probe](model, inputs[:0])

    def test_another_dtype(self, probe):
        model, inputs, _ = tiny_net("mlp")
        with refuses(Mismatch, what="dtype"):
            WITH_INPUTS[probe](model, inputs.float())

    def test_another_device(self, probe):
        model, inputs, _ = tiny_net("mlp")
        with refuses(Mismatch, what="device"):
            WITH_INPUTS[probe](model, inputs.to("meta"))


# torch builds no optimizer without parameters, and the effective lr takes any output
@pytest.mark.parametrize("probe", [name for name in WITH_INPUTS if name != "effective lr"])
class TestBadModel:
    def test_no_weights(self, probe):
        with refuses(Lacks, what="weights"):
            WITH_INPUTS[probe](nn.Sequential(nn.ReLU()), torch.ones(2, 3))

    def test_no_logits(self, probe):
        model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        with pytest.raises(BadValue):
            WITH_INPUTS[probe](model, torch.ones(2, 3))


# of a product the caller names the parameters
@pytest.mark.parametrize("probe", [name for name in MEASURE_WEIGHTS if name != "product"])
def test_a_frozen_model(probe):
    model, inputs, _ = tiny_net("mlp")
    model.requires_grad_(False)
    with refuses(Lacks, what="parameter that is not frozen"):
        WITH_INPUTS[probe](model, inputs)


def test_the_jacobian_of_a_frozen_model_is_that_of_the_model():
    model, inputs, _ = tiny_net("mlp")
    want = probes.jacobian_norm(model, inputs).total
    assert probes.jacobian_norm(model.requires_grad_(False), inputs).total == want


def test_frozen_and_empty_models_have_no_weight_norms():
    with refuses(Lacks, what="weights"):
        probes.weight_norms(nn.ReLU())
    with refuses(Lacks, what="parameter that is not frozen"):
        probes.weight_norms(nn.Linear(2, 2).requires_grad_(False))


def test_outputs_that_are_no_tensor_and_inputs_that_are_tokens():
    class Tuple(nn.Linear):
        def forward(self, x):
            return (super().forward(x), None)

    with refuses(WrongType, name="the model's output"):
        probes.jacobian_norm(Tuple(3, 2), torch.ones(2, 3))
    with refuses(BadValue, value=torch.int64):
        probes.jacobian_norm(nn.Embedding(3, 2), torch.ones(2, 3).long())
    with refuses(WrongType, name="inputs", value=[1.0]):
        probes.jacobian_norm(nn.Linear(3, 2), [1.0])
    for name, bad in (("samples", 1), ("chunk", 0)):
        with refuses(OutOfRange, name=name, value=bad):
            probes.jacobian_norm(nn.Linear(3, 2), torch.ones(2, 3), **{name: bad})


def test_what_is_not_finite_is_reported_with_the_layers_name():
    model, inputs, _ = tiny_net("conv")
    with torch.no_grad():
        model[2].weight[0] = float("nan")
    with pytest.warns(probes.NonFiniteWarning, match="weight_norm is not finite: layer '2'"):
        got = probes.weight_norms(model)
    assert got.non_finite == ("layer '2'", "the model")
    with pytest.warns(probes.NonFiniteWarning, match="jacobian_norm is not finite: the model"):
        probes.jacobian_norm(model, inputs)


def test_kfac_without_factors():
    model, _, _ = tiny_net("mlp")
    for probe in (
        lambda f: probes.kfac_norm(model, f),
        lambda f: probes.kfac_traces(model, f),
        lambda f: probes.effective_damping(model, f, 1e-3),
    ):
        for factors in ({}, KFAC(model, lr=1.0).factors()):
            with refuses(Lacks, what="factors yet"):
                probe(factors)


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_what_is_done_to_the_model_inside_is_undone(batch_norm):
    """Whatever a model's own code does in a forward pass: gradients, modes, random numbers."""
    model, inputs, labels = tiny_net("residual")
    model.register_buffer("calls", torch.zeros(()))
    model.register_buffer("last", torch.zeros(2))
    model.register_buffer("nothing", None)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    before = everything(model)
    with untouched(model, batch_norm=batch_norm) as inside:
        nn.functional.cross_entropy(inside(inputs), labels).backward()
        inside.calls += 1
        inside.last = inside.nothing = torch.ones(2)
        torch.rand(1)
        inside.train()
        inside(inputs)
        inside.zero_grad()
    assert same(before, everything(model))
    assert model.nothing is None


def test_running_statistics_that_a_model_updates_in_eval_mode_too():
    """Torch's kernel writes to them without raising their version."""

    class AlwaysTraining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("variance", torch.ones(2))

        def forward(self, x):
            z = self.layer(x)
            return nn.functional.batch_norm(z, self.mean, self.variance, training=True)

    model, x = AlwaysTraining(), torch.randn(6, 3)
    probes.gauss_newton_norm(model, x)
    assert torch.equal(model.mean, torch.zeros(2))
    assert torch.equal(model.variance, torch.ones(2))


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_inside_autocast_is_off_grad_is_on_and_attention_is_plain(outside):
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    want = model(x)
    with torch.autocast("cpu", torch.bfloat16), outside(), untouched(model) as inside:
        found = inside(x)
        kernels = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]
    assert found.dtype == torch.float32
    assert torch.equal(found, want)
    assert found.requires_grad
    assert not found.is_inference()
    assert kernels == [False, True]
    assert torch.backends.cuda.flash_sdp_enabled()


def test_parameters_that_are_not_named_are_constants():
    """Of a function of some parameters, the others have no graph."""
    model = nn.Linear(3, 2)
    x = torch.ones(4, 3)
    function = as_function(model, x)
    assert not function({}).requires_grad
    bias = torch.ones(2, requires_grad=True)
    logits = function({"bias": bias})
    torch.testing.assert_close(logits, x @ model.weight.detach().mT + 1)
    assert torch.autograd.grad(logits.sum(), model.weight, allow_unused=True) == (None,)


class WithoutRanks(nn.parallel.DistributedDataParallel):
    """One that needs no process group."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("wrap", [nn.DataParallel, WithoutRanks])
def test_bare_is_the_module_behind_every_wrapper(wrap):
    model = nn.Linear(2, 2)
    assert bare(model) is model
    assert bare(wrap(model)) is model
    assert bare(torch.compile(wrap(model), backend="eager")) is model
    assert bare(wrap(torch.compile(model, backend="eager"))) is model


def test_examples_are_tied_where_the_batch_normalises_them():
    plain, own = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    assert [tied(nn.Sequential(norm), "eval") for norm in (plain, own)] == [False, True]
    assert [tied(nn.Sequential(norm), "train") for norm in (plain, own)] == [True, True]
    assert not tied(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "train")


def test_chunks_do_not_change_a_net_whose_batch_norm_has_no_running_statistics():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)
    whole = probes.jacobian_norm(model, inputs).total
    assert probes.jacobian_norm(model, inputs, chunk=2).total == whole


def test_every_normalisation_uses_the_batch_where_it_is_told_to():
    """As in train mode, but no running statistics change, and all keep track of them again."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2)
    ).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    wanted = copy.deepcopy(model).train()(x)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    with untouched(model, batch_norm="train") as inside:
        torch.testing.assert_close(inside(x), wanted, rtol=1e-12, atol=1e-12)
    assert same(before, model.state_dict())
    assert model[1].track_running_stats
    assert model[4].track_running_stats


@pytest.mark.parametrize("outputs", [3, probes.jacobian.SAMPLES + 1])
def test_no_pass_of_the_jacobian_probe_has_more_than_a_chunk_of_the_inputs(outputs):
    """Neither that which counts the outputs, nor those that measure, exactly or from samples."""
    model, sizes = nn.Linear(4, outputs), []
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(300, 4)
    chosen = {"every": 1, "probes": ["jacobian_norm"], "inputs": inputs}
    with probes.watch(model, optimizer, **chosen) as watched:
        model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert sizes == [128, 128, 128, 44]  # the first is counted on
    assert watched.records.last("jacobian_norm") > 0
