"""The file formats: MNIST's idx, CIFAR's binary records, and Hugging Face's parquet layout.

Each reader turns files into `ImageFile`s and knows nothing of how many images there should be. A
file that breaks its own format gets a `DecaylabError` that names it. Nothing is ever unpickled.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from decaylab.data.facts import ImageFile
from decaylab.errors import Damaged, Mismatch, NotRead, needed

IMAGE_COLUMNS = ("img", "image")
# imported when a parquet file is met
_module = partial(needed, extra="data", what="Reading parquet files")


# The largest file of a data set here has 154 MB (CIFAR-100's training images).
MOST_BYTES = 200_000_000
PARQUET_BATCH = 64
REPLACE = "replace it"
LARGEST_HEADER = 4096  # bytes of an encoded image beside its pixels


def read_idx(path: Path) -> np.ndarray:
    """An array of unsigned bytes in idx format, gzipped if the name ends in .gz.

    Layout, big-endian: 0 0 8 d, then d sizes of 4 bytes, then the bytes, last axis fastest.
    """
    data = _unzipped(path) if path.suffix == ".gz" else _bytes(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        begin = data[:4].hex(" ") or "nothing"
        raise Damaged(path, f"an idx file of bytes begins with 00 00 08, not {begin}", REPLACE)
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise Damaged(path, "it ends inside its header", REPLACE)
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    expected = int(np.prod(shape, dtype=object)) if shape else 1
    if len(data) - start != expected:
        sizes = "x".join(map(str, shape))
        reason = f"its header says {expected} bytes ({sizes}) and {len(data) - start} follow"
        raise Damaged(path, reason, REPLACE)
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_mnist(images_path: Path, labels_path: Path) -> ImageFile:
    """One split of MNIST from its two idx files: images [N, 1, H, W] and labels [N]."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3:
        raise Damaged(images_path, f"it has {images.ndim} axes, images have 3", REPLACE)
    if labels.ndim != 1:
        raise Damaged(labels_path, f"it has {labels.ndim} axes, labels have 1", REPLACE)
    if len(images) != len(labels):
        counts = {str(images_path): len(images), str(labels_path): len(labels)}
        raise Mismatch("number of images", counts, "replace them")
    return ImageFile(images_path, images[:, None], labels)


def read_cifar_records(path: Path, data: bytes, label_bytes: int) -> ImageFile:
    """Records of CIFAR's binary version: labels, then 3x32x32 bytes, channel by channel.

    CIFAR-10 has one label byte, CIFAR-100 two (coarse, fine); the last one is the label.
    """
    size = label_bytes + 3 * 32 * 32
    if not data or len(data) % size:
        other = 3 - label_bytes
        hint = ""
        if data and len(data) % (other + 3 * 32 * 32) == 0:
            hint = f", but one of CIFAR-{'10' if other == 1 else '100'}'s"
        reason = f"{len(data)} bytes are no whole number of records of {size}{hint}"
        raise Damaged(path, reason, REPLACE)
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    return ImageFile(
        path, records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]
    )


def read_cifar_folder(folder: Path, names: Sequence[str], label_bytes: int) -> list[ImageFile]:
    """The binary files `names` of an unpacked CIFAR archive, one part per file."""
    return [read_cifar_records(folder / name, _bytes(folder / name), label_bytes) for name in names]


def read_cifar_archive(path: Path, names: Sequence[str], label_bytes: int) -> list[ImageFile]:
    """The same from the archive (tar.gz) itself, read in memory: nothing is unpacked to disk."""
    contents: dict[str, bytes] = {}
    seen: list[str] = []
    try:
        with (
            gzip.open(path) as unpacked,
            tarfile.open(fileobj=_Counted(unpacked, path), mode="r|") as archive,  # type: ignore[call-overload]
        ):
            for member in archive:
                name = PurePosixPath(member.name).name
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None:
                    continue
                seen.append(name)
                if name in names:
                    contents[name] = stream.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise Damaged(path, error, REPLACE) from error
    missing = [name for name in names if name not in contents]
    if missing:
        if missing[0].removesuffix(".bin") in seen:
            raise pickle_refusal(path, label_bytes)
        reason = f"it holds no {missing[0]} but {', '.join(seen[:8]) or 'nothing'}"
        raise Damaged(path, reason, "replace it by the binary archive of this data set")
    return [read_cifar_records(path / name, contents[name], label_bytes) for name in names]


class _Counted:
    """A stream that ends in an error where an archive unpacks to more than any data set here."""

    def __init__(self, stream: gzip.GzipFile, path: Path) -> None:
        self._stream, self._path, self._left = stream, path, 2 * MOST_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            reason = f"it unpacks to more than {2 * MOST_BYTES} bytes, as no data set here does"
            raise Damaged(self._path, reason, REPLACE)
        return data


def pickle_refusal(path: Path, label_bytes: int) -> NotRead:
    """The error for CIFAR's python archive; the binary one has the same images."""
    number = "10" if label_bytes == 1 else "100"
    return NotRead(
        path,
        "a pickle, of CIFAR's python archive, can run any code and is never opened here",
        f"take cifar-{number}-binary.tar.gz in its place, for instance by "
        f"`decaylab data fetch cifar{number}`",
    )


def read_parquet(
    path: Path, shape: tuple[int, int, int], label_column: str, most_images: int
) -> ImageFile:
    """One shard of Hugging Face's layout: `img` or `image` (struct<bytes, path>) and labels.

    The bytes may be any image format that pillow reads; they are converted to RGB, or to grey
    where `shape` (C, H, W) has one channel. About 0.1 ms an image (WebP, PNG). Files that would
    take far more memory than `most_images` of that shape are refused before they are read.
    """
    parquet, pyarrow = _module("pyarrow.parquet"), _module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            image_column = next((name for name in IMAGE_COLUMNS if name in names), None)
            if image_column is None or label_column not in names:
                wanted = "img" if image_column is None else label_column
                reason = f"it has the columns {', '.join(names)} and no {wanted!r}"
                raise Damaged(path, reason, REPLACE)
            _check_parquet_size(path, file.metadata, most_images, shape)
            encoded: list[Any] = []
            labels_read: list[Any] = []
            for batch in file.iter_batches(PARQUET_BATCH, columns=[image_column, label_column]):
                column = batch.column(image_column).field("bytes")
                if column.nbytes > len(column) * (LARGEST_HEADER + 8 * math.prod(shape)):
                    each = column.nbytes // len(column)
                    reason = f"{each} bytes an image, far more than {shape[1]}x{shape[2]} need"
                    raise Damaged(path, reason, REPLACE)
                encoded += column.to_pylist()
                labels_read += batch.column(label_column).to_pylist()
        labels = np.array(labels_read, dtype=np.int64)
    except (
        pyarrow.ArrowException,
        OSError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
    ) as error:
        raise Damaged(path, error, "replace it by a parquet file of images") from error
    images = np.empty((len(encoded), *shape), np.uint8)
    for index, data in enumerate(encoded):
        images[index] = _decoded(path, index, data, shape)
    return ImageFile(path, images, labels)


def _check_parquet_size(
    path: Path, metadata: Any, most_images: int, shape: tuple[int, int, int]
) -> None:
    """Refuse by what the file says of itself: its images, and the bytes of its columns."""
    if metadata.num_rows > 10 * most_images:
        reason = f"it claims {metadata.num_rows} images, and the data set has {most_images}"
        raise Damaged(path, reason, REPLACE)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    if size > most_images * (LARGEST_HEADER + 8 * math.prod(shape)):
        need = f"{most_images} images of {shape[1]}x{shape[2]} pixels need"
        raise Damaged(path, f"it unpacks to {size:.2g} bytes, far more than {need}", REPLACE)


def _decoded(path: Path, index: int, data: Any, shape: tuple[int, int, int]) -> np.ndarray:
    pillow = _module("PIL.Image")
    mode = "L" if shape[0] == 1 else "RGB"
    try:
        # The size is compared before the pixels are decoded, so that a huge image costs nothing.
        with pillow.open(io.BytesIO(data)) as image:
            if image.size != (shape[2], shape[1]):
                raise ValueError(f"{image.width}x{image.height}, not {shape[2]}x{shape[1]}")
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except Exception as error:  # decoders raise whatever they like on corrupt bytes
        raise Damaged(f"image {index} of {path}", error, "replace the file") from error
    return pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return _limited(file, path)
    except OSError as error:
        raise NotRead(path, error, "make it readable, or replace it") from error


def _unzipped(path: Path) -> bytes:
    _bytes(path)  # what cannot be read at all is said as such
    try:
        with gzip.open(path) as file:
            return _limited(file, path)
    except (EOFError, zlib.error, OSError) as error:
        raise Damaged(path, error, REPLACE) from error


def _limited(file: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        reason = f"no file of these data sets has more than {MOST_BYTES} bytes"
        raise Damaged(path, reason, REPLACE)
    return data
