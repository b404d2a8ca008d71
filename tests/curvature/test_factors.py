"""The factors of every kind of layer equal the naive ones: float64, 1e-10, shapes by hypothesis."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle.kfac import naive_factors, vectors_for
from oracle.kfac_runs import (
    assert_same_factors,
    cross_entropy,
    labels_for,
    library_factors,
    random,
    seeded,
)
from oracle.plain_kfac import KFAC
from torch import nn

CLASSES = 3
KINDS = [("fisher", "categorical"), ("fisher", "bernoulli"), ("gauss-newton", "categorical")]
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
draws = settings(max_examples=25, deadline=None)


def check(model: nn.Module, x, kind=("fisher", "categorical"), **options) -> None:
    curvature, likelihood = kind
    naive = naive_factors(
        copy.deepcopy(model), x, vectors_for(*kind), sharing=options.get("sharing", "expand")
    )
    ours = library_factors(model, x, curvature=curvature, likelihood=likelihood, **options)
    assert_same_factors(ours, naive)


# -- linear layers --


@given(
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    bias=st.booleans(),
    inplace=st.booleans(),
)
@draws
def test_linear(kind, batch, sizes, bias, inplace):
    def build():
        layers, width = [], 4
        for size in sizes:
            layers += [nn.Linear(width, size, bias=bias), nn.LeakyReLU(0.3, inplace=inplace)]
            width = size
        return nn.Sequential(*layers, nn.Linear(width, CLASSES, bias=bias))

    check(seeded(build), random(batch, 4), kind)


class Pooled(nn.Module):
    """A sequence model with one row of logits per sequence: T = length."""

    def __init__(self, bias: bool, axes: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=bias)
        self.second = nn.Linear(4, 3, bias=bias)
        self.head = nn.Linear(3, CLASSES)
        self.axes = tuple(range(1, 1 + axes))

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh().mean(self.axes))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@given(
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    bias=st.booleans(),
)
@draws
def test_sequences_pooled_to_one_row(sharing, kind, batch, lengths, bias):
    model = seeded(lambda: Pooled(bias, len(lengths)))
    check(model, random(batch, *lengths, 3), kind, sharing=sharing)


def test_pooled_sequences_have_t_equal_to_their_length():
    factors = library_factors(seeded(lambda: Pooled(True, 1)), random(4, 7, 3))
    assert float(factors["first"].T) == 7
    assert float(factors["head"].T) == 1
    reduced = library_factors(seeded(lambda: Pooled(True, 1)), random(4, 7, 3), sharing="reduce")
    assert float(reduced["first"].T) == 1


@given(
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 3),
    length=st.integers(1, 4),
    bias=st.booleans(),
)
@draws
def test_token_level_models(kind, batch, length, bias):
    """Logits [B, T, C]: every token is a row, so T of a token-wise layer is one."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, CLASSES, bias=bias)
        )
    )
    check(model, random(batch, length, 3), kind)


@given(batch=st.integers(1, 3), length=st.integers(2, 4), seed=st.integers(0, 99))
@draws
def test_masked_rows_do_not_count(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, length, generator=generator) < 0.6
    assume(mask.any())
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    x, y = random(batch, length, 3), labels_for(batch, length, classes=CLASSES)
    vectors = vectors_for("fisher", "categorical")
    naive = naive_factors(model, x, vectors, mask=mask)
    x[~mask] = 1e3  # what stands in the padded places does not matter
    opt = KFAC(model, 0.1, outputs="exact", logits="observed")
    logits = model(x)
    opt.observe(logits, mask=mask)
    cross_entropy(logits[mask], y[mask]).backward()
    opt.step()
    assert_same_factors(opt.factors(), naive)


# -- convolutions --


@st.composite
def convolutions(draw, dimensions: int):
    """A convolution and an image that it fits on."""
    kernel = draw(st.tuples(*[st.integers(1, 3 if dimensions < 3 else 2)] * dimensions))
    dilation = draw(st.tuples(*[st.integers(1, 2)] * dimensions))
    groups = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(
        st.sampled_from(["same", "valid"]) | st.tuples(*[st.integers(0, 2)] * dimensions)
    )
    stride = (
        (1,) * dimensions
        if padding == "same"
        else draw(st.tuples(*[st.integers(1, 2)] * dimensions))
    )
    span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(s, 3) + draw(st.integers(0, 2 if dimensions < 3 else 0)) for s in span)
    arguments = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": mode,
    }
    return arguments, size


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_convolution(dimensions, data):
    arguments, size = data.draw(convolutions(dimensions))
    batch = data.draw(st.integers(1, 3))
    inplace = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(KINDS))
    sharing = data.draw(st.sampled_from(["expand", "reduce"]))
    x = random(batch, arguments["in_channels"], *size)

    def build():
        conv = CONVOLUTIONS[dimensions](**arguments)
        features = conv(x[:1].float()).numel()
        head = nn.Linear(features, CLASSES)
        return nn.Sequential(conv, nn.LeakyReLU(0.3, inplace=inplace), nn.Flatten(), head)

    check(seeded(build), x, kind, sharing=sharing)


def small_conv_net(inplace: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(4, 4, 3, stride=2, padding="valid", groups=2, bias=False),
        nn.ReLU(inplace=inplace),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_of_several_convolutions(kind):
    check(seeded(small_conv_net), random(3, 2, 6, 5), kind)


def test_t_is_the_number_of_output_positions():
    """T of a conv is its number of output positions, whatever the batch and the image size."""
    for batch, height, width in [(1, 6, 5), (5, 6, 5), (3, 7, 9)]:
        factors = library_factors(seeded(small_conv_net), random(batch, 2, height, width))
        assert float(factors["0"].T) == height * width
        assert float(factors["2"].T) == ((height - 3) // 2 + 1) * ((width - 3) // 2 + 1)


def same(left, right, tolerance=1e-12) -> bool:
    return all(
        (left[name].A - right[name].A).abs().max() <= tolerance
        and (left[name].S - right[name].S).abs().max() <= tolerance
        and left[name].T == right[name].T
        for name in left
    )


def test_in_place_relu_gives_equal_factors():
    x = random(3, 2, 6, 5)
    outside = library_factors(seeded(lambda: small_conv_net(False)), x)
    inside = library_factors(seeded(lambda: small_conv_net(True)), x)
    assert same(outside, inside)


def test_channels_last_gives_equal_factors():
    model, x = seeded(small_conv_net), random(3, 2, 6, 5)
    plain = library_factors(model, x)
    last = model.to(memory_format=torch.channels_last)
    assert same(plain, library_factors(last, x.to(memory_format=torch.channels_last)))


def test_order_of_the_input_side_is_that_of_the_flattened_weight():
    """A is asymmetric in (C, kh, kw): the diagonal is the mean square of each patch entry."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 2, (1, 2)), nn.Flatten(), nn.Linear(4, 2)))
    x = torch.zeros(1, 2, 1, 3, dtype=torch.float64)
    x[0, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    x[0, 1, 0] = torch.tensor([10.0, 20.0, 30.0])
    A = library_factors(model, x)["0"].A
    # patches at the two positions: (1, 2, 10, 20, 1) and (2, 3, 20, 30, 1)
    expected = torch.tensor([2.5, 6.5, 250.0, 650.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(A.diagonal(), expected)
    assert A[-1, 0] == 1.5


# -- the empirical Fisher --


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("inplace", [False, True])
def test_empirical_fisher_uses_the_labels_of_the_data(reduction, sharing, inplace):
    model, x = seeded(lambda: small_conv_net(inplace)), random(3, 2, 6, 5)
    y = labels_for(3, classes=CLASSES)
    naive = naive_factors(
        copy.deepcopy(model), x, vectors_for("empirical-fisher", "categorical", y), sharing=sharing
    )
    opt = KFAC(model, 0.1, curvature="empirical-fisher", reduction=reduction, sharing=sharing)
    cross_entropy(model(x), y, reduction).backward()
    opt.step()
    assert_same_factors(opt.factors(), naive)


def test_empirical_fisher_of_a_token_level_model():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    x, y = random(2, 3, 3), labels_for(2, 3, classes=CLASSES)
    naive = naive_factors(
        copy.deepcopy(model), x, vectors_for("empirical-fisher", "categorical", y)
    )
    opt = KFAC(model, 0.1, curvature="empirical-fisher")
    cross_entropy(model(x), y).backward()
    opt.step()
    assert_same_factors(opt.factors(), naive)


# -- scale, frozen parts and repeated use --


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton", "empirical-fisher"])
def test_curvature_scale_multiplies_the_block(curvature):
    model, x = seeded(small_conv_net), random(3, 2, 6, 5)
    y = labels_for(3, classes=CLASSES)
    one = library_factors(model, x, y, curvature=curvature)
    two = library_factors(model, x, y, curvature=curvature, curvature_scale=2.0)
    for name in one:
        left = float(two[name].T) * two[name].A.mean() * two[name].S
        right = 2 * float(one[name].T) * one[name].A.mean() * one[name].S
        torch.testing.assert_close(left, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_layer_with_one_trainable_part(frozen, memory):
    """Bias only: A = [[1]]; weight only: no homogeneous coordinate."""
    model = seeded(small_conv_net).to(memory_format=memory)
    getattr(model[0], frozen).requires_grad_(False)
    getattr(model[6], frozen).requires_grad_(False)
    x = random(3, 2, 6, 5)
    check(model, x)
    A = library_factors(model, x)["6"].A
    assert A.shape == ((1, 1) if frozen == "weight" else (4, 4))


class Twice(nn.Module):
    """The same layer at two places of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.shared(self.shared(x).tanh()).tanh())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_layer_used_twice_has_twice_the_positions(sharing):
    model, x = seeded(Twice), random(3, 4)
    check(model, x, sharing=sharing)
    if sharing == "expand":
        assert float(library_factors(model, x)["shared"].T) == 2


def test_a_grouped_convolution_used_twice():
    class TwiceGrouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Conv1d(4, 4, 3, padding=1, groups=2)
            self.head = nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.head(self.shared(self.shared(x).tanh()).mean(2))

    check(seeded(TwiceGrouped), random(3, 4, 5))


def test_a_bias_behind_one_input_whose_weight_is_frozen():
    """The input side is as long as with the weight alone, and holds the 1 of the bias."""
    model = seeded(lambda: nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, CLASSES)))
    model[0].weight.requires_grad_(False)
    check(model, random(3, 1))
