"""Damped inverses of the factors, and what they are for: gradients in, preconditioned steps out."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from decaylab.curvature import guards
from decaylab.curvature.factors import Bank, RunningFactors
from decaylab.curvature.inverses import factored_damping, ieee_products, invert_
from decaylab.curvature.kinds.kind import Shape
from decaylab.curvature.polar import polar_factors
from decaylab.curvature.shards import Shards, own_part
from decaylab.curvature.storage import InverseStack, diagonal_of
from decaylab.curvature.streams import own_stream

# Bytes of factors that are inverted in one go: more are no faster, and need room for all of them.
INVERTED_AT_ONCE = 2**24
# So many bytes of gradients and steps stay in memory between steps: more only cost room there. And
# so many of an inversion, in its graph; and of large inverses in float32.
LARGEST_KEPT = 2**30
# Layers with sides up to this one, whose products are small, are preconditioned in full float32.
LARGEST_PRECISE = 640
# So many parts are inverted side by side on CUDA.
STREAMS = 4
# What inverting a part needs, in bytes of its factors: their copies, which become the inverses, the
# factorisation's workspace, blocks, and what the allocator rounds up. Measured once (H200): 1.8.
ROOM_TO_INVERT = 2.0
# A step is enlarged by no more than this: what is so small is what rounding left of a gradient.
ENLARGED_AT_MOST = 1e12
PENDING = ("A_pending", "G_pending", "sound")
INPUT_SIDES = {"A_inverse", "A_pending"}


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bank: a view, shaped like it, of its gradient and then its step.

    It lies in memory as the parameter does. `own` is the part of it that is this rank's, where the
    parameter is sharded, and else the same.
    """

    step: Tensor
    own: Tensor


@dataclass
class Inversion:
    """An inversion on its way: damped copies of the factors of a part of a bank, then inverses.

    `roots`: or roots of inverses.
    """

    A: Tensor
    G: Tensor
    sound: Tensor
    roots: bool = False

    @property
    def cost(self) -> float:
        """Multiplications, but for a factor: d^3 of a matrix, d of a diagonal."""
        return sum(
            side.numel() * float(side.shape[-1]) ** (side.dim() == 3) for side in (self.A, self.G)
        )

    def run(self) -> None:
        """Invert the copies in place; the inverses in use stay as they are."""
        for side in (self.A, self.G):
            self.sound &= invert_(side, roots=self.roots)

    def stay_for(self, stream: torch.cuda.Stream) -> None:
        """Give no memory away before `stream` is done with it: an inversion may be dropped."""
        for tensor in (self.A, self.G, self.sound):
            tensor.record_stream(stream)


class Workers(Protocol):
    """Between whom inversions are divided: `curvature.distribution` has them."""

    @property
    def size(self) -> int:
        """How many there are."""

    def divided(self, inversions: Sequence[Inversion]) -> tuple[list[Inversion], list[Inversion]]:
        """Those that this process runs, and those of others."""

    def share(self, inversions: Sequence[Inversion]) -> None:
        """Get each inversion from who ran it."""


class Inverses:
    """The inverses of a bank of factors, and the gradients and then steps of its blocks.

    Until a block is ready its inverse is the identity: a layer, or an expert, that is first reached
    between two refreshes takes steps of gradient descent for so long.
    `shares` is between how many the inversions are divided; `half` keeps large inverses in float16.
    `roots` keeps a root R of each inverse R' R instead, and steps are the steepest.
    """

    def __init__(self, bank: Bank, shares: int, *, half: bool, roots: bool) -> None:
        self.bank, self.shape, self._shares, self._roots = bank, bank.shape, shares, roots
        n, shape, device = bank.count, bank.shape, bank.device

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=shape.dtype, device=device)

        def stack(length: int, wide: int, diagonal: bool) -> InverseStack:
            halved = half and not diagonal and length > LARGEST_PRECISE
            place = shape.dtype, device
            return InverseStack(n, length, wide, *place, diagonal=diagonal, half=halved)

        self.A = stack(shape.input_dim, shape.wide(device), shape.input_diagonal)
        self.G = stack(shape.output_dim, shape.output_dim, shape.output_diagonal)
        # [n, out, in], without margins, so that it lies in memory as its parameter does
        if shape.transposed:
            self.weight_step = zeros(n, shape.width, shape.output_dim).mT
        else:
            self.weight_step = zeros(n, shape.output_dim, shape.width)
        self.bias_step = zeros(n, shape.output_dim * shape.bias)
        self.decreases: list[Tensor] = []

    @property
    def steps(self) -> tuple[Tensor, Tensor]:
        """The steps of weights and biases, as they lie in memory."""
        weights = self.weight_step.mT if self.shape.transposed else self.weight_step
        return weights, self.bias_step

    @property
    def entry_bytes(self) -> int:
        """Of A and G of one entry, as whole matrices."""
        shape = self.shape
        numbers = shape.input_dim ** (2 - shape.input_diagonal)
        numbers += shape.output_dim ** (2 - shape.output_diagonal)
        return numbers * shape.dtype.itemsize

    @property
    def parts(self) -> list[slice]:
        """The entries that are inverted together: as many as need no more than INVERTED_AT_ONCE."""
        most = INVERTED_AT_ONCE // self.entry_bytes
        length = max(1, min(most, -(-self.bank.count // self._shares)))
        return [slice(i, i + length) for i in range(0, self.bank.count, length)]

    def begin(self, part: slice, extra: tuple[Tensor, Tensor], ready: Tensor) -> Inversion:
        """Take a damped copy of the factors: with `extra` [n] on the diagonals of A and of G.

        `ready` [n] says which have factors, and becomes which inverses are sound.
        """
        sides = self.bank.lower(part)
        for side, more in zip(sides, extra, strict=True):
            diagonal_of(side).add_(more[part, None])
        return Inversion(*sides, ready[part], self._roots)

    def end(self, part: slice, done: Inversion) -> None:
        """Use the new inverses; where the factorisation failed the old ones stay."""
        self.A.write(part, done.A, done.sound)
        self.G.write(part, done.G, done.sound)

    def hold(self, here: slice, *, bias: bool) -> None:
        """Let the gradient of a layer's bias, or else of its weight, be what makes its step zero.

        The other part's step is then that of its own block, as if the held one were a constant:
        with zeros instead, it would rely on the held one to move along, and be far too long. The
        steepest steps get their length afterwards, and do without.
        """
        if self.shape.input_diagonal or self._roots:  # in the first, neither knows of the other
            return
        last, inverse = self.shape.width, self.A.read(here)
        weights = self.weight_step[here]
        biases = self.bias_step[here].view(len(weights), -1, 1)
        if bias:
            biases.copy_(-weights @ (inverse[:, :last, last:] / inverse[:, last:, last:]))
            return
        unit = torch.eye(last + 1, dtype=torch.float64, device=inverse.device)[:, last:]
        row = torch.linalg.solve_ex(inverse.double(), unit.expand(len(inverse), -1, -1))[0].mT
        weights.copy_(biases * (row[..., :last] / row[..., last:]))

    def precondition(self, *, decreases: bool = False) -> None:
        """Replace each gradient [out, in (+1)] by its step: G^-1 gradient A^-1, or the steepest.

        `decreases`: let these be gradient times step, of the weights [n] and, where there are some,
        of the biases [n]. Small layers without TF32: at the end of training ResNet32's first and
        last one, which are its smallest, lost 2 % of their step to it (benchmarks/precision.py).
        """
        small = max(self.shape.input_dim, self.shape.output_dim) <= LARGEST_PRECISE
        with ieee_products(self.bank.device) if small else nullcontext():
            step = self._steepest() if self._roots else self._solved()
        width = self.shape.width
        parts = [(step[..., :width], self.weight_step)]
        if self.shape.bias:
            parts.append((step[..., width : width + 1], self.bias_step.view(len(step), -1, 1)))
        self.decreases = []
        for part, gradient in parts:
            if decreases:
                self.decreases.append((gradient * part).sum((1, 2), dtype=torch.float64))
            gradient.copy_(part)

    def _steepest(self) -> Tensor:
        """R' polar(R gradient Q') Q, where G^-1 = R' R and A^-1 = Q' Q, but for a factor.

        Of all steps D whose G^1/2 D A^1/2 has no singular value over one, it is the one that goes
        down fastest, whichever roots these are. With A = G = I it is Muon's.
        """
        whitened = self.G.before(self.A.after(self._gradient(), transposed=True)[0])[0]
        return self.G.before(self.A.after(polar_factors(whitened))[0], transposed=True)[0]

    def _solved(self) -> Tensor:
        """G^-1 gradient A^-1."""
        half, scale = self.A.after(self._gradient())
        if self.shape.transposed:  # as it lies in memory; the inverse is symmetric
            turned, more = self.G.after(half.mT)
            step = turned.mT
        else:
            step, more = self.G.before(half)
        for factor in (scale, more):
            if factor is not None:
                step.mul_(factor[:, None, None])
        return step

    def _gradient(self) -> Tensor:
        """Gradients of weights and biases [n, out, wide], with zeros behind them."""
        width, wide = self.shape.width, self.shape.wide(self.bank.device)
        if wide == width:
            return self.weight_step
        n, rows = len(self.weight_step), self.shape.output_dim
        if self.shape.transposed:
            joined = self.weight_step.new_empty(n, wide, rows).mT
        else:
            joined = self.weight_step.new_empty(n, rows, wide)
        joined[..., :width] = self.weight_step
        joined[..., width:] = 0
        if self.shape.bias:
            joined[..., width] = self.bias_step
        return joined


def are_halved(banks: Iterable[Bank], device: torch.device) -> bool:
    """Whether large inverses are kept in float16 by default: on CUDA with TF32, if over 1 GiB.

    A TF32 product would read as many bits of them. Torch's setting counts as it is now.
    """
    matmul: Any = torch.backends.cuda.matmul  # shows what its older settings say, too
    if device.type != "cuda" or matmul.fp32_precision != "tf32":
        return False
    numbers = sum(
        bank.count * length**2
        for bank in banks
        for length, diagonal in (
            (bank.shape.input_dim, bank.shape.input_diagonal),
            (bank.shape.output_dim, bank.shape.output_diagonal),
        )
        if length > LARGEST_PRECISE and not diagonal
    )
    return 4 * numbers > LARGEST_KEPT


class Preconditioner:
    """Every block's inverse, gradient and preconditioned step.

    `slots` has the views for each covered parameter: write the gradient there (of `shards`, this
    rank's own), `complete` them, `precondition()`, and read the step, in `room()`. Several ranks
    divide the inversions between them. `half`: keep large inverses in float16; None: if
    `are_halved`. `roots`: keep roots of inverses, for the steepest steps.
    """

    def __init__(
        self,
        factors: RunningFactors,
        workers: Workers,
        shards: Shards,
        *,
        half: bool | None = None,
        roots: bool = False,
    ) -> None:
        self.blocks, self._factors, self._workers = factors.blocks, factors, workers
        self.shards = shards
        self.device = device = factors.device
        streams = STREAMS - 1 if device.type == "cuda" else 0  # beside the current one
        self._streams = [own_stream(self, device) for _ in range(streams)]
        self._vectors: dict[Any, Tensor] = {}
        self._pending: dict[Shape, list[Inversion]] = {}  # by bank: of each of its parts
        self._tried = factors.ready  # which entries it is for
        self._to_run: list[Inversion] = []
        self._of_others: list[Inversion] = []  # which other ranks run
        self._per_advance = 0
        if half is None:
            half = are_halved(factors.banks, device)
        self.banks = [
            Inverses(b, workers.size, half=half and b.shape.dtype == torch.float32, roots=roots)
            for b in factors.banks
        ]
        self._biased_first = sorted(self.banks, key=lambda bank: not bank.shape.bias)
        # by entry: lambda, and what it is multiplied by where the last factorisations failed
        self._dampings = torch.ones(factors.entries, dtype=torch.float64, device=device)
        self._boost = torch.ones(factors.entries, dtype=torch.float64, device=device)
        self._failures = torch.zeros(factors.entries, dtype=torch.int64, device=device)
        self._home = {name: each for each in self.banks for name in each.bank.slices}
        self.slots: dict[Tensor, Slot] = {}
        for name, block in self.blocks.items():
            inverses, site = self._home[name], block.site
            here = inverses.bank.slices[name]
            steps = []
            if site.trains_weight:
                steps.append(site.as_weight(inverses.weight_step[here]))
            if site.trains_bias and site.bias is not None:
                steps.append(inverses.bias_step[here].view(site.bias.shape))
            for parameter, step in zip(site.parts, steps, strict=True):
                self.slots[parameter] = Slot(step, own_part(parameter, step))

        self.keeps_room = sum(step.nbytes for step in self.steps) <= LARGEST_KEPT
        self._resize_room(there=self.keeps_room)

    @property
    def inversion_room(self) -> float:
        """Bytes that `invert_damped` needs, about: for the largest parts, one on each stream."""
        sizes = [bank.entry_bytes * (p.stop - p.start) for bank in self.banks for p in bank.parts]
        return ROOM_TO_INVERT * sum(sorted(sizes)[-STREAMS:])

    @contextmanager
    def room(self) -> Iterator[None]:
        """The slots have memory in here; of a large model not elsewhere, beside its activations."""
        if self.keeps_room:
            yield
            return
        self._resize_room(there=True)
        try:
            yield
        finally:
            self._resize_room(there=False)

    def _resize_room(self, *, there: bool) -> None:
        """Take memory for the slots, which are the same tensors all the time, or give it back."""
        for bank in self.banks:
            for step in (bank.weight_step, bank.bias_step):
                step.untyped_storage().resize_(step.nbytes if there else 0)

    @property
    def steps(self) -> list[Tensor]:
        """The preconditioned steps, stacked by shape."""
        return [step for bank in self.banks for step in bank.steps if step.numel()]

    @property
    def own_steps(self) -> list[Tensor]:
        """What this rank has written into the slots: gradients, before `complete`."""
        return [slot.own for slot in self.slots.values()] if self.shards.exist else self.steps

    def complete(self, parameters: Sequence[Tensor]) -> None:
        """Fill in what the other ranks have written into the slots of sharded parameters."""
        self.shards.complete(parameters, [self.slots[p].step for p in parameters])

    def invert(
        self,
        damping: float,
        ratios: Mapping[str, Tensor],
        replay: Callable[[], None] | None = None,
    ) -> None:
        """Invert every block with `damping`, multiplied for the layers in `ratios`; use it at once.

        What was begun before is dropped. `replay` does what `invert_damped` does, by a graph;
        several ranks, who send inverses around, do without.
        """
        if self._pending:
            self._finish_inversion()
            self._pending = {}
        if self._workers.size > 1:
            self.begin_inversion(damping, ratios)
            self.end_inversion()
            return
        self._set_dampings(damping, ratios)
        (replay or self.invert_damped)()

    def invert_damped(self) -> None:
        """Invert every block with the dampings that were set, and use it at once.

        All that this reads and writes stays where it is, so that a graph of it holds for good. On
        CUDA on several streams, large parts first: one factorisation is far from filling a GPU. One
        of them is the current one, whose memory a graph shares with others.
        """
        sound, per_bank = self._damped()
        jobs = [(*bank, part) for bank in per_bank for part in bank[0].parts]
        jobs.sort(key=lambda job: -job[0].shape.input_dim)
        for side in self._streams:
            side.wait_stream(torch.cuda.current_stream(side.device))
        streams = cycle([None, *self._streams])
        for (bank, extra, ready, part), stream in zip(jobs, streams, strict=False):
            with torch.cuda.stream(stream):
                inversion = bank.begin(part, extra, ready)
                inversion.run()
                bank.end(part, inversion)
        for side in self._streams:
            torch.cuda.current_stream(side.device).wait_stream(side)
        self._count_failures(self._factors.ready & ~sound)

    def begin_inversion(self, damping: float, ratios: Mapping[str, Tensor]) -> None:
        """Take copies of the factors to invert by and by, with `damping` as in `invert`."""
        self._tried = self._factors.ready.clone()
        self._set_dampings(damping, ratios)
        for bank, extra, ready in self._damped()[1]:
            self._pending[bank.shape] = [bank.begin(part, extra, ready) for part in bank.parts]
        inversions = [inversion for parts in self._pending.values() for inversion in parts]
        self._to_run, self._of_others = self._workers.divided(inversions)
        self._per_advance = 0
        for stream in self._streams[:1]:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def _set_dampings(self, damping: float, ratios: Mapping[str, Tensor]) -> None:
        """Write lambda of every entry: `damping`, multiplied for the layers in `ratios`."""
        ones = torch.ones_like(self._dampings)
        every = [
            ratios[name].expand(here.stop - here.start) if name in ratios else ones[here]
            for inverses in self.banks
            for name, here in inverses.bank.slices.items()
        ]
        torch.mul(torch.cat(every), damping, out=self._dampings)

    def _damped(self) -> tuple[Tensor, list[tuple["Inverses", tuple[Tensor, Tensor], Tensor]]]:
        """Which entries are ready; and for each bank what to damp A and G by, and its ready ones.

        For all entries at once: a handful of launches, however many banks there are.
        """
        dampings = self._dampings * self._boost
        extra = factored_damping(*self._factors.mean_diagonals(), dampings)
        ready, by_bank = self._factors.ready.clone(), self._factors.by_bank
        A, G = map(by_bank, extra)
        return ready, list(zip(self.banks, zip(A, G, strict=True), by_bank(ready), strict=True))

    def _count_failures(self, failed: Tensor) -> None:
        """Where a factorisation failed the boost doubles for the next try; else it halves to 1."""
        boost = torch.where(failed, self._boost * 2, (self._boost / 2).clamp_(min=1))
        self._boost.copy_(boost)
        self._failures += failed

    def advance_inversion(self, calls: int | None = None) -> None:
        """Invert some of what was begun: so much that as many calls do all; None does all.

        On CUDA the work goes to a stream of its own, and training goes on beside it.
        """
        if calls is not None and not self._per_advance:
            self._per_advance = -(-len(self._to_run) // calls)
        count = len(self._to_run) if calls is None else self._per_advance
        batch, self._to_run = self._to_run[:count], self._to_run[count:]
        with torch.cuda.stream(stream := self._side_stream):
            for inversion in batch:
                inversion.run()
                if stream is not None:
                    inversion.stay_for(stream)

    def end_inversion(self) -> None:
        """Wait, on the device, for the inverses begun last, and use them from now on."""
        self._finish_inversion()
        self._workers.share([inversion for parts in self._pending.values() for inversion in parts])
        for bank in self.banks:
            for part, inversion in zip(bank.parts, self._pending[bank.shape], strict=True):
                bank.end(part, inversion)
        inversions = [inversion for bank in self.banks for inversion in self._pending[bank.shape]]
        sound = torch.cat([inversion.sound for inversion in inversions])
        self._count_failures(self._tried & ~sound)
        self._pending = {}

    @property
    def _side_stream(self) -> torch.cuda.Stream | None:
        """The one of inversions that go on by and by; None where there is no CUDA."""
        return self._streams[0] if self._streams else None

    def _finish_inversion(self) -> None:
        self.advance_inversion()
        for stream in self._streams[:1]:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def boosts(self) -> dict[str, Tensor]:
        """What failed inversions have multiplied each layer's damping by (of groups: the most)."""
        return {name: self._boost[here].max() for name, here in self._entries().items()}

    def _entries(self) -> dict[str, slice]:
        """Where each block's entries are in a vector over all of them."""
        entries, start = {}, 0
        for inverses in self.banks:
            for name, here in inverses.bank.slices.items():
                entries[name] = slice(start + here.start, start + here.stop)
            start += inverses.bank.count
        return entries

    def hold(self, parameters: set[Tensor]) -> None:
        """Fill in the gradients of those of `parameters` whose layer's other part moves."""
        if not parameters:
            return
        for name, inverses in self._home.items():
            parts = self.blocks[name].site.parts
            if len(parts) == 2 and (parts[0] in parameters) != (parts[1] in parameters):
                inverses.hold(inverses.bank.slices[name], bias=parts[1] in parameters)

    def precondition(self, *, decreases: bool = False) -> None:
        """Solve every block's damped system for the gradients in the slots.

        `decreases`: look at gradient times step on the way, for `decreases()`.
        """
        for bank in self.banks:
            bank.precondition(decreases=decreases)

    def decreases(self) -> Tensor:
        """Gradient times step, summed within each entry, in float64: `places` says whose they are.

        Of the entries' weights, then their biases, bank by bank.
        """
        return torch.cat([sums for bank in self.banks for sums in bank.decreases])

    def places(self) -> dict[Tensor, range]:
        """Where the entries of each covered parameter are in `decreases`."""
        places, start = {}, 0
        for inverses in self.banks:
            count = inverses.bank.count
            for name, here in inverses.bank.slices.items():
                site = self.blocks[name].site
                if site.trains_weight:
                    places[site.weight] = range(start + here.start, start + here.stop)
                if site.trains_bias and site.bias is not None:
                    behind = start + count
                    places[site.bias] = range(behind + here.start, behind + here.stop)
            start += count * (1 + inverses.shape.bias)
        return places

    def sizes(self, moving: Collection[Tensor]) -> Tensor:
        """How many numbers of each entry are of parameters that move, in `scale_steps`' order."""
        sizes: list[float] = []
        for bank in self._biased_first:
            rows, width = bank.shape.output_dim, bank.shape.width
            for name, here in bank.bank.slices.items():
                site = self.blocks[name].site
                columns = width * (site.weight in moving)
                columns += site.trains_bias and site.bias in moving
                sizes += [rows * columns] * (here.stop - here.start)
        return self.vector(sizes, torch.float64)

    def vector(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Numbers on the device, for which the host does not wait.

        They stay as long as this object does: a captured step may read them at any time.
        """
        key = dtype, tuple(numbers)
        if key not in self._vectors:
            cuda = self.device.type == "cuda"
            on_host = torch.tensor(numbers, dtype=dtype, pin_memory=cuda, device="cpu")
            self._vectors[key] = on_host.to(self.device, non_blocking=True)
        return self._vectors[key]

    def norms(self) -> Tensor:
        """The norm of each entry's step, in float64: of the weights, then of the biases.

        Banks that have biases come first. One kernel takes all of them, without a copy in float64.
        """
        banks = self._biased_first
        weights = [bank.steps[0] for bank in banks]
        biases = [bank.bias_step for bank in banks if bank.shape.bias]
        return norms_of([entry for part in weights + biases for entry in part])

    def scale_steps(self, rms: float, sizes: Tensor, norms: Tensor) -> None:
        """Give each block's step, weight and bias together, this root mean square.

        Zero stays, and what is not that large after `ENLARGED_AT_MOST` stays smaller. It is that of
        as many numbers as `sizes` says: the steps of parameters that stay are to be zero. `norms`
        are those of the steps as they are.
        """
        banks = self._biased_first
        counts = [bank.bank.count for bank in banks]
        squares, of_biases = norms.square().split([sum(counts), len(norms) - sum(counts)])
        squares[: len(of_biases)] += of_biases
        scales = torch.where(squares > 0, rms * (sizes / squares).sqrt(), 0.0)
        by_dtype = {
            dtype: scales.clamp(max=min(ENLARGED_AT_MOST, torch.finfo(dtype).max)).to(dtype)
            for dtype in {bank.shape.dtype for bank in banks}
        }
        for index, bank in enumerate(banks):
            bank_scales = by_dtype[bank.shape.dtype].split(counts)[index]
            for part in bank.steps[: 1 + bank.shape.bias]:
                part.mul_(bank_scales.view((-1,) + (1,) * (part.dim() - 1)))

    def failures(self) -> dict[str, int]:
        """How many inversions failed, for the layers where one did. Synchronises with the host."""
        counts = self._failures.tolist()
        failed = {name: sum(counts[here]) for name, here in self._entries().items()}
        return {name: count for name, count in failed.items() if count}

    @property
    def inverting(self) -> bool:
        """Whether an inversion has begun and is not yet in use."""
        return bool(self._pending)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Factors, inverses (those begun too, once they are done) and counters by layer, copied.

        Input sides are in the order of `weight.flatten(1)`, whatever the memory format. One rank
        may call this alone: what the others are inverting, it inverts too.
        """
        self._to_run, self._of_others = self._to_run + self._of_others, []
        self._finish_inversion()
        state, entries = {}, self._entries()
        for name, inverses in self._home.items():
            here = inverses.bank.slices[name]
            layer_state = {
                "A_inverse": inverses.A.read(here).clone(),
                "G_inverse": inverses.G.read(here).clone(),
                "boost": self._boost[entries[name]].to(inverses.shape.dtype),
                "failures": self._failures[entries[name]].clone(),
                **{key: value[here].clone() for key, value in self._begun(inverses).items()},
            }
            for key in INPUT_SIDES & layer_state.keys():
                layer_state[key] = self.blocks[name].site.in_weight_order(layer_state[key])
            if self._pending:
                layer_state["tried"] = self._tried[entries[name]].clone()
            state[name] = self._factors.state(name) | layer_state
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back what `state_dict` returned."""
        guards.check_saved_layers(state.keys(), self.blocks.keys())
        self._factors.load(state)
        self._pending = {}
        if any("sound" in layer_state for layer_state in state.values()):
            self.begin_inversion(1.0, {})  # makes the room for what was begun
        self._to_run, self._of_others = [], []
        entries = self._entries()
        for inverses in self.banks:
            begun = self._begun(inverses)
            for name, here in inverses.bank.slices.items():
                layer_state, site = dict(state[name]), self.blocks[name].site
                buffers = {key: value[here] for key, value in begun.items()}
                buffers["boost"] = self._boost[entries[name]]
                buffers["failures"] = self._failures[entries[name]]
                buffers |= {"A_inverse": inverses.A.read(here), "G_inverse": inverses.G.read(here)}
                for key, buffer in buffers.items():
                    guards.check_saved_shape(name, layer_state[key], buffer)
                    layer_state[key] = layer_state[key].to(buffer)
                    if key in INPUT_SIDES:
                        layer_state[key] = site.in_stored_order(layer_state[key])
                    if key not in ("A_inverse", "G_inverse"):
                        buffer.copy_(layer_state[key])
                if begun and "tried" in layer_state:
                    self._tried[entries[name]] = layer_state["tried"].to(self._tried)
                for side, key in ((inverses.A, "A_inverse"), (inverses.G, "G_inverse")):
                    side.write(here, layer_state[key])
                    side.reset(here, inverses.bank.ready[here])  # zero in decaylab 0.1
            parts = zip(inverses.parts, self._pending.get(inverses.shape, []), strict=False)
            for part, inversion in parts:
                inversion.A, inversion.G, inversion.sound = (begun[key][part] for key in PENDING)

    def _begun(self, inverses: Inverses) -> dict[str, Tensor]:
        """What was begun for a bank, stacked as its entries are; nothing where nothing was."""
        parts = self._pending.get(inverses.shape)
        if not parts:
            return {}
        fields = ([p.A for p in parts], [p.G for p in parts], [p.sound for p in parts])
        return {key: torch.cat(stack) for key, stack in zip(PENDING, fields, strict=True)}


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor, in float64 [n]; on CUDA by one kernel if they have one dtype."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
