"""What a training step costs: stock SGD, our SGD, Adam, K-FAC-F and K-FAC-G, and public K-FACs.

    python benchmarks/step.py [--networks vgg16 resnet32] [--optimizers sgd adam kfac-f kfac-g]
                              [--modes eager captured compiled compiled-captured deterministic]
                              [--steps 200]
                              [--precision bf16] [--inversion-lag 0] [--no-peers] [--no-parts]
                              [--width 1] [--batch-size 128] [--json]

All in one run, on CUDA where there is one; CIFAR-10-sized random images, batch norm, augmentation.
*stock* is the loop of a tutorial: torch.optim.SGD, TF32, no graph, a ready batch; the peers have
the same loop. Ours are the steps that `decaylab train` takes, data and augmentation included: as
they are (eager), as replayed graphs (captured), and both with a compiled network. `deterministic`:
captured, with deterministic algorithms alone; it fixes cuBLAS's workspace, for the other modes too.

Milliseconds a step, averaged over so many steps that K-FAC's refreshes (every 10) and inversions
(every 100) come in at their share; plain, refresh and invert are the medians of such steps. `x SGD`
is over our SGD in the same mode, `x stock` over stock SGD; GB is the peak above what lay there
before. The parts are those of K-FAC steps, by clocks inside the steps (and inside the graphs): of a
plain step, preconditioning and the rest of the update (gather, checks, momentum, decay); of a
refresh, what it adds; of an inverting step, the inversion.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from measuring import (
    PARTS_OF,
    Clock,
    about,
    attempt,
    clocked,
    kind_of_step,
    parser,
    random_data,
    spec_for,
    wait,
)
from peers import PEERS, installed
from torch import nn
from torch.nn import functional as F

from decaylab.data import DataSet
from decaylab.optim.graphs import EAGER_RUNS
from decaylab.optim.kfac import KFAC
from decaylab.training import RunSpec, TrainingRun
from decaylab.training.arithmetic import arithmetic, prepare_deterministic
from decaylab.training.build import build_model

IMAGES = 2560
# By then graphs are captured and lazily made state is there.
WARM_UP = 40
MODES = ("eager", "captured", "compiled", "compiled-captured")
DETERMINISTIC = "deterministic"
Row = dict[str, Any]


class Trial:
    """Steps of one kind of training, each with its kind and the time it took on the device."""

    def __init__(self, step: Callable[[], object], device: torch.device, *, tf32: bool = False):
        self.step, self.device, self.clock = step, device, Clock(device)
        self.kind: Callable[[], str] = lambda: "plain"
        self.around: Callable[[], Any] = lambda: arithmetic("tf32") if tf32 else nullcontext()
        self.spans: list[tuple[str, Any, Any]] = []
        self.warm_up = WARM_UP if device.type == "cuda" else 0

    def take(self, steps: int) -> None:
        """So many steps, without waiting for the device."""
        for _ in range(steps):
            kind = self.kind()
            with self.around():
                start = self.clock.now()
                self.step()
                self.spans.append((kind, start, self.clock.now()))

    def averaged(self, steps: int) -> Row:
        """Mean milliseconds over the steps behind the warm-up, and the median of each kind."""
        self.take(self.warm_up or min(WARM_UP, steps))
        wait(self.device)
        self.spans.clear()
        started = time.perf_counter()
        self.take(steps)
        wait(self.device)
        mean = 1000 * (time.perf_counter() - started) / steps
        kinds: dict[str, list[float]] = {}
        for kind, *span in self.spans:
            kinds.setdefault(kind, []).append(self.clock.milliseconds(*span))
        return {"ms": mean, "kinds": {k: statistics.median(v) for k, v in kinds.items()}}


def plain_loop(spec: RunSpec, data: DataSet, make: Callable[..., Callable[[], object]]) -> Trial:
    """A step of the loop of a tutorial on a model of torch's own layers and memory format."""
    model = build_model(spec, data).to(memory_format=torch.contiguous_format)
    for module in model.modules():
        for kind in (nn.Conv2d, nn.Linear):
            if isinstance(module, kind):
                module.__class__ = kind  # ours leave out biases in front of batch norm
    device = data.train.images.device
    images = torch.randn(spec.batch_size, 3, 32, 32, device=device)
    return Trial(make(model, images, data.train.labels[: spec.batch_size]), device, tf32=True)


def stock(model: Any, images: Any, labels: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(spec: RunSpec, data: DataSet, **how: bool) -> Trial:
    run = TrainingRun(spec, data, **how)
    with run.at_work():
        run.initialize(lambda: None)
    trial = Trial(run.train_step, run.device)
    trial.kind = lambda: kind_of_step(run.optimizer)
    if how["graphs"] and isinstance(run.optimizer, KFAC):
        trial.warm_up += EAGER_RUNS * run.optimizer.invert_every  # its inversions are captured too

    def around() -> Any:
        if run.position == run.steps_per_epoch:
            run.next_epoch()
        if run.position == 0:
            run.begin_epoch()
        return run.at_work()

    trial.around = around
    return trial


def measured(make: Callable[[], Trial], options: argparse.Namespace) -> Row:
    """Time and peak memory of a trial, its building included."""
    cuda = options.device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    row = make().averaged(options.steps)
    memory = (torch.cuda.max_memory_allocated() - before) / 1e9 if cuda else None
    return {**row, "gigabytes": memory}


def parts(spec: RunSpec, data: DataSet, steps: int, **how: bool) -> Row:
    """Median milliseconds of each part, by kind of step, in a run with clocks inside."""
    trial = ours(spec, data, **how)
    seen: dict[str, list[Row]] = {kind: [] for kind in PARTS_OF}
    with clocked(trial.clock):
        for step in range(trial.warm_up + steps):
            kind = trial.kind()
            trial.clock.begin(kind)
            trial.take(1)
            spans = trial.clock.read()
            if step >= trial.warm_up:
                spans["update"] = spans["whole update"] - spans["preconditioning"]
                passes, products = (
                    spans.get(k, 0.0) for k in ("curvature passes", "factor products")
                )
                spans["sampled backward"] = passes - products
                spans["step"] = trial.clock.milliseconds(*trial.spans[-1][1:])
                seen[kind].append(spans)
    return {
        kind: {
            part: statistics.median(spans.get(part, 0.0) for spans in seen[kind])
            for part in (*PARTS_OF[kind], "step")
        }
        for kind in seen
        if seen[kind]
    }


def benchmark(network: str, options: argparse.Namespace) -> dict[str, list[Row]]:
    data = random_data(torch.device(options.device), IMAGES, 128)
    plain = spec_for(network, "sgd", options)

    def timed(step: str, mode: str, make: Callable[[], Trial]) -> Row:
        row = {"network": network, "step": step, "mode": mode}
        return attempt(row, lambda: measured(make, options))

    rows = [timed("sgd", "stock", lambda: plain_loop(plain, data, stock))]
    peers = [] if options.no_peers else [name for name in PEERS if installed(name)]
    rows += [timed(n, "peer", partial(plain_loop, plain, data, PEERS[n][1])) for n in peers]
    found_parts = []
    for mode in options.modes:
        fixed = mode == DETERMINISTIC
        how = {"graphs": fixed or "captured" in mode, "compiled": mode.startswith("compiled")}
        for name in options.optimizers:
            spec = spec_for(network, name, options, deterministic=fixed)
            rows.append(timed(name, mode, partial(ours, spec, data, **how)))
            if name.startswith("kfac") and not options.no_parts:
                row = {"network": network, "step": name, "mode": mode}
                inside = partial(parts, spec, data, options.part_steps, **how)
                found_parts.append(attempt(row, inside))
    for row in rows:
        same = [r.get("ms") for r in rows if (r["step"], r["mode"]) == ("sgd", row["mode"])]
        for ratio, base in (("over_stock", rows[0].get("ms")), ("over_sgd", *(same or [None]))):
            row[ratio] = row["ms"] / base if base and "ms" in row else None
    return {"rows": rows, "parts": found_parts}


def number(value: float | None, form: str = "8.3f") -> str:
    return f"{value:{form}}" if value is not None else " " * int(form.split(".")[0])


def table(result: dict[str, Any]) -> str:
    heading = "{device}, torch {torch}, {precision}, batch {batch_size}, {date}"
    lines = [heading.format(**result["about"])]
    kinds = ("plain", "refresh", "invert")
    head = f"{'network':<9} {'step':<13} {'mode':<18} {'ms':>8} {'x SGD':>6} {'x stock':>7}"
    lines.append(f"{head} {' '.join(f'{kind:>8}' for kind in kinds)} {'GB':>6}")
    for row in result["rows"]:
        line = f"{row['network']:<9} {row['step']:<13} {row['mode']:<18}"
        if "error" in row:
            lines.append(f"{line} {row['error']}")
            continue
        times = [number(row["ms"]), number(row["over_sgd"], "6.2f")]
        times += [number(row["over_stock"], "7.2f"), *(number(row["kinds"].get(k)) for k in kinds)]
        lines.append(f"{line} {' '.join(times)} {number(row['gigabytes'], '6.2f')}")
    lines += [f"{name}: not installed" for name in result["not_installed"]]
    for row in (row for row in result["parts"] if "error" not in row):
        part_times = [
            (part, row[kind][part]) for kind in kinds if kind in row for part in PARTS_OF[kind]
        ]
        named = ", ".join(f"{part} {value:.3f}" for part, value in part_times)
        lines.append(f"parts of {row['network']} {row['step']} {row['mode']}, ms: {named}")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument(
        "--optimizers", nargs="+", default=["sgd", "adam", "kfac-f", "kfac-g"]
    )
    modes = (*MODES, DETERMINISTIC)
    modes_help = "default: all but the last; on a CPU: eager"
    options_parser.add_argument("--modes", nargs="+", choices=modes, help=modes_help)
    options_parser.add_argument("--steps", type=int, default=200)
    options_parser.add_argument(
        "--part-steps", type=int, default=102, help="steps with clocks inside"
    )
    options_parser.add_argument("--no-peers", action="store_true")
    options_parser.add_argument("--no-parts", action="store_true")
    options = options_parser.parse_args(given)
    if options.modes is None:
        options.modes = MODES if options.device == "cuda" else ("eager",)
    if DETERMINISTIC in options.modes:
        prepare_deterministic(torch.device(options.device))
    missing = [] if options.no_peers else [name for name in PEERS if not installed(name)]
    result: dict[str, Any] = {
        "about": about(options),
        "rows": [],
        "parts": [],
        "not_installed": missing,
    }
    for network in options.networks:
        for key, rows in benchmark(network, options).items():
            result[key] += rows
    print(json.dumps(result, indent=1) if options.json else table(result))


if __name__ == "__main__":
    main()
