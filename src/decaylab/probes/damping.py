"""Effective damping (Eq. 14): how much of K-FAC's step is still second-order, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from decaylab.curvature.factors import KroneckerFactors
from decaylab.curvature.inverses import factored_damping, mean_diagonal
from decaylab.errors import Lacks
from decaylab.optim.kfac import KFAC
from decaylab.probes.kronecker import eigenvalues, grouped, named, seen, weight_of, without_bias
from decaylab.probes.reading import Reading, row_name
from decaylab.probes.registry import Moment, Probe, register

LONGEST_SIDE = 1200  # of factors whose eigenvalues are taken: longer ones take seconds each


@dataclass(frozen=True)
class LayerDamping:
    """One layer's damping and curvature, in the curvature's unit (except norm and shares).

    Attributes:
        damping: lambda, as this layer gets it (the mean over groups). norm: |W_l|, of the weight
            without its bias.
        share: mean over directions of e / (e + lambda |W_l|^2), e the eigenvalues of
            C(W_l / |W_l|); 1: every direction is second-order, 0: the step is SGD's.
        added: mean over directions of what factored damping really adds, in place of lambda.
        factored_share: the share with that instead.
    """

    damping: float
    norm: float
    share: float
    added: float
    factored_share: float

    @property
    def effective(self) -> float:
        """The lambda |W_l|^2 that is added to C(W_l / |W_l|) in Eq. 14."""
        return self.damping * self.norm**2

    @property
    def factored(self) -> float:
        """What factored damping really adds to it."""
        return self.added * self.norm**2


@dataclass(frozen=True)
class DampingReading(Reading):
    """`layers` and `total` are shares of second-order directions; `details` has everything else.

    The total is over the directions of all layers together.
    """

    details: Mapping[str, LayerDamping] = field(default_factory=dict)

    def rows(self) -> dict[str, float]:
        """Shares, and per layer the effective damping and the share under factored damping."""
        rows = super().rows()
        for layer, damping in self.details.items():
            rows[row_name("effective_damping", layer)] = damping.effective
            rows[row_name("factored_damping", layer)] = damping.factored
            rows[row_name("factored_share", layer)] = damping.factored_share
        return rows


def effective_damping(
    model: nn.Module,
    factors: Mapping[str, KroneckerFactors],
    damping: float | Mapping[str, float | Tensor],
) -> DampingReading:
    """The damping lambda |W_l|^2 against the curvature of the normalised weights (Eq. 14).

    With C(W) = T A (x) S and C(W/|W|) = |W|^2 C(W) (Eq. 13, scale-invariant layers) the eigenvalues
    are e_ij = |W|^2 T a_i s_j, and the undamped step's share in direction ij is e / (e + lambda
    |W|^2). Factored damping, which K-FAC uses, inverts T (A + pi r I) (x) (S + r/pi I), r =
    sqrt(lambda / T): it adds lambda + T r (a_i / pi + pi s_j) in direction ij, so more than lambda
    everywhere.

    The block is the weight's, without the bias (recipe line 20); pi is the optimizer's, with it.
    The share depends on |W| only through C(W), so it means the same for layers that are not
    scale-invariant. Scaling as the factors: curvature of the loss averaged over rows. `damping`:
    one number or one per layer. Cost: the eigenvalues of A and S; no pass through the model.
    """
    parameters = named(model)
    details, counts = {}, {}
    for layer, factor in seen(factors).items():
        weight = weight_of(parameters, factor)
        if weight is not None:
            value = damping if isinstance(damping, int | float) else damping[layer]
            details[layer] = _layer_damping(weight, factor, value)
            counts[layer] = weight.numel()
    if not details:
        remedy = "unfreeze a weight whose damping to measure"
        raise Lacks("the model", "layer with K-FAC factors that is not frozen", remedy)
    total = sum(details[k].share * counts[k] for k in details) / sum(counts.values())
    shares = {layer: layer_damping.share for layer, layer_damping in details.items()}
    return DampingReading("second_order_share", "1", shares, total, details=details)


def spectrum(factors: KroneckerFactors) -> Tensor:
    """All eigenvalues of the weight's block T A (x) S, unsorted, in float64: [in * out]."""
    a, g = _sides(factors)
    return (a[..., :, None] * g[..., None, :]).flatten()


def _sides(factors: KroneckerFactors) -> tuple[Tensor, Tensor]:
    """Eigenvalues of A and of G = T S, of the weight's own block A (x) G: [(groups,) dim]."""
    weight_factors = without_bias(factors)
    a, s = (
        eigenvalues(side, grouped=grouped(factors)) for side in (weight_factors.A, weight_factors.S)
    )
    return a, weight_factors.T.double() * s


def _layer_damping(
    weight: Tensor, factors: KroneckerFactors, damping: float | Tensor
) -> LayerDamping:
    """`damping`: one number, or one for each group."""
    a, g = _sides(factors)
    T = factors.T.double()
    A, G = factors.A.double(), T * factors.S.double()
    if not grouped(factors):
        A, G = A[None], G[None]
    given = torch.as_tensor(damping, dtype=torch.float64, device=T.device)
    lambdas = given.flatten().expand(len(A))
    added = lambdas[:, None, None] if grouped(factors) else lambdas
    extra_a, extra_g = factored_damping(mean_diagonal(A), mean_diagonal(G), lambdas)
    if not grouped(factors):
        extra_a, extra_g = extra_a[0], extra_g[0]
    plain = a[..., :, None] * g[..., None, :]
    used = (a + extra_a[..., None])[..., :, None] * (g + extra_g[..., None])[..., None, :]
    return LayerDamping(
        damping=float(lambdas.mean()),
        norm=_norm(weight),
        share=float((plain / (plain + added)).mean()),
        added=float((used - plain).mean()),
        factored_share=float((plain / used).mean()),
    )


def _norm(weight: Tensor) -> float:
    return float(weight.detach().double().square().sum().sqrt())


# What was measured last of a K-FAC, and after how many of its steps.
_LAST: WeakKeyDictionary[KFAC, tuple[int, DampingReading]] = WeakKeyDictionary()


def _of_inverses(model: nn.Module, kfac: KFAC) -> DampingReading:
    """The damping of K-FAC's steps, at the weights' norms as they are now.

    It changes when K-FAC inverts, so eigenvalues, which take seconds where layers are large, are
    kept for `invert_every` steps; not during the first ones, when K-FAC inverts more often.
    """
    step, last = _LAST.get(kfac, (0, None))
    if last is None or not kfac.invert_every < step <= kfac.steps < step + kfac.invert_every:
        last = effective_damping(model, kfac.factors(), kfac.dampings())
        _LAST[kfac] = kfac.steps, last
    parameters, blocks = named(model), kfac.estimator.blocks
    details = {
        layer: replace(damping, norm=_norm(parameters[blocks[layer].site.weight_name]))
        for layer, damping in last.details.items()
    }
    return replace(last, details=details)


def _second_order_share(moment: Moment) -> list[Reading]:
    """Of all layers with factors; in runs of ours of those whose factors are not long."""
    if (kfac := moment.kfac) is None:
        if moment.images is not None:
            return []
        remedy = "leave second_order_share out of the probes"
        raise Lacks("the training", "K-FAC optimizer", remedy)
    if moment.images is None:
        return [_of_inverses(moment.model, kfac)]
    short = {
        layer: factor
        for layer, factor in kfac.factors().items()
        if max(factor.A.shape[-1], factor.S.shape[-1]) <= LONGEST_SIDE and float(factor.T) > 0
    }
    if not short:
        return []
    return [replace(effective_damping(moment.model, short, kfac.dampings()), total=None)]


register(Probe("second_order_share", "many", _second_order_share, unit="1", when="tenth"))
