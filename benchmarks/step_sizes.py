"""K-FAC whose steps have a set size, beside the paper's fixed step: ResNet32 with BN + Aug.

    python benchmarks/step_sizes.py [--optimizer kfac-g] [--seeds 3] [--runs FOLDER]
                                    [--data-dir DIR] [--smoke] [--out FILE]

The fixed step is Table 1's cell at tier short (a fifth of the schedule) with its published
settings. With `step_rms` 0.2 and damping relative to the trace, which are KFAC's own defaults, GRID
is tried on nine tenths of the training set and judged on the last tenth; the best one is trained on
all of it. Both have the same seeds, schedule and batches. Runs are kept in FOLDER, and a call that
was cut short goes on there. `--smoke`: two epochs of a narrow net on digits, for a CPU.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, place, save

from decaylab.data import DataSet, load
from decaylab.paper import cells, select
from decaylab.records.store import RunStore
from decaylab.training import Execution, RunSpec, train

Row = dict[str, Any]
CELL = ["dataset=cifar10", "network=resnet32", "batch_norm=1", "augment=1"]
RMS: Row = {"step_rms": 0.2, "damping": 1.0, "damping_scaling": "trace", "kl_clip": 0.0}
GRID = [{"lr": lr, "weight_decay": wd} for lr in (1e-3, 3e-3) for wd in (0.1, 0.3)]
SMOKE: Row = {"data": "digits", "augment": False, "network": "resnet20", "width": 0.125}


def fixed_step(optimizer: str) -> RunSpec:
    """Table 1's run with decay."""
    chosen = select(cells("table1", "short"), [*CELL, f"optimizer={optimizer}"])
    (spec,) = [cell.runs[0] for cell in chosen if cell.runs[0].weight_decay]
    return spec


def accuracy(spec: RunSpec, data: DataSet, options: argparse.Namespace) -> Row:
    """Train; the test accuracy at the end (of a held-out tenth, where the spec has one)."""
    how = Execution(tier="short", compiled=options.device == "cuda")
    values: Row = {}
    store = RunStore(options.runs)
    for progress in train(spec, data=data, device=options.device, store=store, execution=how):
        values = dict(progress.values)
    return {"accuracy": values["test/accuracy"], "id": spec.id}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", default="kfac-g", choices=("kfac-f", "kfac-g"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/step-sizes"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--smoke", action="store_true", help="for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    fixed = fixed_step(options.optimizer)
    if options.smoke:
        fixed = replace(fixed, **SMOKE, epochs=2, initialize_batches=2, precision="fp32")
    data = load(fixed.data, options.data_dir)
    about = place(options.device) | {"optimizer": options.optimizer, "grid": GRID}
    rows: list[Row] = []

    def run(step: str, spec: RunSpec) -> Row:
        settings = {"lr": spec.lr, "weight_decay": spec.weight_decay}
        part = "held-out" if spec.held_out else "test"
        row = {"step": step, "part": part, "setting": settings, "seed": spec.seed}
        rows.append(attempt(row, lambda: accuracy(spec, data, options)))
        save(options.out, {"about": about, "rows": rows})
        return rows[-1]

    tried = [
        run("rms", replace(fixed, **RMS, **setting, held_out=True, seed=0)) for setting in GRID
    ]
    best = max(tried, key=lambda row: row.get("accuracy", 0.0))["setting"]
    for seed in range(options.seeds):
        run("rms", replace(fixed, **RMS, **best, seed=seed))
        run("fixed", replace(fixed, seed=seed))
    save(options.out, {"about": about, "rows": rows}, complete=True)
    for step in ("rms", "fixed"):
        those = [r for r in rows if r["step"] == step and r["part"] == "test" and "accuracy" in r]
        numbers = [row["accuracy"] for row in those]
        spread = f" +- {statistics.stdev(numbers):.4f}" if len(numbers) > 1 else ""
        mean = f"{statistics.mean(numbers):.4f}{spread}" if numbers else "no run ended"
        setting = those[0]["setting"] if those else {}
        print(f"{step:<6} {setting}: {mean} (n = {len(numbers)})")


if __name__ == "__main__":
    main()
