"""`decaylab runs list`, `show` and `pack`: what is recorded."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer
from rich.table import Table

from decaylab.cli import options
from decaylab.cli.output import console, print_json
from decaylab.errors import DecaylabError
from decaylab.records import RunFolder, RunStore
from decaylab.records.packing import pack

app = typer.Typer(help="List and show recorded runs.", no_args_is_help=True)

# Prefixes of names that say something of the whole run; behind any other stands a layer.
OF_THE_WHOLE = ("train", "test", "kfac", "exposure")


def summary(folder: RunFolder) -> dict[str, Any]:
    """A run in plain values: id, folder, manifest, spec, latest value of each name."""
    manifest = folder.manifest()
    rows = folder.rows()
    by_step = sorted(rows.rows, key=lambda row: row.step)
    latest = by_step[-1] if by_step else None
    return {
        "id": folder.id,
        "folder": str(folder.path),
        "status": manifest.status if manifest else "not started",
        "step": latest.step if latest else 0,
        "epoch": latest.epoch if latest else 0,
        "seconds": latest.seconds if latest else 0.0,
        "values": {row.name: row.value for row in by_step},
        "manifest": asdict(manifest) if manifest else None,
        "spec": folder.spec_values(),
        "left_out": list(rows.left_out),
    }


@app.command("list")
def list_runs(runs: options.Runs = options.RUNS, json_output: options.Json = False) -> None:
    """List the runs in a folder, with their status and latest accuracy."""
    found, unreadable = [], []
    for folder in RunStore(runs).runs():
        try:
            found.append(summary(folder))
        except DecaylabError as error:
            unreadable.append({"id": folder.id, "status": "unreadable", "message": str(error)})
    if json_output:
        print_json(found + unreadable)
        return
    for entry in unreadable:
        print(f"left out: {entry['message']}", file=sys.stderr)
    if not found:
        print(f"no runs in {runs}" + ("" if runs.exists() else ": there is no such folder"))
        return
    console(200, markup=False).print(_table(found))


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "status", "epoch", "test accuracy", "train loss", "seconds", "device"):
        table.add_column(heading, no_wrap=heading == "run", justify="left")
    for entry in found:
        values, manifest = entry["values"], entry["manifest"] or {}
        accuracy = values.get("test/accuracy")
        loss = values.get("train/loss", values.get("train/running_loss"))
        table.add_row(
            entry["id"],
            entry["status"],
            str(entry["epoch"]),
            "" if accuracy is None else f"{100 * accuracy:.2f} %",
            "" if loss is None else f"{loss:.4g}",
            f"{entry['seconds']:.1f}",
            f"{manifest.get('device', '')}",
        )
    return table


@app.command("show")
def show_run(
    run: options.Run,
    runs: options.Runs = options.RUNS,
    json_output: options.Json = False,
) -> None:
    """Show one run: its spec, its status, its latest numbers, and what could not be read."""
    folder = options.found_run(run, runs)
    entry = summary(folder)
    if json_output:
        rows = folder.rows()
        entry["series"] = {
            name: [[row.step, row.value] for row in rows.series(name)] for name in rows.names()
        }
        print_json(entry)
        return
    print(f"{entry['id']}: {entry['status']} after {entry['epoch']} epochs, {entry['folder']}\n")
    print(folder.spec_text())
    for key, value in (entry["manifest"] or {}).items():
        if key in ("started", "updated"):
            value = datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
        if key not in ("id", "status") and value not in ("", None):
            print(f"{key}: {value}")
    for table in latest_values(entry["values"]):
        print()
        console(200, markup=False).print(table)
    for note in entry["left_out"]:
        print(f"left out: {note}", file=sys.stderr)


def latest_values(values: dict[str, float]) -> list[Table]:
    """The last numbers as tables: those of the whole run, then a layer a row, a probe a column."""
    whole: dict[str, float] = {}
    layers: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        quantity, _, layer = name.partition("/")
        if layer and quantity not in OF_THE_WHOLE:
            layers.setdefault(layer, {})[quantity] = value
        else:
            whole[name] = value
    first = _numbers_table("name", ["latest"])
    for name, value in whole.items():
        first.add_row(name, f"{value:.6g}")
    if not layers:
        return [first]
    quantities = list(dict.fromkeys(quantity for own in layers.values() for quantity in own))
    second = _numbers_table("layer", quantities)
    for layer, own in layers.items():
        numbers = [f"{own[q]:.5g}" if q in own else "" for q in quantities]
        second.add_row(layer, *numbers)
    return [first, second]


def _numbers_table(first: str, numbers: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


@app.command("pack")
def pack_runs(runs: options.Runs = options.RUNS) -> None:
    """Put the rows of finished runs into one small compressed file each.

    Everything reads them as before, and nothing is rounded or left out. Runs that are not finished
    are left as they are. Runs in folders below (the trials of searches) are packed as well.
    """
    packed = saved = 0
    for folder in [RunFolder(path.parent) for path in sorted(runs.rglob("spec.toml"))]:
        if not folder.is_finished() or not folder.rows_writer.path.exists():
            continue
        lock = folder.path / "lock"
        begun = lock.exists()
        with folder.writing(folder.spec_text()):
            saved += pack(folder.path)
            if not begun:  # a folder that was copied here has none
                lock.unlink()
        packed += 1
    print(f"{packed} runs packed, {saved / 2**20:.1f} MB saved")
