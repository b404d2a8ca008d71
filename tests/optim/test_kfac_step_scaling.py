"""Steps of a set size (`step_scaling="rms"`) and damping relative to the trace."""

import copy

import pytest
import torch
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from oracle.small_conv import CLASSES, data, flat, net
from torch import nn

import decaylab
from decaylab.errors import DecaylabError
from decaylab.optim.options import KFACOptions


def layers(model):
    return {name: m for name, m in model.named_modules() if hasattr(m, "weight")}


def moved(before, after, layer):
    """The change of a layer's weight and bias, as one vector."""
    pairs = zip(
        before.get_submodule(layer).parameters(),
        after.get_submodule(layer).parameters(),
        strict=True,
    )
    return torch.cat([(q - p).detach().flatten() for p, q in pairs])


def stepped_once(lr=0.1, **options):
    model = seeded(net)
    before = copy.deepcopy(model)
    opt = KFAC(model, lr, **{**EXACT, "damping": 1e-2, **options})
    train_step(opt, model, *data())
    return before, model


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rms", [0.2, 0.05])
def test_a_first_step_has_the_set_size_in_every_layer_and_the_direction_it_had(rms, first):
    options = KFACOptions(momentum_first=first)
    before, scaled = stepped_once(step_scaling="rms", step_rms=rms, options=options)
    _, plain = stepped_once()
    for layer in layers(before):
        step, direction = moved(before, scaled, layer), moved(before, plain, layer)
        assert abs(step.square().mean().sqrt() - 0.1 * rms) <= 1e-10
        assert abs(torch.cosine_similarity(step, direction, dim=0) - 1) <= 1e-10


@pytest.mark.parametrize("groups", [1, 2])
def test_each_group_of_a_convolution_is_a_block(groups):
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=groups, bias=False), nn.Flatten())
    model = seeded(lambda: model)
    before = model[0].weight.detach().clone()
    opt = KFAC(model, 1.0, step_scaling="rms", momentum=0.0)
    x = random(5, 2, 2, 2)
    train_step(opt, model, x, labels_for(5, classes=4))
    change = (model[0].weight.detach() - before).view(groups, -1)
    assert torch.allclose(change.square().mean(1).sqrt(), torch.tensor(0.2).double(), rtol=1e-9)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("still", ["frozen weight", "frozen bias", "unused bias"])
def test_what_does_not_move_is_no_part_of_a_steps_size(still, first):
    """A bias whose weight is frozen for a while would else move sqrt(in + 1) times as far."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 6), nn.Linear(6, CLASSES)
            self.biased = True

        def forward(self, x):
            bias = self.first.bias if self.biased else None
            return self.last(nn.functional.linear(x, self.first.weight, bias).tanh())

    model = seeded(Net)
    options = KFACOptions(momentum_first=first)
    opt = KFAC(model, 0.1, step_scaling="rms", momentum=0.0, options=options)
    train_step(opt, model, random(5, 8), labels_for(5, classes=CLASSES))
    model.biased = still != "unused bias"
    model.first.weight.requires_grad_(still != "frozen weight")
    model.first.bias.requires_grad_(still != "frozen bias")
    before = copy.deepcopy(model)
    train_step(opt, model, random(5, 8, seed=1), labels_for(5, classes=CLASSES, seed=1))
    change = moved(before, model, "first")
    moving = change != 0
    assert int(moving.sum()) == (6 if still == "frozen weight" else 48)
    assert abs(change[moving].square().mean().sqrt() - 0.02) <= 1e-10


def test_with_momentum_first_every_step_has_the_set_size():
    """Else the velocity is the sum of steps of that size."""
    options = KFACOptions(momentum_first=True)
    model = seeded(net)
    opt = KFAC(model, 0.1, step_scaling="rms", refresh_every=2, options=options)
    for i in range(6):
        before = copy.deepcopy(model)
        train_step(opt, model, *data(i))
        for layer in layers(model):
            assert abs(moved(before, model, layer).square().mean().sqrt() - 0.02) <= 1e-10


def test_velocities_are_those_of_momentum():
    model, other = seeded(net), seeded(net)
    opt = KFAC(model, 0.1, momentum=0.9, step_scaling="rms", **EXACT)
    by_hand = KFAC(other, 0.1, momentum=0.0, step_scaling="rms", **EXACT)
    velocity = 0
    for i in range(4):
        other.load_state_dict(model.state_dict())
        before = flat(model)
        train_step(opt, model, *data(i))
        train_step(by_hand, other, *data(i))
        velocity = 0.9 * velocity + (flat(other) - before)
        assert torch.allclose(flat(model) - before, velocity, atol=1e-12)


def test_a_layer_without_gradient_stays_and_a_step_that_is_not_finite_is_left_out():
    model = seeded(net)
    opt = KFAC(model, 0.1, step_scaling="rms", refresh_every=1)
    head = model[-1]
    for options in (KFACOptions(), KFACOptions(momentum_first=True)):
        opt = KFAC(model, 0.1, step_scaling="rms", refresh_every=1, options=options)
        train_step(opt, model, *data())
        before = flat(model)
        cross_entropy(model(data()[0]), data()[1]).backward()
        head.weight.grad.fill_(torch.inf)
        opt.step()
        opt.zero_grad()
        assert torch.equal(before, flat(model))
        assert opt.check().skipped == 1
        opt.detach()
    zero = nn.Linear(3, CLASSES, dtype=torch.float64)
    opt = KFAC(zero, 0.1, step_scaling="rms")
    before = flat(zero)
    loss = cross_entropy(zero(random(4, 3)), labels_for(4, classes=CLASSES)) * 0
    loss.backward()
    opt.step()
    assert torch.equal(before, flat(zero))


@pytest.mark.parametrize("first", [False, True])
def test_what_rounding_leaves_of_a_gradient_moves_nothing(first):
    """Below 1e-38 the factor to the set size is no float32: weights became infinite."""
    model = nn.Linear(3, CLASSES)
    opt = KFAC(model, 0.1, step_scaling="rms", options=KFACOptions(momentum_first=first))
    x, labels = torch.randn(4, 3), labels_for(4, classes=CLASSES)
    train_step(opt, model, x, labels)
    opt.param_groups[0]["momentum"] = 0.0
    before = flat(model)
    cross_entropy(model(x), labels).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(1e-30).mul_(1e-10)
        assert parameter.grad.any()
    opt.step()
    assert torch.allclose(before, flat(model), rtol=0, atol=1e-20)


def test_it_does_not_depend_on_the_scale_of_the_loss():
    """With damping relative to the trace, the whole step does not."""
    after = []
    for scale in (1.0, 100.0):
        model = seeded(net)
        opt = KFAC(
            model,
            0.1,
            curvature_scale=scale,
            damping=1e-2,
            damping_scaling="trace",
            step_scaling="rms",
            **EXACT,
        )
        for i in range(4):
            (scale * cross_entropy(model(data(i)[0]), data(i)[1])).backward()
            opt.step()
            opt.zero_grad()
        after.append(flat(model))
    assert torch.allclose(*after, rtol=1e-9, atol=1e-12)


def test_damping_relative_to_the_trace():
    model = seeded(net)
    opt = KFAC(model, 0.1, damping=1e-2, damping_scaling="trace", **EXACT)
    train_step(opt, model, *data())
    for name, factors in opt.factors().items():
        G = factors.S * factors.T
        eigenvalue = factors.A.diagonal().mean() * G.diagonal().mean()
        assert torch.allclose(opt.dampings()[name], 1e-2 * eigenvalue)


def test_what_is_refused():
    model = seeded(net)
    for options in (
        {"step_scaling": "rms", "kl_clip": 1e-3},
        {"step_scaling": "norm"},
        {"step_scaling": "rms", "step_rms": 0.0},
    ):
        with pytest.raises(DecaylabError):
            KFAC(model, 0.1, **options)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, (0.2, 1.0, "trace")),
        ({"damping": 0.03}, (0.2, 0.03, "fixed")),
        ({"damping_scaling": "trace"}, (0.2, 1.0, "trace")),
        ({"damping_scaling": "fixed"}, (0.2, 1e-3, "fixed")),
        ({"kl_clip": 1e-3}, (None, 1e-3, "fixed")),
        ({"step_scaling": "none"}, (None, 1e-3, "fixed")),
        ({"step_scaling": "none", "damping_scaling": "trace"}, (None, 1.0, "trace")),
    ],
)
def test_what_is_left_out(given, chosen):
    opt = decaylab.KFAC(seeded(net), **given)
    assert (opt.step_rms, opt.damping, opt.damping_scaling) == chosen
    assert opt.param_groups[0]["lr"] == 1e-3


def test_as_it_comes_it_trains_a_plain_net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3)
    )
    opt = decaylab.KFAC(model)
    x = torch.randn(64, 20) * 5
    y = x[:, :3].argmax(1)
    losses = []
    for _ in range(150):
        loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
