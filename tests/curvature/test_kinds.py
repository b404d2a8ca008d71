"""Layers that are Linear in disguise, against the naive factors of the net written with Linear."""

import copy

import pytest
import torch
from oracle.kfac import Factors, naive_factors, vectors_for
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.kinds.kind import Reason
from decaylab.errors import Lacks
from decaylab.optim.options import KFACOptions

CLASSES, WIDTH, TOKENS = 3, 4, 7
KINDS = [("fisher", "categorical"), ("gauss-newton", "categorical")]


class OneHot(nn.Module):
    def forward(self, tokens):
        return F.one_hot(tokens, TOKENS).double()


class Mean(nn.Module):
    """One row of logits per sequence, so that rows do not see each other."""

    def forward(self, x):
        return x.mean(1)


class Attention(nn.Module):
    """nn.MultiheadAttention written with Linear layers."""

    def __init__(self, width: int, heads: int, key_width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k, self.v = nn.Linear(key_width, width), nn.Linear(key_width, width)
        self.out, self.heads = nn.Linear(width, width), heads

    def forward(self, query, keys):
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, keys), (self.v, keys))
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """Queries are the first positions of a sequence, keys all of them: of another width too."""

    def __init__(self, *, ours: bool, same: bool = True, key_width: int = WIDTH, first=True):
        super().__init__()
        torch_attention = nn.MultiheadAttention(
            WIDTH, 2, kdim=key_width, vdim=key_width, batch_first=first
        )
        self.attention = torch_attention if ours else Attention(WIDTH, 2, key_width)
        self.key_width, self.same, self.first = key_width, same, first
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        query = x[..., :WIDTH]
        keys = query if self.same else x[..., : self.key_width]
        query = query if self.same else query[:, :2]
        if isinstance(self.attention, Attention):
            mixed = self.attention(query, keys)
        elif self.first:
            mixed = self.attention(query, keys, keys, need_weights=False)[0]
        else:
            turned = query.transpose(0, 1), keys.transpose(0, 1)
            keys = turned[0] if self.same else turned[1]
            mixed = self.attention(turned[0], keys, keys)[0].transpose(0, 1)
        return self.head(mixed.mean(1))


class Experts(nn.Module):
    """As transformers has them: one parameter, `F.linear` expert by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.proj = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x, chosen):
        result = torch.zeros_like(x)
        for expert in chosen.unique():
            here = torch.where(chosen == expert)
            result = result.index_put(here, F.linear(x[here], self.proj[expert]))
        return result


class Grouped(Experts):
    """The same by `F.grouped_mm`, of rows that are sorted by expert; some come behind the last."""

    def forward(self, x, chosen):
        order = chosen.flatten().argsort()
        rows = torch.cat([x.flatten(0, 1)[order], x.new_ones(2, WIDTH)])
        ends = torch.bincount(chosen.flatten(), minlength=3).cumsum(0, dtype=torch.int32)
        result = self.product(rows, ends, chosen.flatten()[order])[: len(order)]
        return torch.zeros_like(result).index_put((order,), result).view_as(x)

    def product(self, rows, ends, experts):
        return F.grouped_mm(rows, self.proj.mT, offs=ends)


class Turned(Grouped):
    """The same with transposed matrices and biases, as gpt-oss has them."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.proj_bias = nn.Parameter(torch.randn(3, WIDTH))

    def product(self, rows, ends, experts):
        out = F.grouped_mm(mat_a=rows, mat_b=self.proj, offs=ends)
        out[: len(experts)].add_(self.proj_bias[experts])
        return out


class Listed(Experts):
    """The same with a Linear for each."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        del self.proj
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))

    def forward(self, x, chosen):
        result = torch.zeros_like(x)
        for expert in chosen.unique():
            here = torch.where(chosen == expert)
            result = result.index_put(here, self.layers[int(expert)](x[here]))
        return result


class Routed(nn.Module):
    """Experts by the sign of an input; the last is met by long vectors alone."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.head = (
            nn.Linear(WIDTH, WIDTH),
            experts,
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x):
        chosen = (x[..., 0] > 0).long() + (x[..., 0] > 50).long()
        return self.head(self.experts(self.first(x), chosen).tanh().mean(1))


def naive(model: nn.Module, x, kind) -> dict[str, Factors]:
    return naive_factors(copy.deepcopy(model), x, vectors_for(*kind))


def measured(model: nn.Module, x, kind, **options):
    estimator = KroneckerEstimator(
        model, curvature=kind[0], likelihood=kind[1], outputs="exact", **options
    )
    return estimator.measure([x])


def assert_close(
    found, expected: Factors, group: int | None = None, rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """Sides may be diagonals; of groups, one of them."""
    A, S = (side if group is None else side[group] for side in (found.A, found.S))
    dense = torch.diag(A) if A.dim() == 1 else A
    torch.testing.assert_close(dense, expected.A[0], rtol=rtol, atol=atol)
    block = float(found.T) * S
    torch.testing.assert_close(block, expected.T * expected.S[0], rtol=rtol, atol=atol)


def embedding_nets() -> tuple[nn.Module, nn.Module]:
    ours = seeded(lambda: nn.Sequential(nn.Embedding(TOKENS, WIDTH), Mean(), nn.Linear(4, CLASSES)))
    linear = nn.Sequential(OneHot(), nn.Linear(TOKENS, WIDTH, bias=False), Mean(), ours[2]).double()
    linear = copy.deepcopy(linear)
    linear[1].weight.data = ours[0].weight.detach().T.clone()
    return ours, linear


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return labels_for(*shape, classes=TOKENS - 1, seed=seed)  # one is never met


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_a_linear_layer_of_one_hot_vectors(kind):
    ours, linear = embedding_nets()
    x = tokens(5, 6)
    found, expected = measured(ours, x, kind), naive(linear, x, kind)
    assert found["0"].A.shape == (TOKENS,)
    assert_close(found["0"], expected["1"])
    assert_close(found["2"], expected["3"])
    assert float(found["0"].A[-1]) == 0


def assert_same_training(models, parameters, batches, **options) -> None:
    """Two nets take the same steps, for all `parameters`: pairs of names and what turns one."""
    for model in models:
        opt = KFAC(model, 0.1, weight_decay=0.01, kl_clip=1e-2, **(EXACT | options))
        for x, y in batches:
            train_step(opt, model, x, y)
    for ours, other, turn in parameters:
        left, right = models[0].get_parameter(ours), models[1].get_parameter(other)
        torch.testing.assert_close(left, turn(right), rtol=1e-8, atol=1e-10)


def plain(weight):
    return weight


def turned(weight):
    return weight.T


def test_steps_of_an_embedding_are_those_of_the_linear_layer():
    batches = [(tokens(5, 6, seed=s), labels_for(5, classes=CLASSES, seed=s)) for s in range(4)]
    pairs = [("0.weight", "1.weight", turned), ("2.weight", "3.weight", plain)]
    assert_same_training(embedding_nets(), pairs, batches)


def test_padding_does_not_count():
    ours, linear = embedding_nets()
    ours[0].padding_idx = 2
    x = tokens(5, 6)
    assert (x == 2).any()

    class Padded(OneHot):
        def forward(self, numbers):
            return super().forward(numbers) * (numbers != 2)[..., None]

    linear[0] = Padded()
    found = measured(ours, x, KINDS[0])["0"]
    expected = naive(linear, x, KINDS[0])["1"]
    count = (x != 2).sum() / x.numel()  # the naive mean has the padded positions in it
    torch.testing.assert_close(found.A * count, expected.A[0].diagonal())
    counts = torch.bincount(x[x != 2], minlength=TOKENS).double()
    torch.testing.assert_close(found.A, counts / counts.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_huggingface_conv1d_is_a_linear_layer_turned(kind):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    ours = seeded(lambda: nn.Sequential(Conv1D(5, WIDTH), nn.Tanh(), Mean(), nn.Linear(5, CLASSES)))
    ours[0].bias.data.normal_()
    linear = nn.Sequential(nn.Linear(WIDTH, 5), *ours[1:]).double()
    linear[0].weight.data, linear[0].bias.data = ours[0].weight.T.clone(), ours[0].bias.clone()
    linear = copy.deepcopy(linear)
    x = random(5, 3, WIDTH)
    found, expected = measured(ours, x, kind), naive(linear, x, kind)
    for layer in ("0", "3"):
        assert_close(found[layer], expected[layer])
    batches = [(random(5, 3, WIDTH, seed=s), labels_for(5, classes=CLASSES)) for s in range(4)]
    pairs = [("0.weight", "0.weight", turned), ("0.bias", "0.bias", plain)]
    assert_same_training((ours, linear), pairs, batches)


class Folded(nn.Module):
    """A transposed convolution of an image: a Linear at each position, whose patches are added."""

    def __init__(self, layer: nn.ConvTranspose2d, size: tuple[int, int]) -> None:
        super().__init__()
        weight = layer.weight.detach().flatten(1)
        self.linear = nn.Linear(*weight.shape, bias=False, dtype=weight.dtype)
        self.linear.weight.data = weight.T.clone()
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.fold = nn.Fold(size, layer.kernel_size, layer.dilation, layer.padding, layer.stride)

    def forward(self, x):
        return self.fold(self.linear(x.flatten(2).mT).mT) + self.bias[:, None, None]


TRANSPOSED = {
    "apart": {"kernel_size": 2, "stride": 2},
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "dilated": {"kernel_size": (2, 3), "stride": (1, 2), "dilation": 2, "padding": (1, 0)},
}


def transposed_nets(case: str) -> tuple[nn.Module, nn.Module]:
    layer = seeded(lambda: nn.ConvTranspose2d(3, 2, **TRANSPOSED[case]))
    size = layer(random(1, 3, 3, 4)).shape
    head = seeded(lambda: nn.Linear(size.numel(), CLASSES))
    nets = (
        nn.Sequential(first, nn.Tanh(), nn.Flatten(), copy.deepcopy(head))
        for first in (layer, Folded(layer, tuple(size[2:])))
    )
    return tuple(nets)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TRANSPOSED)
def test_a_transposed_convolution_is_a_linear_layer_whose_patches_add_up(case, kind):
    ours, linear = transposed_nets(case)
    x = random(5, 3, 3, 4)
    torch.testing.assert_close(ours(x), linear(x))
    found, expected = measured(ours, x, kind), naive(linear, x, kind)
    assert_close(found["0"], expected["0.linear"])
    assert_close(found["3"], expected["3"])


@pytest.mark.parametrize("case", TRANSPOSED)
def test_steps_of_a_transposed_convolution_are_those_of_the_linear_layer(case):
    ours, linear = transposed_nets(case)

    def turned_back(weight):
        return weight.T.view_as(ours[0].weight)

    pairs = [("0.weight", "0.linear.weight", turned_back), ("0.bias", "0.bias", plain)]
    batches = [(random(5, 3, 3, 4, seed=s), labels_for(5, classes=CLASSES)) for s in range(4)]
    assert_same_training((ours, linear), pairs, batches)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_groups_of_a_transposed_convolution_are_layers_of_their_own(axes, sharing):
    """Of any number of axes; and the matrix that probes read is the weight's."""
    layer_of = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    both = seeded(lambda: layer_of(4, 6, 3, 2, 1, groups=2, bias=False))
    x = random(5, 4, *(3,) * axes)
    length = both(x)[0, :3].numel()
    heads = seeded(lambda: nn.ModuleList(nn.Linear(length, CLASSES) for _ in range(2)))

    class Halves(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers, self.heads = layers, heads

        def forward(self, x):
            if isinstance(self.layers, nn.ModuleList):
                outputs = [f(part) for f, part in zip(self.layers, x.chunk(2, 1), strict=True)]
            else:
                outputs = self.layers(x).chunk(2, 1)
            return sum(f(o.flatten(1)) for f, o in zip(self.heads, outputs, strict=True))

    apart = nn.ModuleList(layer_of(2, 3, 3, 2, 1, bias=False).double() for _ in range(2))
    for part, weight in zip(apart, both.weight.chunk(2), strict=True):
        part.weight.data = weight.detach().clone()
    found = measured(Halves(both), x, KINDS[0], sharing=sharing)["layers"]
    expected = measured(Halves(apart), x, KINDS[0], sharing=sharing)
    for group in range(2):
        alone = expected[f"layers.{group}"]
        torch.testing.assert_close(found.A[group], alone.A)
        torch.testing.assert_close(found.T * found.S[group], alone.T * alone.S)
        matrix = found.site.as_matrix(both.weight)[group]
        torch.testing.assert_close(matrix, apart[group].weight.flatten(1).T)


CASES = [
    {"same": True},
    {"same": True, "first": False},
    {"same": False},
    {"same": False, "key_width": 6},
    {"same": False, "key_width": 6, "first": False},
]


def attention_nets(case) -> tuple[nn.Module, nn.Module]:
    ours = seeded(lambda: Attending(ours=True, **case))
    linear = seeded(lambda: Attending(ours=False, **case))
    own, other = ours.attention, linear.attention
    own.in_proj_bias.data = random(12, seed=3)
    for i, layer in enumerate((other.q, other.k, other.v)):
        here = slice(WIDTH * i, WIDTH * (i + 1))
        separate = None if own._qkv_same_embed_dim else getattr(own, f"{'qkv'[i]}_proj_weight")
        weight = own.in_proj_weight[here] if separate is None else separate
        layer.weight.data, layer.bias.data = weight.clone(), own.in_proj_bias[here].clone()
    other.out.load_state_dict(own.out_proj.state_dict())
    linear.head.load_state_dict(ours.head.state_dict())
    return ours, linear


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_four_linear_layers(case, kind):
    ours, linear = attention_nets(case)
    x = random(5, 3, case.get("key_width", WIDTH))
    torch.testing.assert_close(ours(x), linear(x))
    before = F.linear
    found, expected = measured(ours, x, kind), naive(linear, x, kind)
    assert F.linear is before  # torch's own again
    for i, letter in enumerate("qkv"):
        layer = expected[f"attention.{letter}"]
        if "key_width" in case:  # three blocks, and the bias, which is one parameter, in none
            layer = Factors(layer.A[:, :-1, :-1], layer.S, layer.T)
            assert_close(found[f"attention.{letter}_proj_weight"], layer)
        else:
            assert_close(found["attention"], layer, i)
    assert_close(found["attention.out_proj"], expected["attention.out"])
    assert_close(found["head"], expected["head"])


@pytest.mark.parametrize("case", CASES[:3])
def test_steps_of_attention_are_those_of_the_linear_layers(case):
    width = case.get("key_width", WIDTH)
    batches = [(random(5, 3, width, seed=s), labels_for(5, classes=CLASSES)) for s in range(3)]
    models = attention_nets(case)
    assert_same_training(
        models, [("attention.out_proj.bias", "attention.out.bias", plain)], batches
    )
    own, other = models[0].attention, models[1].attention
    joined = torch.cat([other.q.weight, other.k.weight, other.v.weight])
    torch.testing.assert_close(own.in_proj_weight, joined, rtol=1e-8, atol=1e-10)
    biases = torch.cat([other.q.bias, other.k.bias, other.v.bias])
    torch.testing.assert_close(own.in_proj_bias, biases, rtol=1e-8, atol=1e-10)


def test_padded_positions_of_attention_do_not_count():
    """By the gradients alone: a functional call's positions are in another order than the mask."""

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x, mask):
            return self.head(self.encoder(x, src_key_padding_mask=~mask))

    x, mask = random(2, 5, WIDTH), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    factors = []
    for batch, rows in ((x, mask), (torch.cat([x[:, :3], 9 * x[:, 3:]], 1), mask)):
        model = seeded(Language)
        batch = torch.where(mask[..., None], x, batch)  # what stands in padding is not seen
        opt = KFAC(model, 0.1, logits="observed", curvature="gauss-newton", outputs="exact")
        torch.manual_seed(0)
        logits = model(batch, rows)
        opt.observe(logits, rows)
        logits[rows].square().mean().backward()
        opt.step()
        factors.append(opt.factors()["encoder.layers.0.self_attn"])
    torch.testing.assert_close(factors[0].A, factors[1].A, rtol=1e-10, atol=1e-12)


def expert_nets(kind: type[Experts] = Experts) -> tuple[nn.Module, nn.Module]:
    turned_and_biased = kind is Turned
    ours = seeded(lambda: Routed(kind()))
    linear = seeded(lambda: Routed(Listed(bias=turned_and_biased)))
    linear.first, linear.head = copy.deepcopy(ours.first), copy.deepcopy(ours.head)
    for number, layer in enumerate(linear.experts.layers):
        weight = ours.experts.proj[number].detach().clone()
        layer.weight.data = weight.T.clone() if turned_and_biased else weight
        if turned_and_biased:
            layer.bias.data = ours.experts.proj_bias[number].detach().clone()
    if issubclass(kind, Grouped):  # torch has no such kernel for float64
        return ours.float(), linear.float()
    return ours, linear


def test_the_rows_of_experts_are_read_off_the_device_once_a_call(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        if tensor.dtype == torch.int32 and tensor.shape == (3,):
            reads.append(tensor)
        return tolist(tensor)

    model = seeded(lambda: Routed(Grouped())).float()
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    measured(model, torch.randn(4, 5, WIDTH), KINDS[0])
    assert len(reads) == 1  # for A and for S


# With the tolerances that the dtypes of `expert_nets` allow.
EXPERTS = [(Experts, 1e-8, 1e-10), (Grouped, 1e-4, 1e-5), (Turned, 1e-4, 1e-5)]


@pytest.mark.parametrize(("experts", "rtol", "atol"), EXPERTS)
def test_experts_are_linear_layers_each_with_rows_of_its_own(experts, rtol, atol):
    ours, linear = expert_nets(experts)
    x = random(5, 6, WIDTH).to(ours.head.weight.dtype)
    x[0, 0, 0] = 60.0
    torch.testing.assert_close(ours(x), linear(x))
    found, kind = measured(ours, x, KINDS[0]), KINDS[0]
    # example by example the naive pass does not meet every expert: here all in one
    expected = KroneckerEstimator(linear, curvature=kind[0], outputs="exact").measure([x])
    first = float(found["experts.proj"].T)  # of the first; S is so scaled that the product is right
    for expert in range(3):
        layer = expected[f"experts.layers.{expert}"]
        one = Factors(layer.A[None], layer.S[None], float(layer.T))
        assert_close(found["experts.proj"], one, expert, rtol, atol)
        assert expert or first == pytest.approx(float(layer.T))


@pytest.mark.parametrize(("experts", "rtol", "atol"), EXPERTS)
def test_steps_of_experts_are_those_of_linear_layers(experts, rtol, atol):
    nets = expert_nets(experts)
    batches = [(random(5, 6, WIDTH, seed=s), labels_for(5, classes=CLASSES)) for s in range(4)]
    batches = [(x.to(nets[0].head.weight.dtype), y) for x, y in batches]
    for x, _ in batches:
        x[0, 0, 0] = 60.0
    before = nets[0].experts.proj.detach().clone()
    assert_same_training(nets, [], batches, damping=0.1)
    moved = (nets[0].experts.proj.detach() - before).abs().amax((1, 2))
    assert float(moved.min()) > 10 * (rtol * float(before.abs().max()) + atol)
    for number, layer in enumerate(nets[1].experts.layers):
        found = nets[0].experts.proj[number]
        weight = layer.weight.T if experts is Turned else layer.weight
        torch.testing.assert_close(found, weight, rtol=rtol, atol=atol)
        if experts is Turned:
            found = nets[0].experts.proj_bias[number]
            torch.testing.assert_close(found, layer.bias, rtol=rtol, atol=atol)


def test_an_expert_that_no_batch_has_reached_waits():
    """It is not moved while it has no factor, and its factor stays while others' are measured."""
    ours, _ = expert_nets()
    opt = KFAC(ours, 0.1, **EXACT)
    before = ours.experts.proj.detach().clone()
    labels = labels_for(5, classes=CLASSES)
    train_step(opt, ours, random(5, 6, WIDTH), labels)
    moved = [not torch.equal(a, b) for a, b in zip(ours.experts.proj, before, strict=True)]
    assert moved == [True, True, False]
    reaching = random(5, 6, WIDTH, seed=1)
    reaching[:, 0, 0] = 60.0
    train_step(opt, ours, reaching, labels)
    assert not torch.equal(ours.experts.proj[2], before[2])
    seen = opt.factors()["experts.proj"].A[2].clone()
    train_step(opt, ours, random(5, 6, WIDTH, seed=2), labels)
    assert torch.equal(opt.factors()["experts.proj"].A[2], seen)


@pytest.mark.parametrize("resumed", [False, True])
def test_an_expert_reached_while_others_are_inverted_has_not_failed(resumed):
    """Its inverse was not asked for: the lagging inversion that ends has nothing for it."""
    ours, _ = expert_nets()

    def kfac() -> KFAC:
        options = KFACOptions(inversion_lag=2)
        return KFAC(ours, 0.1, refresh_every=1, invert_every=4, damping=1.0, options=options)

    opt, labels = kfac(), labels_for(5, classes=CLASSES)
    for step in range(8):
        if resumed and step == 6:
            state, opt = copy.deepcopy(opt.state_dict()), kfac()
            opt.load_state_dict(state)
        x = random(5, 6, WIDTH, seed=step)
        if step == 5:  # the inversion that begins at step 4 ends at 6
            x[:, 0, 0] = 60.0
        train_step(opt, ours, x, labels)
    assert bool(opt.estimator.running.home["experts.proj"].ready.all())
    assert opt.check().failed_inversions == {}
    assert float(opt.dampings()["experts.proj"].max()) == 1.0


# -- layers that are met in functional calls --


class Direct(nn.Module):
    """A frozen convolution whose bias learns, used through `F.conv2d`, as in airbench."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.whiten, self.head = nn.Conv2d(2, 3, 2), nn.Linear(3, CLASSES)
        self.whiten.weight.requires_grad_(False)
        self.functional = functional

    def forward(self, x):
        layer = self.whiten
        out = F.conv2d(x, layer.weight, layer.bias) if self.functional else layer(x)
        return self.head(out.tanh().mean((2, 3)))


def test_a_bias_that_is_used_through_a_function_is_trained():
    batches = [(random(4, 2, 4, 4, seed=s), labels_for(4, classes=CLASSES)) for s in range(3)]
    models = [seeded(lambda use=use: Direct(functional=use)) for use in (True, False)]
    before = models[0].whiten.bias.detach().clone()
    assert_same_training(models, [("whiten.bias", "whiten.bias", plain)], batches)
    assert not torch.equal(models[0].whiten.bias, before)


def test_a_function_with_other_arguments_than_the_layers_is_refused():
    class Strided(Direct):
        def forward(self, x):
            out = F.conv2d(x, self.whiten.weight, self.whiten.bias, stride=2)
            return self.head(out.mean((2, 3)))

    model = seeded(lambda: Strided(functional=True))
    opt = KFAC(model, 0.1)
    cross_entropy(model(random(4, 2, 4, 4)), labels_for(4, classes=CLASSES)).backward()
    with refuses(Lacks, what="measured curvature for the gradient of layer 'whiten'"):
        opt.step()


def test_functions_are_torchs_own_again_after_an_error():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, CLASSES)

        def forward(self, x):
            if x.sum() > 100:
                raise ValueError("as models do")
            return self.first(x)

    model = seeded(Net)
    opt = KFAC(model, 0.1)
    before = F.linear
    with pytest.raises(ValueError, match="as models do"):
        model(torch.full((4, 3), 100.0).double())
    assert F.linear is before
    train_step(opt, model, random(4, 3), labels_for(4, classes=CLASSES))
    assert F.linear is before


class Subclass(nn.Conv2d):
    """As airbench's: its own arguments, torch's forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding="same", bias=False)


def test_a_subclass_that_inherits_forward_is_covered():
    def net(kind):
        return nn.Sequential(kind, nn.Tanh(), nn.Flatten(), nn.Linear(27, CLASSES))

    ours = seeded(lambda: net(Subclass(2, 3)))
    stock = seeded(lambda: net(nn.Conv2d(2, 3, 3, padding="same", bias=False)))
    x = random(4, 2, 3, 3)
    found, expected = measured(ours, x, KINDS[0]), naive(stock, x, KINDS[0])
    assert_close(found["0"], expected["0"])


# -- what is left out, and why --


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(5, 4, sparse=True)
        self.normed = nn.Embedding(5, 4, max_norm=1.0)
        self.scaled = nn.Embedding(5, 4, scale_grad_by_freq=True)
        self.attention = nn.MultiheadAttention(4, 2, kdim=5, vdim=5)
        self.head = nn.Linear(40, 40)


def test_reasons_of_what_is_left_out():
    found = KFAC(Left(), 0.1).coverage()
    assert found["sparse.weight"].reason is Reason.SPARSE
    assert found["normed.weight"].reason is Reason.RENORMALISED
    assert found["scaled.weight"].reason is Reason.BY_FREQUENCY
    assert found["attention.in_proj_bias"].reason is Reason.SHARED_BIAS
    assert found["attention.out_proj.weight"].block == "attention.out_proj"
    assert all(entry.explanation for entry in found.values())


def test_an_excluded_attention_is_left_out_whole():
    found = KFAC(Left(), 0.1, options=KFACOptions(exclude=("attention",))).coverage()
    reasons = {entry.reason for name, entry in found.items() if name.startswith("attention")}
    assert reasons == {Reason.EXCLUDED}


def test_less_than_half_covered_warns():
    model = nn.Sequential(nn.Bilinear(9, 9, 7), nn.Linear(7, 2))
    with pytest.warns(UserWarning, match=r"covers 3% .* '0\.weight' \(Bilinear"):
        KFAC(model, 0.1)
