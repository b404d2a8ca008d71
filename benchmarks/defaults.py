"""K-FAC as it comes: with nothing but a model, on nets that people train, beside AdamW.

    python benchmarks/defaults.py [--nets lenet mlp vgg vgg-bn resnet18 vit gpt] [--seeds 3]
                                  [--settings '{}' '{"lr": 0.001}' ...] [--cifar10]
                                  [--steps 300] [--tiny] [--out FILE]

A constant learning rate, batches of 128, no schedule, no warm-up: what somebody gets who has just
replaced the optimizer. K-FAC's settings are its defaults (`--settings` tries others); AdamW has the
better of two learning rates for each net. Training loss: the mean of the last tenth of the steps;
held-out loss: on data that was not trained on. A run failed if a loss is not finite or the training
loss has not fallen to nine tenths of its start.

The defaults were found on FOUND_ON alone and confirmed on the other nets.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, place, save, wait
from models import GPT, ViT, lenet, mlp, resnet, vgg
from samples import cifar10, image_batches, python_sources, templates, text_batches
from torch import Tensor, nn
from torch.nn import functional as F

import decaylab
from decaylab.optim.kfac import KFAC

Row = dict[str, Any]
Cells = dict[tuple[str, str], list[Row]]  # by optimizer and setting
NETS: dict[str, Callable[[bool], nn.Module]] = {
    "lenet": lambda tiny: lenet(3, 10, 32),
    "mlp": lambda tiny: mlp(3 * 32 * 32, 10, 32 if tiny else 256),
    "vgg": lambda tiny: vgg(3, 10, batch_norm=False, width=8 if tiny else 64),
    "vgg-bn": lambda tiny: vgg(3, 10, batch_norm=True, width=8 if tiny else 64),
    "resnet18": lambda tiny: resnet(3, 10, (2, 2, 2, 2), width=8 if tiny else 64),
    "vit": lambda tiny: ViT(3, 10, 32, 4, *((32, 2, 2) if tiny else (192, 6, 3))),
    "gpt": lambda tiny: GPT(256, 64, *((32, 2, 2) if tiny else (192, 4, 4))),
}
FOUND_ON = ("lenet", "vgg-bn", "gpt")
ADAMW = ({"lr": 1e-3}, {"lr": 3e-4})
FALLEN = 0.9
IMAGES = 6144


def trained(net: str, optimizer: str, setting: Row, seed: int, data: Row, options: Any) -> Row:
    """Train one net; its losses, and whether they are what a training gives."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    torch.manual_seed(seed)
    model = NETS[net](options.tiny).to(device)
    text = net == "gpt"
    size = 8 if options.tiny else 128
    if text:
        draw = text_batches(data["text"][0], size, 64, seed)
        held_out = text_batches(data["text"][1], 8 * size, 64, 0)()
    else:
        draw, held_out = image_batches(data["images"], size, seed), data["held_out"]
    if optimizer == "kfac":
        stepper: torch.optim.Optimizer = KFAC(model, **setting)
    else:
        stepper = torch.optim.AdamW(model.parameters(), **setting, capturable=cuda)

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(inputs, labels)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        return loss.detach()

    take = decaylab.captured(step, model, stepper, on_failure="eager")
    started = time.perf_counter()
    losses = torch.stack([take(*draw()) for _ in range(options.steps)]).tolist()
    wait(device)
    seconds = time.perf_counter() - started
    model.eval()
    with torch.no_grad():
        parts = [t.split(512) for t in held_out]
        tested = [float(loss_of(x, y)) for x, y in zip(*parts, strict=True)]
    last = statistics.mean(losses[-max(1, options.steps // 10) :])
    sound = all(map(math.isfinite, losses)) and last < FALLEN * losses[0]
    return {
        "start": losses[0],
        "loss": last,
        "held_out": statistics.mean(tested),
        "trained": sound,
        "seconds": seconds,
    }


def table(rows: list[Row]) -> str:
    """One line for each net: K-FAC's settings, and AdamW's better learning rate."""
    columns = ("net", "part", "optimizer", "setting", "training loss", "held-out loss", "trained")
    lines = [f"| {' | '.join(columns)} |", "| --- | --- | --- | --- | ---: | ---: | ---: |"]
    for net in dict.fromkeys(row["net"] for row in rows):
        cells: Cells = {}
        for row in rows:
            if row["net"] == net and "loss" in row:
                cells.setdefault((row["optimizer"], json.dumps(row["setting"])), []).append(row)
        for (optimizer, setting), group in _best_of_adamw(cells):
            part = "found" if net in FOUND_ON else "confirmed"
            numbers = [_spread([row[key] for row in group]) for key in ("loss", "held_out")]
            sound = f"{sum(row['trained'] for row in group)} of {len(group)}"
            setting_words = "default" if setting == "{}" else setting.strip("{}").replace('"', "")
            lines.append(
                f"| {net} | {part} | {optimizer} | {setting_words} | {numbers[0]} | {numbers[1]}"
                f" | {sound} |"
            )
    return "\n".join(lines)


def _best_of_adamw(
    cells: dict[tuple[str, str], list[Row]],
) -> list[tuple[tuple[str, str], list[Row]]]:
    """All settings of K-FAC; of AdamW the one with the lowest training loss."""

    def mean(group: list[Row]) -> float:
        loss = statistics.mean(row["loss"] for row in group)
        return loss if math.isfinite(loss) else math.inf

    kfac_cells = [cell for cell in cells.items() if cell[0][0] == "kfac"]
    others = [cell for cell in cells.items() if cell[0][0] != "kfac"]
    return kfac_cells + ([min(others, key=lambda cell: mean(cell[1]))] if others else [])


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f} (n = 1)"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--settings", nargs="+", type=json.loads, default=[{}], help="of K-FAC")
    parser.add_argument("--no-adamw", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--adamw-seeds", type=int, help="by default as many as K-FAC's")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cifar10", action="store_true", help="instead of noisy templates")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 is")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    device, began = torch.device(options.device), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    x, y = cifar10(IMAGES, device, options.data_dir) if options.cifar10 else templates(2048, device)
    cut = len(y) * 4 // 5
    data: Row = {"images": (x[:cut], y[:cut]), "held_out": (x[cut:], y[cut:])}
    if "gpt" in options.nets:
        data["text"] = python_sources(device, 2**22)
    about = place(options.device) | {"steps": options.steps, "tiny": options.tiny}
    rows: list[Row] = []
    ways = [("kfac", setting) for setting in options.settings]
    ways += [] if options.no_adamw else [("adamw", setting) for setting in ADAMW]
    for net in options.nets:
        for seed in range(options.seeds):
            for optimizer, setting in ways:
                if optimizer == "adamw" and seed >= (options.adamw_seeds or options.seeds):
                    continue
                if time.perf_counter() - began > options.max_seconds:
                    continue
                row = {"net": net, "optimizer": optimizer, "setting": setting, "seed": seed}
                work = (net, optimizer, setting, seed, data, options)
                rows.append(attempt(row, lambda given=work: trained(*given)))
                save(options.out, {"about": about, "rows": rows})
    save(options.out, {"about": about, "rows": rows}, complete=True)
    print(table(rows))


if __name__ == "__main__":
    main()
