"""Downloads of the official archives, with progress, resume and checksum (standard library)."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from decaylab.data.cache import cache_folder
from decaylab.data.facts import facts_of
from decaylab.errors import Failed, NotWritten

Progress = Callable[[str, int, int | None], None]

TIMEOUT = 30.0
CHUNK = 1 << 18
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0, 30.0)
"""Seconds before an address that broke off is asked for the rest; then it is given up."""


@dataclass(frozen=True)
class Download:
    """One file: where it is offered, in the order to try, its published md5 and size in bytes."""

    file: str
    urls: tuple[str, ...]
    md5: str
    size: int


def _cifar(file: str, md5: str, size: int) -> tuple[Download, ...]:
    return (Download(file, (f"https://www.cs.toronto.edu/~kriz/{file}",), md5, size),)


def _mnist(stem: str, md5: str, size: int) -> Download:
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    )
    return Download(f"{stem}.gz", tuple(f"{mirror}/{stem}.gz" for mirror in mirrors), md5, size)


DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "cifar10": _cifar("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
    "cifar100": _cifar("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
    "mnist": (
        _mnist("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        _mnist("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        _mnist("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        _mnist("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
}


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Download the official files of `name` into the user's cache and return their folder.

    Files that are there with the right checksum are kept. An interrupted download leaves
    `<file>.part`, from which the next one goes on (HTTP Range). Nothing takes its final name
    before its md5 is right.

    Args:
        name: one of `DATA_SETS`; digits needs no download.
        progress: called with (file, bytes so far, bytes in all or None) as bytes arrive.
    """
    facts_of(name)
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    for download in DOWNLOADS.get(name, ()):
        target = folder / download.file
        if not (target.is_file() and _md5(target) == download.md5):
            _obtain(name, download, target, progress or (lambda *_: None))
    return folder


def _obtain(name: str, download: Download, target: Path, progress: Progress) -> None:
    """Try each address in turn; go on at the same one while it brings bytes, with pauses."""
    part = target.with_name(target.name + ".part")
    tried: list[str] = []
    for url in download.urls:
        for pause in (*PAUSES, None):
            before = _size(part)
            try:
                _transfer(url, part, download, progress)
            except (OSError, http.client.HTTPException) as error:
                if _size(part) > before and pause is not None:
                    time.sleep(pause)
                    continue
                tried.append(f"{url} ({_reason(error)})")
                break
            if _md5(part) == download.md5:
                os.replace(part, target)
                return
            part.unlink()
            # What was kept may be of another version of the file: once more, from the start.
            if before == 0:
                tried.append(f"{url} (wrong checksum: not the published file)")
                break
    remedy = (
        f"check the connection and run `decaylab data fetch {name}` again (it resumes), or put the"
        f" file into {target.parent} yourself"
    )
    raise Failed(f"fetching {download.file}", "; ".join(tried), remedy)


def _transfer(url: str, part: Path, download: Download, progress: Progress) -> None:
    """Append the rest of `url` to `part`; start over if the server cannot resume.

    Never more than the file's published size: what is longer is another file.
    """
    done, file = _size(part), download.file
    request = urllib.request.Request(url, headers={"User-Agent": "decaylab"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        # 416: there is nothing beyond what we have. The checksum judges whether it is the file.
        if error.code == 416 and done:
            return
        raise
    with response, _opened(part, "ab" if response.status == 206 else "wb") as output:
        if response.status != 206:
            done = 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else None
        progress(file, done, total)
        while (total or done) <= download.size and (chunk := response.read(CHUNK)):
            done += len(chunk)
            if done <= download.size:
                _write(output, chunk, part)
                progress(file, done, total)
    if max(total or 0, done) > download.size:
        part.unlink()
        raise OSError(f"it sends more than the {download.size} bytes of the published file")
    if total is not None and done < total:
        raise OSError(f"the connection broke after {done} of {total} bytes")


def _opened(part: Path, mode: str) -> IO[bytes]:
    try:
        # Unbuffered, so that an error of the disk shows at the write that met it.
        return open(part, mode, buffering=0)
    except OSError as error:
        raise _unwritable(part, error) from error


def _write(output: IO[bytes], chunk: bytes, part: Path) -> None:
    try:
        view = memoryview(chunk)
        while view:
            view = view[output.write(view) :]
    except OSError as error:
        raise _unwritable(part, error) from error


def _unwritable(path: Path, error: OSError) -> NotWritten:
    remedy = "make room, or set DECAYLAB_CACHE to a folder that can be written"
    return NotWritten(path, error, remedy)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
