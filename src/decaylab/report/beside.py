"""Work in another process while this one goes on."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextmanager
def beside(work: Callable[..., Result], *arguments: Any) -> Iterator[Callable[[], Result]]:
    """Begin work; what is given waits for its result.

    The work is done here instead with a single core, or if the other process is killed.
    """
    if (os.cpu_count() or 1) < 2:
        yield lambda: work(*arguments)
        return
    with ProcessPoolExecutor(
        1,
        get_context("spawn"),
        initializer=signal.signal,  # a Ctrl-C is for this process, which then waits for the other
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as pool:
        future = pool.submit(work, *arguments)

        def result() -> Result:
            try:
                return future.result()
            except BrokenProcessPool:
                return work(*arguments)

        yield result
