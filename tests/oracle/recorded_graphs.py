"""What stands for CUDA graphs on a CPU."""

from contextlib import contextmanager, nullcontext

import torch


class Recorded:
    """Replays by running the work again, into the tensors of the first replay."""

    def __init__(self, waits=(), error=None):
        self.captures = self.replays = 0
        self.waits, self.error = list(waits), error

    def stream(self):
        return nullcontext()

    @contextmanager
    def host_waits(self):
        yield self.waits

    def capture(self, work):
        if self.error is not None:
            for p in self.damaged:
                p.grad = torch.full_like(p, torch.nan)
            raise self.error
        self.captures += 1
        first = []

        def replay():
            self.replays += 1
            result = work()
            if not first:
                first.append(result)
            elif isinstance(result, torch.Tensor):
                first[0].copy_(result)
            return first[0]

        return replay
