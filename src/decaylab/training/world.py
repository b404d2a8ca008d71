"""The processes that train one run together: `torchrun -m decaylab train`.

Each takes its part of every batch, which is the batch that one process would take: the same images
in the same order, cropped and flipped alike. Gradients are averaged; K-FAC's factors and samples,
and the statistics of batch normalisation, are those of the whole batch. So the weights are the same
on all of them, and those of one process but for rounding, whatever the number of processes; a
checkpoint goes on with any other number.

The first process writes records and checkpoints, and measures probes; evaluation is shared.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.curvature.capture import data_parallel
from decaylab.curvature.distribution import Ranks
from decaylab.data import Batches, Split
from decaylab.errors import BadValue, DecaylabError, Misplaced
from decaylab.networks.sharded import team_of
from decaylab.training import checkpoint
from decaylab.training.evaluate import Evaluation

# Steps between two looks at what all have to agree on: signals, checkpoints that are due.
AGREED_EVERY = 10
# The others wait so long while the first measures and writes.
PATIENCE = timedelta(hours=1)


class ProcessLost(DecaylabError):
    """Another process of the training has ended; this one cannot go on without it."""


@dataclass(frozen=True)
class World:
    """The processes of one training; by default, a single one.

    All must call its methods in the same order.

    Attributes:
        rank: of this process.
        size: how many there are.
        group: their process group, for tensors on the device.
        host: the same processes, for tensors on the host.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    host: Any = None

    @property
    def first(self) -> bool:
        """Whether this process writes records and checkpoints."""
        return self.rank == 0

    @contextmanager
    def output(self, stream: TextIO) -> Iterator[TextIO]:
        """Where to print what the first process says for all."""
        if self.first:
            yield stream
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere

    def check(self, batches: Batches, *, compiled: bool) -> None:
        """Refuse batches that do not come in equal parts, and compiled networks."""
        sizes = [batches.batch_size]
        sizes += [batches.images_per_epoch % batches.batch_size] if batches.ends_short else []
        for batch_size in sizes:
            if batch_size % self.size:
                wanted = f"a multiple of {self.size}, the number of processes"
                remedy = "give torchrun a number of processes that divides it"
                raise BadValue("the batch size", batch_size, wanted, remedy)
        if compiled and self.size > 1:
            raise Misplaced(["--compiled"], "one process", "leave it out under torchrun")

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Make gradients of the parts of a batch that of the whole."""
        if self.size > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]
            Ranks(self.group, self.rank, self.size).add_up(gradients)
            torch._foreach_div_(gradients, self.size)

    def part(self, count: int) -> slice:
        """This process's part of so many things."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def step_sums(self, loss: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss and the hits of a whole batch, from those of this process's part."""
        if self.size == 1:
            return loss, hits
        sums = torch.stack([loss.double() / self.size, hits.double()])
        dist.all_reduce(sums, group=self.group)
        return sums[0].to(loss.dtype), sums[1].long()

    def evaluated(self, split: Split, launch: Callable[[Split], Callable[[], Evaluation]]) -> Any:
        """`launch` on this process's part of a split; what is returned reads the whole result."""
        if self.size == 1:
            return launch(split)
        total, part = len(split.labels), self.part(len(split.labels))
        read = launch(Split(split.images[part], split.labels[part]))

        def read_all() -> Evaluation:
            part_result = read()
            correct = torch.zeros(total, dtype=torch.uint8, device=part_result.correct.device)
            correct[part] = part_result.correct.to(torch.uint8)
            loss = torch.tensor(part_result.loss * len(part_result.correct), dtype=torch.float64)
            loss = loss.to(correct.device)
            dist.all_reduce(correct, group=self.group)
            dist.all_reduce(loss, group=self.group)
            hits = correct.sum().item()
            return Evaluation(loss.item() / total, hits / total, correct.bool())

        return read_all

    def from_first(self, state: Any) -> Any:
        """The first process's nested state of tensors (on the host), numbers and strings.

        What the others give does not matter.
        """
        if self.size == 1:
            return state
        tree, tensors = checkpoint.flatten(state) if self.first else (None, {})
        shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        header: list[Any] = [tree, shapes]
        dist.broadcast_object_list(header, group=self.host, group_src=0)
        tree, shapes = header
        for key, (shape, dtype) in shapes.items():
            tensor = tensors[key].contiguous() if self.first else torch.empty(shape, dtype=dtype)
            dist.broadcast(tensor, group=self.host, group_src=0)
            tensors[key] = tensor
        return state if self.first else checkpoint.nest(tree, tensors)

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on the first process, which alone does it; an error is one of all.

        It returns a nested state, as for `from_first`.
        """
        if self.size == 1:
            return work()
        state = failure = None
        if self.first:
            try:
                state = work()
            except Exception as error:  # the others are told before it is raised
                failure = error
        if self.from_first(failure is not None):
            raise failure or DecaylabError("the first process has failed; it says why")
        return self.from_first(state)

    def agreed(self, step: int, *wishes: int) -> tuple[int, ...]:
        """The largest that a process has of each number; of several, at every tenth step alone.

        In between nothing is due. So all stop after the same step.
        """
        if self.size == 1:
            return wishes
        if step % AGREED_EVERY:
            return (0,) * len(wishes)
        largest = torch.tensor(wishes)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.host)
        return tuple(largest.tolist())

    @contextmanager
    def whole_batch(self) -> Iterator[None]:
        """Forward passes in train mode in here take batch norm's statistics over all processes.

        Those of probes and evaluations, which the first process runs alone, are outside.
        """
        if self.size == 1:
            yield
            return
        before = F.batch_norm

        def over_all(*args: Any, **kwargs: Any) -> Tensor:
            return _batch_norm(before, self.group, *args, **kwargs)

        F.batch_norm = over_all
        try:
            yield
        finally:
            F.batch_norm = before

    @contextmanager
    def without_losses(self) -> Iterator[None]:
        """Turn what torch raises when another process is gone into a sentence."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            text = str(error)
            torn = isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
            if self.size == 1 or not torn:
                raise
            raise ProcessLost(
                f"another of the {self.size} processes of this training has ended (torchrun names"
                " it below): run the same command again to continue from the last checkpoint"
            ) from error


class _AddedUp(torch.autograd.Function):
    """The sum of a tensor over processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _batch_norm(
    alone: Callable[..., Tensor],
    group: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` with mean and variance over the rows of all processes, in float32 at least."""
    if not training:
        return alone(input, running_mean, running_var, weight, bias, training, momentum, eps)
    axes = [axis for axis in range(input.dim()) if axis != 1]
    shape = [1, -1] + [1] * (input.dim() - 2)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    count = wide[:, :1].numel() * dist.get_world_size(group)
    mean = _AddedUp.apply(wide.sum(axes), group) / count
    centred = wide - mean.view(shape)
    variance = _AddedUp.apply(centred.square().sum(axes), group) / count
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    output = centred * scale.view(shape)
    output = output if bias is None else output + bias.view(shape)
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (count / max(count - 1, 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return output.to(input.dtype)


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun, or the like, has started this process as one of several."""
    environment = os.environ if environment is None else environment
    return int(environment.get("WORLD_SIZE") or 1) > 1 and "RANK" in environment


@contextmanager
def joined(device: torch.device, *, shared: bool = False) -> Iterator[World]:
    """The processes that torchrun has started; a single one where it has not.

    By NCCL on GPUs and gloo elsewhere; also on a GPU that processes share (`shared`), which NCCL
    does not do. The group stays until the process ends (by `leave`).
    """
    if not launched():
        yield World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    # torchrun's store outlives a restart: the addresses of those who were killed are still there
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    group = dist.group.WORLD
    host = group if backend == "gloo" else dist.new_group(backend="gloo", timeout=PATIENCE)
    world = World(rank, size, group, host)
    with world.without_losses():
        yield world


def world_of(model: nn.Module) -> World:
    """The processes that train a model together in a loop that is not ours.

    Those of its DistributedDataParallel, or those that its parameters are sharded between. Where
    each trains a model of its own, a single one. All must call this together.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    wrapper = data_parallel(model)
    team = team_of(model)
    if team is not None:
        ranks = team.ranks
    elif wrapper is not None:
        ranks = dist.get_process_group_ranks(wrapper.process_group)
    else:
        return World()
    host = _host_group(dist.group.WORLD, tuple(ranks))
    return World(ranks.index(dist.get_rank()), len(ranks), host, host)


@cache
def _host_group(everyone: Any, ranks: tuple[int, ...]) -> Any:
    """A group of some of all processes, for tensors on the host."""
    if dist.get_backend(everyone) == "gloo" and len(ranks) == dist.get_world_size(everyone):
        return everyone
    return dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)


def leave(code: int) -> NoReturn:
    """End a process that others know, at once: torch would wait for them, or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
