"""`attribute` where several processes train each arm together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attribution.ranks_attribute import answer, maker

SCRIPT = Path(__file__).with_name("ranks_attribute.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TOGETHER = ("ddp", "ddp-kfac", "fsdp", "fsdp-kfac", "tp")


@pytest.mark.torchrun
def test_processes_find_what_one_process_finds(tmp_path):
    kinds = [*TOGETHER, "seeds"]
    subprocess.run(
        [sys.executable, *TORCHRUN, str(SCRIPT), str(tmp_path), *kinds], check=True, timeout=300
    )
    first, second = (
        json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in range(2)
    )
    for kind in TOGETHER:
        assert first[kind] == second[kind]
        check(first[kind], answer(maker(kind), None, [0, 1]))
    check(first["seeds"], answer(maker("seeds"), None, [0]))
    check(second["seeds"], answer(maker("seeds"), None, [1]))


def check(together, alone):
    assert together["arms"].keys() == alone["arms"].keys()
    for arm, (loss, errors) in alone["arms"].items():
        assert together["arms"][arm][0] == pytest.approx(loss, rel=1e-9), arm
        assert together["arms"][arm][1].keys() == errors.keys()
    for arm, sizes in alone["sizes"].items():
        for row, expected in zip(together["sizes"][arm], sizes, strict=True):
            assert row == pytest.approx(expected, rel=1e-10), arm
