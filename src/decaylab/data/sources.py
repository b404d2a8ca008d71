"""Where a data set is found, and how it is loaded.

Looked for in the folder given, in $DECAYLAB_DATA and in the user's cache (where `decaylab data
fetch` puts it); each may hold the files directly or in a folder named after the data set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from decaylab.data.cache import cache_folder, decoded_path, read_decoded, write_decoded
from decaylab.data.facts import DATA_SETS, Facts, ImageFile, check, facts_of
from decaylab.data.formats import (
    pickle_refusal,
    read_cifar_archive,
    read_cifar_folder,
    read_mnist,
    read_parquet,
)
from decaylab.data.sets import DataSet, Split
from decaylab.errors import Conflict, DecaylabError, Lacks, NoFolder, NotRead

SHARD = re.compile(r"(train|test)-(\d{5})-of-(\d{5})\.parquet")
LABEL_COLUMN = {"cifar100": "fine_label"}
MNIST_STEMS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class CifarLayout:
    """Names inside and around one of CIFAR's binary archives, and of the pickled one."""

    archive: str
    folder: str
    files: dict[str, tuple[str, ...]]
    label_bytes: int
    pickled: tuple[str, ...]


CIFAR = {
    "cifar10": CifarLayout(
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
        label_bytes=1,
        pickled=("cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1", "data_batch_1"),
    ),
    "cifar100": CifarLayout(
        "cifar-100-binary.tar.gz",
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        label_bytes=2,
        pickled=("cifar-100-python.tar.gz", "cifar-100-python/meta", "meta"),
    ),
}


@dataclass(frozen=True)
class Source:
    """Files that hold a data set: where, in which format, which, and how a split is read."""

    place: Path
    format: str
    files: tuple[Path, ...]
    read: Callable[[str], list[ImageFile]]


def load(name: str, data_dir: str | Path | None = None) -> DataSet:
    """Load a data set into memory (CPU), after checking that it is what its name says.

    The first load of CIFAR from parquet decodes 60,000 images (some 7 s); later ones read the
    decoded form from the user's cache in a fraction of a second. Images come in the order of the
    files, which is not the same in CIFAR's archive and in its parquet form.

    >>> digits = load("digits")
    >>> digits.train.images.shape, digits.classes
    (torch.Size([1437, 1, 8, 8]), 10)

    Args:
        name: one of `DATA_SETS`.
        data_dir: looked through first, before $DECAYLAB_DATA and the user's cache.
    """
    facts = facts_of(name)
    if name == "digits":
        splits = _checked(facts, _read_digits)
    else:
        source = find(name, data_dir)
        if source is None:
            raise DecaylabError(_not_found(name, data_dir))
        cache = decoded_path(name, source.files)
        decoded = read_decoded(cache, facts)
        if decoded is None:
            decoded = _checked(facts, source.read)
            write_decoded(cache, decoded)
        splits = decoded
    return DataSet(name, splits["train"], splits["test"], facts.classes, facts.mean, facts.std)


def find(name: str, data_dir: str | Path | None = None) -> Source | None:
    """The first place that holds `name`, judged by file names alone; None if there is none.

    Incomplete sets (a missing shard, one file of four) and, if nothing better is found, CIFAR's
    python archive are errors. Digits ships with scikit-learn and is in no folder.
    """
    facts = facts_of(name)
    if name == "digits":
        return None
    if data_dir is not None and not Path(data_dir).is_dir():
        raise NoFolder(Path(data_dir), "give an existing --data-dir")
    refused: Path | None = None
    for folder in _folders(name, data_dir):
        try:
            source, pickled = _look(facts, folder) if folder.is_dir() else (None, None)
        except OSError as error:
            raise NotRead(folder, error, "make it readable") from error
        if source is not None:
            return source
        refused = refused or pickled
    if refused is not None:
        raise pickle_refusal(refused, CIFAR[name].label_bytes)
    return None


def _look(facts: Facts, folder: Path) -> tuple[Source | None, Path | None]:
    """What one folder holds: a readable source, and a file of CIFAR's python archive."""
    if facts.name not in CIFAR:
        return _mnist(folder) or _parquet(facts, folder), None
    source = _cifar(facts.name, folder) or _parquet(facts, folder)
    pickled = (folder / path for path in CIFAR[facts.name].pickled)
    return source, next((path for path in pickled if path.is_file()), None)


def _roots(data_dir: str | Path | None) -> list[Path]:
    named = [Path(data_dir)] if data_dir is not None else []
    if environment := os.environ.get("DECAYLAB_DATA"):
        named.append(Path(environment).expanduser())
    return [*named, cache_folder()]


def _folders(name: str, data_dir: str | Path | None) -> list[Path]:
    """Each root's folder named after the data set, then the root itself.

    A root named after another data set holds that one: parquet files have the same names in all.
    """
    folders = []
    for root in _roots(data_dir):
        folders.append(root / name)
        if root.resolve().name not in DATA_SETS.keys() - {name}:
            folders.append(root)
    return folders


def _not_found(name: str, data_dir: str | Path | None) -> str:
    tried = ", ".join(str(root) for root in _roots(data_dir))
    return (
        f"the data set {name} is not in {tried}: run `decaylab data fetch {name}`, or give the "
        f"folder that holds it with --data-dir or DECAYLAB_DATA"
    )


def _mnist(folder: Path) -> Source | None:
    paths: dict[str, Path] = {}
    stems = [stem for pair in MNIST_STEMS.values() for stem in pair]
    for stem in stems:
        for path in (folder / stem, folder / f"{stem}.gz"):
            if path.is_file():
                paths.setdefault(stem, path)
    if not paths:
        return None
    if missing := [stem for stem in stems if stem not in paths]:
        raise _incomplete(folder, missing[0] + "[.gz]", "mnist")

    def read(split: str) -> list[ImageFile]:
        images, labels = MNIST_STEMS[split]
        return [read_mnist(paths[images], paths[labels])]

    return Source(folder, "idx", tuple(paths.values()), read)


def _cifar(name: str, folder: Path) -> Source | None:
    layout = CIFAR[name]
    names = [file for files in layout.files.values() for file in files]
    for place in (folder / layout.folder, folder):
        missing = [file for file in names if not (place / file).is_file()]
        if missing and len(missing) < len(names):
            raise _incomplete(place, missing[0], name)
        if not missing:
            return Source(
                place,
                "binary",
                tuple(place / file for file in names),
                lambda split, place=place: read_cifar_folder(  # type: ignore[misc]
                    place, layout.files[split], layout.label_bytes
                ),
            )
    archive = folder / layout.archive
    if not archive.is_file():
        return None
    return Source(
        folder,
        "binary archive",
        (archive,),
        lambda split: read_cifar_archive(archive, layout.files[split], layout.label_bytes),
    )


def _parquet(facts: Facts, folder: Path) -> Source | None:
    names_found = [path.name for path in folder.iterdir() if path.is_file()]
    matches = [match for name in names_found if (match := SHARD.fullmatch(name))]
    if not matches:
        return None
    shards: dict[str, list[Path]] = {}
    for split in facts.splits:
        mine = [match for match in matches if match[1] == split]
        if not mine:
            raise _incomplete(folder, f"{split}-*.parquet", facts.name)
        total = max(int(match[3]) for match in mine)
        names = [f"{split}-{i:05d}-of-{total:05d}.parquet" for i in range(total)]
        present = {match[0] for match in mine}
        if missing := [name for name in names if name not in present]:
            raise _incomplete(folder, missing[0], facts.name)
        if extra := sorted(present - set(names)):
            both = [str(folder / extra[0]), names[0]]
            raise Conflict(both, "they are shards of two versions", "remove one of them")
        shards[split] = [folder / name for name in names]
    column = LABEL_COLUMN.get(facts.name, "label")
    return Source(
        folder,
        "parquet",
        tuple(path for paths in shards.values() for path in paths),
        lambda split: [
            read_parquet(path, facts.shape, column, facts.splits[split].count)
            for path in shards[split]
        ],
    )


def _incomplete(folder: Path, missing: str, name: str) -> Lacks:
    return Lacks(folder, missing, f"add it, or run `decaylab data fetch {name}`")


def _read_digits(split: str) -> list[ImageFile]:
    """Scikit-learn's 1,797 digits; a fixed random fifth is the test split.

    Pixels 0..16 are stored times 15. RandomState's streams are frozen by numpy's promise, and the
    check would notice if they were not.
    """
    digits = _digits()
    images = (digits[:, :-1] * 15).astype(np.uint8).reshape(-1, 1, 8, 8)
    order = np.random.RandomState(0).permutation(len(images))
    chosen = np.sort(order[:360] if split == "test" else order[360:])
    return [ImageFile(Path("scikit-learn's digits"), images[chosen], digits[chosen, -1])]


def _digits() -> NDArray[np.int64]:
    """A row of 64 pixels and the label of each image.

    From the file itself: to import scikit-learn takes a second, since it imports pandas.
    """
    installed = find_spec("sklearn")
    for folder in (installed and installed.submodule_search_locations) or []:
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return np.loadtxt(path, delimiter=",").astype(np.int64)
    from sklearn import datasets

    return np.column_stack(datasets.load_digits(return_X_y=True)).astype(np.int64)


def _checked(facts: Facts, read: Callable[[str], list[ImageFile]]) -> dict[str, Split]:
    splits = {}
    for split in facts.splits:
        parts = read(split)
        check(facts, split, parts)
        images = np.concatenate([part.images for part in parts])
        labels = np.concatenate([part.labels for part in parts]).astype(np.int64)
        splits[split] = Split(torch.from_numpy(images), torch.from_numpy(labels))
    return splits
