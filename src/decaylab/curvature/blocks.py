"""The blocks of a model: which parameters are preconditioned together, and why others are not."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature import guards
from decaylab.curvature.kinds import base_of, kind_of
from decaylab.curvature.kinds.embedding import Embedding
from decaylab.curvature.kinds.grouped import PROJECTION
from decaylab.curvature.kinds.kind import Part, Reason, Shape, Site
from decaylab.curvature.kinds.linear import Linear


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters whose curvature is one Kronecker product, and where their matrix meets vectors.

    Almost always at one `site`. A head that is tied to an embedding has that as `tied`, and an
    embedding has what `F.linear` may do with its weight: the block is then a sum of two products,
    and is approximated by one (`factors.merged`).
    """

    name: str
    site: Site
    tied: Site | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Whose parameters they are first, where there are two."""
        return (self.site,) if self.tied is None else (self.site, self.tied)

    @property
    def shape(self) -> Shape:
        """Of its entries."""
        return self.site.shape

    @property
    def groups(self) -> int:
        """Number of stacked entries."""
        return self.site.groups


@dataclass(frozen=True)
class Placement:
    """Whether a parameter is in a block: its name, or None; why; and the names the reason needs."""

    block: str | None
    reason: Reason
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Blocks:
    """The blocks by name, and the place of each parameter."""

    by_name: dict[str, Block]
    placements: dict[Tensor, Placement]


def plan_blocks(
    model: nn.Module,
    parameters: Iterable[Tensor],
    *,
    exclude: Iterable[str] = (),
    max_factor_dim: int = 8192,
) -> Blocks:
    """Find the block of each parameter. A side longer than `max_factor_dim` is diagonal."""
    layers: dict[str, Any] = dict(model.named_modules())
    places = _places(model)
    parts = _parts(layers)
    named = {part.name: part.module for part in parts.values()} | layers
    named.pop("")  # the model itself
    guards.check_excluded(named, exclude, lambda module: kind_of(module) is not None)
    placements: dict[Tensor, Placement] = {}
    members: dict[str, dict[str, Tensor]] = {}  # of each block: its weight, bias or both
    homes: dict[str, tuple[Part, Part | None]] = {}
    for parameter in parameters:
        placement, block_parts = _placement(parameter, places, layers, parts, set(exclude))
        placements[parameter] = placement
        if placement.block is not None:
            homes[placement.block] = (
                block_parts[0],
                block_parts[1] if len(block_parts) > 1 else None,
            )
            role = "weight" if places[parameter][0][1] == block_parts[0].weight else "bias"
            members.setdefault(placement.block, {})[role] = parameter
    left_out = (Reason.FROZEN, Reason.EXCLUDED)
    tried = [p for p, placement in placements.items() if placement.reason not in left_out]
    guards.refuse_without_blocks(members, [layers[places[p][0][0]] for p in tried])
    blocks = {}
    for name, trained in members.items():
        part, tied_part = homes[name]
        site = _site(part, trained.keys(), max_factor_dim)
        if tied_part is None:
            blocks[name] = Block(name, site, _as_head(site) if site.is_embedding else None)
            continue
        # the counts of tokens, which are the other's input side, make this one's output side
        site = replace(site, shape=site.shape._replace(output_diagonal=True))
        tied = _site(tied_part, trained.keys(), max_factor_dim)
        aligned = tied.shape._replace(output_diagonal=site.shape.input_diagonal)
        blocks[name] = Block(name, site, replace(tied, shape=aligned))
    return Blocks(blocks, placements)


def _site(part: Part, trained: Iterable[str], max_factor_dim: int) -> Site:
    """The site of a layer whose weight and/or bias is trained."""
    module: Any = part.module
    weight = getattr(module, part.weight)
    bias = None if part.bias is None else getattr(module, part.bias, None)
    trains_weight, trains_bias = "weight" in trained, "bias" in trained
    groups, width, fan_out = part.kind.sides(module, weight)
    fan_in = width * trains_weight + trains_bias
    dtype = torch.promote_types(weight.dtype, torch.float32)
    diagonal = part.kind.input_diagonal or fan_in > max_factor_dim
    diagonals = diagonal, fan_out > max_factor_dim
    shape = Shape(fan_in, fan_out, trains_bias, *diagonals, dtype, part.kind.transposed)
    prefix = f"{part.home}." if part.home else ""
    return Site(
        name=part.name,
        kind=part.kind,
        module=module,
        weight=weight,
        bias=bias,
        weight_name=f"{prefix}{part.weight}",
        bias_name=f"{prefix}{part.bias}",
        trains_weight=trains_weight,
        trains_bias=trains_bias,
        groups=groups,
        shape=shape,
        order=part.kind.stored_order(module) if trains_weight else None,
    )


def _as_head(embedding: Site) -> Site:
    """An embedding's weight where `F.linear` multiplies with it: a head without a module."""
    fan_out, fan_in, _, _, diagonal, dtype, _ = embedding.shape
    shape = Shape(fan_in, fan_out, False, diagonal, True, dtype)
    return replace(embedding, name=embedding.weight_name, kind=PROJECTION, shape=shape)


Place = tuple[str, str]  # the name of a module, and an attribute of it


def _placement(
    parameter: Tensor,
    places: dict[Tensor, list[Place]],
    layers: dict[str, Any],
    parts: dict[Place, Part],
    exclude: set[str],
) -> tuple[Placement, list[Part]]:
    """Where a parameter is preconditioned, with the part it is of; of a tied one, both of them."""
    name, attribute = places[parameter][0]
    module, part = layers[name], parts.get((name, attribute))
    class_name = type(module).__name__

    def refused(reason: Reason, *about: str) -> tuple[Placement, list[Part]]:
        return Placement(None, reason, about), []

    if not parameter.requires_grad:
        return refused(Reason.FROZEN)
    homes = [home for home, _ in places[parameter]]
    if any(_excluded(name, exclude) for name in (*homes, *(() if part is None else (part.name,)))):
        return refused(Reason.EXCLUDED)
    if len(places[parameter]) > 1:
        tied_parts = _head_and_embedding(places[parameter], parts, exclude)
        if tied_parts is None:
            return refused(Reason.TIED, *(".".join(place) for place in places[parameter]))
        classes = tuple(type(tied_part.module).__name__ for tied_part in tied_parts)
        return Placement(name, Reason.COVERED, classes), tied_parts
    if part is None:
        if kind_of(module) is not None:
            if attribute == "in_proj_bias":
                return refused(Reason.SHARED_BIAS)
            return refused(Reason.NO_PART, attribute, class_name)
        base = base_of(module)
        if base is None:
            return refused(Reason.NO_BLOCK, class_name)
        return refused(Reason.OWN_CODE, class_name, base.__name__)
    refusal = part.kind.refusal(module)
    if refusal is not None:
        return refused(refusal, class_name)
    weight = module._parameters.get(part.weight)
    if not isinstance(weight, Tensor):
        return refused(Reason.COMPUTED)
    if weight is not parameter and _head_and_embedding(places[weight], parts, exclude):
        return refused(Reason.SHARED_BIAS)
    return Placement(part.name, Reason.COVERED, (class_name,)), [part]


def _head_and_embedding(
    places: list[Place], parts: dict[Place, Part], exclude: set[str]
) -> list[Part] | None:
    """The two parts of a weight that is an embedding and the head behind it; None: it is not."""
    tied = [parts.get(place) for place in places]
    included = [part for part in tied if part is not None and not _excluded(part.name, exclude)]
    heads = [part for part in included if type(part.kind) is Linear]
    embeddings = [part for part in included if type(part.kind) is Embedding]
    if len(tied) != 2 or not heads or not embeddings:
        return None
    refusal = embeddings[0].kind.refusal(embeddings[0].module)
    return [*heads, *embeddings] if refusal is None else None


def _excluded(name: str, exclude: set[str]) -> bool:
    """Whether a layer is named, or one that it is in: an attention's projection."""
    return any(name == other or name.startswith(f"{other}.") for other in exclude)


def _places(model: nn.Module) -> dict[Tensor, list[Place]]:
    """For each parameter, its places; a module met twice counts once."""
    places: dict[Tensor, list[Place]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((name, attribute))
    return places


def _parts(layers: dict[str, nn.Module]) -> dict[Place, Part]:
    """For each place that a kind of layer knows, the part it is of."""
    names = {module: name for name, module in layers.items()}
    parts: dict[Place, Part] = {}
    for name, module in layers.items():
        kind = kind_of(module)
        for part in kind.parts(name, module) if kind is not None else ():
            home = names[part.module]
            part = part._replace(name=part.name.removeprefix("."), home=home)
            for attribute in (part.weight, part.bias):
                if attribute is not None:
                    parts.setdefault((home, attribute), part)
    return parts
