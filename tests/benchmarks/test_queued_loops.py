"""What the queue would run of K-FAC's loops: its options are right, and it writes what it says."""

import json
from pathlib import Path

import pytest

from decaylab.sweeps.queue import CommandEntry, read_queue

QUEUE = Path(__file__).parents[2] / "results" / "queue.toml"
REACHED = {"held_out": 1.0, "seconds": 1.0}
# Of each script, what does the work: with what to put in its place.
RESULTS = {
    "eager": ("first_round", {"ms": 1.0, "kinds": {"plain": 1.0}, "gigabytes": 1.0}),
    "gpt": ("trained", {**REACHED, "curve": [{**REACHED, "step": 1}]}),
    "defaults": ("trained", {"loss": 1.0, "held_out": 1.0, "trained": True}),
    "step_sizes": ("accuracy", {"accuracy": 0.9}),
}


def queued():
    entries = [entry for entry in read_queue(QUEUE).entries if isinstance(entry, CommandEntry)]
    return [e for e in entries if e.writes.startswith("results/loops/")]


@pytest.mark.parametrize("entry", queued(), ids=lambda entry: entry.writes)
def test_a_loop_of_the_queue(benchmark, tmp_path, monkeypatch, entry):
    python, script, *options = entry.command
    assert python == "python"
    module = benchmark(Path(script).stem)
    name, result = RESULTS[module.__name__]
    monkeypatch.setattr(module, name, lambda *_: dict(result))
    for loader in ("cifar10", "load"):  # no data set here
        monkeypatch.setattr(module, loader, lambda *_: ([], []), raising=False)
    monkeypatch.setattr(module, "python_sources", lambda *_: ([], []), raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / entry.writes).parent.mkdir(parents=True)
    module.main(options)
    record = json.loads((tmp_path / entry.writes).read_text())
    assert record["rows"]
    assert not [row["error"] for row in record["rows"] if "error" in row]
    pages = benchmark("loops_page")
    table = pages.TABLES[Path(entry.writes).stem.split("-")[0]](record["rows"])
    assert table.count("\n") > 1
