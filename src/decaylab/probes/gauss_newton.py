"""Norms of the weights in the metric of the curvature: Gauss-Newton, Fisher-Rao, K-FAC (Sec. 4.2).

All of them are |theta|_C^2 = theta' C theta with C the curvature of the loss averaged over rows, at
theta itself. theta holds every trainable parameter, biases and norm scales included.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decaylab.curvature.factors import KroneckerFactors
from decaylab.curvature.outputs import Curvature, Likelihood, hessian_product
from decaylab.curvature.preserve import (
    BatchNormMode,
    bare,
    check_inputs,
    chunks,
    layer_names,
    trainable,
)
from decaylab.curvature.products import rows, scale_product
from decaylab.errors import Range, check_name
from decaylab.probes.applied import applied, whole
from decaylab.probes.kronecker import joined_weight, measured_factors, named, seen, times
from decaylab.probes.reading import Reading, numbers, standard_error
from decaylab.probes.registry import Moment, Probe, register

KFAC_BATCHES, KFAC_BATCH = 10, 128  # so many batches, of so many training images
Kind = tuple[Curvature, Likelihood]


def gauss_newton_norm(
    model: nn.Module,
    inputs: Tensor,
    *,
    per_layer: bool = True,
    chunk: int | None = 128,
    batch_norm: BatchNormMode = "eval",
) -> Reading:
    """Exact Gauss-Newton norm |theta|_G^2 = E|J_theta theta|^2 (Sec. 4.2, App. C), in logit^2.

    E is the mean over rows of logits. The total takes one forward-mode pass; `per_layer` adds one
    for each layer, theta_l' G_ll theta_l. The total has the blocks between layers too, so it is not
    the sum of the layers: for a bias-free ReLU net of n layers each layer has E|f|^2 and the total
    is n^2 E|f|^2. Memory: that of a forward pass on `chunk` examples.
    """
    kind: Kind = ("gauss-newton", "categorical")
    return _norm("gn_norm", model, inputs, kind, per_layer, chunk, batch_norm)


def fisher_rao_norm(
    model: nn.Module,
    inputs: Tensor,
    *,
    likelihood: Likelihood = "categorical",
    per_layer: bool = True,
    chunk: int | None = 128,
    batch_norm: BatchNormMode = "eval",
) -> Reading:
    """Exact Fisher-Rao norm |theta|_F^2 = E[(J theta)' H (J theta)] (Sec. 4.2), in nats.

    H is the Hessian of the row's loss at the logits, diag(p) - pp' for the categorical likelihood.
    Scaling, cost and memory as `gauss_newton_norm`.
    """
    return _norm("fr_norm", model, inputs, ("fisher", likelihood), per_layer, chunk, batch_norm)


def kfac_norm(model: nn.Module, factors: Mapping[str, KroneckerFactors]) -> Reading:
    """K-FAC norm sum_l T tr(S W_l A W_l') with W_l = [weight, bias] [out, in (+1)] (Lemma 2).

    `factors` is `KFAC.factors()`: with curvature="gauss-newton" and curvature_scale=1 this is the
    paper's K-FAC Gauss-Newton norm. Layers without factors are not in it; the total is the sum of
    the layers, since K-FAC has no blocks between them. No pass through the model.
    """
    parameters = named(model)
    layers = {}
    for layer, factor in seen(factors).items():
        weight = joined_weight(parameters, factor)
        half = times(weight, factor.A.double())
        other = times(weight.mT, factor.S.double()).mT
        layers[layer] = factor.T.double() * (half * other).sum()
    values = numbers(layers)
    return Reading("kfac_norm", "logit^2", values, total=sum(values.values()))


def kfac_gauss_newton_norm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    outputs: Literal["exact", "sampled"] = "exact",
    draws: int = 8,
) -> Reading:
    """K-FAC Gauss-Newton norm (Lemma 2, Fig. 5) of a model trained by any optimizer.

    The factors are those of `KFAC(curvature="gauss-newton")`, averaged over `batches` of inputs, or
    of (inputs, labels), which are not read. BN uses the batch's own statistics, as K-FAC does;
    dropout is off. outputs="exact": a backward pass per class and batch; exact but for BN, whose
    rows see each other: there it is unbiased (see `curvature.estimator.Measurement`).
    outputs="sampled": one per draw and batch; the values are means over `draws` draws of the
    vectors, with their standard errors. In logit^2.
    """
    check_name("outputs", outputs, ("exact", "sampled"))
    if outputs == "sampled":
        Range(at_least=2).check("draws", draws, "one draw has no standard error")
    given = [batches] if isinstance(batches, Tensor) else list(batches)
    readings = [
        kfac_norm(model, measured_factors(model, given, outputs=outputs, seed=seed))
        for seed in range(draws if outputs == "sampled" else 1)
    ]
    return _averaged("kfac_gn_norm", readings)


def _averaged(name: str, readings: Sequence[Reading]) -> Reading:
    """Mean over independent readings of a quantity, with standard errors if there are several."""
    layers = list(readings[0].layers)
    table = torch.tensor(
        [[*(r.layers[layer] for layer in layers), r.total or 0.0] for r in readings],
        dtype=torch.float64,
    )
    values = dict(zip(layers, table.mean(0).tolist(), strict=False))
    total = float(table[:, -1].mean())
    if len(readings) == 1:
        return Reading(name, "logit^2", values, total)
    errors = standard_error(table).tolist()
    by_layer = dict(zip(layers, errors, strict=False))
    return Reading(name, "logit^2", values, total, by_layer, errors[-1])


def _norm(
    name: str,
    model: nn.Module,
    inputs: Tensor,
    kind: Kind,
    per_layer: bool,
    chunk: int | None,
    batch_norm: BatchNormMode,
) -> Reading:
    check_inputs(model, inputs)
    parameters = trainable(model)
    layers = layer_names(parameters) if per_layer else {}
    parts = [list(parameters), *layers.values()]  # the total, then the layers
    sums = torch.zeros(len(parts), dtype=torch.float64, device=inputs.device)
    count = 0
    for piece in chunks(bare(model), inputs, chunk, batch_norm):
        for i, names in enumerate(parts):
            logits, tangent = scale_product(model, piece, names, batch_norm=batch_norm)
            # squares in double: those of 16 bits leave their range
            tangent = tangent.double()
            sums[i] += (tangent * hessian_product(logits.double(), tangent, *kind)).sum()
        count += rows(logits)
    total, *values = (sums / count).tolist()
    unit = "logit^2" if kind[0] == "gauss-newton" else "nat"
    return Reading(name, unit, dict(zip(layers, values, strict=True)), total)


def _gauss_newton(moment: Moment) -> Reading:
    model, inputs = applied(moment.model, moment.inputs, moment.logits)
    return gauss_newton_norm(model, inputs, per_layer=False, chunk=_chunk(moment))


def _fisher_rao(moment: Moment) -> Reading:
    model, inputs = applied(moment.model, moment.inputs, moment.logits)
    return fisher_rao_norm(model, inputs, per_layer=False, chunk=_chunk(moment))


def _chunk(moment: Moment) -> int | None:
    return None if whole(moment.inputs) else 128


def _kfac_gauss_newton(moment: Moment) -> Reading:
    """In runs of ours on the first 1,280 training images, its total alone (Fig. 5)."""
    if moment.images is None:
        model, inputs = applied(moment.model, moment.inputs, moment.logits)
        return kfac_gauss_newton_norm(model, [inputs])
    batches = list(islice(moment.images.train(KFAC_BATCH), KFAC_BATCHES))
    total = kfac_gauss_newton_norm(moment.model, batches).total
    return Reading("kfac_gn_norm", "logit^2", total=total)


register(Probe("gn_norm", "one backward", _gauss_newton, needs_inputs=True, unit="logit^2"))
register(Probe("fr_norm", "one backward", _fisher_rao, needs_inputs=True, unit="nat"))
register(
    Probe("kfac_gn_norm", "many", _kfac_gauss_newton, needs_inputs=True, unit="logit^2", when="end")
)
