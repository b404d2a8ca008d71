"""What an audit of a K-FAC found, as data; the sentences are in `decaylab.audits.words`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from decaylab.audits.words import explain, joined, title_of
from decaylab.records.files import without_nan


class Reason(Enum):
    """Why a check passed, failed or was not made; what its `data` hold is in parentheses."""

    NEAREST_BLOCK = "nearest-block"  # (curvature, sharing)
    NO_KNOWN_BLOCK = "no-known-block"  # (curvature, sharing) of the nearest
    OTHER_CURVATURE = "other-curvature"  # (curvature, asked)
    PLAIN_GRADIENTS = "plain-gradients"
    UPHILL = "uphill"
    DIRECTION = "direction"  # (sine)
    UNKNOWN_DIRECTION = "unknown-direction"  # (sine)
    POWER_RIGHT = "power-right"
    POWER_OFF = "power-off"  # (axis, power, plain, known)
    NO_POWER_LAW = "no-power-law"  # (off)
    CONSTANT_RIGHT = "constant-right"
    CONSTANT_OFF = "constant-off"  # (factor)
    PATCHES = "patches"  # (sine)
    MEND_FIRST = "mend-first"
    MEND_DAMPING_FIRST = "mend-damping-first"
    DAMPING_UNKNOWN = "damping-unknown"
    DAMPING = "damping"  # (kind, damping, error, others)
    JOINT_BIAS = "joint-bias"
    BIAS_OFF = "bias-off"  # (weight_error, bias_error, factor)


@dataclass(frozen=True)
class AuditCheck:
    """One thing checked. `passed` is None if it could not be, and `reason` says why."""

    name: str
    passed: bool | None
    measured: float | None
    reason: Reason
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The reason as a sentence."""
        return explain(self.reason.name, self.data)


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
    def known(self) -> bool:
        """Whether the steps have the directions of a known block, for some kind of layer."""
        directions = (Reason.DIRECTION, Reason.UNKNOWN_DIRECTION)
        return any(check.passed for check in self.checks if check.reason in directions)

    @property
    def title(self) -> str:
        """The optimizer and its block, in words."""
        return title_of(self.optimizer, self.curvature, self.sharing, self.sampled, self.known)

    def __getitem__(self, name: str) -> AuditCheck:
        return next(check for check in self.checks if check.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        checks = [
            asdict(check) | {"reason": check.reason.value, "words": check.words}
            for check in self.checks
        ]
        return dict(without_nan({"passed": self.passed, **asdict(self), "checks": checks}))

    def __str__(self) -> str:
        return joined(self.title, [(c.passed, c.name, c.words) for c in self.checks])
