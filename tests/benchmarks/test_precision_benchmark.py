"""benchmarks/precision.py on a run of its own."""

import json
import subprocess
import sys
from pathlib import Path

from decaylab.records import RunStore
from decaylab.training import RunSpec, train_to_end

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "precision.py"


def test_errors_of_a_run_by_layer(tmp_path):
    settings = {"data": "digits", "network": "mlp", "hidden": (24, 16), "epochs": 1}
    spec = RunSpec(**settings, optimizer="kfac-g", initialize_batches=4)
    train_to_end(spec, store=RunStore(tmp_path))
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, str(SCRIPT), str(folder), "--device", "cpu", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (run,) = json.loads(result.stdout)["precision"]
    assert len(run["layers"]) == 3
    for layer in run["layers"].values():
        assert 0 < layer["as trained"] < 1e-3 < layer["bf16 inverses"] < 0.1
