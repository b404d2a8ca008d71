"""What layers see and send back, observed through hooks in an unchanged training loop.

On a refresh, a forward hook on each covered layer keeps its input and the gradient edge of its
output (not the output: an in-place ReLU behind the layer would overwrite it). A hook on the model
takes the logits and back-propagates curvature vectors through the same graph: one forward, one
extra backward per vector. Parameter gradients are not computed in it.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from decaylab.errors import DecaylabError
from decaylab.networks.preserved import preserved


@dataclass(eq=False)
class Pass:
    """One observed forward pass: how many rows of logits count in it, and which, if not all."""

    rows: Tensor | float
    mask: Tensor | None


@dataclass(eq=False)
class Call:
    """One call of a covered layer: its input, its output's shape and edge, and its pass.

    `counted` [output's axes but the last]: its positions that take part, of a masked pass. There is
    no edge where the loss's own gradients are listened to: the hook that does so would
    hold the graph, which holds the hook, and neither would ever be freed.
    """

    name: str
    inputs: Tensor
    shape: torch.Size
    edge: GradientEdge | None
    observed: Pass | None = None
    counted: Tensor | None = None

    def __post_init__(self) -> None:
        self._version = _version(self.inputs)

    def count(self, gradient: Tensor) -> None:
        """Of a masked pass, take in the positions that a gradient comes back to.

        Padding gets none; a token whose own row is not counted may be attended to by one that is.
        """
        mask = None if self.observed is None else self.observed.mask
        if mask is not None and mask.shape == self.shape[:-1]:
            before = mask != 0 if self.counted is None else self.counted
            self.counted = before | (gradient != 0).any(-1)

    @property
    def overwritten(self) -> bool:
        """Whether the input was changed in place since."""
        return _version(self.inputs) != self._version


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; those from inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Hook:
    """A hook that does not keep its owner alive, and is inert in a copied or saved model."""

    def __init__(self, owner: "Capture | None", method: str, name: str = "") -> None:
        self._owner = weakref.ref(owner) if owner is not None else None
        self._method, self._name = method, name

    def __call__(self, module: nn.Module, *event: Any) -> None:
        if torch.compiler.is_compiling() or self._owner is None:
            return
        owner = self._owner()
        if owner is None:
            return
        if getattr(module, "_is_replica", False) and owner.acts():
            raise DecaylabError(
                "nn.DataParallel runs copies of the model side by side, of which K-FAC cannot tell "
                "one pass from another: use DistributedDataParallel"
            )
        getattr(owner, self._method)(self._name, *event)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, (None, self._method, self._name))

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook(None, self._method, self._name)


class Capture:
    """Hooks on a model and its covered layers.

    Args:
        model: the model, or what `torch.compile` made of it (a refresh then runs the eager module)
            or DistributedDataParallel.
        layers: covered layers by name.
        due: whether a refresh is due now.
        on_output: called with the model's output and the keyword arguments it was called with,
            after each observed forward pass.
        on_gradient: if given, called with (call, gradient) when the loss's own backward pass
            reaches a layer's output; the gradient may have the shape of a view of it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        due: Callable[[], bool],
        on_output: Callable[[Any, dict[str, Any]], None],
        on_gradient: Callable[[Call, Tensor], None] | None = None,
    ) -> None:
        self.model = innermost(model)
        self.calls: list[Call] = []
        self._layers = layers
        self.without_grad: set[str] = set()
        self._due, self._on_output, self._on_gradient = due, on_output, on_gradient
        self._pauses = 0
        self._inside, self._detached = False, False
        self._handles = [
            self.model.register_forward_pre_hook(_Hook(self, "_begin")),
            *(
                # before hooks of others, which may replace the output
                layer.register_forward_hook(
                    _Hook(self, "_layer", name), prepend=True, with_kwargs=True
                )
                for name, layer in layers.items()
            ),
            self.model.register_forward_hook(_Hook(self, "_end"), with_kwargs=True),
        ]
        self._undo_dispatch = [_run_eagerly_when(m, self._runs_eagerly) for m in model.modules()]

    def acts(self) -> bool:
        """Whether a forward pass is observed now.

        Not inside a backward pass, where it is activation checkpointing's recomputation of one
        that has been observed before.
        """
        return self._runs_eagerly() and torch._C._current_graph_task_id() == -1

    def _runs_eagerly(self) -> bool:
        """Whether compiled code is left out: in what is observed, and in its recomputation.

        In train mode, with grad, when a refresh is due, outside torch.func and torch.jit.trace.
        """
        return (
            self._pauses == 0
            and not self._detached
            and torch.is_grad_enabled()
            and self.model.training
            and self._due()
            and not torch._C._are_functorch_transforms_active()
            and not torch.jit.is_tracing()
        )

    def trained(self, *names: str) -> bool:
        """Whether any of these layers, or of all, is not frozen now."""
        layers = [self._layers[name] for name in names or self._layers]
        return any(p.requires_grad for layer in layers for p in layer.parameters())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Silence the hooks."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def take(self) -> list[Call]:
        """Hand over the calls observed since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def detach(self) -> None:
        """Remove every hook; a second time, do nothing."""
        if self._detached:
            return
        self._detached = True
        for handle in self._handles:
            handle.remove()
        for undo in self._undo_dispatch:
            undo()
        self.calls.clear()

    def _begin(self, _: str, *event: Any) -> None:
        self._inside = self.acts()
        if self._inside:
            self.calls.clear()
            self.without_grad.clear()
            # hooks that came later, too, make the model's output, and follow a layer
            _move(self.model, self._handles[-1], to_end=True)
            for layer, handle in zip(self._layers.values(), self._handles[1:-1], strict=True):
                _move(layer, handle, to_end=False)

    def _layer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._inside and not torch.is_grad_enabled() and self._pauses == 0:
            self.without_grad.add(name)
        if not self.acts() or not output.requires_grad:
            return
        if not self.trained(name):
            return  # frozen for the moment
        inputs = args[0] if args else kwargs["input"]
        made = _in_the_graph(output)
        edge = get_gradient_edge(made) if self._on_gradient is None else None
        call = Call(name, inputs.detach(), output.shape, edge)
        self.calls.append(call)
        if self._on_gradient is not None:
            made.register_hook(partial(self._on_gradient, call))

    def _end(self, _: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inside, self._inside = self._inside, False
        if inside and self.acts():
            self._on_output(output, kwargs)


def _move(module: nn.Module, hook: Any, *, to_end: bool) -> None:
    """Let a module's forward hook run behind all others, or before them."""
    hooks: Any = module._forward_hooks
    hooks.move_to_end(hook.id, last=to_end)


def _in_the_graph(output: Tensor) -> Tensor:
    """A layer's output, or what it is a reshaped view of, as that of a Linear of three axes is.

    Where a view is changed in place (a ReLU behind the layer), the graph is made anew without it.
    """
    base = output._base
    if base is None or base.numel() != output.numel():
        return output
    alone = base.shape == (1, *output.shape)  # a convolution of one example without a batch axis
    return base if alone or (base.is_contiguous() and output.is_contiguous()) else output


def logits_of(output: Any) -> Tensor | None:
    """The logits in a model's output: a tensor is them, an object may hold them as `.logits`.

    The latter is what Hugging Face models return. None where there are none.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None


def back_propagate(
    logits: list[Tensor], vectors: list[Tensor], calls: list[Call]
) -> list[Tensor | None]:
    """Gradients of sum(vector * logits) at each call's output; None where the logits ignore it."""
    edges = [call.edge for call in calls if call.edge is not None]
    found = torch.autograd.grad(logits, edges, vectors, retain_graph=True, allow_unused=True)
    shapes = [call.shape for call in calls]
    return [None if g is None else g.reshape(s) for g, s in zip(found, shapes, strict=True)]


def nodes_behind(tensor: Tensor) -> Iterator[Node]:
    """Every node of the graph that made a tensor, once, beginning with its own."""
    seen: set[Node] = set()
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            nodes.extend(parent for parent, _ in node.next_functions)


def wrappings(model: nn.Module) -> Iterator[nn.Module]:
    """The model, then what `torch.compile` or DistributedDataParallel has in it, and so on."""
    yield model
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    if inner is not None:
        yield from wrappings(inner)


def innermost(model: nn.Module) -> nn.Module:
    """The last of the `wrappings`: the user's own module, whose forward pass is that of a rank."""
    return list(wrappings(model))[-1]


@contextmanager
def frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    """Batch norm in train mode without a trace: the running statistics are not updated in here."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            counter = norm.num_batches_tracked
            if counter is not None:  # without which SyncBatchNorm does not run
                counter = counter.clone() if isinstance(norm, nn.SyncBatchNorm) else None
            norm.momentum, norm.num_batches_tracked = 0.0, counter
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Train mode with grad; afterwards modes, random state and buffers are as before.

    A model in train mode stays as it is: normalisation that is kept in eval mode is part of it.
    """
    with preserved(model), torch.enable_grad():
        if not model.training:
            model.train()
        yield


def _run_eagerly_when(model: nn.Module, condition: Callable[[], bool]) -> Callable[[], None]:
    """Send calls of a compiled model to its eager module while `condition()`; returns the undo."""
    eager = getattr(model, "_orig_mod", model)
    if eager is not model:
        holder, attribute, eager_call = model, "forward", eager.__call__
    elif getattr(model, "_compiled_call_impl", None) is not None:
        holder, attribute, eager_call = model, "_compiled_call_impl", model._call_impl
    else:
        return lambda: None
    compiled_call = getattr(holder, attribute)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (eager_call if condition() else compiled_call)(*args, **kwargs)

    def undo() -> None:
        # another may stand on top of this one, and goes through it: then it only stops acting
        if getattr(holder, attribute) is dispatch:
            setattr(holder, attribute, compiled_call)

    setattr(holder, attribute, dispatch)
    return undo
