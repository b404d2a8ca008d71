"""Who shares the rows of a batch: one process, or the ranks of a data-parallel training.

    model = DistributedDataParallel(network)
    optimizer = KFAC(model)                     # the rest of the loop does not change

Every rank observes its own rows. Sums and counts are added up over the ranks before they become
factors, so the factors are those of all rows together, each row counting equally, even if ranks
have different numbers of rows. Each rank then inverts a share of the blocks and gets the other
inverses from the other ranks. Gradients are DistributedDataParallel's, a mean over ranks. Factors,
inverses and gradients are the same bits on every rank, and so are the steps if all ranks have the
same kind of device and the same software. Without DistributedDataParallel (a group named in
`KFACOptions`), the loop must keep weights and gradients the same everywhere.

Some ranks may not use a layer, a batch may be empty, and ranks may pass `initialize` different
batches, except under SyncBatchNorm, whose ranks wait for each other in every pass.

The empirical Fisher takes a mean loss to be the mean over the rank's own rows. Each rank draws
sampled outputs for its own rows, from numbers that depend only on seed, step and rank. The first
rank's `state_dict()`, loaded on every rank, therefore resumes all ranks bit for bit; with another
number of ranks, training continues with other samples. If every rank has an equal part of one
batch, in rank order, `KFACOptions(equal_shares=True)` lets all draw what one process would draw for
that batch: then the number of ranks changes nothing but rounding.

Cost, in addition to that of one process: at a refresh the sums of A and G are added up over the
ranks, and the host waits once; each rank inverts a share of the blocks and sends its inverses.

Under FSDP2 (`fully_shard`) ranks share rows in the same way: `curvature.shards` has what is
different.

Not covered, and refused: layers that DistributedDataParallel was told to ignore or that were frozen
when it was built, `model.join()`, CUDA graphs of a step. Another way to distribute is another class
with `Distribution`'s methods.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decaylab.curvature import guards
from decaylab.curvature.capture import data_parallel
from decaylab.curvature.factors import Sums
from decaylab.curvature.kinds.kind import Site
from decaylab.curvature.messages import buckets
from decaylab.curvature.preconditioner import Inversion
from decaylab.errors import warn_user

Measuring = Callable[[], dict[str, Sums]]


class Distribution(Protocol):
    """How processes that train one model together exchange data.

    All must call the same methods in the same order, and must get the same bits from them.
    """

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def share_of_batch(self) -> tuple[int, int]:
        """(which, of how many) equal part of a batch its rows are, as far as samples go."""

    def gather(
        self, measure: Measuring, sites: Mapping[str, Site], step: int, device: torch.device
    ) -> dict[str, Sums]:
        """The sums that `measure` returns, of all together."""

    def check_step(self, device: torch.device) -> None:
        """Refuse a step that would not be the same for all."""

    def divided(self, inversions: Sequence[Inversion]) -> tuple[list[Inversion], list[Inversion]]:
        """Those that this process runs, and those of others."""

    def share(self, inversions: Sequence[Inversion]) -> None:
        """Get each inversion from who ran it."""

    def seed(self, generator: torch.Generator, seed: int, step: int) -> None:
        """Begin the random numbers that this process draws at a step."""

    def together(self, seed: int, norms: Mapping[str, Tensor], generator: torch.Generator) -> int:
        """Let all begin with the first one's seed, which is returned, and norms.

        They may differ where a rank has a seed of its own, and has yet to get its weights from the
        first.
        """


@dataclass(frozen=True)
class Alone:
    """A single process. `early`: there was no process group of any kind yet."""

    early: bool = False
    size: int = 1
    share_of_batch: tuple[int, int] = (0, 1)

    def gather(
        self, measure: Measuring, sites: Mapping[str, Site], step: int, device: torch.device
    ) -> dict[str, Sums]:
        """Its own."""
        guards.check_ranks(early=self.early, wrapper=None)
        return measure()

    def check_step(self, device: torch.device) -> None:
        """Refuse to go on alone where others have come."""
        guards.check_ranks(early=self.early, wrapper=None)

    def divided(self, inversions: Sequence[Inversion]) -> tuple[list[Inversion], list[Inversion]]:
        """All of them."""
        return list(inversions), []

    def share(self, inversions: Sequence[Inversion]) -> None:
        """Nothing to do."""

    def seed(self, generator: torch.Generator, seed: int, step: int) -> None:
        """It goes on with the numbers it has."""

    def together(self, seed: int, norms: Mapping[str, Tensor], generator: torch.Generator) -> int:
        """Its own."""
        return seed


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, each with rows and gradients as DistributedDataParallel has.

    Attributes:
        group: the process group. What adding up over it gives must be the same bits on each of its
            ranks, as it is with NCCL and gloo.
        rank: of this process within it.
        size: how many there are.
        wrapper: the DistributedDataParallel, if it is known.
    """

    group: Any
    rank: int
    size: int
    wrapper: Any = None

    @property
    def share_of_batch(self) -> tuple[int, int]:
        """Each draws for its own rows, from numbers of its own."""
        return 0, 1

    def from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with those of the first rank."""
        for bucket in buckets(tensors):
            _all_at_once(bucket, lambda flat: dist.broadcast(flat, group=self.group, group_src=0))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with their sums over the ranks."""
        for bucket in buckets(tensors):
            _all_at_once(bucket, lambda flat: dist.all_reduce(flat, group=self.group))

    def gather(
        self, measure: Measuring, sites: Mapping[str, Site], step: int, device: torch.device
    ) -> dict[str, Sums]:
        """The sums that `measure` returns, added up over the ranks: the same dict on all of them.

        A site is in it if one rank saw it. An error in `measure`, and ranks that are not at the
        same `step`, are an error on every rank: none waits for another that has given up. Cost: a
        table of counts, for which the host waits, and then all sums of A and G.
        """
        guards.check_ranks(early=False, wrapper=self.wrapper)
        guards.refuse_own_gradients(self.wrapper, {n: site.parts for n, site in sites.items()})
        failure = None
        try:
            sums = measure()
        except Exception as error:  # the others are told before it is raised
            sums, failure = {}, error
        step %= 2**20  # its square, and that of a sum of it, must be exact
        table = [
            [name in sums, sums.get(name, Sums()).rows, *_positions(sums.get(name, Sums()), site)]
            for name, site in sites.items()
        ]
        table.append([failure is not None, step, step**2])
        *counts, (failures, steps, squares) = self._added_up(table, device)
        if failure is not None:
            raise failure
        guards.check_ranks_agree(self.size, failures, step, steps, squares)
        total: dict[str, Sums] = {}
        for (name, site), (measured, rows, *positions) in zip(sites.items(), counts, strict=True):
            if measured:
                total[name] = site_sums = sums.get(name) or Sums.none(site, device)
                site_sums.rows, site_sums.positions = rows, positions[0]
                if len(positions) > 1:
                    site_sums.positions = torch.tensor(
                        positions, dtype=torch.float64, device=device
                    )
        self.add_up([side for site_sums in total.values() for side in site_sums.sides])
        return total

    def _added_up(self, table: list[list[Any]], device: torch.device) -> list[list[float]]:
        """The sums over the ranks of numbers, some of which (masked rows) are on the device."""
        flat = [number for row in table for number in row]
        known = [0.0 if isinstance(number, Tensor) else float(number) for number in flat]
        sums = torch.tensor(known, dtype=torch.float64, device=device)
        for entry, number in enumerate(flat):
            if isinstance(number, Tensor):
                sums[entry] = number
        self.add_up([sums])
        numbers = iter(sums.tolist())
        return [[next(numbers) for _ in row] for row in table]

    def check_step(self, device: torch.device) -> None:
        """Refuse `join()`, and a CUDA graph."""
        guards.check_ranks(early=False, wrapper=self.wrapper)
        guards.refuse_captured_ranks(device)

    def divided(self, inversions: Sequence[Inversion]) -> tuple[list[Inversion], list[Inversion]]:
        """Those that this rank runs, and those of others: the largest to who has least to do."""
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
        guards.check_ranks(early=False, wrapper=self.wrapper)
        for inversion in self.divided(inversions)[1]:
            for tensor in (inversion.A, inversion.G, inversion.sound):
                tensor.zero_()
        sound = [inversion.sound.to(inversion.A.dtype) for inversion in inversions]
        self.add_up([side for i in inversions for side in (i.A, i.G)] + sound)
        for inversion, total in zip(inversions, sound, strict=True):
            inversion.sound = total > 0

    def seed(self, generator: torch.Generator, seed: int, step: int) -> None:
        """Begin the random numbers that this rank draws at a step, from nothing else than these.

        So that ranks draw different ones, and go on with the same ones after a resume from a state
        that the first rank saved.
        """
        digest = hashlib.sha256(f"{seed} {step} {self.rank}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little"))

    def together(self, seed: int, norms: Mapping[str, Tensor], generator: torch.Generator) -> int:
        """The first one's seed, and norms."""
        common = torch.tensor(seed % 2**63, device=generator.device)
        self.from_first([common, *norms.values()])
        seed = int(common)
        self.seed(generator, seed, 0)
        return seed


@dataclass(frozen=True)
class EqualShares(Ranks):
    """Ranks of which each has an equal part of one batch, in their order.

    All draw the samples of the whole batch, as one process does, and use those of their part.
    """

    @property
    def share_of_batch(self) -> tuple[int, int]:
        """The part of this rank."""
        return self.rank, self.size

    def gather(
        self, measure: Measuring, sites: Mapping[str, Site], step: int, device: torch.device
    ) -> dict[str, Sums]:
        """As of any ranks; refused where they have different numbers of rows."""
        rows: dict[str, Any] = {}

        def measured() -> dict[str, Sums]:
            sums = measure()
            rows.update({name: site_sums.rows for name, site_sums in sums.items()})
            return sums

        total = super().gather(measured, sites, step, device)
        guards.check_equal_shares(self.size, rows, {n: sums.rows for n, sums in total.items()})
        return total

    def seed(self, generator: torch.Generator, seed: int, step: int) -> None:
        """All go on with the numbers they have, which are the same."""

    def together(self, seed: int, norms: Mapping[str, Tensor], generator: torch.Generator) -> int:
        """The first one's seed, and norms."""
        seed = super().together(seed, norms, generator)
        generator.manual_seed(seed)
        return seed


def distribution_of(
    model: nn.Module, group: Any, *, mesh: Any = None, equal_shares: bool = False
) -> Distribution:
    """The ranks that train a model together: of `group`, or of its DistributedDataParallel.

    `mesh`: that its parameters are sharded on.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Alone(early=True)
    if mesh is not None:
        group = guards.group_of(mesh, group)
    wrapper = data_parallel(model)
    if group is None and wrapper is not None:
        group = wrapper.process_group
    if group is not None:
        size = dist.get_world_size(group)
        ranks = EqualShares if equal_shares else Ranks
        return ranks(group, dist.get_rank(group), size, wrapper) if size > 1 else Alone()
    if guards.several():
        warn_user(
            "there are several processes, but KFAC was given a model without "
            "DistributedDataParallel, so its factors cover only this process's rows. That is right "
            "if each process trains its own model; if they train one together, build "
            "KFAC(DistributedDataParallel(model), ...), or pass "
            "options=KFACOptions(process_group=torch.distributed.group.WORLD)"
        )
    return Alone()


def _positions(sums: Sums, site: Site) -> list[Tensor | float]:
    """The counts of a site's groups where each has its own, else the one of all."""
    positions = sums.positions
    if isinstance(positions, Tensor) and positions.dim():
        return [*positions]
    return [positions] * (site.groups if site.kind.counts_groups else 1)


def _all_at_once(tensors: list[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Send the tensors as one, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    send(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
