"""How much memory K-FAC's loop should need on a GPU, computed on a CPU without any of it.

    python benchmarks/memory.py [--networks resnet50 vit gpt124 gpt350] [--out FILE]

The loop of `eager.py` on fake tensors: shapes without numbers. Every tensor that an operation makes
counts until it is freed, and the peak is taken over a plain step and those that refresh and
invert. On top of it comes what the graph of a replayed update keeps: as much as the update needs.
What the graph of an inversion keeps stands by itself: without one, the allocator keeps as much
after the first inversion, but gives it to others who need it.
Not counted: workspaces of cuBLAS and cuDNN, the allocator's rounding, and kernels that fuse
otherwise on a GPU. It is within 3 % of the peaks measured in results/loops/eager-models.json
(tested).
"""

import argparse
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from eager import CURVATURES, NETWORKS, SMALL, first_order
from measuring import kind_of_step, place, save
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from decaylab.curvature import storage
from decaylab.curvature.kinds.kind import Shape
from decaylab.curvature.preconditioner import LARGEST_KEPT, Preconditioner
from decaylab.optim.health import Skips
from decaylab.optim.kfac import KFAC
from decaylab.optim.options import KFACOptions

Row = dict[str, Any]
STEPS = ("first", "kfac-g", "kfac-g-half")


class Memory(TorchDispatchMode):
    """Bytes of all storages that are alive, and the most there have been since `peak` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.grow(size)

    def grow(self, size: int) -> None:
        """Take so many bytes more, or give some back."""
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def as_on_a_gpu(memory: Memory) -> Iterator[None]:
    """K-FAC's layout there, on fake tensors; memory that it gives back by hand is counted, too."""
    wide, look, resize = Shape.wide, Skips.look, Preconditioner._resize_room
    half_product = storage._half_product

    def resized(self: Preconditioner, *, there: bool) -> None:
        size = sum(step.nbytes for step in self.steps)
        if not self.keeps_room:
            memory.grow(size if there else -size)

    def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        return left.new_empty(len(left), left.shape[1], right.shape[2], dtype=dtype)

    cuda = torch.device("cuda")
    Shape.wide = lambda self, device: wide(self, cuda)  # type: ignore[method-assign]
    Skips.look = lambda self: None  # type: ignore[method-assign]
    Preconditioner._resize_room = resized  # type: ignore[method-assign]
    storage._half_product = product
    try:
        yield
    finally:
        Shape.wide, Skips.look = wide, look  # type: ignore[method-assign]
        Preconditioner._resize_room = resize  # type: ignore[method-assign]
        storage._half_product = half_product


def predicted(network: str, step: str) -> Row:
    """Gigabytes: the peak of a loop, what its inversion's graph and K-FAC keep between steps."""
    memory = Memory()
    with FakeTensorMode(allow_non_fake_inputs=True), memory, as_on_a_gpu(memory):
        make, batch = NETWORKS[network]
        model, (inputs, labels) = make(), batch("cpu")
        optimizer: Any = first_order(network in SMALL, False, model.parameters())
        if step in CURVATURES:
            options = KFACOptions(half_inverses=step.endswith("-half"), seed=0)
            curvature: Any = CURVATURES[step]
            optimizer = KFAC(model, 1e-4, curvature=curvature, refresh_every=2, options=options)
            running, keeps_room = optimizer.estimator.running, optimizer._preconditioner.keeps_room
            running.keeps_totals = keeps_room and running.may_keep_totals
        peaks, update = [], 0
        for _ in range(3):  # an inversion, a plain step, a refresh beside all state
            kind = kind_of_step(optimizer)
            memory.peak = memory.now
            with torch.autocast("cpu", torch.bfloat16, enabled=network not in SMALL):
                loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
            loss.backward()
            peaks.append(memory.peak)
            before, memory.peak = memory.now, memory.now
            optimizer.step()
            peaks.append(memory.peak)
            if kind == "plain":
                update = memory.peak - before
            optimizer.zero_grad()
            del loss
        inversion = 0.0
        if isinstance(optimizer, KFAC) and optimizer._preconditioner.keeps_room:
            peaks = [peak + update for peak in peaks[::2]] + peaks[1::2]
            inversion = optimizer._preconditioner.inversion_room
            inversion *= inversion <= LARGEST_KEPT
        parameters = sum(p.nbytes for p in model.parameters())
        state = memory.now - parameters - inputs.nbytes - labels.nbytes
    numbers = {"gigabytes": max(peaks), "inversion": inversion, "state": state}
    return {name: size / 1e9 for name, size in (numbers | {"parameters": parameters}).items()}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    large = [name for name in NETWORKS if name not in SMALL]
    parser.add_argument("--networks", nargs="+", default=large, choices=NETWORKS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    rows: list[Row] = []
    print(f"{'network':<9} {'step':<12} {'GB':>6} {'x':>5} {'state':>6} {'of parameters':>13}")
    for network in options.networks:
        for step in STEPS:
            row = {"network": network, "step": step, **predicted(network, step)}
            rows.append(row)
            first = next(r for r in rows if r["network"] == network)
            times = row["gigabytes"] / first["gigabytes"]
            share = row["state"] / row["parameters"]
            print(
                f"{network:<9} {step:<12} {row['gigabytes']:6.2f} {times:5.2f} "
                f"{row['state']:6.2f} {share:13.2f}",
                flush=True,
            )
    about = place("cpu") | {"device": "computed on a CPU"}
    save(options.out, {"about": about, "rows": rows}, complete=True)


if __name__ == "__main__":
    main()
