"""The decay that `advise suggest` proposes for a byte-level GPT, against a sweep.

    python benchmarks/advice.py [--steps 800] [--seeds 3] [--small] [--sweep FILE] [--out FILE]

The model, data and schedule of benchmarks/gpt.py under AdamW (10 million parameters; `--small`, for
a CPU: 0.1 million). First a run without decay, watched; `suggest` reads its records and nothing
else. Then the suggested decay, on the layers that it is suggested for and on every matrix, beside
0, 0.01, 0.1 and 1 on every matrix, all with the same seeds. Held-out loss in nats a byte. The
record also has the norms at the end, to be held against those that the suggestion foretold.
`--sweep`: take the runs of the sweep from an earlier record instead of training them again.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt import adamw, rate_at
from measuring import attempt, place
from models import GPT
from samples import python_sources, text_batches
from torch import Tensor, nn
from torch.nn import functional as F

import decaylab
from decaylab.diagnosis import Suggestion, suggest
from decaylab.probes import FREE

Row = dict[str, Any]
SWEEP = (0.0, 0.01, 0.1, 1.0)
LR = 2e-3
RECORDS = 40  # in a watched run


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of linear layers and embeddings, by the names of their layers."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }


def decay_groups(model: nn.Module, decays: Mapping[str, float]) -> list[Row]:
    """Parameter groups with these decays by layer; what is not named has none."""
    values: dict[float, list[nn.Parameter]] = {}
    weights = matrices(model)
    named = {id(weights[layer]): decay for layer, decay in decays.items()}
    for parameter in model.parameters():
        values.setdefault(named.get(id(parameter), 0.0), []).append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in values.items()]


def trained(
    decays: float | Mapping[str, float],
    seed: int,
    data: tuple[Tensor, Tensor],
    options: argparse.Namespace,
    folder: Path | None = None,
) -> Row:
    """Train; held-out loss, the norms at the end, seconds. `decays`: of every matrix, or by layer.

    With a `folder`, everything that a diagnosis needs is recorded there.
    """
    device = data[0].device
    cuda = device.type == "cuda"
    length, width, depth, heads = (64, 64, 2, 2) if options.small else (256, 384, 6, 6)
    count, batches = (16, 8) if options.small else (64, 32)
    torch.manual_seed(seed)
    model = GPT(256, length, width, depth, heads).to(device)
    weights = matrices(model)
    by_layer = decays if isinstance(decays, Mapping) else dict.fromkeys(weights, decays)
    optimizer = adamw(decay_groups(model, by_layer), LR, 0.0, cuda)
    draw = text_batches(data[0], count, length, seed + 1)

    def loss_of(tokens: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())

    def update(tokens: Tensor, following: Tensor) -> Tensor:
        loss = loss_of(tokens, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def held_out() -> float:
        windows = text_batches(data[1], count, length, 0)
        return float(torch.stack([loss_of(*windows()) for _ in range(batches)]).mean())

    watched = None
    if folder is not None:
        inputs, _ = text_batches(data[1], 4, length, 0)()
        probes = [*FREE, "size_response"]
        every = max(1, options.steps // RECORDS)
        watched = decaylab.watch(
            model, optimizer, every=every, probes=probes, inputs=inputs, folder=folder
        )
    take = decaylab.captured(update, model, [optimizer]) if cuda else update
    started = time.perf_counter()
    for number in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * rate_at(number, options.steps)
        take(*draw())
    loss = held_out()
    seconds = time.perf_counter() - started
    if watched is not None:
        watched.log(test_loss=loss)
        watched.detach()
    norms = {layer: float(weight.detach().norm()) for layer, weight in weights.items()}
    return {"held_out": loss, "seconds": seconds, "norms": norms}


def by_layer(suggestion: Suggestion) -> dict[str, float]:
    """The suggested decay of each layer that has one: its group's."""
    return {layer: g.weight_decay for g in suggestion.groups for layer in g.layers}


def as_record(suggestion: Suggestion) -> Row:
    """What was suggested, and the norms that it should lead to."""
    return {
        "budget": suggestion.budget,
        "groups": [
            {
                "layers": list(group.layers),
                "weight_decay": group.weight_decay,
                "spread": list(group.spread),
                "lr": group.lr,
            }
            for group in suggestion.groups
        ],
        "layers": [
            {"layer": row.layer, "suggested": row.suggested, "target": row.target}
            for row in suggestion.layers
        ],
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep", type=Path, help="a record of an earlier sweep")
    parser.add_argument("--small", action="store_true", help="for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/advice/gpt.json"))
    options = parser.parse_args(given)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = python_sources(torch.device(options.device))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        **place(options.device),
        "size": "small" if options.small else "10M",
        "steps": options.steps,
        "lr": LR,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        row = {"decay": "0", "weight_decay": 0.0, "seed": 0}
        rows.append(attempt(row, partial(trained, 0.0, 0, data, options, Path(folder))))
        suggestion = suggest(Path(folder))
    suggested = by_layer(suggestion)
    if not suggested:
        raise SystemExit(f"nothing was suggested: {suggestion.as_dict()['notes']}")
    common = statistics.geometric_mean(suggested.values())
    arms: dict[str, float | Mapping[str, float]] = {
        "suggested": suggested,
        "suggested, on every matrix": common,
        **{f"{value:g}": value for value in SWEEP},
    }
    if options.sweep is not None:
        known = json.loads(options.sweep.read_text())
        if any(known["about"][key] != about[key] for key in ("device", "size", "steps", "lr")):
            raise SystemExit(f"{options.sweep} is of other runs: {known['about']}")
        rows = [row for row in known["rows"] if row["decay"] in map("{:g}".format, SWEEP)]
        arms = {name: decays for name, decays in arms.items() if name.startswith("suggested")}

    part = options.out.with_name(options.out.name + ".part")  # until all is there

    def write() -> None:
        result = {"about": about, "suggestion": as_record(suggestion), "rows": rows}
        part.write_text(json.dumps(result, indent=1) + "\n")

    print(f"suggested: {common:.4g} for {len(suggested)} layers", flush=True)
    # seed by seed, so that a benchmark cut short leaves whole sweeps
    for seed in range(options.seeds):
        for name, decays in arms.items():
            if (name, seed) == ("0", 0):
                continue
            value = common if isinstance(decays, Mapping) else decays
            row = {"decay": name, "weight_decay": value, "seed": seed}
            rows.append(attempt(row, partial(trained, decays, seed, data, options)))
            write()
    part.replace(options.out)
    for name in dict.fromkeys(row["decay"] for row in rows):
        losses = [row.get("held_out", math.nan) for row in rows if row["decay"] == name]
        spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
        print(f"{name}: {statistics.mean(losses):.4f} +- {spread:.4f} (n = {len(losses)})")


if __name__ == "__main__":
    main()
