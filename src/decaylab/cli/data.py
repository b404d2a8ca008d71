"""`decaylab data list` and `decaylab data fetch`: which data sets are here, and getting them."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from decaylab.cli import options
from decaylab.cli.progress import Left, stages
from decaylab.cli.terminal import print_json, say, show
from decaylab.data import DATA_SETS, Facts, fetch, find, load
from decaylab.errors import DecaylabError, NoFolder
from decaylab.text_table import Column, TextTable

data_app = typer.Typer(help="List and download data sets.", no_args_is_help=True)


@data_app.command("list")
def list_data(data_dir: options.DataDir = None, json_output: options.Json = False) -> None:
    """List the data sets and where each was found."""
    entries = []
    with stages(sys.stderr) as tell:
        for facts in DATA_SETS.values():
            tell(f"looking for {facts.name}")
            entries.append(_entry(facts, data_dir))
    if json_output:
        print_json(entries)
        return
    classes = Column("classes", number=True, drop=2)
    columns = [Column("name"), Column("images", drop=1), classes, Column("shape", drop=3)]
    table = TextTable([*columns, Column("where", words=True)])
    for entry in entries:
        table.add(
            entry["name"],
            f"{entry['train']:,} + {entry['test']:,}",
            str(entry["classes"]),
            "x".join(map(str, entry["shape"])),
            _where(entry),
        )
    show(table)


def _entry(facts: Facts, data_dir: Path | None) -> dict[str, Any]:
    """A data set in plain values; `place` is null if it was not found, `problem` says why."""
    place = layout = problem = None
    if facts.name == "digits":
        place, layout = "scikit-learn", "built in"
    try:
        if source := find(facts.name, data_dir):
            place, layout = str(source.place), source.format
    except NoFolder:
        raise
    except DecaylabError as error:
        problem = str(error)
    return {
        "name": facts.name,
        "train": facts.splits["train"].count,
        "test": facts.splits["test"].count,
        "classes": facts.classes,
        "shape": list(facts.shape),
        "place": place,
        "format": layout,
        "problem": problem,
    }


def _where(entry: dict[str, Any]) -> str:
    if entry["problem"] is not None:
        return f"unusable: {entry['problem']}"
    if entry["place"] is None:
        return f"fetch it: decaylab data fetch {entry['name']}"
    return f"{entry['place']} ({entry['format']})"


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(DATA_SETS)}.")],
) -> None:
    """Download a data set into the user's cache, check it and decode it."""
    if name == "digits":
        say("digits ships with scikit-learn: there is nothing to fetch")
        return
    folder = _with_bar(name) if sys.stdout.isatty() else fetch(name, _line_when_done)
    with stages(sys.stderr) as tell:
        tell(f"checking and decoding {name}")
        data = load(name, folder)
    say(
        f"{name}: {len(data.train):,} + {len(data.test):,} images, {data.classes} classes, "
        f"checked, in {folder}"
    )


def _with_bar(name: str) -> Path:
    tasks: dict[str, TaskID] = {}
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), Left())
    with Bar(TextColumn("{task.description}"), *columns) as bar:

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
            bar.update(tasks[file], completed=done, total=total)

        return fetch(name, show)


def _line_when_done(file: str, done: int, total: int | None) -> None:
    if done == total:
        say(f"{file}: {done:,} bytes")
