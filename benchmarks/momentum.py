"""K-FAC's momentum after preconditioning (ours) or before it, on two small tasks.

    python benchmarks/momentum.py [--tasks gpt digits] [--steps 600] [--seeds 3] [--rates 0.001 ...]
                                  [--out FILE]

With h the gradient, P the damped inverse of the curvature and s the scaling to `step_rms`:

    after    m <- mu m + s(P h),    W <- W - lr m           KFAC's default
    behind   m <- mu m + P h,       W <- W - lr s(m)        `KFACOptions(rms_behind_momentum=True)`
    before   m <- mu m + h,         W <- W - lr s(P m)

so that *behind* and *before* differ in the place of momentum alone: P is that of the time when a
gradient came in, or that of now. Each has every learning rate on seed 0; the best one by held-out
loss then has more seeds. The tasks: a byte-level GPT of two layers on Python's own sources, and a
convnet with batch norm on scikit-learn's digits. All settings but the learning rate are KFAC's
defaults. Warm-up over a tenth and a cosine to a tenth. Training loss: the mean of the last tenth of
the steps; losses in nats.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import rate_at
from measuring import attempt, place, save
from models import GPT
from samples import image_batches, python_sources, text_batches
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.data import load
from decaylab.optim.kfac import KFAC
from decaylab.optim.options import KFACOptions

Row = dict[str, Any]
Batches = Callable[[], tuple[Tensor, Tensor]]
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
PLACES = ("after", "behind", "before")
LENGTH, WINDOWS, IMAGES = 64, 8, 64


class MomentumFirst(KFAC):
    """The momentum of gradients, preconditioned; parameters outside the blocks are Adam's."""

    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.9, **more: Any) -> None:
        super().__init__(model, lr, momentum=0.0, **more)
        self._mu = momentum
        self._averages: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As KFAC's, with averages in the place of gradients."""
        groups = [group["params"] for group in self.param_groups if group["law"] == "kfac"]
        gradients = {p: p.grad for params in groups for p in params if p.grad is not None}
        for p, gradient in gradients.items():
            average = self._averages.setdefault(p, torch.zeros_like(p))
            p.grad = average.mul_(self._mu).add_(gradient)
        super().step(closure)
        for p, gradient in gradients.items():
            p.grad = gradient


def optimizer_for(momentum: str, model: nn.Module, lr: float) -> KFAC:
    if momentum == "before":
        return MomentumFirst(model, lr)
    return KFAC(model, lr, options=KFACOptions(rms_behind_momentum=momentum == "behind"))


def text() -> tuple[Callable[[], nn.Module], Callable[[int], Batches], Batches]:
    train, test = python_sources(torch.device("cpu"), 2**22)
    return (
        lambda: GPT(256, LENGTH, 32, 2, 2),
        lambda seed: text_batches(train, WINDOWS, LENGTH, seed + 1),
        text_batches(test, 16 * WINDOWS, LENGTH, 0),
    )


def digits() -> tuple[Callable[[], nn.Module], Callable[[int], Batches], Batches]:
    data = load("digits")
    train, test = (
        ((split.images.float() - 80) / 96, split.labels.long()) for split in (data.train, data.test)
    )

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(10),
        )

    return net, lambda seed: image_batches(train, IMAGES, seed + 1), lambda: test


TASKS = {"gpt": text, "digits": digits}


def trained(task: Any, momentum: str, lr: float, seed: int, steps: int) -> Row:
    make, batches, held_out = task
    torch.manual_seed(seed)
    model, draw = make(), batches(seed)
    model(draw()[0])  # makes lazy layers
    optimizer = optimizer_for(momentum, model, lr)
    bases = [float(group["lr"]) for group in optimizer.param_groups]

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    losses, started = [], time.process_time()
    for number in range(steps):
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * rate_at(number, steps)
        loss = loss_of(*draw())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    seconds = time.process_time() - started
    model.eval()
    with torch.no_grad():
        last = float(loss_of(*held_out()))
    training = statistics.mean(losses[-max(1, steps // 10) :])
    return {"training": training, "held_out": last, "seconds": seconds}


def table(rows: list[Row]) -> list[list[str]]:
    """For each task and place: held-out losses by learning rate on seed 0, then the best one's."""
    rates = sorted({row["lr"] for row in rows})
    lines = [["task", "momentum", *(f"lr {lr}" for lr in rates), "best: training", "held-out"]]
    for task, momentum in dict.fromkeys((row["task"], row["momentum"]) for row in rows):
        cell = [r for r in rows if (r["task"], r["momentum"]) == (task, momentum)]
        first = {r["lr"]: r["held_out"] for r in cell if r["seed"] == 0}
        best = [r for r in cell if r["lr"] == best_rate(first)]
        ends = [spread([r[key] for r in best]) for key in ("training", "held_out")]
        lines.append([task, momentum, *(f"{first.get(lr, math.nan):.3f}" for lr in rates), *ends])
    return lines


def best_rate(losses: dict[float, float]) -> float:
    return min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)


def spread(numbers: list[float]) -> str:
    """Their mean, and how far they lie apart."""
    apart = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.3f}{apart} (n = {len(numbers)})"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3, help="of the best learning rate")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    about = {"about": place(options.device)}
    rows: list[Row] = []
    tasks = {name: TASKS[name]() for name in options.tasks}

    def run(name: str, momentum: str, lr: float, seed: int) -> float:
        row = {"task": name, "momentum": momentum, "lr": lr, "seed": seed, "steps": options.steps}
        arguments = tasks[name], momentum, lr, seed, options.steps
        rows.append(attempt(row, lambda: trained(*arguments)))
        save(options.out, {**about, "rows": rows})
        return rows[-1].get("held_out", math.nan)

    for name, momentum in itertools.product(tasks, PLACES):
        losses = {lr: run(name, momentum, lr, 0) for lr in options.rates}
        for seed in range(1, options.seeds):
            run(name, momentum, best_rate(losses), seed)
    save(options.out, {**about, "rows": rows}, complete=True)
    for line in table(rows):
        print(" | ".join(line))


if __name__ == "__main__":
    main()
