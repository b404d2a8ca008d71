"""Does a burst of K-FAC-F hang on the data's order, or on the precision? Branches of one run.

    python benchmarks/burst_branches.py [--epoch 85] [--runs FOLDER] [--data-dir DIR] [--json FILE]

Trains Table 1's VGG16 with batch normalisation under K-FAC-F and decay up to an epoch before the
bursts (docs/reproduction.md), once, in bf16. From that checkpoint it goes on to the end in bf16,
TF32 and float32, with three orders of the data each: order 0 is the run's own. After each epoch:
test accuracy, the norm of the first layer, and the least running variance of the first batch
normalisation. If bursts come at the same norm whatever the order and the precision, they are of the
trajectory; if they come and go with either, of its noise. About eight minutes on an H200.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from decaylab.attribution.branches import branch_from, train_to
from decaylab.data import DataSet, load
from decaylab.paper import cells, select
from decaylab.probes import layers_of
from decaylab.training import Execution, RunSpec
from decaylab.training.build import build_batches
from decaylab.training.journal import code_commit
from decaylab.training.loop import device_name

CELL = ["dataset=cifar10", "network=vgg16", "batch_norm=1", "augment=0", "optimizer=kfac-f"]
PRECISIONS, ORDERS = ("bf16", "tf32", "fp32"), (0, 1, 2)


def burst_cell() -> RunSpec:
    """The run whose bursts are looked into."""
    (cell,) = select(cells("table1", "full"), [*CELL, "weight_decay=1"])
    return cell.runs[0]


def branches(
    spec: RunSpec,
    epoch: int,
    data: DataSet,
    folder: Path,
    *,
    device: str = "cpu",
    precisions: Iterable[str] = PRECISIONS,
    orders: Sequence[int] = ORDERS,
    known: Sequence[Mapping[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Each branch as it ends: its precision and order, and a list of what each epoch ended with.

    Those in `known` are there already.
    """
    spec = spec.resolved()
    assert spec.epochs is not None
    checkpoint = train_to(
        spec, epoch, data=data, folder=folder, device=device, execution=Execution(tier="custom")
    )
    steps = build_batches(spec, data).steps_per_epoch
    done_before = {(branch["precision"], branch["order"]) for branch in known}
    for precision in precisions:
        left = [order for order in orders if (precision, order) not in done_before]
        if not left:
            continue
        make = branch_from(checkpoint, replace(spec, precision=precision), data, device)
        for order in left:
            model, _, step, evaluate = make(order)
            course = []
            for done in range(epoch + 1, spec.epochs + 1):
                for _ in range(steps):
                    step()
                course.append({"epoch": done, **evaluate(), **_first_layer(model)})
            yield {"precision": precision, "order": order, "epochs": course}


def _first_layer(model: torch.nn.Module) -> dict[str, float]:
    (weights, *_) = layers_of(model).weights.values()
    norm = torch.stack([weight.detach().double().norm() for weight in weights.values()]).norm()
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    variance = next(module.running_var for module in norms if module.running_var is not None)
    return {"norm": float(norm), "running_variance_least": float(variance.min())}


def main() -> None:
    """Run all branches and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epoch", type=int, default=85)
    parser.add_argument("--runs", type=Path, default=Path("runs/burst-branches"))
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    spec = burst_cell()
    data = load(spec.data, given.data_dir)
    part = None if given.json is None else given.json.with_name(given.json.name + ".part")
    made = json.loads(part.read_text())["branches"] if part is not None and part.exists() else []
    left = branches(spec, given.epoch, data, given.runs, device=given.device, known=[*made])
    for branch in left:
        made.append(branch)
        last, least = branch["epochs"][-1], min(e["test/accuracy"] for e in branch["epochs"])
        print(
            f"{branch['precision']} order {branch['order']}: ends at {last['test/accuracy']:.4f},"
            f" lowest {least:.4f}, norm {last['norm']:.2f}",
            flush=True,
        )
        if part is not None:  # after each, beside the file: the next call goes on from there
            record = {
                **{"device": device_name(torch.device(given.device)), "commit": code_commit()},
                **{"spec": spec.id, "epoch": given.epoch, "branches": made},
            }
            part.write_text(json.dumps(record, indent=1) + "\n")
    if part is not None:
        part.replace(given.json)


if __name__ == "__main__":
    main()
