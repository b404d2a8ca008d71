"""A run as a frozen value: everything that decides its numbers, and nothing else.

It is read from and written as TOML, and equal content gives an equal id. Device, folders and tier
are not part of it. Fields left out take the published settings of their optimizer (recipe lines 1-9
and 14), all of them in `PUBLISHED` below.
"""

import hashlib
import json
import re
import tomllib
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from decaylab.data import DATA_SETS
from decaylab.errors import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    BadValue,
    Conflict,
    Failed,
    Misplaced,
    NotRead,
    Range,
    check_name,
    naming,
)
from decaylab.networks import NETWORKS
from decaylab.networks.mlp import ACTIVATIONS
from decaylab.optim.decay import DECAYS, OPTIMIZERS, SCOPES, check_optimizer
from decaylab.records import RunFolder
from decaylab.records.index import RunSummary

CHOICES: dict[str, Collection[str]] = {
    "data": tuple(DATA_SETS),
    "network": NETWORKS,
    "activation": ACTIVATIONS,
    "optimizer": OPTIMIZERS,
    "decay": DECAYS,
    "decay_scope": SCOPES,
    "damping_scaling": ("fixed", "scale-free", "trace"),
    "step_scaling": ("rms", "spectral"),
    "precision": ("fp32", "tf32", "bf16"),
}

_SGD: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "epochs": 200, "lr_drop_every": 60}
_ADAM: dict[str, Any] = {
    **{"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8},
    **{"epochs": 200, "lr_drop_every": 60},
}
_KFAC: dict[str, Any] = {
    **{"momentum": 0.9, "epochs": 100, "lr_drop_every": 40},
    **{"damping": 1e-3, "damping_scaling": "fixed", "kl_clip": 0.0},
    **{"refresh_every": 10, "invert_every": 100, "inversion_lag": 0},
    **{"factor_decay": 0.95, "initialize_batches": 100},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "sgd": _SGD,
    "adam": _ADAM,
    "kfac-f": {**_KFAC, "lr": 0.001, "curvature_scale": 1.0},
    "kfac-g": {**_KFAC, "lr": 0.03, "curvature_scale": 2.0},
}
"""Per optimizer, what a field left out is taken to be; a field not listed is not one of its own."""
WITHOUT_BATCH_NORM: dict[str, dict[str, Any]] = {
    "kfac-f": {"kl_clip": 1e-5},
    "kfac-g": {"kl_clip": 1e-3, "damping": 1e-2},
}
"""And where it is something else in networks without batch norm (Table 1's, with decay)."""

_SCHEDULE = ("epochs", "lr_drop_every", "initialize_batches")
_RANGES = {
    **dict.fromkeys(("lr", "eps", "damping", "curvature_scale", "lr_drop_factor"), POSITIVE),
    **dict.fromkeys(("weight_decay", "kl_clip", "batch_norm_eps", "step_rms"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "betas", "factor_decay"), FRACTION),
    **dict.fromkeys(
        ("refresh_every", "invert_every", "lr_drop_every"), Range(at_least=1, at_most=10**9)
    ),
    **dict.fromkeys(("initialize_batches", "inversion_lag"), Range(at_least=0, at_most=10**9)),
    "width": Range(above=0, at_most=64),
    "hidden": Range(at_least=1, at_most=2**20),
    "batch_size": Range(at_least=1, at_most=2**24),
    "epochs": Range(at_least=1, at_most=10**7),
    "lr_drop_steps": Range(at_least=0, at_most=10**12),
    "seed": Range(at_least=0, at_most=2**63 - 1),
}
MOST_LAYERS, MOST_WEIGHTS, LONGEST_NAME = 1000, 2**33, 200
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _option(default: Any, text: str, panel: str) -> Any:
    return field(default=default, metadata={"help": text, "panel": panel})


@dataclass(frozen=True)
class RunSpec:
    """One training run.

    A field that is None takes the published setting of its optimizer (`resolved`).

    >>> spec = RunSpec(data="digits", network="mlp", optimizer="adam")
    >>> spec.resolved().epochs, RunSpec.from_toml(spec.to_toml()) == spec.resolved()
    (200, True)
    """

    data: str = _option("digits", "Data set: digits, mnist, cifar10 or cifar100.", "Data")
    augment: bool = _option(False, "Random crop (padding 4) and flip.", "Data")
    held_out: bool = _option(False, "Train on 9/10, test on the rest (for searches).", "Data")
    network: str = _option("mlp", "mlp, vgg11/13/16/19 or resnet20/32/44/56.", "Network")
    width: float = _option(1.0, "Factor on the number of channels.", "Network")
    hidden: tuple[int, ...] | None = _option(None, "MLP only: sizes, e.g. 128,128.", "Network")
    activation: str = _option("relu", "MLP only: relu or linear.", "Network")
    bias: bool = _option(True, "Biases in linear and conv layers.", "Network")
    batch_norm: bool = _option(False, "Batch normalisation.", "Network")
    batch_norm_eps: float = _option(1e-3, "The eps of batch normalisation.", "Network")
    optimizer: str = _option(
        "sgd", "sgd, adam, adamw, kfac-f (Fisher) or kfac-g (Gauss-Newton).", "Optimizer"
    )
    lr: float | None = _option(None, "Learning rate.", "Optimizer")
    momentum: float | None = _option(None, "SGD and K-FAC: momentum.", "Optimizer")
    betas: tuple[float, float] | None = _option(None, "Adam: betas, e.g. 0.9,0.999.", "Optimizer")
    eps: float | None = _option(None, "Adam: eps.", "Optimizer")
    decay: str = _option("none", "none, l2, decoupled or independent.", "Decay")
    weight_decay: float = _option(0.0, "Strength of the decay.", "Decay")
    decay_scope: str = _option("all", "What is decayed: all, conv or fc.", "Decay")
    norm_source: str = _option(
        "", "Id of a run whose layer norms this one takes over after each epoch.", "Decay"
    )
    size_source: str = _option(
        "", "Id of a run whose layer norms this one takes over at each step.", "Paths"
    )
    rotation_source: str = _option(
        "", "Id of a run whose layers' angles this one takes over at each step.", "Paths"
    )
    damping_source: str = _option(
        "", "K-FAC: id of a run whose effective damping this one takes over.", "Paths"
    )
    held_layers: str = _option(
        "all", "Which layers follow a path: all, conv, fc (the last), or names: 0,3.", "Paths"
    )
    held_decay: bool = _option(True, "Whether layers that follow a path decay too.", "Paths")
    damping: float | None = _option(None, "Damping lambda.", "K-FAC")
    damping_scaling: str | None = _option(
        None, "fixed, scale-free, or trace: relative to each block's mean eigenvalue.", "K-FAC"
    )
    kl_clip: float | None = _option(
        None, "Limit on the size of a step (KL clip); 0 for none.", "K-FAC"
    )
    step_rms: float = _option(
        0.0, "Root mean square of each layer's step before momentum; 0: unscaled.", "K-FAC"
    )
    step_scaling: str = _option(
        "rms", "Steps of a set size: rms, or spectral (Muon's in K-FAC's geometry).", "K-FAC"
    )
    curvature_scale: float | None = _option(None, "Factor on the curvature.", "K-FAC")
    refresh_every: int | None = _option(None, "Steps between factor refreshes.", "K-FAC")
    invert_every: int | None = _option(None, "Steps between inversions.", "K-FAC")
    inversion_lag: int | None = _option(None, "Steps from an inversion to its use.", "K-FAC")
    factor_decay: float | None = _option(
        None, "Coefficient of the factors' running average.", "K-FAC"
    )
    initialize_batches: int | None = _option(
        None, "Batches that initialise the factors, at most one pass; 0 for none.", "K-FAC"
    )
    late_refresh: bool = _option(
        False, "K-FAC: refresh and invert after the step, as the paper's authors do.", "K-FAC"
    )
    batch_size: int = _option(128, "Images per step.", "Schedule")
    keep_last_batch: bool = _option(False, "Keep an epoch's last, smaller batch.", "Schedule")
    epochs: int | None = _option(None, "Passes over the training data.", "Schedule")
    lr_drop_every: int | None = _option(None, "Epochs between drops of lr.", "Schedule")
    lr_drop_steps: int = _option(0, "Steps between drops of lr; 0: whole epochs.", "Schedule")
    lr_drop_factor: float = _option(10.0, "A drop divides lr by this.", "Schedule")
    precision: str = _option("fp32", "fp32, tf32 or bf16 (autocast).", "Schedule")
    deterministic: bool = _option(False, "Bit-for-bit reproducible; slower on a GPU.", "Schedule")
    seed: int = _option(0, "Seed for weights, batches and sampling.", "Schedule")

    def __post_init__(self) -> None:
        for name, kinds in field_kinds().items():
            value = getattr(self, name)
            check = _checked_once if type(value) in _PLAIN else _checked
            object.__setattr__(self, name, check(name, value, kinds))
        self._check_combination()

    def _check_combination(self) -> None:
        published = PUBLISHED[self.optimizer]
        for name in _settings_of_others(self.optimizer):
            if getattr(self, name) is not None:
                remedy = f"leave it out; {self.optimizer} has {', '.join(published)}"
                raise Misplaced([name], "other optimizers", remedy)
        if self.weight_decay and self.decay == "none":
            remedy = "set decay (--decay) to l2, decoupled or independent"
            settings = [f"weight_decay = {self.weight_decay}", "decay = none"]
            raise Conflict(settings, "nothing decays with that strength", remedy)
        if self.step_rms and OPTIMIZERS[self.optimizer] != "kfac":
            raise Misplaced(["step_rms"], "K-FAC")
        if self.step_rms and self.resolved().kl_clip:
            remedy = "set kl_clip (--kl-clip) to 0"
            raise Conflict(["step_rms", "kl_clip"], "both set how long steps are", remedy)
        if self.step_scaling != "rms" and not self.step_rms:
            remedy = "set step_rms (--step-rms), for example to 0.2"
            raise Misplaced([f"step_scaling = {self.step_scaling}"], "a step of a set size", remedy)
        if self.late_refresh and "refresh_every" not in published:
            raise Misplaced(["late_refresh"], "K-FAC")
        if self.norm_source and not self.batch_norm:
            raise Misplaced(["norm_source"], "networks with BN", "set batch_norm = true")
        self._check_paths()
        if self.network != "mlp" and (self.hidden is not None or self.activation != "relu"):
            raise Misplaced(["hidden", "activation"], "mlp")

    def _check_paths(self) -> None:
        if self.damping_source and not self.optimizer.startswith("kfac"):
            raise Misplaced(["damping_source"], "K-FAC")
        if self.damping_source and self.damping_scaling in ("scale-free", "trace"):
            settings = ["damping_source", f"damping_scaling = {self.damping_scaling}"]
            remedy = "set damping_scaling to fixed, or leave damping_source out"
            raise Conflict(settings, "a scaled damping follows no other run's", remedy)
        if not self.held_decay and not self.weight_decay:
            raise Misplaced(["held_decay"], "runs that decay")
        if self.held_layers != "all" and not (self.followed or not self.held_decay):
            remedy = "name a source, or leave it out"
            raise Misplaced(["held_layers"], "runs that follow a path", remedy)

    @property
    def followed(self) -> dict[str, str]:
        """The paths that this run follows: size, rotation, damping -> id of the run."""
        sources = {
            name: getattr(self, f"{name}_source") for name in ("size", "rotation", "damping")
        }
        return {name: source for name, source in sources.items() if source}

    def resolved(self) -> "RunSpec":
        """The same run with every setting of its optimizer filled in."""
        published = PUBLISHED[self.optimizer]
        if not self.batch_norm:
            published = published | WITHOUT_BATCH_NORM.get(self.optimizer, {})
        missing = {name: value for name, value in published.items() if getattr(self, name) is None}
        if self.network == "mlp" and self.hidden is None:
            missing["hidden"] = (128, 128)
        return replace(self, **missing) if missing else self

    def optimizer_settings(self) -> dict[str, Any]:
        """The settings that its optimizer is built with, by name: not the schedule's."""
        spec = self.resolved()
        names = [name for name in PUBLISHED[spec.optimizer] if name not in _SCHEDULE]
        return {name: getattr(spec, name) for name in names}

    @cached_property
    def id(self) -> str:
        """A readable name and a hash of the content, e.g. `digits-mlp-sgd-none-3f2a91c0`.

        Fields at their default are not part of the hash, so a field added later does not rename
        existing runs.
        """
        spec = self.resolved()
        content = {
            item.name: getattr(spec, item.name)
            for item in fields(spec)
            if getattr(spec, item.name) != item.default
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        parts = [spec.data, spec.network, *(["bn"] if spec.batch_norm else [])]
        return "-".join([*parts, spec.optimizer, spec.decay, digest[:8]])

    def to_toml(self) -> str:
        """The resolved spec as TOML; what does not apply (None) is left out."""
        spec = self.resolved()
        values = {item.name: getattr(spec, item.name) for item in fields(spec)}
        return "".join(f"{key} = {_toml(v)}\n" for key, v in values.items() if v is not None)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "RunSpec":
        """A spec from plain values; an unknown key is refused."""
        known = [item.name for item in fields(cls)]
        for key in values:
            check_name("key", key, known)
        return cls(**_without_alias(values))

    @classmethod
    def from_toml(cls, text: str, overrides: Mapping[str, Any] | None = None) -> "RunSpec":
        """A spec from TOML text; `overrides` win over it."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Failed("reading it as TOML", error, "correct it there") from error
        return cls.from_mapping({**values, **(overrides or {})})

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "RunSpec":
        """A spec from a TOML file; an error names the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NotRead(path, error, "give a TOML file") from error
        with naming(path):
            return cls.from_toml(text, overrides)

    @classmethod
    def of_run(cls, folder: RunFolder) -> "RunSpec":
        """The spec of a run; an error names its file."""
        text = folder.spec_text()
        with naming(folder.path / "spec.toml"):
            return cls.from_toml(text)

    @classmethod
    def of_summary(cls, summary: RunSummary) -> "RunSpec":
        """The same from an index."""
        with naming(summary.folder.path / "spec.toml"):
            return cls.from_mapping(dict(summary.spec))


def _without_alias(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """AdamW as what it is: Adam with decoupled decay."""
    if str(values.get("optimizer")).lower() != "adamw":
        return values
    decay = values.get("decay", "decoupled")
    if decay == "l2":
        remedy = "choose adam for l2, or leave out the decay"
        raise Conflict(["adamw", "l2"], "adamw has decoupled decay", remedy)
    return {**values, "optimizer": "adam", "decay": decay}


@cache
def _settings_of_others(optimizer: str) -> tuple[str, ...]:
    """What only other optimizers have, in the order of the fields."""
    others = set[str]().union(*PUBLISHED.values()) - PUBLISHED[optimizer].keys()
    return tuple(item.name for item in fields(RunSpec) if item.name in others)


@cache
def field_kinds() -> dict[str, tuple[Any, ...]]:
    """Each field of a spec -> its type, and NoneType if it may be left out."""
    hints = get_type_hints(RunSpec).items()
    return {n: get_args(h) if isinstance(h, types.UnionType) else (h,) for n, h in hints}


def _checked(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """The value in its field's type, or an error with key, expected and given."""
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    converted = _converted(value, kind)
    if converted is None:
        raise BadValue(name, value, _words(kind))
    if name == "optimizer":
        check_optimizer(converted)
    if name in CHOICES:
        check_name(name, converted, CHOICES[name])
    if name.endswith("_source") and converted and not is_run_id(converted):
        raise BadValue(name, value, "the id of a run in the same folder")
    if isinstance(converted, str) and name != "held_layers":
        Range(at_most=LONGEST_NAME).check(f"the length of {name}", len(converted))
    if name == "hidden":
        _check_hidden(converted)
    for part in converted if isinstance(converted, tuple) else (converted,):
        if name in _RANGES:
            _RANGES[name].check(name, part)
    return converted


def is_run_id(name: str) -> bool:
    """Whether a name can be a run's id: the name of a folder, not a path.

    >>> is_run_id("digits-mlp-sgd-none-3f2a91c0"), is_run_id("../other"), is_run_id("a" * 300)
    (True, False, False)
    """
    return len(name) <= LONGEST_NAME and _RUN_ID.fullmatch(name) is not None


def _check_hidden(sizes: tuple[int, ...]) -> None:
    Range(at_most=MOST_LAYERS).check("the number of hidden layers", len(sizes))
    weights = sum(before * after for before, after in pairwise(sizes))
    Range(at_most=MOST_WEIGHTS).check("the number of hidden weights", weights, "give smaller sizes")


_checked_once = lru_cache(maxsize=4096, typed=True)(_checked)
"""The same for values that were checked before: a report looks at thousands of specs."""
_PLAIN = (str, int, float, bool, type(None))


def _converted(value: Any, kind: Any) -> Any:
    """The value as `kind`, or None: no silent conversion but int to float and list to tuple."""
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if not isinstance(value, (list, tuple)):
            return None
        if inner[-1] is not Ellipsis and len(inner) != len(value):
            return None
        parts = tuple(_converted(part, inner[0]) for part in value)
        return None if None in parts else parts
    if kind is float and type(value) in (int, float):
        if not -1e300 < value < 1e300:  # also nan, inf and whole numbers beyond a float
            return None
        return float(value) + 0.0  # -0.0 and 0.0 are one value
    return value if type(value) is kind else None


def _words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        count = "a list" if inner[-1] is Ellipsis else f"a list of {len(inner)}"
        return f"{count} of {'whole numbers' if inner[0] is int else 'numbers'}"
    return {str: "a string", bool: "true or false", int: "a whole number"}.get(kind, "a number")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    return json.dumps(value)  # strings are known names; repr of a float is valid TOML
