"""Joint scale invariance, against architectures whose symmetries are known exactly."""

import copy
import math

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from decaylab.errors import Lacks, OutOfRange, UnknownName, WrongType
from decaylab.networks import build, measure_invariance

WIDTH, VOCABULARY, HEADS = 16, 23, 2


def tokens(batch=4, length=7):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Separate projections without biases."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """`place` of the normalisation: "pre" (Llama), "post" (2017) or "inside" (x + norm(f(x)))."""

    def __init__(self, place, eps):
        super().__init__()
        self.place = place
        self.attention, self.mlp = Attention(), GatedMLP()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, eps=eps) for _ in range(2))

    def forward(self, x):
        for part, norm in ((self.attention, self.norm1), (self.mlp, self.norm2)):
            if self.place == "pre":
                x = x + part(norm(x))
            elif self.place == "post":
                x = norm(x + part(x))
            else:
                x = x + norm(part(x))
        return x


class Transformer(nn.Module):
    def __init__(self, place="pre", *, tied=False, eps=0.0, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(place, eps) for _ in range(depth)))
        self.norm = nn.Identity() if place == "post" else nn.RMSNorm(WIDTH, eps=eps)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
        for name in "qk":  # attention that is far from uniform
            for block in self.blocks:
                getattr(block.attention, name).weight.data *= 3

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embedding(x))))


def transformer(*args, **options):
    torch.manual_seed(0)
    return Transformer(*args, **options).double()


def groups(invariance):
    return {(frozenset(g.exponents.items()), g.degree) for g in invariance.groups}


def group(degree=0, **exponents):
    return frozenset((name.replace("__", "."), e) for name, e in exponents.items()), degree


STREAM = {"embedding"} | {
    f"blocks.{i}.{part}" for i in (0, 1) for part in ("attention.o", "mlp.down")
}


def test_a_pre_norm_transformer_has_its_residual_stream_and_pairs():
    """Every symmetry of a Llama, and no other: the dimension of the space is counted by hand."""
    measured = measure_invariance(transformer(), tokens())
    assert not measured.alone
    assert set(measured.together("embedding")) == STREAM
    assert measured.together("blocks.0.mlp.down") == measured.together("embedding")
    assert measured.together("head") == measured.together("blocks.0.attention.q") == ()
    expected = {
        (frozenset((name, 1) for name in STREAM), 0),
        group(1, head=1),
        group(1, norm=1),
    }
    for i in (0, 1):
        attention, mlp = f"blocks__{i}__attention__", f"blocks__{i}__mlp__"
        expected |= {
            group(**{attention + "q": 1, attention + "k": -1}),
            group(**{attention + "v": 1, attention + "o": -1}),
            group(**{mlp + "up": 1, mlp + "down": -1}),
            group(**{f"blocks__{i}__norm1": 1, attention + "k": -2, attention + "o": -1}),
            group(**{f"blocks__{i}__norm2": 1, mlp + "gate": -1, mlp + "down": -1}),
        }
    assert groups(measured) == expected
    assert max(g.defect for g in measured.groups) < 1e-12


def test_decay_on_the_stream_alone_is_not_seen_and_on_less_of_it_is():
    measured = measure_invariance(transformer(), tokens())
    assert measured.response_along(dict.fromkeys(STREAM, 1.0)).total < 1e-7
    assert measured.unseen(dict.fromkeys(STREAM, 0.3)) is True
    assert measured.unseen(dict.fromkeys(STREAM - {"embedding"}, 0.3)) is False
    assert measured.unseen(dict.fromkeys(STREAM, 0.3) | {"embedding": 0.1}) is False
    swapped = (STREAM - {"blocks.0.attention.o"}) | {"blocks.0.attention.v"}
    assert measured.unseen(dict.fromkeys(swapped, 0.3)) is True
    with refuses(UnknownName, kind="layer", name="nowhere"):
        measured.unseen({"nowhere": 1.0})


def test_a_tied_embedding_multiplies_the_logits():
    measured = measure_invariance(transformer(tied=True), tokens())
    assert "embedding" not in measured.layers  # the head's, as `roles` has it
    stream = (STREAM - {"embedding"}) | {"head"}
    assert (frozenset((name, 1) for name in stream), 1) in groups(measured)
    assert measured.together("head") == ()
    response = measured.response_along(dict.fromkeys(stream, 1.0))
    assert response.size == pytest.approx(1.0)
    assert response.direction < 1e-7


def test_post_norm_has_pairs_but_no_stream():
    measured = measure_invariance(transformer("post"), tokens())
    assert not measured.alone
    assert not any(g.together for g in measured.groups)
    assert group(blocks__1__attention__q=1, blocks__1__attention__k=-1) in groups(measured)
    assert group(blocks__0__mlp__up=1, blocks__0__mlp__down=-1) in groups(measured)
    assert measured.invariant("embedding") is False  # before the first norm attention stands


def test_norms_on_the_branches_leave_embedding_and_gains_together():
    measured = measure_invariance(transformer("inside"), tokens())
    branches = {f"blocks.{i}.{p}" for i in (0, 1) for p in ("attention.v", "attention.o")}
    branches |= {f"blocks.{i}.mlp.{p}" for i in (0, 1) for p in ("up", "down")}
    # blocks 0 and 1 read the stream itself: its scale is attention's temperature
    assert measured.alone == branches
    assert measured.invariant("embedding") is False
    assert measured.together("embedding") == ()


class Stream(nn.Module):
    """x + gain_i norm(W_i norm(x)): a stream that is read and written through norms."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.reads = nn.ModuleList(nn.LayerNorm(8, eps=0.0) for _ in range(2))
        self.writes = nn.ModuleList(nn.LayerNorm(8, eps=0.0) for _ in range(2))
        self.last = nn.LayerNorm(8, eps=0.0)
        self.head = nn.Linear(8, 3)
        for norm in self.writes:
            nn.init.constant_(norm.weight, gain)
        self.layers[1].weight.data *= 4  # far from where tanh is linear

    def forward(self, x):
        x = self.first(x)
        for layer, read, write in zip(self.layers, self.reads, self.writes, strict=True):
            x = x + write(layer(read(x)).tanh() if layer is self.layers[1] else layer(read(x)))
        return self.head(self.last(x))


def test_gains_belong_to_a_group_where_they_write_the_stream():
    torch.manual_seed(0)
    measured = measure_invariance(Stream().double(), torch.randn(9, 6, dtype=torch.float64))
    assert measured.alone == {"layers.0"}
    assert set(measured.together("first")) == {"first", "writes.0", "writes.1"}


def test_gains_that_are_zero_hide_what_stands_before_them():
    """Cannot be known, never "not invariant"; it can be once the gain has moved."""
    torch.manual_seed(0)
    model, x = Stream(gain=0.0).double(), torch.randn(9, 6, dtype=torch.float64)
    measured = measure_invariance(model, x)
    assert measured.invariant("layers.0") is None
    assert math.isnan(measured.defects["layers.0"])
    assert measured.unseen({"first": 1.0, "layers.0": 1.0}) is None
    assert measured.invariant("first") is True  # nothing else writes the stream yet
    for norm in model.writes:
        nn.init.constant_(norm.weight, 0.3)
    again = measure_invariance(model, x)
    assert again.invariant("layers.0") is True
    assert again.invariant("layers.1") is False
    assert again.invariant("first") is False
    assert set(again.together("first")) == {"first", "writes.0", "writes.1"}


def test_a_residual_network_with_zero_gains_at_the_start():
    """torchvision's zero_init_residual: the block's convolutions cannot be seen, the others can."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
            self.norm1, self.norm2 = (nn.BatchNorm2d(4, eps=1e-300) for _ in range(2))
            nn.init.zeros_(self.norm2.weight)

        def forward(self, x):
            return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()

    stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-300), nn.ReLU())
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = nn.Sequential(stem, Residual(), Residual(), tail).double()
    x, y = torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.randint(3, (8,))
    convs = [f"{i}.conv{j}" for i in (1, 2) for j in (1, 2)]
    start = measure_invariance(model, x)
    assert [start.invariant(name) for name in convs] == [None] * 4
    assert start.invariant("0.0") is True
    assert start.invariant("3.2") is False
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    later = measure_invariance(model, x)
    assert [later.invariant(name) for name in (*convs, "0.0")] == [True] * 5


@pytest.mark.parametrize("name", ["vgg11", "resnet20", "mlp"])
def test_every_layer_before_batch_norm_is_invariant_alone(name):
    torch.manual_seed(0)
    side = 32 if name == "vgg11" else 8
    model = build(name, classes=5, image_size=side, width=1 / 8, batch_norm=True).double()
    x = torch.randn(6, 3, side, side, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    measured = measure_invariance(model, x)
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert measured.alone == layers - {"head"}
    assert groups(measured) == {group(1, head=1)}
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_response_is_the_derivative_of_the_logits():
    model, x = transformer(eps=1e-6), tokens()
    measured = measure_invariance(model, x)
    with torch.no_grad():
        reference = model(x)
        for name in ("embedding", "blocks.0.attention.q", "blocks.1.mlp.gate", "norm", "head"):
            ends = []
            for factor in (1 + 1e-5, 1 - 1e-5):
                moved = copy.deepcopy(model)
                for parameter in moved.get_submodule(name).parameters():
                    parameter.mul_(factor)
                ends.append(moved(x))
            change = (ends[0] - ends[1]) / 2e-5
            along = (change * reference).sum() / reference.square().sum()
            across = (change - along * reference).norm() / reference.norm()
            response = measured.size_response(name)
            assert response.size == pytest.approx(along.item(), abs=1e-7)
            assert response.direction == pytest.approx(across.item(), abs=1e-6)
            assert response.total == pytest.approx((change.norm() / reference.norm()).item(), 1e-5)


class Opaque(torch.autograd.Function):
    """Without a forward-mode derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("width", [10, 40_000])
def test_the_head_of_a_small_output_counts_as_that_of_a_large_one(width):
    """Also beside so many logits that only some of all entries are looked at."""

    class TwoTasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
            self.classes, self.depth = nn.Linear(8, width, False), nn.Linear(8, 1, False)

        def forward(self, x):
            features = self.norm(self.body(x))
            return 100 * self.classes(features), self.depth(features)

    torch.manual_seed(0)
    measured = measure_invariance(TwoTasks().double(), torch.randn(16, 6).double())
    heads = [measured.size_response(name).total for name in ("classes", "depth")]
    assert heads == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-9)
    assert measured.size_response("norm").total == pytest.approx(1, rel=1e-9)
    assert measured.size_response("body").total == pytest.approx(0, abs=1e-3)


def test_where_there_is_no_forward_mode_differences_do():
    model, x = transformer(), tokens()
    wanted = measure_invariance(model, x)
    measured = measure_invariance(model, lambda model: Opaque.apply(model(x)))
    assert groups(measured) == groups(wanted)
    for name in measured.layers:
        got, exact = measured.size_response(name), wanted.size_response(name)
        assert got.total == pytest.approx(exact.total, rel=1e-3)


@pytest.mark.parametrize("how", ["weights", "autocast", "autocast inside"])
def test_in_sixteen_bits(how):
    model, x = transformer(eps=1e-6).float(), tokens()
    if how == "weights":
        measured = measure_invariance(model.bfloat16(), x)
    elif how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            measured = measure_invariance(model, x)
    else:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        measured = measure_invariance(model, x)
    assert set(measured.together("embedding")) == STREAM
    assert not any(measured.invariant(name) for name in measured.layers)


class Wrapped(nn.Module):
    """nanoGPT's outputs and a diffusion model's inputs: (logits, loss) of (x, time)."""

    def __init__(self):
        super().__init__()
        self.layer, self.time = nn.Linear(4, 8), nn.Linear(1, 8)
        self.norm, self.head = nn.LayerNorm(8, eps=0.0), nn.Linear(8, 3, bias=False)

    def forward(self, x, t):
        logits = self.head(self.norm(self.layer(x) + self.time(t)))
        return logits, logits.square().mean()


def test_inputs_and_outputs_of_all_kinds():
    torch.manual_seed(0)
    model = Wrapped().double()
    x, t = torch.randn(9, 4, dtype=torch.float64), torch.rand(9, 1, dtype=torch.float64)
    results = [
        measure_invariance(model, (x, t), logits=0),
        measure_invariance(model, {"x": x, "t": t}, logits=lambda output: output[0]),
        measure_invariance(model, lambda model: model(x, t)[0]),
        measure_invariance(model, lambda model: {"z": model(x, t)[0]}, logits="z"),
    ]
    for measured in results:
        assert set(measured.together("layer")) == {"layer", "time"}
        assert measured.defects == results[0].defects
    for rule in ("missing", 7):
        with refuses(Lacks, what=f"logits under {rule!r}"):
            measure_invariance(model, (x, t), logits=rule)
    with refuses(WrongType, wanted="a floating-point tensor"):
        measure_invariance(model, (x, t), logits=lambda output: output[0] > 0)


def test_recurrent_and_weight_normalised_layers():
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(4, 5, batch_first=True)
            self.middle = weight_norm(nn.Linear(5, 6))
            self.head = nn.Linear(6, 2, bias=False)

        def forward(self, x):
            return self.head(self.middle(self.recurrent(x)[0]).tanh())

    measured = measure_invariance(Recurrent().double(), torch.randn(3, 6, 4, dtype=torch.float64))
    assert measured.alone == {"middle"}
    assert measured.invariant("middle.parametrizations.weight.original0") is False
    assert measured.invariant("recurrent.weight_ih_l0") is False
    assert measured.invariant("recurrent.weight_hh_l0") is False


def test_the_model_is_left_bit_for_bit_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3)
    )
    x = torch.randn(8, 4)
    model(x).sum().backward()
    model[1].eval()
    pending = model(x).square().sum()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    measured = measure_invariance(model, x)
    assert measured.alone == {"0"}
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    pairs = zip(model.parameters(), gradients, strict=True)
    assert all(torch.equal(p.grad, gradient) for p, gradient in pairs)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    pending.backward()


def test_what_nothing_can_be_said_of():
    assert measure_invariance(nn.ReLU(), torch.randn(2)).layers == ()
    dead = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    nn.init.zeros_(dead[1].weight)
    nn.init.zeros_(dead[1].bias)
    with refuses(OutOfRange, name="the size of the logits", value=0.0):
        measure_invariance(dead, torch.randn(5, 4))
    nn.init.ones_(dead[1].bias)
    measured = measure_invariance(dead, torch.randn(5, 4))
    assert measured.invariant("0") is None
    values = measured.as_dict()["layers"]["0"]
    assert values["invariant"] is None
    assert values["defect"] is None


@pytest.mark.gpu
def test_on_the_gpu_in_sixteen_bits():
    model, x = transformer(eps=1e-6).float().cuda(), tokens().cuda()
    state = torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.bfloat16):
        measured = measure_invariance(model, x)
    assert set(measured.together("embedding")) == STREAM
    assert torch.equal(torch.cuda.get_rng_state(), state)
