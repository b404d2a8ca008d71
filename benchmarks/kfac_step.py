"""A K-FAC step as a multiple of an SGD step, and where its time goes.

    python benchmarks/kfac_step.py [--device cuda] [--networks vgg16 resnet32] [--width 1]
                                   [--batch-size 128] [--curvature gauss-newton] [--bf16] [--json]

SGD steps and three kinds of K-FAC steps are timed in one run, taking turns: plain (no refresh),
refresh (factors are measured), and invert (factors are measured and inverted). `average` is what a
step costs at the recipe's intervals: plain + (refresh - plain) / 10 + (invert - refresh) / 100.

The parts come from the same steps, by clocks around the functions that do them (CUDA events on a
GPU, so that nothing waits): *factors* are the products a a' and g g' and the running average,
*capture* is what else a refresh adds (hooks and the sampled backward pass), *inverses* are the
factorisations, *preconditioning* the two products per layer, and *rest* is all else that a K-FAC
update does beyond SGD's (copying gradients, the check that they are finite). Capture and factors
are per refresh, inverses per inversion, the others per step. Medians, in milliseconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from decaylab.curvature.blocks import Blocks
from decaylab.curvature.factors import Sums
from decaylab.networks import build
from decaylab.optim.kfac import KFAC

REFRESH_EVERY, INVERT_EVERY = 10, 100
PARTS = {
    "factors": [(Sums, "add_inputs"), (Sums, "add_gradients"), (Blocks, "update")],
    "inverses": [(Blocks, "begin_inversion"), (Blocks, "end_inversion")],
    "preconditioning": [(Blocks, "precondition")],
}


class Clock:
    """Times on the device: CUDA events, or the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: dict[str, list[tuple[Any, Any]]] = {}

    def now(self) -> Any:
        """A point in time: an event, or seconds."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time in here to `name`."""
        start = self.now()
        try:
            yield
        finally:
            self.spans.setdefault(name, []).append((start, self.now()))

    def take(self) -> dict[str, float]:
        """The sum of each name's spans in milliseconds; forgets them."""
        if self.cuda:
            torch.cuda.synchronize()
        total = {
            name: sum(a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in spans)
            for name, spans in self.spans.items()
        }
        self.spans = {}
        return total


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


class Trial:
    """A model with one optimizer, and one training step of it under the clock."""

    def __init__(self, args: argparse.Namespace, network: str, make: Callable) -> None:
        self.device = torch.device(args.device)
        torch.manual_seed(0)
        self.model: nn.Module = build(
            network, classes=10, width=args.width, batch_norm=args.batch_norm
        ).to(self.device)
        self.inputs = torch.randn(args.batch_size, 3, 32, 32, device=self.device)
        if args.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (args.batch_size,), device=self.device)
        self.optimizer = make(self.model)
        self.bf16 = args.bf16
        self.clock = Clock(self.device)
        self.seen: list[dict[str, float]] = []

    def step(self, *, count: bool = True) -> None:
        """Forward, backward, update; one that does not `count` is for warming up."""
        with self.clock.span("step"):
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
                loss = F.cross_entropy(self.model(self.inputs), self.labels)
            loss.backward()
            with self.clock.span("update"):
                self.optimizer.step()
            self.optimizer.zero_grad()
        spans = self.clock.take()
        if count:
            self.seen.append(spans)

    def median(self, name: str) -> float:
        """Milliseconds a step spends in `name`."""
        return statistics.median(spans.get(name, 0.0) for spans in self.seen)


def measure(args: argparse.Namespace, network: str) -> dict[str, Any]:
    """Medians over `args.repeats` steps of each kind, taking turns so that drift hits all alike."""

    def kfac(refresh_every: int, invert_every: int) -> Callable[[nn.Module], KFAC]:
        return lambda model: KFAC(
            model,
            1e-4,
            curvature=args.curvature,
            weight_decay=1e-2,
            damping=1e-2,
            refresh_every=refresh_every,
            invert_every=invert_every,
        )

    never = 10**9  # but for the first step, which is not counted
    trials = {
        "sgd": Trial(
            args,
            network,
            lambda m: torch.optim.SGD(m.parameters(), 1e-4, momentum=0.9, weight_decay=1e-2),
        ),
        "plain": Trial(args, network, kfac(never, never)),
        "refresh": Trial(args, network, kfac(1, never)),
        "invert": Trial(args, network, kfac(1, 1)),
    }
    for repeat in range(-2, args.repeats):
        for trial in trials.values():
            with clocked(trial.clock):
                trial.step(count=repeat >= 0)
    times = {name: trial.median("step") for name, trial in trials.items()}
    times["average"] = (
        times["plain"]
        + (times["refresh"] - times["plain"]) / REFRESH_EVERY
        + (times["invert"] - times["refresh"]) / INVERT_EVERY
    )
    refresh, invert, plain = trials["refresh"], trials["invert"], trials["plain"]
    factors = refresh.median("factors")
    parts = {
        "capture": times["refresh"] - times["plain"] - factors,
        "factors": factors,
        "inverses": invert.median("inverses"),
        "preconditioning": plain.median("preconditioning"),
        "rest": plain.median("update")
        - plain.median("preconditioning")
        - trials["sgd"].median("update"),
    }
    return {
        "network": network,
        "width": args.width,
        "batch_size": args.batch_size,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "milliseconds": times,
        "multiple_of_sgd": {name: value / times["sgd"] for name, value in times.items()},
        "parts_milliseconds": parts,
        "parts_of_sgd_step": {name: value / times["sgd"] for name, value in parts.items()},
    }


def table(result: dict[str, Any]) -> str:
    head = "{network}, width {width}, batch {batch_size}, {device}".format(**result)
    lines = [head, f"  {'step':<16}{'ms':>9}{'x SGD':>9}"]
    for name, value in result["milliseconds"].items():
        lines.append(f"  {name:<16}{value:>9.2f}{result['multiple_of_sgd'][name]:>9.2f}")
    lines.append(f"  {'part':<16}{'ms':>9}{'x SGD':>9}")
    for name, value in result["parts_milliseconds"].items():
        lines.append(f"  {name:<16}{value:>9.2f}{result['parts_of_sgd_step'][name]:>9.2f}")
    return "\n".join(lines)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", nargs="+", default=["vgg16", "resnet32"])
    parser.add_argument("--width", type=float, help="default: 1 on a GPU, 0.125 on a CPU")
    parser.add_argument("--batch-size", type=int, help="default: 128 on a GPU, 32 on a CPU")
    parser.add_argument("--curvature", default="gauss-newton", choices=["gauss-newton", "fisher"])
    parser.add_argument("--repeats", type=int, help="default: 30 on a GPU, 5 on a CPU")
    parser.add_argument("--batch-norm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object per network")
    args = parser.parse_args(given)
    on_gpu = args.device == "cuda"
    args.width = args.width or (1.0 if on_gpu else 0.125)
    args.batch_size = args.batch_size or (128 if on_gpu else 32)
    args.repeats = args.repeats or (30 if on_gpu else 5)
    return args


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    for network in args.networks:
        result = measure(args, network)
        print(json.dumps(result) if args.json else table(result), flush=True)


if __name__ == "__main__":
    main()
