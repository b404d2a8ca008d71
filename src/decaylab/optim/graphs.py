"""CUDA graphs: device work that is captured once and replayed, without the host in between."""

import gc
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

from decaylab.curvature.streams import own_stream
from decaylab.errors import warn_user

Result = TypeVar("Result")

# Runs before the capture: they make lazily created state (momentum buffers, cuDNN plans) and are
# ordinary runs otherwise.
EAGER_RUNS = 2


class Graphs(Protocol):
    """Runs device work eagerly, and makes replays of it."""

    def stream(self) -> AbstractContextManager[object]:
        """The stream on which work runs before it is captured."""

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Record the work without running it; what is returned runs it, with the same result."""

    def forget(self) -> None:
        """Drop all captures at once; what `capture` returned must not be called again."""

    def host_waits(self) -> AbstractContextManager[list[str]]:
        """Collect where the host waits for the device inside this context: `file:line`."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: freeing an old graph during a capture would spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs:
    """CUDA graphs of one device, which are freed all at once.

    When torch frees a graph it also frees the memory that cuBLAS has for the stream of the capture,
    and the other graphs from that stream still write there (pytorch/pytorch issue 193402). So an
    unused graph is kept as long as the others; its memory serves later ones.

    Args:
        device: a CUDA device.
        generators: the generators, besides torch's own, that the work draws from.
        pool: memory shared with other graphs that never run at the same time; None makes one.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        generators: Sequence[torch.Generator] = (),
        pool: Any = None,
    ) -> None:
        self._device, self._generators = device, tuple(generators)
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def _capturing_stream(self) -> torch.cuda.Stream:
        """The current stream; one of our own if that is the default, which cannot be captured."""
        current = torch.cuda.current_stream(self._device)
        if current != torch.cuda.default_stream(self._device):
            return current
        if self._stream is None:
            self._stream = own_stream(self, self._device)
        return self._stream

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream of later captures: nodes of autograd graphs stay on the one they began on."""
        outer, inner = torch.cuda.current_stream(self._device), self._capturing_stream()
        inner.wait_stream(outer)
        try:
            with torch.cuda.stream(inner):
                yield
        finally:
            outer.wait_stream(inner)

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Capture the work; an error in it leaves generators as they were."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            # thread_local: another thread's (or run's) work on the device does not spoil it
            with (
                _no_collection(),
                torch.cuda.graph(
                    graph,
                    pool=self.pool,
                    stream=self._capturing_stream(),
                    capture_error_mode="thread_local",
                ),
            ):
                result = work()
        except BaseException:
            self._restore_generators()
            raise
        # a capture begins by resetting the generators' counters, on its stream: not after a replay
        # has set them on this one
        torch.cuda.current_stream(self._device).wait_stream(self._capturing_stream())
        self._graphs.append(graph)

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    def forget(self) -> None:
        """Let go of all graphs, and so of their memory."""
        self._graphs.clear()

    def _restore_generators(self) -> None:
        """Take generators out of a capture that failed, which torch leaves them in."""
        index = torch.cuda.current_device() if self._device is None else self._device.index or 0
        for generator in (torch.cuda.default_generators[index], *self._generators):
            generator.graphsafe_set_state(generator.clone_state())

    @contextmanager
    def host_waits(self) -> Iterator[list[str]]:
        """Where torch's sync debug mode sees the host wait for the device."""
        places: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        module: Any = warnings
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            shown = warnings.showwarning

            def note(
                message: Warning | str, category: Any, filename: str, lineno: int, *rest: Any
            ) -> None:
                if "synchronizing CUDA operation" in str(message):
                    places.append(_place(filename, lineno))
                elif "debug mode is a prototype" not in str(message):
                    shown(message, category, filename, lineno, *rest)

            module.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(before)
                module.showwarning = shown


def _place(filename: str, lineno: int) -> str:
    """`file:line` of the innermost frame outside torch, if there is one."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        if "/torch/" not in frame.filename and not frame.filename.endswith(("warnings.py",)):
            return f"{frame.filename}:{frame.lineno}"
    return f"{filename}:{lineno}"


class Captured(Generic[Result]):
    """Work on the device that runs eagerly at first, is then captured, and replayed from then on.

    The work must be the same each time: tensors at fixed addresses, numbers that change (learning
    rate, position in the epoch) in tensors, no value read on the host. It must return tensors (or
    nothing), which the next replay overwrites.

    Args:
        work: called with no argument.
        graphs: makes the capture.
        eager_runs: how often it runs eagerly first; at least once, which loads kernels.
        name: of the work: if it cannot be captured, a warning names it and it keeps running
            eagerly. Without a name, that is an error.
    """

    def __init__(
        self,
        work: Callable[[], Result],
        graphs: Graphs,
        *,
        eager_runs: int = EAGER_RUNS,
        name: str | None = None,
    ) -> None:
        self._work, self._graphs, self._name = work, graphs, name
        self._eager_runs: float = eager_runs
        self._runs = 0
        self._replay: Callable[[], Result] | None = None

    @property
    def replays(self) -> bool:
        """Whether it is captured."""
        return self._replay is not None

    @property
    def captures_next(self) -> bool:
        """Whether the next call is the one that captures."""
        return self._replay is None and self._runs >= self._eager_runs

    @property
    def last_run(self) -> bool:
        """Whether the next call is the last one that runs eagerly."""
        return self._runs == self._eager_runs - 1

    def __call__(self) -> Result:
        """Run the work, or replay it."""
        if self.captures_next:
            try:
                self._replay = self._graphs.capture(self._work)
            except RuntimeError as error:
                if self._name is None:
                    raise
                self._eager_runs = math.inf
                reason = str(error).splitlines()[0]
                warn_user(
                    f"{self._name} cannot be captured ({reason}) and runs eagerly, which is slower"
                )
        if self._replay is not None:
            return self._replay()
        self._runs += 1
        with self._graphs.stream():
            return self._work()
