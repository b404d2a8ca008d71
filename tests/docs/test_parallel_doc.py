"""The quick start's script for several GPUs, with torchrun, on two processes of a CPU."""

import os
import re
import subprocess
import sys

import pytest
from documented import ROOT, commands, snippet_text


@pytest.mark.slow
def test_several_ranks(tmp_path):
    (tmp_path / "train.py").write_text(snippet_text("quickstart.md", "several ranks"))
    (words,) = commands(ROOT / "docs" / "quickstart.md", "torchrun")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 3
    assert losses[-1] < 0.5
