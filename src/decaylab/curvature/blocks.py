"""The blocks of a model: stacked by shape, with a place for each parameter's gradient and step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decaylab.curvature.factors import Bank, Block, Inversion, KroneckerFactors, Shape, Sums
from decaylab.curvature.inverses import mean_diagonal
from decaylab.curvature.ranks import Ranks
from decaylab.errors import DecaylabError

INPUT_SIDES = {"A", "A_inverse", "A_pending"}
# So many parts are inverted side by side on CUDA.
STREAMS = 4
# A mean eigenvalue of a block that shows none.
TINY = 1e-12
PENDING = ("A_pending", "G_pending", "sound")


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bank: views, shaped like it, of the stacked gradient and step.

    The step lies in memory as the parameter does: gradients are gathered there, in one go, and
    `Blocks.take_gradients` moves them to their own place, which has margins.
    """

    gradient: Tensor
    step: Tensor


class Blocks:
    """Every covered layer's factors, inverses, gradient and preconditioned step.

    `slots` has the views for each covered parameter: write the gradient where the step will be,
    `take_gradients()`, `precondition()`, and read the step. `seen` names the layers that have shown
    their factors at least once. Several ranks divide the inversions between them.
    """

    def __init__(
        self,
        blocks: dict[str, Block],
        device: torch.device,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        self.blocks, self.device, self._ranks = blocks, device, ranks
        self.seen: set[str] = set()
        streams = STREAMS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(streams)]
        self._pending: dict[Shape, list[Inversion]] = {}  # by bank: of each of its parts
        self._to_run: list[Inversion] = []
        self._of_others: list[Inversion] = []  # which other ranks run
        self._per_advance = 0
        self._home: dict[str, Bank] = {}
        banks: dict[Shape, Bank] = {}
        for name, block in blocks.items():
            self._home[name] = banks.setdefault(block.shape, Bank(block.shape, device, ranks.size))
            self._home[name].add(block)
        self._banks = list(banks.values())
        entries = sum(bank.count for bank in self._banks)
        # in one piece, so that all blocks are looked at in one go
        self._ready = torch.zeros(entries, dtype=torch.bool, device=device)
        for bank, ready in zip(self._banks, self._by_bank(self._ready), strict=True):
            bank.allocate(ready)
        self.slots: dict[Tensor, Slot] = {}
        self._parameters: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, block in blocks.items():
            # kept: pruning, say, may put something else in their place
            self._parameters[name] = weight, bias = block.layer.weight, block.layer.bias
            bank = self._home[name]
            here, width = bank.slices[name], block.shape.width
            if block.weight:
                stacks = bank.gradient[here, :, :width], bank.weight_step[here]
                self.slots[weight] = Slot(*(block.as_weight(rows) for rows in stacks))
            if block.bias and bias is not None:
                stacks = bank.gradient[here, :, width], bank.bias_step[here]
                self.slots[bias] = Slot(*(rows.view(bias.shape) for rows in stacks))

    @property
    def steps(self) -> list[Tensor]:
        """The preconditioned steps, stacked by shape."""
        both = [step for bank in self._banks for step in (bank.weight_step, bank.bias_step)]
        return [step for step in both if step.numel()]

    def gather(self, measure: Callable[[], dict[str, Sums]], step: int) -> dict[str, Sums]:
        """The sums that `measure` returns; with several ranks, those of all of them together."""
        return self._ranks.gather(measure, self.blocks, step, self._ready.device)

    def update(self, sums: dict[str, Sums], factor_decay: float) -> None:
        """Fold a refresh into the averages: F <- decay F + (1 - decay) mean; the first sets them.

        A layer that was not seen, or whose mean is not finite, is left out, on the device.
        """
        unseen = self._ready.double() * torch.nan if len(sums) < len(self._home) else self._ready
        shown = [
            sums[name].traces() if name in sums else nothing[here]
            for bank, nothing in zip(self._banks, self._by_bank(unseen), strict=True)
            for name, here in bank.slices.items()
        ]
        sound = torch.cat(shown).isfinite()
        keep = torch.where(sound, self._ready.double() * factor_decay, 1.0)
        for bank, kept in zip(self._banks, self._by_bank(keep), strict=True):
            bank.fold({name: sums[name] for name in bank.slices if name in sums}, kept)
        self._ready |= sound
        # not yet, if it was called with no example
        self.seen |= {n for n, s in sums.items() if isinstance(s.positions, Tensor) or s.positions}

    def forget(self) -> None:
        """Let the next `update` set the factors instead of averaging into them."""
        self._ready.zero_()

    def invert(self, damping: float, ratios: dict[str, Tensor]) -> None:
        """Invert every block with `damping`, multiplied for the layers in `ratios`; use it at once.

        On CUDA on several streams, large parts first: one factorisation is far from filling a GPU.
        What was begun before is dropped.
        """
        if self._pending:
            self._finish_inversion()
            self._pending = {}
        if self._ranks.size > 1:
            self.begin_inversion(damping, ratios)
            self.end_inversion()
            return
        jobs = [
            (bank, part, dampings)
            for bank in self._banks
            for dampings in [_dampings(bank, damping, ratios)]
            for part in bank.parts
        ]
        jobs.sort(key=lambda job: -job[0].shape.input_dim)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        for i, (bank, part, dampings) in enumerate(jobs):
            with torch.cuda.stream(self._stream(i)):
                inversion = bank.begin_inversion(part, dampings)
                inversion.run()
                bank.end_inversion(part, inversion)
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def begin_inversion(self, damping: float, ratios: dict[str, Tensor]) -> None:
        """Take copies of the factors to invert by and by, with `damping` as in `invert`."""
        for bank in self._banks:
            dampings = _dampings(bank, damping, ratios)
            self._pending[bank.shape] = [bank.begin_inversion(p, dampings) for p in bank.parts]
        every = [inversion for parts in self._pending.values() for inversion in parts]
        self._to_run, self._of_others = self._ranks.divided(every)
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
        self._ranks.share([inversion for parts in self._pending.values() for inversion in parts])
        for bank in self._banks:
            for part, inversion in zip(bank.parts, self._pending[bank.shape], strict=True):
                bank.end_inversion(part, inversion)
        self._pending = {}

    def _by_bank(self, entries: Tensor) -> tuple[Tensor, ...]:
        """A vector over all entries, cut into those of each bank."""
        return entries.split([bank.count for bank in self._banks])

    def _stream(self, index: int) -> torch.cuda.Stream | None:
        """One of the streams, in turn; None (and so the current one) where there is no CUDA."""
        return self._streams[index % len(self._streams)] if self._streams else None

    def _finish_inversion(self) -> None:
        self.advance_inversion()
        for stream in self._streams[:1]:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def boosts(self) -> dict[str, Tensor]:
        """What failed inversions have multiplied each layer's damping by (of groups: the most)."""
        return {name: bank.boost[bank.slices[name]].max() for name, bank in self._home.items()}

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """(tr A / dim A) (tr G / dim G) of each layer, [groups]: its block's mean eigenvalue.

        A little more than zero where the layer is dead, so that it can damp.
        """
        return {
            name: (mean_diagonal(bank.A) * mean_diagonal(bank.G)).clamp(min=TINY)[bank.slices[name]]
            for name, bank in self._home.items()
        }

    def hold(self, parameters: set[Tensor]) -> None:
        """Fill in the gradients of those of `parameters` whose layer's other part moves."""
        if not parameters:
            return
        for name, (weight, bias) in self._parameters.items():
            both = self.blocks[name].weight and self.blocks[name].bias and bias is not None
            if both and (weight in parameters) != (bias in parameters):
                bank = self._home[name]
                bank.hold(bank.slices[name], bias=bias in parameters)

    def precondition(self) -> None:
        """Solve every block's damped system for the gradients in the slots."""
        for bank in self._banks:
            bank.precondition()

    def take_gradients(self) -> None:
        """Take over the gradients that were written to the places of the steps (`slots`)."""
        for bank in self._banks:
            bank.take_gradients()

    def decreases(self) -> Tensor:
        """Gradient times step, summed within each entry, in float64: `places` says whose they are.

        Of the entries' weights, then their biases, bank by bank.
        """
        return torch.cat([sums for bank in self._banks for sums in bank.decreases()])

    def places(self) -> dict[Tensor, range]:
        """Where the entries of each covered parameter are in `decreases`."""
        places, start = {}, 0
        for bank in self._banks:
            for name, here in bank.slices.items():
                block, (weight, bias) = self.blocks[name], self._parameters[name]
                if block.weight:
                    places[weight] = range(start + here.start, start + here.stop)
                if block.bias and bias is not None:
                    behind = start + bank.count
                    places[bias] = range(behind + here.start, behind + here.stop)
            start += bank.count * (1 + bank.shape.bias)
        return places

    def scale_steps(self, rms: float) -> None:
        """Give each block's step this root mean square."""
        for bank in self._banks:
            bank.scale_steps(rms)

    def factors(self) -> dict[str, KroneckerFactors]:
        """The running averages of every layer, copied."""
        return {name: bank.factors(self.blocks[name]) for name, bank in self._home.items()}

    def failures(self) -> dict[str, int]:
        """How many inversions failed, for the layers where one did. Synchronises with the host."""
        failed = {}
        for bank in self._banks:
            counts = bank.failures.tolist()
            failed.update({name: sum(counts[here]) for name, here in bank.slices.items()})
        return {name: count for name, count in failed.items() if count}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Factors, inverses (those begun too, once they are done) and counters by layer, copied.

        Input sides are in the order of `weight.flatten(1)`, whatever the memory format. One rank
        may call this alone: what the others are inverting, it inverts too.
        """
        self._to_run, self._of_others = self._to_run + self._of_others, []
        self._finish_inversion()
        state = {}
        for name, bank in self._home.items():
            stacks = bank.state() | self._pending_state(bank)
            own = {key: value[bank.slices[name]].clone() for key, value in stacks.items()}
            for key in INPUT_SIDES & own.keys():
                own[key] = self.blocks[name].in_weight_order(own[key])
            own["seen"] = torch.full_like(own["ready"][0], name in self.seen)
            state[name] = own
        return state

    def _pending_state(self, bank: Bank) -> dict[str, Tensor]:
        """What was begun for a bank, stacked as its entries are; nothing where nothing was."""
        parts = self._pending.get(bank.shape)
        if not parts:
            return {}
        fields = ([p.A for p in parts], [p.G for p in parts], [p.sound for p in parts])
        return {key: torch.cat(stack) for key, stack in zip(PENDING, fields, strict=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        if state.keys() != self._home.keys():
            differ = sorted(state.keys() ^ self._home.keys())
            raise DecaylabError(
                f"this state dict covers other layers than the model ({', '.join(differ[:3])}): "
                "build KFAC with the options it was saved with"
            )
        self._pending = {}
        if any("sound" in own for own in state.values()):
            self.begin_inversion(1.0, {})  # makes the room for what was begun
        self._to_run, self._of_others = [], []
        pending = {bank.shape: self._pending_state(bank) for bank in self._banks}
        for name, bank in self._home.items():
            here = bank.slices[name]
            for key, buffer in (bank.state() | pending[bank.shape]).items():
                if state[name][key].shape != buffer[here].shape:
                    raise DecaylabError(
                        f"layer {name!r} has another shape in this state dict: "
                        "it was saved from another model"
                    )
                value = state[name][key].to(buffer.device)
                if key in INPUT_SIDES:
                    value = self.blocks[name].in_stored_order(value)
                buffer[here] = value
        for bank in self._banks:
            for part, inversion in zip(bank.parts, self._pending.get(bank.shape, []), strict=False):
                inversion.A, inversion.G, inversion.sound = (
                    pending[bank.shape][key][part] for key in PENDING
                )
        # a layer may have been seen and not be ready: of values that are not finite
        self.seen = {n for n, own in state.items() if bool(own.get("seen", own["ready"].any()))}


def _dampings(bank: Bank, damping: float, ratios: dict[str, Tensor]) -> Tensor:
    """The damping of each entry of a bank."""
    dampings = torch.full_like(bank.boost, damping)
    for name, here in bank.slices.items():
        if name in ratios:
            dampings[here] *= ratios[name]
    return dampings
