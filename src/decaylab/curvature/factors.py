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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decaylab.curvature import guards
from decaylab.curvature.blocks import Block
from decaylab.curvature.inverses import diagonal_of, mean_diagonal
from decaylab.curvature.kernels import fold_
from decaylab.curvature.kinds.kind import Shape, Site, Use
from decaylab.curvature.kinds.rows import Sharing

# A mean eigenvalue of a block that shows none.
TINY = 1e-12


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

    `positions` is a number (on the device, of masked rows) or one for each group.
    """

    A: Tensor | None = None
    G: Tensor | None = None
    positions: Tensor | float = 0.0
    rows: Tensor | float = 0.0

    @staticmethod
    def none(site: Site, device: torch.device) -> "Sums":
        """The sums of no rows, to which others can be added."""
        shape, dtype = site.shape, site.shape.dtype
        A = (shape.wide(device),) * (2 - shape.input_diagonal)
        G = (shape.output_dim,) * (2 - shape.output_diagonal)
        sides = (torch.zeros(site.groups, *s, dtype=dtype, device=device) for s in (A, G))
        return Sums(*sides)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The sums A and G."""
        assert self.A is not None
        assert self.G is not None
        return self.A, self.G

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The sides divided by their counts; nan without a row."""
        A, G = self.sides
        return A / _along(self.positions, A), G / self.rows

    def traces(self) -> Tensor:
        """The traces of the means, added, [groups]: finite where all of both is, and rows count."""
        A, G = self.sides
        return diagonal_of(A).sum(1) / self.positions + diagonal_of(G).sum(1) / self.rows

    def add_inputs(self, site: Site, uses: list[Use], sharing: Sharing) -> None:
        """Add the sum of a a' over the rows of the site's uses in one pass."""
        total, count = site.kind.input_moment(site, uses, sharing)
        self.A = total if self.A is None else self.A.add_(total)
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
        total = site.kind.gradient_moment(site, uses, gradients, sharing).mul_(scale)
        self.G = total if self.G is None else self.G.add_(total)

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
    C, S = C[:, : G.shape[1]], _padded(S, A)
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
        head = sums.get(block.site.name)
        embedding = None if block.tied is None else sums.get(block.tied.name)
        if head is not None:
            result[name] = head if embedding is None else merged(head, embedding)
        elif embedding is not None:  # the head was not used: the same product, turned round
            C, S = embedding.sides
            A = S.new_zeros(1, *(block.shape.wide(S.device),) * (S.dim() - 1))
            turned = _padded(S, A), C[:, : block.shape.output_dim]
            result[name] = Sums(*turned, embedding.rows, embedding.positions)
    return result


@dataclass
class Bank:
    """The factors of all blocks of one shape, stacked: A [n, a, a], G [n, g, g] (or diagonals).

    Buffers are allocated once and written in place. `ready` says which blocks have a factor.
    """

    shape: Shape
    device: torch.device
    slices: dict[str, slice] = field(default_factory=dict)
    count: int = 0

    def add(self, block: Block) -> None:
        """Give a block its entries; before `allocate`."""
        self.slices[block.name] = slice(self.count, self.count + block.groups)
        self.count += block.groups

    def allocate(self, ready: Tensor) -> None:
        """Make the buffers, zero: nothing is known. `ready` [n] is taken over."""
        n, a, g = self.count, self.shape.input_dim, self.shape.output_dim
        wide = self.shape.wide(self.device)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=self.shape.dtype, device=self.device)

        axes = 2 - self.shape.input_diagonal
        self._wide_A = zeros(n, *(wide,) * axes)
        self.A = self._wide_A[(slice(None), *(slice(a),) * axes)]
        self.G = zeros(n, *(g,) * (2 - self.shape.output_diagonal))
        self.T, self.ready = zeros(n), ready

    def fold(self, sums: Mapping[str, Sums], keep: Tensor) -> None:
        """F <- keep F + (1 - keep) mean, for each entry; where `keep` [n] is 1, nothing changes."""
        keep = keep.to(self.shape.dtype)
        gain = 1 - keep
        self.T *= keep
        for name, layer in sums.items():
            here, (A, G) = self.slices[name], layer.sides
            fold_(self._wide_A[here], A, keep[here], layer.positions)
            fold_(self.G[here], G, keep[here], layer.rows)
            # a mask may have left no row: then the gain is 0, and what it multiplies must be finite
            rows = layer.rows.clamp(min=1) if isinstance(layer.rows, Tensor) else max(layer.rows, 1)
            self.T[here] += gain[here] * (layer.positions / rows)

    def factors(self, block: Block) -> KroneckerFactors:
        """One layer's factors, copied."""
        here = self.slices[block.name]
        T = self.T[here][0].clone()
        A = block.site.in_weight_order(self.A[here]).clone()
        S = self.G[here] / torch.where(T > 0, T, 1.0)  # T is 0 before a layer was seen
        sides = (A, S) if len(A) > 1 else (A[0], S[0])
        return KroneckerFactors(*sides, T, block.site)


class RunningFactors:
    """The running averages of every block, stacked by shape.

    `seen` names the blocks that have shown their factors at least once.
    """

    STATE = ("A", "G", "T", "ready")

    def __init__(self, blocks: dict[str, Block], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.seen: set[str] = set()
        self.home: dict[str, Bank] = {}
        banks: dict[Shape, Bank] = {}
        for name, block in blocks.items():
            self.home[name] = banks.setdefault(block.shape, Bank(block.shape, device))
            self.home[name].add(block)
        self.banks = list(banks.values())
        entries = sum(bank.count for bank in self.banks)
        # in one piece, so that all blocks are looked at in one go
        self._ready = torch.zeros(entries, dtype=torch.bool, device=device)
        for bank, ready in zip(self.banks, self._by_bank(self._ready), strict=True):
            bank.allocate(ready)

    def update(self, by_site: Mapping[str, Sums], factor_decay: float) -> None:
        """Fold a refresh into the averages: F <- decay F + (1 - decay) mean; the first sets them.

        A layer that was not seen, or whose mean is not finite, is left out, on the device.
        """
        sums = of_blocks(by_site, self.blocks)
        unseen = self._ready.double() * torch.nan if len(sums) < len(self.home) else self._ready
        shown = [
            sums[name].traces() if name in sums else nothing[here]
            for bank, nothing in zip(self.banks, self._by_bank(unseen), strict=True)
            for name, here in bank.slices.items()
        ]
        sound = torch.cat(shown).isfinite()
        keep = torch.where(sound, self._ready.double() * factor_decay, 1.0)
        for bank, kept in zip(self.banks, self._by_bank(keep), strict=True):
            bank.fold({name: sums[name] for name in bank.slices if name in sums}, kept)
        self._ready |= sound
        # not yet, if it was called with no example
        self.seen |= {n for n, s in sums.items() if isinstance(s.positions, Tensor) or s.positions}

    def forget(self) -> None:
        """Let the next `update` set the factors instead of averaging into them."""
        self._ready.zero_()

    def factors(self) -> dict[str, KroneckerFactors]:
        """The running averages of every block, copied."""
        return {name: bank.factors(self.blocks[name]) for name, bank in self.home.items()}

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """(tr A / dim A) (tr G / dim G) of each layer, [groups]: its block's mean eigenvalue.

        A little more than zero where the layer is dead, so that it can damp.
        """
        return {
            name: (mean_diagonal(bank.A) * mean_diagonal(bank.G)).clamp(min=TINY)[bank.slices[name]]
            for name, bank in self.home.items()
        }

    def state(self, name: str) -> dict[str, Tensor]:
        """What outlives a step, of one block, copied; A in the order of `weight.flatten(1)`."""
        bank = self.home[name]
        own = {key: getattr(bank, key)[bank.slices[name]].clone() for key in self.STATE}
        own["A"] = self.blocks[name].site.in_weight_order(own["A"])
        own["seen"] = torch.full_like(own["ready"][0], name in self.seen)
        return own

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back the `state` of every block."""
        for name, own in state.items():
            bank = self.home[name]
            for key in self.STATE:
                buffer = getattr(bank, key)[bank.slices[name]]
                guards.check_saved_shape(name, own[key], buffer)
                value = own[key].to(buffer.device)
                if key == "A":
                    value = self.blocks[name].site.in_stored_order(value)
                buffer.copy_(value)
        # a layer may have been seen and not be ready: of values that are not finite
        self.seen = {n for n, own in state.items() if bool(own.get("seen", own["ready"].any()))}

    def _by_bank(self, entries: Tensor) -> tuple[Tensor, ...]:
        """A vector over all entries, cut into those of each bank."""
        return entries.split([bank.count for bank in self.banks])


def _along(values: Tensor | float, side: Tensor) -> Tensor | float:
    """Numbers, one per group, in the axes of a side [groups, dim(, dim)]; a scalar as it is."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        return values
    return values.view((-1,) + (1,) * (side.dim() - 1)).to(side.dtype)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """One over the other, zero where that is zero."""
    return torch.where(other > 0, one / torch.where(other > 0, other, 1.0), 0.0)


def _padded(side: Tensor, like: Tensor) -> Tensor:
    """A side with zeros behind it, up to the length of another."""
    return F.pad(side, (0, like.shape[-1] - side.shape[-1]) * (side.dim() - 1))
