"""KFAC on parameters that `fully_shard` has divided: processes that meet through a file."""

import pytest
import torch
from oracle.two_ranks import TESTS, failures
from refusals import refuses
from torch.distributed.tensor import Shard

from decaylab.curvature import guards, messages, shards
from decaylab.curvature.shards import Shards, own
from decaylab.errors import Conflict

SCRIPT = TESTS / "optim" / "shard_cases.py"
OF_THREE = (
    "as_one_process_with_spectral_steps",
    "as_one_process_with_a_kl_clip",
    "as_one_process_with_convolutions",
    "as_distributed_data_parallel",
    "a_gradient_of_one_rank_that_is_not_finite",
    "each_ranks_own_state",
    "a_distributed_checkpoint",
)


@pytest.mark.slow
def test_two_ranks_with_shards(tmp_path):
    assert failures(tmp_path, "cpu", script=SCRIPT) == []


@pytest.mark.slow
def test_three_ranks_with_uneven_and_empty_shards(tmp_path):
    assert failures(tmp_path, "cpu", *OF_THREE, size=3, script=SCRIPT) == []


@pytest.mark.slow
def test_replicas_of_shards(tmp_path):
    assert failures(tmp_path, "cpu", "replicas_of_shards", size=4, script=SCRIPT) == []


class Part:
    """A parameter that a mesh of some ranks has divided, as one of them sees it."""

    def __init__(self, whole, axis, rank, size):
        self.device, self.device_type = whole.device, "cpu"
        self.device_mesh = self
        self.ndim, self._rank, self._size = 1, rank, size
        self.placements = (Shard(axis),)
        parts = whole.chunk(size, axis)
        self._own = parts[rank] if rank < len(parts) else whole.narrow(axis, 0, 0)

    def to_local(self):
        return self._own

    def size(self, axis):
        return self._size

    def get_local_rank(self, axis):
        return self._rank

    def get_group(self, axis):
        return None


def test_parameters_offloaded_to_the_host_are_refused():
    parameter = Part(torch.zeros(4, 2), 0, 1, 2)
    assert guards.mesh_of_parameter(parameter) is parameter
    parameter.device_type = "cuda"
    offloaded = "parameters offloaded to the host (CPUOffloadPolicy)"
    with refuses(Conflict, settings=["K-FAC", offloaded]):
        guards.mesh_of_parameter(parameter)


def test_the_parts_of_all_ranks_are_the_whole(monkeypatch):
    """Whatever shapes and axes, in several messages: in a step each rank sees the same."""
    size = 3
    shapes = [((7, 2), 0), ((2, 3), 0), ((4, 6), 1), ((5,), 0), ((1, 3, 2), 1), ((4,), 0)]
    wholes = [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape, _ in shapes]
    wholes[3] = wholes[3].double()
    ranks = [
        [Part(whole, axis, rank, size) for whole, (_, axis) in zip(wholes, shapes, strict=True)]
        for rank in range(size)
    ]
    monkeypatch.setattr(messages, "SENT_AT_ONCE", 100)
    sent = []
    for parameters in ranks:  # what each would send
        messages_of_rank = []
        monkeypatch.setattr(
            torch.distributed,
            "all_gather",
            lambda out, own, group, m=messages_of_rank: m.append(own),
        )
        places = [torch.full_like(whole, torch.nan) for whole in wholes]
        for parameter, place in zip(parameters, places, strict=True):
            shards.own_part(parameter, place).copy_(own(parameter))
        Shards(parameters[0]).complete(parameters, places)
        sent.append(messages_of_rank)
    for parameters in ranks:
        turn = iter(range(len(sent[0])))

        def gather(out, own, group, turn=turn):
            number = next(turn)
            for place, messages_of_rank in zip(out, sent, strict=True):
                place.copy_(messages_of_rank[number])

        monkeypatch.setattr(torch.distributed, "all_gather", gather)
        places = [torch.full_like(whole, torch.nan) for whole in wholes]
        for parameter, place in zip(parameters, places, strict=True):
            shards.own_part(parameter, place).copy_(own(parameter))
        Shards(parameters[0]).complete(parameters, places)
        assert all(map(torch.equal, places, wholes))
    assert 1 < len(sent[0]) < len(wholes)
