"""`decaylab runs list`, `show` and `pack`: what is recorded."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer

from decaylab.attribution.words import counted
from decaylab.cli import options
from decaylab.cli.terminal import print_json, say, show, warn
from decaylab.errors import printable
from decaylab.records import RunFolder, RunStore
from decaylab.records.index import RunSummary, summaries, summarise
from decaylab.records.packing import pack
from decaylab.text_table import Column, TextTable

app = typer.Typer(help="List and show recorded runs.", no_args_is_help=True)

COLUMNS = (
    Column("run"),
    Column("status"),
    Column("epoch", number=True, drop=2),
    Column("test accuracy", number=True),
    Column("train loss", number=True, drop=1),
    Column("seconds", number=True, drop=3),
    Column("device", drop=4),
)
# What `show` leaves to --json: said elsewhere, or of no use to read.
UNSHOWN = ("id", "status", "test_hits", "starts", "format")
# Prefixes of names that describe the whole run; any other prefix is followed by a layer.
OF_THE_WHOLE = ("train", "test", "kfac", "exposure")


def summary(folder: RunFolder) -> dict[str, Any]:
    """A run in plain values: id, folder, manifest, spec, latest value of each name."""
    return _plain(summarise(folder))


def _plain(run: RunSummary) -> dict[str, Any]:
    return {
        "id": run.folder.id,
        "folder": str(run.folder.path),
        "status": run.manifest.status if run.manifest else "not started",
        "step": run.step,
        "epoch": run.epoch,
        "seconds": run.seconds,
        "values": dict(run.values),
        "manifest": asdict(run.manifest) if run.manifest else None,
        "spec": dict(run.spec),
        "left_out": list(run.left_out),
    }


@app.command("list")
def list_runs(runs: options.Runs = options.RUNS, json_output: options.Json = False) -> None:
    """List the runs in a folder, with their status and latest accuracy."""
    options.check_folder(runs)
    known, unreadable = summaries(RunStore(runs))
    if json_output:
        damaged = [
            {"id": run, "status": "unreadable", "message": message}
            for run, message in unreadable.items()
        ]
        print_json([_plain(run) for run in known] + damaged)
        return
    damaged_lines = [f"{run.folder.id}: {note}" for run in known for note in run.damaged]
    for message in (*unreadable.values(), *damaged_lines):
        warn(f"left out: {printable(message)}")
    if not known:
        say(f"no runs in {runs}: {options.instead_of_runs(runs)}")
        return
    show(TextTable(COLUMNS, map(_line, known)))


def _line(run: RunSummary) -> list[str]:
    accuracy = run.values.get("test/accuracy")
    loss = run.values.get("train/loss", run.values.get("train/running_loss"))
    return [
        run.folder.id,
        run.manifest.status if run.manifest else "not started",
        str(run.epoch),
        "" if accuracy is None else f"{100 * accuracy:.2f} %",
        "" if loss is None else f"{loss:.4g}",
        f"{run.seconds:.1f}",
        run.manifest.device if run.manifest else "",
    ]


@app.command("show")
def show_run(
    run: options.Run, runs: options.Runs = options.RUNS, json_output: options.Json = False
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
    epochs = counted(entry["epoch"], "epoch")
    say(f"{entry['id']}: {entry['status']} after {epochs}, {entry['folder']}", "")
    print(printable(folder.spec_text()))
    for key, value in (entry["manifest"] or {}).items():
        if key in ("started", "updated"):
            value = datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
        if key not in UNSHOWN and value not in ("", None):
            say(f"{key}: {printable(str(value))}")
    for table in latest_values(entry["values"]):
        print()
        show(table)
    for note in entry["left_out"]:
        warn(f"left out: {printable(note)}")


def latest_values(values: dict[str, float]) -> list[TextTable]:
    """The last numbers as tables: those of the whole run, then a layer a row, a probe a column."""
    whole = TextTable([Column("name"), Column("latest", number=True)])
    of_layers: dict[str, float] = {}
    for name, value in values.items():
        quantity, _, layer = name.partition("/")
        if layer and quantity not in OF_THE_WHOLE:
            of_layers[name] = value
        else:
            whole.add(name, f"{value:.6g}")
    return [whole, layer_table(of_layers, "{:.5g}", Column("layer"))] if of_layers else [whole]


def layer_table(values: dict[str, float], digits: str, first: Column) -> TextTable:
    """Numbers named QUANTITY/LAYER: a layer a row, a quantity a column."""
    by_layer: dict[str, dict[str, str]] = {}
    quantities: dict[str, Column] = {}
    for name, value in values.items():
        quantity, _, layer = name.partition("/")
        by_layer.setdefault(layer, {})[quantity] = digits.format(value)
        quantities[quantity] = Column(quantity.replace("_", " "), number=True)
    rows = [(layer, *(texts.get(q, "") for q in quantities)) for layer, texts in by_layer.items()]
    return TextTable([first, *quantities.values()], rows)


@app.command("pack")
def pack_runs(runs: options.Runs = options.RUNS) -> None:
    """Put the rows of finished runs into one small compressed file each.

    Everything reads them as before, and nothing is rounded or left out. Unfinished runs are
    left alone. Runs in subfolders (the trials of searches) are packed too.
    """
    options.check_folder(runs)
    packed = saved = 0
    for folder in [RunFolder(path.parent) for path in sorted(runs.rglob("spec.toml"))]:
        if not folder.is_finished() or not folder.rows_writer.path.exists():
            continue
        with folder.writing(folder.spec_text()):
            saved += pack(folder.path)
        packed += 1
    print(f"{packed} runs packed, {saved / 2**20:.1f} MB saved")
