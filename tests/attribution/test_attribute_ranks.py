"""`attribute` where several processes train each arm together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attribution.ranks_attribute import answer, maker

SCRIPT = Path(__file__).with_name("ranks_attribute.py")


def answers(kind, folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [sys.executable, *torchrun, str(SCRIPT), str(folder), kind],
        check=True,
        timeout=300,
    )
    return [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["ddp", "ddp-kfac", "fsdp"])
def test_processes_that_train_together_find_what_one_process_finds(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = answer(maker(kind.replace("ddp", "alone").replace("fsdp", "alone"), 0, 1), None, [0, 1])
    first, second = answers(kind, tmp_path)
    assert first == second
    assert first["arms"].keys() == alone["arms"].keys()
    for arm, (loss, errors) in alone["arms"].items():
        assert first["arms"][arm][0] == pytest.approx(loss, rel=1e-9), arm
        assert first["arms"][arm][1].keys() == errors.keys()
    for arm, sizes in alone["sizes"].items():
        for row, expected in zip(first["sizes"][arm], sizes, strict=True):
            assert row == pytest.approx(expected, rel=1e-10), arm


def test_processes_with_models_of_their_own_train_seeds_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank, got in enumerate(answers("seeds", tmp_path)):
        alone = answer(maker("alone", 0, 1), None, [rank])
        assert got["arms"].keys() == alone["arms"].keys()
        assert all(got["arms"][arm][0] == pytest.approx(alone["arms"][arm][0]) for arm in got["arms"])
