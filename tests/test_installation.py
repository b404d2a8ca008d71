"""A CPU machine gets a CPU torch, and none of what would replace it or needs CUDA."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

import decaylab

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_no_cuda_package_came_along():
    names = {(found.metadata["Name"] or "").lower() for found in metadata.distributions()}
    assert "torch" in names
    unwanted = {"torchvision", "torchaudio", "triton", "pytorch-triton"}
    assert not {n for n in names if n in unwanted or n.startswith("nvidia-")}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize(
    ("command", "extra", "others"), [("demo", "report", False), ("test", "all", True)]
)
def test_make_installs_what_a_command_needs(command, extra, others):
    """In a fresh checkout: torch first, always by the constraints; the rest for the tests only."""
    words = ["make", "--dry-run", "--always-make", command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    pips = [line for line in done.stdout.splitlines() if " pip install " in line]
    assert all("-c constraints.txt" in line for line in pips)
    assert pips[0].endswith(" torch")
    assert any(f"'.[{extra}]'" in line for line in pips)
    assert any("--group dev" in line for line in pips) is others
    assert any("curvlinops" in line for line in pips) is others


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {decaylab.__version__}\n" in citation
    assert f"\n## [{decaylab.__version__}]" in changes
