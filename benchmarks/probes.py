"""What probes cost: watching with the free ones, and the exact Jacobian norm of VGG16.

    python benchmarks/probes.py [--json] [--device cpu] [--rounds 7]

Ratios only, both sides measured in turns in this one process; the median over the rounds counts.
- watch: training steps with the free probes at every 100th, over as many bare ones (< 1.02).
- jacobian: `jacobian_norm` of VGG16 on 32x32 images, 10 classes, over the ten bare backward passes
  to the input that it needs, their forward pass not counted (<= 1.3).
- memory: peak memory with eight chunks over that with one (about 1: it is bounded by the chunk).
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from decaylab import probes
from decaylab.networks import build

EVERY = 100  # steps between two records
LIMITS = {"watch": 1.02, "jacobian": 1.3}


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action; on a CPU those of this process, so that others do not count."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    action()
    return time.process_time() - start


def median_ratio(probed: Callable[[], float], bare: Callable[[], float], rounds: int) -> float:
    """Median over the rounds of `probed`'s seconds over `bare`'s, in turns, after a warm-up."""
    probed(), bare()
    ratios = []
    for i in range(rounds):
        first, second = (probed(), bare()) if i % 2 else reversed((bare(), probed()))
        ratios.append(first / second)
    return statistics.median(ratios)


def watch_ratio(model: nn.Module, inputs: Tensor, rounds: int) -> float:
    labels = torch.randint(10, (len(inputs),), device=inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def steps() -> None:
        for _ in range(EVERY):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    def watched() -> float:
        with probes.watch(model, optimizer, every=EVERY) as watch:
            watch.steps = EVERY  # past the extra record of the first step
            seconds = timed(steps, inputs.device)
        assert len(watch.records.series("weight_norm")) == 1
        return seconds

    return median_ratio(watched, lambda: timed(steps, inputs.device), rounds)


def jacobian_ratio(device: torch.device, rounds: int, chunk: int) -> float:
    model = build("vgg16", classes=10, batch_norm=True).to(device).eval()
    inputs = torch.randn(chunk, 3, 32, 32, device=device)
    leaf = inputs.clone().requires_grad_()
    logits = model(leaf)
    units = [torch.zeros_like(logits) for _ in range(10)]
    for c, unit in enumerate(units):
        unit[:, c] = 1.0

    def bare() -> None:
        for unit in units:
            torch.autograd.grad(logits, leaf, unit, retain_graph=True)

    def probe() -> None:
        probes.jacobian_norm(model, inputs, chunk=chunk)

    return median_ratio(lambda: timed(probe, device), lambda: timed(bare, device), rounds)


def memory_ratio(device: torch.device, chunk: int) -> float:
    """Peak memory with eight chunks over that with one, the model's own not counted on a GPU."""
    model = build("vgg16", classes=10, batch_norm=True).to(device).eval()
    peaks = []
    for chunks in (1, 8):
        inputs = torch.randn(chunks * chunk, 3, 32, 32, device=device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
        probes.jacobian_norm(model, inputs, chunk=chunk, samples=2)
        if device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated() - start)
        else:
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peaks[1] / peaks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device, rounds = torch.device(arguments.device), arguments.rounds
    torch.manual_seed(0)
    chunk = 128 if device.type == "cuda" else 16
    image = torch.randn(128, 3, 32, 32, device=device)
    digit = torch.randn(128, 1, 8, 8, device=device)
    results = {"memory": memory_ratio(device, chunk)}
    results["jacobian"] = jacobian_ratio(device, max(3, rounds // 2), chunk)
    mlp = build("mlp", classes=10, in_channels=1, image_size=8, hidden=(100, 100)).to(device)
    results["watch, MLP 100-100 on 8x8, batch 128"] = watch_ratio(mlp, digit, 15 * rounds)
    vgg = build("vgg16", classes=10, width=1 / 16).to(device)
    results["watch, VGG16 / 16 with BN, batch 128"] = watch_ratio(vgg, image, max(3, rounds // 2))
    if arguments.json:
        print(json.dumps({"device": str(device), "limits": LIMITS, "ratios": results}, indent=2))
        return
    for name, ratio in results.items():
        limit = LIMITS.get(name.split(",")[0])
        print(f"{name:40s} {ratio:.3f}" + ("" if limit is None else f"  (limit {limit})"))


if __name__ == "__main__":
    main()
