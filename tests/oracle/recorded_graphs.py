"""What stands for CUDA graphs on a CPU."""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Recorded:
    """Replays by running the work again, into the tensors of the first replay."""

    def __init__(self, waits=(), error=None):
        self.captures = self.replays = 0
        self.waits, self.error = list(waits), error

    def stream(self):
        return nullcontext()

    def forget(self):
        pass

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


class Tape(TorchDispatchMode):
    """Takes down the operations in it, with their tensors; `undo` takes back what they wrote."""

    def __init__(self):
        super().__init__()
        self.operations, self._before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = kwargs or {}
        for argument, value in zip(function._schema.arguments, args, strict=False):
            self._keep(argument, value)
        for argument in function._schema.arguments[len(args) :]:
            self._keep(argument, given.get(argument.name))
        result = function(*args, **given)
        self.operations.append((function, args, given, result))
        return result

    def _keep(self, argument, value):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in pytree.tree_leaves(value):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def undo(self):
        for storage, before in self._before.values():
            storage.copy_(before)

    def play(self):
        """Each operation again, on the tensors that it had, into the tensors that it made."""
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Taped(Recorded):
    """As a CUDA graph does, runs nothing at the capture, and knows numbers and tensors from then.

    For work without a host's look at a value.
    """

    def capture(self, work):
        self.captures += 1
        with Tape() as tape:
            result = work()
        tape.undo()

        def replay():
            self.replays += 1
            tape.play()
            return result

        return replay
