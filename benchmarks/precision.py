"""What reduced precision does to a K-FAC step: each layer's step against the one in float64.

    python benchmarks/precision.py RUN... [--data-dir DIR] [--batches 4] [--damping 1e-3] [--json]

RUN is the folder of a K-FAC run with its checkpoint: its factors as they are late in training, and
gradients of its own batches there. The reference inverts the same factors and multiplies in float64
(recipe line 7). `as trained` is what a step computes now, whatever version made the run: inverses
in float32, products in the run's own precision (TF32 on CUDA for tf32 and bf16), those of small
layers in full float32. `bf16 inverses` is what it would be with the inverses rounded to bfloat16.
Relative errors in the Frobenius norm, the largest over batches.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import place
from torch import Tensor
from torch.nn import functional as F

from decaylab.optim.kfac import KFAC
from decaylab.records import RunFolder
from decaylab.training import RunSpec, TrainingRun, checkpoint
from decaylab.training.build import build_data

Steps = dict[str, Tensor]


def load(folder: Path, data_dir: Path | None, device: str) -> TrainingRun:
    """The run as its checkpoint left it, at the beginning of an epoch."""
    run_folder = RunFolder(folder)
    spec = RunSpec.of_run(run_folder)
    run = TrainingRun(spec, build_data(spec, data_dir).to(device), graphs=False)
    state = checkpoint.load(run_folder.checkpoint)
    state["recorded"] = False
    run.load_state_dict(state)
    return run


def reference(optimizer: KFAC, gradients: Steps) -> Steps:
    """(S + r / pi)^-1 gradient (A + pi r)^-1 / T in float64, from the optimizer's own factors."""
    steps, dampings = {}, optimizer.dampings()
    for name, factors in optimizer.factors().items():
        A, S, T = factors.A.double(), factors.S.double(), factors.T.double()
        root = (dampings[name].double() / T).sqrt()
        pi = (A.diagonal().mean() / S.diagonal().mean()).sqrt()
        damped_A = A + pi * root * torch.eye(len(A), dtype=A.dtype, device=A.device)
        damped_S = S + root / pi * torch.eye(len(S), dtype=S.dtype, device=S.device)
        half = torch.linalg.solve(damped_S, gradients[name].double())
        steps[name] = torch.linalg.solve(damped_A, half.mT).mT / T
    return steps


def gradients_of(run: TrainingRun, batches: int) -> Iterator[None]:
    """Leave the gradient of one batch after the other on the parameters."""
    run.batches.begin_epoch()
    for index in range(min(batches, run.steps_per_epoch)):
        images, labels = run.batches.batch(torch.tensor(index, device=run.device))
        run.model.zero_grad()
        with run.at_work(), run.optimizer.paused(), run.autocast():  # type: ignore[attr-defined]
            F.cross_entropy(run.model(images), labels).backward()
        yield


def joined(optimizer: KFAC) -> Steps:
    """[weight, bias] of each layer, as its factors order them: gradients, or then steps."""
    by_layer, blocks = {}, optimizer._preconditioner
    for name, block in blocks.blocks.items():
        parts = [blocks.slots[p].step for p in block.site.parts]
        by_layer[name] = torch.cat(
            [part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1
        )
    return by_layer


@torch.no_grad()
def steps_of(run: TrainingRun) -> tuple[Steps, Steps]:
    """The gradients that lie on the parameters, and what a step makes of them."""
    optimizer: Any = run.optimizer
    with run.at_work():
        for p, slot in optimizer._preconditioner.slots.items():
            slot.step.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        gradients = joined(optimizer)
        optimizer._preconditioner.precondition()
    return gradients, joined(optimizer)


def errors(run: TrainingRun, batches: int) -> dict[str, dict[str, float]]:
    """The largest relative error of each layer's step, by way of computing it."""
    optimizer: Any = run.optimizer
    with run.at_work(), torch.no_grad():
        optimizer._invert()
    worst: dict[str, dict[str, float]] = {}
    stacks = [side for bank in optimizer._preconditioner.banks for side in (bank.A, bank.G)]
    exact_inverses = [stack.values.clone() for stack in stacks]
    for _ in gradients_of(run, batches):
        with torch.no_grad():
            gradients, trained = steps_of(run)
            wanted = reference(optimizer, gradients)
            for stack in stacks:
                stack.values.copy_(stack.values.bfloat16())
            rounded = steps_of(run)[1]
            for stack, values in zip(stacks, exact_inverses, strict=True):
                stack.values.copy_(values)
        for kind, steps in (("as trained", trained), ("bf16 inverses", rounded)):
            for name, step in steps.items():
                error = float((step.double() - wanted[name]).norm() / wanted[name].norm())
                row = worst.setdefault(name, {})
                row[kind] = max(row.get(kind, 0.0), error)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--damping", type=float, help="default: the run's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for folder in options.runs:
        run = load(folder, options.data_dir, options.device)
        optimizer: Any = run.optimizer
        if not isinstance(optimizer, KFAC):
            parser.error(f"{folder} is no K-FAC run")
        optimizer.damping = options.damping or optimizer.damping
        layer_errors = errors(run, options.batches)
        about_run = {"run": run.spec.id, "step": run.step, "precision": run.spec.precision}
        results.append({**about_run, "damping": optimizer.damping, "layers": layer_errors})
    about = place(options.device)
    if options.json:
        print(json.dumps({"about": about, "precision": results}, indent=1))
        return
    for result in results:
        print("{run}, step {step}, {precision}, damping {damping:g}".format(**result))
        print(f"  {'layer':<28}{'as trained':>12}{'bf16 inverses':>15}")
        for name, row in result["layers"].items():
            print(f"  {name:<28}{row['as trained']:>12.2%}{row['bf16 inverses']:>15.2%}")


if __name__ == "__main__":
    main()
