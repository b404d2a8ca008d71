"""The decay exposure of a run, added up while it trains."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from decaylab.optim.decay import strength
from decaylab.optim.laws import exposure_rate
from decaylab.probes.layers import Layers, groups_of
from decaylab.probes.movement import with_vectors
from decaylab.probes.reading import Reading, row_name
from decaylab.probes.registry import Probe, register
from decaylab.records.rows import Rows

NAME = "decay_exposure"


class Exposure:
    """The decay exposure of every param group, added up step by step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[int, tuple[Any, Any]] = {}  # group -> its settings, and their rate
        self._totals: dict[int, Any] = {}
        self._layers: Layers | None = None  # those that are trained now
        self._before: dict[str, float] = {}  # layer -> what its group had while it was frozen
        self._frozen: dict[str, float] = {}  # layer -> its own total when it was frozen

    def add(self, steps: int = 1) -> None:
        """Add the rate of one step, or of several; worked out again only where settings changed.

        Nothing where a GradScaler lets the optimizer itself leave the step out (fused, K-FAC).
        """
        overflow = getattr(self._optimizer, "found_inf", None)
        taken = 1.0 if overflow is None else (overflow == 0).double()  # no wait for the device
        for i, group in enumerate(self._optimizer.param_groups):
            get = group.get
            settings = (
                *(get("lr"), strength(group, self._optimizer)),
                *(get("decay"), get("decoupled_weight_decay"), get("momentum"), get("dampening")),
            )
            # a learning rate on the device stays there: comparing it would wait for it
            known = self._known.get(i)
            if known is None or isinstance(settings[0], Tensor) or settings != known[0]:
                known = self._known[i] = settings, exposure_rate(self._optimizer, group)
            self._totals[i] = self._totals.get(i, 0.0) + known[1] * taken * steps

    def begin(self, layers: Layers) -> None:
        """From now on count for these layers, and for no others: those are frozen."""
        known = {} if self._layers is None else self.by_layer(self._layers)
        totals = self._by_layer(layers)
        for layer in layers.weights:
            if self._layers is None or layer not in self._layers.weights:
                self._before[layer] = totals.get(layer, 0.0) - self._frozen.pop(layer, 0.0)
        self._frozen |= {layer: x for layer, x in known.items() if layer not in layers.weights}
        self._layers = layers

    def by_layer(self, layers: Layers) -> dict[str, float]:
        """The total of the group that each layer's weight is in.

        Layers that are in none are left out, as are those whose optimizer finds its learning rate
        itself.
        """
        known = {k: total for k, total in self._by_layer(layers).items() if not math.isnan(total)}
        return {layer: total - self._before.get(layer, 0.0) for layer, total in known.items()}

    def _by_layer(self, layers: Layers) -> dict[str, float]:
        places = {id(group): i for i, group in enumerate(self._optimizer.param_groups)}
        group_places = {
            layer: places[id(group)] for layer, group in groups_of(layers, self._optimizer).items()
        }
        return {
            layer: float(self._totals[i]) for layer, i in group_places.items() if i in self._totals
        }


class ModelExposure:
    """The decay exposure of a model's layers under all of its optimizers, some of them replaced.

    Gains and other vectors are among them.

    `earlier`: the latest rows of the run that is continued, by name.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        layers: Layers,
        earlier: Mapping[str, float] | None = None,
    ) -> None:
        self._earlier = dict(earlier or {})  # by row name, with what optimizers that left have done
        self._by_optimizer: dict[torch.optim.Optimizer, Exposure] = {}
        for optimizer in optimizers:
            self.join(optimizer, layers)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of one optimizer."""
        self._by_optimizer[optimizer].add()

    def add_all(self, steps: int) -> None:
        """Steps of every optimizer."""
        for exposure in self._by_optimizer.values():
            exposure.add(steps)

    def begin(self, layers: Layers) -> None:
        """From now on count for these layers, and for no others."""
        for exposure in self._by_optimizer.values():
            exposure.begin(with_vectors(layers))

    def join(self, optimizer: torch.optim.Optimizer, layers: Layers) -> None:
        """Another optimizer steps the model from now on."""
        self._by_optimizer[optimizer] = Exposure(optimizer)
        self._by_optimizer[optimizer].begin(with_vectors(layers))

    def leave(self, optimizer: torch.optim.Optimizer, layers: Layers) -> None:
        """An optimizer steps the model no longer; what it did counts."""
        totals = self._by_optimizer.pop(optimizer).by_layer(with_vectors(layers))
        for layer, total in totals.items():
            self._earlier[row_name(NAME, layer)] = self._earlier_total(layer) + total

    def by_layer(self, layers: Layers) -> dict[str, float]:
        """The total of each layer since the start."""
        totals: dict[str, float] = {}
        for exposure in self._by_optimizer.values():
            totals |= exposure.by_layer(with_vectors(layers))
        return {layer: self._earlier_total(layer) + total for layer, total in totals.items()}

    def _earlier_total(self, layer: str) -> float:
        return self._earlier.get(row_name(NAME, layer), 0.0)


def last_counted(rows: Rows) -> int | None:
    """The last step at which the exposure of any layer was recorded."""
    return max((row.step for row in rows.rows if row.name.startswith(f"{NAME}/")), default=None)


register(Probe(NAME, "free", lambda moment: Reading(NAME, "1", moment.exposure), unit="1"))
