"""Which operator an optimizer's weight decay is, found by letting optimizers like it step.

Scaling: per step, with W the weight before it. An optimizer is built three times alike and steps on
the same gradients g from the same weights W, which are put back after every step: once without
decay, once with it, and once without it on the gradients g + weight_decay * W (Eq. 6). The first
step starts elsewhere, from W_0, and is not counted. The difference between the steps of the first
two is the decay term D:

| operator         | D                                                                         |
|------------------|---------------------------------------------------------------------------|
| `decoupled`      | k lr weight_decay W                                                       |
| `independent`    | k weight_decay W                                                          |
| `lr-squared`     | k lr^2 / lr_0 weight_decay W, lr_0 the first lr (AdamC), or 1             |
| `masked`         | one of these, at some entries alone (cautious decay)                      |
| `towards-start`  | k lr weight_decay (W - W_0)                                               |
| `averaged`       | k lr weight_decay W in an iterate that the weights average (schedule-free)|
| `in-momentum`    | lr weight_decay W summed up by a momentum behind the preconditioner: k is |
|                  | what it comes to in the long run (NovoGrad)                               |
| `rescaled`       | W and the step itself: the length of both is set afterwards (LAMB)        |
| `l2`             | whatever the third does (Eq. 6)                                           |
| `ignored`        | nothing, though the third does something                                  |
| `unknown`        | anything else; the numbers are given                                      |

k is 1 unless it is applied k times, or is scaled by something else: it is measured with gradients
of several sizes and directions and weights of two shapes, and is a range where they disagree
(AdamP, SPlus). lr is halved for the last steps, which tells the first three apart. Where the
weights cannot be put back, since an optimizer has its own copy of them, the paths run on, and W is
that of the one with decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

OperatorKind = Literal[
    "none",
    "l2",
    "decoupled",
    "independent",
    "lr-squared",
    "masked",
    "towards-start",
    "averaged",
    "in-momentum",
    "rescaled",
    "ignored",
    "unknown",
]
ALONG_THE_WEIGHT: dict[int, OperatorKind] = {0: "independent", 1: "decoupled", 2: "lr-squared"}
"""By the power of lr."""

LR, WEIGHT_DECAY = 1e-3, 0.1
STEPS = 12  # some begin otherwise (RAdam as SGD): the second half is what counts
CONSTANT = (LR,) * STEPS
HALVED = (LR,) * (STEPS - 3) + (LR / 2,) * 3
COUNTED = range(STEPS // 2, STEPS)
COMPARED = range(STEPS - 3, STEPS)
TOLERANCE = 0.02  # relative
NEARLY_NONE = 1e-12  # LAMB and LARS have their trust ratio only where there is a weight decay
NOTHING = 1e-4  # of lr * weight_decay * |W|, or of what the third does; below it D counts as none
ULPS = 8  # of W, that rounding may make of D
ROUNDING = 1e-8
MOST_TIMES = 4

Make = Callable[[Sequence[Tensor], float], torch.optim.Optimizer]
"""(parameters, weight decay) -> a new optimizer that steps them at the lr `LR`."""


@dataclass(frozen=True)
class DecayOperator:
    """What an optimizer does with its weight decay.

    Attributes:
        kind: as in the table above; "none" where none was asked for.
        times: the k above, smallest and largest; None if the kind has none.
        share: of the entries that are decayed at a time, where they are masked; else 1.
        along, across: D along W and the rest of it, over lr weight_decay |W|, the mean over steps.
        unasked: decoupled decay that is there without weight decay (the `lambd` of torch's ASGD).
        over_first_lr: of lr-squared, whether its lr_0 is the first lr, not 1.
    """

    kind: OperatorKind
    times: tuple[float, float] | None = None
    share: float = 1.0
    along: float = math.nan
    across: float = math.nan
    unasked: float = 0.0
    over_first_lr: bool = True

    @property
    def factor(self) -> float | None:
        """k, where it is one number."""
        if self.times is None or self.times[1] - self.times[0] > TOLERANCE * self.times[1]:
            return None
        return sum(self.times) / 2


NONE = DecayOperator("none")
UNKNOWN = DecayOperator("unknown")


@dataclass(frozen=True)
class Place:
    """What the trial's parameters are like."""

    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class _Regime:
    """Gradients, W_0 and W."""

    gradients: list[Tensor]
    start: Tensor
    weight: Tensor


@dataclass(frozen=True)
class _Path:
    """What each step took off the weights, these before it, and the optimizer's tensors then."""

    steps: list[Tensor]
    weights: list[Tensor]
    states: list[dict[str, Tensor]]


def decay_operator(make: Make, place: Place) -> DecayOperator:
    """The operator of the optimizers that `make` makes.

    Whatever they raise is raised. Cost: some hundred steps of one small parameter.
    """
    measured = []
    for regime in _regimes(place):
        operator = _at(make, regime, put_back=True)
        if operator is not None and operator.kind == "unknown":
            free = _at(make, regime, put_back=False)
            operator = free if free is not None and free.kind != "unknown" else operator
        measured.append(operator)
    operators = [operator for operator in measured if operator is not None]
    if not operators:
        return UNKNOWN
    kinds, count = {operator.kind for operator in operators}, len(operators)
    times = [k for operator in operators if operator.times for k in operator.times]
    return DecayOperator(
        kind=kinds.pop() if len(kinds) == 1 else "unknown",
        times=(min(times), max(times)) if times and not kinds else None,
        share=sum(operator.share for operator in operators) / count,
        along=sum(operator.along for operator in operators) / count,
        across=sum(operator.across for operator in operators) / count,
        unasked=_unasked(make, place),
        over_first_lr=all(operator.over_first_lr for operator in operators),
    )


def times_among(make: Make, places: Sequence[Place]) -> float | None:
    """K of decoupled decay where parameters of several number formats are stepped together."""
    gaps, weights = [], []
    for weight_decay in (NEARLY_NONE, WEIGHT_DECAY):
        regimes = [next(_regimes(place)) for place in places]
        parameters = [torch.nn.Parameter(regime.weight.clone()) for regime in regimes]
        optimizer = make(parameters, weight_decay)
        take_step(optimizer, parameters, [regime.gradients[0] for regime in regimes])
        gaps.append([parameter.detach().double() for parameter in parameters])
        weights = [regime.weight.double() for regime in regimes]
    fits = [_multiple(a - b, w) for a, b, w in zip(*gaps, weights, strict=True)]
    times = [fit[0] / (LR * WEIGHT_DECAY) for fit in fits if fit is not None]
    return max(times) if times else None


def _regimes(place: Place) -> Iterator[_Regime]:
    """Small gradients, some across W (an invariant loss), and large ones in another shape."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows, *columns = place.shape
    flatter = (rows // 2, *(2 * length for length in columns))
    shape = place.shape

    def drawn() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    def weights() -> Tensor:
        values = drawn()
        return values.sign() * (0.5 + values.abs() % 1)

    for size, spread, orthogonal in ((0.3, 2.0, False), (0.1, 0.0, True), (3.0, 0.0, False)):
        shape = flatter if size > 1 else place.shape
        start, weight = weights(), weights()
        gradients = []
        for _ in range(STEPS):
            # some are so small that the decay term is large beside them
            gradient = size * drawn() * torch.exp(-spread * drawn().abs())
            if orthogonal:
                gradient -= (gradient * weight).sum() / weight.square().sum() * weight
            else:
                gradient += 0.1 * size * weight
            gradients.append(gradient.to(place.device, place.dtype))
        yield _Regime(
            gradients,
            start.to(place.device, place.dtype),
            weight.to(place.device, place.dtype),
        )


def _walk(
    make: Make,
    regime: _Regime,
    *,
    rates: Sequence[float] = CONSTANT,
    weight_decay: float = NEARLY_NONE,
    in_gradient: float = 0.0,
    put_back: bool = True,
) -> _Path:
    torch.default_generator.manual_seed(0)
    parameter = torch.nn.Parameter(regime.start.clone())
    optimizer = make([parameter], weight_decay)
    path = _Path([], [], [])
    for gradient, lr in zip(regime.gradients, rates, strict=True):
        set_rate(optimizer, lr)
        before = parameter.detach().clone()
        take_step(optimizer, [parameter], [gradient + in_gradient * before])
        path.steps.append(before - parameter.detach())
        path.weights.append(before)
        path.states.append(
            {
                name: value.detach().clone()
                for name, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.is_floating_point()
            }
        )
        if put_back:
            restore([parameter], [regime.weight])
    return path


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate, in place where it is a tensor: some (torchao) insist on theirs."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(lr)
        elif group.get("lr") is not None:
            group["lr"] = lr


@torch.no_grad()
def restore(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Put parameters back to these values, so that the next step begins where this one did."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def take_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """One step on these gradients, with a closure where it cannot do without."""

    def closure() -> Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return torch.ones((), dtype=gradients[0].dtype, device=gradients[0].device)

    closure()
    try:
        optimizer.step()
    except Exception:  # whatever it raises where it cannot do without a closure
        optimizer.step(closure)  # type: ignore[arg-type]


def _at(make: Make, regime: _Regime, put_back: bool) -> DecayOperator | None:
    """The operator on these gradients; None where even weight_decay * W in them is not seen."""
    walk = partial(_walk, make, regime, put_back=put_back)
    plain, decayed = walk(), walk(weight_decay=WEIGHT_DECAY)
    injected = walk(in_gradient=WEIGHT_DECAY)
    terms, by_gradient = _terms(plain, decayed), _terms(plain, injected)
    weights = [decayed.weights[t] for t in COUNTED]
    units = [LR * WEIGHT_DECAY * float(weight.norm()) for weight in weights]
    lengths = [float(term.norm()) / unit for term, unit in zip(terms, units, strict=True)]
    along = [
        float((term * weight).sum() / weight.norm()) / unit
        for term, weight, unit in zip(terms, weights, units, strict=True)
    ]
    across = [math.sqrt(max(n**2 - a**2, 0.0)) for n, a in zip(lengths, along, strict=True)]
    count = len(terms)
    numbers = DecayOperator("unknown", along=sum(along) / count, across=sum(across) / count)
    noticed = max(float(term.norm()) / unit for term, unit in zip(by_gradient, units, strict=True))
    inner = _averaged(plain, decayed)
    if not math.isfinite(sum(lengths)) or (put_back and _goes_its_own_way(plain)):
        return numbers
    rounded = ULPS * torch.finfo(regime.weight.dtype).eps / (LR * WEIGHT_DECAY)
    if max(lengths) < max(NOTHING, rounded) * min(noticed, 1.0) or max(lengths) < ROUNDING:
        if inner is not None:
            return replace(numbers, kind="averaged", times=inner)
        return replace(numbers, kind="ignored") if noticed > ROUNDING else None
    is_l2 = _all_close(terms, by_gradient)
    slower = _terms(walk(rates=HALVED), walk(rates=HALVED, weight_decay=WEIGHT_DECAY), COMPARED)
    explained = _along_weight(terms, slower, weights, regime.start)
    if explained is not None:
        explained = replace(explained, along=numbers.along, across=numbers.across)
        if explained.factor is not None and abs(explained.factor - 1) < TOLERANCE:
            return explained
    if is_l2:
        return replace(numbers, kind="l2", times=(1.0, 1.0))
    if inner is not None:
        return replace(numbers, kind="averaged", times=inner)
    if explained is not None:
        return explained
    for times in range(2, MOST_TIMES + 1):
        if _all_close(terms, _terms(plain, walk(in_gradient=times * WEIGHT_DECAY))):
            return replace(numbers, kind="l2", times=(float(times), float(times)))
    if put_back and (summed := _summed(terms, regime)) is not None:
        return replace(numbers, kind="in-momentum", times=(summed, summed))
    pairs = [(plain.steps[t], decayed.steps[t]) for t in COUNTED]
    if put_back and all(_rescaled(a, b, regime.weight) for a, b in pairs):
        return replace(numbers, kind="rescaled")
    return numbers


def _goes_its_own_way(path: _Path) -> bool:
    """Whether putting the weights back does not help: the next step undoes it."""
    pairs = [(path.steps[t], path.weights[t]) for t in COUNTED]
    return all(float(step.norm()) > 0.3 * float(weight.norm()) for step, weight in pairs)


def _terms(plain: _Path, decayed: _Path, at: range = COUNTED) -> list[Tensor]:
    """D at each step that counts."""
    return [decayed.steps[t] - plain.steps[t] for t in at]


def _close(measured: Tensor, expected: Tensor) -> bool:
    return bool((measured - expected).norm() <= TOLERANCE * expected.norm())


def _all_close(measured: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(_close(a, b) for a, b in zip(measured, expected, strict=True))


def _along_weight(
    terms: Sequence[Tensor], slower: Sequence[Tensor], weights: Sequence[Tensor], start: Tensor
) -> DecayOperator | None:
    """D as a multiple of the weight, or of its distance from the start, at all or some entries."""
    for towards_start in (False, True):
        directions = [weight - start if towards_start else weight for weight in weights]
        fits = [_multiple(term, along) for term, along in zip(terms, directions, strict=True)]
        last = directions[-len(slower) :]
        slow = [_multiple(term, along) for term, along in zip(slower, last, strict=True)]
        if any(fit is None for fit in (*fits, *slow)):
            continue
        sizes, shares = zip(*(fit for fit in fits if fit is not None), strict=True)
        pairs = zip(sizes[-len(slow) :], [fit[0] for fit in slow if fit is not None], strict=True)
        powers = [math.log2(a / b) for a, b in pairs if a > 0 and b > 0]
        active = [size for size in sizes if size]
        if not powers or min(active) < 0:
            continue
        power = round(sorted(powers)[len(powers) // 2])
        agreeing = sum(abs(p - power) < 0.1 for p in powers)  # a lookahead falls out of step
        if 2 * agreeing <= len(powers) or power not in ALONG_THE_WEIGHT:
            return None
        # of lr^2 alone the trial's lr is left over
        over_first_lr = power < 2 or max(active) / WEIGHT_DECAY > math.sqrt(LR) * LR
        unit = LR ** (min(power, 1) if over_first_lr else power)
        times = [size / WEIGHT_DECAY / unit for size in active]
        share = sum(shares) / len(shares)
        kind = ALONG_THE_WEIGHT[power]
        if towards_start:
            kind = "towards-start"
        elif share < 1:
            kind = "masked"
        return DecayOperator(kind, (min(times), max(times)), share, over_first_lr=over_first_lr)
    return None


def _multiple(term: Tensor, direction: Tensor) -> tuple[float, float] | None:
    """(c, share of the entries) with term = c * direction there and nothing elsewhere."""
    ratios = (term / direction).flatten().double().cpu()
    largest = float(ratios.abs().max())
    if largest < ROUNDING * LR * WEIGHT_DECAY:
        return 0.0, 0.0
    if not largest < math.inf:
        return None
    present = ratios.abs() > largest / 2
    c = float(ratios[present].median())
    expected = torch.where(present.view_as(term).to(term.device), c * direction, 0 * direction)
    return (c, float(present.double().mean())) if _close(term, expected) else None


def _averaged(plain: _Path, decayed: _Path) -> tuple[float, float] | None:
    """K of k lr weight_decay W in a tensor of the state, what a step adds to the difference."""
    for name in plain.states[-1]:
        if any(name not in states for path in (plain, decayed) for states in path.states):
            continue
        gaps = [a[name] - b[name] for a, b in zip(plain.states, decayed.states, strict=True)]
        fits = [_multiple(gaps[t] - gaps[t - 1], decayed.weights[t]) for t in COUNTED]
        times = [fit[0] / (LR * WEIGHT_DECAY) for fit in fits if fit is not None and fit[1] == 1.0]
        if len(times) == len(COUNTED) and min(times) > NOTHING and max(times) < 1 + TOLERANCE:
            return min(times), max(times)
    return None


def _summed(terms: Sequence[Tensor], regime: _Regime) -> float | None:
    """K in the long run of a momentum m: D_t = lr wd ((1 + m + ... m^(t-1)) W + m^t W_0)."""
    basis = torch.stack([regime.weight.flatten(), regime.start.flatten()], dim=1).double().cpu()
    shares = []
    for term in terms:
        target = term.flatten().double().cpu() / (LR * WEIGHT_DECAY)
        share = torch.linalg.lstsq(basis, target[:, None]).solution[:, 0]
        if (target - basis @ share).norm() > TOLERANCE * target.norm():
            return None
        shares.append(share.tolist())
    now, before = zip(*shares, strict=True)
    if min(before) <= 0 or min(now) <= 0:
        return None
    fading = [b / a for a, b in pairwise(before)]
    momentum = sum(fading) / len(fading)
    if not 0 < momentum < 1 or max(fading) - min(fading) > TOLERANCE:
        return None
    sums = [1 - momentum**t for t in COUNTED]
    return sum(a / b for a, b in zip(now, sums, strict=True)) / len(sums)


def _rescaled(plain: Tensor, decayed: Tensor, weight: Tensor) -> bool:
    """Whether a step with decay is made of the one without, of another length, and the weight."""
    basis = torch.stack([plain.flatten(), weight.flatten()], dim=1).double().cpu()
    target, scale = decayed.flatten().double().cpu(), basis.norm(dim=0)
    if not scale.min() > 0:
        return False
    shares = torch.linalg.lstsq(basis / scale, target[:, None]).solution[:, 0]
    rest = target - (basis / scale) @ shares
    stretched = abs(float(shares[0] / scale[0]) - 1)
    # what is left over is little beside what stretching the step makes, too
    return bool(rest.norm() < TOLERANCE * stretched * plain.norm())


def _unasked(make: Make, place: Place) -> float:
    """C of c lr W that a step takes off without weight decay and without gradients."""
    regime = next(_regimes(place))
    still = replace(regime, gradients=[torch.zeros_like(g) for g in regime.gradients])
    try:
        path = _walk(make, still, weight_decay=0.0)
    except Exception:  # a gradient of nothing is too little for some
        return 0.0
    fits = [_multiple(path.steps[t], regime.weight) for t in COUNTED]
    sizes = [fit[0] / LR for fit in fits if fit is not None and fit[1] == 1.0]
    if len(sizes) < len(COUNTED) or max(sizes) - min(sizes) > TOLERANCE * max(sizes):
        return 0.0
    return sum(sizes) / len(sizes)
