"""Training a classifier of digits twice, with and without decay, watched and then diagnosed.

What `vit.py` and `resnet_affine.py` have in common; run those.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from decaylab import KFAC, diagnose, watch
from decaylab.probes import Watch

OPTIMIZERS = ("adamw", "sgd", "kfac-f", "kfac-g")
Build = Callable[[int, int], nn.Module]
"""(width, depth) to a model of images [batch, 1, 8, 8] that returns logits [batch, 10]."""


def optimizer_for(
    name: str, model: nn.Module, lr: float, weight_decay: float, kfac: dict[str, Any]
) -> torch.optim.Optimizer:
    """Decay on matrices and kernels alone, as is usual."""
    weights = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    curvature = "fisher" if name == "kfac-f" else "gauss-newton"
    return KFAC(model, lr, params=groups, curvature=curvature, step_scaling="none", **kfac)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [N, 1, 8, 8] and labels, test images and labels; a fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    x = (x - x.mean()) / x.std()
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, first = x[order], y[order], len(x) // 5
    return x[first:], y[first:], x[:first], y[:first]


def train(
    args: argparse.Namespace, build: Build, kfac: dict[str, Any], weight_decay: float
) -> tuple[Watch, float]:
    """One training; returns what was watched, and the accuracy on the test images."""
    torch.manual_seed(args.seed)
    x, y, test_x, test_y = digits()
    model = build(args.width, args.depth)
    optimizer = optimizer_for(args.optimizer, model, args.lr, weight_decay, kfac)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / args.steps))
    )
    if isinstance(optimizer, KFAC) and weight_decay:
        outside = [name for name, c in optimizer.coverage().items() if c.block is None]
        print(f"  outside K-FAC's blocks, stepped by Adam: {len(outside)}, as {outside[0]}")
    every = max(1, args.steps // 20)
    with watch(model, optimizer, every=every, probes="diagnosis", inputs=test_x[:32]) as watched:
        for step in range(args.steps):
            chosen = torch.randint(len(x), (args.batch,))
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            watched.log(loss=loss)
            if (step + 1) % max(1, args.steps // 10) == 0:
                print(f"  step {step + 1:4d}  training loss {loss.item():.3f}", flush=True)
        model.eval()
        with torch.no_grad():
            correct = model(test_x).argmax(1) == test_y
        accuracy = correct.float().mean().item()
        watched.log(test_accuracy=accuracy)
    return watched, accuracy


def main(
    name: str,
    build: Build,
    defaults: Mapping[str, tuple[float, float]],
    kfac: dict[str, Any],
    *,
    optimizer: str,
    width: int,
) -> None:
    """Train with and without decay, and say what it did.

    `defaults` has a learning rate and a weight decay for each optimizer, `kfac` K-FAC's options;
    `optimizer` and `width` are what is taken where none is asked for.
    """
    parser = argparse.ArgumentParser(description=f"What weight decay does to a {name}, on digits.")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=optimizer)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lr, weight_decay = defaults[args.optimizer]
    args.lr = lr if args.lr is None else args.lr
    args.weight_decay = weight_decay if args.weight_decay is None else args.weight_decay

    print(f"{name}, {args.optimizer}, weight decay {args.weight_decay:g}")
    decayed, accuracy = train(args, build, kfac, args.weight_decay)
    print("the same without decay")
    plain, plain_accuracy = train(args, build, kfac, 0.0)
    print(f"test accuracy: {accuracy:.1%} with decay, {plain_accuracy:.1%} without\n")
    print(diagnose(decayed, plain))
