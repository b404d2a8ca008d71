"""Run the cases of tests/optim/rank_cases.py in two processes."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "optim" / "rank_cases.py"
SECONDS = 200
# A group that goes right behind its last message may wait for a thread of its own, which waits for
# the interpreter: so many seconds let that thread finish first.
SETTLE = 0.3


def failures(folder: Path, device: str) -> list[str]:
    """What each rank says of the cases that failed; and that of a rank which did not finish."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    outputs = [folder / f"rank_{rank}" for rank in (0, 1)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(folder), str(rank), device],
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
