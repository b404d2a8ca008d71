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


def test_nobody_gets_a_stream_that_another_has(torchs):
    kept = [own_stream(CUDA) for _ in range(5)]
    for _ in range(100):
        assert own_stream(CUDA).cuda_stream not in {stream.cuda_stream for stream in kept}
    kept += [own_stream(CUDA) for _ in range(27)]
    assert {stream.cuda_stream for stream in kept} == set(range(32))
    assert own_stream(CUDA, priority=-1).cuda_stream >= 32


def test_one_that_is_given_up_is_handed_out_again(torchs):
    kept = [own_stream(CUDA) for _ in range(32)]
    gone = kept.pop(7).cuda_stream
    gc.collect()
    assert own_stream(CUDA).cuda_stream == gone


def test_where_all_are_taken_it_is_one_of_them(torchs):
    kept = [own_stream(CUDA) for _ in range(33)]
    assert len({stream.cuda_stream for stream in kept}) == 32


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_that_two_share_is_taken_while_either_lives(torchs, leaves):
    kept = [own_stream(CUDA) for _ in range(32)]
    shared = own_stream(CUDA)
    pair = [kept.pop(shared.cuda_stream), shared]
    del shared, pair[leaves]
    gc.collect()
    gone = kept.pop(3).cuda_stream
    gc.collect()
    kept.append(own_stream(CUDA))
    assert kept[-1].cuda_stream == gone
    assert own_stream(CUDA).cuda_stream != pair[0].cuda_stream


@pytest.mark.gpu
def test_torch_has_so_many():
    gc.collect()  # owners that tests before have left in cycles
    every = [torch.cuda.Stream() for _ in range(3 * streams.IN_TORCH)]
    assert len({stream.cuda_stream for stream in every}) == streams.IN_TORCH
    kept = [own_stream(torch.device("cuda")) for _ in range(8)]
    later = [own_stream(torch.device("cuda")).cuda_stream for _ in range(2 * streams.IN_TORCH)]
    assert not {stream.cuda_stream for stream in kept} & set(later)
