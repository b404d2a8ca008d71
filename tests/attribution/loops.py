"""Small training loops on digits in float64, as `attribute` takes them."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64)[:, None] / 8 - 1
    return images, torch.tensor(data.target)


def batch_norm_net() -> nn.Module:
    """Two convolutions under BN; torch takes no eps of 0, and 1e-300 is as good."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.BatchNorm2d(6, eps=1e-300),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, bias=False),
        nn.BatchNorm2d(8, eps=1e-300),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    ).double()


def plain_net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24, bias=False), nn.Tanh(), nn.Linear(24, 10, bias=False)
    ).double()


class Trainer:
    """Makes loops, and keeps the directions of every layer after each step of each of them."""

    def __init__(self, net, optimizer, batch_size=64):
        self.net, self.optimizer, self.batch_size = net, optimizer, batch_size
        self.directions: list[list[dict[str, Tensor]]] = []

    def __call__(self, seed):
        torch.manual_seed(seed)
        model = self.net()
        optimizer = self.optimizer(model)
        several = optimizer if isinstance(optimizer, list) else [optimizer]
        images, labels = digits()
        order = torch.Generator().manual_seed(seed)
        taken: list[dict[str, Tensor]] = []
        start = directions(model)
        self.directions.append(taken)

        def step():
            chosen = torch.randint(1200, (self.batch_size,), generator=order)
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            for each in several:
                each.step()
                each.zero_grad()
            taken.append(directions(model))
            return loss.detach()

        def evaluate():
            with torch.no_grad():
                model.eval()
                evaluated = model(images[1200:])
                model.train()
                logits = model(images[1200:])
            accuracy = (logits.argmax(1) == labels[1200:]).double().mean()
            return {
                "test/loss": float(nn.functional.cross_entropy(logits, labels[1200:])),
                "test/loss in evaluation mode": float(
                    nn.functional.cross_entropy(evaluated, labels[1200:])
                ),
                "test/accuracy": float(accuracy),
                "turned": sum(
                    float((now - start[name]).norm()) for name, now in directions(model).items()
                ),
            }

        return model, optimizer, step, evaluate


def directions(model):
    return {
        name: p.detach() / p.detach().norm() for name, p in model.named_parameters() if p.ndim > 1
    }


def far_apart(one, other, layers):
    """The largest distance between two trajectories of directions, over steps and layers."""
    return max(
        float((a[name] - b[name]).norm())
        for a, b in zip(one, other, strict=True)
        for name in layers
    )


def decay_on(model, names, weight_decay):
    """Param groups in which only the named parameters decay."""
    chosen = [p for name, p in model.named_parameters() if name in names]
    rest = [p for name, p in model.named_parameters() if name not in names]
    return [
        {"params": chosen, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
