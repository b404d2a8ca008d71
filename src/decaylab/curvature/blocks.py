"""The blocks of a model: stacked by shape, with a place for each parameter's gradient and step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decaylab.curvature.factors import Bank, Block, KroneckerFactors, Shape, Sums
from decaylab.errors import DecaylabError

INPUT_SIDES = {"A", "A_inverse", "A_pending"}


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bank: views, shaped like it, of the stacked gradient and step."""

    gradient: Tensor
    step: Tensor


class Blocks:
    """Every covered layer's factors, inverses, gradient and preconditioned step.

    `slots` has the views for each covered parameter: write the gradient there, `precondition()`,
    and read the step. `seen` names the layers that have shown their factors at least once.
    """

    def __init__(self, blocks: dict[str, Block], device: torch.device) -> None:
        self.blocks = blocks
        self.seen: set[str] = set()
        self._stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None
        self._home: dict[str, Bank] = {}
        banks: dict[Shape, Bank] = {}
        for name, block in blocks.items():
            self._home[name] = banks.setdefault(block.shape, Bank(block.shape, device))
            self._home[name].add(block)
        self._banks = list(banks.values())
        for bank in self._banks:
            bank.allocate()
        self.slots: dict[Tensor, Slot] = {}
        for name, block in blocks.items():
            bank, (weight, bias) = self._home[name], (block.layer.weight, block.layer.bias)
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

    def update(self, sums: dict[str, Sums], factor_decay: float) -> None:
        """Fold what each layer has shown into its running averages."""
        whole = {name: layer for name, layer in sums.items() if layer.whole}
        for bank in self._banks:
            own = {name: whole[name] for name in bank.slices if name in whole}
            if own:
                bank.update(own, factor_decay)
        self.seen |= whole.keys()

    def forget(self) -> None:
        """Let the next `update` set the factors instead of averaging into them."""
        for bank in self._banks:
            bank.forget()

    def begin_inversion(self, damping: float, ratios: dict[str, Tensor]) -> None:
        """Start to invert every block with `damping`, multiplied for the layers in `ratios`.

        On CUDA the work goes to a stream of its own, from a copy of the factors, and training goes
        on beside it until `end_inversion`.
        """
        for bank in self._banks:
            dampings = torch.full_like(bank.boost, damping)
            for name, here in bank.slices.items():
                if name in ratios:
                    dampings[here] *= ratios[name]
            bank.begin_inversion(dampings)
        with self._beside_training():
            for bank in self._banks:
                bank.invert()

    def end_inversion(self) -> None:
        """Wait, on the device, for the inverses begun last, and use them from now on."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for bank in self._banks:
            bank.end_inversion()

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        """On the side stream, once it has seen what the current one has queued."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        for bank in self._banks:  # keep their memory until the current stream is done with it
            for tensor in bank.pending.values():
                tensor.record_stream(self._stream)

    def boosts(self) -> dict[str, Tensor]:
        """What failed inversions have multiplied each layer's damping by (of groups: the most)."""
        return {name: bank.boost[bank.slices[name]].max() for name, bank in self._home.items()}

    def precondition(self) -> None:
        """Solve every block's damped system for the gradients in the slots."""
        for bank in self._banks:
            bank.precondition()

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

        Input sides are in the order of `weight.flatten(1)`, whatever the memory format.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        state = {}
        for name, bank in self._home.items():
            own = {key: value[bank.slices[name]].clone() for key, value in bank.state().items()}
            for key in INPUT_SIDES & own.keys():
                own[key] = self.blocks[name].in_weight_order(own[key])
            state[name] = own
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        if state.keys() != self._home.keys():
            differ = sorted(state.keys() ^ self._home.keys())
            raise DecaylabError(
                f"this state dict covers other layers than the model ({', '.join(differ[:3])}): "
                "build KFAC with the options it was saved with"
            )
        for bank in self._banks:
            bank.pending = {}
            if "sound" in state[next(iter(bank.slices))]:
                bank.begin_inversion(bank.boost)  # makes the room for what was begun
        for name, bank in self._home.items():
            here = bank.slices[name]
            for key, buffer in bank.state().items():
                if state[name][key].shape != buffer[here].shape:
                    raise DecaylabError(
                        f"layer {name!r} has another shape in this state dict: "
                        "it was saved from another model"
                    )
                value = state[name][key].to(buffer.device)
                if key in INPUT_SIDES:
                    value = self.blocks[name].in_stored_order(value)
                buffer[here] = value
        self.seen = {name for name in state if bool(state[name]["ready"].any())}
