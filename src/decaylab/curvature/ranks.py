"""What the ranks of a data-parallel training tell each other: sums of curvature, and inverses.

Every rank observes its own rows. Sums and counts are added up over the ranks before they become
factors, which so are those of all rows together. Each rank then inverts a share of the blocks, and
gets the others' from those who inverted them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decaylab.curvature.capture import nodes_behind
from decaylab.curvature.factors import Block, Inversion, Sums
from decaylab.errors import DecaylabError

# Bytes that are sent in one go: small tensors travel together, and large ones need no second room.
SENT_AT_ONCE = 2**27


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model together; without a group, a process that trains it alone.

    Every rank must call the same methods in the same order, and what adding up over the ranks gives
    must be the same bits on each of them, as it is with NCCL and gloo.

    Attributes:
        group: the process group, or None.
        rank: of this process within it.
        size: how many there are.
        wrapper: the DistributedDataParallel, if it is known.
        early: whether there was no process group of any kind yet.
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    wrapper: Any = None
    early: bool = False

    @staticmethod
    def of(group: Any, wrapper: Any = None) -> "Ranks":
        """The ranks of a process group; of one rank a single process."""
        size = dist.get_world_size(group)
        return Ranks(group, dist.get_rank(group), size, wrapper) if size > 1 else Ranks()

    def from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with those of the first rank."""
        for bucket in _buckets(tensors) if self.group is not None else ():
            _all_at_once(bucket, lambda flat: dist.broadcast(flat, group=self.group, group_src=0))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with their sums over the ranks."""
        for bucket in _buckets(tensors) if self.group is not None else ():
            _all_at_once(bucket, lambda flat: dist.all_reduce(flat, group=self.group))

    def gather(
        self,
        measure: Callable[[], dict[str, Sums]],
        blocks: Mapping[str, Block],
        step: int,
        device: torch.device,
    ) -> dict[str, Sums]:
        """The sums that `measure` returns, added up over the ranks: the same dict on all of them.

        A layer is in it if one rank saw it. An error in `measure`, and ranks that are not at the
        same `step`, are an error on every rank: none waits for another that has given up. Cost: a
        table of counts, for which the host waits, and then all sums of A and G.
        """
        self._check()
        if self.group is None:
            return measure()
        self._refuse_own_gradients(blocks)
        failure = None
        try:
            sums = measure()
        except Exception as error:  # the others are told before it is raised
            sums, failure = {}, error
        step %= 2**20  # its square, and that of a sum of it, must be exact
        own_or_none = [(name in sums, sums.get(name, Sums())) for name in blocks]
        table = [[here, own.positions, own.rows] for here, own in own_or_none]
        table.append([failure is not None, step, step**2])
        *counts, (failures, steps, squares) = self._added_up(table, device)
        if failure is not None:
            raise failure
        if failures:
            raise DecaylabError(
                f"{failures:.0f} of the {self.size} ranks could not measure the curvature: "
                "see the error that they raised"
            )
        if steps**2 != squares * self.size:  # their spread
            raise DecaylabError(
                "the ranks' KFACs are not at the same step: call load_state_dict on every rank, "
                "and step() equally often"
            )
        total: dict[str, Sums] = {}
        for (name, block), (seen, positions, rows) in zip(blocks.items(), counts, strict=True):
            if seen:
                total[name] = own = sums.get(name) or Sums.none(block, device)
                own.positions, own.rows = positions, rows
        self.add_up([side for own in total.values() for side in own.sides])
        return total

    def _added_up(self, table: list[list[Tensor | float]], device: torch.device) -> list[Any]:
        """The sums over the ranks of numbers, some of which (masked rows) are on the device."""
        flat = [number for row in table for number in row]
        known = [0.0 if isinstance(number, Tensor) else float(number) for number in flat]
        sums = torch.tensor(known, dtype=torch.float64, device=device)
        for entry, number in enumerate(flat):
            if isinstance(number, Tensor):
                sums[entry] = number
        self.add_up([sums])
        return sums.view(len(table), -1).tolist()

    def _check(self) -> None:
        """Refuse ranks that would step apart, or would wait for one that does not come."""
        if self.early and several():
            raise DecaylabError(
                "this KFAC was built before the processes knew of each other, and has factors of "
                "its own rows alone: build it after init_process_group (which TrainingArguments or "
                "Accelerator() may have called)"
            )
        if self.wrapper is not None and self.wrapper._join_config.enable:
            raise DecaylabError(
                "model.join() lets a rank leave before the others, who would wait for its part of "
                "K-FAC's factors: give all ranks equally many batches, as DistributedSampler does "
                "(behind a join(), which torch leaves on, wrap the network anew)"
            )

    def _refuse_own_gradients(self, blocks: Mapping[str, Block]) -> None:
        """Refuse layers that the wrapper ignores: their gradients are each rank's own.

        And those that it met frozen, which it knows by their number alone.
        """
        if self.wrapper is None:
            return
        trained = sum(p.requires_grad for p in self.wrapper._module_parameters)
        if trained > self.wrapper._get_ddp_logging_data()["num_parameter_tensors"]:
            raise DecaylabError(
                "DistributedDataParallel adds up the gradients of what was not frozen when it was "
                "built, and more is trained now: the ranks would step apart. Thaw first, then "
                "wrap the network anew and build KFAC with that"
            )
        common = {*self.wrapper._module_parameters, *self.wrapper._delay_all_reduce_params}
        for name, block in blocks.items():
            parts = ((block.weight, block.layer.weight), (block.bias, block.layer.bias))
            own = {p for covered, p in parts if covered and isinstance(p, nn.Parameter)}
            if any(p.requires_grad for p in own - common):
                raise DecaylabError(
                    f"DistributedDataParallel was told to ignore layer {name!r}, of which each "
                    "rank has gradients of its own, and the ranks would step apart: let it take "
                    "care of all that KFAC covers, or exclude it (KFACOptions)"
                )

    def check_step(self, device: torch.device) -> None:
        """Refuse what `_check` does, and a CUDA graph: it would not wait for the other ranks."""
        self._check()
        cuda = self.group is not None and device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            raise DecaylabError(
                "a step of several ranks cannot be captured in a CUDA graph, as the host reads "
                "what they have seen: call KFAC.step() as it is"
            )

    def divided(self, inversions: Sequence[Inversion]) -> tuple[list[Inversion], list[Inversion]]:
        """Those that this rank runs, and those of others: the largest to who has least to do."""
        if self.size == 1:
            return list(inversions), []
        work = [0.0] * self.size
        mine: list[Inversion] = []
        others: list[Inversion] = []
        for inversion in sorted(inversions, key=lambda inversion: -inversion.cost):
            least = work.index(min(work))
            work[least] += inversion.cost
            (mine if least == self.rank else others).append(inversion)
        return mine, others

    def share(self, inversions: Sequence[Inversion]) -> None:
        """Get each inversion from the rank that ran it: the others add zeros to it."""
        if self.group is None:
            return
        self._check()
        for inversion in self.divided(inversions)[1]:
            for tensor in (inversion.A, inversion.G, inversion.sound):
                tensor.zero_()
        sound = [inversion.sound.to(inversion.A.dtype) for inversion in inversions]
        self.add_up([side for i in inversions for side in (i.A, i.G)] + sound)
        for inversion, found in zip(inversions, sound, strict=True):
            inversion.sound = found > 0

    def seed(self, generator: torch.Generator, seed: int, step: int) -> None:
        """Begin the random numbers that this rank draws at a step, from nothing else than these.

        So that ranks draw different ones, and go on with the same ones after a resume from a state
        that the first rank saved. A single process goes on with those it has.
        """
        if self.group is not None:
            digest = hashlib.sha256(f"{seed} {step} {self.rank}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little"))


def several() -> bool:
    """Whether there are process groups, with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def refuse_static_graph(heads: Sequence[Tensor]) -> None:
    """Refuse to go backward through the end of a DistributedDataParallel(static_graph=True).

    It takes the first such pass for the loss's, and does not add up gradients in that one.
    """
    for node in (node for head in heads for node in nodes_behind(head)) if several() else ():
        wrapper: Any = getattr(node, "ddp_weakref", None)
        if wrapper is not None and wrapper().static_graph:
            raise DecaylabError(
                "K-FAC's backward pass goes through DistributedDataParallel, which with "
                "static_graph=True takes it for the loss's: build it without static_graph, or "
                "let the model return its logits (and call model.module in initialize)"
            )


def refuse_to_stay_away(model: nn.Module) -> None:
    """Refuse a batch without rows under SyncBatchNorm: other ranks wait in their extra passes."""
    if several() and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise DecaylabError(
            "this rank has a batch without rows, and SyncBatchNorm lets the others wait for it: "
            "give every rank at least one row"
        )


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, those of one dtype together, in pieces of no more than SENT_AT_ONCE."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        room = SENT_AT_ONCE
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and tensor.nbytes > room:
                yield bucket
                bucket, room = [], SENT_AT_ONCE
            bucket.append(tensor)
            room -= tensor.nbytes
        yield bucket


def _all_at_once(tensors: list[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Send the tensors as one, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    send(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
