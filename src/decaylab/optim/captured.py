"""A captured step for any loop: the user's own step, replayed as CUDA graphs.

    def step(images, labels):
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = decaylab.captured(step, model, optimizer)
    for images, labels in loader:
        loss = step(images, labels)
        scheduler.step()

What the device does in a step (forward, backward, optimizers) becomes one CUDA graph for each input
shape and, with K-FAC, for each kind of step: plain, refresh, inversion. Each kind runs eagerly
twice before it is captured. A graph keeps the addresses it was captured with, so:

- inputs are copied, from wherever they are, to fixed tensors on the model's device (eager steps
  also get them on that device);
- learning rates become tensors on the device, which schedulers and `group["lr"] = ...` write to;
- changing another setting of an optimizer (weight decay, momentum, damping), moving a parameter or
  loading a state leads to a new capture.

Decisions made in Python (a counter, `if step % 10`) are frozen at capture: make them outside the
step, or pass what they depend on as an argument. Do not read gradients between captured steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from decaylab.errors import AT_LEAST_ONE, DecaylabError, WrongType, check_name, warn_user
from decaylab.optim.graphs import Captured, CudaGraphs, Graphs
from decaylab.optim.kfac import KFAC
from decaylab.optim.update import settings_of

Result = TypeVar("Result")
# How often settings or addresses may change before the step is no longer captured.
RECAPTURES = 16


class Obstacle(Enum):
    """Why a step cannot be a CUDA graph: a sentence with its remedy; {0} and {1} are details."""

    HOST_WAIT = (
        "the step waits for the device at {0}, which is impossible in a CUDA graph: return tensors "
        "and read them (.item(), print, if) outside the step, and pass CPU tensors as arguments"
    )
    NOT_CAPTURABLE = "{0} cannot run in a CUDA graph with its current settings: build it with {1}"
    FOREIGN_PARAMETERS = (
        "{0} steps {1} parameters that are not the model's: pass captured() a list of all models "
        "in the step, or capture one step for each"
    )
    STEP_HOOK = (
        "{0} has the step hook {1}, which a replayed CUDA graph would not call: remove it, or do "
        "its work outside the step"
    )
    SETTINGS = (
        "optimizer settings keep changing (last: {0}), but a CUDA graph has them built in: keep "
        "them constant (OneCycleLR: cycle_momentum=False); only the learning rate may change"
    )
    INPUT = "the step's input {0}: pass tensors that do not require grad, and constants"
    RESULT = "the step returns a {0}, which a CUDA graph cannot update: return tensors, or nothing"
    AUTOCAST = (
        "the captured step is called inside torch.autocast, whose cached weights would become part "
        "of the CUDA graph: enter autocast inside the step"
    )
    SHAPES = (
        "the step has seen more than {0} input shapes and runs uncaptured for new ones: use "
        "drop_last=True or pad, pass changing numbers as tensors, or raise shapes"
    )
    CAPTURE = "the step cannot be captured as a CUDA graph: {0}"


class NotCapturable(DecaylabError):
    """A step that cannot be a CUDA graph; `obstacle` says why."""

    def __init__(self, obstacle: Obstacle, *details: object) -> None:
        self.obstacle = obstacle
        super().__init__(obstacle.value.format(*details))


def captured(
    step: Callable[..., Result],
    model: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    on_failure: Literal["raise", "eager"] = "raise",
    shapes: int = 4,
    generators: Sequence[torch.Generator] = (),
) -> "CapturedStep[Result]":
    """Turn a training step into one that replays CUDA graphs; on a CPU it just runs.

    Gives the same numbers as without graphs, bit for bit if kernels are deterministic and the plain
    loop's learning rates are tensors too. Returns detached copies of the step's tensors.

    Args:
        step: forward, backward, optimizer steps; called with tensors (nested as you like) and
            constants, returns tensors.
        model: the model it trains, or a list of models.
        optimizers: those it steps: KFAC, torch's with `capturable=True`, SGD with `fused=True`.
        on_failure: what to do with a step that cannot be captured: raise an error with the remedy,
            or "eager": warn with the same sentence and run the step uncaptured.
        shapes: how many input shapes get graphs; the step runs uncaptured for others.
        generators: random generators the step draws from, besides torch's own and K-FAC's.
    """
    if not callable(step) or isinstance(step, nn.Module):
        remedy = "captured(step, model, optimizers)"
        raise WrongType("step", step, "a function that takes one training step", remedy)
    models = _several("model", model, nn.Module, "a module")
    steppers = _several("optimizers", optimizers, torch.optim.Optimizer, "a torch optimizer")
    check_name("on_failure", on_failure, ("raise", "eager"))
    AT_LEAST_ONE.check("shapes", shapes)
    device = next((p.device for m in models for p in m.parameters()), torch.device("cpu"))
    graphs = None
    if device.type == "cuda":
        drawn_from = [o.generator for o in steppers if isinstance(o, KFAC)]
        graphs = CudaGraphs(device, generators=[*drawn_from, *generators])
    return CapturedStep(
        step, models, steppers, device, graphs, on_failure=on_failure, shapes=shapes
    )


def _several(name: str, given: Any, kind: type[Any], wanted: str) -> list[Any]:
    """One of a kind, or a list of them, as a list."""
    values = list(given) if isinstance(given, list | tuple) else [given]
    for value in values:
        if not isinstance(value, kind):
            raise WrongType(name, value, f"{wanted}, or a list of them")
    return values


class CapturedStep(Generic[Result]):
    """What `captured` returns.

    Attributes:
        obstacle: why it runs uncaptured; None while it replays graphs, and on a CPU.
        replayed: how many steps were replays.
        graphs: captures the step; None on a CPU.
    """

    def __init__(
        self,
        step: Callable[..., Result],
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        graphs: Graphs | None,
        *,
        on_failure: Literal["raise", "eager"] = "raise",
        shapes: int = 4,
    ) -> None:
        self._step, self._models, self._optimizers = step, models, optimizers
        self._device, self.graphs = device, graphs
        self._on_failure, self._shapes = on_failure, shapes
        self.obstacle: Obstacle | None = None
        self.replayed = 0
        self._kfacs = [o for o in optimizers if isinstance(o, KFAC)]
        self._inputs: dict[Any, _Inputs] = {}
        self._variants: dict[Any, _Variant[Result]] = {}
        self._recaptures = 0
        self._told_of_shapes = False
        self._rates: dict[tuple[int, int], Tensor] = {}
        self._tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
        if graphs is None:
            return
        try:
            self._check()
        except NotCapturable as failure:
            self._stop(failure)
            return
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(lambda _: self._forget())

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """Take a step: eagerly, or by a replay."""
        if self.graphs is None:
            return self._step(*args, **kwargs)
        if self.obstacle is not None:
            return self._run_eagerly(args, kwargs)
        watchers = list(_watchers(self._optimizers))
        if any(watcher.wants_step() for watcher in watchers):
            return self._run_eagerly(args, kwargs)
        try:
            if torch.is_autocast_enabled(self._device.type):
                raise NotCapturable(Obstacle.AUTOCAST)
            inputs = self._take_inputs(args, kwargs)
        except NotCapturable as failure:
            self._stop(failure)
            inputs = None
        if inputs is None:
            return self._run_eagerly(args, kwargs)
        self._keep_rates()
        for kfac in self._kfacs:
            kfac.before_step()
        try:
            variant = self._variant(inputs)
        except NotCapturable as failure:  # before_step may be made again
            self._stop(failure)
            return self._run_eagerly(args, kwargs)
        result, failed = variant.take(self.graphs)
        for kfac in self._kfacs:
            kfac.after_step()
        if failed is not None:
            self._stop(failed)
        if variant.captured.replays and failed is None:
            self.replayed += 1
            for watcher in watchers:
                watcher.step_replayed()
        return result

    def _run_eagerly(self, args: Any, kwargs: Any) -> Result:
        """The step itself, with its inputs on the model's device."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda leaf: leaf.to(self._device, non_blocking=True), (args, kwargs)
        )
        return self._step(*args, **kwargs)

    def _take_inputs(self, args: Any, kwargs: Any) -> "_Inputs | None":
        """Copy the arguments to where graphs read them; None if there are too many shapes."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (structure, *(_described(leaf) for leaf in leaves))
        inputs = self._inputs.get(key)
        if inputs is None:
            if len(self._inputs) >= self._shapes:
                if not self._told_of_shapes:
                    self._told_of_shapes = True
                    warn_user(str(NotCapturable(Obstacle.SHAPES, self._shapes)))
                return None
            inputs = self._inputs[key] = _Inputs(key, leaves, structure, self._device)
        inputs.fill(leaves)
        return inputs

    def _variant(self, inputs: "_Inputs") -> "_Variant[Result]":
        """The step for these inputs and this kind of step; a new one where what it knew changed."""
        kinds = tuple((kfac.refresh_due, kfac.inverts_now) for kfac in self._kfacs)
        key = (inputs.key, kinds, *(model.training for model in self._models))
        known = self._known()
        variant = self._variants.get(key)
        if variant is not None and variant.known != known:
            self._recaptures += 1
            if self._recaptures > RECAPTURES:
                raise NotCapturable(Obstacle.SETTINGS, _difference(variant.known, known))
            variant = None
        if variant is None:
            variant = self._variants[key] = _Variant(
                self._step, inputs, self._kfacs, self._optimizers, self._tensors, known, self.graphs
            )
        return variant

    def _known(self) -> dict[str, Any]:
        """What a graph has built in: addresses, and all settings but the learning rates."""
        known: dict[str, Any] = {"addresses": [t.data_ptr() for t in self._tensors]}
        known["frozen"] = [t.requires_grad for t in self._tensors]
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                known[f"group {index} of optimizer {number}"] = settings_of(group)
            if isinstance(optimizer, KFAC):
                known[f"settings of optimizer {number}"] = optimizer.captured_settings()
        return known

    def _keep_rates(self) -> None:
        """Let every learning rate be the tensor that graphs read, with the value it has now."""
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                rate, buffer = group["lr"], self._rates.get((number, index))
                if rate is buffer:
                    continue
                if buffer is None:
                    on_device = isinstance(rate, Tensor) and rate.device == self._device
                    buffer = rate if on_device else torch.zeros((), device=self._device)
                    self._rates[number, index] = buffer
                if rate is not buffer:
                    buffer.fill_(rate)
                    group["lr"] = buffer

    def _check(self) -> None:
        """Refuse optimizers that cannot be captured, and parameters that are not the models'."""
        captured = set(map(id, self._tensors))
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            foreign = [
                p for g in optimizer.param_groups for p in g["params"] if id(p) not in captured
            ]
            if foreign:
                raise NotCapturable(Obstacle.FOREIGN_PARAMETERS, name, len(foreign))
            for group in optimizer.param_groups:
                if group.get("capturable") is False:
                    raise NotCapturable(Obstacle.NOT_CAPTURABLE, name, "capturable=True")
                if isinstance(optimizer, torch.optim.SGD) and not group.get("fused"):
                    raise NotCapturable(Obstacle.NOT_CAPTURABLE, name, "fused=True")
            _check_hooks(optimizer)

    def _forget(self) -> None:
        """Drop every variant, and its graph."""
        self._variants.clear()
        if self.graphs is not None:
            self.graphs.forget()

    def _stop(self, failure: NotCapturable) -> None:
        """Run eagerly from now on, or raise."""
        self.obstacle = failure.obstacle
        self._forget()
        self._inputs.clear()
        for (number, index), rate in self._rates.items():  # eager steps would read them each time
            group = self._optimizers[number].param_groups[index]
            if group["lr"] is rate:
                group["lr"] = float(rate)
        self._rates.clear()
        if self._on_failure == "raise":
            raise failure
        warn_user(f"{failure}; the step runs uncaptured")


class _Inputs:
    """Arguments of a step, at addresses of their own."""

    def __init__(self, key: Any, leaves: list[Any], structure: Any, device: torch.device) -> None:
        self.key = key
        self._leaves = [
            torch.empty_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        self.args, self.kwargs = pytree.tree_unflatten(self._leaves, structure)

    def fill(self, leaves: list[Any]) -> None:
        """Take over the values of new arguments."""
        for buffer, leaf in zip(self._leaves, leaves, strict=True):
            if buffer is not leaf and isinstance(buffer, Tensor):
                buffer.copy_(leaf, non_blocking=True)


class _Variant(Generic[Result]):
    """One kind of step for one shape of inputs: run eagerly, then captured, then replayed."""

    def __init__(
        self,
        step: Callable[..., Result],
        inputs: _Inputs,
        kfacs: list[KFAC],
        optimizers: list[torch.optim.Optimizer],
        tensors: list[Tensor],
        known: dict[str, Any],
        graphs: Graphs | None,
    ) -> None:
        assert graphs is not None
        self._step, self._inputs, self._kfacs = step, inputs, kfacs
        self._optimizers, self._tensors = optimizers, tensors
        self.known = known
        self.captured: Captured[Result] = Captured(self._work, graphs)

    def take(self, graphs: Graphs) -> tuple[Result, NotCapturable | None]:
        """Take the step; also returns why it cannot be captured, if that turned out."""
        if self.captured.last_run:
            with graphs.host_waits() as waits:
                result = self.captured()
            failure = NotCapturable(Obstacle.HOST_WAIT, waits[0]) if waits else _unfit(result)
            return result, failure
        if not self.captured.captures_next:
            result = self.captured()
            return (_copied(result) if self.captured.replays else result), None
        gradients = [t.grad for t in self._tensors if t.is_leaf]
        try:
            for optimizer in self._optimizers:
                _check_hooks(optimizer)
            return _copied(self.captured()), None
        except Exception as error:
            # nothing has run yet: drop what the capture made, and take the step eagerly
            leaves = (t for t in self._tensors if t.is_leaf)
            for tensor, gradient in zip(leaves, gradients, strict=True):
                tensor.grad = gradient
            if isinstance(error, NotCapturable):
                failure = error
            else:
                failure = NotCapturable(Obstacle.CAPTURE, str(error).splitlines()[0])
                failure.__cause__ = error
            with graphs.stream():
                return self._work(), failure

    def _work(self) -> Result:
        with ExitStack() as stack:
            for kfac in self._kfacs:
                stack.enter_context(kfac.host_part_outside())
            result = self._step(*self._inputs.args, **self._inputs.kwargs)
        # without the autograd graph, which would live as long as the result
        return pytree.tree_map_only(Tensor, Tensor.detach, result)


def _copied(result: Any) -> Any:
    """Copies of tensors, which the next replay overwrites."""
    return pytree.tree_map_only(Tensor, Tensor.clone, result)


def _unfit(result: Any) -> NotCapturable | None:
    """What a step returns besides tensors would be the same at each replay."""
    for leaf in pytree.tree_leaves(result):
        if leaf is not None and not isinstance(leaf, Tensor):
            return NotCapturable(Obstacle.RESULT, type(leaf).__name__)
    return None


def _described(leaf: Any) -> Any:
    """What must be equal for two inputs to be read by one graph."""
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise NotCapturable(Obstacle.INPUT, "requires grad")
        return (leaf.shape, leaf.dtype, leaf.stride())
    try:
        hash(leaf)
    except TypeError:
        raise NotCapturable(Obstacle.INPUT, f"has a {type(leaf).__name__} in it") from None
    return (type(leaf), leaf)


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first thing that changed."""
    return next((key for key, value in after.items() if before.get(key) != value), "addresses")


def _watchers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
    """Owners of step hooks that know of replays: which steps they want to see, and count them."""
    for optimizer in optimizers:
        for hook in optimizer._optimizer_step_post_hooks.values():
            owner = getattr(hook, "__self__", None)
            if hasattr(owner, "step_replayed"):
                yield owner


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse step hooks that a replay would leave out."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values()]
    hooks += optimizer._optimizer_step_post_hooks.values()
    for hook in hooks:
        known = getattr(hook, "capturable", False)
        if not known and not hasattr(getattr(hook, "__self__", None), "step_replayed"):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise NotCapturable(Obstacle.STEP_HOOK, type(optimizer).__name__, name)
