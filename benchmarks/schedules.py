"""How near a schedule without decay comes to a run with decay, on digits, on a CPU.

    python benchmarks/schedules.py [--seeds 3] [--steps 440] [--parts first-order kfac one-run]
                                   [--json]

Each row of the first two parts is two runs from the same start on the same batches: with decay of
the scale-invariant layers, and without it by a schedule. Ratios of the second to the first, of
means over each eighth of the run: the smallest and the largest over eighths, layers and seeds. The
schedules: what `advise schedule` writes (`equivalent_schedule`); with r = what decay leaves of the
weights, `lr/r` and `lr, damping r²`, which it would be if the optimizer remembered nothing; and
`none`, which leaves the learning rate as it is.

- first-order: by the paper's law (the probe `effective_lr`: lr/|W|, SGD: lr/|W|^2), by the one that
  `diagnose` reads (`RecordedLayer.effective`: with what Adam remembers), and the rotation per step.
- kfac: the rotation per step.
- one-run: what decay does to K-FAC's effective damping, as reconstructed from one run, over what it
  does against the baseline: of layers that `diagnose` reconstructs, and of those for which it
  refuses to (here its limit is lifted). `GRID` has the settings.

Two minutes on one core.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from measuring import place
from torch import Tensor, nn

from decaylab import KFAC, watch
from decaylab.data import load
from decaylab.diagnosis import EquivalentSchedule, effects, equivalent_schedule
from decaylab.diagnosis import layers as recorded_layers
from decaylab.diagnosis.layers import RecordedLayer, known_rate
from decaylab.diagnosis.runs import Run, read_run
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.laws.dynamics import Series
from decaylab.probes import FREE, Watch

EIGHTHS = 8
BATCH = 64
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run with decay of the scale-invariant layers: `build` takes the model and its groups."""

    name: str
    build: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]
    weight_decay: float
    decay: str = "decoupled"
    schedules: tuple[str, ...] = ("advise schedule",)

    def optimizer(self, model: nn.Module, groups: list[dict[str, Any]]) -> Any:
        """Of these groups of the model."""
        if self.build is KFAC:
            return KFAC(model, params=groups, **self.settings)
        return self.build(groups, **self.settings)

    def decayed(self, model: nn.Module) -> Any:
        """The same, with decay."""
        chosen = {"weight_decay": self.weight_decay, "decay": self.decay}
        return self.optimizer(model, decayed_layers_only(model, **chosen))

    def without_memory(self, schedule: EquivalentSchedule) -> EquivalentSchedule:
        """The schedule, if nothing remembered other norms (decoupled decay)."""
        rate = 1 - self.settings["lr"] * self.weight_decay
        left = [rate**step for step in range(len(schedule.lr) + 1)]  # before each step
        if schedule.damping:
            damping = tuple(self.settings["damping"] * r**2 for r in left[:-1])
            return replace(schedule, lr=schedule.others, damping=damping)
        return replace(schedule, lr=tuple(self.settings["lr"] / r for r in left[1:]))


def adamw(beta2: float) -> Case:
    settings = {"lr": 2e-3, "betas": (0.9, beta2), "eps": 1e-8}
    schedules = ("none", "lr/r", "advise schedule")
    name = f"AdamW, lr {settings['lr']:g}, β₂ {beta2:g}"
    return Case(name, adam, settings, 1.0, schedules=schedules)


def sgd_case(decay: str, lr: float) -> Case:
    """Takes the same part of the weights a step by either kind of decay."""
    momentum, shrink = 0.9, 2e-3
    strength = shrink / lr * (1 - momentum if decay == "l2" else 1)
    settings = {"lr": lr, "momentum": momentum}
    name = f"SGD, lr {lr:g}, momentum {momentum:g}, {decay}"
    return Case(name, sgd, settings, strength, decay)


def kfac_case(curvature: str, momentum: float, lr: float, invert_every: int = 50) -> Case:
    """Its factors remember refresh_every / (1 - factor_decay) = 100 steps."""
    settings = {"lr": lr, "momentum": momentum, "damping": 1e-2, "curvature": curvature}
    settings |= {"refresh_every": 5, "factor_decay": 0.95, "invert_every": invert_every}
    settings |= {"step_scaling": "none"}
    schedules = ("lr, damping r²", "advise schedule")
    name = f"K-FAC-{curvature[0].upper()}, lr {lr:g}, momentum {momentum:g}"
    return Case(name, KFAC, settings, 2.5e-3 / lr, schedules=schedules)


FIRST_ORDER = [
    *(adamw(beta2) for beta2 in (0.999, 0.95)),
    *(sgd_case(decay, lr) for lr in (0.01, 0.05) for decay in ("l2", "decoupled")),
]
KFACS = [
    kfac_case(curvature, momentum, lr)
    for curvature in ("gauss-newton", "fisher")
    for momentum, lr in ((0.0, 5e-3), (0.9, 5e-4), (0.9, 5e-3))
]
# K-FAC's settings behind the limit on what is reconstructed from one run.
GRID = [
    {"curvature": curvature, "lr": lr, "weight_decay": decay, "damping": damping, **memory}
    for memory in (
        {"invert_every": 20},
        {"invert_every": 100},
        {"invert_every": 5, "refresh_every": 5},
    )
    for lr, decay, damping in ((0.01, 1.0, 1e-2), (0.01, 0.3, 1e-2), (0.03, 0.5, 1e-3))
    for curvature in ("fisher", "gauss-newton")
]


def decayed_layers_only(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    return parameter_groups(model, scope=lambda role: role.role == "invariant", **settings)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()]
    layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load("digits")
    images = (data.train.images.float() / 255 - data.mean[0]) / data.std[0]
    return images.flatten(1), data.train.labels


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    schedule: EquivalentSchedule | None = None,
    **watching: Any,
) -> Watch:
    """A run on the same batches each time; the schedule is for the first group of parameters."""
    inputs, labels = digits()
    generator = torch.Generator().manual_seed(0)
    with watch(model, optimizer, **{"every": 4, **watching}) as watched:
        for step in range(steps):
            if schedule is not None:
                optimizer.param_groups[0]["lr"] = schedule.lr[step]
                if schedule.damping:
                    optimizer.damping = schedule.damping[step]
            chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched


def runs_of(case: Case, seed: int, steps: int) -> dict[str, Run]:
    """The run with decay, under the name "", and those without it, by schedule."""
    start = net(seed)
    model = copy.deepcopy(start)
    decayed = train(model, case.decayed(model), steps)
    by_schedule = {"": read_run(decayed)}
    written = equivalent_schedule(decayed)
    for name in case.schedules:
        schedule = {"advise schedule": written, "none": replace(written, lr=written.others)}.get(
            name, case.without_memory(written)
        )
        model = copy.deepcopy(start)
        optimizer = case.optimizer(model, schedule.groups(model))
        by_schedule[name] = read_run(train(model, optimizer, steps, schedule))
    return by_schedule


def means(series: Series, parts: int) -> list[float]:
    """Over each part of the records; the first one, after step 1, is left out."""
    values = [value for _, value in series[1:]]
    ends = [i * len(values) // parts for i in range(parts + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(ends)]


def ratios(
    run: Run, decayed: Run, quantity: Callable[[RecordedLayer], Series], parts: int = EIGHTHS
) -> Iterator[float]:
    """Of the means over each part, for the layers that the schedule is for."""
    for layer in decayed.turned_layers:
        both = (
            means(quantity(compared_layer), parts)
            for compared_layer in (run.layers[layer.name], layer)
        )
        yield from (mean / decayed_mean for mean, decayed_mean in zip(*both, strict=True))


QUANTITIES: dict[str, Callable[[RecordedLayer], Series]] = {
    "paper's law": lambda layer: layer.series["effective_lr"],
    "effective learning rate": lambda layer: layer.effective,
    "rotation per step": lambda layer: layer.series["rotation"],
}


def compared(case: Case, seeds: int, steps: int, quantities: Iterable[str]) -> list[Row]:
    """A row for each schedule: the smallest and the largest of the ratios."""
    runs = [runs_of(case, seed, steps) for seed in range(seeds)]
    rows = []
    for name in case.schedules:
        ranges = {
            quantity: extremes(
                value
                for by_schedule in runs
                for value in ratios(by_schedule[name], by_schedule[""], QUANTITIES[quantity])
            )
            for quantity in quantities
        }
        taken = {known_rate(layer.first) for layer in runs[0][""].turned_layers}
        rows.append(
            {
                "run": case.name,
                "decay a step": float(f"{max(taken):.2g}"),
                "schedule": name,
                **ranges,
            }
        )
    return rows


def extremes(values: Iterable[float]) -> list[float]:
    """[smallest, largest]."""
    listed = list(values)
    return [min(listed), max(listed)]


def one_run(seeds: int, steps: int) -> list[Row]:
    """Of K-FAC on a grid of settings: reconstructed from one run over that of both."""
    by_refusal: dict[bool, list[float]] = {False: [], True: []}
    for settings, seed in product(GRID, range(seeds)):
        for refused, ratio in reconstructions(settings, seed, steps):
            by_refusal[refused].append(ratio)
    does = {False: "answers from one run", True: "asks for a baseline"}
    return [
        {"diagnose": does[refused], "layers": len(values), "one run / both": extremes(values)}
        for refused, values in by_refusal.items()
        if values
    ]


def reconstructions(settings: Row, seed: int, steps: int) -> list[tuple[bool, float]]:
    """By layer: whether `diagnose` refuses to reconstruct it, and the factor that it is off by."""
    watching: dict[str, Any] = {"every": 20, "probes": [*FREE, "second_order_share"]}
    runs = []
    for weight_decay in (settings["weight_decay"], 0.0):
        model = net(seed)
        kfac_settings = {**settings, "weight_decay": weight_decay, "step_scaling": "none"}
        optimizer = KFAC(model, **kfac_settings)
        runs.append(read_run(train(model, optimizer, steps, **watching)))
    factors = []
    for layer in runs[0].turned_layers:
        both = effects.damping_effect(layer, runs[1].layers[layer.name])
        refused = layer.old_factors
        lenient = replace(recorded_layers.RULES, remembered_too_much=math.inf)
        with mock.patch.object(recorded_layers, "RULES", lenient):
            alone = effects.damping_effect(layer, None)
        assert both is not None
        assert alone is not None
        factors.append((refused, alone.value / both.value))
    return factors


PARTS: dict[str, Callable[[int, int], list[Row]]] = {
    "first-order": lambda seeds, steps: [
        row for case in FIRST_ORDER for row in compared(case, seeds, steps, QUANTITIES)
    ],
    "kfac": lambda seeds, steps: [
        row for case in KFACS for row in compared(case, seeds, steps, ["rotation per step"])
    ],
    "one-run": one_run,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.perf_counter()
    by_part: dict[str, Any] = {
        part: PARTS[part](options.seeds, options.steps) for part in options.parts
    }
    seconds = round(time.perf_counter() - start)
    about = place("cpu") | {"seeds": options.seeds, "steps": options.steps, "seconds": seconds}
    if options.json:
        print(json.dumps({"about": about, **by_part}, indent=1, ensure_ascii=False))
        return
    print(about)
    for part, rows in by_part.items():
        print(part)
        for row in rows:
            print("  " + "; ".join(f"{name}: {words(value)}" for name, value in row.items()))


def words(value: Any) -> str:
    return f"{value[0]:.3f} to {value[1]:.3f}" if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
