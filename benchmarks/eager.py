"""What K-FAC costs in a loop of the user's own, beside stock optimizers and public K-FACs.

    python benchmarks/eager.py [--networks vgg16 resnet32 resnet50 vit gpt10 gpt124 gpt350]
                               [--modes eager captured compiled]
                               [--optimizers first kfac-f kfac-g kfac-g-half kfac-g-spectral]
                               [--steps 100] [--rounds 3] [--no-peers] [--peers FOLDER]
                               [--profile] [--out FILE]

No trainer of ours: a loop of a tutorial on random data that lies on the device. `eager`: as it is,
the small nets in TF32, the large ones under bf16 autocast. `captured`: the same step through
`decaylab.captured`. `compiled`: that with `torch.compile`, channels-last and bf16 autocast. *first*
is SGD for the small nets and AdamW for the large ones; `x` is over it in mode eager. K-FAC
refreshes every 10 steps and inverts every 100; the average is over 100 steps, so over one such
period. Its factors are initialised on the batch, so that it does not invert more often in the
beginning. The optimizers take turns, several rounds each, and the median round counts: a host that
slows down for a while does so for all of them. *kfac-g-half* keeps large inverses in float16;
*kfac-g-spectral* has step_scaling="spectral".
`host` is what forward, backward and step take on the host.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, kind_of_step, place, save, wait
from models import GPT, ViT, resnet
from peers import PEERS, installed
from torch import nn
from torch.nn import functional as F

import decaylab
from decaylab import networks
from decaylab.optim.kfac import KFAC
from decaylab.optim.options import KFACOptions

Row = dict[str, Any]
CURVATURES = {
    "kfac-f": "fisher",
    **dict.fromkeys(("kfac-g", "kfac-g-half", "kfac-g-spectral"), "gauss-newton"),
}
SMALL = ("vgg16", "resnet32", "tiny")


def stock_layers(model: nn.Module) -> nn.Module:
    """Torch's own layers: ours leave out biases in front of batch norm."""
    for module in model.modules():
        for kind in (nn.Conv2d, nn.Linear):
            if isinstance(module, kind):
                module.__class__ = kind
    return model


def paper_net(name: str, width: float = 1.0) -> nn.Module:
    return stock_layers(networks.build(name, classes=10, batch_norm=True, width=width))


def images(count: int, size: int, classes: int) -> Callable[[Any], tuple[Any, Any]]:
    return lambda device: (
        torch.randn(count, 3, size, size, device=device),
        torch.randint(classes, (count,), device=device),
    )


def text(count: int, length: int, vocabulary: int) -> Callable[[Any], tuple[Any, Any]]:
    def batch(device: Any) -> tuple[Any, Any]:
        tokens = torch.randint(vocabulary, (count, length + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], tuple[Any, Any]]]] = {
    "tiny": (lambda: paper_net("vgg11", 0.0625), images(4, 32, 10)),
    "vgg16": (lambda: paper_net("vgg16"), images(128, 32, 10)),
    "resnet32": (lambda: paper_net("resnet32"), images(128, 32, 10)),
    "resnet50": (lambda: resnet(3, 1000, (3, 4, 6, 3), large=True), images(64, 224, 1000)),
    "vit": (lambda: ViT(3, 1000, 224, 16, 384, 12, 6), images(64, 224, 1000)),
    "gpt10": (lambda: GPT(256, 256, 384, 6, 6), text(64, 256, 256)),
    "gpt124": (lambda: GPT(50257, 1024, 768, 12, 12, tied=True), text(8, 1024, 50257)),
    "gpt350": (lambda: GPT(50257, 1024, 1024, 24, 16, tied=True), text(4, 1024, 50257)),
}


def first_order(small: bool, captured: bool, parameters: Any) -> torch.optim.Optimizer:
    if small:
        fused = {"fused": True} if captured else {}
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-3, **fused)
    return torch.optim.AdamW(parameters, lr=1e-4, capturable=captured)


class Loop:
    """A loop over one batch, with clocks: on the host for its parts, on the device for steps."""

    def __init__(
        self, network: str, optimizer: str, mode: str, device: torch.device, **settings: Any
    ):
        torch.manual_seed(0)
        make, batch = NETWORKS[network]
        self.device, self.small = device, network in SMALL
        model = make().to(device)
        self.inputs, self.labels = batch(device)
        self.half = mode == "compiled" or not self.small
        if mode == "compiled" and self.inputs.dim() == 4:  # the order that tensor cores want
            model = model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        captured = mode != "eager"
        forward = torch.compile(model) if mode == "compiled" else model
        self.host: list[tuple[float, ...]] = []
        self.kinds: list[str] = []
        self.rounds: list[float] = []
        self.by_kind: dict[str, list[float]] = {}
        self.optimizer: Any = None
        if optimizer in PEERS:
            self.step = PEERS[optimizer][1](model, self.inputs, self.labels)
            return
        if optimizer in CURVATURES:
            self.optimizer = KFAC(
                forward, 1e-4, curvature=CURVATURES[optimizer], weight_decay=1e-3, **settings
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=self.half):
                self.optimizer.initialize([self.inputs])
        else:
            self.optimizer = first_order(self.small, captured, model.parameters())
        self.forward = forward
        self.step = lambda: self.taken(self.inputs, self.labels)
        if captured:
            replayed = decaylab.captured(self.taken, forward, self.optimizer)
            self.step = lambda: replayed(self.inputs, self.labels)

    def taken(self, inputs: Any, labels: Any) -> Any:
        """One step as a user writes it."""
        started = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            logits = self.forward(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        forward_done = time.perf_counter()
        loss.backward()
        backward_done = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.optimizer.zero_grad()
        self.host.append(
            (forward_done - started, backward_done - forward_done, stepped - backward_done)
        )
        return loss.detach()

    def run(self, steps: int) -> None:
        """Take steps and remember how long each took, by kind."""
        wait(self.device)
        first = len(self.kinds)
        marks: list[Any] = [self.mark()]
        started = time.perf_counter()
        for _ in range(steps):
            self.kinds.append(kind_of_step(self.optimizer))
            self.step()
            marks.append(self.mark())
        wait(self.device)
        self.rounds.append(1e3 * (time.perf_counter() - started) / steps)
        for kind, before, after in zip(self.kinds[first:], marks, marks[1:], strict=False):
            took = before.elapsed_time(after) if self.device.type == "cuda" else after - before
            self.by_kind.setdefault(kind, []).append(took)

    def warm_up(self, steps: int) -> None:
        """Steps that are not counted."""
        for _ in range(steps):
            self.step()
        self.host.clear()

    def times(self) -> Row:
        """Milliseconds a step (the median of the rounds), by kind, and on the host."""
        medians = {kind: statistics.median(values) for kind, values in self.by_kind.items()}
        row: Row = {"ms": statistics.median(self.rounds), "rounds": self.rounds, "kinds": medians}
        if self.host:
            row["host_ms"] = self.host_parts(self.kinds)
        return row

    def host_parts(self, kinds: list[str]) -> dict[str, list[float]]:
        """Medians of forward, backward and step on the host, by kind of step."""
        parts: dict[str, list[tuple[float, ...]]] = {}
        for kind, spans in zip(kinds, self.host, strict=False):
            parts.setdefault(kind, []).append(spans)
        return {
            kind: [round(1e3 * statistics.median(column), 3) for column in zip(*rows, strict=True)]
            for kind, rows in parts.items()
        }

    def mark(self) -> Any:
        """A point in time on the device; on a CPU in milliseconds."""
        if self.device.type != "cuda":
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def first_round(
    loops: dict[str, Loop], network: str, optimizer: str, mode: str, options: argparse.Namespace
) -> Row:
    """Add the optimizer's loop to `loops`; its times in a first round, and its memory."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated() if cuda else 0
    reserved = torch.cuda.memory_reserved() if cuda else 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    settings: Row = {}
    if optimizer in CURVATURES:
        settings["options"] = KFACOptions(
            inversion_lag=options.lag,
            replay=not options.launched,
            half_inverses=optimizer.endswith("-half"),
        )
        settings["step_scaling"] = "spectral" if optimizer.endswith("-spectral") else None
    loop = Loop(network, optimizer, mode, device, **settings)
    loop.warm_up(options.warm_up)
    loop.run(options.steps)
    row = loop.times()
    row["gigabytes"] = (torch.cuda.max_memory_allocated() - allocated) / 1e9 if cuda else None
    # with what graphs and the allocator keep
    row["reserved_gigabytes"] = (
        (torch.cuda.max_memory_reserved() - reserved) / 1e9 if cuda else None
    )
    if options.profile and mode == "eager" and optimizer in CURVATURES:
        profile(loop)
    loops[optimizer] = loop
    return row


def profile(loop: Loop) -> None:
    """What a plain step launches, and what it costs on the host, to stderr."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    while kind_of_step(loop.optimizer) != "plain":
        loop.step()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    wait(loop.device)
    with profiled(activities=activities) as recorded:
        loop.step()
        wait(loop.device)
    events = recorded.key_averages()
    launches = sum(e.count for e in events if e.key.startswith(("cudaLaunch", "cuLaunch")))
    replays = sum(e.count for e in events if e.key.startswith("cudaGraphLaunch"))
    print(f"a plain step: {launches} launches, {replays} graph launches", file=sys.stderr)
    print(events.table(sort_by="self_cpu_time_total", row_limit=18)[:5000], file=sys.stderr)


def table(rows: list[Row]) -> str:
    def of_first(network: str, quantity: str) -> float:
        """The quantity of the first-order optimizer, eager; nan if there is none."""
        wanted = (network, "first", "eager")
        named = [r for r in rows if (r["network"], r["step"], r["mode"]) == wanted]
        return (named[0].get(quantity) if named else None) or float("nan")

    lines = [f"{'network':<9} {'step':<13} {'mode':<9} {'ms':>8} {'x':>5} {'GB':>6} {'x':>5}"]
    for row in rows:
        line = f"{row['network']:<9} {row['step']:<13} {row['mode']:<9}"
        if "error" in row:
            lines.append(f"{line} {row['error']}")
            continue
        ms, gigabytes = row["ms"], row["gigabytes"] or 0.0
        slower = ms / of_first(row["network"], "ms")
        larger = gigabytes / of_first(row["network"], "gigabytes")
        kinds = ", ".join(f"{k} {v:.2f}" for k, v in row["kinds"].items())
        host = f"; host {row['host_ms'].get('plain')}" if row.get("host_ms") else ""
        numbers = f"{ms:8.3f} {slower:5.2f} {gigabytes:6.2f} {larger:5.2f}"
        lines.append(f"{line} {numbers}  {kinds}{host}")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["vgg16", "resnet32"], choices=NETWORKS)
    modes = ("eager", "captured", "compiled")
    parser.add_argument("--modes", nargs="+", default=["eager", "captured"], choices=modes)
    kinds = ("first", *CURVATURES)
    parser.add_argument("--optimizers", nargs="+", default=list(kinds[:3]), choices=kinds)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="of so many steps, taken in turns")
    parser.add_argument("--warm-up", type=int, default=133, help="steps; K-FAC's graphs need 101")
    parser.add_argument("--lag", type=int, default=0, help="K-FAC's inversion lag")
    parser.add_argument("--launched", action="store_true", help="K-FAC's updates without a graph")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers", type=Path, help="folder of public K-FACs, if not installed")
    parser.add_argument("--profile", action="store_true", help="of a plain eager K-FAC step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    if options.peers is not None:
        sys.path.append(str(options.peers))
    about = place(options.device)
    rows: list[Row] = []
    for network in options.networks:
        for mode in options.modes:
            steps = list(options.optimizers)
            if mode == "eager" and network in SMALL and not options.no_peers:
                steps += [name for name in PEERS if installed(name)]
            loops: dict[str, Loop] = {}
            for step in steps:
                row = {"network": network, "step": step, "mode": mode}
                timed = partial(first_round, loops, network, step, mode, options)
                rows.append(attempt(row, timed))
                save(options.out, {"about": about, "rows": rows})
            for step in list(loops) * (options.rounds - 1):
                loops[step].run(options.steps)
                rows[steps.index(step) - len(steps)].update(loops[step].times())
                save(options.out, {"about": about, "rows": rows})
    save(options.out, {"about": about, "rows": rows}, complete=True)
    print(table(rows))


if __name__ == "__main__":
    main()
