"""What layers see and send back, observed through hooks in an unchanged training loop.

On a refresh, a forward hook on each covered layer keeps its input and the gradient edge of its
output (not the output: an in-place ReLU behind the layer would overwrite it). A hook on the model
takes the logits and back-propagates curvature vectors through the same graph: one forward, one
extra backward per vector. Parameter gradients are not computed in it.

Products that no module's hook sees (attention's projections, a layer's weight given to `F.linear`)
are met where they are made: while the model runs in an observed pass, and only then, the functions
`F.linear` and others (FUNCTIONS) report the calls whose weight is a covered one. Recurrent
layers, whose kernels show no product at all, are then computed step by step from such calls.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from decaylab.curvature import guards
from decaylab.curvature.kinds.kind import Site
from decaylab.curvature.kinds.recurrent import UNROLLED
from decaylab.networks.preserve import preserved
from decaylab.networks.sharded import is_sharded

# Functions that are called with (input, weight, bias, ...) for a layer's product, and one that is
# called with (inputs, weights, offs=...), for rows that each belong to one of many matrices.
FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d", "grouped_mm")
# So many kinds of passes are remembered: sequences of every length, experts that are met or not.
GRAPHS_REMEMBERED = 32


@dataclass(eq=False)
class Pass:
    """One observed forward pass: how many rows of logits count in it, and which, if not all."""

    rows: Tensor | float
    mask: Tensor | None


@dataclass(eq=False)
class Call:
    """One use of a site's matrix: its input, its output's shape and edge, and its pass.

    `counted` [output's axes but the last]: its positions that take part, of a masked pass. `offset`
    is where the used part of the parameter begins; `offsets`, in a product with all matrices of a
    parameter, where the rows of each end. There is no edge where the loss's own gradients
    are listened to: the hook that does so would hold the graph, which holds the hook, and neither
    would ever be freed.
    """

    site: Site
    inputs: Tensor
    shape: torch.Size
    edge: GradientEdge | None
    offset: int = 0
    observed: Pass | None = None
    counted: Tensor | None = None
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        self._version = _version(self.inputs)

    @cached_property
    def ends(self) -> list[int] | None:
        """`offsets` as numbers; the first who asks waits for the device."""
        return None if self.offsets is None else self.offsets.tolist()

    @property
    def name(self) -> str:
        """Of the site."""
        return self.site.name

    def count(self, gradient: Tensor) -> None:
        """In a masked pass, count the positions that the mask has, and those with a gradient.

        Padding gets none; a token whose own row is not counted may be attended to by one that is.
        Positions of a functional call may be in another order than the mask's: there the gradient
        decides alone.
        """
        mask = None if self.observed is None else self.observed.mask
        if mask is None:
            return
        if not self.site.kind.hooked:
            before = torch.zeros_like(gradient[..., 0], dtype=torch.bool)
        elif mask.shape == self.shape[:-1]:
            before = mask != 0
        else:
            return
        before = before if self.counted is None else self.counted
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
        replica = getattr(module, "_is_replica", False)
        if replica and self._method not in ("_leave", "_roll_up") and owner.acts():
            guards.refuse_replicas()
        getattr(owner, self._method)(self._name, *event)

    @property
    def __name__(self) -> str:
        """It has none, which torch.jit.script does not expect."""
        raise guards.NotScriptable

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, (None, self._method, self._name))

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook(None, self._method, self._name)


class Capture:
    """Hooks on a model and its covered layers.

    Args:
        model: the model, or what `torch.compile` made of it (a refresh then runs the eager module)
            or DistributedDataParallel.
        sites: where covered matrices meet vectors, by name.
        due: whether forward passes are to be observed now.
        on_output: called with the model's output and the keyword arguments it was called with,
            after each observed forward pass.
        on_gradient: if given, called with (call, gradient) when the loss's own backward pass
            reaches a layer's output; the gradient may have the shape of a view of it.
        in_training: whether only passes in train mode are observed.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: dict[str, Site],
        due: Callable[[], bool],
        on_output: Callable[[Any, dict[str, Any]], None],
        on_gradient: Callable[[Call, Tensor], None] | None = None,
        *,
        in_training: bool = True,
    ) -> None:
        self.model = innermost(model)
        self.calls: list[Call] = []
        self._sites = sites
        self._hooked = {name: s.module for name, s in sites.items() if s.kind.hooked}
        self._by_weight = {s.weight: s for s in sites.values() if s.kind.functional}
        self._gathers = any(map(is_sharded, self._by_weight))
        self._unrolled: dict[nn.Module, list[Site]] = {}
        for site in sites.values():
            if site.kind.unrolled:
                self._unrolled.setdefault(site.module, []).append(site)
        self._reports_part = False  # whether a part of the model reports that was called by itself
        self._met_last: tuple[Call, weakref.ref[Tensor]] | None = None
        self.without_grad: set[str] = set()
        self._due, self._on_output, self._on_gradient = due, on_output, on_gradient
        self._in_training = in_training
        self._pauses = 0
        self._inside, self._detached = False, False
        self._on_layers: list[Any] = []
        self._on_unrolled: list[Any] = []
        self._on_model = [
            self.model.register_forward_pre_hook(_Hook(self, "_begin")),
            self.model.register_forward_hook(_Hook(self, "_end"), with_kwargs=True),
            # also after an error
            self.model.register_forward_hook(_Hook(self, "_leave"), always_call=True),
        ]
        self._undo_dispatch = [_run_eagerly_when(m, self._runs_eagerly) for m in model.modules()]

    def arm(self, due: bool = True) -> None:
        """Let hooks be on the layers, or not: torch calls a module without them faster.

        A pass of the model arms by itself; this is for passes of its parts too.
        """
        armed = self._on_layers or self._on_unrolled
        if due and not armed and not self._detached:
            self._on_layers = [
                # before hooks of others, which may replace the output
                layer.register_forward_hook(
                    _Hook(self, "_layer", name), prepend=True, with_kwargs=True
                )
                for name, layer in self._hooked.items()
            ]
            for layer, (site, *_) in self._unrolled.items():
                before, after = _Hook(self, "_unroll", site.name), _Hook(self, "_roll_up")
                self._on_unrolled += [
                    layer.register_forward_pre_hook(before),
                    layer.register_forward_hook(after, always_call=True),  # also after an error
                ]
        elif not due:
            for handle in [*self._on_layers, *self._on_unrolled]:
                handle.remove()
            self._on_layers, self._on_unrolled = [], []

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
            and (self.model.training or not self._in_training)
            and self._due()
            and not torch._C._are_functorch_transforms_active()
            and not torch.jit.is_tracing()
        )

    def trained(self) -> bool:
        """Whether any covered layer is not frozen now."""
        return any(site.trained for site in self._sites.values())

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
        for handle in [*self._on_model, *self._on_layers, *self._on_unrolled]:
            handle.remove()
        for undo in self._undo_dispatch:
            undo()
        _reports.leave(self)
        _unrolled.leave(self)
        self.calls.clear()

    def _begin(self, _: str, *event: Any) -> None:
        self._inside = self.acts()
        if self._inside:
            self.calls.clear()
            self.without_grad.clear()
            self._met_last = None
            _reports.join(self)
            # hooks that came later, too, make the model's output, and follow a layer
            _move(self.model, self._on_model[1], to_end=True)
            self.arm()
            for layer, handle in zip(self._hooked.values(), self._on_layers, strict=True):
                _move(layer, handle, to_end=False)

    def _layer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = args[0] if args else next(iter(kwargs.values()))
        last, self._met_last = self._met_last, None
        if last is not None and last[0].name == name and last[1]() is output:
            last[0].inputs = inputs.detach()  # as the module got it: a convolution may have padded
            return
        self._add(self._sites[name], inputs, output, 0)

    def met_grouped(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """A product was made by `F.grouped_mm`."""
        inputs, weights = (args + tuple(kwargs[n] for n in ("mat_a", "mat_b")[len(args) :]))[:2]
        offsets = kwargs.get("offs")
        parameter = weights if weights._base is None else weights._base
        site = self._site_of(parameter)
        if site is None or not site.kind.counts_groups or offsets is None or inputs.dim() != 2:
            return
        matrices = parameter if site.shape.transposed else parameter.mT
        if weights.shape == matrices.shape and weights.stride() == matrices.stride():
            self._add(site, inputs, output, 0, offsets)

    def met(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """A product was made by another one of FUNCTIONS."""
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        base, site = weight, self._site_of(weight)
        if site is None and weight._base is not None:
            base, site = weight._base, self._site_of(weight._base)
        if site is None:
            return
        offset = 0
        if weight is not base:
            whole = weight.numel() == base.numel() or site.kind.counts_groups
            if not whole or not weight.is_contiguous():
                return  # a part of one matrix; if nothing else is seen of the layer, it is refused
            offset = weight.storage_offset() - base.storage_offset()
        if site.kind.hooked:
            others = {key: kwargs[key] for key in kwargs.keys() - {"input", "weight", "bias"}}
            if not site.kind.same_call(site.module, args[3:], others):
                return
        call = self._add(site, args[0] if args else kwargs["input"], output, offset)
        if call is not None and site.kind.hooked:
            self._met_last = call, weakref.ref(output)

    def _site_of(self, weight: Tensor) -> Site | None:
        """Whose weight it is: of shards, the gathered one that stands in their place meanwhile."""
        if not self._gathers:
            return self._by_weight.get(weight)
        for site in self._by_weight.values():
            if site.module._parameters.get(site.weight_name.rpartition(".")[2]) is weight:
                return site
        return None

    def _unroll(self, name: str, *event: Any) -> None:
        """Let a recurrent layer be computed step by step, also where checkpointing repeats it."""
        sites = self._unrolled[self._sites[name].module]
        if self._inside and not torch.is_grad_enabled() and self._pauses == 0:
            self.without_grad.update(site.name for site in sites)
        if self._runs_eagerly() and any(site.trained for site in sites):
            _unrolled.join(self)
            self._reports_part = self.acts() and _reports.join(self)

    def _roll_up(self, _: str, *event: Any) -> None:
        _unrolled.leave(self)
        if self._reports_part:
            _reports.leave(self)
            self._reports_part = False

    def _add(
        self, site: Site, inputs: Tensor, output: Tensor, offset: int, offsets: Tensor | None = None
    ) -> Call | None:
        """Take down a use of a site, if the pass is observed and the site is trained."""
        if self._inside and not torch.is_grad_enabled() and self._pauses == 0:
            self.without_grad.add(site.name)
        if not self.acts() or not output.requires_grad or not site.trained:
            return None
        graph_output = _in_the_graph(output)
        edge = get_gradient_edge(graph_output) if self._on_gradient is None else None
        call = Call(site, inputs.detach(), output.shape, edge, offset, offsets=offsets)
        self.calls.append(call)
        if self._on_gradient is not None:
            graph_output.register_hook(partial(self._on_gradient, call))
        return call

    def _end(self, _: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inside, self._inside = self._inside, False
        _reports.leave(self)
        if inside and self.acts():
            self._on_output(output, kwargs)

    def _leave(self, _: str, *event: Any) -> None:
        _reports.leave(self)


class _Replaced:
    """Functions of a namespace that are others while captures want it; otherwise they are torch's.

    `substitute` makes the other one, from the name and torch's own. Captures join for a pass and
    leave after it; one that an interrupt (Ctrl-C) keeps from leaving does so when it is freed.
    """

    def __init__(
        self, namespace: Any, names: Iterable[str], substitute: Callable[[str, Any], Any]
    ) -> None:
        self._namespace, self._names, self._substitute = namespace, tuple(names), substitute
        self._members: tuple[weakref.ref[Capture], ...] = ()
        self._before: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}
        self._lock = threading.RLock()  # a capture may be freed in here, by the same thread

    @property
    def captures(self) -> list[Capture]:
        """Those that have joined."""
        return [capture for member in self._members if (capture := member()) is not None]

    def join(self, capture: Capture) -> bool:
        """Whether it had not joined before."""
        with self._lock:
            if capture in self.captures:
                return False
            self._members = (*self._members, weakref.ref(capture, self._update))
            self._update()
            return True

    def leave(self, capture: Capture) -> None:
        with self._lock:
            self._members = tuple(m for m in self._members if m() is not capture)
            self._update()

    def _update(self, _: Any = None) -> None:
        with self._lock:
            self._members = tuple(m for m in self._members if m() is not None)
            if self._members and not self._ours:
                for name in self._names:
                    self._before[name] = getattr(self._namespace, name)
                    self._ours[name] = self._substitute(name, self._before[name])
                    setattr(self._namespace, name, self._ours[name])
            elif not self._members:
                ours, self._ours = self._ours, {}
                for name, function in ours.items():
                    if getattr(self._namespace, name) is function:
                        setattr(self._namespace, name, self._before[name])


def _reported(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = function(*args, **kwargs)
    if isinstance(output, Tensor) and not torch.compiler.is_compiling():
        for capture in _reports.captures:
            report = capture.met_grouped if name == "grouped_mm" else capture.met
            report(args, kwargs, output)
    return output


_reports = _Replaced(F, FUNCTIONS, lambda name, function: partial(_reported, name, function))
_unrolled = _Replaced(_VF, UNROLLED, lambda name, _: UNROLLED[name])


def _move(module: nn.Module, hook: Any, *, to_end: bool) -> None:
    """Let a module's forward hook run behind all others, or before them."""
    hooks: Any = module._forward_hooks
    hooks.move_to_end(hook.id, last=to_end)


def _in_the_graph(output: Tensor) -> Tensor:
    """A layer's output, or what it is a reshaped view of, as that of a Linear of three axes is.

    Where a view is changed in place (a ReLU behind the layer), the graph is made again without it.
    """
    base = output._base
    if base is None or base.numel() != output.numel():
        return output
    alone = base.shape == (1, *output.shape)  # a convolution of one example without a batch axis
    return base if alone or (base.is_contiguous() and output.is_contiguous()) else output


def logits_of(output: Any) -> Tensor | None:
    """The logits in a model's output: a tensor is them, an object may hold them as `.logits`.

    The latter is what Hugging Face models return. None if there are none.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


class BackPropagation:
    """Backward passes from the logits, whose gradients are used up as they come by.

    Only calls that no other call lies behind are what the pass is for; the gradients of the others
    are looked at on the way and freed, so that they are never there all at once. Which these are is
    found by a walk through the graph, and remembered for passes of the same calls.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[str, ...], frozenset[int]] = {}

    def __call__(
        self,
        logits: list[Tensor],
        vectors: list[Tensor],
        calls: list[Call],
        use: Callable[[Call, Tensor], None],
    ) -> None:
        """Call `use` with the gradient of sum(vector * logits) at each call's output.

        Not for calls that the logits ignore.
        """
        names = tuple(call.name for call in calls)
        cached_ends = self._ends.get(names)
        ends = _ends(logits, calls) if cached_ends is None else cached_ends
        missed = self._through(logits, vectors, calls, ends, use)
        if cached_ends is not None and missed and _ends(logits, calls) != cached_ends:
            # another graph than last time: what it has in other places is asked for by itself
            del self._ends[names]
            missed_calls = [calls[i] for i in missed]
            self._through(logits, vectors, missed_calls, frozenset(range(len(missed_calls))), use)
            return
        self._ends[names] = ends
        if len(self._ends) > GRAPHS_REMEMBERED:
            del self._ends[next(iter(self._ends))]  # the oldest

    def _through(
        self,
        logits: list[Tensor],
        vectors: list[Tensor],
        calls: list[Call],
        ends: frozenset[int],
        use: Callable[[Call, Tensor], None],
    ) -> list[int]:
        """A pass to the calls in `ends`; returns the calls that it did not come by."""
        missed = dict.fromkeys(range(len(calls)))

        def arrived(index: int, gradient: Tensor | None) -> None:
            if gradient is not None and index in missed:
                del missed[index]
                shape = calls[index].shape
                use(calls[index], gradient if gradient.shape == shape else gradient.reshape(shape))

        handles, targets = [], []
        for index, call in enumerate(calls):
            assert call.edge is not None
            node, output = call.edge.node, call.edge.output_nr
            if index in ends:
                targets.append((index, call.edge))
            else:
                look = partial(lambda i, o, given: arrived(i, given[o]), index, output)
                handles.append(node.register_prehook(look))
        try:
            edges = [edge for _, edge in targets]
            reached = torch.autograd.grad(
                logits, edges, vectors, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for (index, _), gradient in zip(targets, reached, strict=True):
            arrived(index, gradient)
        return list(missed)


def _ends(logits: list[Tensor], calls: list[Call]) -> frozenset[int]:
    """The calls that no other call lies behind, and those that the logits do not lead to."""
    call_nodes = {call.edge.node for call in calls if call.edge is not None}
    leads: dict[Any, bool] = {}  # whether a call lies behind a node
    roots = [head.grad_fn for head in logits]
    stack: list[tuple[Any, bool]] = [(node, False) for node in roots if node is not None]
    while stack:
        node, visited = stack.pop()
        if visited:
            behind = [parent for parent, _ in node.next_functions if parent is not None]
            leads[node] = any(parent in call_nodes or leads.get(parent, False) for parent in behind)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.next_functions if parent is not None)
    return frozenset(
        index
        for index, call in enumerate(calls)
        if call.edge is not None and not leads.get(call.edge.node, False)
    )


def wrappings(model: nn.Module) -> Iterator[nn.Module]:
    """The model, then what `torch.compile` or DistributedDataParallel has in it, and so on."""
    yield model
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    if inner is not None:
        yield from wrappings(inner)


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel among the `wrappings`."""
    kind = nn.parallel.DistributedDataParallel
    return next((wrapped for wrapped in wrappings(model) if isinstance(wrapped, kind)), None)


def innermost(model: nn.Module) -> nn.Module:
    """The last of the `wrappings`: the user's own module, whose forward pass is that of a rank."""
    return list(wrappings(model))[-1]


@contextmanager
def frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    """Batch norm in train mode without a trace: the running statistics are not updated in here."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    before = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]

    def write(norm: nn.Module, momentum: float | None, counter: Tensor | None) -> None:
        """Past nn.Module's own __setattr__, which costs more than a launch."""
        object.__setattr__(norm, "momentum", momentum)
        norm._buffers["num_batches_tracked"] = counter

    try:
        for norm, (_, counter) in zip(norms, before, strict=True):
            if counter is not None:  # without which SyncBatchNorm does not run
                counter = counter.clone() if isinstance(norm, nn.SyncBatchNorm) else None
            write(norm, 0.0, counter)
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            write(norm, momentum, batches)


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
