"""K-FAC's kinds of steps beside AdamW and Muon, on two small tasks.

    python benchmarks/step_kinds.py [--tasks gpt digits] [--steps 600] [--seeds 3]
                                    [--rates 0.001 ...] [--dampings 1.0 0.1] [--out FILE]

With h the gradient, P the damped inverse of the curvature, s the scaling to `step_rms` and
polar(U D V') = U V':

    rms        m <- mu m + s(P h),   W <- W - lr m                                 KFAC's default
    rms first  m <- mu m + h,        W <- W - lr s(P m)                            `momentum_first`
    spectral   m <- mu m + h,        W <- W - lr s(P^1/2 polar(P^1/2 (h + mu m)))  "spectral"

With plain momentum, m stands in the place of h + mu m, which is Nesterov's.

Each has every learning rate and damping (relative to the trace) on seed 0; the best setting by
held-out loss then has more seeds. The tasks: a byte-level GPT of two layers on Python's own
sources, and a convnet with batch norm on scikit-learn's digits. Embeddings and norms are Adam's, at
the same learning rate, and so is the head under Muon and in two of the kinds. Muon, which is for
matrices, is not tried on convolutions. Gauss-Newton, no decay. Warm-up over a tenth and a cosine to
a tenth. Training loss: the mean of the last tenth of the steps; losses in nats. What FILE holds
already is not trained again.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import EMBEDDINGS, adamw, optimizers_for, rate_at
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
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DAMPINGS = (1.0, 0.1)
SPECTRAL: dict[str, Any] = {"step_scaling": "spectral"}
ADAMS_HEAD = {"exclude": (*EMBEDDINGS, "head")}
KINDS = {
    "rms": {"step_scaling": "rms"},
    "rms first": {"step_scaling": "rms", "momentum_first": True},
    "spectral, plain momentum": SPECTRAL,
    "spectral": SPECTRAL,
    "spectral, Adam's head, plain momentum": SPECTRAL | ADAMS_HEAD,
    "spectral, Adam's head": SPECTRAL | ADAMS_HEAD,
}
LENGTH, WINDOWS, IMAGES, HELD_OUT = 64, 8, 64, 1024


def optimizers(model: nn.Module, row: Row) -> list[torch.optim.Optimizer]:
    """What a row names."""
    lr, kind = row["lr"], row["kind"]
    if kind == "adamw":
        return [adamw(model.parameters(), lr, 0.0, cuda=False)]
    if kind == "muon":
        return optimizers_for("muon", model, {"lr": lr, "weight_decay": 0.0}, cuda=False)
    settings = dict(KINDS[kind])
    options = KFACOptions(
        momentum_first=settings.pop("momentum_first", False),
        exclude=settings.pop("exclude", EMBEDDINGS) if isinstance(model, GPT) else (),
        others_betas=(0.9, 0.95),
    )
    settings |= {"damping": row["damping"], "damping_scaling": "trace", "others_lr": lr}
    kfac = KFAC(model, lr, curvature="gauss-newton", options=options, **settings)
    if "plain momentum" in kind:
        kfac.nesterov = False
    return [kfac]


def text() -> tuple[Callable[[], nn.Module], Callable[[int], Batches], Batches]:
    train, test = python_sources(torch.device("cpu"), 2**22)
    held_out = text_batches(test, HELD_OUT, LENGTH, 0)()  # drawn once: all are asked the same
    return (
        lambda: GPT(256, LENGTH, 32, 2, 2),
        lambda seed: text_batches(train, WINDOWS, LENGTH, seed + 1),
        lambda: held_out,
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


def trained(task: Any, row: Row) -> Row:
    make, batches, held_out = task
    steps = row["steps"]
    torch.manual_seed(row["seed"])
    model, draw = make(), batches(row["seed"])
    model(draw()[0])  # makes lazy layers
    stepped = optimizers(model, row)
    groups = [group for optimizer in stepped for group in optimizer.param_groups]
    bases = [float(group["lr"]) for group in groups]

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    losses, started = [], time.process_time()
    for number in range(steps):
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * rate_at(number, steps)
        loss = loss_of(*draw())
        loss.backward()
        for optimizer in stepped:
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
    """For each task, kind and damping: held-out losses by learning rate, then the best one's."""
    rates = sorted({row["lr"] for row in rows})
    last = ["best: training", "held-out"]
    lines = [["task", "steps", "damping", *(f"lr {lr}" for lr in rates), *last]]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by_task = sorted(rows, key=lambda row: tasks.index(row["task"]))
    for task, kind, damping in dict.fromkeys((r["task"], r["kind"], r["damping"]) for r in by_task):
        cell = [r for r in rows if (r["task"], r["kind"], r["damping"]) == (task, kind, damping)]
        losses = {r["lr"]: r["held_out"] for r in cell if r["seed"] == 0}
        best = [r for r in cell if r["lr"] == best_of(losses)]
        ends = [spread([r[key] for r in best]) for key in ("training", "held_out")]
        by_rate = (f"{losses.get(lr, math.nan):.3f}" for lr in rates)
        lines.append([task, kind, "" if damping is None else f"{damping}", *by_rate, *ends])
    return lines


def best_of(losses: dict[Any, float]) -> Any:
    """The setting with the smallest loss."""
    return min(losses, key=lambda key: losses[key] if math.isfinite(losses[key]) else math.inf)


def spread(numbers: list[float]) -> str:
    """Their mean, and how far they lie apart."""
    apart = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.3f}{apart} (n = {len(numbers)})"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3, help="of the best setting")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--dampings", nargs="+", type=float, default=list(DAMPINGS))
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    about = {"about": place(options.device)}
    known = options.out is not None and options.out.exists()
    rows: list[Row] = json.loads(options.out.read_text())["rows"] if known else []
    tasks = {name: TASKS[name]() for name in options.tasks}

    def run(task: str, kind: str, damping: float | None, lr: float, seed: int) -> float:
        row = {"task": task, "kind": kind, "damping": damping, "lr": lr, "seed": seed}
        row["steps"] = options.steps
        result = next((known for known in rows if row.items() <= known.items()), None)
        if result is None:
            result = attempt(row, lambda: trained(tasks[task], row))
            rows.append(result)
            save(options.out, {**about, "rows": rows})
        return result.get("held_out", math.nan)

    for task in tasks:
        first_order, kinds = ["adamw"], list(KINDS)
        if task == "gpt":
            first_order.append("muon")
        else:  # it has a head like other layers
            kinds = [kind for kind in kinds if "head" not in kind]
        plain: list[tuple[str, float | None]] = [(kind, None) for kind in first_order]
        for kind, damping in [*plain, *itertools.product(kinds, options.dampings)]:
            losses = {lr: run(task, kind, damping, lr, 0) for lr in options.rates}
            for seed in range(1, options.seeds):
                run(task, kind, damping, best_of(losses), seed)
    save(options.out, {**about, "rows": rows}, complete=True)
    for line in table(rows):
        print(" | ".join(line))


if __name__ == "__main__":
    main()
