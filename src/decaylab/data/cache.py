"""Decoded data sets on disk, so that the second start takes under a second."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decaylab.data.facts import Facts
from decaylab.data.sets import Split

# Raise it when the same files come to be decoded differently.
VERSION = 1


def cache_folder() -> Path:
    """$DECAYLAB_CACHE, or `decaylab` in $XDG_CACHE_HOME, or ~/.cache/decaylab."""
    if chosen := os.environ.get("DECAYLAB_CACHE"):
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks to ignore a relative path.
    base = Path(shared) if os.path.isabs(shared) else Path(os.path.expanduser("~/.cache"))
    return base / "decaylab"


def decoded_path(name: str, files: Iterable[Path]) -> Path:
    """Where the decoded form of `files` is kept: keyed by their names, sizes and mtimes."""
    key = [[VERSION, name]] + [
        [file.name, status.st_size, status.st_mtime_ns]
        for file in sorted(set(files))
        for status in [file.stat()]
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_folder() / "decoded" / f"{name}-{digest}.safetensors"


def write_decoded(path: Path, splits: dict[str, Split]) -> None:
    """Write the splits under a temporary name and rename; a cache that cannot be kept is no error.

    Another process sees either no file or a whole one.
    """
    tensors = _tensors(splits)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        os.close(handle)
        save_file(tensors, temporary, metadata={"crc32": _checksum(tensors)})
        os.replace(temporary, path)
    except (OSError, SafetensorError):
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def read_decoded(path: Path, facts: Facts) -> dict[str, Split] | None:
    """The splits kept at `path`; None if there is no such file or it is damaged in any way."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get("crc32")
            for key in file.keys():  # noqa: SIM118 (not a dict)
                tensors[key] = file.get_tensor(key)
        splits = {
            split: Split(tensors[f"{split}_images"], tensors[f"{split}_labels"])
            for split in facts.splits
        }
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
        return None
    for name, split in splits.items():
        count = facts.splits[name].count
        if (
            split.images.dtype != torch.uint8
            or split.labels.dtype != torch.int64
            or split.images.shape != (count, *facts.shape)
            or split.labels.shape != (count,)
        ):
            return None
    return splits if _checksum(tensors) == expected else None


def _tensors(splits: dict[str, Split]) -> dict[str, Tensor]:
    return {
        f"{name}_{kind}": tensor
        for name, split in splits.items()
        for kind, tensor in (("images", split.images), ("labels", split.labels))
    }


def _checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of all bytes: safetensors checks sizes only, and a flipped bit would go unseen."""
    value = 0
    for _, tensor in sorted(tensors.items()):
        value = zlib.crc32(tensor.numpy().reshape(-1).view("uint8").data, value)
    return f"{value:08x}"
