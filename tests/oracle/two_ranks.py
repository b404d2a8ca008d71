"""Run cases that several processes take part in, each case in all of them.

A script of cases calls `run_cases` where it is the main module; a test calls `failures` with it.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "optim" / "rank_cases.py"
SECONDS = 600


def failures(
    folder: Path, device: str, *cases: str, size: int = 2, script: Path = SCRIPT
) -> list[str]:
    """What each rank says of the cases that failed (left out: of all cases)."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    outputs = [folder / f"rank_{rank}" for rank in range(size)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        str(script),
                        str(folder),
                        str(rank),
                        str(size),
                        device,
                        *cases,
                    ],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [output.read_text() for output in outputs]
    bad = [text for code, text in zip(codes, said, strict=True) if code or "failed" in text]
    assert all(" ok\n" in text for text in said), said
    return bad


def run_cases(
    cases: Mapping[str, Callable[[int], object]],
    folder: str,
    rank: int,
    size: int,
    chosen: Sequence[str],
) -> None:
    """Let the processes meet, run the chosen cases (none: all), say "CASE ok" of each, and end.

    A case asserts at its end, when the ranks have nothing left to tell each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=size,
        init_method=f"file://{folder}/meeting",
        timeout=timedelta(minutes=10),
    )
    for name in chosen or cases:
        try:
            cases[name](rank)
            print(name, "ok", flush=True)
        except Exception:
            print(name, "failed", traceback.format_exc(), flush=True)
        dist.barrier()
    os._exit(0)  # a group that is destroyed right behind its last message may wait for itself
