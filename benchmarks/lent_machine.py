"""Work off a queue on a machine that is lent for a while, and bring back what it has made.

    python benchmarks/lent_machine.py split DATA pieces                # at home
    python benchmarks/lent_machine.py join pieces data                 # there, as pieces arrive
    python benchmarks/lent_machine.py start --minutes 25 -- --queue results/queue.toml \
        --runs results --data-dir data --at-once 4 --compiled --whole-runs           # there
    python benchmarks/lent_machine.py collect out --wait 500           # there, until it has ended
    python benchmarks/lent_machine.py unpack out/*.tar.gz              # at home

docs/reproduction.md ("On a machine that is lent") goes through it, command by command. All of it in
a copy of this repository; a git history or an installed decaylab is not needed.

`start` hands what stands behind `--` to `decaylab reproduce`, and leaves that running when the
shell goes; it ends by itself when the minutes are over. What is killed, or ends early with an
error, is started again. With `--processes`, several share the device, by CUDA's MPS if it is there
and works. To `start` again does nothing while it runs, and continues after it has ended.

`collect` waits until the work has ended, or for so many seconds, and writes whatever has changed
since the first `start` to tars that are each below a size: the run folders and other files in
`--folders` (`results`; attributions have their arms in `runs`), then checkpoints and recorded paths
where they fit, smallest first. Each call writes all of it again, so that only the last one counts.
`unpack` lets a run folder take the place of the one that is there; `tar x` does too, but for rows
of a run that was made again.
"""

import argparse
import fcntl
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LENT = Path("lent")  # what this script remembers, in the current folder
LOG, LOCK = LENT / "log.txt", LENT / "lock"
BEGAN = LENT / "began"  # written at the first start: what is newer is collected
MEGABYTE = 2**20
PIECE = re.compile(r"(.+)\.(\d+)-of-(\d+)")
ATTEMPTS = 3
# Of a run in progress and of an index, which no other machine may take for its own.
NOT_COLLECTED = re.compile(
    r"owner\.json.*|queue-.*\.json|\..*|.*\.part|checkpoint\.previous\.safetensors"
)
# Beside the compressed contents of a file in a tar.
OVERHEAD = 1024
LEVEL = 6  # of compression
MPS = "nvidia-cuda-mps-control"
POLL = 0.2


def split(source: Path, pieces: Path, size: int) -> None:
    """Copy a folder, files over `size` bytes in pieces that `join` puts together."""
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        target = pieces / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        count = -(-path.stat().st_size // size)
        if count <= 1:
            shutil.copyfile(path, target)
            continue
        with path.open("rb") as file:
            for number in range(1, count + 1):
                target.with_name(f"{path.name}.{number}-of-{count}").write_bytes(file.read(size))
    _tell(pieces)


def join(pieces: Path, data: Path) -> None:
    """Copy a folder into another one, and put together the files that are complete there."""
    if not pieces.is_dir():
        sys.exit(f"there is no folder {pieces}: give the one in which pieces have arrived")
    for path in sorted(p for p in pieces.rglob("*") if p.is_file()):
        target = data / path.relative_to(pieces)
        match = PIECE.fullmatch(target.name)
        if match and target.with_name(match[1]).exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for first in sorted(data.rglob("*.1-of-*")):
        match = PIECE.fullmatch(first.name)
        if match is None:
            continue
        parts = [
            first.with_name(f"{match[1]}.{n}-of-{match[3]}") for n in range(1, int(match[3]) + 1)
        ]
        missing = [part.name for part in parts if not part.exists()]
        if missing:
            print(f"{first.with_name(match[1])} waits for {', '.join(missing)}")
            continue
        whole = first.with_name(f"{match[1]}.part")
        with whole.open("wb") as file:
            for part in parts:
                with part.open("rb") as content:
                    shutil.copyfileobj(content, file)
        whole.replace(first.with_name(match[1]))
        for part in parts:
            part.unlink()
    _tell(data)


def _tell(folder: Path) -> None:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print(f"{folder}: {len(sizes)} files, {sum(sizes) / MEGABYTE:.1f} MB")


def start(minutes: float, processes: int, words: Sequence[str]) -> None:
    """Leave the queue running, with a deadline; nothing, if it is."""
    LENT.mkdir(exist_ok=True)
    with LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("it is running already")
            return
        if not BEGAN.exists():
            BEGAN.touch()
        until = time.time() + 60 * minutes
        command = [sys.executable, __file__, "work", "--until", f"{until:.1f}"]
        command += ["--processes", str(processes), "--", *words]
        with LOG.open("a") as log:
            worker = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock.fileno()],  # with it the lock, for as long as it lives
            )
    print(f"process {worker.pid} works until {time.strftime('%H:%M:%S', time.localtime(until))}")


def work(until: float, processes: int, words: Sequence[str]) -> None:
    """Run the queue, again where it is killed or fails, until it is done or the time is over."""
    sys.path.insert(0, str(ROOT / "src"))
    from decaylab.errors import RUNS_LEFT  # with it comes torch, which nothing else here needs
    from decaylab.sweeps.engines.local import ending_with_parent

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    places = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    with _shared_device(processes) as more:
        for _ in range(ATTEMPTS):
            minutes = (until - time.time()) / 60
            if minutes <= 0:
                break
            command = [sys.executable, "-m", "decaylab", "reproduce", *words]
            command += ["--max-minutes", f"{minutes:.3f}", "--processes", str(processes)]
            running = [
                subprocess.Popen(ending_with_parent(command), env={**environment, **more})
                for _ in range(processes)
            ]
            try:
                codes = [process.wait() for process in running]
            finally:  # also when this process is told to end: runs save checkpoints
                for process in running:
                    process.terminate()
                for process in running:
                    process.wait()
            print(f"ended with exit codes {codes}", flush=True)
            if all(code in (0, RUNS_LEFT) for code in codes):
                break


@contextmanager
def _shared_device(processes: int) -> Iterator[dict[str, str]]:
    """What is set for processes that share a GPU by CUDA's MPS; nothing where that is no use."""
    if processes == 1 or shutil.which(MPS) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # short: it has sockets in it
        served = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **served}
        try:
            begun = subprocess.run([MPS, "-d"], env=environment, check=False).returncode == 0
            probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
            works = begun and subprocess.run(probe, env=environment, check=False).returncode == 0
            if not works:
                print("CUDA's MPS does not work here: without it", flush=True)
            yield served if works else {}
        finally:
            subprocess.run([MPS], input=b"quit\n", env=environment, check=False)


def is_running() -> bool:
    """Whether the work goes on: its process holds the lock."""
    with LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Content:
    """A file as it was when it was read."""

    path: Path
    data: bytes
    modified: float

    @property
    def optional(self) -> bool:
        """Whether a run can do without: a checkpoint, or recorded paths."""
        return self.path.suffix == ".safetensors"

    @property
    def size(self) -> int:
        """In a compressed tar, at most."""
        if self.optional:  # weights do not compress: deflate makes them longer
            return len(self.data) + len(self.data) // 1000 + OVERHEAD
        return len(zlib.compress(self.data, LEVEL)) + OVERHEAD


def changed(folders: Sequence[Path], largest: int) -> list[Content]:
    """The files that are new since the start, and all of a run folder with one of them.

    A manifest is read before the rows that it vouches for, a checkpoint before those that it needs.
    """
    began = BEGAN.stat().st_mtime
    paths = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    paths = [p for p in paths if not NOT_COLLECTED.fullmatch(p.name)]
    runs = {p.parent for p in paths if p.name == "spec.toml"}
    written = {}
    for path in paths:
        with suppress(FileNotFoundError):  # the checkpoint of a run that has ended meanwhile
            written[path] = path.stat().st_mtime
    new = {p.parent if p.parent in runs else p for p, time in written.items() if time >= began}
    chosen = [p for p in paths if p in new or p.parent in new]
    chosen.sort(key=lambda p: (p.name != "manifest.json", p.suffix != ".safetensors", p))
    contents = []
    for path in chosen:
        try:
            status = path.stat()
            if path.suffix == ".safetensors" and status.st_size > largest:
                print(f"left out: {path} ({status.st_size / MEGABYTE:.0f} MB)")
                continue
            contents.append(Content(path, path.read_bytes(), status.st_mtime))
        except FileNotFoundError:
            continue
    return contents


def packed(contents: Sequence[Content], limit: int, most: int) -> list[list[Content]]:
    """The contents of each tar: first what is needed, folder by folder, then checkpoints."""
    folders: dict[Path, list[Content]] = {}
    for content in contents:
        folders.setdefault(content.path if content.optional else content.path.parent, []).append(
            content
        )
    groups = [(g[0].optional, sum(content.size for content in g), g) for g in folders.values()]
    tars: list[list[Content]] = []
    room: list[int] = []
    for _, size, group in sorted(groups, key=lambda entry: entry[:2]):
        place = next((i for i, left in enumerate(room) if size <= left), len(tars))
        if size > limit or place == most:
            print(f"left out: {group[0].path} ({size / MEGABYTE:.1f} MB): no room")
            continue
        if place == len(tars):
            tars.append([])
            room.append(limit)
        tars[place] += group
        room[place] -= size
    return tars


def write_tar(path: Path, contents: Sequence[Content]) -> None:
    """Write files to a compressed tar."""
    with tarfile.open(path, "w:gz", compresslevel=LEVEL) as tar:
        for content in contents:
            entry = tarfile.TarInfo(content.path.as_posix())
            entry.size, entry.mtime = len(content.data), int(content.modified)
            tar.addfile(entry, io.BytesIO(content.data))


def collect(out: Path, wait: float, folders: Sequence[Path], limit: int, most: int) -> None:
    """Write what has changed since the first start to tars, and the end of the log."""
    if not BEGAN.exists():
        sys.exit(f"there is no {BEGAN}: run `start` in this folder first")
    until = time.monotonic() + wait
    while (running := is_running()) and time.monotonic() < until:
        time.sleep(POLL)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("collected-*.tar.gz"):
        old.unlink()
    tars = packed(changed(folders, limit), limit, most)
    for number, contents in enumerate(tars, start=1):
        path = out / f"collected-{number}.tar.gz"
        write_tar(path, contents)
        print(f"{path}: {len(contents)} files, {path.stat().st_size / MEGABYTE:.1f} MB")
    tail = LOG.read_text(errors="replace").splitlines()[-200:]
    (out / "log.txt").write_text("\n".join(tail) + "\n")
    print("\n".join(tail[-20:]))
    print("it is still running" if running else "it has ended")


def unpack(tars: Sequence[Path], target: Path) -> None:
    """Extract tars of `collect`; of a run folder there, only checkpoints and paths stay."""
    opened = [tarfile.open(path) for path in tars]  # noqa: SIM115 - read twice
    names = {name for tar in opened for name in tar.getnames()}
    for name in names:
        folder = (target / name).parent
        if Path(name).name == "manifest.json" and folder.is_dir():
            for old in folder.iterdir():
                if str(old.relative_to(target)) not in names and old.suffix != ".safetensors":
                    old.unlink()
    for tar in opened:
        tar.extractall(target, filter="data")
        tar.close()
    print(f"{len(names)} files")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, and do what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("source", type=Path)
    one.add_argument("pieces", type=Path)
    one.add_argument("--megabytes", type=float, default=20)
    one = commands.add_parser("join")
    one.add_argument("pieces", type=Path)
    one.add_argument("data", type=Path)
    one = commands.add_parser("start")
    one.add_argument("--minutes", type=float, required=True)
    one.add_argument("--processes", type=int, default=1)
    one.add_argument("words", nargs="+")
    one = commands.add_parser("work")  # what `start` leaves behind
    one.add_argument("--until", type=float, required=True)
    one.add_argument("--processes", type=int, default=1)
    one.add_argument("words", nargs="+")
    one = commands.add_parser("collect")
    one.add_argument("out", type=Path)
    one.add_argument("--wait", type=float, default=0.0)
    one.add_argument("--folders", type=Path, nargs="+", default=[Path("results")])
    one.add_argument("--megabytes", type=float, default=16)
    one.add_argument("--tars", type=int, default=7)
    one = commands.add_parser("unpack")
    one.add_argument("tars", type=Path, nargs="+")
    one.add_argument("--target", type=Path, default=Path())
    given = parser.parse_args(arguments)
    if given.command == "split":
        split(given.source, given.pieces, int(given.megabytes * MEGABYTE))
    elif given.command == "join":
        join(given.pieces, given.data)
    elif given.command == "start":
        start(given.minutes, given.processes, given.words)
    elif given.command == "work":
        work(given.until, given.processes, given.words)
    elif given.command == "collect":
        limit = int(given.megabytes * MEGABYTE)
        collect(given.out, given.wait, given.folders, limit, given.tars)
    else:
        unpack(given.tars, given.target)


if __name__ == "__main__":
    main()
