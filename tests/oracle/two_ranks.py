"""Run the cases of tests/optim/rank_cases.py, or of another script, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

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
