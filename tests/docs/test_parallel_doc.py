"""The script for several GPUs, with torchrun, on two processes of a CPU."""

import os
import re
import subprocess
import sys

import pytest
from documented import ROOT, commands, snippet_text


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


def check_training(tmp_path, text):
    """Run it by the page's own command: the loss falls."""
    assert "dist.destroy_process_group()\n" in text
    # torch may wait for itself there, if rarely, and all is said and done
    text = text.replace("dist.destroy_process_group()\n", "os._exit(0)\n")
    (tmp_path / "train.py").write_text(text)
    (words,) = commands(ROOT / "docs" / "kfac-in-practice.md", "torchrun")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=tmp_path,
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
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 5
    assert losses[-1] < 0.5
