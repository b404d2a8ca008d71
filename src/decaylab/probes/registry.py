"""The registry of probes: what each measures, in which unit, at what cost and when.

The file that measures a probe registers it, and every file of this package is imported: adding a
probe touches one file.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from decaylab.errors import NameTaken, check_name
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.optim.kfac import KFAC
from decaylab.optim.laws import exposure_rate
from decaylab.probes.layers import Layers, stepped_by
from decaylab.probes.reading import Reading

Cost = Literal["free", "one backward", "many"]
When = Literal["record", "seldom", "tenth", "end"]


class ImageBatches(Protocol):
    """The images of a run of ours, normalised, in batches."""

    @property
    def small(self) -> bool:
        """Whether it is a toy, on which less is measured."""

    def train(self, batch_size: int) -> Iterator[Tensor]:
        """The training images."""

    def test(self, batch_size: int) -> Iterator[Tensor]:
        """The test images."""


@dataclass(frozen=True)
class Moment:
    """What a probe is given: the state after a step.

    Attributes:
        model: the model without wrappers.
        optimizers: the torch optimizers that step it.
        inputs: the fixed batch given to `watch`, or None. logits: where they are in the output.
        layers: the model's layers, found once.
        before: the weights and gains before the step; None if they were not kept.
        earlier: for probes that follow a record, the move of the step before; else None.
        exposure: decay exposure of each layer since the start.
        images: the data of a run of ours; else None.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    inputs: Inputs
    layers: Layers
    before: Mapping[str, Mapping[str, Tensor]] | None
    exposure: Mapping[str, float]
    logits: LogitsRule = None
    earlier: Mapping[str, Mapping[str, Tensor]] | None = None
    images: ImageBatches | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first of the optimizers."""
        return self.optimizers[0]

    @property
    def rates(self) -> dict[str, float]:
        """The fraction of each layer's weight, or of a vector, that decay removes per step."""
        holders = stepped_by(self.optimizers)
        rates = {}
        for layer, weights in {**self.layers.weights, **self.layers.vectors}.items():
            held = next((holders[p] for p in weights.values() if p in holders), None)
            rates[layer] = 0.0 if held is None else float(exposure_rate(*held))
        return rates

    @property
    def kfac(self) -> KFAC | None:
        """The K-FAC among them."""
        return next((o for o in self.optimizers if isinstance(o, KFAC)), None)


@dataclass(frozen=True)
class Probe:
    """A named measurement.

    Attributes:
        name: what `watch` calls it. measure: returns readings, or one.
        cost: "free" (no pass through the model), "one backward" (about one training step), "many".
        needs_inputs: whether it runs the model.
        unit: what the numbers are in.
        when: how often it is due by default. "record": whenever anything is recorded; "seldom": at
            the first record, the fourth, the sixteenth and so on, and in runs of ours at the start,
            after a tenth of the run and at its end; "tenth" and "end": in runs of ours after each
            tenth of the run, or at its end, elsewhere at each record.
        follows: whether it is measured at the step after a record, from both updates.
        how: what the records say about it: mode of batch normalisation, size of a batch.
        rows: other names for it: those of the rows it records.
    """

    name: str
    cost: Cost
    measure: Callable[[Moment], Reading | Sequence[Reading]]
    needs_inputs: bool = False
    unit: str = ""
    when: When = "record"
    follows: bool = False
    how: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rows: tuple[str, ...] = ()


PROBES: dict[str, Probe] = {}
"""All that are registered, by name."""


def register(probe: Probe) -> None:
    """Make a probe available by name to `watch` and to runs."""
    if probe.name in PROBES:
        raise NameTaken("probe", probe.name)
    PROBES[probe.name] = probe


def load_all(package: str, path: Sequence[str]) -> None:
    """Import every module of a package, so that its probes are registered."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def probe_named(name: str) -> Probe:
    """The probe of that name, or that records rows of that name; an error lists all."""
    by_row = {row: probe for probe in PROBES.values() for row in probe.rows}
    if name in by_row:
        return by_row[name]
    check_name("probe", name, PROBES)
    return PROBES[name]


def free_probes() -> tuple[str, ...]:
    """The names of the probes that cost nothing and are always measured."""
    return tuple(n for n, probe in PROBES.items() if probe.cost == "free" and not probe.follows)
