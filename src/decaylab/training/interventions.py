r"""What decay does to a layer: recorded at every step of one run, imposed on another.

A step takes a layer's weight W (all its tensors joined, without the bias) to W + d. Let d = a W + v
with v orthogonal to W. Then

    angle = atan2(|v|, (1 + a) |W|)              how far the step turns the layer
    size  = sqrt((1 + a)^2 |W|^2 + |v|^2)        how long the layer is afterwards

and decay that is outside the step changes only a. A run that follows a size n and an angle t takes

    W <- n (cos(t) W / |W| + sin(t) v / |v|)

so its optimizer only decides v / |v|, the direction in which the layer turns. If the angle is free,
it is the step's own. If the size is free, it is (1 + a) |W| / cos(t): the tangential part of the
step is scaled, its radial part is not.

The optimizer's state is left alone: momentum averages gradients at past weights, in an arm as in an
ordinary run. K-FAC's damping lambda_l is set so that lambda_l |W_l|^2 (Eq. 14), the damping
relative to the curvature of the normalised weights, equals the recorded one.

Works on `step` of any torch optimizer, and on `KFAC.device_step`, which a CUDA graph may capture:
nothing here waits for the device, and the step's number is a tensor there. Cost: a copy of the held
weights, and a few passes over them at each step. Of sharded weights (DTensors) each process keeps
its shard; sums of squares by layer are added up over the processes, three or four times a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from decaylab.errors import DecaylabError, Mismatch
from decaylab.networks.sharded import Parts, local
from decaylab.optim.decay import OUTSIDE
from decaylab.optim.kfac import KFAC
from decaylab.optim.optimizer_behaviour import decay_setting
from decaylab.optim.scale_free import ScaleFree
from decaylab.training.paths import LayerPaths, Targets

Weights = Mapping[str, Sequence[Tensor]]
"""Layer name -> the tensors of its weight."""
ROUNDING = 1e-13
"""|v|^2 below this part of |d|^2 is what is left of rounding in a step along the weight."""


def has_damping_path(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a damping that decay changes relative to the curvature."""
    return isinstance(optimizer, KFAC) and optimizer.damping_scaling == "fixed"


class Intervention:
    """Context that records the paths of layers, imposes `targets`, and suppresses decay.

    Args:
        optimizers: those that step the model; each held layer is stepped by one of them.
        weights: the held layers.
        steps: how many steps each optimizer will take.
        targets: the paths to follow.
        undecayed: parameters whose decay is left out of every step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        weights: Weights,
        steps: int,
        targets: Targets = Targets(),  # noqa: B008 - frozen
        undecayed: Sequence[Tensor] = (),
    ) -> None:
        targets.check(list(weights), steps)
        self._layers, self._steps = tuple(weights), steps
        off = {id(p) for p in undecayed}
        self._steppers = []
        for optimizer in optimizers:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            held = {name: parts for name, parts in weights.items() if id(parts[0]) in stepped}
            self._steppers.append(_Stepper(optimizer, held, steps, targets, off & stepped))

    def __enter__(self) -> Self:
        """Put the hooks around the optimizers' steps."""
        for stepper in self._steppers:
            stepper.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the hooks off again."""
        for stepper in self._steppers:
            stepper.detach()

    def paths(self) -> LayerPaths:
        """What was recorded, once all steps are taken; waits for the device."""
        recorded = [stepper.recorded() for stepper in self._steppers if stepper.layers]
        columns = {
            layer: (sizes[:, i], angles[:, i], dampings[:, i])
            for layers, sizes, angles, dampings in recorded
            for i, layer in enumerate(layers)
        }
        joined = [torch.stack([columns[layer][k] for layer in self._layers], 1) for k in range(3)]
        sizes, angles, dampings = joined
        return LayerPaths(self._layers, sizes, angles, None if dampings.isnan().all() else dampings)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded so far and how far each optimizer is, for a checkpoint."""
        return {str(i): stepper.state_dict() for i, stepper in enumerate(self._steppers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for i, stepper in enumerate(self._steppers):
            stepper.load_state_dict(state[str(i)])


class _Stepper:
    """The layers that one optimizer steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Weights,
        steps: int,
        targets: Targets,
        undecayed: set[int],
    ) -> None:
        self.optimizer, self.layers, self._undecayed = optimizer, tuple(weights), undecayed
        self._damped = has_damping_path(optimizer)
        self._steps = steps
        self._held = [part for parts in weights.values() for part in parts]
        self._shares = Parts.of(self._held)
        devices = {part.device for part in self._parts}
        if len(devices) > 1:
            raise DecaylabError(
                f"{type(optimizer).__name__} steps layers on several devices: give each device"
                " its own optimizer"
            )
        self.device = devices.pop() if devices else torch.device("cpu")
        owner = [i for i, parts in enumerate(weights.values()) for _ in parts]
        self._owner = torch.tensor(owner, device=self.device)
        self._owners = owner
        self._before = [torch.empty_like(part) for part in self._parts]
        self._old = torch.empty(0, device=self.device)  # |W| before the step, by layer
        count = len(self.layers)

        def table(rows: int) -> Tensor:
            shape = (rows, count)
            return torch.full(shape, torch.nan, dtype=torch.float64, device=self.device)

        # one more row than steps: steps past the last are not written over what was recorded
        self._sizes, self._angles = table(steps + 1), table(steps + 1)
        self._dampings = table(steps + 1)
        self._position = torch.zeros((), dtype=torch.int64, device=self.device)
        self._targets = {
            name: self._columns(name, paths)
            for name in ("size", "rotation", "damping")
            if (paths := getattr(targets, name)) is not None
        }
        self._size_every = targets.size_every
        self._originals: dict[str, Any] = {}
        self._inside = False

    def _columns(self, name: str, paths: LayerPaths) -> Tensor:
        """A followed path as a table like the recorded one."""
        source = {"size": paths.sizes, "rotation": paths.angles, "damping": paths.dampings}[name]
        assert source is not None
        where = [paths.layers.index(layer) for layer in self.layers]
        return source[:, where].to(self.device)

    @property
    def _parts(self) -> list[Tensor]:
        """What this process has of the held tensors; asked anew, as a step may replace `p.data`."""
        return [local(part) for part in self._held]

    # ------------------------------------------------------------ around the optimizer's step

    def attach(self) -> None:
        optimizer: Any = self.optimizer
        name = "device_step" if isinstance(optimizer, KFAC) else "step"
        self._originals = {name: vars(optimizer).get(name)}
        setattr(optimizer, name, self._around(getattr(optimizer, name)))
        if isinstance(optimizer, KFAC) and "damping" in self._targets:
            self._originals["scale_free"] = optimizer.scale_free
            optimizer.scale_free = _FollowedDamping(optimizer.scale_free, self)

    def detach(self) -> None:
        for name, original in self._originals.items():
            if original is None:
                delattr(self.optimizer, name)
            else:
                setattr(self.optimizer, name, original)
        self._originals = {}

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # an optimizer that calls its own step again
                return step(*args, **kwargs)
            self._inside = True
            try:
                with torch.no_grad():
                    self._open()
                with self._without_decay():
                    result = step(*args, **kwargs)
                with torch.no_grad():
                    self._close()
                return result
            finally:
                self._inside = False

        return watched

    @contextmanager
    def _without_decay(self) -> Iterator[None]:
        """Lend the optimizer param groups in which some parameters do not decay.

        Only while it steps: schedulers know the groups by their number.
        """
        if not self._undecayed:
            yield
            return
        groups = self.optimizer.param_groups
        lent = [(group, self._split(group)) for group in groups]
        self.optimizer.param_groups = [part for _, parts in lent for part in parts]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups
            for group, (first, *_) in lent:
                if first is not group:  # counters and estimates that some keep in their groups
                    decay = decay_setting(self.optimizer, group)
                    fixed = ("params", decay, OUTSIDE, *_NAMES)
                    group.update({k: v for k, v in first.items() if k not in fixed})

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        off = [id(p) in self._undecayed for p in group["params"]]
        if not any(off):
            return [group]
        names = (decay_setting(self.optimizer, group), OUTSIDE)
        zero = {key: 0.0 for key in names if key in group}
        if all(off):
            return [{**group, **zero}]
        return [
            {**group, **_members(group, [o is part for o in off]), **(zero if part else {})}
            for part in (False, True)
        ]

    # ------------------------------------------------------------ on the device

    def _open(self) -> None:
        if not self.layers:
            return
        torch._foreach_copy_(self._before, self._parts)
        self._old = self._norms(self._before)
        self._write(self._sizes, self._old)
        if self._damped:
            self._write(self._dampings, self._effective_dampings(self._old))

    def _close(self) -> None:
        if not self.layers:
            return
        turn = self._turn()
        if "size" in self._targets or "rotation" in self._targets:
            self._impose(turn)
            turn = self._turn()
        self._write(self._angles, turn.angles)
        self._position += 1

    def _turn(self) -> "_Turn":
        """What the step did, from three norms: 2 W.d = |W + d|^2 - |W|^2 - |d|^2."""
        moves = torch._foreach_sub(_wide(self._parts), _wide(self._before))
        old, new, moved = self._old, self._norms(self._parts), self._norms(moves)
        along = (new.square() - old.square() - moved.square()) / (2 * old)  # a |W|
        squares = moved.square() - along.square()
        across = torch.where(squares > ROUNDING * moved.square(), squares, 0.0).sqrt()
        return _Turn(torch.atan2(across, old + along), along, across, moves)

    def _impose(self, turn: "_Turn") -> None:
        angles, radial = turn.angles, self._old + turn.along
        turns = turn.across > 0  # what does not cannot be turned: that shows in what is recorded
        if "rotation" in self._targets:
            angles = torch.where(turns, self._target("rotation"), 0.0)
        sizes = radial / angles.cos()
        if "size" in self._targets:
            due = (self._position + 1) % self._size_every == 0
            sizes = torch.where(due, self._target("size", ahead=1), sizes)
        # v = d - a W, so the new weight is stretch * d + keep * W
        stretch = torch.where(turns, sizes * angles.sin() / turn.across, 0.0)
        keep = (sizes * angles.cos() - stretch * turn.along) / self._old
        factors = torch.stack([stretch, keep])
        by_type = {dtype: factors.to(dtype) for dtype in {move.dtype for move in turn.moves}}
        for move, before, i in zip(turn.moves, _wide(self._before), self._owners, strict=True):
            stretched, kept = by_type[move.dtype][:, i]
            move.mul_(stretched).addcmul_(before, kept)
        torch._foreach_copy_(self._parts, turn.moves)

    def damping_ratios(self) -> dict[str, Tensor]:
        """The current factor on K-FAC's damping for each layer."""
        optimizer: Any = self.optimizer
        followed = self._target("damping")
        ratios = followed / (optimizer.damping * self._norms(self._parts).square())
        return {layer: ratios[i] for i, layer in enumerate(self.layers)}

    def _effective_dampings(self, sizes: Tensor) -> Tensor:
        """lambda_l |W_l|^2 by layer; nan for layers without a block."""
        optimizer: Any = self.optimizer
        known = optimizer.dampings()
        missing = torch.full((), torch.nan, dtype=torch.float64, device=self.device)
        dampings = [known[layer].double() if layer in known else missing for layer in self.layers]
        return torch.stack(dampings) * sizes.square()

    def _target(self, name: str, ahead: int = 0) -> Tensor:
        table = self._targets[name]
        row = (self._position + ahead).clamp(max=len(table) - 1)
        return table.index_select(0, row.view(1))[0]

    def _write(self, table: Tensor, row: Tensor) -> None:
        table.index_copy_(0, self._position.clamp(max=self._steps).view(1), row[None])

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """By layer, in float64."""
        norms = self._shares.norms(tensors, dtype=torch.float64)
        return self._by_layer(torch.stack(norms).square()).sqrt()

    def _by_layer(self, values: Tensor) -> Tensor:
        zero = torch.zeros(len(self.layers), dtype=torch.float64, device=self.device)
        return zero.index_add(0, self._owner, values)

    # ------------------------------------------------------------ what was recorded

    def recorded(self) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor]:
        taken = int(self._position)
        if taken != self._steps:
            counts = {type(self.optimizer).__name__: taken, "the loop": self._steps}
            remedy = "let step() call optimizer.step() exactly once, after any accumulation"
            raise Mismatch("number of steps", counts, remedy)
        with torch.no_grad():
            sizes = self._norms(self._parts)
            self._write(self._sizes, sizes)
            if self._damped:
                self._write(self._dampings, self._effective_dampings(sizes))
        tables = (self._sizes, self._angles[: self._steps], self._dampings)
        sizes, angles, dampings = (table.cpu().clone() for table in tables)
        return self.layers, sizes, angles, dampings

    def state_dict(self) -> dict[str, Any]:
        state = {"sizes": self._sizes, "angles": self._angles, "dampings": self._dampings}
        return {**state, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sizes.copy_(state["sizes"])
        self._angles.copy_(state["angles"])
        self._dampings.copy_(state["dampings"])
        self._position.copy_(state["position"])


class _Turn(NamedTuple):
    """What a step did to each layer: d = a W + v, with v orthogonal to W.

    Attributes:
        angles: by layer, how far it turned.
        along: by layer, a |W|.
        across: by layer, |v|.
        moves: by tensor, d.
    """

    angles: Tensor
    along: Tensor
    across: Tensor
    moves: tuple[Tensor, ...]


class _FollowedDamping(ScaleFree):
    """In the place of a K-FAC's `ScaleFree`: layers get the damping of a recorded path."""

    def __init__(self, replaced: ScaleFree, stepper: _Stepper) -> None:
        self._replaced, self._stepper, self.norms = replaced, stepper, replaced.norms

    def ratios(self) -> dict[str, Tensor]:
        """The optimizer's own, and for held layers what brings them to their path."""
        return {**self._replaced.ratios(), **self._stepper.damping_ratios()}

    @contextmanager
    def held(self, state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
        """As the optimizer's own."""
        with self._replaced.held(state):
            yield


_NAMES = ("names", "param_names")


def _members(group: Mapping[str, Any], chosen: Sequence[bool]) -> dict[str, Any]:
    """The chosen parameters of a group, with their names where it has them."""
    listed = [key for key in ("params", *_NAMES) if key in group]
    return {
        key: [value for value, taken in zip(group[key], chosen, strict=True) if taken]
        for key in listed
    }


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In at least 32 bits: differences of 16-bit numbers lose the direction of a small step."""
    return [t.detach().float() if t.element_size() < 4 else t.detach() for t in tensors]
