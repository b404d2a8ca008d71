"""Streams of one's own, though torch hands out the same ones again and again."""

import gc
from itertools import cycle

import pytest
import torch

from decaylab.curvature import streams
from decaylab.curvature.streams import own_stream

CUDA = torch.device("cuda")


@pytest.fixture
def torchs(monkeypatch):
    """Torch's streams, without CUDA: numbers that come round."""

    class Stream:
        numbers = {
            priority: cycle(range(32 * -priority, 32 - 32 * priority)) for priority in (0, -1)
        }

        def __init__(self, device, priority=0):
            assert device is CUDA
            self.cuda_stream = next(self.numbers[priority])

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "_owned", type(streams._owned)())


class Owner:
    """Has a stream, or a few."""

    def __init__(self, count=1, device=CUDA, **how):
        self.streams = [own_stream(self, device, **how) for _ in range(count)]
        self.handles = [stream.cuda_stream for stream in self.streams]


def test_nobody_gets_a_stream_that_another_has(torchs):
    kept = [Owner(count) for count in (1, 3, 1)]
    handles = {handle for owner in kept for handle in owner.handles}
    assert len(handles) == 5
    for _ in range(100):
        assert handles.isdisjoint(Owner().handles)
    kept += [Owner() for _ in range(27)]
    assert {handle for owner in kept for handle in owner.handles} == set(range(32))
    assert Owner(priority=-1).handles[0] >= 32


def test_one_that_is_given_up_is_handed_out_again(torchs):
    kept = [Owner() for _ in range(32)]
    gone = kept.pop(7).handles
    gc.collect()
    assert Owner().handles == gone


def test_it_is_the_owners_even_if_nobody_holds_the_stream(torchs):
    """As its handle is in the owner's graphs."""
    owner = Owner()
    del owner.streams
    gc.collect()
    for _ in range(100):
        assert Owner().handles != owner.handles


def test_where_all_are_taken_it_is_one_of_them(torchs):
    kept = [Owner() for _ in range(33)]
    assert len({owner.handles[0] for owner in kept}) == 32


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_that_two_share_is_taken_while_either_lives(torchs, leaves):
    kept = [Owner() for _ in range(32)]
    shared = Owner()
    pair = [kept.pop(shared.handles[0]), shared]
    del shared, pair[leaves]
    gc.collect()
    gone = kept.pop(3).handles
    gc.collect()
    kept.append(Owner())
    assert kept[-1].handles == gone
    assert Owner().handles != pair[0].handles


@pytest.mark.gpu
def test_torch_has_so_many():
    gc.collect()  # owners that tests before have left in cycles
    every = [torch.cuda.Stream() for _ in range(3 * streams.IN_TORCH)]
    assert len({stream.cuda_stream for stream in every}) == streams.IN_TORCH
    kept = Owner(8)
    later = [Owner().handles[0] for _ in range(2 * streams.IN_TORCH)]
    assert set(kept.handles).isdisjoint(later)


@pytest.mark.gpu
def test_owners_that_go_leave_nothing_behind():
    """Torch's memory of a stream is used again at once: a reference to it would be to another."""
    for _ in range(200):
        owner = Owner(3, priority=-1)
        del owner
        events = [torch.cuda.Event() for _ in range(8)]
        assert Owner().handles
        del events
