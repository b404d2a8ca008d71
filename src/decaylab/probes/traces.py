"""Traces of Fisher and Gauss-Newton by layer, of weights and normalised weights (Fig. 7)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from decaylab.curvature.factors import KroneckerFactors
from decaylab.curvature.outputs import Likelihood
from decaylab.curvature.preserve import (
    BatchNormMode,
    bare,
    check_inputs,
    chunks,
    layer_names,
    trainable,
)
from decaylab.curvature.products import exact_traces, sampled_traces
from decaylab.errors import check_name
from decaylab.probes.applied import applied, whole
from decaylab.probes.kronecker import grouped, named, seen, weight_of, without_bias
from decaylab.probes.layers import layers_of
from decaylab.probes.reading import Reading, numbers, row_name, standard_error
from decaylab.probes.registry import Moment, Probe, register

TRAIN = "_train"
BATCH = 128  # what traces in train mode, which depend on the batch, are taken on
NAMES = {"gauss-newton": "gn_trace", "fisher": "fisher_trace"}
UNITS = {"gauss-newton": "logit^2 / weight^2", "fisher": "nat / weight^2"}


@dataclass(frozen=True)
class TraceReading(Reading):
    """tr C_ll by layer, their sum, and the traces of the normalised weights.

    Attributes:
        normalised: |W_l|^2 tr C(W_l), W_l the layer's weight without its bias. By Eq. 13 this is
            tr C(W_l / |W_l|) where the layer is scale-invariant; elsewhere it has no such meaning.
        normalised_errors: standard errors of these; empty if they are exact.
    """

    normalised: Mapping[str, float] = field(default_factory=dict)
    normalised_errors: Mapping[str, float] = field(default_factory=dict)

    def rows(self) -> dict[str, float]:
        """As `Reading.rows`, with the normalised ones under `name_normalised/layer`.

        In train mode the names end in `_train`: the two modes are never mixed.
        """
        name = self.name.removesuffix(TRAIN)
        name = f"{name}_normalised{TRAIN if name != self.name else ''}"
        return super().rows() | {row_name(name, layer): v for layer, v in self.normalised.items()}


def curvature_traces(
    model: nn.Module,
    inputs: Tensor,
    *,
    curvature: Literal["fisher", "gauss-newton"] = "fisher",
    likelihood: Likelihood = "categorical",
    samples: int | None = None,
    chunk: int | None = 128,
    batch_norm: BatchNormMode = "eval",
) -> TraceReading:
    """Tr F or tr G of every layer's diagonal block (Sec. 4.3, Fig. 7). Scaling: mean over rows.

    Exact by default: a backward pass per row and class (see `exact_traces`). With `samples=k`, k
    backward passes per chunk of `chunk` examples and standard errors. In nats (Fisher) or logit^2
    (Gauss-Newton) per weight^2. The total is the trace of the whole matrix.

    With `batch_norm="train"` normalisation uses the statistics of fixed batches of `chunk` examples
    (128 in all records), without touching the running ones: the mode in which Eq. 13 holds, so that
    `normalised` is tr C(W/|W|). The trace then depends on the size of the batch; what does not fill
    a last one is left out. Rows of this mode are called `fisher_trace_train`, `gn_trace_train`,
    `fisher_trace_normalised_train` and `gn_trace_normalised_train`.
    """
    check_inputs(model, inputs)
    check_name("curvature", curvature, NAMES)
    kind: dict[str, Any] = {
        "curvature": curvature,
        "likelihood": likelihood,
        "batch_norm": batch_norm,
    }
    parts = [inputs]
    if batch_norm == "train" and chunk is not None and len(inputs) > chunk:
        parts = [part for part in inputs.split(chunk) if len(part) == chunk]
    by_parameter: dict[str, Tensor] = {}
    for part in parts:
        if samples is None:
            traces = {n: t[None].double() for n, t in exact_traces(model, part, **kind).items()}
        else:
            traces = _sampled(model, part, samples, chunk, kind)
        for name, draws in traces.items():
            by_parameter[name] = by_parameter.get(name, 0) + draws / len(parts)
    layers = layer_names(trainable(model))
    by_layer = {layer: _sum(by_parameter[n] for n in names) for layer, names in layers.items()}
    normalised = {}
    for layer, weights in layers_of(model).weights.items():
        square = _sum(w.detach().double().square().sum() for w in weights.values())
        normalised[layer] = square * _sum(by_parameter[name] for name in weights)
    name = NAMES[curvature] + (TRAIN if batch_norm == "train" else "")
    return _reading(name, UNITS[curvature], by_layer, normalised)


def kfac_traces(model: nn.Module, factors: Mapping[str, KroneckerFactors]) -> TraceReading:
    """T tr A tr S of every K-FAC block, which stands for tr C_ll. No pass through the model.

    A convolution's positions are taken as independent, so it differs from the exact trace there.
    Scaling as the factors: mean over rows.
    """
    parameters = named(model)
    traces, normalised = {}, {}
    for layer, factor in seen(factors).items():
        traces[layer] = _kronecker_trace(factor)[None]
        weight = weight_of(parameters, factor)
        if weight is not None:
            weight_trace = _kronecker_trace(without_bias(factor))
            normalised[layer] = (weight_trace * weight.detach().double().square().sum())[None]
    return _reading("kfac_trace", "curvature", traces, normalised)


def _kronecker_trace(factors: KroneckerFactors) -> Tensor:
    def trace(side: Tensor) -> Tensor:
        diagonal = side if side.dim() == 1 + grouped(factors) else side.diagonal(dim1=-2, dim2=-1)
        return diagonal.sum(-1)

    return factors.T * (trace(factors.A) * trace(factors.S)).sum()


def _sampled(
    model: nn.Module, inputs: Tensor, samples: int, chunk: int | None, kind: dict[str, Any]
) -> dict[str, Tensor]:
    generator = torch.Generator(inputs.device).manual_seed(0)
    draws: dict[str, Tensor] = {}
    for part in chunks(bare(model), inputs, chunk, kind["batch_norm"]):
        part_draws = sampled_traces(model, part, samples=samples, generator=generator, **kind)
        for name, values in part_draws.items():
            draws[name] = draws.get(name, 0) + values.double() * len(part) / len(inputs)
    return draws


def _reading(
    name: str, unit: str, draws: dict[str, Tensor], normalised: dict[str, Tensor]
) -> TraceReading:
    """Means and standard errors over the draws [k] of each layer; a single draw is exact."""
    total = torch.stack(list(draws.values())).sum(0)
    exact = len(total) == 1

    def errors(layer_draws: dict[str, Tensor]) -> dict[str, float]:
        return {} if exact else numbers({k: standard_error(v) for k, v in layer_draws.items()})

    return TraceReading(
        name,
        unit,
        numbers({k: v.mean() for k, v in draws.items()}),
        float(total.mean()),
        errors(draws),
        None if exact else float(standard_error(total)),
        numbers({k: v.mean() for k, v in normalised.items()}),
        errors(normalised),
    )


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _traces(moment: Moment, curvature: Literal["fisher", "gauss-newton"]) -> Reading:
    """In runs of ours of the first layer's normalised weights alone (Fig. 7)."""
    small = moment.images is not None and moment.images.small
    samples, batches = (4, 1) if small else (8, 2)
    kind: dict[str, Any] = {"curvature": curvature, "samples": samples, "batch_norm": "train"}
    if moment.images is None:
        model, inputs = applied(moment.model, moment.inputs, moment.logits)
        return curvature_traces(
            model, inputs, chunk=None if whole(moment.inputs) else BATCH, **kind
        )
    inputs = next(moment.images.train(batches * BATCH))
    reading = curvature_traces(moment.model, inputs, **kind)
    first = next(iter(moment.layers.weights))
    name = f"{NAMES[curvature]}_normalised{TRAIN}"
    return Reading(name, reading.unit, {first: reading.normalised[first]})


HOW = {"batch_norm": "train", "batch": BATCH}
for _curvature in get_args(Literal["fisher", "gauss-newton"]):
    register(
        Probe(
            NAMES[_curvature],
            "many",
            partial(_traces, curvature=_curvature),
            needs_inputs=True,
            unit=UNITS[_curvature],
            how=HOW,
        )
    )
