"""Audit of a K-FAC-like optimizer: is its step that of the curvature block, at every size?

A K-FAC that divides by the batch or the positions once too often still trains, at another learning
rate and damping than it says. Here its steps are taken on nets of a few weights and compared with
the written-out block (`audits.reference`), at several batch sizes, numbers of positions, strides
and input scales. The logarithm of the ratio of their lengths, fitted by those of B, T, stride and
scale, gives the powers that are wrong.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from decaylab.audits.reference import CURVATURES, DAMPINGS, Case
from decaylab.audits.report import Audit, AuditCheck, Reason
from decaylab.audits.steps import (
    LARGE,
    Factory,
    Key,
    MeasuredStep,
    Options,
    conv_cases,
    damping_of,
    linear_cases,
    measure,
    take_step,
)
from decaylab.errors import AT_LEAST_ONE, POSITIVE, check_name

# Deterministic factors agree to rounding. Sampled ones carry their noise, and the inverse of a
# noisy block is too long by (dim + 1) / samples: less than a quarter at the sizes used then.
TOLERANCE = {"power": 0.05, "constant": 0.02, "direction": 0.02, "damping": 0.01}
SAMPLED_TOLERANCE = {"power": 0.25, "constant": 0.25, "direction": 0.2, "damping": 0.5}
SAMPLED_REPEATS = 8
SAMPLED_BATCHES = 8  # times as many examples, so that sampled factors are not singular


def audit(
    factory: Factory,
    *,
    curvature: str | None = None,
    damping: float | None = None,
    curvature_scale: float = 1.0,
    steps: int = 20,
) -> Audit:
    """Check the steps of `factory(model)`, any K-FAC-like optimizer, against the exact block.

    Build it without weight decay, KL clip and scaled steps. It takes `steps` steps from the same
    weights on the same batch, so that running averages settle, and the last one is compared. The
    loss is the mean cross entropy.

    Args:
        factory: model -> optimizer with `step()` and torch's `param_groups`.
        curvature: "fisher", "gauss-newton" or "empirical-fisher", if it must be that one; otherwise
            the one its steps are closest to is named.
        damping: its lambda; by default read from the optimizer (`damping`, in it or its groups).
        curvature_scale: a constant factor that the curvature has on purpose.
        steps: how many steps to take from the same weights.

    Cost: a few hundred steps of nets with ten weights; half a minute if factors are sampled.
    """
    if curvature is not None:
        check_name("curvature", curvature, CURVATURES)
    AT_LEAST_ONE.check("steps", steps)
    for name, value in (("damping", damping), ("curvature_scale", curvature_scale)):
        if value is not None:
            POSITIVE.check(name, value)
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


def _off(measured: list[MeasuredStep], key: Key) -> float:
    """Sine of the angle to a reference, the mean over cases."""
    return sum(m.off(key) for m in measured) / len(measured)


def _nearest(measured: list[MeasuredStep], close: float) -> Key:
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
    linear: list[MeasuredStep],
    conv: list[MeasuredStep],
    key: Key,
    asked: str | None,
    tolerance: dict[str, float],
) -> list[AuditCheck]:
    if key[0] == "none":
        uphill = any(m.off(key) > 1 for m in linear + conv)
        reason = Reason.UPHILL if uphill else Reason.PLAIN_GRADIENTS
        return [AuditCheck("curvature", False, reason)]
    directions = []
    for kind, measured in (("Linear", linear), ("Conv2d", conv)):
        angle = _off(measured, key)
        right = angle <= tolerance["direction"]
        reason = Reason.DIRECTION if right else Reason.UNKNOWN_DIRECTION
        directions.append(AuditCheck(f"{kind}: direction", right, reason, {"sine": angle}, angle))
    nearest = {"curvature": key[0], "sharing": key[1]}
    block = AuditCheck("curvature", True, Reason.NEAREST_BLOCK, nearest)
    if not any(check.passed for check in directions):
        block = AuditCheck("curvature", False, Reason.NO_KNOWN_BLOCK, nearest)
    elif asked is not None and key[0] != asked:
        data = {"curvature": key[0], "asked": asked}
        block = AuditCheck("curvature", False, Reason.OTHER_CURVATURE, data)
    return [block, *directions]


AXES: dict[str, Callable[[Case], float]] = {
    "batch size B": lambda case: case.batch,
    "positions T": lambda case: case.positions,
    "stride": lambda case: case.stride,
    "input scale": lambda case: case.scale,
}


def _power_checks(
    kind: str,
    measured: list[MeasuredStep],
    key: Key,
    curvature_scale: float,
    tolerance: dict[str, float],
) -> list[AuditCheck]:
    """The powers of B, T, stride and scale by which the curvature is off, and the constant left.

    What a power means is said only where the directions are those of the block.
    """
    axes = {
        name: [math.log(size_of(m.case)) for m in measured]
        for name, size_of in AXES.items()
        if len({size_of(m.case) for m in measured}) > 1
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
        name = f"{kind}: {axis}"
        if abs(power) <= tolerance["power"]:
            checks.append(AuditCheck(name, True, Reason.POWER_RIGHT, measured=power))
            continue
        nearest = round(2 * power) / 2
        plain = abs(power - nearest) < max(tolerance["power"], 0.1) and nearest != 0
        data = {"axis": axis, "power": nearest if plain else power, "plain": plain, "known": known}
        checks.append(AuditCheck(name, False, Reason.POWER_OFF, data, power))
    if rest > 10 * tolerance["power"]:
        data = {"off": math.expm1(rest)}
        checks.append(AuditCheck(f"{kind}: power law", False, Reason.NO_POWER_LAW, data, rest))
    if any(check.passed is False for check in checks):
        return checks  # a constant beside wrong powers means nothing
    constant = math.exp(float(logs.mean())) / curvature_scale
    fair = abs(math.log(constant)) <= math.log1p(tolerance["constant"])
    reason = Reason.CONSTANT_RIGHT if fair else Reason.CONSTANT_OFF
    data = {"factor": constant}
    return [*checks, AuditCheck(f"{kind}: constant", fair, reason, data, constant)]


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
        return [AuditCheck(name, None, Reason.MEND_FIRST) for name in names]
    larger = options.larger
    patches = measure(options, Case("Conv2d", larger * 8, 3, 2, LARGE, kernel=2, gain=LARGE))
    angle = patches.off(key)
    fair = angle <= tolerance["direction"]
    checks = [AuditCheck(names[0], fair, Reason.PATCHES, {"sine": angle}, angle)]
    if damping is None or not 0 < damping < math.inf:
        return checks + [AuditCheck(n, None, Reason.DAMPING_UNKNOWN) for n in names[1:]]
    lam = damping / curvature_scale
    plain = measure(options, Case("Linear", larger * 16, scale=1.0), lam)
    errors = {kind: _error(plain, (key[0], key[1], kind), curvature_scale) for kind in DAMPINGS}
    kind = min(errors, key=errors.__getitem__)
    error = errors[kind]
    fair = error <= tolerance["damping"]
    passing = [other for other in errors if errors[other] <= tolerance["damping"]]
    others = [other for other in passing if other != kind] if fair else []
    data = {"kind": kind, "damping": damping, "error": error, "others": others}
    damped = AuditCheck("damping", fair, Reason.DAMPING, data, error)
    if not fair:
        unmade = [AuditCheck(n, None, Reason.MEND_DAMPING_FIRST) for n in names[1:3]]
        return [*checks, *unmade, damped]
    cases = (Case("Linear", larger * 16, bias=True), Case("Conv2d", larger * 8, 2, bias=True))
    for name, case in zip(names[1:3], cases, strict=True):
        measured = measure(options, case, lam)
        checks.append(_bias_check(name, measured, (*key[:2], kind), curvature_scale, tolerance))
    return [*checks, damped]


def _error(measured: MeasuredStep, key: Key, curvature_scale: float) -> float:
    """|step - reference| / |reference|."""
    reference = measured.references[key] / curvature_scale
    return float((measured.step - reference).norm() / reference.norm())


def _bias_check(
    name: str, measured: MeasuredStep, key: Key, curvature_scale: float, tolerance: dict[str, float]
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
    if max(errors.values()) <= allowed:
        return AuditCheck(name, True, Reason.JOINT_BIAS, measured=factor)
    data = {"weight_error": errors["weight"], "bias_error": errors["bias"], "factor": factor}
    return AuditCheck(name, False, Reason.BIAS_OFF, data, factor)
