"""Checkpoints: any nested state as one safetensors file, replaced atomically, without pickle.

The tensors lie in the file by their path in the state; everything else (numbers, strings, lists,
the shape of the nesting) is JSON in the file's own header. One file, so that tensors and JSON
always belong together; one rename, so that a kill while writing leaves the previous checkpoint
valid. Checksums are in the header; a checkpoint that does not have its own is not resumed from.
"""

import json
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decaylab.errors import Damaged
from decaylab.records.files import replace_file

_TENSOR, _TUPLE, _ITEMS = "$tensor", "$tuple", "$items"
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


def flatten(state: Any, path: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a JSON tree and its tensors by path.

    Dicts may have string or number keys; tuples stay tuples. Anything but tensors, numbers,
    strings, booleans and None is refused by its path.

    >>> tree, tensors = flatten({0: torch.zeros(2), "betas": (0.9, 0.999)})
    >>> sorted(tensors), nest(tree, tensors)["betas"]
    (['state.0'], (0.9, 0.999))
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            if value.dtype not in _DTYPES:
                raise TypeError(f"{where} is of {value.dtype}, which a checkpoint cannot hold")
            while where in tensors:  # {"a": {"b": ...}, "a.b": ...} or the keys 1 and "1"
                where += "'"
            tensors[where] = value
            return {_TENSOR: where}
        if isinstance(value, dict):
            items = [[key, visit(part, f"{where}.{key}")] for key, part in value.items()]
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            return dict(items) if plain else {_ITEMS: items}
        if isinstance(value, (list, tuple)):
            parts = [visit(part, f"{where}.{index}") for index, part in enumerate(value)]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold")

    return visit(state, path), tensors


def nest(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `flatten`."""
    if isinstance(tree, list):
        return [nest(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(nest(part, tensors) for part in tree[_TUPLE])
    if _ITEMS in tree:
        return {key: nest(part, tensors) for key, part in tree[_ITEMS]}
    return {key: nest(part, tensors) for key, part in tree.items()}


class Snapshot:
    """A state as it is now, in the host's memory; it may change from here on.

    From CUDA it is copied without waiting, to pinned memory and in the order of the current stream:
    what is queued there after it waits, as long as the copy takes. Memory: one state on the host,
    in the place of `before`, a snapshot that is no longer needed.
    """

    def __init__(self, state: dict[str, Any], before: "Snapshot | None" = None) -> None:
        self._tree, tensors = flatten(state)
        places: dict[str, Tensor] = {} if before is None else before._copies
        self._copies: dict[str, Tensor] = {
            key: _on_host(tensor.detach(), places.get(key)) for key, tensor in tensors.items()
        }
        # on the streams of the tensors' devices: the current device may be another
        self._copied = [
            torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))
            for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        ]

    def write(self, path: Path, check: Callable[[], object] | None = None) -> None:
        """Write it, from any thread, once the copies are there.

        The file that was there stays valid until the new one is whole on disk, and is then kept as
        `previous(path)`. `check` raises where another process has taken the run over.
        """
        for event in self._copied:
            event.synchronize()

        def fill(temporary: Path) -> None:
            save_file(self._copies, temporary, metadata={"state": json.dumps(self._tree)})

        def keep() -> None:
            if check is not None:
                check()
            if path.exists():
                keep_previous(path)

        replace_file(path, fill, keep)


def previous(path: Path) -> Path:
    """Where the checkpoint before the last one lies."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Let a checkpoint, which stays, be the previous one too; where links are not known, a move."""
    link = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        os.link(path, link)
    except OSError:
        os.rename(path, previous(path))
    else:
        os.rename(link, previous(path))
        link.unlink(missing_ok=True)  # where both were one file already, a rename does nothing


class Writer:
    """Writes the checkpoints of one run in a thread of its own, so that training goes on.

    One at a time: `save` waits for the one before. What went wrong with a checkpoint is raised by
    the next `save` or `wait`. The process does not end before it is written.
    """

    def __init__(self, path: Path, check: Callable[[], object] | None = None) -> None:
        self._path, self._check = path, check
        self._thread: threading.Thread | None = None
        # Kept for its memory, and so that the thread never drops the last reference: freeing pinned
        # memory records events, which must not get into a graph that is captured meanwhile.
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Copy a state and leave the writing to the thread."""
        self.wait()
        self._snapshot = Snapshot(state, before=self._snapshot)
        self._thread = threading.Thread(target=self._write, args=(self._snapshot,))
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until the last checkpoint is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, snapshot: Snapshot) -> None:
        try:
            snapshot.write(self._path, self._check)
        except BaseException as error:
            self._error = error


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write contiguous tensors on the host as safetensors, while other threads go on.

    The library's own function stops them all until the file is written, in versions before 0.8, and
    hides what is wrong with the disk (`OSError`) in an error of its own.
    """
    # Longest entries first: every tensor begins at a multiple of its entries' size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    checksums = {name: _checksum(tensors[name]) for name in names}
    texts = {name: zlib.crc32(text.encode()) for name, text in metadata.items()}
    crc = json.dumps({"tensors": checksums, "texts": texts})
    header: dict[str, Any] = {"__metadata__": {**metadata, "crc32": crc}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind, shape = _DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].flatten().view(torch.uint8).numpy().data)


def _on_host(tensor: Tensor, place: Tensor | None) -> Tensor:
    """A contiguous copy: parts of one storage (views, tied weights) cannot be written as they are.

    In `place`, where it fits; else a new one, pinned where the tensor is on CUDA.
    """
    if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
        place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return place.copy_(tensor, non_blocking=True)


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of what lies in a file, with the shape and type that make it a tensor."""
    kind = f"{_DTYPES[tensor.dtype]} {list(tensor.shape)}".encode()
    return zlib.crc32(
        tensor.contiguous().flatten().view(torch.uint8).numpy().data, zlib.crc32(kind)
    )


def load(path: Path, device: str | torch.device = "cpu", only: str | None = None) -> dict[str, Any]:
    """Read a state back, tensors on `device`; with `only`, just that top-level entry's tensors.

    What is read must have the checksums that were written with it (older files have none).
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata()
            crc = json.loads(metadata["crc32"]) if "crc32" in metadata else None
            if crc and zlib.crc32(metadata["state"].encode()) != crc["texts"]["state"]:
                raise ValueError("its checksum is wrong")
            tree = json.loads(metadata["state"])
            if only is not None:
                tree = {only: tree[only]}
            wanted = [key for key in file.keys() if only is None or _within(key, only)]  # noqa: SIM118
            tensors = {key: file.get_tensor(key) for key in wanted}
        for key, tensor in tensors.items():
            if crc and _checksum(tensor) != crc["tensors"][key]:
                raise ValueError(f"the checksum of {key} is wrong")
        state: dict[str, Any] = nest(tree, {key: t.to(device) for key, t in tensors.items()})
        return state
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        remedy = "delete it and run the same command again to train from the start"
        raise Damaged(path, error, remedy) from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn what loading a state raises that is not this run's, or lacks a part, into a sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        remedy = (
            "read it with the version that wrote it, or delete it and run the same command again"
            " to train from the start"
        )
        raise Damaged(path, error, remedy) from error


def _within(key: str, entry: str) -> bool:
    return key == f"state.{entry}" or key.startswith(f"state.{entry}.")
