"""Damped inverses of the factors, and what they are for: gradients in, preconditioned steps out."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decaylab.curvature import guards
from decaylab.curvature.factors import Bank, RunningFactors
from decaylab.curvature.inverses import damped, factored_damping, ieee_products, invert_
from decaylab.curvature.kinds.kind import Shape

# Bytes of factors that are inverted in one go: more are no faster, and need room for all of them.
INVERTED_AT_ONCE = 2**27
# Layers with sides up to this one, whose products are small, are preconditioned in full float32.
LARGEST_PRECISE = 640
# So many parts are inverted side by side on CUDA.
STREAMS = 4
PENDING = ("A_pending", "G_pending", "sound")
INVERSES = ("A_inverse", "G_inverse", "boost", "failures")
INPUT_SIDES = {"A_inverse", "A_pending"}


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bank: views, shaped like it, of the stacked gradient and step.

    The step lies in memory as the parameter does: gradients are gathered there, in one go, and
    `Preconditioner.take_gradients` moves them to their own place, which has margins.
    """

    gradient: Tensor
    step: Tensor


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
    """The inverses of a bank of factors, and the gradients and steps of its blocks.

    Until a block is ready its inverse is zero, so that a layer that was never seen is not moved.
    `boost` multiplies the damping of blocks whose last Cholesky factorisation failed. `shares` is
    between how many the inversions are divided.
    """

    def __init__(self, bank: Bank, shares: int) -> None:
        self.bank, self.shape, self._shares = bank, bank.shape, shares
        n, a, g = bank.count, self.shape.input_dim, self.shape.output_dim
        wide = self.shape.wide(bank.device)

        def zeros(*size: int, dtype: torch.dtype = self.shape.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=bank.device)

        axes = 2 - self.shape.input_diagonal
        self._wide_inverse = zeros(n, *(wide,) * axes)
        self.A_inverse = self._wide_inverse[(slice(None), *(slice(a),) * axes)]
        self.G_inverse = zeros(n, *(g,) * (2 - self.shape.output_diagonal))
        # both [n, out, in]; apart and without a margin, so that a step lies in memory as its
        # parameter does
        self.gradient, self.weight_step = (
            zeros(n, columns, g).mT if self.shape.transposed else zeros(n, g, columns)
            for columns in (wide, self.shape.width)
        )
        self.bias_step = zeros(n, g * self.shape.bias)
        self.boost, self.failures = zeros(n) + 1, zeros(n, dtype=torch.int64)

    @property
    def steps(self) -> tuple[Tensor, Tensor]:
        """The steps of weights and biases, as they lie in memory."""
        weights = self.weight_step.mT if self.shape.transposed else self.weight_step
        return weights, self.bias_step

    @property
    def parts(self) -> list[slice]:
        """The entries that are inverted together: as many as need no more than INVERTED_AT_ONCE."""
        entry = self.bank.A[0].nbytes + self.bank.G[0].nbytes
        length = max(1, min(INVERTED_AT_ONCE // entry, -(-self.bank.count // self._shares)))
        return [slice(i, i + length) for i in range(0, self.bank.count, length)]

    def begin(self, part: slice, damping: Tensor) -> Inversion:
        """Take a damped copy of the factors: `damping` [n] times each block's boost."""
        A, G = self.bank.A[part], self.bank.G[part]
        extra_A, extra_G = factored_damping(A, G, damping[part] * self.boost[part])
        return Inversion(damped(A, extra_A), damped(G, extra_G), self.bank.ready[part].clone())

    def end(self, part: slice, done: Inversion) -> None:
        """Use the new inverses.

        Where the factorisation failed the old inverse stays and the boost doubles for the next try;
        where it worked the boost halves towards 1.
        """
        failed = self.bank.ready[part] & ~done.sound
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
        parts = self.steps[: 1 + self.shape.bias]
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
        with ieee_products(self.bank.device) if small else nullcontext():
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
            elif self.shape.transposed and step is self.weight_step:
                torch.bmm(part.mT, self.G_inverse, out=step.mT)  # which is symmetric
            else:
                torch.bmm(self.G_inverse, part, out=step)


class Preconditioner:
    """Every block's inverse, gradient and preconditioned step.

    `slots` has the views for each covered parameter: write the gradient where the step will be,
    `take_gradients()`, `precondition()`, and read the step. Several ranks divide the inversions
    between them.
    """

    def __init__(self, factors: RunningFactors, workers: Workers) -> None:
        self.blocks, self._factors, self._workers = factors.blocks, factors, workers
        self.device = device = factors.device
        streams = STREAMS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(streams)]
        self._pending: dict[Shape, list[Inversion]] = {}  # by bank: of each of its parts
        self._to_run: list[Inversion] = []
        self._of_others: list[Inversion] = []  # which other ranks run
        self._per_advance = 0
        self.banks = [Inverses(bank, workers.size) for bank in factors.banks]
        self._home = {name: each for each in self.banks for name in each.bank.slices}
        self.slots: dict[Tensor, Slot] = {}
        for name, block in self.blocks.items():
            inverses, site = self._home[name], block.site
            here, width = inverses.bank.slices[name], block.shape.width
            if site.trains_weight:
                stacks = inverses.gradient[here, :, :width], inverses.weight_step[here]
                self.slots[site.weight] = Slot(*(site.as_weight(rows) for rows in stacks))
            if site.trains_bias and site.bias is not None:
                stacks = inverses.gradient[here, :, width], inverses.bias_step[here]
                self.slots[site.bias] = Slot(*(rows.view(site.bias.shape) for rows in stacks))

    @property
    def steps(self) -> list[Tensor]:
        """The preconditioned steps, stacked by shape."""
        return [step for bank in self.banks for step in bank.steps if step.numel()]

    def invert(self, damping: float, ratios: Mapping[str, Tensor]) -> None:
        """Invert every block with `damping`, multiplied for the layers in `ratios`; use it at once.

        On CUDA on several streams, large parts first: one factorisation is far from filling a GPU.
        What was begun before is dropped.
        """
        if self._pending:
            self._finish_inversion()
            self._pending = {}
        if self._workers.size > 1:
            self.begin_inversion(damping, ratios)
            self.end_inversion()
            return
        jobs = [
            (bank, part, dampings)
            for bank in self.banks
            for dampings in [_dampings(bank, damping, ratios)]
            for part in bank.parts
        ]
        jobs.sort(key=lambda job: -job[0].shape.input_dim)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        for i, (bank, part, dampings) in enumerate(jobs):
            with torch.cuda.stream(self._stream(i)):
                inversion = bank.begin(part, dampings)
                inversion.run()
                bank.end(part, inversion)
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def begin_inversion(self, damping: float, ratios: Mapping[str, Tensor]) -> None:
        """Take copies of the factors to invert by and by, with `damping` as in `invert`."""
        for bank in self.banks:
            dampings = _dampings(bank, damping, ratios)
            self._pending[bank.shape] = [bank.begin(part, dampings) for part in bank.parts]
        every = [inversion for parts in self._pending.values() for inversion in parts]
        self._to_run, self._of_others = self._workers.divided(every)
        self._per_advance = 0
        for stream in self._streams[:1]:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def advance_inversion(self, calls: int | None = None) -> None:
        """Invert some of what was begun: so much that as many calls do all; None does all.

        On CUDA the work goes to a stream of its own, and training goes on beside it.
        """
        if calls is not None and not self._per_advance:
            self._per_advance = -(-len(self._to_run) // calls)
        count = len(self._to_run) if calls is None else self._per_advance
        now, self._to_run = self._to_run[:count], self._to_run[count:]
        with torch.cuda.stream(stream := self._stream(0)):
            for inversion in now:
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
        self._pending = {}

    def _stream(self, index: int) -> torch.cuda.Stream | None:
        """One of the streams, in turn; None (and so the current one) where there is no CUDA."""
        return self._streams[index % len(self._streams)] if self._streams else None

    def _finish_inversion(self) -> None:
        self.advance_inversion()
        for stream in self._streams[:1]:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def boosts(self) -> dict[str, Tensor]:
        """What failed inversions have multiplied each layer's damping by (of groups: the most)."""
        return {n: each.boost[each.bank.slices[n]].max() for n, each in self._home.items()}

    def hold(self, parameters: set[Tensor]) -> None:
        """Fill in the gradients of those of `parameters` whose layer's other part moves."""
        if not parameters:
            return
        for name, inverses in self._home.items():
            parts = self.blocks[name].site.parts
            if len(parts) == 2 and (parts[0] in parameters) != (parts[1] in parameters):
                inverses.hold(inverses.bank.slices[name], bias=parts[1] in parameters)

    def precondition(self) -> None:
        """Solve every block's damped system for the gradients in the slots."""
        for bank in self.banks:
            bank.precondition()

    def take_gradients(self) -> None:
        """Take over the gradients that were written to the places of the steps (`slots`)."""
        for bank in self.banks:
            bank.take_gradients()

    def decreases(self) -> Tensor:
        """Gradient times step, summed within each entry, in float64: `places` says whose they are.

        Of the entries' weights, then their biases, bank by bank.
        """
        return torch.cat([sums for bank in self.banks for sums in bank.decreases()])

    def places(self) -> dict[Tensor, range]:
        """Where the entries of each covered parameter are in `decreases`."""
        places, start = {}, 0
        for each in self.banks:
            count = each.bank.count
            for name, here in each.bank.slices.items():
                site = self.blocks[name].site
                if site.trains_weight:
                    places[site.weight] = range(start + here.start, start + here.stop)
                if site.trains_bias and site.bias is not None:
                    behind = start + count
                    places[site.bias] = range(behind + here.start, behind + here.stop)
            start += count * (1 + each.shape.bias)
        return places

    def scale_steps(self, rms: float) -> None:
        """Give each block's step this root mean square."""
        for bank in self.banks:
            bank.scale_steps(rms)

    def failures(self) -> dict[str, int]:
        """How many inversions failed, for the layers where one did. Synchronises with the host."""
        failed = {}
        for each in self.banks:
            counts = each.failures.tolist()
            failed.update({name: sum(counts[here]) for name, here in each.bank.slices.items()})
        return {name: count for name, count in failed.items() if count}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Factors, inverses (those begun too, once they are done) and counters by layer, copied.

        Input sides are in the order of `weight.flatten(1)`, whatever the memory format. One rank
        may call this alone: what the others are inverting, it inverts too.
        """
        self._to_run, self._of_others = self._to_run + self._of_others, []
        self._finish_inversion()
        state = {}
        for name, inverses in self._home.items():
            stacks = self._stacks(inverses)
            here = inverses.bank.slices[name]
            own = {key: value[here].clone() for key, value in stacks.items()}
            for key in INPUT_SIDES & own.keys():
                own[key] = self.blocks[name].site.in_weight_order(own[key])
            state[name] = self._factors.state(name) | own
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back what `state_dict` returned."""
        guards.check_saved_layers(state.keys(), self.blocks.keys())
        self._factors.load(state)
        self._pending = {}
        if any("sound" in own for own in state.values()):
            self.begin_inversion(1.0, {})  # makes the room for what was begun
        self._to_run, self._of_others = [], []
        for inverses in self.banks:
            stacks = self._stacks(inverses)
            for name, here in inverses.bank.slices.items():
                for key, buffer in stacks.items():
                    guards.check_saved_shape(name, state[name][key], buffer[here])
                    value = state[name][key].to(buffer.device)
                    if key in INPUT_SIDES:
                        value = self.blocks[name].site.in_stored_order(value)
                    buffer[here] = value
            parts = zip(inverses.parts, self._pending.get(inverses.shape, []), strict=False)
            for part, inversion in parts:
                inversion.A, inversion.G, inversion.sound = (stacks[key][part] for key in PENDING)

    def _stacks(self, inverses: Inverses) -> dict[str, Tensor]:
        """What outlives a step, of a bank, and what was begun for it."""
        stacks = {key: getattr(inverses, key) for key in INVERSES}
        parts = self._pending.get(inverses.shape)
        if not parts:
            return stacks
        fields = ([p.A for p in parts], [p.G for p in parts], [p.sound for p in parts])
        begun = {key: torch.cat(stack) for key, stack in zip(PENDING, fields, strict=True)}
        return stacks | begun


def _dampings(inverses: Inverses, damping: float, ratios: Mapping[str, Tensor]) -> Tensor:
    """The damping of each entry of a bank."""
    dampings = torch.full_like(inverses.boost, damping)
    for name, here in inverses.bank.slices.items():
        if name in ratios:
            dampings[here] *= ratios[name]
    return dampings
