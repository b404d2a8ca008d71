"""Audit of a K-FAC-like optimizer: is its step that of the curvature block, at every size?

A K-FAC that divides by the batch or the positions once too often still trains, at another learning
rate and damping than it says. Here its steps are taken on nets of a few weights and compared with
the written-out block (`audit_reference`), at several batch sizes, numbers of positions, strides and
input scales. The logarithm of the ratio of their lengths, fitted by those of B, T, stride and
scale, gives the powers that are wrong.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from decaylab.diagnosis.audit_reference import CURVATURES, DAMPINGS, Case
from decaylab.diagnosis.audit_steps import (
    LARGE,
    Factory,
    Key,
    Measured,
    Options,
    conv_cases,
    damping_of,
    linear_cases,
    measure,
    take_step,
)
from decaylab.errors import DecaylabError

# Deterministic factors agree to rounding. Sampled ones carry their noise, and the inverse of a
# noisy block is too long by (dim + 1) / samples: less than a quarter at the sizes used then.
TOLERANCE = {"power": 0.05, "constant": 0.02, "direction": 0.02, "damping": 0.01}
SAMPLED_TOLERANCE = {"power": 0.25, "constant": 0.25, "direction": 0.2, "damping": 0.5}
SAMPLED_REPEATS = 8
SAMPLED_BATCHES = 8  # times as many examples, so that sampled factors are not singular


@dataclass(frozen=True)
class AuditCheck:
    """One thing checked. `passed` is None where it could not be, and `words` says why."""

    name: str
    passed: bool | None
    measured: float | None
    words: str


@dataclass(frozen=True)
class Audit:
    """What an audit found. `curvature`, `sharing`: the block that the steps are nearest to."""

    optimizer: str
    curvature: str
    sharing: str
    sampled: bool
    checks: tuple[AuditCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def title(self) -> str:
        """The optimizer and its block, in words."""
        directions = [c.passed for c in self.checks if c.name.endswith(": direction")]
        if not any(directions):
            return f"{self.optimizer}: no known curvature block"
        how = "estimated from samples" if self.sampled else "not sampled"
        return f"{self.optimizer}: {self.curvature} block, {self.sharing}, {how}"

    def __getitem__(self, name: str) -> AuditCheck:
        return next(check for check in self.checks if check.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        marks = {True: "ok", False: "WRONG", None: "not checked"}
        return "\n".join(
            [self.title, *(f"  {marks[c.passed]:11} {c.name}: {c.words}" for c in self.checks)]
        )


def audit(
    factory: Factory,
    *,
    curvature: str | None = None,
    damping: float | None = None,
    curvature_scale: float = 1.0,
    steps: int = 20,
) -> Audit:
    """Check the steps of `factory(model)`, any K-FAC-like optimizer, against the exact block.

    Build it without weight decay and KL clip. Every step is taken from the same weights on the same
    batch, `steps` times, so that running averages settle; the last one is compared. Losses are
    cross entropies, averaged.

    Args:
        factory: model -> optimizer with `step()` and torch's `param_groups`.
        curvature: "fisher", "gauss-newton" or "empirical-fisher", if it must be that; else the one
            that its steps are nearest to is named.
        damping: its lambda; else read off the optimizer (`damping`, in it or its groups).
        curvature_scale: a constant factor that the curvature has on purpose.
        steps: how many steps from the same place before the one that counts.

    Cost: some hundred steps of nets of ten weights; half a minute where factors are sampled.
    """
    if curvature is not None and curvature not in CURVATURES:
        raise DecaylabError(
            f"unknown curvature {curvature!r}: choose one of {', '.join(CURVATURES)}"
        )
    if steps < 1:
        raise DecaylabError(f"an audit takes at least one step, not {steps}")
    for name, value in (("damping", damping), ("curvature_scale", curvature_scale)):
        if value is not None and not 0 < value < math.inf:
            raise DecaylabError(f"{name} is {value}: give a number above 0")
    options = Options(factory, steps)
    sampled = False
    for probe in (Case("Linear", 16), Case("Conv2d", 8, side=2)):
        probe = replace(probe, scale=LARGE, gain=LARGE)
        optimizer, first = take_step(options, probe, seed=0)
        _, again = take_step(options, probe, seed=1)
        differs = float((again - first).norm() / first.norm())
        sampled |= differs > min(TOLERANCE.values())  # rounding in another order is less
    if sampled:
        options = Options(factory, steps, SAMPLED_REPEATS, SAMPLED_BATCHES)
    tolerance = SAMPLED_TOLERANCE if sampled else TOLERANCE
    linear = [measure(options, case) for case in linear_cases(options.larger)]
    conv = [measure(options, case) for case in conv_cases(options.larger)]
    key = _nearest(linear + conv, tolerance["direction"])
    checks = _direction_checks(linear, conv, key, curvature, tolerance)
    for kind, measured in (("Linear", linear), ("Conv2d", conv)):
        if key[0] != "none":
            checks += _power_checks(kind, measured, key, curvature_scale, tolerance)
    right = all(check.passed is not False for check in checks)
    known = damping_of(optimizer) if damping is None else damping
    checks += _damped_checks(options, key, known, curvature_scale, tolerance, right)
    return Audit(type(optimizer).__name__, key[0], key[1], sampled, tuple(checks))


# ---------------------------------------------------------------- comparing


def _off(measured: list[Measured], key: Key) -> float:
    """Sine of the angle to a reference, the mean over cases."""
    return sum(m.off(key) for m in measured) / len(measured)


def _nearest(measured: list[Measured], close: float) -> Key:
    """The reference whose directions are nearest to the steps', first come first served.

    Plain gradients are meant only where they are close: a step between blocks is no SGD's; and
    where a step goes against them, which no positive block's does.
    """

    def off(key: Key) -> float:
        return round(_off(measured, key), 6)

    # among equals (T = 1, or a linear net) the plain K-FAC block comes first
    nearest = min((key for key in measured[0].references if key[0] != "none"), key=off)
    plain = next(key for key in measured[0].references if key[0] == "none")
    uphill = any(m.off(plain) > 1 for m in measured)
    return plain if uphill or off(plain) < min(off(nearest), close) else nearest


def _direction_checks(
    linear: list[Measured],
    conv: list[Measured],
    key: Key,
    asked: str | None,
    tolerance: dict[str, float],
) -> list[AuditCheck]:
    if key[0] == "none":
        words = "the steps are plain gradients: no curvature is used"
        if any(m.off(key) > 1 for m in linear + conv):
            words = "the steps go up the loss: their sign is wrong"
        return [AuditCheck("curvature", False, None, words)]
    directions = []
    for kind, measured in (("Linear", linear), ("Conv2d", conv)):
        angle = _off(measured, key)
        words = f"sine of the angle to the block's step {angle:.2g}"
        if angle > tolerance["direction"]:
            words += ": no known block gives these directions"
        name = f"{kind}: direction"
        directions.append(AuditCheck(name, angle <= tolerance["direction"], angle, words))
    block = AuditCheck("curvature", True, None, f"nearest to the {key[0]} block, {key[1]}")
    if not any(check.passed for check in directions):
        words = f"no known block; the nearest is the {key[0]} block, {key[1]}"
        block = AuditCheck("curvature", False, None, words)
    elif asked is not None and key[0] != asked:
        words = f"it is the {key[0]} matrix, not the {asked} one that was asked for"
        block = AuditCheck("curvature", False, None, words)
    return [block, *directions]


AXES: dict[str, Callable[[Case], float]] = {
    "batch size B": lambda case: case.batch,
    "positions T": lambda case: case.positions,
    "stride": lambda case: case.stride,
    "input scale": lambda case: case.scale,
}
MEANINGS: dict[tuple[str, float], str] = {
    ("batch size B", 1): " (a sum over the batch where a mean is meant)",
    ("batch size B", -1): " (divided by the batch once too often)",
    ("positions T", 1): " (positions counted once too often)",
    ("positions T", -1): " (a mean over positions where a sum is meant: the factor T is missing)",
}


def _power_checks(
    kind: str,
    measured: list[Measured],
    key: Key,
    curvature_scale: float,
    tolerance: dict[str, float],
) -> list[AuditCheck]:
    """The powers of B, T, stride and scale by which the curvature is off, and the constant left.

    What a power means is said only where the directions are those of the block.
    """
    axes = {
        name: [math.log(of(m.case)) for m in measured]
        for name, of in AXES.items()
        if len({of(m.case) for m in measured}) > 1
    }
    # the step is too short by what the curvature is too large
    logs = torch.tensor([-math.log(m.ratio(key)) for m in measured], dtype=torch.float64)
    columns = torch.tensor(list(axes.values()), dtype=torch.float64)
    design = torch.cat([torch.ones(1, len(measured), dtype=torch.float64), columns]).T
    solution = torch.linalg.lstsq(design, logs[:, None]).solution[:, 0]
    rest = float((logs - design @ solution).abs().max())
    powers = dict(zip(axes, solution[1:].tolist(), strict=True))
    checks, known = [], _off(measured, key) <= tolerance["direction"]
    for axis, power in powers.items():
        wrong = abs(power) > tolerance["power"]
        words = "right at every size"
        if wrong:
            nearest = round(2 * power) / 2
            plain = abs(power - nearest) < max(tolerance["power"], 0.1) and nearest != 0
            symbol = {"batch size B": "B", "positions T": "T"}.get(axis, axis)
            words = f"the curvature is off by {symbol}^{nearest if plain else power:.3g}"
            words += MEANINGS.get((axis, nearest), "") if plain and known else ""
        checks.append(AuditCheck(f"{kind}: {axis}", not wrong, power, words))
    if rest > 10 * tolerance["power"]:
        words = f"the ratios are no powers of the sizes (off by {math.expm1(rest):.0%})"
        checks.append(AuditCheck(f"{kind}: power law", False, rest, words))
    if any(check.passed is False for check in checks):
        return checks  # a constant beside wrong powers means nothing
    constant = math.exp(float(logs.mean())) / curvature_scale
    fair = abs(math.log(constant)) <= math.log1p(tolerance["constant"])
    words = "right" if fair else f"the curvature is {constant:.3g} times what it should be"
    return [*checks, AuditCheck(f"{kind}: constant", fair, constant, words)]


def _damped_checks(
    options: Options,
    key: Key,
    damping: float | None,
    curvature_scale: float,
    tolerance: dict[str, float],
    right: bool,
) -> list[AuditCheck]:
    """Patches, bias and damping at natural scale, where damping matters."""
    names = ("Conv2d: patches", "Linear: bias", "Conv2d: bias", "damping")
    if not right or key[0] == "none":
        words = "not looked at: first mend what is above"
        return [AuditCheck(name, None, None, words) for name in names]
    larger = options.larger
    patches = measure(options, Case("Conv2d", larger * 8, 3, 2, LARGE, kernel=2, gain=LARGE))
    angle = patches.off(key)
    fair = angle <= tolerance["direction"]
    words = f"kernel 2, stride 2: sine of the angle {angle:.2g}"
    checks = [AuditCheck(names[0], fair, angle, words)]
    if damping is None or not 0 < damping < math.inf:
        words = "the damping is not known: give audit(..., damping=...)"
        return checks + [AuditCheck(name, None, None, words) for name in names[1:]]
    lam = damping / curvature_scale
    plain = measure(options, Case("Linear", larger * 16, scale=1.0), lam)
    errors = {kind: _error(plain, (key[0], key[1], kind), curvature_scale) for kind in DAMPINGS}
    kind = min(errors, key=errors.__getitem__)
    error = errors[kind]
    fair = error <= tolerance["damping"]
    words = f"nearest to {kind}, lambda {damping:g}: the step is off by {error:.2g} of its length"
    others = [of for of in errors if of != kind and errors[of] <= tolerance["damping"]]
    if fair and others:
        words += f" ({', '.join(others)} would pass, too)"
    damped = AuditCheck("damping", fair, error, words)
    if not fair:
        words = "not looked at: first mend the damping, which is part of it"
        return [*checks, *(AuditCheck(name, None, None, words) for name in names[1:3]), damped]
    cases = (Case("Linear", larger * 16, bias=True), Case("Conv2d", larger * 8, 2, bias=True))
    for name, case in zip(names[1:3], cases, strict=True):
        found = measure(options, case, lam)
        checks.append(_bias_check(name, found, (*key[:2], kind), curvature_scale, tolerance))
    return [*checks, damped]


def _error(measured: Measured, key: Key, curvature_scale: float) -> float:
    """|step - reference| / |reference|."""
    reference = measured.references[key] / curvature_scale
    return float((measured.step - reference).norm() / reference.norm())


def _bias_check(
    name: str,
    measured: Measured,
    key: Key,
    curvature_scale: float,
    tolerance: dict[str, float],
) -> AuditCheck:
    """Weight and bias apart: each part's step beside the joint block's, as a factor."""
    reference = measured.references[key] / curvature_scale
    step, allowed = measured.step, 2 * max(tolerance["direction"], tolerance["constant"])
    parts = {"weight": slice(0, -1), "bias": slice(-1, None)}
    errors = {
        part: float((step[:, at] - reference[:, at]).norm() / reference[:, at].norm())
        for part, at in parts.items()
    }
    factor = float(step[:, -1].norm() / reference[:, -1].norm())
    fair = max(errors.values()) <= allowed
    words = "weight and bias are one block"
    if not fair:
        words = (
            f"with a bias the weight's step is off by {errors['weight']:.2g} and the bias's by"
            f" {errors['bias']:.2g} of its length (it is {factor:.3g} times the block's)"
        )
    return AuditCheck(name, fair, factor, words)
