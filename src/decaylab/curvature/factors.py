"""Kronecker factors A and S: sums over a refresh, running averages, inverses, preconditioning.

Scaling, for a loss averaged over the rows of the logits (recipe line 6):

    A = mean over examples and positions of a a'
    S = mean over examples and positions of g g'
    T = positions / rows of the logits
    block = T A (x) S = A (x) G,  with G = T S = sum over positions of g g' / rows of the logits

g is the gradient of one row's (not averaged) loss. G is what is stored: T enters it by itself, for
convolutions, sequences and layers that are called several times alike. Blocks of one shape are
stacked, so that each operation runs once per shape.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from decaylab.curvature.inverses import damped, factored_damping, ieee_products, invert_
from decaylab.curvature.kernels import fold_
from decaylab.curvature.layers import (
    Columns,
    Layer,
    Sharing,
    gradient_rows,
    groups_of,
    input_rows,
    is_channels_last,
    second_moment,
)

# Bytes of factors that are inverted in one go: more are no faster, and need room for all of them.
INVERTED_AT_ONCE = 2**27
# Layers with sides up to this one, whose products are small, are preconditioned in full float32.
LARGEST_PRECISE = 640


@dataclass(frozen=True)
class KroneckerFactors:
    """The factors of one layer: its block of the curvature is T * A (x) S.

    `A` [in (+1), in (+1)] is in the order of `weight.flatten(1)` with the bias last, `S` [out,
    out] by output channel; with a leading axis of groups where the layer has more than one. A side
    longer than `max_factor_dim` is its diagonal only, and is returned as that diagonal matrix's
    vector. `T` is a scalar tensor.
    """

    A: Tensor
    S: Tensor
    T: Tensor


class Shape(NamedTuple):
    """What blocks must share to be stacked: the lengths of both sides, and which are diagonal.

    `input_dim` counts the bias (the homogeneous 1), where there is one: it comes last.
    """

    input_dim: int
    output_dim: int
    bias: bool
    input_diagonal: bool
    output_diagonal: bool
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """The input side without the bias."""
        return self.input_dim - self.bias

    def wide(self, device: torch.device) -> int:
        """The input side with zeros behind it, to a size that tensor cores take."""
        return -(-self.input_dim // 32) * 32 if device.type == "cuda" else self.input_dim


@dataclass(frozen=True)
class Block:
    """One layer's place among the blocks: which of its parameters are trained, and its shape."""

    name: str
    layer: Layer
    weight: bool
    bias: bool
    shape: Shape
    channels_last: bool = False

    @staticmethod
    def of(name: str, layer: Layer, *, weight: bool, bias: bool, max_factor_dim: int) -> "Block":
        """The block of a layer whose weight and/or bias is trained."""
        groups = groups_of(layer)
        fan_in = layer.weight[0].numel() * weight + bias
        fan_out = layer.weight.shape[0] // groups
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        diagonal = fan_in > max_factor_dim, fan_out > max_factor_dim
        shape = Shape(fan_in, fan_out, bias, *diagonal, dtype)
        return Block(name, layer, weight, bias, shape, weight and is_channels_last(layer))

    @property
    def groups(self) -> int:
        """Number of stacked entries: one per group of a convolution."""
        return groups_of(self.layer)

    def as_weight(self, rows: Tensor) -> Tensor:
        """A view [groups, out / groups, in / groups] of a stack in the shape of the weight."""
        shape = self.layer.weight.shape
        if not self.channels_last:
            return rows.view(shape)
        return rows.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)

    def in_weight_order(self, side: Tensor) -> Tensor:
        """A stored input side [groups, dim(, dim)] in the order of `weight.flatten(1)`."""
        return _reordered(side, self._stored_at(side)) if self.channels_last else side

    def in_stored_order(self, side: Tensor) -> Tensor:
        """What undoes `in_weight_order`."""
        if not self.channels_last:
            return side
        return _reordered(side, self._stored_at(side).argsort())

    def _stored_at(self, side: Tensor) -> Tensor:
        """For each entry in weight order, where it is stored."""
        shape = self.layer.weight.shape[1:]
        width = shape.numel()
        stored = torch.arange(width).view(*shape[1:], shape[0]).movedim(-1, 0).flatten()
        return torch.cat([stored, torch.arange(width, side.shape[1])]).to(side.device)


@dataclass
class Sums:
    """What one layer has shown since the last refresh: sums and counts, so that passes add up."""

    A: Tensor | None = None
    G: Tensor | None = None
    positions: Tensor | float = 0.0
    rows: Tensor | float = 0.0

    @staticmethod
    def none(block: Block, device: torch.device) -> "Sums":
        """The sums of no rows, to which others can be added."""
        shape, dtype = block.shape, block.shape.dtype
        A = (shape.wide(device),) * (2 - shape.input_diagonal)
        G = (shape.output_dim,) * (2 - shape.output_diagonal)
        sides = (torch.zeros(block.groups, *s, dtype=dtype, device=device) for s in (A, G))
        return Sums(*sides)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The sums A and G."""
        assert self.A is not None
        assert self.G is not None
        return self.A, self.G

    def traces(self) -> Tensor:
        """The traces of the means, added, [groups]: finite where all of both is, and rows count."""
        A, G = self.sides
        return _diagonal(A).sum(1) / self.positions + _diagonal(G).sum(1) / self.rows

    def add_inputs(
        self, block: Block, inputs: list[Tensor], sharing: Sharing, masks: list[Tensor] | None
    ) -> None:
        """Add the sum of a a' over the rows of the layer's calls in one pass."""
        ready = [_product_ready(x.to_dense(), block.shape.dtype) for x in inputs]
        wide = block.shape.wide(inputs[0].device)
        columns = Columns(block.weight, block.bias, wide, block.channels_last)
        rows, count = input_rows(block.layer, ready, columns, sharing, masks)
        total = _moment(rows, block.shape.dtype, diagonal=block.shape.input_diagonal)
        self.A = total if self.A is None else self.A.add_(total)
        self.positions = self.positions + count

    def add_gradients(
        self, block: Block, gradients: list[Tensor], sharing: Sharing, scale: Tensor | float
    ) -> None:
        """Add scale times the sum of g g' over the rows of the layer's calls in one pass."""
        ready = [_product_ready(g, block.shape.dtype) for g in gradients]
        rows = gradient_rows(block.layer, ready, sharing)
        total = _moment(rows, block.shape.dtype, diagonal=block.shape.output_diagonal).mul_(scale)
        self.G = total if self.G is None else self.G.add_(total)

    def add_rows(self, rows: Tensor | float) -> None:
        """Count the rows of logits that the gradients came from."""
        self.rows = self.rows + rows


@dataclass
class Inversion:
    """An inversion on its way: damped copies of the factors of a part of a bank, then inverses."""

    A: Tensor
    G: Tensor
    sound: Tensor

    @property
    def cost(self) -> float:
        """Multiplications, but for a factor: d^3 of a matrix, d of a diagonal."""
        return sum(
            side.numel() * float(side.shape[-1]) ** (side.dim() == 3) for side in (self.A, self.G)
        )

    def run(self) -> None:
        """Invert the copies in place; the inverses in use stay as they are."""
        for side in (self.A, self.G):
            self.sound &= invert_(side)

    def stay_for(self, stream: torch.cuda.Stream) -> None:
        """Give no memory away before `stream` is done with it: an inversion may be dropped."""
        for tensor in (self.A, self.G, self.sound):
            tensor.record_stream(stream)


@dataclass
class Bank:
    """All blocks of one shape, stacked: A [n, a, a], G [n, g, g] (or diagonals), and inverses.

    Buffers are allocated once and written in place. `ready` says which blocks have a factor; until
    then the inverse is zero, so that a layer that was never seen is not moved. `boost` multiplies
    the damping of blocks whose last Cholesky factorisation failed. `shares` is between how many
    ranks the inversions are divided.
    """

    shape: Shape
    device: torch.device
    shares: int = 1
    slices: dict[str, slice] = field(default_factory=dict)
    count: int = 0

    def add(self, block: Block) -> None:
        """Give a block its entries; before `allocate`."""
        self.slices[block.name] = slice(self.count, self.count + block.groups)
        self.count += block.groups

    def allocate(self, ready: Tensor) -> None:
        """Make the buffers, zero: nothing is known, nothing is moved. `ready` [n] is taken over."""
        n, a, g = self.count, self.shape.input_dim, self.shape.output_dim
        wide = self.shape.wide(self.device)

        def zeros(*size: int, dtype: torch.dtype = self.shape.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        one, two = self.shape.input_diagonal, self.shape.output_diagonal
        self._wide_A, self._wide_inverse = (zeros(n, *(wide,) * (2 - one)) for _ in range(2))
        within = (slice(None), *(slice(a),) * (2 - one))
        self.A, self.A_inverse = self._wide_A[within], self._wide_inverse[within]
        self.G, self.G_inverse = (zeros(n, *(g,) * (2 - two)) for _ in range(2))
        self.gradient = zeros(n, g, wide)
        # apart and without a margin, so that a step lies in memory as its parameter does
        self.weight_step, self.bias_step = (
            zeros(n, g, self.shape.width),
            zeros(n, g * self.shape.bias),
        )
        self.T, self.boost, self.failures = zeros(n), zeros(n) + 1, zeros(n, dtype=torch.int64)
        self.ready = ready

    def state(self) -> dict[str, Tensor]:
        """The tensors that outlive a step."""
        names = ("A", "G", "A_inverse", "G_inverse", "T", "boost", "failures", "ready")
        return {name: getattr(self, name) for name in names}

    def fold(self, sums: dict[str, Sums], keep: Tensor) -> None:
        """F <- keep F + (1 - keep) mean, for each entry; where `keep` [n] is 1, nothing changes."""
        keep = keep.to(self.shape.dtype)
        self.T *= keep
        gain = 1 - keep
        for name, layer in sums.items():
            here, (A, G) = self.slices[name], layer.sides
            fold_(self._wide_A[here], A, keep[here], layer.positions)
            fold_(self.G[here], G, keep[here], layer.rows)
            # a mask may have left no row: then the gain is 0, and what it multiplies must be finite
            rows = layer.rows.clamp(min=1) if isinstance(layer.rows, Tensor) else max(layer.rows, 1)
            self.T[here] += gain[here] * (layer.positions / rows)

    @property
    def parts(self) -> list[slice]:
        """The entries that are inverted together: as many as need no more than INVERTED_AT_ONCE."""
        entry = self.A[0].nbytes + self.G[0].nbytes
        length = max(1, min(INVERTED_AT_ONCE // entry, -(-self.count // self.shares)))
        return [slice(i, i + length) for i in range(0, self.count, length)]

    def begin_inversion(self, part: slice, damping: Tensor) -> Inversion:
        """Take a damped copy of the factors: `damping` [n] times each block's boost."""
        A, G = self.A[part], self.G[part]
        extra_A, extra_G = factored_damping(A, G, damping[part] * self.boost[part])
        return Inversion(damped(A, extra_A), damped(G, extra_G), self.ready[part].clone())

    def end_inversion(self, part: slice, done: Inversion) -> None:
        """Use the new inverses.

        Where the factorisation failed the old inverse stays and the boost doubles for the next try;
        where it worked the boost halves towards 1.
        """
        failed = self.ready[part] & ~done.sound
        for old, new in ((self.A_inverse[part], done.A), (self.G_inverse[part], done.G)):
            old.copy_(torch.where(done.sound.view((-1,) + (1,) * (old.dim() - 1)), new, old))
        boost = self.boost[part]
        boost.copy_(torch.where(failed, boost * 2, (boost / 2).clamp(min=1)))
        self.failures[part] += failed

    def take_gradients(self) -> None:
        """Take over the gradients that were written to the places of the steps."""
        width = self.shape.width
        self.gradient[..., :width] = self.weight_step
        if self.shape.bias:
            self.gradient[..., width] = self.bias_step

    def decreases(self) -> list[Tensor]:
        """Gradient times step: of the weights [n] and, where there are some, of the biases [n]."""
        width = self.shape.width
        gradient = self.gradient[..., :width]
        sums = [(gradient * self.weight_step).sum((1, 2), dtype=torch.float64)]
        if self.shape.bias:
            biases = self.gradient[..., width] * self.bias_step
            sums.append(biases.sum(1, dtype=torch.float64))
        return sums

    def scale_steps(self, rms: float) -> None:
        """Give each block's step, weight and bias together, this root mean square; zero stays."""
        parts = [self.weight_step, self.bias_step] if self.shape.bias else [self.weight_step]
        squares = [part.flatten(1).square().sum(1, dtype=torch.float64) for part in parts]
        length = rms * (self.shape.output_dim * self.shape.input_dim) ** 0.5
        total = torch.stack(squares).sum(0)
        scale = torch.where(total > 0, length / total.sqrt(), 0.0).to(self.shape.dtype)
        for part in parts:
            part.mul_(scale.view((-1,) + (1,) * (part.dim() - 1)))

    def hold(self, here: slice, *, bias: bool) -> None:
        """Let the gradient of a layer's bias, or else of its weight, be what makes its step zero.

        The other part's step is then that of its own block, as if the held one were a constant:
        with zeros instead, it would rely on the held one to move along, and be far too long.
        """
        if self.shape.input_diagonal:  # neither part knows of the other
            return
        last, inverse = self.shape.width, self.A_inverse[here]
        weights, biases = self.gradient[here, :, :last], self.gradient[here, :, last:][..., :1]
        known = inverse[:, last:, last:] > 0  # zero before the layer was seen
        if bias:
            coupling = inverse[:, :last, last:] / torch.where(known, inverse[:, last:, last:], 1.0)
            biases.copy_(-weights @ coupling)
            return
        identity = torch.eye(last + 1, dtype=torch.float64, device=inverse.device)
        sound = torch.where(known, inverse.double(), identity)
        row = torch.linalg.solve_ex(sound, identity[:, last:].expand(len(sound), -1, -1))[0].mT
        weights.copy_(biases * (row[..., :last] / row[..., last:]))

    def precondition(self) -> None:
        """Apply the inverse of A (x) G to each gradient [out, in (+1)]: G^-1 gradient A^-1.

        Small layers without TF32: at the end of training ResNet32's first and last one, which are
        its smallest, lost 2 % of their step to it (benchmarks/precision.py).
        """
        small = max(self.shape.input_dim, self.shape.output_dim) <= LARGEST_PRECISE
        with ieee_products(self.device) if small else nullcontext():
            self._precondition()

    def _precondition(self) -> None:
        if self.shape.input_diagonal:
            half = self.gradient * self._wide_inverse[:, None, :]
        else:
            half = torch.bmm(self.gradient, self._wide_inverse)
        width = self.shape.width
        parts = [(half[..., :width], self.weight_step)]
        if self.shape.bias:
            parts.append((half[..., width : width + 1], self.bias_step[..., None]))
        for part, step in parts:
            if self.shape.output_diagonal:
                torch.mul(part, self.G_inverse[:, :, None], out=step)
            else:
                torch.bmm(self.G_inverse, part, out=step)

    def factors(self, block: Block) -> KroneckerFactors:
        """One layer's factors, copied."""
        here = self.slices[block.name]
        T = self.T[here][0].clone()
        A = block.in_weight_order(self.A[here]).clone()
        S = self.G[here] / torch.where(T > 0, T, 1.0)  # T is 0 before a layer was seen
        return KroneckerFactors(A, S, T) if len(A) > 1 else KroneckerFactors(A[0], S[0], T)


def _product_ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the factor's dtype, but for bf16 and fp16 on CUDA, whose products accumulate in fp32."""
    reduced = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor if tensor.is_cuda and reduced and dtype == torch.float32 else tensor.to(dtype)


def _moment(rows: Tensor, dtype: torch.dtype, *, diagonal: bool) -> Tensor:
    """Sum over rows of r r', or of its diagonal only: [groups, dim, dim] or [groups, dim]."""
    return rows.to(dtype).square().sum(1) if diagonal else second_moment(rows, dtype)


def _reordered(side: Tensor, order: Tensor) -> Tensor:
    """Rows, and in a matrix columns too, of [n, dim(, dim)] taken in another order."""
    side = side[:, order]
    return side if side.dim() == 2 else side[:, :, order]


def _diagonal(side: Tensor) -> Tensor:
    return side if side.dim() == 2 else side.diagonal(dim1=1, dim2=2)
