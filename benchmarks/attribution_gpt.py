"""What carries weight decay's effect in a byte-level GPT, under AdamW and under Muon.

    python benchmarks/attribution_gpt.py [--optimizers adamw muon] [--steps 800] [--seeds 3]
                                         [--small] [--out FOLDER]

The model, data and schedule of benchmarks/gpt.py (10 million parameters; `--small`, for a CPU: 0.1
million), a loop that knows nothing of decaylab but `attribute`, and on a GPU `captured`. Decay is
on the matrices (embeddings and head included under AdamW), as nanoGPT has it. Metrics: held-out and
training loss in nats a byte, and the scale of the logits. Writes FOLDER/gpt-OPTIMIZER-10M.json
(`--small`: -small.json); arms that are finished are not trained again.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gpt import Muon, adamw, rate_at
from measuring import place
from models import GPT
from samples import python_sources, text_batches
from torch import Tensor, nn
from torch.nn import functional as F

import decaylab

SETTINGS = {"adamw": (2e-3, 1.0), "muon": (4e-3, 0.5)}
"""Learning rate and weight decay: over 800 steps decay acts about once (sum of lr wd)."""


def optimizers_for(name: str, model: nn.Module, *, cuda: bool) -> list[torch.optim.Optimizer]:
    """As people have them: no decay on gains and biases; Muon for the matrices of the layers."""
    lr, weight_decay = SETTINGS[name]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    if name == "adamw":
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return [adamw(groups, lr, weight_decay, cuda)]
    inside = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    known = set(map(id, inside))
    rest = [p for p in model.parameters() if id(p) not in known]
    return [Muon(inside, lr, weight_decay), adamw(rest, 2e-3, 0.0, cuda)]


def maker(name: str, data: tuple[Tensor, Tensor], options: argparse.Namespace) -> Any:
    """`make(seed)` for `attribute`."""
    device = data[0].device
    length, width, depth, heads = (64, 64, 2, 2) if options.small else (256, 384, 6, 6)
    count, batches = (16, 8) if options.small else (64, 16)

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = GPT(256, length, width, depth, heads).to(device)
        steppers = optimizers_for(name, model, cuda=device.type == "cuda")
        bases = [[float(group["lr"]) for group in o.param_groups] for o in steppers]
        draw = text_batches(data[0], count, length, seed + 1)
        taken = 0

        def logits_of(tokens: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                return model(tokens).float()

        def update(tokens: Tensor, following: Tensor) -> Tensor:
            loss = F.cross_entropy(logits_of(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        take = decaylab.captured(update, model, steppers) if device.type == "cuda" else update

        def step() -> Tensor:
            nonlocal taken
            for optimizer, base_lrs in zip(steppers, bases, strict=True):
                for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
                    group["lr"] = base * rate_at(taken, options.steps)
            taken += 1
            return take(*draw())

        @torch.no_grad()
        def evaluate() -> Mapping[str, float]:
            losses: dict[str, list[Tensor]] = {"held-out loss": [], "training loss": []}
            scales = []
            for metric, text in zip(losses, (data[1], data[0]), strict=True):
                windows = text_batches(text, count, length, 0)
                for _ in range(batches):
                    tokens, following = windows()
                    logits = logits_of(tokens)
                    losses[metric].append(
                        F.cross_entropy(logits.flatten(0, 1), following.flatten())
                    )
                    scales.append(logits.std(-1).mean())
            means = {metric: float(torch.stack(each).mean()) for metric, each in losses.items()}
            return {**means, "scale of the logits": float(torch.stack(scales).mean())}

        return model, steppers, step, evaluate

    return make


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/attribution"))
    parser.add_argument("--arms", type=Path, default=Path("runs/attribution"))
    options = parser.parse_args(given)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = python_sources(torch.device(options.device))
    options.out.mkdir(parents=True, exist_ok=True)

    for name in options.optimizers:
        size = "small" if options.small else "10M"
        result = decaylab.attribute(
            maker(name, data, options),
            steps=options.steps,
            seeds=options.seeds,
            folder=options.arms / f"gpt-{name}-{size}-{options.steps}",
        )
        print(f"\n{name}\n\n{result}\n", flush=True)
        lr, weight_decay = SETTINGS[name]
        about = {**place(options.device), "size": size, "lr": lr, "weight_decay": weight_decay}
        title = f"GPT ({size}), {name}"
        written = {"title": title, "about": about, **result.as_dict()}
        path = options.out / f"gpt-{name}-{size}.json"
        path.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
