"""Kronecker factors for the probes: measured on any model, and what is read off them.

The factors are `curvature.estimator`'s, which are the optimizer's; nothing is computed twice.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.factors import KroneckerFactors
from decaylab.curvature.outputs import Curvature, Likelihood
from decaylab.curvature.preserve import bare, check_inputs, check_logits, trainable, untouched
from decaylab.errors import DecaylabError, Lacks


def measured_factors(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    curvature: Curvature = "gauss-newton",
    likelihood: Likelihood = "categorical",
    outputs: Literal["sampled", "exact"] = "exact",
    seed: int = 0,
) -> dict[str, KroneckerFactors]:
    """The K-FAC factors of a model trained by any optimizer, averaged over `batches` of inputs.

    As `KFAC.initialize` measures them, but for dropout, which is off: BN uses the batch's own
    statistics, and its running ones are left alone. Cost: per batch one forward and one backward
    pass (outputs="exact": one per class).
    """
    if curvature == "empirical-fisher":
        raise DecaylabError("factors of the empirical Fisher need the loss: read them off a KFAC")
    with untouched(model) as bare_model:
        for module in bare_model.modules():
            module.training = isinstance(module, _NormBase)

        def logits(batch: Any) -> Tensor:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            return check_logits(bare_model(inputs))

        estimator = KroneckerEstimator(
            bare_model,
            parameters=trainable(bare_model).values(),
            curvature=curvature,
            likelihood=likelihood,
            outputs=outputs,
            seed=seed,
        )
        try:
            return estimator.measure(_checked(bare_model, batches), forward=logits)
        finally:
            estimator.detach()


def _checked(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, each refused with a sentence where this model cannot take it."""
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        check_inputs(model, batch[0] if isinstance(batch, tuple | list) else batch)
        yield batch


def seen(factors: Mapping[str, KroneckerFactors]) -> dict[str, KroneckerFactors]:
    """The factors of layers that have been measured at least once; a sentence if there are none."""
    measured = {layer: factor for layer, factor in factors.items() if float(factor.T) > 0}
    if not measured:
        raise Lacks("K-FAC", "factors yet", "take a step or call initialize first")
    return measured


def grouped(factors: KroneckerFactors) -> bool:
    """Whether a layer's factors have an axis of groups in front."""
    return factors.site.groups > 1


def weight_of(parameters: Mapping[str, Tensor], factors: KroneckerFactors) -> Tensor | None:
    """The weight that factors are of, among a model's; None if it is frozen, or not in them."""
    weight = parameters.get(factors.site.weight_name)
    trained = weight is not None and factors.site.trains_weight and weight.requires_grad
    return weight if trained else None


def named(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model by every name that they have."""
    return dict(bare(model).named_parameters(remove_duplicate=False))


def joined_weight(parameters: Mapping[str, Tensor], factors: KroneckerFactors) -> Tensor:
    """[weight, bias] of a layer as its factors order it: [out, in (+1)], groups in front if any.

    In float64, which an autocast around the probe leaves alone.
    """
    site, parts = factors.site, []
    if site.trains_weight:  # a frozen one is in no factor
        parts.append(site.as_matrix(parameters[site.weight_name].detach().double()))
    if site.trains_bias:
        bias = parameters[site.bias_name].detach().double()
        parts.append(bias.view(site.groups, -1, 1))
    joined = torch.cat(parts, 2)
    return joined if grouped(factors) else joined[0]


def times(matrix: Tensor, side: Tensor) -> Tensor:
    """Matrix @ side, where a side may be given as the vector of a diagonal matrix."""
    return matrix @ side if side.dim() == matrix.dim() else matrix * side[..., None, :]


def without_bias(factors: KroneckerFactors) -> KroneckerFactors:
    """The factors of the weight's own block: the row and column of the homogeneous 1 left out."""
    width, A = factors.site.shape.width, factors.A
    A = A[..., :width] if A.dim() == 1 + grouped(factors) else A[..., :width, :width]
    return replace(factors, A=A)


def eigenvalues(side: Tensor, *, grouped: bool) -> Tensor:
    """Eigenvalues of a factor, [(groups,) dim], in float64; rounding below zero is cut off."""
    matrix = side.dim() == 2 + grouped
    values = torch.linalg.eigvalsh(side.double()) if matrix else side.double()
    return values.clamp(min=0)
