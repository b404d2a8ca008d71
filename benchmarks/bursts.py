"""Bursts of K-FAC-F under batch normalisation and decay, on digits, on a CPU.

    python benchmarks/bursts.py [--seeds 3] [--epochs 500] [--json]

An MLP with BN at a constant learning rate, 3e-4 where no other is named. Once it fits the training
data, the Fisher matrix is next to zero and K-FAC-F divides by the damping alone, while decay
shortens the weights: relative to them its steps grow as 1 / |W|^2. `SETTINGS` has what is tried
against the bursts that follow.

A burst is a row of epochs whose training accuracy is below 99 %, after the first with 99.9 %: it is
known by what it does, so that settings can be compared, one that holds the norms too. (`diagnose`,
which need not know the accuracy, goes by the norms: `decaylab.diagnosis.bursts`.) Seven minutes on
one core.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from measuring import place

from decaylab.data import DataSet, load
from decaylab.training import RunSpec, train

FITTED, LOST = 0.999, 0.99
BASE = RunSpec(
    **{"data": "digits", "network": "mlp", "hidden": (64, 64), "batch_norm": True},
    **{"optimizer": "kfac-f", "lr": 3e-4, "damping": 1e-3, "batch_size": 64},
    **{"decay": "decoupled", "weight_decay": 1.0},
)
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed damping": {},
    "fixed damping, inverses every 10 steps": {"invert_every": 10},
    "fixed damping, KL clip 1e-3": {"kl_clip": 1e-3},
    "fixed damping, no decay": {"decay": "none", "weight_decay": 0.0},
    "scale-free damping": {"damping_scaling": "scale-free"},
    "fixed damping, lr 1e-3": {"lr": 1e-3},
    "scale-free damping, lr 1e-3": {"damping_scaling": "scale-free", "lr": 1e-3},
}


def bursts(norms: Sequence[float], accuracies: Sequence[float]) -> list[dict[str, float]]:
    """The first epoch of each burst, and the norm before it, from the values of each epoch.

    >>> bursts([9, 8, 7, 12, 11, 10], [0.9, 1, 1, 0.9, 0.98, 1])
    [{'epoch': 4, 'before': 7}]
    """
    burst_list: list[dict[str, float]] = []
    fitted = False
    for epoch, (before, now) in enumerate(pairwise(accuracies), 2):
        fitted = fitted or before >= FITTED
        if fitted and now < LOST <= before:
            burst_list.append({"epoch": epoch, "before": norms[epoch - 2]})
    return burst_list


def measured(spec: RunSpec, data: DataSet) -> dict[str, Any]:
    """A run: the first layer's norm by epoch, its bursts, and the accuracy at the end."""
    rows = [progress.values for progress in train(spec, data=data)]
    norms = [float(f"{row['weight_norm/features.0']:.4g}") for row in rows]
    burst_list = bursts(norms, [row["train/running_accuracy"] for row in rows])
    return {"bursts": burst_list, "test accuracy": rows[-1]["test/accuracy"], "norm": norms}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, runs = load("digits"), []
    base = replace(BASE, epochs=options.epochs, lr_drop_every=options.epochs)
    for setting, changed in SETTINGS.items():
        for seed in range(options.seeds):
            run = measured(replace(base, **changed, seed=seed), data)
            runs.append({"setting": setting, "seed": seed, **run})
            if not options.json:
                print(setting, seed, run["bursts"], f"{run['test accuracy']:.2%}")
    if options.json:
        about = place("cpu") | {"seeds": options.seeds, "epochs": options.epochs}
        print(json.dumps({"about": about, "runs": runs}))


if __name__ == "__main__":
    main()
