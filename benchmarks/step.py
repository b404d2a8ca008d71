"""What a training step costs: stock SGD, and our SGD, Adam, K-FAC-F and K-FAC-G.

    python benchmarks/step.py [--networks vgg16 resnet32] [--precision bf16] [--steps 200] [--json]
                              [--width 1] [--batch-size 128] [--inversion-lag 0] [--compiled]

All in one run, on CUDA where there is one; CIFAR-10-sized random images with batch norm and
augmentation. *stock* is the loop of a tutorial: torch.optim.SGD, TF32, no graph, a ready batch.
Ours are the steps that `decaylab train` takes, data and augmentation included: as they are (eager)
and, on CUDA, as replayed graphs (captured). Milliseconds a step, averaged over so many steps that
K-FAC's refreshes and inversions come in at their share; `x SGD` is over our captured SGD (on a CPU:
our eager one); memory is the peak above what lay there before.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from decaylab.data import DataSet, Split
from decaylab.training import RunSpec, TrainingRun
from decaylab.training.build import build_model

IMAGES = 2560
# By then graphs are captured and lazily made state is there.
WARM_UP = 40


def random_data(device: torch.device) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (IMAGES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.randint(10, (IMAGES,), generator=generator))
    return DataSet("cifar10", split, split, 10, (0.49, 0.48, 0.45), (0.2, 0.2, 0.2)).to(device)


def milliseconds(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(min(WARM_UP, steps)):
        step()
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return 1000 * (time.perf_counter() - started) / steps


def stock(spec: RunSpec, data: DataSet) -> Callable[[], None]:
    model = build_model(spec, data).to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    images = torch.randn(spec.batch_size, 3, 32, 32, device=data.train.images.device)
    labels = data.train.labels[: spec.batch_size]

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(spec: RunSpec, data: DataSet, *, graphs: bool) -> Callable[[], None]:
    run = TrainingRun(spec.resolved(), data, graphs=graphs)
    with run.at_work():
        run.initialize(lambda: None)

    def step() -> None:
        if run.position == run.steps_per_epoch:
            run.next_epoch()
        if run.position == 0:
            run.begin_epoch()
        with run.at_work():
            run.train_step()

    return step


def measured(name: str, make: Callable[[], Callable[[], None]], arguments: Any) -> dict[str, Any]:
    cuda = arguments.device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    time_ = milliseconds(make(), arguments.steps, arguments.device)
    memory = (torch.cuda.max_memory_allocated() - before) / 1e9 if cuda else None
    return {"step": name, "ms": time_, "gigabytes": memory}


def benchmark(network: str, arguments: Any) -> list[dict[str, Any]]:
    data = random_data(arguments.device)
    common = {
        **{"data": "cifar10", "network": network, "width": arguments.width, "batch_norm": True},
        **{"augment": True, "batch_size": arguments.batch_size, "lr": 1e-3, "weight_decay": 1e-3},
        **{"precision": arguments.precision, "compiled": arguments.compiled},
    }
    kfac = {"initialize_batches": 2, "inversion_lag": arguments.inversion_lag}
    optimizers: dict[str, dict[str, Any]] = {
        "sgd": {"decay": "l2"},
        "adam": {"decay": "decoupled"},
        "kfac-f": {"decay": "decoupled", **kfac},
        "kfac-g": {"decay": "decoupled", **kfac},
    }
    rows = []
    plain = RunSpec(**{**common, "optimizer": "sgd", "decay": "l2"})
    rows.append(measured("sgd, stock", lambda: stock(plain, data), arguments))
    for name, settings in optimizers.items():
        spec = RunSpec(**common, optimizer=name, **settings)
        for graphs in (False, True) if arguments.device.type == "cuda" else (False,):
            label = f"{name}, {'captured' if graphs else 'eager'}"
            rows.append(
                measured(label, lambda s=spec, g=graphs: ours(s, data, graphs=g), arguments)
            )
    base = [row["ms"] for row in rows if row["step"].startswith("sgd, ")][-1]
    return [{"network": network, **row, "over_sgd": row["ms"] / base} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["vgg16", "resnet32"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--inversion-lag", type=int, default=0)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [row for network in arguments.networks for row in benchmark(network, arguments)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, torch {torch.__version__}, {arguments.precision}, batch {arguments.batch_size}")
    print(f"{'network':<10} {'step':<18} {'ms':>8} {'x SGD':>7} {'GB':>6}")
    for row in rows:
        memory = "" if row["gigabytes"] is None else f"{row['gigabytes']:6.2f}"
        line = f"{row['network']:<10} {row['step']:<18} {row['ms']:8.3f} {row['over_sgd']:7.2f}"
        print(f"{line} {memory}")


if __name__ == "__main__":
    main()
