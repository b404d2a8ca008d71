"""Rounds: the steps of a model that one or several optimizers take, told apart by step hooks.

A round ends when every watched optimizer has stepped, or when one steps again before that (loops
that alternate between optimizers, or use only one of them). Optimizers that begin to step the model
later are noticed; a step that calls `super().step()`, or an optimizer inside another one's step, is
part of that one step.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from decaylab.errors import WrongType
from decaylab.probes.layers import stepped_by


class Observer(Protocol):
    """Who is told of rounds. The training goes on whatever goes wrong: it is told of that too."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    steps: int

    def wants_step(self) -> bool:
        """Whether the coming step must be seen, so that it must not be a replay of a graph."""

    def count(self, steps: int) -> None:
        """Each optimizer has taken steps that are not told of one by one."""

    def round_begins(self) -> None:
        """The first optimizer of a round is about to step."""

    def step_begins(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """An optimizer is about to step; `closure`: it takes its gradients in the step."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, in this round or, when it has just joined, before it."""

    def round_ended(self) -> None:
        """The round is over."""

    def optimizer_met(
        self, optimizer: torch.optim.Optimizer, replaced: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Another optimizer is about to step the model, in place of these or beside the others."""

    def failed(self, what: str, error: Exception) -> None:
        """One of the above has raised an error."""


class Rounds:
    """Hooks on an observer's optimizers, which tell it of every round until `detach`.

    It holds the observer, and so do the optimizers it is attached to; torch's hook for all other
    optimizers does not.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._stepped: set[torch.optim.Optimizer] = set()  # in this round
        self._inside: torch.optim.Optimizer | None = None  # whose step is being taken
        self._joining: torch.optim.Optimizer | None = None  # whose first step is not a round's
        self._handles: dict[torch.optim.Optimizer, list[Any]] = {}
        for optimizer in observer.optimizers:
            self._attach(optimizer)
        self._global_handle = self._hear_of_others()

    @property
    def begun(self) -> bool:
        """Whether some optimizers, but not all, have stepped in the current round."""
        return bool(self._stepped)

    def end(self) -> None:
        """End a round that not all optimizers have taken part in."""
        if self._stepped:
            self._end()

    def abandon(self) -> None:
        """Forget such a round: the observer is not told of its end."""
        self._stepped = set()

    def detach(self) -> None:
        """Take the hooks off."""
        for optimizer in tuple(self._handles):
            self._release(optimizer)
        self._global_handle.remove()

    # What replays steps as graphs, in which hooks do not run, asks their owner (`optim.captured`).

    def wants_step(self) -> bool:
        """Whether the coming step must not be a replay."""
        return self._observer.wants_step()

    def step_replayed(self) -> None:
        """A step of all optimizers was replayed."""
        self._observer.count(1)

    # ------------------------------------------------------------ hooks
    # Where the step is compiled, they run as they are: what they call is not traced.

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        before = optimizer.register_step_pre_hook(self._step_begins)
        # first of all, so that what other hooks do to the weights (decay) is part of the step
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(before.id, last=False)
        after = optimizer.register_step_post_hook(self._step_ended)
        self._handles[optimizer] = [before, after]

    def _release(self, optimizer: torch.optim.Optimizer) -> None:
        for handle in self._handles.pop(optimizer, []):
            handle.remove()

    @torch._disable_dynamo
    def _step_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._inside is optimizer and _inner(optimizer):
            return
        self._inside = optimizer
        if self._joining is optimizer:
            return
        try:
            if optimizer in self._stepped:
                self._end()
            if not self._stepped:
                self._observer.round_begins()
            closure = any(map(callable, (*args[1:], *kwargs.values())))
            self._observer.step_begins(optimizer, closure=closure)
        except Exception as error:
            self._observer.failed("snapshot", error)

    @torch._disable_dynamo
    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._inside is not optimizer or _inner(optimizer):
            return
        self._inside = None
        if self._joining is optimizer:
            self._joining = None
        else:
            self._stepped.add(optimizer)
        try:
            self._observer.step_ended(optimizer)
        except Exception as error:
            self._observer.failed("gradients", error)
        if len(self._stepped) == len(self._observer.optimizers):
            self._end()

    def _end(self) -> None:
        self._stepped = set()
        try:
            self._observer.round_ended()
        except Exception as error:
            self._observer.failed("records", error)

    # ------------------------------------------------------------ optimizers that come later

    def _hear_of_others(self) -> Any:
        reference = weakref.ref(self)

        @torch._disable_dynamo
        def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            alive = reference()
            if alive is None or optimizer in alive._handles:
                return
            try:
                alive._meet(optimizer)
            except Exception as error:
                alive._observer.failed("another optimizer", error)

        return register_optimizer_step_pre_hook(begins)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer without our hooks steps: if it moves parameters of this model, attach to it.

        One that holds parameters of a watched one takes its place. One that does not has joined
        them, and its first step belongs to the round that the others have just ended.
        """
        if self._inside is not None or _is_wrapper(optimizer):
            return
        watched = self._observer.optimizers
        if any(value is known for value in vars(optimizer).values() for known in watched):
            return  # it only calls one that is watched
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, self._observer.model.parameters())):
            return
        replaced = [o for o in watched if any(id(p) in held for p in stepped_by([o]))]
        if not replaced:
            self._joining = optimizer if self._observer.steps and not self._stepped else None
        self._observer.optimizer_met(optimizer, replaced)
        for old in replaced:
            self._release(old)
        self._attach(optimizer)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer behind the wrappers of accelerate and Lightning."""
    while not isinstance(optimizer, torch.optim.Optimizer) or _is_wrapper(optimizer):
        if not hasattr(optimizer, "optimizer"):
            remedy = "call watch(model, optimizer)"
            raise WrongType("optimizer", optimizer, "a torch optimizer", remedy)
        optimizer = optimizer.optimizer
    return optimizer


def _is_wrapper(optimizer: Any) -> bool:
    """Whether this optimizer only holds another one (accelerate, Lightning)."""
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer)


def _inner(optimizer: torch.optim.Optimizer) -> bool:
    """Whether these hooks are those of `super().step()` inside a subclass's own `step`.

    torch hangs the hooks on the step of every class that has been instantiated.
    """
    if sum(hasattr(vars(kind).get("step"), "hooked") for kind in type(optimizer).__mro__) < 2:
        return False
    code = getattr(type(optimizer).step, "__code__", None)  # torch's, that of all of them
    frame: Any = sys._getframe()
    steps = 0
    while frame is not None:
        steps += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1
