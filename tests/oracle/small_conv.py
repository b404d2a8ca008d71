"""A small conv net and batches for it, for tests of how K-FAC sits in a loop."""

import torch
from oracle.kfac_runs import labels_for, random
from torch import nn

CLASSES = 3


def net(norm: bool = False):
    middle = [nn.BatchNorm2d(3)] if norm else []
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES)
    )


def data(seed: int = 0, size: int = 4):
    return random(size, 2, 4, 4, seed=seed), labels_for(size, classes=CLASSES, seed=seed)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
