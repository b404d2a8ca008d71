"""Which layers are held: those that decay, and whose size and rotation can be set."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.preserve import bare
from decaylab.errors import DecaylabError, Lacks, WrongType, check_name
from decaylab.networks import roles
from decaylab.networks.parameters import find_layers
from decaylab.networks.sharded import whole
from decaylab.optim.decay import decay_of
from decaylab.optim.laws import law_of
from decaylab.optim.optimizer_behaviour import unwrapped
from decaylab.probes.layers import layers_of
from decaylab.training.interventions import has_damping_path

SCOPES = ("all", "conv", "fc")


class LayerNote(Enum):
    """What is to be said about a layer in the scope of an attribution."""

    FROZEN = "frozen"
    TIED = "tied"
    SPARSE = "sparse"
    COMPLEX = "complex"
    ZERO = "zero"
    SEVERAL_STEPS = "several steps in one"
    OWN_WEIGHTS = "stepped as an average of other weights"
    SPLIT = "split between optimizers"
    NOT_STEPPED = "not stepped"

    @property
    def held(self) -> bool:
        """Whether such a layer is held all the same."""
        return self is LayerNote.TIED


WHY_NOT_HELD = {
    LayerNote.FROZEN: "it is frozen, so nothing changes it",
    LayerNote.SPARSE: "its gradients are sparse; build its nn.Embedding with sparse=False",
    LayerNote.COMPLEX: "its weight is complex, and paths are measured on real numbers; store it as"
    " its real and imaginary parts (torch.view_as_real)",
    LayerNote.ZERO: "its weight is zero and has no direction; start from a later checkpoint",
    LayerNote.SEVERAL_STEPS: "its optimizer takes several steps in one (LBFGS), which cannot be"
    " rescaled afterwards; use another optimizer",
    LayerNote.OWN_WEIGHTS: "its optimizer steps separate weights and the layer's are their"
    " average (schedule-free), so paths do not hold; use another optimizer",
    LayerNote.SPLIT: "several optimizers step its tensors; use one for all of them",
    LayerNote.NOT_STEPPED: "no optimizer steps it; return all of them from make(seed)",
}


SEVERAL_STEPS = (torch.optim.LBFGS,)
"""Optimizers whose step is a line search of several: it cannot be scaled afterwards."""


@dataclass(frozen=True)
class Selection:
    """The layers that an attribution holds.

    Attributes:
        optimizers: those that step the model, without wrappers.
        weights: held layer -> the tensors of its weight.
        notes: layer -> why it is not held, or what to know about it.
        others: parameters that decay and are not held (biases, gains, layers left out), by name.
        damping: whether a damping path is one of the factors (K-FAC at a fixed damping).
        direction: whether decay also changes the direction of a step (L2 before a
            preconditioner), which no path carries.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    weights: dict[str, list[Tensor]]
    notes: dict[str, LayerNote]
    others: Mapping[str, Tensor]
    damping: bool
    direction: bool

    @property
    def held(self) -> list[Tensor]:
        """Every held tensor."""
        return [part for parts in self.weights.values() for part in parts]


def select(
    model: nn.Module,
    optimizers: Any,
    only: str | Sequence[str] = "all",
    *,
    decayed: bool = True,
) -> Selection:
    """The layers of `only` whose weight decays: "all", "conv", "fc" (the last), or names.

    With `decayed=False` those that do not decay too.
    """
    model = bare(model)
    listed = _listed(optimizers)
    groups = {id(p): (o, g) for o in listed for g in o.param_groups for p in g["params"]}
    layers = {name: list(parts.values()) for name, parts in layers_of(model).weights.items()}
    frozen = _frozen(model, layers.keys())
    chosen = _chosen(model, [*layers, *frozen], only)
    weights: dict[str, list[Tensor]] = {}
    notes = {name: LayerNote.FROZEN for name in frozen if name in chosen}
    tied, homes = _tied(model), {name: x.module for name, x in find_layers(model).items()}
    for name in (layer for layer in chosen if layer not in frozen):
        parts = layers[name]
        owners = [groups.get(id(part)) for part in parts]
        stepped = [owner for owner in owners if owner is not None]
        if not stepped:
            notes[name] = LayerNote.NOT_STEPPED
            continue
        if decayed and not any(decay_of(group, optimizer)[1] for optimizer, group in stepped):
            continue
        if note := _note(model.get_submodule(homes[name]), parts, stepped, tied):
            notes[name] = note
        if note is None or note.held:
            weights[name] = parts
    if not weights:
        raise _no_layer(notes, only)
    held = {id(part) for parts in weights.values() for part in parts}
    known = [(n, p, *groups[id(p)]) for n, p in model.named_parameters() if id(p) in groups]
    others: dict[str, Tensor] = {
        n: p for n, p, o, g in known if id(p) not in held and decay_of(g, o)[1]
    }
    holders = {id(groups[i][0]): groups[i][0] for i in held}.values()
    return Selection(
        optimizers=tuple(listed),
        weights=weights,
        notes=notes,
        others=others,
        damping=any(map(has_damping_path, holders)),
        direction=any(_turns(*groups[i]) for i in held),
    )


def _listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    listed = [unwrapped(optimizer) for optimizer in several]
    for optimizer in listed:
        if not isinstance(optimizer, torch.optim.Optimizer):
            remedy = "let make(seed) return (model, optimizer or list of them, step, evaluate)"
            raise WrongType("the optimizer", optimizer, "a torch optimizer", remedy)
        if isinstance(getattr(type(optimizer), "param_groups", None), property):
            raise WrongType(
                "the optimizer",
                optimizer,
                "one with its own param groups",
                "use the optimizer that it wraps, without the wrapper",
            )
    return listed


def _chosen(model: nn.Module, layers: list[str], only: str | Sequence[str]) -> list[str]:
    if only == "all":
        return layers
    heads = {role.layer for role in roles(model).values() if role.role == "head"}
    if only == "fc":
        return [layer for layer in layers if layer in heads]
    if only == "conv":
        return [layer for layer in layers if layer not in heads]
    names = only.split(",") if isinstance(only, str) else list(only)
    for name in names:
        check_name("layer to hold", name, ["all", "conv", "fc", *layers])
    return [layer for layer in layers if layer in names]


def _frozen(model: nn.Module, trained: Collection[str]) -> list[str]:
    """Layers whose weight no step moves."""
    known = roles(model).values()
    weights = {role.layer for role in known if role.role in ("invariant", "weight", "head")}
    return sorted(weights - set(trained))


def _note(
    module: nn.Module,
    parts: list[Tensor],
    owners: list[tuple[torch.optim.Optimizer, dict[str, Any]]],
    tied: set[int],
) -> LayerNote | None:
    optimizers = [optimizer for optimizer, _ in owners]
    if len(optimizers) < len(parts) or len({id(o) for o in optimizers}) > 1:
        return LayerNote.SPLIT
    if isinstance(optimizers[0], SEVERAL_STEPS):
        return LayerNote.SEVERAL_STEPS
    if law_of(*owners[0]).name == "schedule-free":
        return LayerNote.OWN_WEIGHTS
    if getattr(module, "sparse", False):
        return LayerNote.SPARSE
    if any(part.is_complex() for part in parts):
        return LayerNote.COMPLEX
    if not all(bool(whole(part.detach()).any()) for part in parts):
        return LayerNote.ZERO
    return LayerNote.TIED if any(id(part) in tied for part in parts) else None


def _tied(model: nn.Module) -> set[int]:
    """Parameters that several modules share."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _turns(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the decay of this group turns steps: L2 behind which a preconditioner stands."""
    if decay_of(group, optimizer)[0] != "l2":
        return False
    return law_of(optimizer, group).name != "sgd"


def _no_layer(notes: Mapping[str, LayerNote], only: str | Sequence[str]) -> DecaylabError:
    """Why nothing can be held."""
    if notes:
        layer, note = next(iter(notes.items()))
        return DecaylabError(f"no layer that decays can be held; {layer}: {WHY_NOT_HELD[note]}")
    if only != "all":
        return Lacks(f"{only}", "layer that decays", "choose others, or leave the choice out")
    remedy = "build it with weight decay; the runs without are derived from it"
    return Lacks("the optimizer", "layer that decays", remedy)
