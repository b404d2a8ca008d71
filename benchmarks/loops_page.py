"""Write the tables of docs/kfac.md anew, from the records of the scripts that train or time loops.

    python benchmarks/loops_page.py [results/loops/*.json] [--page docs/kfac.md]

A block `<!-- loops: NAME -->` ... `<!-- end -->` of the page shows the record NAME.json; the word
before its first hyphen says whose it is.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import defaults
import step_kinds

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]


def markdown(columns: list[str], rows: list[list[str]], right: int) -> str:
    """A table whose last `right` columns are numbers."""
    rules = ["---"] * (len(columns) - right) + ["---:"] * right
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, rules, *rows])


def eager(rows: list[Row]) -> str:
    """Milliseconds and memory, over those of the first-order optimizer in an eager loop."""
    base = {row["network"]: row for row in rows if (row["step"], row["mode"]) == ("first", "eager")}
    lines = []
    for row in rows:
        names = [row["network"], row["step"], row["mode"]]
        if "error" in row:
            lines.append([*names, row["error"], *[""] * 6])
            continue
        first = base.get(row["network"], {})
        over = [_ratio(row, first, key) for key in ("ms", "gigabytes")]
        kinds = [_number(row["kinds"].get(kind)) for kind in ("plain", "refresh", "invert")]
        memory = _number(row["gigabytes"])
        lines.append([*names, _number(row["ms"]), over[0], *kinds, memory, over[1]])
    columns = ["network", "optimizer", "mode", "ms a step", "x", "plain", "refresh", "invert"]
    return markdown([*columns, "GB", "x"], lines, right=7)


def gpt(rows: list[Row]) -> str:
    """Every setting that was tried, the best of each optimizer with its seeds and its course."""
    lines, courses = [], []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row["optimizer"] == name and "held_out" in row:
                setting = ", ".join(f"{k} {_plain(v)}" for k, v in row["setting"].items())
                groups.setdefault(setting, []).append(row)
        losses = {key: [row["held_out"] for row in runs] for key, runs in groups.items()}
        ranks = {key: (-len(runs), _finite_mean(losses[key])) for key, runs in groups.items()}
        chosen, *_ = ordered = sorted(groups, key=ranks.__getitem__)  # what has all seeds first
        for key in ordered:
            per_step = [1e3 * row["seconds"] / row["curve"][-1]["step"] for row in groups[key]]
            median = _number(statistics.median(per_step))
            lines.append([name, key, _with_spread(losses[key]), str(len(losses[key])), median])
        for points in zip(*(row["curve"] for row in groups[chosen]), strict=True):
            reached = _with_spread([point["held_out"] for point in points])
            seconds = statistics.median(point["seconds"] for point in points)
            courses.append([name, str(points[0]["step"]), _number(seconds), reached])
    columns = ["optimizer", "setting", "held-out loss", "seeds", "ms a step"]
    course = markdown(["optimizer", "steps", "seconds", "held-out loss"], courses, right=3)
    return f"{markdown(columns, lines, right=3)}\n\nThe best setting of each:\n\n{course}"


def _finite_mean(losses: list[float]) -> float:
    mean = statistics.mean(losses)
    return mean if math.isfinite(mean) else math.inf


def _with_spread(losses: list[float]) -> str:
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{spread}"


def memory(rows: list[Row]) -> str:
    """Computed peaks, over the first-order optimizer's, and what stays between steps."""
    base = {row["network"]: row for row in rows if row["step"] == "first"}
    lines = []
    for row in rows:
        first = base.get(row["network"], {})
        replayed = row | {"gigabytes": row["gigabytes"] + row["inversion"]}
        numbers = [_number(row["gigabytes"]), _ratio(row, first, "gigabytes")]
        numbers += [_number(row["inversion"]), _ratio(replayed, first, "gigabytes")]
        share = _number(row["state"] / row["parameters"])
        lines.append([row["network"], row["step"], *numbers, share])
    columns = ["network", "optimizer", "GB", "x", "inversion's graph", "x with it"]
    return markdown([*columns, "state / parameters"], lines, right=5)


def steps(rows: list[Row]) -> str:
    """Held-out losses by kind of step and learning rate, and the best of each."""
    columns, *lines = step_kinds.table(rows)
    return markdown(columns, lines, right=len(columns) - 2)


def sizes(rows: list[Row]) -> str:
    """Accuracies of the grid on the held-out tenth, and of both kinds of steps on the test set."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if "accuracy" in row:
            setting = ", ".join(f"{k} {_plain(v)}" for k, v in row["setting"].items())
            groups.setdefault((row["step"], setting, row["part"]), []).append(row["accuracy"])
    lines = []
    for (step, setting, part), numbers in groups.items():
        spread = f" ± {100 * statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
        mean = f"{100 * statistics.mean(numbers):.2f}{spread}"
        lines.append([step, setting, part, mean, str(len(numbers))])
    return markdown(["step", "setting", "part", "accuracy, %", "seeds"], lines, right=2)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "eager": eager,
    "gpt": gpt,
    "defaults": defaults.table,
    "memory": memory,
    "sizes": sizes,
    "steps": steps,
}


def _plain(value: Any) -> str:
    return "+".join(value) if isinstance(value, list) else f"{value}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(row: Row, first: Row, key: str) -> str:
    return _number(row[key] / first[key]) if row.get(key) and first.get(key) else ""


def written(page: str, records: dict[str, Row]) -> str:
    """The page with a table in the place of each block whose record is there."""
    for name, record in records.items():
        begin, end = f"<!-- loops: {name} -->", "<!-- end -->"
        if begin not in page:
            continue
        place = "{device}, {date}, torch {torch}, decaylab {version}".format(**record["about"])
        table = TABLES[name.split("-")[0]](record["rows"])
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n\n{place}\n\n{table}\n\n{end}{rest.split(end, 1)[1]}"
    return page


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    files = sorted((ROOT / "results" / "loops").glob("*.json"))
    parser.add_argument("records", nargs="*", type=Path, default=files)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "kfac.md")
    options = parser.parse_args(given)
    records = {path.stem: json.loads(path.read_text()) for path in options.records}
    options.page.write_text(written(options.page.read_text(), records))


if __name__ == "__main__":
    main()
