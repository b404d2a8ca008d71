"""Every refusal of the curvature package: what it cannot measure, in one sentence with the remedy.

Each function returns nothing (or what it looked up) where all is well.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from decaylab.errors import (
    BadValue,
    Conflict,
    Damaged,
    Failed,
    Lacks,
    Mismatch,
    UnknownName,
    WrongType,
    check_name,
)
from decaylab.networks.sharded import is_sharded, refuse_flat_parameters

# -- planning --


def check_excluded(
    layers: Mapping[str, nn.Module], exclude: Iterable[str], is_layer: Callable[[nn.Module], bool]
) -> None:
    """Refuse names that are no module's, and modules that contain layers but are none."""
    for name in exclude:
        check_name("layer to exclude", name, layers)
        inside = [
            f"{name}.{child}".removeprefix(".")
            for child, module in layers[name].named_modules()
            if child and is_layer(module)
        ]
        if inside and not is_layer(layers[name]):
            remedy = f"it is a container; name the layers inside, such as {inside[0]!r}"
            raise UnknownName("layer to exclude", name, inside, remedy)


def refuse_without_blocks(blocks: Collection[str], owners: Iterable[nn.Module]) -> None:
    """Refuse a model without a layer that has a block; `owners` hold those it trains."""
    if blocks:
        return
    remedy = "none of its parameters is trained here: unfreeze some, or exclude fewer"
    if kinds := sorted({f"{type(owner).__module__}.{type(owner).__name__}" for owner in owners}):
        remedy = (
            f"its parameters are in {', '.join(kinds[:4])}; blocks are for torch's own layers "
            "(nn.Linear ...) and subclasses that inherit their forward, so use those, or a "
            "torch.optim optimizer"
        )
    raise Lacks("the model", "layer that K-FAC covers", remedy)


def one_device(parameters: Iterable[Tensor]) -> torch.device:
    """The device of all parameters."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        remedy = "move the model before building KFAC"
        raise BadValue("the devices of the parameters", sorted(map(str, devices)), "one", remedy)
    device = devices.pop()
    if device.type == "meta":
        remedy = "call model.to_empty(device=...) and give it its weights before building KFAC"
        raise BadValue("the device of the model", "meta", "one with memory", remedy)
    return device


# -- forward passes --


def refuse_replicas() -> NoReturn:
    """Refuse nn.DataParallel."""
    raise Conflict(
        ["K-FAC", "nn.DataParallel"],
        "the latter runs copies of the model side by side, whose passes cannot be told apart",
        "use DistributedDataParallel",
    )


class NotScriptable(Conflict, AttributeError):
    """torch.jit.script compiles hooks too, and asks for a name that ours do not have.

    Whoever else asks is used to objects without one.
    """

    def __init__(self) -> None:
        super().__init__(
            ["torch.jit.script", "K-FAC"],
            "it would have to compile the hooks that K-FAC observes the model with",
            "script another instance of the model, with this one's state_dict, or call"
            " optimizer.detach() when training is done (torch.export needs neither)",
        )


def refuse_uneven_calls(examples: Sequence[int]) -> None:
    """Refuse calls of one layer that cannot be matched example by example."""
    if len(set(examples)) > 1:
        calls = {"the largest call of a layer": max(examples), "the smallest": min(examples)}
        remedy = "build KFAC with sharing='expand'"
        raise Mismatch("number of examples in one forward pass", calls, remedy)


def refuse_overwritten(layer: str) -> NoReturn:
    """Refuse an input that is no longer what the layer saw."""
    raise Damaged(
        f"the input of layer {layer!r}",
        "it was changed in place after the layer saw it",
        "write x = x + y instead of x += y, and give each batch a new tensor",
    )


def refuse_single_batch(batches: Any) -> None:
    """Refuse a tensor where an iterable of batches is meant."""
    if isinstance(batches, Tensor):
        raise WrongType("batches", batches, "an iterable of batches", "pass one batch as [batch]")


def check_initial(sums: Mapping[str, Any]) -> None:
    """Refuse an initial pass that measured nothing, or nothing that is finite, of a layer."""
    if not sums:
        raise Lacks("the initial pass", "batches", "pass at least one to measure the curvature on")
    for name, measured in sums.items():
        if not all(bool(side.isfinite().all()) for side in measured.sides):
            remedy = "look for nan or inf in the batches and in the weights"
            raise Lacks("the initial pass", f"finite factors of layer {name!r}", remedy)


# -- logits --


def refuse_without_logits(model: nn.Module) -> NoReturn:
    """Refuse a refresh whose passes led to no logits."""
    raise Lacks(
        f"the forward pass of {type(model).__name__}",
        "logits for the refresh that is due",
        "build KFAC with the module that you call and that returns them as one tensor [..., C], "
        "or call opt.observe(logits) after the forward pass; leave a layer that does not lead to "
        'them, such as a value head, out with options=KFACOptions(exclude=("value",))',
    )


def refuse_logits_without_calls() -> NoReturn:
    """Refuse logits that are handed over twice, or too late."""
    raise Lacks(
        "opt.observe(logits)",
        "forward pass to observe",
        "call it once, right after the forward pass, and build KFAC with logits='observed' if "
        "the model returns a tensor",
    )


def refuse_unreached(reached: Collection[Any]) -> None:
    """Refuse logits that no observed layer leads to."""
    if not reached:
        remedy = "call opt.observe(logits) right after the forward pass that made them"
        raise Lacks("the graph of the logits", "covered layer of the last forward pass", remedy)


def check_heads(
    heads: Sequence[Tensor], mask: Tensor | None, device: torch.device, measurement: Any
) -> None:
    """Refuse heads that are not logits with classes last, on the device, with a graph."""
    for head in heads:
        if not isinstance(head, Tensor) or head.dim() < 2 or not head.is_floating_point():
            given = (head.dtype, list(head.shape)) if isinstance(head, Tensor) else type(head)
            remedy = (
                "pass them with opt.observe(logits) and logits='observed' (a single output "
                "per row as logits[..., None], a single row as logits[None])"
            )
            raise BadValue("the logits", given, "floating-point and of shape [..., C]", remedy)
        if not head.requires_grad:
            raise Lacks("the logits' tensor", "graph", "call opt.observe before detaching it")
        if head.device.type != device.type:
            devices = {"the logits": head.device, "the model KFAC was built with": device}
            raise Mismatch("device", devices, "move the model before building KFAC")
        if mask is not None and mask.shape != head.shape[:-1]:
            shapes = {"the mask": list(mask.shape), "the rows": list(head.shape[:-1])}
            raise Mismatch("shape", shapes, "give one entry per row of the logits")
    categorical = (measurement.curvature, measurement.likelihood) == ("fisher", "categorical")
    if categorical and any(head.shape[-1] == 1 for head in heads):
        remedy = "use likelihood='bernoulli' or 'gaussian'"
        raise Lacks("a categorical likelihood over one class", "curvature", remedy)


def check_classes(heads: Sequence[Tensor], before: tuple[int, ...] | None) -> tuple[int, ...]:
    """The number of classes of each head; refused if it has changed."""
    classes = tuple(head.shape[-1] for head in heads)
    if before is not None and classes != before:
        raise Mismatch(
            "number of classes",
            {"the first logits": before, "those of this pass": classes},
            "put the classes last and keep their number, and build KFAC with logits='observed' "
            "if what the model returns is not the logits",
        )
    return classes


# By likelihood: what makes probabilities of logits, and the loss that does it by itself.
LINKS = {
    "categorical": ("softmax", "cross_entropy"),
    "bernoulli": ("sigmoid", "binary_cross_entropy_with_logits"),
}


def check_graph(heads: Sequence[Tensor], outputs: Mapping[Node, Any], measurement: Any) -> None:
    """Refuse probabilities, logits with the classes in axis 1, and heads of an earlier pass.

    `outputs` has the sites whose outputs the nodes make.
    """
    categorical = (measurement.curvature, measurement.likelihood) == ("fisher", "categorical")
    link, loss = LINKS.get(measurement.likelihood, ("", ""))
    for head in heads:
        node: Any = get_gradient_edge(head).node
        if link and measurement.curvature == "fisher" and node.name() == f"{link.title()}Backward0":
            remedy = (
                f"the {measurement.likelihood} likelihood takes logits, not probabilities; leave "
                f"it out and use {loss}, which contains it, or pass what comes before it with "
                "opt.observe(logits) and logits='observed'"
            )
            raise BadValue("the end of the model", link, "its logits", remedy)
        while node.name().startswith("Upsample"):  # segmentation nets enlarge their logits
            node = node.next_functions[0][0]
        last = outputs.get(node)
        if last is not None and not last.kind.classes_last and categorical:
            remedy = (
                "they come from a convolution; build KFAC with logits='observed' and call "
                "opt.observe(logits.movedim(1, -1))"
            )
            raise BadValue("the logits' axis of classes", 1, "the last one", remedy)
        if outputs and len(heads) > 1 and outputs.keys().isdisjoint(nodes_behind(head)):
            remedy = "call opt.observe after each forward pass, with its logits"
            owner = "the graph of some of the logits"
            raise Lacks(owner, "covered layer of the last forward pass", remedy)


def refuse_reentrant_checkpoints(logits: Tensor, hidden: Collection[str]) -> None:
    """Refuse checkpoints that hide layers: `hidden` ran without grad."""
    if hidden and any("CheckpointFunction" in node.name() for node in nodes_behind(logits)):
        raise Conflict(
            ["K-FAC", f"reentrant activation checkpointing of layer {min(hidden)!r}"],
            "the latter hides the layer",
            "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
        )


def nodes_behind(tensor: Tensor) -> Iterator[Node]:
    """Every node of the graph that made a tensor, once, beginning with its own."""
    visited: set[Node] = set()
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            yield node
            visited.add(node)
            nodes.extend(parent for parent, _ in node.next_functions)


class Held:
    """The parameters and layers that KFAC was built with, which the model must keep.

    If one is replaced, KFAC would step a tensor that nothing uses, and training would silently
    stand still. `parameters` and `layers` are by name.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        layers: Mapping[str, nn.Module],
    ) -> None:
        self._model, self._parameters, self._layers = model, parameters, layers
        self._entries = [
            (registry, key, value)
            for module in model.modules()
            for registry in (module._parameters, module._modules)
            for key, value in registry.items()
        ]

    def check(self) -> None:
        """Refuse to go on without one of them. Cost: a look at each of the model's registries."""
        if all(registry.get(key) is value for registry, key, value in self._entries):
            return
        parameters, modules = set(self._model.parameters()), set(self._model.modules())
        gone = [f"parameter {n!r}" for n, p in self._parameters.items() if p not in parameters]
        gone += [f"layer {n!r}" for n, layer in self._layers.items() if layer not in modules]
        if gone:
            remedy = (
                "it was replaced (fully_shard, load_state_dict(assign=True), another module in its "
                "place), so KFAC would step what nothing uses; rebuild KFAC after such a change "
                "and load this one's state_dict() (if shards stand gathered after a forward pass, "
                "call model.reshard())"
            )
            raise Lacks("the model", f"{gone[0]} that KFAC was built with", remedy)


# -- saved states --


def check_saved_layers(saved: Collection[str], covered: Collection[str]) -> None:
    """Refuse the state of another set of layers."""
    remedy = "build KFAC with the options it was saved with"
    if surplus := sorted(set(saved) - set(covered)):
        raise Lacks("this KFAC", f"block for {_layers(surplus)} of the state dict", remedy)
    if missing := sorted(set(covered) - set(saved)):  # not covered yet by a version, or excluded
        remedy += f", such as KFACOptions(exclude=({', '.join(map(repr, missing))},))"
        raise Lacks("this state dict", f"state of {_layers(missing)}", remedy)


def _layers(names: Sequence[str]) -> str:
    """The first of them, for a sentence."""
    more = ", ..." * (len(names) > 3)
    return f"layer{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))}{more}"


def check_saved_shape(layer: str, saved: Tensor, buffer: Tensor) -> None:
    """Refuse the state of a layer of another shape."""
    if saved.shape != buffer.shape:
        shapes = {"this state dict": list(saved.shape), "the model": list(buffer.shape)}
        raise Mismatch(
            f"the shape of layer {layer!r}", shapes, "load what was saved from this model"
        )


# -- several ranks --


def several() -> bool:
    """Whether there are process groups, with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def refuse_static_graph(heads: Sequence[Tensor]) -> None:
    """Refuse to go backward through the end of a DistributedDataParallel(static_graph=True).

    It takes the first such pass for the loss's, and does not add up gradients in that one.
    """
    for node in (node for head in heads for node in nodes_behind(head)) if several() else ():
        wrapper: Any = getattr(node, "ddp_weakref", None)
        if wrapper is not None and wrapper().static_graph:
            raise Conflict(
                ["K-FAC's backward pass", "DistributedDataParallel's static_graph=True"],
                "the latter takes it for that of the loss",
                "build it without static_graph, or let the model return its logits (and call "
                "model.module in initialize)",
            )


def refuse_to_stay_away(model: nn.Module) -> None:
    """Refuse a batch without rows where ranks wait for each other in their extra passes."""
    if not several():
        return
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, nn.SyncBatchNorm | FSDPModule) for module in model.modules()):
        remedy = (
            "under SyncBatchNorm or fully_shard, others would wait for it; give every rank at "
            "least one row"
        )
        raise Lacks("the batch of this rank", "rows", remedy)


def mesh_of(model: nn.Module, parameters: Iterable[Tensor]) -> Any:
    """The mesh on which `fully_shard` has divided the parameters of a model; None: they are whole.

    Refused: whatever else lets no rank have whole parameters.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule

    refuse_flat_parameters(model)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if not sharded and not any(map(is_sharded, model.parameters())):
        return None
    if not sharded:
        _refuse_parallel_layers()
    meshes = []
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (p for p in parameters if p.requires_grad):
        if not is_sharded(parameter):
            remedy = (
                "call model.reshard() before building KFAC if a forward pass has gathered it; if "
                "fully_shard was told to ignore it, freeze it or let it be sharded"
            )
            raise Lacks(f"the parameter {names.get(parameter, '')!r}", "shards", remedy)
        meshes.append(mesh_of_parameter(parameter))
    if any(mesh != meshes[0] for mesh in meshes):
        remedy = "shard the model on one mesh"
        reason = "gradients are gathered by one group of ranks"
        raise Conflict(["K-FAC", "parameters sharded on several meshes"], reason, remedy)
    return meshes[0] if meshes else None


def mesh_of_parameter(parameter: Any) -> Any:
    """The mesh of a parameter, which is divided over its last axis and copied over the others."""
    from torch.distributed.tensor import Replicate, Shard

    *copied, divided = parameter.placements
    copies = all(isinstance(placement, Replicate) for placement in copied)
    if type(divided) is not Shard or not copies or len(copied) > 1:
        _refuse_parallel_layers()
    if parameter.device.type != parameter.device_mesh.device_type:
        raise Conflict(
            ["K-FAC", "parameters offloaded to the host (CPUOffloadPolicy)"],
            "its factors are made where the layers run",
            "call fully_shard without offload_policy",
        )
    return parameter.device_mesh


def _refuse_parallel_layers() -> NoReturn:
    raise Conflict(
        ["K-FAC", "tensor parallelism"],
        "no rank sees all inputs and outputs of a layer",
        "shard parameters with torch.distributed.fsdp.fully_shard alone, on a mesh of one axis or, "
        "with replicas, two",
    )


def group_of(mesh: Any, group: Any) -> Any:
    """The process group of all ranks of a mesh: the one that is given, if it is that one."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    if group is None:
        if mesh.ndim == 1:
            return mesh.get_group()
        group = dist.group.WORLD
    given = sorted(dist.get_process_group_ranks(group))
    if given != ranks:
        groups = {"the mesh of the parameters": ranks, "the process group": given}
        remedy = "pass the group of all ranks of the mesh, as KFACOptions(process_group=...)"
        raise Mismatch("ranks", groups, remedy)
    return group


def check_ranks(*, early: bool, wrapper: Any) -> None:
    """Refuse ranks that would drift apart, or wait for one that never arrives."""
    if early and several():
        remedy = (
            "it was built before the process group, so its factors would cover only this rank's "
            "rows; build it after init_process_group (or after TrainingArguments or Accelerator(), "
            "which may call it)"
        )
        raise Lacks("this KFAC", "process group", remedy)
    if wrapper is not None and wrapper._join_config.enable:
        raise Conflict(
            ["K-FAC", "model.join()"],
            "a rank may leave before the others, which would wait for its part of the factors",
            "give all ranks the same number of batches, as DistributedSampler does (after a "
            "join(), which torch leaves on, wrap the network again)",
        )


def refuse_own_gradients(wrapper: Any, parameters: Mapping[str, Sequence[Tensor]]) -> None:
    """Refuse layers that the wrapper ignores: their gradients are each rank's own.

    And those that it met frozen, which it knows by their number alone. `parameters` by layer.
    """
    if wrapper is None:
        return
    trained = sum(p.requires_grad for p in wrapper._module_parameters)
    summed = wrapper._get_ddp_logging_data()["num_parameter_tensors"]
    if trained > summed:
        raise Mismatch(
            "number of trained parameters",
            {"the model": trained, "DistributedDataParallel": summed},
            "it synchronises only what was not frozen when it was built, so the ranks would drift "
            "apart; unfreeze first, then wrap the network again and build KFAC with that wrapper",
        )
    common = {*wrapper._module_parameters, *wrapper._delay_all_reduce_params}
    for name, layer_parameters in parameters.items():
        if any(p.requires_grad for p in set(layer_parameters) - common):
            raise Lacks(
                "DistributedDataParallel",
                f"common gradients of layer {name!r}",
                "it was told to ignore that layer, so the ranks would drift apart; let it handle "
                "every layer that KFAC covers, or exclude this one (KFACOptions)",
            )


def check_equal_shares(size: int, own: Mapping[str, Any], total: Mapping[str, Any]) -> None:
    """Refuse different numbers of rows, by layer, where all ranks should have as many."""
    for name, rows in own.items():
        if float(rows) * size != float(total[name]):
            shares = {"this rank": float(rows), "the mean of all": float(total[name]) / size}
            remedy = "give each rank the same number, or leave equal_shares out of KFACOptions"
            raise Mismatch("number of rows", shares, remedy)


def refuse_captured_ranks(device: torch.device) -> None:
    """Refuse a CUDA graph: it would not wait for the other ranks."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Conflict(
            ["a step of several ranks", "a CUDA graph"],
            "the host has to read what each rank has seen",
            "call KFAC.step() outside of graphs",
        )


def check_ranks_agree(size: int, failures: float, own: int, steps: float, squares: float) -> None:
    """Refuse to go on where a rank failed, or is at another step than this one."""
    if failures:
        reason = f"on {failures:.0f} of the {size} ranks"
        raise Failed("measuring the curvature", reason, "see the error that they raised")
    if steps**2 != squares * size:  # their spread
        numbers = {"this rank's KFAC": own, "the mean of all ranks'": steps / size}
        remedy = "call load_state_dict on every rank, and step() the same number of times"
        raise Mismatch("the step they are at", numbers, remedy)
