"""Parameters that are sharded between processes: sums over all parts, and passes of the model.

`fully_shard` (FSDP2) and tensor parallelism keep a parameter, its gradient and its optimizer state
as torch DTensors, of which each process holds a part. What is measured of them is a sum over
entries (a norm, a dot product), so parts are reduced where they are, and only numbers are sent:
`Parts`. A whole tensor (`whole`) is gathered for singular values alone, one at a time.

Passes of the model go through its own forward and the hooks of `fully_shard` in it, which gather
one block at a time: no process ever holds the whole model for a measurement. A derivative by the
logarithm of a factor on some parameters is exact, in forward mode (`scale_derivative`): while a
block is gathered, its parameters are swapped for dual tensors whose tangent is the parameter
itself. Under tensor parallelism DTensors take part in the pass and have no forward mode.

Everything here that sends must be called by all processes of the `Team`, in the same order.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

from decaylab.errors import Conflict, Failed, Lacks, Mismatch, warn_user

SECONDS_TO_WARN, SECONDS_TO_WAIT = 30.0, 600.0  # for the other processes, at a meeting
_meetings: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
"""The number of the next meeting of these ranks: processes need not be in the same teams."""

Spread = tuple[Any, tuple[bool, ...]]
"""A device mesh, and along which of its axes a tensor is divided (not replicated)."""


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor: processes hold it together, each a part of it, or each all of it."""
    return hasattr(tensor, "device_mesh")


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have the same norms and scalar products."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: real numbers, without a graph, in the same memory."""
    return real(_settled(tensor.detach()).to_local() if is_sharded(tensor) else tensor.detach())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; of one that is sharded, it is gathered."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    kind = sharded.device_mesh.device_type
    if sharded.to_local().device.type != kind:  # offloaded to the CPU
        sharded = sharded.to(kind)
    return sharded.full_tensor()


def _settled(tensor: Any) -> Any:
    """A DTensor whose sums over processes have been taken (gradients may still wait for them)."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    places = [Replicate() if place.is_partial() else place for place in tensor.placements]
    return tensor.redistribute(placements=places)


@dataclass(frozen=True)
class Parts:
    """What this process holds of some tensors, and numbers of the whole ones from it.

    Attributes:
        tensors: the parts, without graph; the tensors themselves where they are not sharded.
        spreads: how each is divided; None where it is not.
    """

    tensors: list[Tensor]
    spreads: list[Spread | None]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Parts:
        """The parts of these tensors."""
        given = list(tensors)
        return cls([local(tensor) for tensor in given], [_spread(tensor) for tensor in given])

    def norms(
        self, parts: Sequence[Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """The Euclidean norm of each whole tensor; of `parts` that are divided as these are.

        Those of 16 bits are summed in 32 if no type is named: float16 ends at 65,504.
        """
        chosen = self.tensors if parts is None else list(parts)
        if not chosen:
            return []
        norms = _norms(chosen, dtype)
        if not any(self.spreads):
            return norms
        squares = self.sums([norm.double().square() for norm in norms])
        return [square.sqrt() for square in squares]

    def dots(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
        """The dot products of pairs of whole tensors that are divided as these are.

        Those of 16 bits are taken in 32; one pair at a time is copied for it.
        """
        pairs = zip(first, second, strict=True)
        return self.sums([torch.dot(_precise(a), _precise(b)) for a, b in pairs])

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Numbers of the parts, added up over the processes that hold different parts."""
        return self._reduced(values, "SUM")

    def largest(self) -> list[Tensor]:
        """The largest entry of each whole tensor, by size."""
        sizes = [part.abs().max() if part.numel() else part.new_zeros(()) for part in self.tensors]
        return self._reduced(sizes, "MAX")

    def _reduced(self, values: Sequence[Tensor], how: str) -> list[Tensor]:
        """One message for all tensors that are divided alike."""
        totals = list(values)
        for spread in dict.fromkeys(spread for spread in self.spreads if spread is not None):
            places = [i for i, other in enumerate(self.spreads) if other == spread]
            table = torch.stack([values[i].double() for i in places])
            reduced = _reduce(table, *spread, how)
            for i, value in zip(places, reduced.to(table.device), strict=True):
                totals[i] = value
        return totals


def _norms(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Summed in `dtype`; None: in at least 32 bits, which copies none of them."""
    types = [dtype or (torch.float32 if t.element_size() < 4 else None) for t in tensors]
    norms: dict[int, Tensor] = {}
    for kind in dict.fromkeys(types):
        places = [i for i, other in enumerate(types) if other == kind]
        several = torch._foreach_norm([tensors[i] for i in places], 2, dtype=kind)
        norms |= zip(places, several, strict=True)
    return [norms[i] for i in range(len(tensors))]


def _precise(tensor: Tensor) -> Tensor:
    """A vector of its entries, in at least 32 bits."""
    return (tensor.float() if tensor.element_size() < 4 else tensor).flatten()


def _spread(tensor: Any) -> Spread | None:
    if not is_sharded(tensor):
        return None
    divided = tuple(not (p.is_replicate() or p.is_partial()) for p in tensor.placements)
    return (tensor.device_mesh, divided) if any(divided) else None


def _reduce(values: Tensor, mesh: Any, axes: Sequence[bool], how: str) -> Tensor:
    """Over some axes of a mesh; the same bits on all of its processes."""
    total = values.to(mesh.device_type, copy=True)
    for axis, reduced in enumerate(axes):
        if reduced:
            dist.all_reduce(total, getattr(dist.ReduceOp, how), group=mesh.get_group(axis))
    return total


# ---------------------------------------------------------------- the processes


@dataclass(frozen=True, eq=False)
class Team:
    """The processes that hold the parts of one model; `mesh` is that of all of them."""

    mesh: Any

    @cached_property
    def ranks(self) -> list[int]:
        """The members' ranks among all processes."""
        return [int(rank) for rank in self.mesh.mesh.flatten().tolist()]

    @property
    def first(self) -> bool:
        """Whether this process is the first of them: the one that writes."""
        return dist.get_rank() == self.ranks[0]

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first one's tensor, which is as large as this process's."""
        sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        sent = sent if self.first else torch.zeros_like(sent)
        everywhere = [True] * self.mesh.ndim
        received = _reduce(sent.contiguous(), self.mesh, everywhere, "SUM")
        return received.to(device=tensor.device, dtype=tensor.dtype)

    def agreed(self, number: float) -> float:
        """The first one's number: all decide by it whether another pass follows."""
        return float(self.from_first(torch.tensor(number, dtype=torch.float64)))

    def told(self, values: Any) -> Any:
        """The first one's plain values, as JSON has them."""
        text = json.dumps(values).encode() if self.first else b""
        length = int(self.from_first(torch.tensor(len(text))))
        letters = torch.zeros(length, dtype=torch.uint8)
        if self.first:
            letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return json.loads(bytes(self.from_first(letters).tolist()))

    def by_first(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` returns on the first one, which alone does it; its error is one of all.

        It returns plain values, as for `told`.
        """
        values, failure = None, None
        if self.first:
            try:
                values = work()
            except Exception as error:  # the others are told before it is raised
                failure = error
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        values, reason = self.told([values, reason])
        if failure is not None:
            raise failure
        if reason is not None:
            raise Failed(f"{what} on rank {self.ranks[0]}", reason, "see its own error")
        return values

    def meet(self, what: str, facts: Mapping[str, object]) -> None:
        """Wait until all are here, and refuse to go on where they differ in what they were given.

        Nothing but the store of the process group is used, so that a process that waits for others
        that never come can say so, and ends.
        """
        if len(self.ranks) == 1:
            return
        store, begun, warned = _store(), time.monotonic(), False
        number, own = next(_meetings[tuple(self.ranks)]), dist.get_rank()
        meeting = f"decaylab/{','.join(map(str, self.ranks))}/{number}"
        keys = {rank: f"{meeting}/{rank}" for rank in self.ranks}
        store.set(keys[own], json.dumps({"what": what, **facts}, default=str))
        while missing := [rank for rank, key in keys.items() if not store.check([key])]:
            waited = time.monotonic() - begun
            remedy = f"call {what} on every rank, at the same place; only the first one writes"
            if waited > SECONDS_TO_WAIT:
                raise Lacks(f"{what} on rank {own}", f"counterpart on rank {missing[0]}", remedy)
            if waited > SECONDS_TO_WARN and not warned:
                warn_user(
                    f"{what} waits for rank {missing[0]}, since the model is sharded: {remedy}"
                )
                warned = True
            time.sleep(0.01)
        given = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
        for rank, others in given.items():
            for name, value in given[self.ranks[0]].items():
                if others.get(name) != value:
                    values = {f"rank {self.ranks[0]}": value, f"rank {rank}": others.get(name)}
                    raise Mismatch(name, values, f"call {what} alike on every rank")


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def team_of(model: nn.Module) -> Team | None:
    """The processes that the model is sharded between; None where it is not."""
    meshes = [p.device_mesh for p in model.parameters() if is_sharded(p)]  # type: ignore[attr-defined]
    return Team(max(meshes, key=lambda mesh: mesh.size())) if meshes else None


def refuse_flat_parameters(model: nn.Module) -> None:
    """Refuse FSDP of the first kind, whose parameters have lost their shapes."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return
    if any(isinstance(part, module.FullyShardedDataParallel) for part in model.modules()):
        raise Conflict(
            ["decaylab", "FullyShardedDataParallel"],
            "its parameters are pieces of one flat tensor, without layers",
            "shard the model with torch.distributed.fsdp.fully_shard (FSDP2)",
        )


# ---------------------------------------------------------------- passes of the model


def device_of(model: nn.Module) -> torch.device:
    """Where the first of the parameters takes part in a pass, wherever its shard is kept."""
    parameter: Any = next(model.parameters())
    return (
        torch.device(parameter.device_mesh.device_type)
        if is_sharded(parameter)
        else parameter.device
    )


def original_class(model: nn.Module) -> type[nn.Module]:
    """What a module was before `fully_shard` derived its class from it."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = type(model)
    if module is not None and module.FSDPModule in kind.__bases__:
        return next(base for base in kind.__bases__ if base is not module.FSDPModule)
    return kind


def _fsdp_modules(model: nn.Module) -> list[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    root = model.__dict__.get("viewed", model)  # of a view of a model (`probes.applied`)
    parts = [root, *(part for part in model.modules() if part is not model)]
    return [part for part in parts if isinstance(part, module.FSDPModule)]


def put_back(model: nn.Module, *, failed: bool = False) -> None:
    """Let a model hold its shards again: after a forward pass, its root still holds more.

    failed: a pass was cut short. Nothing is sent.
    """
    for module in _fsdp_modules(model):
        if failed:
            _forget_pass(module)
        module.reshard()


def _forget_pass(module: Any) -> None:
    """Let a module be in no pass, where one was cut short: it would keep what it has gathered."""
    if hasattr(module, "reset_iter_state"):
        with suppress(RuntimeError, AttributeError):  # it is no root, or has never run
            module.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = module._get_fsdp_state()  # before torch 2.13
    groups = getattr(state, "_fsdp_param_groups", None)  # before 2.12 there is one, or none
    groups = [*filter(None, [state._fsdp_param_group] if groups is None else groups)]
    for group in groups:
        group.wait_for_unshard()  # what was asked for ahead
    for part in (state, *groups):
        part._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None


@contextmanager
def passing(model: nn.Module) -> Iterator[None]:
    """A pass or several in here; before and after, the model holds its shards."""
    put_back(model)
    try:
        yield
    except BaseException:
        put_back(model, failed=True)
        raise
    put_back(model)


def scale_derivative(
    model: nn.Module, chosen: Iterable[Tensor], outputs_of: Callable[[], Sequence[Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Outputs of a sharded model, and their derivatives by log a, the chosen parameters times a.

    outputs_of: runs the model. One forward pass, exact. Refused where a chosen parameter is a
    DTensor in the pass itself (tensor parallelism).
    """
    ids = {id(parameter) for parameter in chosen}
    places = [
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in ids
    ]
    if any(isinstance(module, nn.RNNBase) for module, _ in places):
        raise _no_forward_mode()  # it reads a list of its own
    swapped: dict[tuple[nn.Module, str], tuple[Any, Tensor]] = {}

    def swap(*_: Any) -> None:
        for place in places:
            module, name = place
            parameter: Any = module._parameters[name]
            if not is_sharded(parameter) and not _is_dual(parameter):
                dual: Any = forward_ad.make_dual(parameter.detach(), parameter.detach())
                module._parameters[name] = dual
                swapped[place] = parameter, dual

    handles = [module.register_forward_pre_hook(swap) for module in _fsdp_modules(model)]
    with torch.no_grad(), forward_ad.dual_level():
        try:
            swap()
            outputs = outputs_of()
            pairs = [forward_ad.unpack_dual(output) for output in outputs]
        finally:
            for handle in handles:
                handle.remove()
            for (module, name), (parameter, dual) in swapped.items():
                if module._parameters[name] is dual:
                    module._parameters[name] = parameter
    if len(swapped) < len(places):
        raise _no_forward_mode()
    return [(z, torch.zeros_like(z) if dz is None else dz) for z, dz in pairs]


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _no_forward_mode() -> Lacks:
    remedy = "shard it with fully_shard alone, or leave this quantity out"
    return Lacks("the sharded model", "derivative in forward mode", remedy)
