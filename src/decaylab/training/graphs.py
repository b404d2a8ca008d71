"""CUDA graphs: device work that is captured once and replayed, without the host in between."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

# Runs before the capture: they make lazily created state (momentum buffers, cuDNN plans) and are
# ordinary runs otherwise.
EAGER_RUNS = 2


class Captured(Generic[Result]):
    """Work on the device that runs as it is twice, is then captured, and replayed from there on.

    The work must be the same each time: tensors at fixed addresses, numbers that change (learning
    rate, position in the epoch) in tensors, no look at a value on the host. What it returns must be
    tensors (or nothing): they are overwritten by the next replay.

    Args:
        work: called with no argument, on the current stream.
        generators: the generators, besides torch's own, that the work draws from.
        pool: memory shared with other graphs that never run at the same time; None makes one.
    """

    def __init__(
        self,
        work: Callable[[], Result],
        *,
        generators: tuple[torch.Generator, ...] = (),
        pool: Any = None,
    ) -> None:
        self._work, self._generators, self._pool = work, generators, pool
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result

    def __call__(self) -> Result:
        """Run the work, or replay it."""
        if self._graph is None and self._runs < EAGER_RUNS:
            self._runs += 1
            return self._work()
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        return self._result

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        current = torch.cuda.current_stream()
        # The default stream cannot be captured: None takes torch's own.
        stream = None if current == torch.cuda.default_stream() else current
        # thread_local: another thread's (or run's) work on the device does not spoil the capture
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            self._result = self._work()
        return graph
