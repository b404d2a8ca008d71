"""A scale-invariant layer under random gradients: of any optimizer, what each step does to it."""

import math

import torch
from torch import nn

from decaylab import watch

SIZE = 400


def angle(before, after):
    before, after = before.flatten(), after.flatten()
    along = float(before @ after / before.norm())
    return math.atan2(math.sqrt(max(float(after.square().sum()) - along**2, 0.0)), along)


def random_run(build, steps, start=1.0, clip=None, **settings):
    """Gradients (I - uu') xi / |W|, xi white: a watch, and |W| and the turn of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, SIZE // 20, bias=False), nn.BatchNorm1d(SIZE // 20))
    weight = model.double()[0].weight
    weight.data *= start / weight.data.norm()
    optimizer = build([weight], **settings)
    norms, turns = [], []
    with watch(model, optimizer, every=20) as watched:
        for _ in range(steps):
            before, noise = weight.detach().clone(), torch.randn_like(weight)
            unit = before / before.norm()
            weight.grad = (noise - (noise * unit).sum() * unit) / before.norm()
            if clip is not None:
                nn.utils.clip_grad_norm_([weight], clip)
            optimizer.step()
            norms.append(float(weight.detach().norm()))
            turns.append(angle(before, weight.detach()))
    return watched, norms, turns


def mean_square(values):
    return math.sqrt(sum(value**2 for value in values) / len(values))
