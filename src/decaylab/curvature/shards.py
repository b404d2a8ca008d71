"""Parameters of which each rank holds a part, as FSDP2's `fully_shard` leaves them.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = KFAC(model)                     # the rest of the loop does not change

Ranks share the rows of a batch as under DistributedDataParallel (`curvature.distribution`). Factors
and inverses are whole on every rank; weights, their gradients, momentum and Adam's moments stay in
parts. A step gathers what is preconditioned (gradients, or their momentum), computes the steps of
whole matrices on every rank, and each rank moves its part of the weights by its part of the step.

Cost, in addition to that of data-parallel training: a step gathers one number for each of the
covered parameters and adds up one number over the ranks; the extra backward pass of a refresh
gathers parameters once more. Memory: a step has whole gradients of the covered parameters.

Not covered, and refused: tensor parallelism, parameters offloaded to the host, several meshes, and
trained parameters that `fully_shard` was told to ignore.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decaylab.curvature import guards
from decaylab.curvature.messages import buckets
from decaylab.networks.sharded import is_sharded


def own(tensor: Any) -> Any:
    """What this rank holds of a tensor, in the same memory: all of it, if it is not in parts."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def own_part(parameter: Any, whole: Tensor) -> Tensor:
    """The view of a whole tensor that is this rank's, as the parameter is divided."""
    if not is_sharded(parameter):
        return whole
    mesh, axis = parameter.device_mesh, _axis(parameter)
    longest = _longest(parameter, whole)
    first = min(mesh.get_local_rank(mesh.ndim - 1) * longest[axis], whole.shape[axis])
    return whole.narrow(axis, first, own(parameter).shape[axis])


def _axis(parameter: Any) -> int:
    """Which axis of a parameter is divided."""
    return parameter.placements[-1].dim


def _longest(parameter: Any, whole: Tensor) -> torch.Size:
    """The shape of the first rank's part of a whole tensor, than which none is longer."""
    axis, mesh = _axis(parameter), parameter.device_mesh
    length = -(-whole.shape[axis] // mesh.size(mesh.ndim - 1))
    return torch.Size((*whole.shape[:axis], length, *whole.shape[axis + 1 :]))


class Shards:
    """How a model's parameters lie on the ranks of a mesh: in parts, or whole, without a mesh.

    All ranks must call the same methods in the same order.
    """

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        if mesh is not None:  # the first of two axes has copies of the same parts
            self._group, self._size = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)

    @property
    def exist(self) -> bool:
        """Whether parameters are in parts."""
        return self.mesh is not None

    def complete(self, parameters: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Fill in the other ranks' parts of whole tensors in which each rank has written its own.

        Cost: as many numbers as they have, in messages of SENT_AT_ONCE bytes.
        """
        if self.mesh is None:
            return
        owners = dict(zip(wholes, parameters, strict=True))
        for bucket in buckets(wholes):
            shapes = [_longest(owners[whole], whole) for whole in bucket]
            sizes = [shape.numel() for shape in shapes]
            sent = bucket[0].new_zeros(sum(sizes))
            for whole, shape, place in zip(bucket, shapes, sent.split(sizes), strict=True):
                own, axis = own_part(owners[whole], whole), _axis(owners[whole])
                place.view(shape).narrow(axis, 0, own.shape[axis]).copy_(own)
            received = sent.new_empty(self._size, len(sent))
            dist.all_gather([*received], sent, group=self._group)
            for whole, shape, parts in zip(bucket, shapes, received.split(sizes, 1), strict=True):
                axis = _axis(owners[whole])
                joined = parts.unflatten(1, shape).movedim(0, axis).flatten(axis, axis + 1)
                whole.copy_(joined.narrow(axis, 0, whole.shape[axis]))

    def on_all(self, condition: Tensor) -> Tensor:
        """Whether a condition (a scalar) holds on all ranks."""
        if self.mesh is None:
            return condition
        missed = (~condition).float()
        dist.all_reduce(missed, group=self._group)
        return missed == 0

    def norms(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The norm of each whole tensor, in float32 at least."""
        norms = [
            torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
            for part in map(own, tensors)
        ]
        if self.mesh is None or not norms:
            return norms
        squares = torch.stack([norm.double().square() for norm in norms])
        dist.all_reduce(squares, group=self._group)
        return [total.to(norm.dtype) for total, norm in zip(squares.sqrt(), norms, strict=True)]


def shards_of(model: nn.Module, parameters: Iterable[Tensor]) -> Shards:
    """The shards that the chosen parameters of a model are in."""
    return Shards(guards.mesh_of(model, parameters))
