"""Watch a training run: measure probes at every n-th step of any torch optimizer and record them.

    with watch(model, optimizer, every=100) as watched:
        ...  # your own loop
        watched.log(loss=loss, test_loss=test_loss)
    watched.records.series("effective_lr/features.0")

It uses the optimizers' step hooks, so it works in plain loops and under Lightning or accelerate
(it looks through their optimizer wrappers). Between two records it adds microseconds to a step:
about ten where there are hundreds of parameters. The trainer of `decaylab train` uses the same
object, and tells it of steps itself.

A sharded model (`fully_shard`, tensor parallelism) is watched by all of its processes together: all
call `watch`, `resume` and `detach` (or leave the `with` block) alike. Each then has all numbers, of
the whole model, and the first one writes them. Processes send each other something in these calls
and in steps that are recorded, and nowhere else: `records`, `log` and `diagnose` may be used by one
alone. A `with` block that an error ends sends nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decaylab.curvature.capture import data_parallel
from decaylab.curvature.preserve import bare
from decaylab.errors import AT_LEAST_ONE, BadValue, Lacks, WrongType
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.networks.sharded import Team, is_sharded, put_back, refuse_flat_parameters, team_of
from decaylab.optim.kfac import KFAC
from decaylab.probes.applied import changed, check_call, floating
from decaylab.probes.layers import stepped_by
from decaylab.probes.registry import Probe, free_probes, probe_named
from decaylab.probes.rounds import torch_optimizer
from decaylab.probes.watching import Watch
from decaylab.records.rows import RowWriter, Tracker

Probes = Iterable[str | Probe] | Mapping[str | Probe, int]


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    every: int = 100,
    probes: Probes | str | None = None,
    inputs: Inputs = None,
    logits: LogitsRule = None,
    steps_per_epoch: int | None = None,
    folder: str | Path | None = None,
    trackers: Iterable[Tracker] = (),
) -> Watch:
    """Record probes after step 1 and after every `every`-th step of the optimizers.

    Works with any model and any torch optimizer. A probe that fails warns once and never stops the
    training. How each layer is stepped (lr, decay, ...) is also recorded, at the start and whenever
    it changes, so `diagnose` needs nothing but the records. An optimizer that starts to step this
    model later is noticed and watched too. Several processes that train one model (`fully_shard`,
    tensor parallelism, DistributedDataParallel) all call this; the first one writes.

    Args:
        model: the model that is trained, wrapped or not; where DistributedDataParallel wraps it,
            the wrapper itself, which says which process is the first. With `wrapper.module` each
            process would take itself for the only one, and write.
        optimizer: the optimizer that steps it, or a list; also wrappers that hold it as
            `.optimizer`.
        every: steps between two records.
        probes: names from `PROBES`, or your own `Probe`s; by default those that cost nothing and,
            with `inputs`, how the outputs react to each layer's scale, measured rarely. A mapping
            gives each probe its own steps between records. "diagnosis" adds to the defaults what
            `diagnose` needs for the other mechanisms: how updates correlate, the Jacobian norm (for
            tokens the Gauss-Newton norm), K-FAC's second-order share.
        inputs: a fixed batch for probes that run the model, and to find scale-invariant layers by
            experiment instead of by module order: a tensor, a tuple of arguments, a mapping of
            keyword arguments, or a function that takes the model and returns its output. Of a
            sharded model, all processes take the first one's tensors.
        logits: where the logits are, if the model's output is not a tensor and has no `logits`: a
            name, an index, or a function of the output. By default the first floating-point tensor
            of two or more axes.
        steps_per_epoch: for the epoch of each row, which is 0 without it.
        folder: also append records to `rows.jsonl` in this folder. An earlier run's rows in it are
            ignored, unless this run continues that one (`Watch.resume`).
        trackers: also send rows to these (`decaylab.integrations.trackers`). One that fails warns
            once and is dropped; `tracker.log(watched.records.rows)` sends the rows later.
    """
    wrapped = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [torch_optimizer(each) for each in wrapped]
    given, model = model, bare(model)
    if not isinstance(model, nn.Module):
        raise WrongType("model", model, "a torch module", "call watch(model, optimizer)")
    refuse_flat_parameters(model)
    put_back(model)
    chosen = _chosen(probes, every, optimizers, inputs)
    model_parameters = set(map(id, model.parameters()))
    for held in [stepped_by([each]) for each in optimizers] or [{}]:
        if model_parameters.isdisjoint(map(id, held)):
            remedy = "pass watch the model it was built with"
            raise Lacks("the optimizer", "parameter of this model", remedy)
    if inputs is not None:
        check_call(model, inputs)
    for probe in chosen:
        if probe.needs_inputs and inputs is None:
            remedy = "pass inputs=... to watch, because it runs the model"
            raise Lacks(f"the probe {probe.name!r}", "inputs", remedy)
    alone = hasattr(trackers, "log")
    trackers = () if alone else tuple(trackers)
    if alone or not all(hasattr(tracker, "log") for tracker in trackers):
        wanted = "a list of objects with log(rows), such as [TensorBoard(folder)]"
        raise BadValue("trackers", trackers, wanted)
    team, writer = team_of(model), None
    if team is not None:
        inputs = _shared(team, inputs, {probe.name: steps for probe, steps in chosen.items()})
    first = _writes(given, team)
    if folder is not None and first:
        writer = RowWriter(Path(folder) / "rows.jsonl")

    def make_folder() -> None:
        if writer is not None:
            writer.path.parent.mkdir(parents=True, exist_ok=True)

    if team is None:
        make_folder()
    else:
        team.by_first("watch(...)", make_folder)
    return Watch(
        model,
        optimizers,
        chosen,
        inputs=inputs,
        logits=logits,
        steps_per_epoch=steps_per_epoch,
        writer=writer,
        trackers=trackers if first else (),
        first=first,
    )


def reusable(probes: Probes | str | None) -> Probes | str | None:
    """Probes for several calls of `watch`; the first would use an iterator up."""
    return probes if probes is None or isinstance(probes, str | Mapping) else tuple(probes)


def _writes(model: nn.Module, team: Team | None) -> bool:
    """Whether this process writes the records: the first of those that train a model together."""
    if team is not None:
        return team.first
    wrapper = data_parallel(model)
    return wrapper is None or dist.get_rank(wrapper.process_group) == 0


def _shared(team: Team, inputs: Inputs, every: Mapping[str, int]) -> Inputs:
    """The first one's inputs, once all processes have called `watch` alike."""
    shapes: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    changed(inputs, note)
    team.meet("watch(...)", {"steps between records": every, "shapes of the inputs": shapes})
    return changed(inputs, lambda tensor: tensor if is_sharded(tensor) else team.from_first(tensor))


def _chosen(
    probes: Probes | str | None,
    every: int,
    optimizers: Sequence[torch.optim.Optimizer],
    inputs: Inputs,
) -> dict[Probe, int]:
    """The probes, and after how many steps each."""
    if probes is None:
        probes = (*free_probes(), *(("size_response",) if inputs is not None else ()))
    elif isinstance(probes, str):
        if probes != "diagnosis":
            raise BadValue("probes", probes, 'a list of names, or "diagnosis"')
        share = ("second_order_share",) if any(isinstance(o, KFAC) for o in optimizers) else ()
        function = "jacobian_norm" if inputs is None or floating(inputs) else "gn_norm"
        probes = (*free_probes(), "update_correlation", "size_response", function, *share)
    steps_of: dict[Any, int] = dict.fromkeys(probes, every)
    if isinstance(probes, Mapping) and all(isinstance(n, int) for n in probes.values()):
        steps_of = dict(probes)
    chosen = {}
    for probe, steps in steps_of.items():
        AT_LEAST_ONE.check("every", steps)
        chosen[probe if isinstance(probe, Probe) else probe_named(probe)] = steps
    AT_LEAST_ONE.check("every", every)
    return chosen
