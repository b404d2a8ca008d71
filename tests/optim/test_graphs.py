"""The lives of CUDA graphs, with stand-ins for what a CPU has not."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from decaylab.optim.graphs import CudaGraphs


class Stream:
    def wait_stream(self, other):
        pass


class Graph:
    """Stands for torch.cuda.CUDAGraph; a replay runs nothing."""

    alive = weakref.WeakSet()

    def __init__(self):
        self.alive.add(self)

    def replay(self):
        pass


@contextmanager
def capturing(graph, **how):
    yield


@pytest.fixture
def graphs(monkeypatch):
    default = Stream()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr("decaylab.optim.graphs.own_stream", lambda owner, device: Stream())
    for name in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: default)
    return CudaGraphs(torch.device("cuda", 0), pool=(0, 1))


def test_a_graph_stays_as_long_as_others_of_its_stream(graphs):
    """To free one is to free memory that the others write to: pytorch/pytorch issue 193402."""
    first, second = (graphs.capture(lambda: None) for _ in range(2))
    del first
    gc.collect()
    assert len(Graph.alive) == 2
    second()
    del second
    graphs.forget()
    gc.collect()
    assert not Graph.alive
