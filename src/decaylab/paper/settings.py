"""The settings behind a cell: the published ones, and where they are silent, searched or chosen.

- `reference/table1-hyperparameters.csv`: the authors' tuned settings of Table 1's 64 cells.
- `chosen/mnist.csv`: Fig. 5's MNIST nets, for which nothing is published: ours, not searched.
- `searched/*.toml`: what `decaylab search` found (recipe lines 15 and 18), one file per cell; a
  folder given by the caller (`RUNS/searched`) is looked through first.
"""

import csv
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from decaylab.errors import BadValue, Damaged, Lacks
from decaylab.sweeps.search import on_edge

ROW = ("dataset", "network", "batch_norm", "augment", "optimizer")
SCHEMES = ("none", "wd", "l2", "wd-conv", "wd-fc", "wn-conv", "wd-fc+wn-conv", "undecayed")
"""What is done about decay: nothing, weight decay, L2, decay by scope, norm transfer; and nothing
at the settings that were tuned for weight decay."""


def decay_kind(optimizer: str) -> str:
    """The paper's weight decay: inside SGD's momentum (recipe line 1), decoupled elsewhere."""
    return "l2" if optimizer == "sgd" else "decoupled"


@cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """The rows of a CSV in this package, e.g. `reference/table1.csv`."""
    text = resources.files("decaylab.paper").joinpath(name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def published(key: Mapping[str, Any], decayed: bool) -> dict[str, str]:
    """The row of the hyperparameter tables for a cell; VGG11-19 take VGG16's (recipe line 15)."""
    wanted = {name: str(key[name]) for name in ROW} | {"weight_decay_on": str(int(decayed))}
    if wanted["network"].startswith("vgg"):
        wanted["network"] = "vgg16"
    for row in (*table("reference/table1-hyperparameters.csv"), *table("chosen/mnist.csv")):
        if all(row[name] == value for name, value in wanted.items()):
            return row
    described = ", ".join(f"{name}={value}" for name, value in wanted.items())
    raise Lacks("Table 1", f"setting of {described}", "choose one of its cells")


def full_schedule(key: Mapping[str, Any], row: Mapping[str, str]) -> dict[str, Any]:
    """A spec's fields at the paper's schedule, without decay (recipe lines 1-9, 14 and 18-19).

    Batches other than 128: lr by the square root of the batch (recipe line 18).
    """
    optimizer, batch_size = str(key["optimizer"]), key.get("batch_size", 128)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise BadValue("batch_size", batch_size, "a whole number of at least 1")
    values: dict[str, Any] = {
        "data": key["dataset"],
        "augment": bool(int(key["augment"])),
        "network": key["network"],
        "batch_norm": bool(int(key["batch_norm"])),
        "optimizer": optimizer,
        "lr": float(f"{float(row['learning_rate']) * math.sqrt(batch_size / 128):.3g}"),
        "batch_size": batch_size,
        "epochs": int(row["epochs"]),
        "lr_drop_every": 40 if optimizer.startswith("kfac") else 80 if batch_size == 2000 else 60,
        "decay": "none",
        "weight_decay": 0.0,
    }
    if key.get("constant_lr"):
        values["lr_drop_every"] = values["epochs"]
    if "hidden" in key:
        values["hidden"] = tuple(int(size) for size in str(key["hidden"]).split("x"))
    if optimizer.startswith("kfac"):
        values["damping"] = float(row["damping"])
        values["kl_clip"] = float(row["kl_clip"] or 0.0)
        values["factor_decay"] = float(row["factor_decay"])
        values["curvature_scale"] = 2.0 if optimizer == "kfac-g" else 1.0
    return values


@dataclass(frozen=True)
class Searched:
    """A setting found by `decaylab search`: the cell it is for, its values, and where it lies.

    `edges` are the fields whose value is the smallest or the largest of those tried, `fields` those
    of which several were.
    """

    cell: Mapping[str, Any]
    values: Mapping[str, float]
    tier: str
    path: str
    edges: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def searched(
    key: Mapping[str, Any], scheme: str, tiers: Sequence[str], folder: Path | None = None
) -> Searched | None:
    """What a search at one of some tiers, the first that has one, found for a cell, or None.

    A search at batch 128 is not one for other batches, one with drops of lr not one without.
    """
    wanted = {name: key[name] for name in ROW} | {"scheme": scheme}
    wanted["batch_size"] = key.get("batch_size", 128)
    wanted["constant_lr"] = int(bool(key.get("constant_lr")))
    for name, search in product(tiers, _all_searched(folder)):
        cell = {part: search.cell.get(part, 0) for part in wanted}
        if search.tier == name and all(str(cell[part]) == str(wanted[part]) for part in wanted):
            return search
    return None


def searches_stamp(folder: Path | None) -> tuple[tuple[str, int, int], ...]:
    """What changes when a search ends in a folder: names, sizes and times of what was found."""
    if folder is None or not folder.is_dir():
        return ()
    files = [entry for entry in os.scandir(folder) if entry.name.endswith(".toml")]
    facts = [(entry.path, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in files]
    return tuple(sorted(facts))


def _all_searched(folder: Path | None) -> tuple[Searched, ...]:
    return (*_read_all(searches_stamp(folder)), *_packaged())


@lru_cache(maxsize=8)  # for every cell of an artefact the same
def _read_all(files: tuple[tuple[str, int, int], ...]) -> tuple[Searched, ...]:
    return tuple(_read(path, Path(path).read_bytes()) for path, _, _ in files)


@cache
def _packaged() -> tuple[Searched, ...]:
    folder = resources.files("decaylab.paper").joinpath("searched")
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return tuple(
        _read(entry.name, entry.read_bytes()) for entry in entries if entry.name.endswith(".toml")
    )


def _read(path: str, content: bytes) -> Searched:
    try:
        entry = tomllib.loads(content.decode())
        values = {name: float(value) for name, value in entry["winner"].items()}
        search = entry["search"]
        tried = {name: search[f"{name}_tried"] for name in values if f"{name}_tried" in search}
        fields = tuple(name for name, several in tried.items() if len(set(several)) > 1)
        edges = on_edge(values, tried)
        return Searched(entry["cell"], values, search["tier"], path, edges, fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(path, error, "remove it, and search again") from error
