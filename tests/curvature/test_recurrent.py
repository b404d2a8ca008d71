"""Recurrent layers: computed step by step they are torch's, and each of their maps is a block.

The naive nets are written with a Linear for each matrix, and explicit loops over examples, time
steps and gates.
"""

import copy
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracle.dense_kfac import DenseKFAC, Settings
from oracle.kfac import naive_factors, vectors_for
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import _VF, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import decaylab
from decaylab.curvature.capture import GRAPHS_REMEMBERED, _Replaced
from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.kinds.kind import Reason
from decaylab.curvature.kinds.recurrent import UNROLLED
from decaylab.errors import DecaylabError
from decaylab.optim.options import KFACOptions

INPUTS, WIDTH, CLASSES, TIMES, EXAMPLES = 3, 4, 3, 5, 4
TORCHS = {name: getattr(_VF, name) for name in UNROLLED}
LINEAR = F.linear

LAYERS = {
    "rnn": lambda **o: nn.RNN(INPUTS, WIDTH, **o),
    "relu": lambda **o: nn.RNN(INPUTS, WIDTH, nonlinearity="relu", **o),
    "lstm": lambda **o: nn.LSTM(INPUTS, WIDTH, **o),
    "gru": lambda **o: nn.GRU(INPUTS, WIDTH, **o),
    "projected": lambda **o: nn.LSTM(INPUTS, WIDTH, proj_size=2, **o),
}
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False},
    "deep": {"num_layers": 3, "dropout": 0.4},
    "both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.2},
}
CELLS = {
    "rnn": lambda **o: nn.RNNCell(INPUTS, WIDTH, **o),
    "relu": lambda **o: nn.RNNCell(INPUTS, WIDTH, nonlinearity="relu", **o),
    "lstm": lambda **o: nn.LSTMCell(INPUTS, WIDTH, **o),
    "gru": lambda **o: nn.GRUCell(INPUTS, WIDTH, **o),
}
# oneDNN, which torch uses for an LSTM on a CPU, says so
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


# -- step by step, it is torch's own --


def tensors(value) -> list[torch.Tensor]:
    """All numbers in what a recurrent layer returns."""
    if isinstance(value, PackedSequence):
        value = value.data
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in tensors(v)]


def outputs_and_gradients(module, given) -> list[torch.Tensor]:
    """Of one call, after the same random numbers."""
    torch.manual_seed(3)
    outputs = tensors(module(*given))
    total = sum((o * random(*o.shape, seed=i)).sum() for i, o in enumerate(outputs))
    leaves = [t for t in tensors(given) if t.requires_grad]
    return outputs + list(torch.autograd.grad(total, [*leaves, *module.parameters()]))


def assert_the_same_unrolled(module, *given) -> None:
    expected = outputs_and_gradients(module, given)
    estimator = KroneckerEstimator(module, logits="observed")
    with estimator.listening():
        found = outputs_and_gradients(module, given)
    assert {call.site.weight for call in estimator.capture.calls} == {
        p for p in module.parameters() if p.dim() == 2
    }
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert {name: getattr(_VF, name) for name in UNROLLED} == TORCHS


def first_states(module, *batch: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    number = module.num_layers * (2 if module.bidirectional else 1)
    h = random(number, *batch, module.proj_size or WIDTH, seed=5).requires_grad_()
    c = random(number, *batch, WIDTH, seed=6).requires_grad_()
    return (h, c) if isinstance(module, nn.LSTM) else h


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_step_by_step_it_is_torchs_own(layer, options):
    module = seeded(lambda: LAYERS[layer](**OPTIONS[options]))
    x = random(TIMES, EXAMPLES, INPUTS).requires_grad_()
    batch = TIMES if module.batch_first else EXAMPLES
    assert_the_same_unrolled(module, x)
    assert_the_same_unrolled(module, x, first_states(module, batch))
    assert_the_same_unrolled(module, x[:, 0], first_states(module))  # a sequence without a batch


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_step_by_step_packed_sequences_are_torchs_own(layer, options):
    module = seeded(lambda: LAYERS[layer](**OPTIONS[options]))
    x = random(EXAMPLES, TIMES, INPUTS).requires_grad_()
    lengths = torch.tensor([2, 5, 1, 4])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert_the_same_unrolled(module, packed)
    assert_the_same_unrolled(module, packed, first_states(module, EXAMPLES))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_step_by_step_a_cell_is_torchs_own(cell, bias):
    module = seeded(lambda: CELLS[cell](bias=bias))
    x = random(EXAMPLES, INPUTS).requires_grad_()
    h = random(EXAMPLES, WIDTH, seed=5).requires_grad_()
    states = (h, random(EXAMPLES, WIDTH, seed=6).requires_grad_()) if cell == "lstm" else h
    assert_the_same_unrolled(module, x)
    assert_the_same_unrolled(module, x, states)
    assert_the_same_unrolled(module, x[0])


@pytest.mark.parametrize("layer", [*LAYERS, *(f"{name} cell" for name in CELLS)])
def test_step_by_step_under_autocast_it_has_torchs_dtypes(layer):
    if layer.endswith("cell"):
        module, shape = CELLS[layer.removesuffix(" cell")](), (EXAMPLES, INPUTS)
    else:
        module, shape = LAYERS[layer](num_layers=2), (TIMES, EXAMPLES, INPUTS)
    x = random(*shape).float()
    estimator = KroneckerEstimator(module, logits="observed")
    with torch.autocast("cpu", torch.bfloat16):
        expected = tensors(module(x))
        with estimator.listening():
            found = tensors(module(x))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03)


# -- its maps are Linear layers --


class Reads(nn.Module):
    """A row of logits for each sequence: of the mean output. The last input says which are real."""

    def __init__(self, recurrent: nn.Module, *, packed: bool = False) -> None:
        super().__init__()
        self.recurrent, self.packed = recurrent, packed
        self.head = nn.Linear(outputs_of(recurrent), CLASSES)

    def forward(self, x):
        if isinstance(self.recurrent, nn.RNNCellBase):
            states, outputs = None, []
            for time in range(x.shape[1]):
                states = self.recurrent(x[:, time], states)
                outputs.append(states[0] if isinstance(states, tuple) else states)
            return self.head(torch.stack(outputs).mean(0))
        if not self.packed:
            first = self.recurrent.batch_first
            outputs, _ = self.recurrent(x if first else x.transpose(0, 1))
            return self.head(outputs.mean(1 if first else 0))
        lengths = lengths_of(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]
        return self.head(outputs.sum(1) / lengths[:, None])


class Written(nn.Module):
    """The same with Linear layers, example by example, time step by time step."""

    def __init__(self, net: Reads) -> None:
        super().__init__()
        self.net, self.head = [net.recurrent], copy.deepcopy(net.head)
        self.maps = nn.ModuleDict()
        for name, weight in net.recurrent.named_parameters():
            if name.startswith("weight"):
                bias = getattr(net.recurrent, name.replace("weight", "bias"), None)
                self.maps[name] = nn.Linear(*weight.shape[::-1], bias=bias is not None).double()
                self.maps[name].weight.data = weight.detach().clone()
                if bias is not None:
                    self.maps[name].bias.data = bias.detach().clone()
        self.packed = net.packed

    def forward(self, x):
        lengths = lengths_of(x).tolist() if self.packed else [x.shape[1]] * len(x)
        rows = [self.read(row[:length]) for row, length in zip(x, lengths, strict=True)]
        return self.head(torch.stack(rows))

    def read(self, xs):
        recurrent = self.net[0]
        layers = getattr(recurrent, "num_layers", 0)
        ways = ["", "_reverse"] if getattr(recurrent, "bidirectional", False) else [""]
        if not layers:
            return torch.stack(self.one_way(list(xs), "")).mean(0)
        for layer in range(layers):
            outputs = []
            for way in ways:
                given = list(xs)[::-1] if way else list(xs)
                out = self.one_way(given, f"_l{layer}{way}")
                outputs.append(out[::-1] if way else out)
            xs = [torch.cat(pair) for pair in zip(*outputs, strict=True)]
        return torch.stack(xs).mean(0)

    def one_way(self, xs, suffix):
        of_input, of_hidden = self.maps[f"weight_ih{suffix}"], self.maps[f"weight_hh{suffix}"]
        projection = f"weight_hr{suffix}"
        h = of_hidden.weight.new_zeros(of_hidden.in_features)
        c = of_hidden.weight.new_zeros(WIDTH)
        outputs = []
        for x in xs:
            s, t = of_input(x), of_hidden(h)
            gates = [(s[i : i + WIDTH], t[i : i + WIDTH]) for i in range(0, len(s), WIDTH)]
            if len(gates) == 4:
                i, f, g, o = (a + b for a, b in gates)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                h = self.maps[projection](h) if projection in self.maps else h
            elif len(gates) == 3:
                r, z = (torch.sigmoid(a + b) for a, b in gates[:2])
                n = torch.tanh(gates[2][0] + r * gates[2][1])
                h = (1 - z) * n + z * h
            else:
                relu = getattr(self.net[0], "nonlinearity", "tanh") == "relu"
                h = torch.relu(s + t) if relu else torch.tanh(s + t)
            outputs.append(h)
        return outputs


def outputs_of(recurrent) -> int:
    ways = 2 if getattr(recurrent, "bidirectional", False) else 1
    return ways * (getattr(recurrent, "proj_size", 0) or WIDTH)


def lengths_of(x):
    return (x[..., -1] != 0).sum(1)


def batch(seed: int = 0, lengths=(2, 5, 1, 4)) -> torch.Tensor:
    x = random(EXAMPLES, TIMES, INPUTS, seed=seed)
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    return x


NETS = {
    **{layer: (lambda layer=layer: Reads(LAYERS[layer]())) for layer in LAYERS},
    **{f"{cell} cell": (lambda cell=cell: Reads(CELLS[cell]())) for cell in CELLS},
    "deep": lambda: Reads(nn.GRU(INPUTS, WIDTH, 2, bidirectional=True, batch_first=True)),
    "without biases": lambda: Reads(nn.LSTM(INPUTS, WIDTH, 2, bias=False)),
    "packed": lambda: Reads(nn.LSTM(INPUTS, WIDTH, 2, bidirectional=True), packed=True),
}


def assert_factors(found, expected) -> None:
    torch.testing.assert_close(found.A, expected.A[0], rtol=1e-10, atol=1e-12)
    block = float(found.T) * found.S
    torch.testing.assert_close(block, expected.T * expected.S[0], rtol=1e-10, atol=1e-12)
    assert float(found.T) == pytest.approx(expected.T)


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
@pytest.mark.parametrize("net", NETS)
def test_factors_are_those_of_the_linear_maps(net, curvature):
    ours = seeded(NETS[net])
    written, x = Written(ours), batch()
    torch.testing.assert_close(written(x), ours(x), rtol=1e-12, atol=1e-12)
    expected = naive_factors(written, x, vectors_for(curvature, "categorical"))
    found = KroneckerEstimator(ours, curvature=curvature, outputs="exact").measure([x])
    assert found.keys() == {n.replace("maps", "recurrent") for n in expected}
    for name, factors in expected.items():
        assert_factors(found[name.replace("maps", "recurrent")], factors)


@pytest.mark.parametrize("net", ["lstm", "gru", "projected", "rnn cell", "packed"])
def test_steps_are_those_of_the_dense_blocks(net):
    ours = seeded(NETS[net])
    written = Written(ours)
    opt = KFAC(ours, 0.1, weight_decay=0.02, kl_clip=1e-2, damping=1e-2, **EXACT)
    settings = Settings(
        0.1, weight_decay=0.02, kl_clip=1e-2, damping=1e-2, refresh_every=1, invert_every=1
    )
    dense = DenseKFAC(written, cross_entropy, settings)
    for seed in range(3):
        x, y = batch(seed), labels_for(EXAMPLES, classes=CLASSES, seed=seed)
        train_step(opt, ours, x, y)
        dense.step(x, y)
    for name, layer in written.maps.items():
        found = ours.recurrent.get_parameter(name)
        torch.testing.assert_close(found, layer.weight, rtol=1e-8, atol=1e-10)


class PerStep(nn.Module):
    """A row of logits at each time step, by nn.LSTM or by two Linear layers, to given lengths."""

    def __init__(self, lstm: nn.LSTM, lengths: torch.Tensor, *, written: bool = False) -> None:
        super().__init__()
        self.written, self.lengths = written, lengths
        self.head = seeded(lambda: nn.Linear(WIDTH, CLASSES), 1)
        if written:
            self.weight_ih_l0, self.weight_hh_l0 = nn.Linear(INPUTS, 16), nn.Linear(WIDTH, 16)
            self.double().load_state_dict(
                {
                    **{f"head.{name}": p for name, p in self.head.state_dict().items()},
                    **{
                        f"{kind}_{side}_l0".replace("bias", "weight") + f".{kind}": getattr(
                            lstm, f"{kind}_{side}_l0"
                        ).detach()
                        for kind in ("weight", "bias")
                        for side in ("ih", "hh")
                    },
                }
            )
        else:
            self.lstm = lstm

    def forward(self, x):
        if not self.written:
            return self.head(self.lstm(x)[0])
        h = c = x.new_zeros(len(x), WIDTH)
        outputs = []
        for time in range(TIMES):
            here = self.lengths > time
            s = self.weight_ih_l0(x[here, time]) + self.weight_hh_l0(h[here])
            i, f, g, o = s.chunk(4, 1)
            new = f.sigmoid() * c[here] + i.sigmoid() * g.tanh()
            c = c.index_put((here,), new)
            h = h.index_put((here,), o.sigmoid() * new.tanh())
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_at_every_step_and_masks_count_as_with_linear_layers(curvature, masked):
    """Sampled from the same random numbers, or from the loss itself."""
    lstm = seeded(lambda: nn.LSTM(INPUTS, WIDTH, batch_first=True))
    x, y = batch(), labels_for(EXAMPLES, TIMES, classes=CLASSES)
    lengths = lengths_of(x) if masked else torch.full((EXAMPLES,), TIMES)
    mask = torch.arange(TIMES)[None] < lengths[:, None]
    factors = []
    for written in (False, True):
        net = PerStep(lstm, lengths, written=written)
        opt = KFAC(net, 0.0, curvature=curvature, logits="observed" if masked else "output")
        opt.generator.manual_seed(0)
        logits = net(x)
        if masked:
            opt.observe(logits, mask)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        counted = mask.flatten().double()
        (losses * counted / counted.sum()).sum().backward()
        opt.step()
        factors.append(opt.factors())
    for name in ("weight_ih_l0", "weight_hh_l0"):
        found, expected = factors[0][f"lstm.{name}"], factors[1][name]
        for side in ("A", "S", "T"):
            left, right = getattr(found, side), getattr(expected, side)
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


# -- in a training loop --


class LanguageModel(nn.Module):
    """pytorch/examples' word_language_model: an embedding, an LSTM, a decoder."""

    def __init__(self, tokens: int = 20, width: int = 8, layers: int = 2, dropout: float = 0.0):
        super().__init__()
        self.encoder = nn.Embedding(tokens, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, tokens)

    def forward(self, x):
        return self.decoder(self.rnn(self.encoder(x))[0])


def counting(seed: int = 0):
    """Tokens [time, batch + 1] that count upwards by one or by two: what comes next."""
    generator = torch.Generator().manual_seed(seed)
    begin, by = (torch.randint(n, (1, 16), generator=generator) for n in (20, 2))
    tokens = (begin + torch.arange(13)[:, None] * (by + 1)) % 20
    return tokens[:-1], tokens[1:]


def next_token(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def trained(exclude: tuple[str, ...] = ()) -> float:
    """The mean loss of the last ten of 120 steps."""
    torch.manual_seed(0)
    model = LanguageModel()
    options = KFACOptions(exclude=exclude)
    opt = decaylab.KFAC(model, 0.01, others_lr=0.01, refresh_every=5, options=options)
    losses = [train_step(opt, model, *counting(step), next_token) for step in range(120)]
    return float(sum(losses[-10:]) / 10)


def test_a_language_model_learns_no_worse_than_with_adam_on_its_recurrent_layers():
    ours, adams = trained(), trained(exclude=("rnn",))
    assert ours <= 1.1 * adams
    assert ours < 0.5  # from 3


def test_coverage_of_a_language_model():
    found = KFAC(LanguageModel(), 0.1).coverage()
    assert all(entry.block for entry in found.values())
    assert found["rnn.bias_hh_l1"].block == found["rnn.weight_hh_l1"].block == "rnn.weight_hh_l1"
    assert found["rnn.bias_hh_l1"].explanation == "LSTM"


def test_one_map_of_a_layer_can_be_left_to_adam():
    options = KFACOptions(exclude=("rnn.weight_hh_l0",))
    model = LanguageModel()
    opt = KFAC(model, 0.1, options=options)
    outside = {name for name, entry in opt.coverage().items() if entry.block is None}
    assert outside == {"rnn.weight_hh_l0", "rnn.bias_hh_l0"}
    before = model.rnn.weight_hh_l0.detach().clone()
    train_step(opt, model, *counting(), next_token)
    assert not torch.equal(model.rnn.weight_hh_l0, before)


def test_plain_steps_and_passes_without_grad_keep_torchs_kernel(monkeypatch):
    """The step-by-step functions are called in refreshes alone."""
    calls = []
    for name, function in UNROLLED.items():
        monkeypatch.setitem(
            UNROLLED, name, lambda *args, f=function: (calls.append(f), f(*args))[1]
        )
    model = LanguageModel()
    opt = KFAC(model, 0.1, refresh_every=2, invert_every=2)
    x, y = counting()
    for refresh in (True, False, True, False):
        calls.clear()
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
        with opt.paused():
            model(x)
        assert not calls
        next_token(model(x), y).backward()
        assert bool(calls) == refresh
        assert bool(model.rnn._forward_pre_hooks) == refresh
        opt.step()
        opt.zero_grad()


def test_an_error_in_a_pass_leaves_torchs_functions_in_place():
    model = LanguageModel()
    opt = KFAC(model, 0.1)
    with pytest.raises(RuntimeError, match="hidden"):
        model.rnn(torch.zeros(3, 2, 8), (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)))
    with pytest.raises(TypeError):
        model.rnn(*range(7))
    assert {name: getattr(_VF, name) for name in UNROLLED} == TORCHS
    assert opt.refresh_due


def test_resuming_is_going_on():
    def steps(model, opt, numbers):
        for number in numbers:
            x, y = counting(number)
            next_token(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    torch.manual_seed(0)
    model = LanguageModel()
    opt = KFAC(model, 1e-3, refresh_every=2, invert_every=3)
    steps(model, opt, range(3))
    copied = LanguageModel()
    copied.load_state_dict(model.state_dict())
    resumed = KFAC(copied, 1e-3, refresh_every=2, invert_every=3)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(model, opt, range(3, 7))
    steps(copied, resumed, range(3, 7))
    for left, right in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(left, right)


def test_frozen_and_tied_parts():
    ours = seeded(lambda: Reads(nn.LSTM(INPUTS, WIDTH, 2)))
    recurrent = ours.recurrent
    recurrent.weight_ih_l0.requires_grad_(False)
    recurrent.bias_hh_l0.requires_grad_(False)
    written, x = Written(ours), batch()
    written.maps["weight_hh_l1"].weight = written.maps["weight_hh_l0"].weight
    recurrent.weight_hh_l1 = recurrent.weight_hh_l0
    opt = KFAC(ours, 0.1, **EXACT)
    found = opt.coverage()
    assert found["recurrent.weight_ih_l0"].reason is Reason.FROZEN
    assert found["recurrent.bias_ih_l0"].block == "recurrent.weight_ih_l0"
    assert found["recurrent.weight_hh_l0"].reason is Reason.TIED
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    train_step(opt, ours, x, labels_for(EXAMPLES, classes=CLASSES))
    moved = {name for name, p in ours.named_parameters() if not torch.equal(p, before[name])}
    assert before.keys() - moved == {"recurrent.weight_ih_l0", "recurrent.bias_hh_l0"}
    written.maps["weight_ih_l0"].weight.requires_grad_(False)
    expected = naive_factors(written, x, vectors_for("fisher", "categorical"))
    factors = opt.factors()
    assert factors["recurrent.weight_ih_l0"].A.shape == (1, 1)
    for name in ("weight_ih_l0", "weight_ih_l1"):
        assert_factors(factors[f"recurrent.{name}"], expected[f"maps.{name}"])


class Computed(nn.LSTM):
    """Code of its own."""

    def forward(self, x):
        return super().forward(2 * x)


@pytest.mark.filterwarnings("ignore:K-FAC covers", "ignore:.*weight_norm.*:FutureWarning")
def test_what_is_left_out_and_why():
    found = KFAC(Reads(Computed(INPUTS, WIDTH)), 0.1).coverage()
    assert found["recurrent.weight_ih_l0"].explanation == "Computed is a LSTM with its own forward"
    normed = nn.utils.weight_norm(nn.LSTM(INPUTS, WIDTH), "weight_hh_l0")
    found = KFAC(Reads(normed), 0.1).coverage()
    assert found["recurrent.bias_hh_l0"].reason is Reason.COMPUTED
    assert found["recurrent.weight_hh_l0_g"].reason is Reason.NO_PART
    assert found["recurrent.weight_ih_l0"].reason is Reason.COVERED


class Checkpointed(LanguageModel):
    reentrant = False

    def forward(self, x):
        outputs, _ = checkpoint(self.rnn, self.encoder(x), use_reentrant=self.reentrant)
        return self.decoder(outputs)


def test_checkpointing_repeats_a_pass_as_it_was(monkeypatch):
    x, y = counting()
    weights = []
    for net in (LanguageModel, Checkpointed):
        torch.manual_seed(0)
        model = net()
        opt = KFAC(model, 0.01, refresh_every=2, outputs="sampled")
        opt.generator.manual_seed(0)
        for _ in range(3):
            train_step(opt, model, x, y, next_token)
        weights.append(model.rnn.weight_hh_l1)
    torch.testing.assert_close(*weights)
    monkeypatch.setattr(Checkpointed, "reentrant", True)
    with pytest.raises(DecaylabError, match=r"reentrant .*'rnn\.weight_hh_l0'"):
        train_step(KFAC(model, 0.01), model, x, y, next_token)


def test_parts_of_a_model_that_are_called_by_themselves():
    """As an encoder and a decoder are, with the logits handed over."""
    torch.manual_seed(0)
    model = LanguageModel()
    x, y = counting()
    found = []
    for apart in (False, True):
        opt = KFAC(model, 0.0, logits="observed")
        opt.generator.manual_seed(0)
        logits = model.decoder(model.rnn(model.encoder(x))[0]) if apart else model(x)
        opt.observe(logits)
        next_token(logits, y).backward()
        opt.step()
        found.append(opt.factors()["rnn.weight_hh_l0"])
        opt.detach()
    assert torch.equal(found[0].A, found[1].A)
    assert torch.equal(found[0].S, found[1].S)


def test_a_recurrent_layer_is_a_model_too():
    model = seeded(lambda: nn.GRU(INPUTS, WIDTH))
    opt = KFAC(model, 0.1, logits="observed")
    logits, _ = model(random(TIMES, EXAMPLES, INPUTS))
    opt.observe(logits)
    cross_entropy(logits, labels_for(TIMES, EXAMPLES, classes=WIDTH)).backward()
    opt.step()
    assert opt.factors().keys() == {"weight_ih_l0", "weight_hh_l0"}


def test_a_thread_that_comes_while_another_replaces_functions_has_all_of_them():
    namespace, halfway, came = SimpleNamespace(a=len, b=max), threading.Event(), threading.Event()
    captures, whole = [nn.Identity(), nn.Identity()], []

    def substitute(name, function):
        if name == "b":
            halfway.set()
            came.wait(0.2)
        return partial(function)

    functions = _Replaced(namespace, ["a", "b"], substitute)

    def join_second():
        halfway.wait()
        functions.join(captures[1])
        whole.append(namespace.a is not len and namespace.b is not max)
        came.set()

    threads = [threading.Thread(target=functions.join, args=captures[:1])]
    threads.append(threading.Thread(target=join_second))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole == [True]
    for capture in captures:
        functions.leave(capture)
    assert (namespace.a, namespace.b) == (len, max)


def interrupted_net():
    """A net, its K-FAC and a pass that Ctrl-C ended inside the recurrent layer."""
    model = nn.Sequential(nn.LSTMCell(INPUTS, WIDTH), TakesFirst(), nn.Linear(WIDTH, CLASSES))
    optimizer = decaylab.KFAC(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    chunk, torch.Tensor.chunk = torch.Tensor.chunk, interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(EXAMPLES, INPUTS))
    finally:
        torch.Tensor.chunk = chunk
    return model, optimizer


class TakesFirst(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_an_interrupted_pass_leaves_torchs_functions_after_the_next_one():
    model, optimizer = interrupted_net()
    model(torch.zeros(EXAMPLES, INPUTS))
    assert {name: getattr(_VF, name) for name in UNROLLED} == TORCHS
    assert F.linear is LINEAR
    optimizer.detach()


def test_an_interrupted_pass_keeps_neither_the_model_nor_its_functions():
    """As in a notebook, where the next model is a new one."""
    pair = interrupted_net()
    alive = weakref.ref(pair[0])
    del pair
    gc.collect()
    assert alive() is None
    assert {name: getattr(_VF, name) for name in UNROLLED} == TORCHS
    assert F.linear is LINEAR


def test_sequences_of_any_number_of_lengths_are_remembered_in_bounded_memory():
    model = LastStep(nn.GRU(INPUTS, WIDTH))
    optimizer = decaylab.KFAC(model, refresh_every=1)
    for times in range(1, 2 * GRAPHS_REMEMBERED + 1):
        F.cross_entropy(model(torch.zeros(times, EXAMPLES, INPUTS)), torch.arange(4) % 3).backward()
        optimizer.step()
    graphs = optimizer.estimator._through_the_graph
    assert len(graphs._ends) == GRAPHS_REMEMBERED


class LastStep(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][-1])
