"""Which layers of a network can be rescaled, alone or together, without changing its logits.

Scaling: everything is relative to the size |z| of the logits z on the given batch, Euclidean over
all of them, nothing averaged. With W_l -> e^(s_l) W_l for every layer l, the columns

    J_l = d z / d s_l = (d z / d W_l) W_l

are the logits' derivatives along each layer's own weights. A layer is scale-invariant by itself
where J_l = 0 (Eq. 8). Layers are invariant *together* where a combination vanishes,
sum_l e_l J_l = 0: in a pre-norm transformer the embedding and all that writes into the residual
stream (e_l = 1), or a query and a key projection (1 and -1). Where the combination is d z, the
logits are multiplied: a^e_l on the layers makes them a^d as large (the head: d = 1).

Exponents are found as whole numbers and then tried out: the layers are multiplied by 2^e_l, which
is exact in floating point, and the logits compared with 2^d times what they were. A layer by itself
is doubled, halved and removed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from decaylab.errors import POSITIVE, DecaylabError, check_name
from decaylab.networks.calling import Inputs, LogitsRule, call, call_with
from decaylab.networks.parameters import find_layers
from decaylab.networks.rescaling import (
    INVARIANCE_THRESHOLD,
    RepeatedForward,
    run_order,
    undisturbed,
)
from decaylab.networks.roles import roles
from decaylab.networks.sharded import Team, scale_derivative

ENTRIES = 2**16  # of the logits, drawn at random, that columns are compared on
DEPENDENT = 0.05  # part of a column that may be left over where others make it up
LARGEST_EXPONENT = 8
DENOMINATORS = (1, 2, 3, 4)


@dataclass(frozen=True)
class SizeResponse:
    """How the logits answer to a scale: derivatives by its logarithm, relative to |z|.

    Times 0.01 they are the change per percent. `size`: d log|z|, the part along the logits;
    `direction`: the angle in radians by which the logits turn. Exact invariance is 0 and 0.
    """

    size: float
    direction: float

    @property
    def total(self) -> float:
        """|dz| / |z|, both parts together."""
        return math.hypot(self.size, self.direction)


@dataclass(frozen=True)
class ScaleGroup:
    """Layers that, times a^exponent each, leave the logits times a^degree.

    Attributes:
        exponents: layer -> whole number, none of them 0.
        degree: 0 where the logits do not change.
        defect: what doubling (a = 2) leaves as a difference, relative to the logits.
    """

    exponents: Mapping[str, int]
    degree: int
    defect: float

    @property
    def together(self) -> bool:
        """Whether the same shrinking of all its layers does not change the logits."""
        return self.degree == 0 and set(self.exponents.values()) == {1}


@dataclass(frozen=True)
class Invariance:
    """What rescaling layers does to the logits of a network, as measured at one moment.

    Attributes:
        layers: every module with trained parameters (of a model that is frozen whole, with any), in
            the order in which they run first. A layer is its
            weight and bias, a normalisation its gain and shift; the learnt gain of weight
            normalisation goes by its parameter's name. Of tied weights, the module that `roles`
            names.
        defects: layer -> relative change of the logits when it alone is doubled; nan where the
            logits do not depend on it at all, so that nothing can be known.
        alone: the layers that are invariant by themselves.
        groups: of the other layers, those that are rescaled together: one for each dimension of the
            space of rescalings that the logits do not see, or see as a factor.
        gram, along: <J_k, J_l> / |z|^2 and <J_l, z> / |z|^2.
        adapters: the layers that only add to a frozen network (`_adapters`).
    """

    layers: tuple[str, ...]
    defects: Mapping[str, float]
    alone: frozenset[str]
    groups: tuple[ScaleGroup, ...]
    gram: Tensor
    along: Tensor
    adapters: frozenset[str] = frozenset()

    def invariant(self, layer: str) -> bool | None:
        """Whether the layer is invariant by itself; None if it cannot be known now.

        That is where the logits do not depend on it: it is unused or zero, or stands before a gain
        of zero. Ask again when training has moved it.
        """
        if math.isnan(self.defects[layer]):
            return None
        return layer in self.alone

    def together(self, layer: str) -> tuple[str, ...]:
        """The layers of the smallest group with this one that can be shrunk as one; () if none."""
        groups = [group for group in self.groups if group.together and layer in group.exponents]
        return (
            tuple(min(groups, key=lambda group: len(group.exponents)).exponents) if groups else ()
        )

    def size_response(self, layer: str) -> SizeResponse:
        """How the logits answer to the scale of one layer."""
        return self.response_along({layer: 1.0})

    def response_along(self, rates: Mapping[str, float]) -> SizeResponse:
        """How the logits answer to layers that are scaled together, each at its own rate.

        Decay's own direction has the rates lr * weight_decay of each layer: a total that is small
        beside those of the layers alone says that decay, as shrinking, is not seen by the logits.
        """
        for layer in rates:
            check_name("layer", layer, self.layers)
        vector = torch.tensor([rates.get(layer, 0.0) for layer in self.layers], dtype=torch.float64)
        along, square = float(vector @ self.along), float(vector @ self.gram @ vector)
        return SizeResponse(along, math.sqrt(max(square - along**2, 0.0)))

    def unseen(self, rates: Mapping[str, float]) -> bool | None:
        """Whether the logits do not see layers being scaled together at these rates.

        None if one of them cannot be known (`invariant`). Not seen is what moves the logits by
        less than `DEPENDENT` of what the layer that moves them most would do alone, and every layer
        that is invariant by itself.
        """
        active = {layer: rate for layer, rate in rates.items() if rate}
        total = self.response_along(active).total
        if any(self.invariant(layer) is None for layer in active):
            return None
        others = [layer for layer in active if layer not in self.alone]
        singly = [abs(active[layer]) * self.size_response(layer).total for layer in others]
        return not others or total < DEPENDENT * max(singly)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        responses = {layer: self.size_response(layer) for layer in self.layers}
        return {
            "layers": {
                layer: {
                    "invariant": self.invariant(layer),
                    "defect": None if math.isnan(self.defects[layer]) else self.defects[layer],
                    "adapter": layer in self.adapters,
                    "together": list(self.together(layer)),
                    "size": responses[layer].size,
                    "direction": responses[layer].direction,
                }
                for layer in self.layers
            },
            "groups": [
                {"exponents": dict(g.exponents), "degree": g.degree, "defect": g.defect}
                for g in self.groups
            ],
        }


def measure_invariance(
    model: nn.Module, inputs: Inputs, *, logits: LogitsRule = None
) -> Invariance:
    """Find which layers can be rescaled, alone or together, and how the logits respond to each.

    Args:
        model: any module. In train mode on this batch (batch statistics, one dropout mask); its
            parameters, buffers, modes, gradients and torch's generators are left as they were.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a function that
            takes the model and returns its output. Two or more examples under batch normalisation.
        logits: the name, the index or a function of the output, where it holds more than the
            logits.

    Parametrised weights, 16-bit weights and autocast are covered. The eps of a normalisation is
    part of the function, so invariance is a matter of degree: the defect is given, and has to be
    below `INVARIANCE_THRESHOLD` of what the layer does to the logits at all. A weight and its bias
    are one layer: where only one of them decays, a group holds as far as the bias is small. Groups
    are sought among weights first, then with gains. Derivatives are forward-mode ones, or
    differences where an operation has none. Cost: per layer one forward pass with a derivative and
    one to four without; one more per group and, where most weights are frozen, per trained layer.
    """
    units = _units(model, inputs)
    if not units:
        empty = torch.zeros(0, dtype=torch.float64)
        return Invariance((), {}, frozenset(), (), empty.view(0, 0), empty)
    with torch.inference_mode(False), undisturbed(model):
        evaluate = RepeatedForward(model, inputs, logits)
        reference, coarsest = _reference(evaluate)
        why = "nothing can be compared to them"
        POSITIVE.check("the size of the logits", evaluate.size(reference), why)
        trials = _Trials(evaluate, units, reference, coarsest)
        columns = _columns(evaluate, units, reference, coarsest)
        layers = find_layers(model)
        dependent = [name for name in units if trials.each[name].invariant is False]
        # what runs last is taken as given, and what runs before is made up of it
        order = [name for name in reversed(dependent) if name in layers]
        order += [name for name in reversed(dependent) if name not in layers]
        groups = _groups(columns, trials, order)
        adapters = _adapters(model, trials)
    return Invariance(
        layers=tuple(units),
        defects={name: trial.defect for name, trial in trials.each.items()},
        alone=frozenset(name for name, trial in trials.each.items() if trial.invariant),
        groups=tuple(groups),
        gram=columns.gram,
        along=columns.along,
        adapters=adapters,
    )


Units = Mapping[str, Sequence[Tensor]]
"""Layer -> the parameters that are rescaled as one."""


def _units(model: nn.Module, inputs: Inputs) -> dict[str, list[Tensor]]:
    """Every floating-point or complex parameter in one unit, in the order in which they run first.

    Units of which nothing is trained are left out, unless that is all of them.
    """
    layers, known = find_layers(model), roles(model)
    units: dict[str, list[Tensor]] = {}
    modules: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        layer = known[name].layer
        apart = layer in layers and all(parameter is not p for p in layers[layer].scaled)
        unit = name if apart else layer
        alone = layer == name and layer not in layers  # a vector without a layer
        in_layer = layers[layer].module if layer in layers else layer
        modules[unit] = name.rpartition(".")[0] if alone else in_layer
        units.setdefault(unit, []).append(parameter)
    if not units:
        return {}
    trained = {k: ps for k, ps in units.items() if any(p.requires_grad for p in ps)}
    units = trained or units
    place = {name: at for at, name in reversed(list(enumerate(run_order(model, inputs))))}
    return {
        name: units[name] for name in sorted(units, key=lambda u: place.get(modules[u], math.inf))
    }


def _reference(evaluate: RepeatedForward) -> tuple[list[Tensor], torch.dtype]:
    """The logits, and the coarsest number format that a module of the model computes in."""
    formats = {torch.float64}

    def note(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            formats.add(output.dtype)

    handles = [module.register_forward_hook(note) for module in evaluate.model.modules()]
    try:
        reference = evaluate()
    finally:
        for handle in handles:
            handle.remove()
    formats |= {tensor.dtype for tensor in reference}
    return reference, max(formats, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass(frozen=True)
class _Trial:
    """What doubling one layer does; `invariant` is None if the logits do not depend on it."""

    defect: float
    invariant: bool | None


class _Trials:
    """Layers multiplied by powers of two, and how far the logits are from what they should be."""

    def __init__(
        self,
        evaluate: RepeatedForward,
        units: Units,
        reference: list[Tensor],
        coarsest: torch.dtype,
    ):
        self.evaluate, self.units, self.reference = evaluate, units, reference
        self.size = evaluate.size(reference)
        self.noise = 4 * torch.finfo(coarsest).eps
        self.each = {name: self._alone(name) for name in units}

    def _alone(self, name: str) -> _Trial:
        change = self._change({name: 2.0})
        if change >= INVARIANCE_THRESHOLD:
            return _Trial(change, False)
        removal = self._change({name: 0.0})
        if removal == math.inf:  # a norm of nothing, without eps
            removal = self._change({name: -1.0})
        if removal <= self.noise:
            return _Trial(math.nan, None)
        # halved too: what saturates, as attention does, hardly answers to doubling
        either = max(change, self._change({name: 0.5}))
        if either < INVARIANCE_THRESHOLD * min(removal, 1.0):
            return _Trial(change, True)
        return _Trial(math.nan, None) if either <= self.noise else _Trial(change, False)

    def group(self, exponents: Mapping[str, int], degree: int) -> float:
        """|z' - 2^d z| / |2^d z| where each layer is times 2^exponent."""
        return self._change({name: 2.0**e for name, e in exponents.items()}, 2.0**degree)

    def without(self, parameters: Iterable[Tensor]) -> float:
        """|z' - z| / |z| where these are zero."""
        return self._changed([(parameter, 0.0) for parameter in parameters])

    def _change(self, factors: Mapping[str, float], expected: float = 1.0) -> float:
        scaled = [(p, factor) for name, factor in factors.items() for p in self.units[name]]
        return self._changed(scaled, expected)

    def _changed(self, scaled: Sequence[tuple[Tensor, float]], expected: float = 1.0) -> float:
        outputs = [tensor / expected for tensor in self.evaluate.rescaled(scaled)]
        change = self.evaluate.distance(outputs, self.reference) / self.size
        return math.inf if math.isnan(change) else change


def _adapters(model: nn.Module, trials: _Trials) -> frozenset[str]:
    """The trained layers without which a network, most of it frozen, answers much as it does.

    LoRA's, say: without all of them its logits are nearer to z than 0 is. Not the layers that leave
    nothing when they are removed (a new head), nor those that are scale-invariant.
    """
    trained = {k: [p for p in ps if p.requires_grad] for k, ps in trials.units.items()}
    count = sum(p.numel() for parameters in trained.values() for p in parameters)
    if 2 * count >= sum(parameter.numel() for parameter in model.parameters()):
        return frozenset()
    added = {
        name: parameters
        for name, parameters in trained.items()
        if parameters and not trials.each[name].invariant and trials.without(parameters) < 1
    }
    together = [parameter for parameters in added.values() for parameter in parameters]
    return frozenset(added) if trials.without(together) < 1 else frozenset()


@dataclass(frozen=True)
class _Columns:
    """What is needed of J_l and of the logits z, at some of their entries, in float64.

    Attributes:
        names: the layers.
        gram, along: as `Invariance` has them.
        triangle: of their QR decomposition: columns with the lengths and angles of z and each J_l.
    """

    names: tuple[str, ...]
    gram: Tensor
    along: Tensor
    triangle: Tensor

    @classmethod
    def of(
        cls, names: tuple[str, ...], matrix: Tensor, logits: Tensor, team: Team | None
    ) -> _Columns:
        """From J_l, [entries, layers]; of the first process, where there are several."""
        square = float(logits @ logits)
        joined = torch.cat([logits[:, None], matrix], dim=1)
        lengths = torch.linalg.vector_norm(joined, dim=0)
        unit = joined / torch.where(lengths > 0, lengths, 1.0)
        triangle = torch.linalg.qr(unit, mode="r").R * lengths  # has their angles, and few rows
        products = (matrix.T @ matrix / square, logits @ matrix / square, triangle)
        if team is not None:
            products = tuple(team.from_first(product) for product in products)  # type: ignore[assignment]
        return cls(names, *products)


def _columns(
    evaluate: RepeatedForward, units: Units, reference: list[Tensor], coarsest: torch.dtype
) -> _Columns:
    generator, most = torch.Generator().manual_seed(0), ENTRIES // len(reference)
    chosen = [
        torch.randint(tensor.numel(), (most,), generator=generator)
        if tensor.numel() > most
        else torch.arange(tensor.numel())
        for tensor in reference
    ]

    def at_chosen(tensors: Iterable[Tensor]) -> list[Tensor]:
        flat = [tensor.detach().flatten() for tensor in tensors]
        pairs = zip(flat, chosen, strict=True)
        return [tensor[places.to(tensor.device)].double().cpu() for tensor, places in pairs]

    logits = at_chosen(reference)
    # several outputs count alike: the head of a small one is none whose size hardly matters
    lengths = [float(torch.linalg.vector_norm(part)) for part in logits]
    scales = [length if length > 0 and len(logits) > 1 else 1.0 for length in lengths]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part / scale for part, scale in zip(parts, scales, strict=True)])

    def column(parameters: Sequence[Tensor]) -> Tensor:
        try:
            return joined(at_chosen(_derivative(evaluate, parameters)))
        except DecaylabError:  # an operation without a forward-mode derivative
            ratio = 1 + (2**-6 if torch.finfo(coarsest).bits > 16 else 2**-4)
            ends = [evaluate.rescaled([(p, by) for p in parameters]) for by in (ratio, 1 / ratio)]
            larger, smaller = (joined(at_chosen(end)) for end in ends)
            return (larger - smaller) / (2 * math.log(ratio))

    columns = [column(parameters) for parameters in units.values()]
    matrix = torch.stack(columns, dim=1)
    return _Columns.of(tuple(units), matrix, joined(logits), evaluate.team)


class _Called(nn.Module):
    """A model with its inputs: what `call_with` needs where inputs are a function."""

    def __init__(self, model: nn.Module, inputs: Inputs):
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self) -> Any:
        return call(self.model, self.inputs)


def _derivative(evaluate: RepeatedForward, parameters: Sequence[Tensor]) -> list[Tensor]:
    """D logits / d log of a factor on these parameters; one forward pass."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        # torch scripts its own decompositions when forward mode is first used
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
        if evaluate.team is not None:
            pairs = scale_derivative(evaluate.model, parameters, evaluate)
            return [derivative for _, derivative in pairs]
        return _dual_derivative(evaluate, parameters)


def _dual_derivative(evaluate: RepeatedForward, parameters: Sequence[Tensor]) -> list[Tensor]:
    called, chosen = _Called(evaluate.model, evaluate.inputs), {id(p) for p in parameters}
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(p.detach(), p.detach())
            for name, p in called.named_parameters()
            if id(p) in chosen
        }
        outputs = evaluate.output_of(called, lambda model: call_with(model, duals))
        pairs = [forward_ad.unpack_dual(tensor) for tensor in outputs]
        return [torch.zeros_like(z) if dz is None else dz for z, dz in pairs]


def _groups(columns: _Columns, trials: _Trials, order: Sequence[str]) -> list[ScaleGroup]:
    """Layer by layer: is its column made up of those before it, in whole numbers?

    A column that is, is a group, if trying it out agrees; one that is not, others may be made of.
    The logits themselves are the first.
    """
    place = {name: at for at, name in enumerate(columns.names, start=1)}
    order = [name for name in order if columns.triangle[:, place[name]].any()]
    chosen = columns.triangle[:, [0, *(place[name] for name in order)]]
    lengths = torch.linalg.vector_norm(chosen, dim=0)
    triangle = chosen / lengths
    groups, independent = [], [0]
    for at, name in enumerate(order, start=1):
        basis, column = triangle[:, independent], triangle[:, at]
        shares = torch.linalg.lstsq(basis, column[:, None], driver="gelsd").solution[:, 0]
        residual = float(torch.linalg.vector_norm(column - basis @ shares))
        if residual < DEPENDENT:
            factors = shares * lengths[at] / lengths[independent]
            group = _tried(name, [order[g - 1] for g in independent[1:]], factors.tolist(), trials)
            if group is not None:
                groups.append(group)
                continue
        independent.append(at)
    return groups


def _tried(
    name: str, others: Sequence[str], factors: Sequence[float], trials: _Trials
) -> ScaleGroup | None:
    """J_name = factors[0] z + sum factors[k] J_k as whole exponents, if doubling bears them out."""
    exact = [1.0, factors[0], *(-factor for factor in factors[1:])]
    for denominator in DENOMINATORS:
        rounded = [round(denominator * value) for value in exact]
        if all(abs(w - denominator * v) < 0.2 for w, v in zip(rounded, exact, strict=True)):
            break
    else:
        return None
    if max(map(abs, rounded)) > LARGEST_EXPONENT:
        return None
    degree = rounded.pop(1)
    by_name = dict(zip([name, *others], rounded, strict=True))
    exponents = {n: by_name[n] for n in trials.units if by_name.get(n)}  # in order of running
    defect = trials.group(exponents, degree)
    largest = max(trials.each[n].defect for n in exponents)
    if defect < INVARIANCE_THRESHOLD * min(largest, 1.0):
        return ScaleGroup(exponents, degree, defect)
    return None
