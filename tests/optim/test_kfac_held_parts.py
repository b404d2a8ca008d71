"""A layer of which only the weight, or only the bias, is trained for a while."""

import math
from functools import partial

import pytest
import torch
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import Tensor, nn

from decaylab.networks.layers import NormalisedConv2d

DAMPING = 0.1
KINDS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(54, 3)),
    "groups": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(54, 3)),
    "channels-last": lambda: KINDS["groups"]().to(memory_format=torch.channels_last),
}


def data() -> tuple[Tensor, Tensor]:
    return random(8, 4, 4, 4) + 1, labels_for(8, classes=3)  # a mean ties weight and bias together


def naive_step(factors, gradient: Tensor, moving: slice) -> Tensor:
    """[out, in + 1] of gradients to the step of the columns that move: their block, inverted."""
    A, S = (side if side.dim() == 3 else side[None] for side in (factors.A, factors.S))
    steps = []
    for a, s, part in zip(A, S, gradient.chunk(len(A)), strict=True):
        root, pi = (
            math.sqrt(DAMPING / factors.T),
            (a.trace() / len(a) / (s.trace() / len(s))).sqrt(),
        )
        a = (a + pi * root * torch.eye(len(a)).double())[moving, moving]
        s = s + root / pi * torch.eye(len(s)).double()
        part = part[:, moving]
        block = factors.T * torch.kron(s, a)
        steps.append(torch.linalg.solve(block, part.flatten()).view_as(part))
    return torch.cat(steps)


@pytest.mark.parametrize("kl_clip", [None, 1e-7])
@pytest.mark.parametrize("held", ["weight", "bias"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_other_part_moves_as_if_the_held_one_were_a_constant(kind, held, kl_clip):
    model, (x, y) = seeded(KINDS[kind]), data()
    options = {"momentum": 0.0, "damping": DAMPING, "outputs": "exact", "kl_clip": kl_clip}
    opt = KFAC(model, 0.1, refresh_every=100, **options)
    train_step(opt, model, x, y)  # with all gradients, of which nothing may be left
    layers = [m for m in model if not isinstance(m, nn.Flatten)]
    for layer in layers:
        getattr(layer, held).requires_grad_(False)
    cross_entropy(model(x), y).backward()
    moving = slice(-1, None) if held == "weight" else slice(-1)
    before = [(m.weight.detach().clone(), m.bias.detach().clone()) for m in layers]
    steps, gradients = [], []
    for factors, layer in zip(opt.factors().values(), layers, strict=True):
        parts = (p.grad if p.requires_grad else torch.zeros_like(p) for p in layer.parameters())
        gradient = torch.cat([p.reshape(len(p), -1) for p in parts], 1)
        steps.append(naive_step(factors, gradient, moving))
        gradients.append(gradient[:, moving])
    change = 0.1**2 * sum((g * s).sum() for g, s in zip(gradients, steps, strict=True))
    clip = 1.0 if kl_clip is None else min(1.0, math.sqrt(kl_clip / change))
    assert (clip < 0.9) == (kl_clip is not None)
    opt.step()
    for layer, old, step in zip(layers, before, steps, strict=True):
        moved, stays = (layer.weight, layer.bias) if held == "bias" else (layer.bias, layer.weight)
        was, kept = old if held == "bias" else old[::-1]
        assert torch.equal(stays, kept)
        expected = was.flatten(1) if was.dim() > 1 else was[:, None]
        expected = (expected - 0.1 * clip * step).view_as(was)
        torch.testing.assert_close(moved.detach(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("held", ["weight", "bias"])
def test_newtons_method_without_damping_ends_in_one_step(held):
    """Least squares: the best weight for the held bias, or the best bias for the held weight."""
    x, y = random(30, 3) + 3, random(30, 2, seed=1)
    model = seeded(lambda: nn.Linear(3, 2))
    options = {"curvature": "gauss-newton", "momentum": 0.0, "damping": 1e-12}
    opt = KFAC(model, 1.0, **EXACT, **options)
    getattr(model, held).requires_grad_(False)
    (model(x) - y).square().sum(1).mean().div(2).backward()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    opt.step()
    if held == "bias":
        weight = torch.linalg.lstsq(x, y - bias).solution.mT
    else:
        bias = (y - x @ weight.mT).mean(0)
    torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.bias.detach(), bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("held", ["weight", "bias"])
@pytest.mark.parametrize("max_factor_dim", [8192, 3])
def test_a_layer_that_was_not_seen_or_is_diagonal(held, max_factor_dim):
    """Without an inverse it is gradient descent; a diagonal ties no part to another."""
    model, x, y = seeded(lambda: nn.Linear(3, 2)), random(8, 3) + 3, labels_for(8, classes=2)
    opt = KFAC(model, 0.1, momentum=0.0, max_factor_dim=max_factor_dim, damping=DAMPING, **EXACT)
    getattr(model, held).requires_grad_(False)
    model(torch.full_like(x, torch.nan)).sum()  # measured, but of no use
    cross_entropy(model(x), y).backward()
    descended = [p.detach() - 0.1 * (0 if p.grad is None else p.grad) for p in model.parameters()]
    opt.step()
    for parameter, expected in zip(model.parameters(), descended, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=0)
    assert opt.check().skipped == 0
    before = [p.detach().clone() for p in model.parameters()]
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    parts = (torch.zeros_like(p) if p.grad is None else p.grad for p in (model.weight, model.bias))
    gradient = torch.cat([part.view(2, -1) for part in parts], 1)
    opt.step()
    moved = model.bias if held == "weight" else model.weight
    assert not torch.equal(moved, before[held == "weight"])
    if max_factor_dim == 3:
        factors = opt.factors()[""]
        a, s = factors.A, factors.S
        pi, root = (a.mean() / (s.trace() / len(s))).sqrt(), math.sqrt(DAMPING)
        step = torch.linalg.inv(s + root / pi * torch.eye(2).double()) @ gradient / (a + pi * root)
        part = slice(-1, None) if held == "weight" else slice(-1)
        expected = before[held == "weight"] - 0.1 * step[:, part].view_as(moved)
        torch.testing.assert_close(moved.detach(), expected, rtol=1e-10, atol=1e-12)


def normalised(kind: type[nn.Conv2d]) -> nn.Module:
    norm = nn.BatchNorm2d(6, affine=False)
    return nn.Sequential(kind(4, 6, 2), norm, nn.Flatten(), nn.Linear(54, 3))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bias_that_batch_normalisation_takes_away_moves_along(frozen):
    """It is trained and has no gradient: as the 1 in A it centres the inputs (recipe line 10)."""
    x, y = data()
    after = []
    for kind in (NormalisedConv2d, nn.Conv2d):
        model = seeded(partial(normalised, kind))
        model[0].bias.requires_grad_(not frozen)
        opt = KFAC(model, 0.1, damping=DAMPING, weight_decay=0.1, **EXACT)
        for _ in range(3):
            train_step(opt, model, x, y)
        after.append(model[0].weight.detach())
    torch.testing.assert_close(*after, rtol=1e-9, atol=1e-11)
