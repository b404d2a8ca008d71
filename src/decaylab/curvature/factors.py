"""Kronecker factors A and S: sums over a refresh, and their running averages.

Scaling, for a loss averaged over the rows of the logits (recipe line 6):

    A = mean over examples and positions of a a'
    S = mean over examples and positions of g g'
    T = positions / rows of the logits
    block = T A (x) S = A (x) G,  with G = T S = sum over positions of g g' / rows of the logits

g is the gradient of one row's (not averaged) loss. G is what is stored: T enters it by itself, for
convolutions, sequences and layers that are called several times alike. Blocks of one shape are
stacked, so that each operation runs once per shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decaylab.curvature import guards
from decaylab.curvature.blocks import Block
from decaylab.curvature.inverses import mean_diagonal
from decaylab.curvature.kernels import fold_
from decaylab.curvature.kinds.kind import Shape, Site, Use
from decaylab.curvature.kinds.rows import Sharing
from decaylab.curvature.storage import diagonal_of, is_packed, lower, pack, unpack

# A mean eigenvalue of a block that shows none.
TINY = 1e-12
# So many bytes of a refresh's sums may stay in memory until the next one, beside activations.
LARGEST_TOTALS = 2**28


@dataclass(frozen=True)
class KroneckerFactors:
    """The factors of one layer: its block of the curvature is T * A (x) S.

    `A` [in (+1), in (+1)] is in the order of `weight.flatten(1)` with the bias last, `S` [out,
    out] by output channel; with a leading axis of groups where the layer has more than one. A side
    longer than `max_factor_dim` is its diagonal only, and is returned as that diagonal matrix's
    vector. `T` is a scalar tensor; of experts, which meet different numbers of rows, that of the
    first: S is so scaled that the product is right. `site` says whose they are.
    """

    A: Tensor
    S: Tensor
    T: Tensor
    site: Site


@dataclass
class Sums:
    """What one site has shown since the last refresh: sums and counts, so that passes add up.

    Large sides are triangles (`curvature.storage`). `positions` is a number (on the device, of
    masked rows) or one for each group. `room`: where triangles of A (0) and G (1) are to lie.
    """

    A: Tensor | None = None
    G: Tensor | None = None
    positions: Tensor | float = 0.0
    rows: Tensor | float = 0.0
    room: Callable[[int], Tensor] | None = None

    @staticmethod
    def none(site: Site, device: torch.device) -> "Sums":
        """The sums of no rows, to which others can be added."""
        A, G = (
            torch.zeros(site.groups, *size, dtype=site.shape.dtype, device=device)
            for size in site.stored
        )
        return Sums(A, G)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The sums A and G."""
        assert self.A is not None
        assert self.G is not None
        return self.A, self.G

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The sides divided by their counts, as matrices or diagonals; nan without a row."""
        A, G = map(_matrices, self.sides)
        return A / _along(self.positions, A), G / self.rows

    @property
    def counts(self) -> tuple[Tensor | float, Tensor | float]:
        """What A and G are sums over."""
        return self.positions, self.rows

    def add_inputs(self, site: Site, uses: list[Use], sharing: Sharing) -> None:
        """Add the sum of a a' over the rows of the site's uses in one pass."""
        total, count = site.kind.input_moment(site, uses, sharing)
        if self.A is None:
            self.A = _stored(total, site.stored[0], self.room and partial(self.room, 0))
        else:
            self.A.add_(_stored(total, site.stored[0]))
        self.positions = self.positions + count

    def add_gradients(
        self,
        site: Site,
        uses: list[Use],
        gradients: list[Tensor],
        sharing: Sharing,
        scale: Tensor | float,
    ) -> None:
        """Add scale times the sum of g g' over those rows."""
        total = site.kind.gradient_moment(site, uses, gradients, sharing)
        if isinstance(scale, Tensor) or scale != 1:
            total.mul_(scale)
        if self.G is None:
            self.G = _stored(total, site.stored[1], self.room and partial(self.room, 1))
        else:
            self.G.add_(_stored(total, site.stored[1]))

    def add_rows(self, rows: Tensor | float) -> None:
        """Count the rows of logits that the gradients came from."""
        self.rows = self.rows + rows


def merged(head: Sums, embedding: Sums) -> Sums:
    """One product for a weight [tokens, width] that is a head and an embedding: the sum of two.

    As a head it is multiplied with h [width], as an embedding by counting tokens:

        block = A (x) G + S_e (x) C_e,    A = E[h h'], G = diag(sum g^2), S_e of the embedding's
                                          gradients [width, width], C_e of its counts [tokens]

    (without the products of one use with the other). With f and f_e the means of both products'
    diagonals, A^ and so on the sides divided by the means of their own, and w = f / (f + f_e),

        block ~ (w A^ + (1 - w) S_e^) (x) (f G^ + f_e C_e^)

    which has the sum's trace and both of its partial traces, is exact where one of the two vanishes
    or where they are multiples of each other on one side, and is positive. On a small language
    model it is 4 % (at first) to 16 % (where both uses count alike) away from the sum, which the
    head's block alone misses by 6 % to 49 %; diagonal G and the products of one use with the other,
    which any K-FAC leaves out, are 48 % to 81 % (tests/curvature/test_tied.py).
    """
    A, G = head.means
    C, S = embedding.means
    C, S = C[:, : G.shape[1]], _padded(S, A.shape[-1])
    A_mean, G_mean, S_mean, C_mean = map(mean_diagonal, (A, G, S, C))
    both = A_mean * G_mean + S_mean * C_mean
    share = torch.where(both > 0, A_mean * G_mean / both, 1.0)
    A = _along(share, A) * A + _along(_ratio((1 - share) * A_mean, S_mean), S) * S
    G = G + _along(_ratio(S_mean, A_mean), C) * C
    return Sums(A * head.positions, G * head.rows, head.positions, head.rows)


def of_blocks(sums: Mapping[str, Sums], blocks: Mapping[str, Block]) -> dict[str, Sums]:
    """The sums by site as sums by block."""
    result = {}
    for name, block in blocks.items():
        site_sums = sums.get(block.site.name)
        tied_sums = None if block.tied is None else sums.get(block.tied.name)
        if site_sums is not None and tied_sums is not None:
            if block.site.is_embedding:
                result[name] = _turned(merged(tied_sums, site_sums), block.shape)
            else:
                result[name] = _laid_out(merged(site_sums, tied_sums), block.shape)
        elif site_sums is not None:
            result[name] = site_sums
        elif tied_sums is not None:  # the layer itself was not used
            result[name] = _turned(tied_sums, block.shape)
    return result


def _turned(sums: Sums, shape: Shape) -> Sums:
    """The same product for the transposed matrix, which has this shape."""
    A, G = map(_matrices, sums.sides)
    return _laid_out(Sums(G, A, sums.rows, sums.positions), shape)


def _laid_out(sums: Sums, shape: Shape) -> Sums:
    """Matrices or diagonals with the margins of a shape, and as triangles where it has them."""
    A, G = sums.sides
    A_size, G_size = shape.stored(A.device)
    A = _padded(_cut(A, shape.input_dim), shape.wide(A.device))
    sides = _stored(A, A_size), _stored(_cut(G, shape.output_dim), G_size)
    return Sums(*sides, sums.positions, sums.rows)


@dataclass
class Bank:
    """The factors of all blocks of one shape, stacked: A [n, a, a], G [n, g, g] (or diagonals).

    Buffers are allocated once and written in place. `ready` says which blocks have a factor.
    """

    shape: Shape
    device: torch.device
    slices: dict[str, slice] = field(default_factory=dict)
    count: int = 0
    _totals: dict[int, Tensor] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Give a block its entries; before `allocate`."""
        self.slices[block.name] = slice(self.count, self.count + block.groups)
        self.count += block.groups

    def allocate(self, ready: Tensor, T: Tensor) -> None:
        """Make the buffers, zero: nothing is known. `ready` and `T`, [n], are taken over."""
        self.A, self.G = (
            torch.zeros(self.count, *size, dtype=self.shape.dtype, device=self.device)
            for size in self.shape.stored(self.device)
        )
        self.ready, self.T = ready, T

    def room(self, name: str, side: int) -> Tensor:
        """Where a refresh adds up A (0) or G (1) of a block; it has memory from the first time."""
        if side not in self._totals:
            self._totals[side] = torch.empty_like((self.A, self.G)[side])
        return self._totals[side][self.slices[name]]

    @property
    def totals(self) -> tuple[Tensor, Tensor]:
        """What was added up, as A and G are laid out; with anything where nothing was."""
        name = next(iter(self.slices))
        for side in (0, 1):
            self.room(name, side)
        return self._totals[0], self._totals[1]

    def release(self) -> None:
        """Give back the memory of the totals."""
        self._totals.clear()

    def matrices(self, here: slice) -> tuple[Tensor, Tensor]:
        """A and G of some entries, as matrices or diagonals without the margins of A, copied."""
        a = self.shape.input_dim
        return _matrices(self.A[here], a), _matrices(self.G[here], self.shape.output_dim)

    def lower(self, here: slice) -> tuple[Tensor, Tensor]:
        """As `matrices`, but of matrices only the lower triangles count; they lie by columns."""
        lengths = self.shape.input_dim, self.shape.output_dim
        return tuple(  # type: ignore[return-value]
            lower(side, length) if is_packed(side) else _by_columns(_cut(side, length))
            for side, length in zip((self.A[here], self.G[here]), lengths, strict=True)
        )

    def fold(self, keep: Tensor, positions: Tensor, rows: Tensor) -> None:
        """F <- keep F + (1 - keep) total / count, for each entry; where `keep` is 1, F stays."""
        A, G = self.totals
        fold_(self.A, A, keep, positions)
        fold_(self.G, G, keep, rows)

    def factors(self, block: Block) -> KroneckerFactors:
        """One layer's factors, copied."""
        here = self.slices[block.name]
        T = self.T[here][0].to(self.shape.dtype, copy=True)
        A, G = self.matrices(here)
        A = block.site.in_weight_order(A)
        S = G / torch.where(T > 0, T, 1.0)  # T is 0 before a layer was seen
        sides = (A, S) if len(A) > 1 else (A[0], S[0])
        return KroneckerFactors(*sides, T, block.site)


class RunningFactors:
    """The running averages of every block, stacked by shape.

    `seen` names the blocks that have shown their factors at least once. `keeps_totals`: the sums of
    a refresh stay where they are until the next one, as a graph of `fold` needs it.
    """

    keeps_totals = False

    def __init__(self, blocks: dict[str, Block], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.seen: set[str] = set()
        self.home: dict[str, Bank] = {}
        banks: dict[Shape, Bank] = {}
        for name, block in blocks.items():
            self.home[name] = banks.setdefault(block.shape, Bank(block.shape, device))
            self.home[name].add(block)
        self.banks = list(banks.values())
        self.entries = sum(bank.count for bank in self.banks)
        # in one piece, so that all blocks are looked at in one go
        self.ready = torch.zeros(self.entries, dtype=torch.bool, device=device)
        self._T = self.ready.double()
        self._counts = torch.zeros(2, self.entries, dtype=torch.float64, device=device)
        self._factor_decay = torch.zeros((), dtype=torch.float64, device=device)
        for bank, *vectors in zip(
            self.banks, self.by_bank(self.ready), self.by_bank(self._T), strict=True
        ):
            bank.allocate(*vectors)
        shapes = [bank.shape for bank in self.banks for _ in range(bank.count)]
        lengths = [[s.input_dim for s in shapes], [s.output_dim for s in shapes]]
        self._lengths = torch.tensor(lengths, dtype=torch.float64, device=device)

    def room(self, site: str) -> Callable[[int], Tensor] | None:
        """Where the sums of a site are to lie; nowhere, if its block is the sum of two."""
        block = self.blocks.get(site)
        if block is None or block.site.name != site or block.tied is not None:
            return None
        return partial(self.home[site].room, site)

    def update(
        self,
        by_site: Mapping[str, Sums],
        factor_decay: float,
        replay: Callable[[], None] | None = None,
    ) -> None:
        """Fold a refresh into the averages: F <- decay F + (1 - decay) mean; the first sets them.

        A layer that was not seen, or whose mean is not finite, is left out, on the device.
        `replay` does what `fold` does, by a graph.
        """
        sums = of_blocks(by_site, self.blocks)
        rooms, totals = [], []
        for name, layer in sums.items():
            for side, total in enumerate(layer.sides):
                if layer.room is None or not is_packed(total):  # else it lies there
                    rooms.append(self.home[name].room(name, side))
                    totals.append(total)
        if totals:
            torch._foreach_copy_(rooms, totals)
        self._write_counts(sums)
        self._factor_decay.fill_(factor_decay)
        (replay or self.fold)()
        if not self.keeps_totals:
            for bank in self.banks:
                bank.release()
        # not yet, if it was called with no example
        self.seen |= {n for n, s in sums.items() if isinstance(s.positions, Tensor) or s.positions}

    def fold(self) -> None:
        """Take the totals into the averages, by the counts and the decay that were written.

        All that this reads and writes stays where it is, so that a graph of it holds for good.
        """
        positions, rows = self._counts
        traces = torch.stack(self._traces([bank.totals for bank in self.banks]))
        # no entry of a sum of squares is larger than those of its diagonal
        sound = (traces.isfinite() & (self._counts > 0)).all(0)
        keep = torch.where(sound, self.ready * self._factor_decay, 1.0)
        vectors = torch.stack([keep, positions, rows])
        by_dtype = {dtype: vectors.to(dtype) for dtype in {b.shape.dtype for b in self.banks}}
        counts = [bank.count for bank in self.banks]
        for index, bank in enumerate(self.banks):
            bank.fold(*by_dtype[bank.shape.dtype].split(counts, 1)[index])
        torch.lerp(positions / rows.clamp(min=1), self._T, keep, out=self._T)
        self.ready |= sound

    def _write_counts(self, sums: Mapping[str, Sums]) -> None:
        """What A and G are sums over, for all entries: a launch for equal neighbours."""
        for index, vector in enumerate(self._counts):
            counts = [
                (sums[name].counts[index] if name in sums else 0.0, self.blocks[name].groups)
                for bank in self.banks
                for name in bank.slices
            ]
            start = 0
            for _, run in groupby(counts, lambda c: id(c[0]) if isinstance(c[0], Tensor) else c[0]):
                neighbours = list(run)
                length, count = sum(groups for _, groups in neighbours), neighbours[0][0]
                here = vector[start : start + length]
                here.copy_(count) if isinstance(count, Tensor) else here.fill_(count)
                start += length

    def _traces(self, sides: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Of A and of G of all entries, [entries] each, from those of each bank."""
        return [
            torch.cat([diagonal_of(side).sum(1) for side in by_bank])
            for by_bank in zip(*sides, strict=True)
        ]

    def mean_diagonals(self) -> tuple[Tensor, Tensor]:
        """Trace over dimension of A and of G, of all entries, [entries] each, in float64."""
        traces = self._traces([(bank.A, bank.G) for bank in self.banks])
        A, G = (trace / length for trace, length in zip(traces, self._lengths, strict=True))
        return A, G

    @property
    def may_keep_totals(self) -> bool:
        """Whether there are few enough of them."""
        return sum(b.A.nbytes + b.G.nbytes for b in self.banks) <= LARGEST_TOTALS

    def forget(self) -> None:
        """Let the next `update` set the factors instead of averaging into them."""
        self.ready.zero_()

    def factors(self) -> dict[str, KroneckerFactors]:
        """The running averages of every block, copied."""
        return {name: bank.factors(self.blocks[name]) for name, bank in self.home.items()}

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """(tr A / dim A) (tr G / dim G) of each layer, [groups]: its block's mean eigenvalue.

        A little more than zero where the layer is dead, so that it can damp.
        """
        A, G = self.mean_diagonals()
        products = self.by_bank((A * G).clamp_(min=TINY))
        by_shape = {bank.shape: part for bank, part in zip(self.banks, products, strict=True)}
        return {n: by_shape[bank.shape][bank.slices[n]] for n, bank in self.home.items()}

    def state(self, name: str) -> dict[str, Tensor]:
        """What outlives a step, of one block, copied; A in the order of `weight.flatten(1)`."""
        bank = self.home[name]
        here = bank.slices[name]
        A, G = bank.matrices(here)
        A = self.blocks[name].site.in_weight_order(A)
        layer_state = {
            "A": A,
            "G": G,
            "T": bank.T[here].to(A.dtype),
            "ready": bank.ready[here].clone(),
        }
        layer_state["seen"] = torch.full_like(layer_state["ready"][0], name in self.seen)
        return layer_state

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back the `state` of every block."""
        for name, layer_state in state.items():
            bank = self.home[name]
            here = bank.slices[name]
            for key, like in zip("AG", bank.matrices(here), strict=True):
                guards.check_saved_shape(name, layer_state[key], like)
                value = layer_state[key].to(like)
                if key == "A":
                    value = self.blocks[name].site.in_stored_order(value)
                    value = _padded(value, bank.shape.wide(like.device))
                buffer = getattr(bank, key)[here]
                buffer.copy_(_stored(value, buffer.shape[1:]))
            for key in ("T", "ready"):
                buffer = getattr(bank, key)[here]
                guards.check_saved_shape(name, layer_state[key], buffer)
                buffer.copy_(layer_state[key])
        # a layer may have been seen and not be ready: of values that are not finite
        self.seen = {
            n
            for n, layer_state in state.items()
            if bool(layer_state.get("seen", layer_state["ready"].any()))
        }

    def by_bank(self, entries: Tensor) -> tuple[Tensor, ...]:
        """A vector over all entries, cut into those of each bank."""
        return entries.split([bank.count for bank in self.banks])


def _along(values: Tensor | float, side: Tensor) -> Tensor | float:
    """Numbers, one per group, in the axes of a side [groups, dim(, dim)]; a scalar as it is."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        return values
    return values.view((-1,) + (1,) * (side.dim() - 1)).to(side.dtype)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """One over the other, zero where that is zero."""
    return torch.where(
        denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), 0.0
    )


def _cut(side: Tensor, length: int) -> Tensor:
    """The first entries of matrices or diagonals."""
    return side[(slice(None), *(slice(length),) * (side.dim() - 1))]


def _by_columns(side: Tensor) -> Tensor:
    """A copy of matrices or diagonals, in memory by columns."""
    return side.transpose(1, -1).clone(memory_format=torch.contiguous_format).transpose(1, -1)


def _padded(side: Tensor, length: int) -> Tensor:
    """Matrices or diagonals with zeros behind them, up to a length."""
    return F.pad(side, (0, length - side.shape[-1]) * (side.dim() - 1))


def _stored(side: Tensor, size: Sequence[int], room: Callable[[], Tensor] | None = None) -> Tensor:
    """Matrices as triangles, where that is how they are kept: in `room()`, if given."""
    if side.shape[1:] == torch.Size(size):
        return side
    return pack(side.contiguous(), None if room is None else room())


def _matrices(side: Tensor, length: int | None = None) -> Tensor:
    """Triangles as matrices; those and diagonals cut to a length, if one is given, and copied."""
    if is_packed(side):
        return unpack(side, 2 * side.shape[2] if length is None else length)
    if length is None:
        return side
    return _cut(side, length).clone()
