"""What a whole epoch costs, data and evaluation included; runs at once; the exact Jacobian norm.

    python benchmarks/epoch.py [--networks vgg16 resnet32] [--optimizers sgd kfac-g]
                               [--parts epoch at-once evaluation checkpoint jacobian] [--at-once 4]
                               [--compiled] [--precision bf16] [--inversion-lag 0]
                               [--train 50000] [--test 10000] [--evaluation-batches 1000] [--json]

Random images as many as CIFAR-10 has, batch norm and augmentation; the runs are those of `decaylab
train`. The first epoch, in which graphs are captured, and the last, which evaluates the training
set too, do not count.

- epoch: seconds from one epoch's end to the next (drawing batches, steps, evaluation, rows written
  to disk), over the seconds of its steps alone; one run. Medians.
- at-once: epochs a second of so many runs that take turns, over those of one run. No records.
- evaluation: seconds on the test images, as graphs and without, for batches of these sizes.
- checkpoint: seconds that training waits for one (the second: the first makes room for it), seconds
  until it is on disk, its size, and a step's time while it is written over that without.
- jacobian: seconds for the exact input-output Jacobian norm of all test images.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import about, attempt, parser, random_data, spec_for, wait

from decaylab import probes
from decaylab.data import DataSet, evaluation_batches
from decaylab.probes.jacobian import CHUNK
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, TrainingRun, interleave, train
from decaylab.training.arithmetic import arithmetic
from decaylab.training.build import build_model
from decaylab.training.checkpoint import Writer
from decaylab.training.evaluate import Evaluator

PARTS = ("epoch", "at-once", "evaluation", "checkpoint", "jacobian")
Row = dict[str, Any]


def one_run(spec: RunSpec, data: DataSet, compiled: bool) -> Row:
    """Seconds of an epoch and of its steps, of a run alone that writes its records."""
    whole, steps = [], []
    how, device = Execution(checkpoint_every=1e9, compiled=compiled), data.train.images.device
    with tempfile.TemporaryDirectory() as folder:
        running = train(spec, data=data, device=device, store=RunStore(folder), execution=how)
        before, trained = 0.0, 0.0
        for progress in running:
            now, seconds = time.perf_counter(), progress.values["train/seconds"]
            if progress.kind == "epoch" and progress.epoch > 1:
                whole.append(now - before)
                steps.append(seconds - trained)
            before, trained = time.perf_counter(), seconds
            if progress.epoch == progress.epochs - 1:
                break
        running.close()
    epoch, taken = statistics.median(whole), statistics.median(steps)
    return {"epoch_seconds": epoch, "steps_seconds": taken, "ratio": epoch / taken}


def runs_at_once(specs: list[RunSpec], data: DataSet, compiled: bool) -> float:
    """Seconds of an epoch of all these runs, which take turns."""
    how = Execution(1e9, every_step=True, at_once=len(specs), compiled=compiled)
    device = data.train.images.device
    counted = (specs[0].epochs or 0) - 2
    done = dict.fromkeys(specs, 0)
    turns = interleave({s: train(s, data=data, device=device, execution=how) for s in specs})
    for spec, given in turns:
        if isinstance(given, Exception):
            raise given
        done[spec] += given.kind == "epoch"
        if given.kind == "epoch" and min(done.values()) == done[spec] == 1:
            started = time.perf_counter()
        if min(done.values()) > counted:
            break
    seconds = time.perf_counter() - started
    turns.close()
    return seconds / counted


def evaluation(spec: RunSpec, data: DataSet, size: int, *, graphs: bool) -> Row:
    """Seconds to evaluate on the test images; the median of three, after the capture."""
    device = data.test.images.device

    def autocast() -> Any:
        return torch.autocast(device.type, torch.bfloat16, enabled=spec.precision == "bf16")

    model = build_model(spec, data)
    evaluate = Evaluator(model, data, autocast=autocast, graphs=graphs, batch_size=size)
    seconds = []
    with arithmetic(spec.precision):
        for _ in range(6):
            wait(device)
            started = time.perf_counter()
            evaluate(data.test)
            seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[3:])}


def checkpoints(spec: RunSpec, data: DataSet, compiled: bool) -> Row:
    """What a checkpoint costs the training beside it."""
    run, device = TrainingRun(spec, data, compiled=compiled), data.train.images.device
    run.begin_epoch()

    def step() -> float:
        started = time.perf_counter()
        with run.at_work():
            run.train_step()
            wait(device)
        if run.position == run.steps_per_epoch:
            run.next_epoch()
            run.begin_epoch()
        return time.perf_counter() - started

    with run.at_work():
        run.initialize(lambda: None)
    plain = statistics.median([step() for _ in range(60)][30:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        writer = Writer(path)
        for _ in range(2):
            writer.wait()
            started = time.perf_counter()
            with run.at_work():
                writer.save(run.state_dict())
            waited = time.perf_counter() - started
            beside = [step()]
            while writer.busy:
                beside.append(step())
            written = time.perf_counter() - started
        writer.wait()
        size = path.stat().st_size / 1e9
    slower = {"step_over_plain": statistics.median(beside) / plain, "longest_step": max(beside)}
    return {"waited_seconds": waited, "written_seconds": written, "gigabytes": size, **slower}


def jacobian(spec: RunSpec, data: DataSet) -> Row:
    """Seconds of the exact norm as `reproduce` measures it, in the run's precision.

    The first time in a process, kernels are loaded and chosen too.
    """
    model, device = build_model(spec, data), data.test.images.device
    given = {"batch_size": 8 * CHUNK, "mean": data.mean, "std": data.std}
    batches = list(evaluation_batches(data.test, **given))
    row = {}
    for name in ("first_seconds", "seconds"):
        wait(device)
        started = time.perf_counter()
        with arithmetic(spec.precision):
            for images, _ in batches:
                probes.jacobian_norm(model, images, chunk=CHUNK)
        row[name] = time.perf_counter() - started
    return row


def compared(spec: RunSpec, data: DataSet, compiled: bool, runs: int) -> Row:
    """So many runs at once against one."""
    alone = runs_at_once([spec], data, compiled)
    together = runs_at_once([replace(spec, seed=seed) for seed in range(runs)], data, compiled)
    seconds = {"alone_seconds": alone, "together_seconds": together}
    return {"runs": runs, **seconds, "throughput": runs * alone / together}


def benchmark(network: str, options: argparse.Namespace, result: dict[str, list[Row]]) -> None:
    device = torch.device(options.device)
    data = random_data(device, options.train, options.test)

    def measure(part: str, row: Row, work: Callable[[], Row]) -> None:
        if part in options.parts:
            result[part].append(attempt({"network": network, **row}, work))
            gc.collect()

    for name in options.optimizers:
        length = {"epochs": options.epochs + 2, "lr_drop_every": 100}
        spec = spec_for(network, name, options, **length)
        row = {"optimizer": name}
        measure("epoch", row, partial(one_run, spec, data, options.compiled))
        measure("at-once", row, partial(compared, spec, data, options.compiled, options.at_once))
        measure("checkpoint", row, partial(checkpoints, spec, data, options.compiled))
    spec = spec_for(network, "sgd", options)
    for size in options.evaluation_batches:
        for graphs in (False, True) if device.type == "cuda" else (False,):
            row = {"batch_size": size, "captured": graphs}
            measure("evaluation", row, partial(evaluation, spec, data, size, graphs=graphs))
    measure("jacobian", {"images": options.test}, partial(jacobian, spec, data))


def table(result: dict[str, Any]) -> str:
    heading = "{device}, torch {torch}, {precision}, batch {batch_size}, {date}"
    lines = [heading.format(**result["about"])]
    for part in PARTS:
        for row in result[part]:
            words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items())
            lines.append(f"{part}: {', '.join(words)}")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--optimizers", nargs="+", default=["sgd", "kfac-g"])
    options_parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options_parser.add_argument("--at-once", type=int, default=4)
    options_parser.add_argument("--epochs", type=int, default=2, help="that count")
    options_parser.add_argument("--compiled", action="store_true")
    options_parser.add_argument("--train", type=int, default=50_000)
    options_parser.add_argument("--test", type=int, default=10_000)
    options_parser.add_argument("--evaluation-batches", nargs="+", type=int, default=[1000])
    options = options_parser.parse_args(given)
    result: dict[str, Any] = {"about": about(options), **{part: [] for part in PARTS}}
    result["about"]["compiled"] = options.compiled
    for network in options.networks:
        benchmark(network, options, result)
    print(json.dumps(result, indent=1) if options.json else table(result))


if __name__ == "__main__":
    main()
