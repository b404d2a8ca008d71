"""The scripts for several GPUs, with torchrun, on two processes of a CPU."""

import os
import re
import subprocess
import sys

import pytest
from documented import ROOT, commands, snippet_text

from decaylab.records import read_recording


def launched(folder, page, text):
    """What this script prints, saved and started as the page says."""
    assert "dist.destroy_process_group()\n" in text
    # torch may wait for itself there, if rarely, and all is said and done
    text = text.replace("dist.destroy_process_group()\n", "os._exit(0)\n")
    (words,) = commands(ROOT / "docs" / page, "torchrun")
    (folder / words[-1]).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=folder,
        env={
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.torchrun
def test_several_ranks(tmp_path):
    check_training(tmp_path, snippet_text("kfac-in-practice.md", "several ranks"))


@pytest.mark.torchrun
def test_shards(tmp_path):
    text = snippet_text("kfac-in-practice.md", "several ranks")
    replicated = "model = DistributedDataParallel(model)\noptimizer = KFAC(model)\n"
    assert replicated in text
    shards = snippet_text("kfac-in-practice.md", "shards")
    check_training(tmp_path, text.replace(replicated, shards))


def check_training(folder, text):
    """The loss falls."""
    printed = launched(folder, "kfac-in-practice.md", text)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", printed, re.M)]
    assert len(losses) == 5
    assert losses[-1] < 0.5


@pytest.mark.torchrun
def test_a_sharded_model_is_watched(tmp_path):
    printed = launched(tmp_path, "diagnosis.md", snippet_text("diagnosis.md", "several GPUs"))
    assert "How far each layer turns" in printed
    recording = read_recording(tmp_path / "records" / "sharded")
    assert recording.outcomes["loss"][-1][1] < 0.3
    assert recording.series("jacobian_norm")
    assert recording.rows.superseded == 0
