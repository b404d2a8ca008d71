"""Steps as large in every direction (`step_scaling="spectral"`), and momentum before curvature."""

import copy
import math

import pytest
import torch
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.small_conv import CLASSES, data, flat, net
from refusals import refuses
from torch import nn

from decaylab import KFAC, errors
from decaylab.curvature.inverses import invert_
from decaylab.curvature.polar import polar_factors
from decaylab.optim.options import KFACOptions


def rotation(size, seed):
    return torch.linalg.qr(random(size, size, seed=seed))[0]


@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 7, 4), (1, 5, 5), (3, 1, 6)])
def test_polar_factors_have_the_singular_vectors_and_singular_values_near_one(shape):
    matrices = random(*shape)
    U, _, V = torch.linalg.svd(matrices, full_matrices=False)
    inside = U.mT @ polar_factors(matrices) @ V.mT
    values = inside.diagonal(dim1=1, dim2=2)
    assert values.min() >= 0.68
    assert values.max() <= 1.14
    assert torch.allclose(inside, torch.diag_embed(values), atol=1e-10)


def test_how_far_small_singular_values_are_lifted():
    """Those of over a hundredth of the norm to about one; no other beyond 1.21, and zero not."""
    small = torch.cat([torch.zeros(1), torch.logspace(-6, 0, 3001)]).double()
    pairs = torch.stack([torch.ones_like(small), small], 1)
    lifted = polar_factors(torch.diag_embed(pairs)).diagonal(dim1=1, dim2=2)
    shares = pairs / pairs.norm(dim=1, keepdim=True)
    assert lifted[shares >= 0.01].min() >= 0.68
    assert lifted[shares >= 0.01].max() <= 1.14
    assert lifted.max() <= 1.21
    assert lifted[0, 1] == 0


def test_polar_factors_commute_with_rotations_and_know_no_scale():
    matrices, left, right = random(1, 4, 6), rotation(4, 1), rotation(6, 2)
    polar = polar_factors(matrices)
    assert torch.allclose(polar_factors(left @ matrices @ right), left @ polar @ right, atol=1e-12)
    assert torch.allclose(polar_factors(1e-6 * matrices), polar, atol=1e-12)
    assert torch.equal(polar_factors(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("size", [1, 6, 513, 1100])  # one block, two, and three
def test_roots_of_inverses(size):
    rows = random(2, size + 3, size)
    factors = rows.mT @ rows / size + torch.eye(size, dtype=torch.float64)
    roots = factors.clone().mT.contiguous().mT  # by columns, as banks hand them over
    assert invert_(roots, roots=True).all()
    identity = torch.eye(size, dtype=torch.float64).expand_as(factors)
    assert torch.allclose(roots.mT @ roots @ factors, identity, atol=1e-9)


def test_roots_of_diagonals_and_of_what_has_none():
    diagonals = random(2, 5).square() + 0.1
    roots = diagonals.clone()
    assert invert_(roots, roots=True).all()
    assert torch.allclose(roots.square() * diagonals, torch.ones(2, 5).double())
    broken = torch.stack([torch.eye(3).double(), -torch.eye(3).double()])
    assert invert_(broken, roots=True).tolist() == [True, False]


def inverse_root(matrix):
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(eigenvalues**-0.5) @ vectors.mT


def naive_step(weight, bias, factors, damping, rms):
    """By symmetric roots of each group's damped factors, one after the other."""
    groups = factors.A.shape[0] if factors.A.dim() == 3 else 1
    A, S = (
        factors.A.view(groups, *factors.A.shape[-2:]),
        factors.S.view(groups, -1, len(weight) // groups),
    )
    steps = []
    for i, (w, b) in enumerate(zip(weight.chunk(groups), bias.chunk(groups), strict=True)):
        gradient, G = torch.cat([w.flatten(1), b[:, None]], 1), S[i] * factors.T
        pi = math.sqrt(A[i].diagonal().mean() / G.diagonal().mean())
        left = inverse_root(G + math.sqrt(damping) / pi * torch.eye(len(G)).double())
        right = inverse_root(A[i] + math.sqrt(damping) * pi * torch.eye(len(A[i])).double())
        step = left @ polar_factors((left @ gradient @ right)[None])[0] @ right
        steps.append(step * rms / step.square().mean().sqrt())
    return torch.cat(steps)


@pytest.mark.parametrize(
    "build",
    [net, lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(36, 3))],
    ids=["conv", "groups"],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_step_equals_that_of_symmetric_roots(build, channels_last):
    """Which roots they are does not matter: ours are triangular."""
    model = seeded(build)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    opt = KFAC(model, 1.0, step_scaling="spectral", step_rms=0.3, damping=1e-2, **EXACT)
    before = copy.deepcopy(model)
    x, y = data()
    loss = cross_entropy(model(x), y)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    opt.step()
    for name, factors in opt.factors().items():
        layer, old = model.get_submodule(name), before.get_submodule(name)
        step = naive_step(
            gradients[f"{name}.weight"], gradients[f"{name}.bias"], factors, 1e-2, 0.3
        )
        moved = torch.cat(
            [(old.weight - layer.weight).flatten(1), (old.bias - layer.bias)[:, None]], 1
        )
        assert torch.allclose(moved, step, atol=1e-9)


def test_transposed_weights_take_the_same_steps():
    """As in Hugging Face's GPT-2, whose layers keep [in, out]."""
    from transformers.pytorch_utils import Conv1D

    linear = seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, CLASSES)))
    turned = nn.Sequential(Conv1D(9, 6), nn.Tanh(), Conv1D(CLASSES, 9)).double()
    with torch.no_grad():
        for i in (0, 2):
            turned[i].weight.copy_(linear[i].weight.T)
            turned[i].bias.copy_(linear[i].bias)
    for model in (linear, turned):
        opt = KFAC(model, 0.1, step_scaling="spectral", **EXACT)
        for i in range(3):
            train_step(opt, model, random(16, 6, seed=i), labels_for(16, classes=CLASSES, seed=i))
    for i in (0, 2):
        assert torch.allclose(turned[i].weight.T, linear[i].weight, atol=1e-10)
        assert torch.allclose(turned[i].bias, linear[i].bias, atol=1e-10)


def regression_step(opt, model, seed, inputs):
    """With targets that make gradients of full rank: noise in what has none would be blown up."""
    x, y = random(64, inputs, seed=seed).float(), random(64, 16, seed=seed + 100).float()
    (0.5 * (model(x) - y).square().sum(1).mean()).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("nesterov", [True, False])
def test_without_curvature_it_is_muon(nesterov):
    """With a damping that drowns the factors; torch's Muon computes in bfloat16."""
    torch.manual_seed(0)
    model = nn.Linear(24, 16, bias=False)
    other = copy.deepcopy(model)
    opt = KFAC(model, 0.01, step_scaling="spectral", damping=1e12, likelihood="gaussian")
    assert opt.nesterov
    opt.nesterov = nesterov
    muon = torch.optim.Muon(
        other.parameters(),
        0.01,
        weight_decay=0.0,
        momentum=0.9,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )
    for i in range(5):
        before = flat(model)
        regression_step(opt, model, i, 24)
        regression_step(muon, other, i, 24)
        ours, theirs = flat(model) - before, flat(other) - before
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999
        assert 0.8 < ours.norm() / theirs.norm() < 1.25  # their singular values are not quite one
        other.load_state_dict(model.state_dict())  # from the same place each time


def test_with_inverses_that_stay_the_place_of_momentum_does_not_matter():
    """Without a scaling, which is not linear: the velocities are the same but for the inverses."""
    ends = []
    for options in (KFACOptions(), KFACOptions(momentum_first=True)):
        model = seeded(net)
        opt = KFAC(model, 0.1, step_scaling="none", outputs="exact", options=options)
        for i in range(5):
            train_step(opt, model, *data(i))
        ends.append(flat(model))
    assert torch.allclose(*ends, atol=1e-10)


def test_momentum_first_meets_the_newest_inverses():
    """Equal to preconditioning, without momentum, an average kept by hand."""
    model, other = seeded(net), seeded(net)
    opt = KFAC(model, 0.1, options=KFACOptions(momentum_first=True), **EXACT)
    by_hand = KFAC(other, 0.1, momentum=0.0, **EXACT)
    averages = [torch.zeros_like(p) for p in other.parameters()]
    for i in range(4):
        train_step(opt, model, *data(i))
        cross_entropy(other(data(i)[0]), data(i)[1]).backward()
        for p, average in zip(other.parameters(), averages, strict=True):
            p.grad = average.mul_(0.9).add_(p.grad).clone()
        by_hand.step()
        by_hand.zero_grad()
    assert torch.allclose(flat(model), flat(other), atol=1e-12)


@pytest.mark.parametrize("by_columns", [False, True])
def test_spectral_steps_look_ahead_as_nesterov_does(by_columns):
    """Equal to spectral steps without momentum, of gradient + 0.9 average kept by hand."""
    model, other = seeded(net), seeded(net)
    if by_columns:  # not as the step lies in memory: what no fused kernel takes
        model[-1].weight.data = model[-1].weight.data.T.contiguous().T
    settings = {"step_scaling": "spectral", "weight_decay": 0.1, **EXACT}
    opt = KFAC(model, 0.1, **settings)
    by_hand = KFAC(other, 0.1, momentum=0.0, **settings)
    averages = [torch.zeros_like(p) for p in other.parameters()]
    for i in range(4):
        train_step(opt, model, *data(i))
        cross_entropy(other(data(i)[0]), data(i)[1]).backward()
        for p, average in zip(other.parameters(), averages, strict=True):
            p.grad += 0.9 * average.mul_(0.9).add_(p.grad)
        by_hand.step()
        by_hand.zero_grad()
    (pattern,) = opt._updater._patterns.values()
    assert pattern.alike == [not by_columns]
    assert torch.allclose(flat(model), flat(other), atol=1e-12)
    for p, average in zip(model.parameters(), averages, strict=True):
        assert torch.allclose(opt.state[p]["momentum_buffer"], average, atol=1e-12)


def test_a_gradient_that_is_not_finite_leaves_later_steps_alone():
    """They are those of a training that has not met it."""
    ends = []
    for broken in (False, True):
        model = seeded(net)
        opt = KFAC(model, 0.1, step_scaling="spectral", outputs="exact")
        for i in range(4):
            if broken and i == 2:
                cross_entropy(model(data(9)[0]), data(9)[1]).backward()
                model[-1].weight.grad[0, 0] = torch.inf
                opt.step()
                opt.zero_grad()
            train_step(opt, model, *data(i))
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_a_grad_scaler_changes_nothing():
    """Nor does a step that overflows: neither the weights nor the momentum see it."""
    model, plain = seeded(net).float(), seeded(net).float()
    settings = {"step_scaling": "spectral", "outputs": "exact"}
    opt, expected = KFAC(model, 0.05, **settings), KFAC(plain, 0.05, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in (0, 1, 9, 2, 3):
        x, y = data(i)
        scaler.scale(cross_entropy(model(x.float()), y)).backward()
        if i == 9:
            model[0].weight.grad.view(-1)[0] = torch.inf
        else:
            train_step(expected, plain, x.float(), y)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", ["rms", "spectral"])
def test_a_gradient_that_is_not_finite_leaves_the_momentum_alone(scaling):
    model = seeded(net)
    options = KFACOptions(momentum_first=True)
    opt = KFAC(model, 0.1, step_scaling=scaling, options=options)
    train_step(opt, model, *data())
    velocities = [opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    before = flat(model)
    cross_entropy(model(data()[0]), data()[1]).backward()
    model[-1].weight.grad[0, 0] = torch.nan
    opt.step()
    assert torch.equal(before, flat(model))
    assert opt.check().skipped == 1
    for p, velocity in zip(model.parameters(), velocities, strict=True):
        assert torch.equal(opt.state[p]["momentum_buffer"], velocity)


def test_held_norms_leave_a_momentum_of_gradients_alone():
    """With scale-free damping, norms are put back after each step."""
    model = seeded(lambda: net(norm=True))
    opt = KFAC(model, 0.1, step_scaling="spectral", damping_scaling="scale-free", **EXACT)
    weight = model[0].weight
    norm, momentum = weight.detach().norm(), torch.zeros_like(weight)
    for i in range(3):
        cross_entropy(model(data(i)[0]), data(i)[1]).backward()
        momentum = 0.9 * momentum + weight.grad
        opt.step()
        opt.zero_grad()
        assert torch.allclose(weight.detach().norm(), norm)
        assert torch.allclose(opt.state[weight]["momentum_buffer"], momentum, rtol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part_stays_and_the_other_has_the_set_size(frozen):
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES)))
    opt = KFAC(model, 0.1, step_scaling="spectral")
    train_step(opt, model, random(5, 8), labels_for(5, classes=CLASSES))
    getattr(model[0], frozen).requires_grad_(False)
    before = copy.deepcopy(model)
    train_step(opt, model, random(5, 8, seed=1), labels_for(5, classes=CLASSES, seed=1))
    other = "bias" if frozen == "weight" else "weight"
    assert torch.equal(getattr(before[0], frozen), getattr(model[0], frozen))
    change = getattr(model[0], other) - getattr(before[0], other)
    assert abs(change.detach().square().mean().sqrt() - 0.02) <= 1e-10


def test_half_precision_roots_are_near():
    """Sides of over 640 in float16, the others as they are."""

    def moved(half):
        torch.manual_seed(0)
        model = nn.Linear(700, 16)
        before = flat(model)
        options = KFACOptions(half_inverses=half)
        opt = KFAC(
            model,
            0.1,
            step_scaling="spectral",
            likelihood="gaussian",
            outputs="exact",
            options=options,
        )
        regression_step(opt, model, 0, 700)
        return flat(model) - before

    whole, half = moved(False), moved(True)
    assert not torch.equal(whole, half)
    assert torch.cosine_similarity(whole, half, dim=0) > 0.9999


def test_a_resumed_training_goes_on_bit_for_bit_and_other_states_are_refused():
    def trained(steps, opt, model, start=0):
        for i in range(start, start + steps):
            train_step(opt, model, *data(i))

    def new(model, **more):
        common = {"refresh_every": 2, "invert_every": 4, "outputs": "exact"}
        return KFAC(model, 0.1, **{"step_scaling": "spectral", **common, **more})

    model = seeded(net)
    opt = new(model)
    trained(5, opt, model)
    resumed = copy.deepcopy(model)
    state = copy.deepcopy(opt.state_dict())
    trained(5, opt, model, 5)
    again = new(resumed)
    again.load_state_dict(state)
    trained(5, again, resumed, 5)
    assert torch.equal(flat(model), flat(resumed))
    with refuses(errors.Mismatch, what="step_scaling"):
        new(resumed, step_scaling="rms").load_state_dict(state)
    first = new(resumed, step_scaling="rms", options=KFACOptions(momentum_first=True))
    with refuses(errors.Mismatch, what="momentum_first"):
        new(resumed, step_scaling="rms").load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("given", "chosen"),
    [({}, (0.2, 0.1, "trace")), ({"damping": 0.03}, (0.2, 0.03, "fixed"))],
)
def test_what_is_left_out(given, chosen):
    opt = KFAC(seeded(net), step_scaling="spectral", **given)
    assert (opt.step_rms, opt.damping, opt.damping_scaling) == chosen
    assert opt.momentum_first
    with refuses(errors.Conflict, settings=["step_scaling='spectral'", "kl_clip"]):
        KFAC(seeded(net), step_scaling="spectral", kl_clip=1e-3)


def test_the_default_learning_rate_goes_by_the_kind_of_steps():
    def rates(**options):
        return {group["lr"] for group in KFAC(net(), others="sgd", **options).param_groups}

    assert rates(step_scaling="spectral") == {1e-2}
    assert rates() == rates(kl_clip=1e-3) == {1e-3}
    assert rates(lr=0.5, step_scaling="spectral") == {0.5}
