"""What the speed benchmarks share: random images, clocks on the device, and where it was run."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import decaylab
from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.factors import RunningFactors, Sums
from decaylab.curvature.preconditioner import Preconditioner
from decaylab.data import DataSet, Split
from decaylab.optim.kfac import KFAC
from decaylab.optim.update import Updater
from decaylab.training import RunSpec
from decaylab.training.journal import code_commit

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"decay": "l2"},
    "adam": {"decay": "decoupled"},
    "kfac-f": {"decay": "decoupled", "initialize_batches": 2},
    "kfac-g": {"decay": "decoupled", "initialize_batches": 2},
}
# The functions that do each part of a K-FAC step, by where they are looked up.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "curvature passes": [(KroneckerEstimator, "_back_propagate")],  # products included
    "factor products": [(Sums, "add_inputs"), (Sums, "add_gradients")],
    "fold": [(RunningFactors, "update")],
    "inversion": [(Preconditioner, n) for n in ("invert", "begin_inversion", "end_inversion")],
    "preconditioning": [(Preconditioner, "precondition")],
    "whole update": [(Updater, "__call__")],
}
PARTS_OF = {
    "plain": ("preconditioning", "update"),
    "refresh": ("sampled backward", "factor products", "fold"),
    "invert": ("inversion",),
}


def random_data(device: torch.device, train: int, test: int) -> DataSet:
    """CIFAR-10-sized random images: time does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)

    def split(size: int) -> Split:
        images = torch.randint(256, (size, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return Split(images, torch.randint(10, (size,), generator=generator))

    mean, std = (0.49, 0.48, 0.45), (0.2, 0.2, 0.2)
    return DataSet("cifar10", split(train), split(test), 10, mean, std).to(device)


def spec_for(network: str, optimizer: str, options: argparse.Namespace, **fields: Any) -> RunSpec:
    """A run as the paper's, with batch norm and augmentation, at the benchmark's options."""
    usual = dict(OPTIMIZERS[optimizer])
    if optimizer.startswith("kfac"):
        usual["inversion_lag"] = options.inversion_lag
    common = {"data": "cifar10", "batch_norm": True, "augment": True, "lr": 1e-3}
    sizes = {"width": options.width, "batch_size": options.batch_size}
    settings = {**common, **sizes, **usual, "weight_decay": 1e-3, "precision": options.precision}
    return RunSpec(network=network, optimizer=optimizer, **settings, **fields).resolved()


def parser(description: str) -> argparse.ArgumentParser:
    """The options that the benchmarks have in common."""
    shared = argparse.ArgumentParser(description=description)
    shared.add_argument("--networks", nargs="+", default=["vgg16", "resnet32"])
    shared.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16"])
    shared.add_argument("--width", type=float, default=1.0)
    shared.add_argument("--batch-size", type=int, default=128)
    shared.add_argument("--inversion-lag", type=int, default=0)
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    shared.add_argument("--json", action="store_true")
    return shared


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and with what a benchmark was run."""
    settings = ("precision", "width", "batch_size", "inversion_lag")
    return place(options.device) | {name: getattr(options, name) for name in settings}


def place(device: str) -> dict[str, Any]:
    """The device, the day and the versions."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "version": decaylab.__version__,
        "commit": code_commit(),
    }


def attempt(row: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with what `work` finds, or with its error, so that the others are measured still.

    Told on stderr at once: a benchmark that is cut short leaves what it had.
    """
    try:
        result = {**row, **work()}
    except Exception as error:
        traceback.print_exc()
        result = {**row, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def save(path: Path | None, record: dict[str, Any], *, complete: bool = False) -> None:
    """Write a record to FILE.part, and once it is complete to FILE: a device may go away."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    if complete:
        part.replace(path)


def wait(device: torch.device) -> None:
    """Until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def kind_of_step(optimizer: torch.optim.Optimizer) -> str:
    """The coming step's kind: `invert` (a refresh too), `refresh` or `plain`."""
    if not isinstance(optimizer, KFAC):
        return "plain"
    if optimizer.steps % optimizer.invert_every == 0:
        return "invert"
    return "refresh" if optimizer.refresh_due else "plain"


class Clock:
    """Times on the device: CUDA events, also inside graphs, or the wall clock on a CPU.

    An event recorded while a graph is captured is part of it and is set anew by each replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = ""
        self._spans: dict[str, list[tuple[Any, Any]]] = {}  # of work run as it is, in this step
        self._inside: dict[str, dict[str, list[tuple[Any, Any]]]] = {}  # of graphs, by kind of step

    def now(self) -> Any:
        """A point in time: an event, or seconds."""
        if self._device.type != "cuda":
            return time.perf_counter()
        captured = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=captured)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Between two points in time that the device has reached."""
        return start.elapsed_time(end) if self._device.type == "cuda" else 1e3 * (end - start)

    def begin(self, kind: str) -> None:
        """Forget the last step; a step of this kind comes."""
        self._kind, self._spans = kind, {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time in here to `name`."""
        cuda = self._device.type == "cuda"
        captured = cuda and torch.cuda.is_current_stream_capturing()
        spans = self._inside.setdefault(self._kind, {}) if captured else self._spans
        start = self.now()
        try:
            yield
        finally:
            spans.setdefault(name, []).append((start, self.now()))

    def read(self) -> dict[str, float]:
        """Milliseconds by name in this step: of what ran as it is, and of the graph if it did."""
        wait(self._device)
        replayed = "preconditioning" not in self._spans  # which is part of every step
        graph = self._inside.get(self._kind, {}) if replayed else {}
        return {
            name: sum(
                self.milliseconds(*span)
                for spans in (self._spans, graph)
                for span in spans.get(name, ())
            )
            for name in {*self._spans, *graph}
        }


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Put a clock around the functions that do the parts of a K-FAC step."""
    originals = [(owner, name, getattr(owner, name)) for fs in PARTS.values() for owner, name in fs]

    def around(part: str, function: Callable) -> Callable:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with clock.span(part):
                return function(*args, **kwargs)

        return timed

    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, around(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
