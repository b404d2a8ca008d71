"""What an audit compares with: the step of a written-out curvature block, on a tiny net.

Scaling: curvature of the loss averaged over the batch. With the inputs a (patches, with a 1 for the
bias) and the gradients g at the outputs of one layer, over batch, T positions and the vectors v_c
with sum_c v_c v_c' = H that are back-propagated:

| sharing  | block                                                              |
|----------|--------------------------------------------------------------------|
| `expand` | T * E[a a'] (x) E[sum_c g g'], means over batch and positions      |
| `reduce` | E[mean_t a ()'] (x) E[sum_c (sum_t g) ()'], means over the batch   |
| `exact`  | E[sum_c d d'], d = sum_t g (x) a: the true block, not factored     |

Nothing here is shared with `decaylab.KFAC` but `curvature.outputs`. Dense: for some ten weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.curvature.outputs import Curvature, exact
from decaylab.curvature.products import loss_gradient

CURVATURES: tuple[Curvature, ...] = ("fisher", "gauss-newton", "empirical-fisher")
DAMPINGS = ("factored", "factored without pi", "added", "added to each factor")
CLASSES, OUT = 4, 3


@dataclass(frozen=True)
class Case:
    """A net of one audited layer, a ReLU and a linear head, and a batch.

    `side`^2 positions (1: a Linear layer if `kind` says so), stride and kernel of the
    convolution. Inputs are multiplied by `scale` and the head's weight by `gain`, the layer's
    weight is divided by both: the function stays, A goes with scale^2 and S with gain^2, and
    damping vanishes beside each, be it added to the block or to its factors.
    """

    kind: str
    batch: int
    side: int = 1
    stride: int = 1
    scale: float = 1.0
    kernel: int = 1
    bias: bool = False
    gain: float = 1.0

    @property
    def positions(self) -> int:
        """T."""
        return self.side**2

    def build(self) -> tuple[nn.Sequential, Tensor, Tensor]:
        """The net in float64 in train mode, inputs and labels; the same for every call.

        Labels are the classes that the net thinks least of, so that the empirical Fisher (which
        takes the labels' word) is far from the true one (which takes the net's).
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer: Any
            if self.kind == "Linear":
                layer, shape = nn.Linear(2, OUT, bias=self.bias), [2]
            else:
                layer = nn.Conv2d(2, OUT, self.kernel, self.stride, bias=self.bias)
                size = (self.side - 1) * self.stride + max(self.kernel, self.stride)
                shape = [2, size, size]
            head = nn.Linear(OUT * self.positions, CLASSES)
            model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), head).double()
            inputs = torch.randn(self.batch, *shape, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.div_(self.scale * self.gain)
            if layer.bias is not None:
                layer.bias.div_(self.gain)
            head.weight.mul_(2.0 * self.gain)  # 2, so that the predictions are not all alike
        inputs = inputs * self.scale
        with torch.no_grad():
            labels = model(inputs).argmin(1)
        return model, inputs, labels


@dataclass(frozen=True)
class Factors:
    """A [in, in] and S [out, out] with the block T A (x) S, or the block itself (`exact`)."""

    A: Tensor | None
    S: Tensor | None
    T: float
    block: Tensor

    def damped(self, damping: float, kind: str) -> Tensor:
        """The block with damping in it; `exact` blocks know `added` only.

        `added to each factor`: A + lambda and T S + lambda, as inverse-free K-FACs have it.
        """
        if kind == "added" or self.A is None or self.S is None:
            return self.block + damping * torch.eye(len(self.block), dtype=self.block.dtype)
        if kind == "added to each factor":
            A, S = (f + damping * torch.eye(len(f)).to(f) for f in (self.A, self.T * self.S))
            return torch.kron(S, A)
        root = math.sqrt(damping / self.T)
        pi = 1.0
        if kind == "factored":
            traces = self.A.trace() / len(self.A), self.S.trace() / len(self.S)
            pi = math.sqrt(float(traces[0] / traces[1]))
        A = self.A + pi * root * torch.eye(len(self.A), dtype=self.A.dtype)
        S = self.S + root / pi * torch.eye(len(self.S), dtype=self.S.dtype)
        return self.T * torch.kron(S, A)


def reference_factors(
    case: Case, model: nn.Sequential, inputs: Tensor, labels: Tensor, curvature: Curvature
) -> dict[str, Factors]:
    """By sharing, the factors of the net's first layer."""
    a, gradients = _inputs(case, model, inputs), list(_gradients(model, inputs, labels, curvature))
    batch, T = a.shape[:2]
    A = torch.einsum("bti,btj->ij", a, a) / (batch * T)
    S = sum(torch.einsum("btp,btq->pq", g, g) for g in gradients) / (batch * T)
    mean_a, sum_g = a.mean(1), [g.sum(1) for g in gradients]
    A_reduced = mean_a.T @ mean_a / batch
    S_reduced = sum(g.T @ g for g in sum_g) / batch
    d = [torch.einsum("btp,bti->bpi", g, a).flatten(1) for g in gradients]
    block = sum(each.T @ each for each in d) / batch
    assert isinstance(S, Tensor)
    assert isinstance(S_reduced, Tensor)
    assert isinstance(block, Tensor)
    return {
        "expand": Factors(A, S, float(T), T * torch.kron(S, A)),
        "reduce": Factors(A_reduced, S_reduced, 1.0, torch.kron(S_reduced, A_reduced)),
        "exact": Factors(None, None, 1.0, block),
    }


def reference_step(factors: Factors, gradient: Tensor, damping: float, kind: str) -> Tensor:
    """The damped block's inverse times the gradient [out, in(+1)], by a dense pseudo-inverse.

    Pseudo-inverse: without damping the Fisher's block may be singular where gradients vanish too.
    """
    inverse = torch.linalg.pinv(factors.damped(damping, kind), hermitian=True, rtol=1e-12)
    return (inverse @ gradient.flatten()).view_as(gradient)


def joined(layer: Any, gradient: bool) -> Tensor:
    """Weight (or its gradient) as [out, in], with the bias as last column."""
    parameters = [layer.weight, layer.bias] if layer.bias is not None else [layer.weight]
    values = [p.grad if gradient else p.detach() for p in parameters]
    return torch.cat([v.flatten(1) if v.dim() > 1 else v[:, None] for v in values], 1)


def _inputs(case: Case, model: nn.Sequential, inputs: Tensor) -> Tensor:
    """[batch, T, in(+1)]: what the layer reads at each position."""
    layer = model[0]
    if case.kind == "Linear":
        a = inputs[:, None]
    else:
        a = F.unfold(inputs, case.kernel, stride=case.stride).transpose(1, 2)
    ones = a.new_ones(*a.shape[:2], 1)
    return a if layer.bias is None else torch.cat([a, ones], 2)


def _gradients(
    model: nn.Sequential, inputs: Tensor, labels: Tensor, curvature: Curvature
) -> Iterator[Tensor]:
    """For each back-propagated vector [batch, C], the gradients at the layer: [batch, T, out]."""
    outputs = model[0](inputs).detach().requires_grad_()
    logits = model[1:](outputs)
    if curvature == "empirical-fisher":
        vectors = iter([loss_gradient(logits, labels, "categorical")])
    else:
        vectors = exact(logits.detach(), curvature, "categorical")
    for vector in vectors:
        (g,) = torch.autograd.grad(logits, outputs, vector, retain_graph=True)
        yield g[:, None] if g.dim() == 2 else g.flatten(2).transpose(1, 2)
