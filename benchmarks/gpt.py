"""A byte-level GPT on Python's own sources: AdamW, Muon and K-FAC, by steps and by seconds.

    python benchmarks/gpt.py [--optimizers adamw muon kfac spectral] [--steps 800] [--seeds 3]
                             [--only-grid] [--settings '{"lr": 0.002}' ...] [--tiny] [--out FILE]

10 million parameters (6 layers of 384, windows of 256 bytes, 64 a batch), bf16 autocast, warm-up
over a tenth and a cosine to a tenth of the learning rate. Each optimizer has a grid of at most
eight settings, one run each (seed 0); the best one by held-out loss is then run with more seeds.
All steps go through `decaylab.captured`. `--settings` replaces the grid of a single optimizer.
K-FAC's settings are its defaults where none is named (Gauss-Newton, decay 0.1); `exclude` leaves
layers to its Adam (lr 2e-3). *spectral* is K-FAC with step_scaling="spectral", embeddings and head
left to its Adam at the same learning rate, as Muon's are.

Held-out loss in nats a byte. Seconds are those of the steps alone, captures included. Muon is
torch's: its own orthogonalisation, with a learning rate that a graph can read (tested equal), on
the matrices of the layers; AdamW has the rest.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, place, save, wait
from models import GPT
from samples import python_sources, text_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

import decaylab
from decaylab.optim.kfac import KFAC
from decaylab.optim.options import KFACOptions

Row = dict[str, Any]
EMBEDDINGS = ("tokens", "places")
GRIDS: dict[str, list[Row]] = {
    "adamw": [
        {"lr": lr, "weight_decay": wd} for wd in (0.1, 0.3) for lr in (2e-3, 4e-3, 1e-3, 8e-3)
    ],
    "muon": [
        {"lr": lr, "weight_decay": wd} for wd in (0.1, 0.3) for lr in (4e-3, 2e-3, 8e-3, 1e-3)
    ],
    "kfac": [
        *(
            {"lr": lr, "damping": damping, "damping_scaling": "trace", "exclude": EMBEDDINGS}
            for damping in (1.0, 3.0, 0.3)
            for lr in (1e-3, 2e-3)
        ),
        {"lr": 1e-3, "damping": 1e-3, "exclude": EMBEDDINGS},
        {"lr": 1e-3},
    ],
    "spectral": [
        {"lr": lr, "damping": damping}
        for damping in (0.1, 0.03)
        for lr in (4e-3, 8e-3, 2e-3, 1.6e-2)
    ],
}
EVALUATED = 32  # batches


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon (adjust_lr_fn="match_rms_adamw") whose learning rate may be a tensor."""

    def __init__(self, params: Any, lr: Any, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Nesterov momentum, orthogonalised, with decoupled decay."""
        for group in self.param_groups:
            for p in group["params"]:
                state, momentum = self.state[p], group["momentum"]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                velocity = state["momentum_buffer"]
                velocity.lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(velocity, momentum)
                coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
                update = _zeropower_via_newtonschulz(update, coefficients, 5, 1e-7)
                rate = group["lr"] * (0.2 * math.sqrt(max(p.shape)))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(rate * update.float())


def adamw(parameters: Any, lr: float, weight_decay: float, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95), capturable=cuda
    )


def optimizers_for(
    name: str, model: nn.Module, setting: Row, *, cuda: bool
) -> list[torch.optim.Optimizer]:
    settings = dict(setting)
    if name == "adamw":
        return [adamw(model.parameters(), settings["lr"], settings["weight_decay"], cuda)]
    if name == "muon":
        inside = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
        known = set(map(id, inside))
        rest = [p for p in model.parameters() if id(p) not in known]
        return [
            Muon(inside, settings["lr"], settings["weight_decay"]),
            adamw(rest, settings["lr"], 0.0, cuda),
        ]
    if name == "spectral":
        settings |= {"step_scaling": "spectral", "damping_scaling": "trace"}
        settings |= {"exclude": (*EMBEDDINGS, "head"), "others_lr": settings["lr"]}
    rare = {key: settings.pop(key) for key in ("momentum_first", "exclude") if key in settings}
    options = KFACOptions(**rare, others_betas=(0.9, 0.95))
    common = {"curvature": "gauss-newton", "weight_decay": 0.1, "others_lr": 2e-3}
    return [KFAC(model, options=options, **{**common, **settings})]


def rate_at(step: int, steps: int) -> float:
    """Of the full learning rate: warm-up over a tenth, then a cosine to a tenth."""
    warm = steps // 10
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def trained(name: str, setting: Row, seed: int, data: Any, options: argparse.Namespace) -> Row:
    """Train; the held-out loss at the end and on the way, and the seconds."""
    device = data[0].device
    torch.manual_seed(seed)
    sizes = (64, 32, 2, 2) if options.tiny else (256, 384, 6, 6)
    length = sizes[0]
    model = GPT(256, length, *sizes[1:]).to(device)
    cuda = device.type == "cuda"
    steppers = optimizers_for(name, model, setting, cuda=cuda)
    count = 4 if options.tiny else 64
    draw = text_batches(data[0], count, length, seed + 1)

    def loss_of(tokens: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())

    def step(tokens: Tensor, following: Tensor) -> Tensor:
        loss = loss_of(tokens, following)
        loss.backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def held_out() -> float:
        windows = text_batches(data[1], count, length, 0)
        model.eval()
        with torch.no_grad():
            losses = [loss_of(*windows()) for _ in range(2 if options.tiny else EVALUATED)]
        model.train()
        return float(torch.stack(losses).mean())

    take = decaylab.captured(step, model, steppers)
    bases = [[float(group["lr"]) for group in o.param_groups] for o in steppers]
    curve, seconds = [], 0.0
    started = time.perf_counter()
    for number in range(options.steps):
        scale = rate_at(number, options.steps)
        for optimizer, base_lrs in zip(steppers, bases, strict=True):
            for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
                group["lr"] = base * scale
        loss = take(*draw())
        if (number + 1) % max(1, options.steps // 4) == 0:
            wait(device)
            seconds += time.perf_counter() - started
            curve.append({"step": number + 1, "seconds": seconds, "held_out": held_out()})
            wait(device)
            started = time.perf_counter()
            if not math.isfinite(float(loss)):
                break
    return {"held_out": curve[-1]["held_out"], "seconds": seconds, "curve": curve}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--settings", nargs="+", type=json.loads, help="JSON objects")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3, help="of the best setting")
    parser.add_argument("--only-grid", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = True
    data = python_sources(torch.device(options.device))
    about: Row = {"about": place(options.device), "bytes": len(data[0])}
    rows: list[Row] = []

    def run(name: str, setting: Row, seed: int) -> Row | None:
        if time.perf_counter() - began > options.max_seconds:
            print(f"out of time before {name} {setting} seed {seed}")
            return None
        row = {"optimizer": name, "setting": setting, "seed": seed, "steps": options.steps}
        rows.append(attempt(row, lambda: trained(name, setting, seed, data, options)))
        save(options.out, {**about, "rows": rows})
        last = rows[-1]
        outcome = last.get("error") or f"{last['held_out']:.4f} in {last['seconds']:.1f} s"
        print(f"{name:<6} {json.dumps(setting)} seed {seed}: {outcome}", flush=True)
        return last

    for name in options.optimizers:
        grid = options.settings or GRIDS[name]
        tried = [row for setting in grid if (row := run(name, setting, 0)) and "held_out" in row]
        finite = [row for row in tried if math.isfinite(row["held_out"])]
        if options.only_grid or not finite:
            continue
        best = min(finite, key=lambda row: row["held_out"])
        again = [best, *(run(name, best["setting"], seed) for seed in range(1, options.seeds))]
        losses = [row["held_out"] for row in again if row and "held_out" in row]
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        losses_words = f"{statistics.mean(losses):.4f} +- {spread:.4f} (n = {len(losses)})"
        print(f"{name}: best {json.dumps(best['setting'])}: {losses_words}", flush=True)
    save(options.out, {**about, "rows": rows}, complete=True)


if __name__ == "__main__":
    main()
