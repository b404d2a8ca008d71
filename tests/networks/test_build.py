"""The networks: parameter counts by hand, shapes, initial weights, bad input."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.errors import Misplaced, OutOfRange, UnknownName
from decaylab.networks import NETWORKS, build, initialize_

GROUPS = (64, 128, 256, 512, 512)
VGG_CONVS = {"vgg11": 8, "vgg13": 10, "vgg16": 13, "vgg19": 16}
RESNET_BLOCKS = {"resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9}


def count(model):
    return sum(p.numel() for p in model.parameters())


def conv_count(inputs, outputs, size):
    return outputs * (inputs * size * size + 1)


def test_names():
    assert set(NETWORKS) == {"mlp", *VGG_CONVS, *RESNET_BLOCKS}


def test_vgg16_parameter_count_by_hand():
    channels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convs = sum(conv_count(a, b, 3) for a, b in pairwise(channels))
    # Batch normalisation has no parameters: the same count with and without.
    assert count(build("vgg16", classes=10)) == convs + 512 * 10 + 10
    assert count(build("vgg16", classes=10, batch_norm=False)) == convs + 512 * 10 + 10


@pytest.mark.parametrize("name", VGG_CONVS)
def test_vgg_depth(name):
    convs = [m for m in build(name, classes=7, width=1 / 64).modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == VGG_CONVS[name] == int(name[3:]) - 3
    assert [c.out_channels for c in convs] == sorted(c.out_channels for c in convs)


@pytest.mark.parametrize("name", RESNET_BLOCKS)
@pytest.mark.parametrize("width", [1.0, 1 / 8])
def test_resnet_parameter_count_by_hand(name, width):
    blocks = RESNET_BLOCKS[name]
    a, b, c = (round(width * channels) for channels in (64, 128, 256))
    expected = conv_count(3, a, 3) + 2 * blocks * conv_count(a, a, 3)
    for before, after in ((a, b), (b, c)):
        expected += conv_count(before, after, 3) + (2 * blocks - 1) * conv_count(after, after, 3)
        expected += conv_count(before, after, 1)
    expected += c * 100 + 100
    model = build(name, classes=100, width=width)
    assert count(model) == expected
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(layers) + 1 == int(name[6:])  # the name counts 3x3 convolutions and the head
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert len(strided) == 4  # two stage entries, each with its projection


@pytest.mark.parametrize("bias", [True, False])
def test_mlp_parameter_count_by_hand(bias):
    model = build("mlp", classes=10, in_channels=1, image_size=28, hidden=(30, 20), bias=bias)
    assert count(model) == 784 * 30 + 30 * 20 + 20 * 10 + bias * (30 + 20 + 10)
    assert not any(isinstance(m, nn.BatchNorm1d) for m in model.modules())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32), (3, 1)])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_shapes(name, channels, size, batch_norm):
    model = build(
        name,
        classes=5,
        in_channels=channels,
        image_size=size,
        width=1 / 32,
        batch_norm=batch_norm,
    )
    assert model(torch.randn(3, channels, size, size)).shape == (3, 5)


def test_vgg_head_takes_what_the_pools_leave():
    sizes = {8: 1, 28: 1, 32: 1, 64: 4, 96: 9}
    for size, pixels in sizes.items():
        assert (
            build("vgg11", classes=2, image_size=size, width=1 / 64).head.in_features == 8 * pixels
        )
    pools = {
        size: sum(
            isinstance(m, nn.MaxPool2d)
            for m in build("vgg11", classes=2, image_size=size, width=1 / 64).modules()
        )
        for size in (8, 28, 32)
    }
    assert pools == {8: 3, 28: 4, 32: 5}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_but_the_head_is_followed_by_plain_batch_norm(name):
    model = build(name, classes=4, width=1 / 32, batch_norm=True)
    order = [
        m
        for m in model.modules()
        if isinstance(m, nn.Conv2d | nn.Linear | nn.modules.batchnorm._BatchNorm)
    ]
    layers, head = order[:-1], order[-1]
    assert head is model.head
    for layer, norm in zip(layers[::2], layers[1::2], strict=True):
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        assert layer.bias is not None
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        assert (norm.affine, norm.eps, norm.momentum) == (False, 1e-3, 0.01)
    bare = build(name, classes=4, width=1 / 32, batch_norm=False)
    assert [n for n, _ in bare.named_parameters()] != []
    assert [p.shape for p in bare.parameters()] == [p.shape for p in model.parameters()]
    assert list(bare.buffers()) == []


def test_glorot_uniform_weights_and_zero_biases():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Linear(300, 200), nn.LayerNorm(5))
    for p in model.parameters():
        nn.init.constant_(p, 3.0)
    assert initialize_(model) is model
    fans = ((8 * 9, 32 * 9), (300, 200))
    for layer, (fan_in, fan_out) in zip(model[:2], fans, strict=True):
        bound = math.sqrt(6 / (fan_in + fan_out))
        draws = layer.weight.numel()
        assert layer.weight.abs().max() <= bound
        assert layer.weight.abs().max() > 0.99 * bound
        # U(-b, b): variance b^2 / 3, whose sample has standard deviation b^2 * sqrt(4 / 45 / n).
        error = abs(layer.weight.double().var().item() - bound**2 / 3)
        assert error < 4 * bound**2 * math.sqrt(4 / 45 / draws)
        assert abs(layer.weight.double().mean().item()) < 4 * bound / math.sqrt(3 * draws)
        assert layer.bias.count_nonzero() == 0
    assert (model[2].weight == 3.0).all()


def test_the_seed_decides_the_weights():
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build("vgg11", classes=10, width=1 / 32))
    first, same, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_linear_activation_without_bias_is_the_product_of_the_weights():
    model = build(
        "mlp",
        classes=3,
        in_channels=1,
        image_size=2,
        hidden=(5, 6),
        bias=False,
        activation="linear",
    ).double()
    product = torch.eye(4, dtype=torch.float64)
    for p in model.parameters():
        product = p @ product
    x = torch.randn(7, 1, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(model(x), x.flatten(1) @ product.T, rtol=1e-12, atol=1e-12)


def test_hidden_may_be_empty_and_width_scales_it():
    assert count(build("mlp", classes=10, in_channels=1, image_size=8, hidden=())) == 650
    model = build("mlp", classes=10, in_channels=1, image_size=8, hidden=(64, 3), width=1 / 8)
    assert [p.shape[0] for p in model.parameters() if p.ndim == 2] == [8, 1, 10]


@pytest.mark.parametrize(
    ("arguments", "kind", "fields"),
    [
        ({"name": "vgg17"}, UnknownName, {"kind": "network", "name": "vgg17"}),
        ({"name": "vgg16", "width": 0}, OutOfRange, {"name": "width"}),
        ({"name": "vgg16", "width": float("nan")}, OutOfRange, {"name": "width"}),
        ({"name": "resnet20", "width": -1.0}, OutOfRange, {"name": "width"}),
        ({"name": "mlp", "width": -1.0, "hidden": ()}, OutOfRange, {"name": "width"}),
        ({"name": "mlp", "hidden": (10, 0)}, OutOfRange, {"name": "hidden"}),
        ({"name": "mlp", "activation": "tanh"}, UnknownName, {"name": "tanh"}),
        ({"name": "vgg16", "activation": "linear"}, Misplaced, {"settings": ["activation"]}),
        ({"name": "vgg16", "classes": 0}, OutOfRange, {"name": "classes"}),
        ({"name": "vgg16", "image_size": 0}, OutOfRange, {"name": "image_size"}),
        ({"name": "vgg16", "batch_norm_eps": 0.0}, OutOfRange, {"name": "batch_norm_eps"}),
    ],
)
def test_bad_input_gets_a_sentence(arguments, kind, fields):
    with refuses(kind, **fields):
        build(**{"classes": 10, **arguments})


@pytest.mark.parametrize("name", ["mlp", "vgg11", "resnet20"])
@pytest.mark.parametrize("training", [True, False])
def test_a_bias_in_front_of_batch_norm_is_not_missed(name, training):
    """A net whose layers do add their biases computes the same, whatever the biases are."""
    size = {"mlp": 4, "vgg11": 32, "resnet20": 8}[name]
    ours = build(name, classes=3, image_size=size, width=0.125, batch_norm=True).double()
    for parameter_name, parameter in ours.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.normal_(parameter)
    plain = copy.deepcopy(ours)
    for module in plain.modules():
        if type(module).__name__ == "NormalisedConv2d":
            module.__class__ = nn.Conv2d
        elif type(module).__name__ == "NormalisedLinear":
            module.__class__ = nn.Linear
    images = torch.randn(16, 3, size, size, dtype=torch.float64)
    for model in (ours, plain):
        for _ in range(3):  # the running statistics of the plain one take its biases in
            model.train()(images)
        for norm in model.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.momentum = 1.0
        model.train()(images)
        model.train(training)
    torch.testing.assert_close(ours(images), plain(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_every_layer_has_a_kfac_block_with_its_bias(batch_norm):
    model = build("vgg11", classes=3, image_size=32, width=0.125, batch_norm=batch_norm)
    coverage = KFAC(model, 0.1).coverage()
    assert set(coverage) == {name for name, _ in model.named_parameters()}
    assert {c.method for c in coverage.values()} == {"kfac"}
