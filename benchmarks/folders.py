"""How long lists take in a large folder of runs: seconds and memory of each command.

    python benchmarks/folders.py [--runs 10000] [--epochs 20] [--megabytes 1000] [--skip report]
                                 [--json]

Writes synthetic runs into a temporary folder, then times each command in a process of its own, the
first time (no index yet) and again; `reproduce` has nothing to do. Then `runs show` of one run
whose file of rows has so many megabytes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import place

from decaylab.paper import artefacts, cells
from decaylab.records import Manifest, RunStore
from decaylab.sweeps.sweep import Submission, Sweep, write_sweep
from decaylab.training import RunSpec

NAMES = ("train/running_loss", "test/loss", "test/accuracy", "train/loss", "train/accuracy")


def commands(seeds: int, page: Path) -> dict[str, list[str]]:
    """What is timed, in this order."""
    return {
        "runs list": ["runs", "list"],
        "runs list, again": ["runs", "list"],
        "sweep status": ["sweep", "status"],
        "claims": ["claims", "--tier", "quick"],
        "reproduce": ["reproduce", "all", "--tier", "quick", "--seeds", str(seeds), "--no-search"],
        "report": ["report", "--out", str(page)],
    }


def specs(seeds: int) -> list[RunSpec]:
    """The paper's runs at tier quick, with so many seeds."""
    paper_cells = [c for name in artefacts() for c in cells(name, "quick", seeds=seeds)]
    return list({spec.id: spec for cell in paper_cells for spec in cell.runs}.values())


def write_run(store: RunStore, spec: RunSpec, number: int, epochs: int) -> None:
    """A finished run, written fast: nothing is forced to disk."""
    spec = spec.resolved()
    path = store.folder(spec.id).path
    path.mkdir(parents=True)
    (path / "spec.toml").write_text(spec.to_toml(), encoding="utf-8")
    values = dict.fromkeys([*NAMES, *(f"weight_norm/layer{n}" for n in range(5))], 0.9)
    with (path / "rows.jsonl").open("w", encoding="utf-8") as file:  # not as one text: it is large
        for e in range(epochs + 1):
            moment = {"step": 44 * e, "epoch": e, "seconds": 0.2 * e}
            file.write(json.dumps({**moment, "values": values}) + "\n")
    began = 1.7e9 + 5 * number
    manifest = Manifest(
        id=spec.id, status="finished", version="0.1.0", commit=None, torch="2", device="cpu",
        seed=spec.seed, tier="quick", started=began, updated=began + 20, at_once=4,
    )  # fmt: skip
    (path / "manifest.json").write_text(json.dumps(vars(manifest)), encoding="utf-8")


def timed(words: list[str], runs: Path) -> dict[str, float]:
    """Seconds and peak memory of a command."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "decaylab", *words, "--runs", str(runs)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    cpu = usage.ru_utime + usage.ru_stime
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": cpu, "megabytes": usage.ru_maxrss / 1024}


def show(name: str, result: dict[str, float]) -> None:
    """A line for a command, as soon as it is known."""
    print(
        f"{name:28} {result['seconds']:7.1f} s  (CPU {result['cpu_seconds']:.1f} s)"
        f"  {result['megabytes']:6.0f} MB",
        file=sys.stderr,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--skip", nargs="*", default=[], metavar="COMMAND")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    seeds = -(-given.runs // len(specs(1)))
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(Path(folder) / "runs")
        planned = specs(seeds)
        for number, spec in enumerate(planned):
            write_run(store, spec, number, given.epochs)
        jobs = [[spec.resolved().id for spec in planned[n::8]] for n in range(8)]
        write_sweep(Sweep("all", ["reproduce", "all"], [Submission("local", "", jobs)]), store.root)
        page = Path(folder) / "report"
        results = {}
        for name, words in commands(seeds, page).items():
            if name not in given.skip:
                results[name] = timed(words, store.root)
                show(name, results[name])
    if given.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            store = RunStore(folder)
            write_run(store, planned[0], 0, given.megabytes * 10**6 // 300)
            words = ["runs", "show", planned[0].resolved().id]
            name = f"runs show, {given.megabytes} MB of rows"
            results[name] = timed(words, store.root)
            show(name, results[name])
    if given.json:
        about = place("cpu") | {"runs": len(planned), "epochs": given.epochs}
        about |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[2], 1)}  # of 15 minutes
        print(json.dumps({"about": about, "commands": results}, indent=1))


if __name__ == "__main__":
    main()
