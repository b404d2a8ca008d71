"""K-FAC written to be checked by eye: one example, one position and one class at a time.

Nothing is shared with the library. Every example runs through the network alone, so this is for
networks whose examples do not see each other (no batch norm). Layer outputs get a zero added to
them (a *probe*): the gradient at the layer's output is the gradient with respect to the probe,
whatever happens to the output afterwards.

Scaling: A and S are means over examples and output positions, each g is the gradient of one row's
loss (not divided by anything), and the block is T * A (x) S with T = positions / rows. Vectors of
a block are weight.flatten(1) with the bias as last column, [out, in + 1], read row by row: the
block is T * kron(S, A).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Vectors = Callable[[Tensor, int, int], list[Tensor]]  # (row of logits, example, row) -> vectors


@dataclass
class Call:
    """One use of a layer in a forward pass."""

    name: str
    module: nn.Module
    input: Tensor
    probe: Tensor


@dataclass
class Factors:
    """A [groups, in(+1), in(+1)], S [groups, out, out] and T."""

    A: Tensor
    S: Tensor
    T: float

    def blocks(self) -> list[Tensor]:
        """One dense matrix T * A (x) S per group."""
        return [self.T * torch.kron(s, a) for a, s in zip(self.A, self.S, strict=True)]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have a block."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, *CONVOLUTIONS))
        and any(p.requires_grad for p in module.parameters())
    }


@contextmanager
def probed(model: nn.Module) -> Iterator[list[Call]]:
    """Record each use of each layer and add a zero to its output."""
    calls: list[Call] = []

    def record(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            calls.append(Call(name, module, inputs[0].detach().clone(), probe))
            return output + probe

        return hook

    handles = [m.register_forward_hook(record(name)) for name, m in layers_of(model).items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# -- what a layer reads, by explicit indexing --


def source_index(i: int, size: int, mode: str) -> int | None:
    """Where padded position i (which may lie outside 0..size-1) is read from; None is a zero."""
    if 0 <= i < size:
        return i
    if mode == "zeros":
        return None
    if mode == "replicate":
        return min(max(i, 0), size - 1)
    if mode == "circular":
        return i % size
    if mode == "reflect":  # the edge itself is not repeated
        return -i if i < 0 else 2 * (size - 1) - i
    raise ValueError(mode)


def left_padding(conv: nn.Module) -> list[int]:
    """Padding before the first pixel of each axis."""
    if conv.padding == "valid":
        return [0] * len(conv.kernel_size)
    if conv.padding == "same":  # the odd one goes to the right
        return [d * (k - 1) // 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return list(conv.padding)


def conv_patches(conv: nn.Module, image: Tensor, out_size: tuple[int, ...]) -> list[list[Tensor]]:
    """For each group, the patch read at each output position, in the order (channel, *kernel)."""
    sizes = image.shape[1:]
    left = left_padding(conv)
    per_group = image.shape[0] // conv.groups
    groups = []
    for group in range(conv.groups):
        patches = []
        for position in itertools.product(*(range(n) for n in out_size)):
            patch = []
            for channel in range(group * per_group, (group + 1) * per_group):
                for offset in itertools.product(*(range(k) for k in conv.kernel_size)):
                    index = [
                        source_index(p * s - pad + o * d, size, conv.padding_mode)
                        for p, s, pad, o, d, size in zip(
                            position, conv.stride, left, offset, conv.dilation, sizes, strict=True
                        )
                    ]
                    outside = any(i is None for i in index)
                    patch.append(image.new_zeros(()) if outside else image[(channel, *index)])
            patches.append(torch.stack(patch))
        groups.append(patches)
    return groups


def inputs_by_position(call: Call) -> list[list[Tensor]]:
    """For each group, the list over positions of the vector a, with the homogeneous coordinate."""
    module = call.module
    if isinstance(module, nn.Linear):
        groups = [list(call.input.reshape(-1, call.input.shape[-1]))]
    else:
        groups = conv_patches(module, call.input[0], tuple(call.probe.shape[2:]))
    weight = module.weight.requires_grad
    bias = module.bias is not None and module.bias.requires_grad
    one = call.input.new_ones(1)
    return [
        [torch.cat(([a] if weight else []) + ([one] if bias else [])) for a in positions]
        for positions in groups
    ]


def gradients_by_position(call: Call, gradient: Tensor) -> list[list[Tensor]]:
    """For each group, the list over positions of the vector g, as in `inputs_by_position`."""
    if isinstance(call.module, nn.Linear):
        return [list(gradient.reshape(-1, gradient.shape[-1]))]
    groups = call.module.groups
    out = gradient.shape[1] // groups
    places = list(itertools.product(*(range(n) for n in gradient.shape[2:])))
    return [
        [gradient[(0, slice(j * out, (j + 1) * out), *place)] for place in places]
        for j in range(groups)
    ]


# -- what is back-propagated --


def negative_log_likelihood(z: Tensor, target: Tensor, likelihood: str) -> Tensor:
    """Of one row of logits."""
    if likelihood == "categorical":
        return -torch.log_softmax(z, 0)[target]
    if likelihood == "bernoulli":
        return -(target * torch.log(z.sigmoid()) + (1 - target) * torch.log(1 - z.sigmoid())).sum()
    return 0.5 * ((z - target) ** 2).sum()


def output_hessian(z: Tensor, curvature: str, likelihood: str) -> Tensor:
    """H of one row: the identity (Gauss-Newton) or the Hessian of the neg. log likelihood."""
    if curvature == "gauss-newton":
        return torch.eye(len(z), dtype=z.dtype)
    target = torch.tensor(0) if likelihood == "categorical" else torch.zeros_like(z)
    return hessian(lambda u: negative_log_likelihood(u, target, likelihood), z.detach())


def square_root_vectors(curvature: str, likelihood: str, scale: float = 1.0) -> Vectors:
    """Vectors v with sum v v' = scale * H: the columns of the symmetric square root."""

    def vectors(z: Tensor, example: int, row: int) -> list[Tensor]:
        values, directions = torch.linalg.eigh(scale * output_hessian(z, curvature, likelihood))
        return [
            math.sqrt(max(float(value), 0.0)) * directions[:, i] for i, value in enumerate(values)
        ]

    return vectors


def label_vectors(labels: Tensor, likelihood: str, scale: float = 1.0) -> Vectors:
    """The empirical Fisher: the gradient at the data's label; labels [examples, rows, ...]."""

    def vectors(z: Tensor, example: int, row: int) -> list[Tensor]:
        u = z.detach().requires_grad_()
        loss = negative_log_likelihood(u, labels[example][row], likelihood)
        return [math.sqrt(scale) * torch.autograd.grad(loss, u)[0]]

    return vectors


def vectors_for(
    curvature: str, likelihood: str, labels: Tensor | None = None, scale: float = 1.0
) -> Vectors:
    """What to back-propagate; labels [examples] or [examples, rows, ...] (empirical Fisher)."""
    if curvature != "empirical-fisher":
        return square_root_vectors(curvature, likelihood, scale)
    assert labels is not None
    one_row = labels.dim() == (1 if likelihood == "categorical" else 2)
    return label_vectors(labels[:, None] if one_row else labels, likelihood, scale)


# -- factors and blocks --


@dataclass
class Sums:
    """Running sums of one layer's outer products, per group."""

    A: list[Tensor] = field(default_factory=list)
    S: list[Tensor] = field(default_factory=list)
    count: int = 0  # examples times positions (expand) or examples (reduce)


def outer_sum(vectors: list[Tensor]) -> Tensor:
    return sum(torch.outer(v, v) for v in vectors)


def naive_factors(
    model: nn.Module,
    x: Tensor,
    vectors: Vectors,
    *,
    sharing: str = "expand",
    mask: Tensor | None = None,
) -> dict[str, Factors]:
    """The factors of every layer; `mask` is [examples, rows], False rows do not count."""
    sums = {name: Sums() for name in layers_of(model)}
    rows = 0
    for n in range(len(x)):
        with probed(model) as calls:
            z = model(x[n : n + 1])
        z = z.reshape(-1, z.shape[-1])
        kept = [r for r in range(len(z)) if mask is None or mask[n].reshape(-1)[r]]
        rows += len(kept)
        gradients = [
            torch.autograd.grad(z[r] @ v, [c.probe for c in calls], retain_graph=True)
            for r in kept
            for v in vectors(z[r], n, r)
        ]
        for name in {call.name: None for call in calls}:
            uses = [i for i, call in enumerate(calls) if call.name == name]
            add_example(
                sums[name],
                [inputs_by_position(calls[i]) for i in uses],
                [[gradients_by_position(calls[i], g[i]) for i in uses] for g in gradients],
                sharing,
                kept if mask is not None and len(z) > 1 else None,
            )
    return {
        name: Factors(torch.stack(s.A) / s.count, torch.stack(s.S) / s.count, T=s.count / rows)
        for name, s in sums.items()
    }


def add_example(
    sums: Sums,
    inputs: list[list[list[Tensor]]],
    gradients: list[list[list[list[Tensor]]]],
    sharing: str,
    kept: list[int] | None,
) -> None:
    """Add one example: inputs [use][group][position], gradients [vector][use][group][position].

    `kept` names the positions that count, for layers with one position per row.
    """
    for group in range(len(inputs[0])):
        a = [v for use in inputs for i, v in enumerate(use[group]) if kept is None or i in kept]
        g = [[v for use in sample for v in use[group]] for sample in gradients]
        if sharing == "reduce":
            a = [sum(a) / len(a)]
            g = [[sum(sample)] for sample in g]
        A, S = outer_sum(a), sum(outer_sum(sample) for sample in g)
        if group == len(sums.A):
            sums.A.append(A)
            sums.S.append(S)
        else:
            sums.A[group] = sums.A[group] + A
            sums.S[group] = sums.S[group] + S
    sums.count += len(a)


def joined(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """[out, in(+1)]: the weight with the bias as last column."""
    columns = ([] if weight is None else [weight.flatten(1)]) + (
        [] if bias is None else [bias[:, None]]
    )
    return torch.cat(columns, 1)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The weight and the bias, as far as they are there and not frozen."""
    return [p for p in (module.weight, module.bias) if p is not None and p.requires_grad]


def exact_block(model: nn.Module, x: Tensor, name: str, curvature: str, likelihood: str) -> Tensor:
    """Mean over rows of J' H J from the Jacobian of each row: the true block, no K-FAC."""
    module = layers_of(model)[name]
    parameters = trainable(module)
    total, rows = None, 0
    for n in range(len(x)):
        z = model(x[n : n + 1])
        z = z.reshape(-1, z.shape[-1])
        for r in range(len(z)):
            jacobian = []
            for c in range(z.shape[1]):
                by_parameter = dict(
                    zip(
                        map(id, parameters),
                        torch.autograd.grad(z[r, c], parameters, retain_graph=True),
                        strict=True,
                    )
                )
                pair = by_parameter.get(id(module.weight)), by_parameter.get(id(module.bias))
                jacobian.append(joined(module, *pair).flatten())
            J = torch.stack(jacobian)
            block = J.T @ output_hessian(z[r], curvature, likelihood) @ J
            total = block if total is None else total + block
            rows += 1
    return total / rows
