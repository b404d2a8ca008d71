"""What is back-propagated from the logits to measure curvature.

Every curvature matrix here is C = E[J' H J] with J the Jacobian of one row of logits z (length C)
and H a matrix at that row's output, so it is measured by back-propagating vectors v with E[v v'] =
H:

| curvature        | likelihood  | H                                  | paper          |
|------------------|-------------|------------------------------------|----------------|
| `fisher`         | categorical | diag(p) - p p', p = softmax(z)     | Eq. 2          |
| `fisher`         | bernoulli   | diag(p (1 - p)), p = sigmoid(z)    | Eq. 2          |
| `fisher`         | gaussian    | I (unit variance: loss |z - y|^2/2)| Eq. 2          |
| `gauss-newton`   | any         | I                                  | Eq. 3          |

Scaling: per row; nothing is divided by the number of rows. Logits are [..., C]; the leading axes
are rows. The empirical Fisher (gradients at the data's own labels) needs no vector: it is read off
the loss's own backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from decaylab.errors import Lacks, check_name

# Numbers of logits for which vectors are drawn in one go.
SAMPLED_AT_ONCE = 2**25

Curvature = Literal["fisher", "gauss-newton", "empirical-fisher"]
Likelihood = Literal["categorical", "gaussian", "bernoulli"]


def check_names(curvature: str, likelihood: str) -> None:
    """Refuse an unknown curvature or likelihood, naming the known ones."""
    check_name("curvature", curvature, get_args(Curvature))
    check_name("likelihood", likelihood, get_args(Likelihood))


def output_hessian(curvature: Curvature, likelihood: Likelihood) -> Likelihood:
    """The likelihood whose output Hessian is meant: Gauss-Newton is that of a Gaussian."""
    check_names(curvature, likelihood)
    if curvature == "empirical-fisher":
        raise Lacks("the empirical Fisher", "output Hessian", "it uses the loss's gradients")
    return "gaussian" if curvature == "gauss-newton" else likelihood


def sampled(
    logits: Tensor,
    curvature: Curvature,
    likelihood: Likelihood,
    generator: torch.Generator | None = None,
    share: tuple[int, int] = (0, 1),
) -> Tensor:
    """One random vector per row, v with E[v v'] = H, shaped like `logits`. One backward pass.

    Fisher: v = p - y with y drawn from the model's own predictive distribution (never from the
    data's labels). Gauss-Newton: v ~ N(0, I). Draws without a host synchronisation. Logits of more
    than SAMPLED_AT_ONCE numbers are drawn for part by part: there are several tensors of a part's
    size in float32.

    `share`: (which, of how many) equal part of a batch the logits are, of whose draws theirs are
    taken.
    """
    kind = output_hessian(curvature, likelihood)
    z = logits.detach()
    if z.numel() <= SAMPLED_AT_ONCE:
        return _drawn(z, kind, generator, share)
    vectors = torch.empty_like(z, memory_format=torch.contiguous_format)
    rows = max(1, SAMPLED_AT_ONCE // z.shape[-1])
    parts = z.reshape(-1, z.shape[-1]).split(rows)
    for part, room in zip(parts, vectors.view(-1, z.shape[-1]).split(rows), strict=True):
        room.copy_(_drawn(part, kind, generator, share))
    return vectors


def of_whole(shape: Sequence[int], share: tuple[int, int]) -> tuple[list[int], slice]:
    """The shape of a batch whose equal part has the shape that is given, and where the part is."""
    part, parts = share
    return [shape[0] * parts, *shape[1:]], slice(shape[0] * part, shape[0] * (part + 1))


def _drawn(
    z: Tensor, kind: Likelihood, generator: torch.Generator | None, share: tuple[int, int]
) -> Tensor:
    batch_shape, part = of_whole(z.shape, share)
    if kind == "gaussian":
        # drawn in float32 at least, then rounded: the sample does not depend on the autocast dtype
        wide = torch.promote_types(z.dtype, torch.float32)
        draws = torch.randn(batch_shape, dtype=wide, device=z.device, generator=generator)
        return draws[part].to(z.dtype)
    p = _probabilities(z, kind)
    if kind == "bernoulli":
        y = torch.rand(batch_shape, dtype=p.dtype, device=p.device, generator=generator)[part] < p
        return (p - y.to(p.dtype)).to(z.dtype)
    # argmax of p / Exp(1) is a draw from p (the exponential race): no host check as in multinomial
    race = p.new_empty(batch_shape).exponential_(generator=generator)[part]
    drawn = torch.div(p, race, out=race).argmax(-1, keepdim=True)
    return p.scatter_add_(-1, drawn, -torch.ones_like(p[..., :1])).to(z.dtype)


def exact(logits: Tensor, curvature: Curvature, likelihood: Likelihood) -> Iterator[Tensor]:
    """C vectors per row with sum_c v_c v_c' = H, for exact curvature. One backward pass per class.

    Categorical: v_c = sqrt(p_c) (e_c - p); Bernoulli: sqrt(p_c (1 - p_c)) e_c; Gaussian and Gauss-
    Newton: e_c.
    """
    kind = output_hessian(curvature, likelihood)
    z = logits.detach()
    p = None if kind == "gaussian" else _probabilities(z, kind)
    for c in range(z.shape[-1]):
        unit = torch.zeros_like(z)
        unit[..., c] = 1.0
        if p is None:
            yield unit
        elif kind == "bernoulli":
            yield (unit * (p * (1 - p)).sqrt()).to(z.dtype)
        else:
            yield ((unit - p) * p[..., c : c + 1].sqrt()).to(z.dtype)


def hessian_product(
    logits: Tensor, vector: Tensor, curvature: Curvature, likelihood: Likelihood
) -> Tensor:
    """H v for each row; `vector` has the shape of `logits`. No backward pass."""
    kind = output_hessian(curvature, likelihood)
    if kind == "gaussian":
        return vector
    p = _probabilities(logits.detach(), kind).to(vector.dtype)
    if kind == "bernoulli":
        return p * (1 - p) * vector
    return p * (vector - (p * vector).sum(-1, keepdim=True))


def _probabilities(logits: Tensor, kind: Likelihood) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.sigmoid() if kind == "bernoulli" else wide.softmax(-1)
