"""The share of the batch pipeline in a training step: VGG16 with batch normalisation, SGD.

    python benchmarks/batches.py [--device cuda] [--batch-size 128] [--json]

The pipeline (crop, flip, normalise; and the draws of an epoch, spread over its steps) and the
training step (forward, backward, update) are timed apart, and the median of each is compared.
Random images stand in for CIFAR-10's 50,000: the time does not depend on what they show.
Exit code 1 if the share is not below the limit of 5 % (CPU).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from decaylab.data import Batches, Split
from decaylab.networks import build

LIMIT = 0.05


def median_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median wall-clock time of `work`, one call before not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(device: torch.device, batch_size: int, images: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    pixels = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8, device=device)
    split = Split(pixels, torch.randint(10, (images,), device=device))
    statistics_of_cifar10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
    batches = Batches(split, batch_size=batch_size, augment=True, **statistics_of_cifar10)
    epoch = median_seconds(batches.begin_epoch, 5, device)
    position = iter(range(10**9))
    pipeline = median_seconds(
        lambda: batches.batch(next(position) % batches.steps_per_epoch), 10 * repeats, device
    )
    model = build("vgg16", classes=10, batch_norm=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = batches.batch(0)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    training = median_seconds(step, repeats, device)
    pipeline += epoch / batches.steps_per_epoch
    return {
        "pipeline_ms": 1e3 * pipeline,
        "training_ms": 1e3 * training,
        "share": pipeline / (pipeline + training),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    result = measure(device, options.batch_size, options.images, options.repeats)
    if options.json:
        about = {
            "device": str(device),
            "batch_size": options.batch_size,
            "torch": torch.__version__,
        }
        print(json.dumps(about | {"threads": torch.get_num_threads(), "limit": LIMIT} | result))
    else:
        print(f"VGG16 (BN), batch {options.batch_size}, {device}, torch {torch.__version__}")
        print(f"batch (crop, flip, normalise)    {result['pipeline_ms']:10.3f} ms")
        print(f"forward, backward, SGD update    {result['training_ms']:10.3f} ms")
        print(f"share of the batch in a step     {100 * result['share']:10.3f} %  (limit 5 %)")
    return int(device.type == "cpu" and result["share"] >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
