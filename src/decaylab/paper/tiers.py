"""Tiers: the same experiments from seconds on a laptop to the paper's schedule on a GPU.

| tier  | data          | networks                        | epochs and drop interval            |
|-------|---------------|---------------------------------|-------------------------------------|
| smoke | digits        | stand-ins, width 1/8            | two, one: is everything wired up?   |
| quick | digits        | stand-ins, width 1/8            | 30, 12 (K-FAC 15, 6)                |
| short | the paper's   | the paper's                     | one fifth of the paper's            |
| full  | the paper's   | the paper's                     | the paper's (recipe line 14)        |

Stand-ins on digits, whose images are 8x8: ResNet20 for ResNet32, fully connected nets for the VGGs
(their last convolutions would see a single pixel, and do not train without BN). Nothing is
augmented there (a mirrored or half-cut digit is another one), so that BN and BN+Aug cells are the
same runs, and CIFAR-10's and CIFAR-100's are. Learning rates and weight decays are those of
`chosen/digits.csv`: the published ones would do nothing in so few steps. They were chosen for a
first-stage exposure (sum of lr*wd, SGD: / (1 - momentum)) of 1.2 to 2 at tier quick.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from decaylab.errors import check_name
from decaylab.paper.settings import table
from decaylab.training import RunSpec

STAND_INS: dict[str, dict[str, Any]] = {
    "resnet32": {"network": "resnet20"},
    "vgg11": {"network": "mlp", "hidden": (256,) * 2},
    "vgg13": {"network": "mlp", "hidden": (256,) * 3},
    "vgg16": {"network": "mlp", "hidden": (256,) * 4},
    "vgg19": {"network": "mlp", "hidden": (256,) * 5},
}
STAND_IN_WIDTH = 0.125


@dataclass(frozen=True)
class Tier:
    """How an experiment of the paper is sized.

    Attributes:
        name: smoke, quick, short or full.
        epochs: digits only: epochs and drop interval of first-order optimizers, then of K-FAC.
        batches: digits only: the paper's batch size -> ours.
        kfac: digits only: K-FAC's intervals, shorter as the runs are.
        divide: the paper's data only: what epochs and drop interval are divided by.
        schedule: how long its runs are, in words that stand behind "at".
        searched: the tiers whose searches it may use, its own first.
    """

    name: str
    epochs: tuple[tuple[int, int], tuple[int, int]] | None = None
    batches: Mapping[int, int] | None = None
    kfac: Mapping[str, int] | None = None
    divide: int = 1
    schedule: str = "a schedule of its own"
    searched: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is the paper's data and schedule."""
        return not self.on_digits and self.divide == 1

    @property
    def on_digits(self) -> bool:
        """Whether digits stand in for the paper's data sets."""
        return self.epochs is not None


TIERS: dict[str, Tier] = {
    "smoke": Tier(
        "smoke",
        epochs=((2, 1), (2, 1)),
        batches={128: 256, 640: 512, 2000: 1024},
        kfac={"refresh_every": 4, "invert_every": 8, "initialize_batches": 1},
        searched=("smoke", "quick"),
    ),
    "quick": Tier(
        "quick",
        epochs=((30, 12), (15, 6)),
        batches={128: 32, 640: 160, 2000: 480},
        kfac={"refresh_every": 5, "invert_every": 25, "initialize_batches": 11},
        searched=("quick",),
    ),
    "short": Tier(
        "short", divide=5, schedule="one fifth of the paper's schedule", searched=("short",)
    ),
    "full": Tier("full", schedule="the paper's schedule", searched=("full", "short")),
}


def tier_of(name: str) -> Tier:
    """A tier by name."""
    check_name("tier", name, TIERS)
    return TIERS[name]


def sized(values: Mapping[str, Any], tier: Tier) -> dict[str, Any]:
    """The fields of a run of the paper, sized for a tier.

    `values` are a spec's fields at the paper's full schedule. Constant learning rates (a drop
    interval of all epochs) stay constant.
    """
    if tier.on_digits:
        return _on_digits(values, tier)
    constant = values["lr_drop_every"] >= values["epochs"]
    epochs = max(1, values["epochs"] // tier.divide)
    every = epochs if constant else max(1, values["lr_drop_every"] // tier.divide)
    return {**values, "epochs": epochs, "lr_drop_every": every, "precision": "bf16"}


def stand_ins(specs: Iterable[RunSpec], named: Callable[[str], str] = str) -> str:
    """Which networks some runs on digits are really of, and for which of the paper's they stand.

    >>> from decaylab.paper import cells
    >>> stand_ins(cell.runs[0] for cell in cells("table1", "quick"))
    'mlp 256x256x256x256 for vgg16, resnet20 for resnet32, at width 0.125'
    """
    networks: dict[str, None] = {}
    for spec in specs:
        words = [named(spec.network)]
        if spec.hidden is not None:
            words.append("x".join(map(str, spec.hidden)))
        for theirs, ours in STAND_INS.items():
            if all(getattr(spec, field) == value for field, value in ours.items()):
                words += ["for", named(theirs)]
        networks[" ".join(words)] = None
    return f"{', '.join(networks)}, at width {STAND_IN_WIDTH:g}"


def _on_digits(values: Mapping[str, Any], tier: Tier) -> dict[str, Any]:
    assert tier.epochs is not None
    assert tier.batches is not None
    kfac = values["optimizer"].startswith("kfac")
    epochs, every = tier.epochs[kfac]
    setting = values["optimizer"], str(int(values["batch_norm"]))
    rows = {(row["optimizer"], row["batch_norm"]): row for row in table("chosen/digits.csv")}
    row = rows[setting]
    check_name(f"batch size of tier {tier.name}", values["batch_size"], tier.batches)
    batch_size = tier.batches[values["batch_size"]]
    by_batch = math.sqrt(batch_size / tier.batches[128])
    ours: dict[str, Any] = {
        "data": "digits",
        "augment": False,
        "width": STAND_IN_WIDTH,
        "batch_size": batch_size,
        "epochs": epochs,
        "lr_drop_every": epochs if values["lr_drop_every"] >= values["epochs"] else every,
        "lr": float(f"{float(row['lr']) * by_batch:.3g}"),
        **STAND_INS.get(values["network"], {}),
    }
    if values["weight_decay"]:
        ours["weight_decay"] = float(row["weight_decay"])
    if kfac:
        ours |= {"damping": float(row["damping"]), "kl_clip": float(row["kl_clip"])}
        ours |= tier.kfac or {}
    return {**values, **ours}
