"""Write what the speed benchmarks measured into docs/speed.md, beside the targets.

    python benchmarks/page.py results/speed/*.json [--runs results] [--page docs/speed.md]

Takes what `step.py --json`, `epoch.py --json` and `precision.py --json` printed, in any number of
files (where two have the same row, the later one counts), and from the records of runs how long
whole schedules took and how accurate they became. Only what stands between the page's two marks
is replaced.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bounds import EVERY, least_ms, per_step
from measuring import PARTS_OF

from decaylab.records import Manifest, RunFolder, RunStore
from decaylab.training import RunSpec

BEGIN, END = "<!-- measured -->", "<!-- end -->"
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
RUNS = Path(__file__).parents[1] / "results"
SCHEDULES = {"vgg16": 130, "resnet32": 330}  # the target for 100 epochs, in seconds
ACCURACIES = {"vgg16": 88.3, "resnet32": 89.5}  # the target of K-FAC-G with decay, no BN, short
REPEATS = "repeats"  # the folder, among the runs, of some made once more: not compiled, or in TF32
LARGEST_ERROR = 0.02  # the target for the relative error of a layer's step
EPOCH_PARTS = {
    "epoch": "Epochs, with data and evaluation",
    "at-once": "Several runs at once",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoints",
    "jacobian": "The exact Jacobian norm",
}
NETWORKS = {"vgg16": "VGG16 (BN)", "resnet32": "ResNet32 x4 (BN)"}
GRAPHS = ("captured", "compiled-captured")
Row = dict[str, Any]


@dataclass
class SpeedRows:
    """The rows of all files, by what they are of."""

    about: list[Row] = field(default_factory=list)
    steps: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    parts: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    epochs: dict[str, dict[tuple[Any, ...], Row]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    precision: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    schedules: list[Row] = field(default_factory=list)
    accuracies: list[Row] = field(default_factory=list)
    determinism: dict[tuple[str, str], dict[str, Row]] = field(default_factory=dict)

    @staticmethod
    def read(paths: Iterable[Path], runs: Path) -> "SpeedRows":
        """From the files that the benchmarks printed, and the records of runs."""
        measured = SpeedRows(
            schedules=whole_schedules(RunStore(runs)),
            accuracies=[*accuracies(RunStore(runs)), *accuracies(RunStore(runs / REPEATS))],
        )
        for path in paths:
            result = json.loads(path.read_text(encoding="utf-8"))
            measured.about.append({"file": path.name, **result["about"]})
            measured.add_steps(result.get("rows", []))
            for row in result.get("parts", []):
                measured.parts[row["network"], row["step"], row["mode"]] = row
            for row in result.get("precision", []):
                measured.precision[row["run"], row["step"], row["damping"]] = row
            measured.missing = result.get("not_installed", measured.missing)
            for part in ("epoch", "at-once", "evaluation", "checkpoint", "jacobian"):
                for row in result.get(part, []):
                    settings = [(k, v) for k, v in row.items() if k != "error"]
                    place = tuple(v for _, v in settings if not isinstance(v, float))
                    measured.epochs.setdefault(part, {})[place] = row
        return measured

    def add_steps(self, rows: list[Row]) -> None:
        """Those of a file with deterministic steps count for these alone: one run, one lag."""
        alone = any(row["mode"] == "deterministic" for row in rows)
        for row in rows:
            if alone:
                self.determinism.setdefault((row["network"], row["step"]), {})[row["mode"]] = row
            else:
                self.steps[row["network"], row["step"], row["mode"]] = row

    def best(self, network: str, step: str) -> Row | None:
        """The fastest of our captured steps."""
        rows = [self.steps.get((network, step, mode), {}) for mode in GRAPHS]
        rows = [row for row in rows if "ms" in row]
        return min(rows, key=lambda row: row["ms"], default=None)

    def of(self, part: str, network: str, key: str, optimizer: str | None = None) -> list[float]:
        """A number of every row of an epoch benchmark's part."""
        rows = [row for row in self.epochs.get(part, {}).values() if row["network"] == network]
        chosen = [row for row in rows if optimizer in (None, row.get("optimizer"))]
        return [row[key] for row in chosen if key in row]


def finished(store: RunStore, tier: str) -> Iterator[tuple[RunFolder, Manifest, RunSpec]]:
    for folder in store.runs():
        manifest = folder.manifest()
        if manifest is not None and (manifest.status, manifest.tier) == ("finished", tier):
            yield folder, manifest, RunSpec.of_run(folder)


def whole_schedules(store: RunStore) -> list[Row]:
    """Seconds of K-FAC runs at the paper's schedule that had a GPU to themselves."""
    schedule_rows = []
    for folder, manifest, spec in finished(store, "full"):
        if manifest.device == "cpu" or manifest.at_once > 1 or manifest.resumes:
            continue
        if not spec.optimizer.startswith("kfac"):
            continue
        rows = folder.rows().rows
        steps = [row.value for row in rows if row.name == "train/seconds"]
        schedule_rows.append(
            {
                **{"run": folder.id, "network": spec.network, "batch_size": spec.batch_size},
                "epochs": spec.epochs,
                **{"compiled": manifest.compiled, "first_epoch": steps[0], "steps": steps[-1]},
                "seconds": max(row.seconds for row in rows),
                "with_probes": manifest.updated - manifest.started,
            }
        )
    return schedule_rows


def accuracies(store: RunStore) -> list[Row]:
    """The last test accuracy of K-FAC-G with decay, CIFAR-10 without BN or augmentation, short."""
    accuracy_rows = []
    for folder, manifest, spec in finished(store, "short"):
        setting = (spec.data, spec.optimizer, spec.decay, spec.batch_norm, spec.augment)
        judged = setting == ("cifar10", "kfac-g", "decoupled", False, False)
        if judged and spec.network in ACCURACIES:
            last = folder.rows().last("test/accuracy")
            seen = {"network": spec.network, "run": folder.id, "seed": manifest.seed}
            seen |= {"precision": spec.precision, "compiled": manifest.compiled}
            accuracy_rows.append({**seen, "accuracy": 100 * (last or 0.0)})
    return accuracy_rows


def best_ms(step: str) -> Callable[[SpeedRows, str], float | None]:
    def value(measured: SpeedRows, network: str) -> float | None:
        row = measured.best(network, step)
        return None if row is None else row["ms"]

    return value


def best_ratio(step: str) -> Callable[[SpeedRows, str], float | None]:
    """Over the fastest of our SGD steps, whatever its mode."""

    def value(measured: SpeedRows, network: str) -> float | None:
        row, base = measured.best(network, step), measured.best(network, "sgd")
        return None if row is None or base is None else row["ms"] / base["ms"]

    return value


def more_memory(measured: SpeedRows, network: str) -> float | None:
    """Gigabytes of the larger K-FAC over SGD, in the same mode; the mode with the most."""
    differences = []
    for mode in GRAPHS:
        names = ("sgd", "kfac-f", "kfac-g")
        used = [measured.steps.get((network, n, mode), {}).get("gigabytes") for n in names]
        differences += [gb - used[0] for gb in used[1:] if gb is not None and used[0] is not None]
    return max(differences, default=None)


def most(part: str, key: str) -> Callable[[SpeedRows, str], float | None]:
    return lambda measured, network: max(measured.of(part, network, key), default=None)


def throughput(measured: SpeedRows, network: str) -> float | None:
    return min(measured.of("at-once", network, "throughput", "kfac-g"), default=None)


@dataclass(frozen=True)
class Goal:
    """A target: a limit for each network, above or below."""

    what: str
    limits: tuple[float, float]
    value: Callable[[SpeedRows, str], float | None]
    form: str = "{:.2f}"
    at_least: bool = False


GOALS = [
    Goal("SGD step, ms", (2.2, 6.6), best_ms("sgd"), "{:.3f}"),
    Goal("K-FAC-F step, ms", (3.0, 7.6), best_ms("kfac-f"), "{:.3f}"),
    Goal("K-FAC-G step, ms", (3.0, 7.6), best_ms("kfac-g"), "{:.3f}"),
    Goal("K-FAC-F step over our SGD", (1.35, 1.15), best_ratio("kfac-f")),
    Goal("K-FAC-G step over our SGD", (1.35, 1.15), best_ratio("kfac-g")),
    Goal(
        "epoch with data and evaluation over its steps",
        (1.05, 1.05),
        most("epoch", "ratio"),
        "{:.3f}",
    ),
    Goal(
        "exact Jacobian norm of 10,000 images, second pass, s",
        (3, 15),
        most("jacobian", "seconds"),
    ),
    Goal("throughput of K-FAC runs at once over one", (1.4, 1.3), throughput, at_least=True),
    Goal("peak memory of K-FAC over SGD, GB", (2.5, 2.5), more_memory),
]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)


def cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def goals(measured: SpeedRows) -> str:
    rows = []
    for goal in GOALS:
        cells = [goal.what]
        for network, limit in zip(NETWORKS, goal.limits, strict=True):
            value = goal.value(measured, network)
            sign = ">=" if goal.at_least else "<="
            if value is None:
                cells += [f"{sign} {limit:g}", "not measured"]
                continue
            reached = value >= limit if goal.at_least else value <= limit
            cells += [
                f"{sign} {limit:g}",
                goal.form.format(value) + ("" if reached else " (missed)"),
            ]
        rows.append(cells)
    head = [word for name in NETWORKS.values() for word in (f"{name}: target", "measured")]
    return table(["", *head], rows)


def steps(measured: SpeedRows) -> str:
    kinds = ("plain", "refresh", "invert")
    rows = []
    for (network, step, mode), row in measured.steps.items():
        head = [f"{network}: {step}, {mode}"]
        if "error" in row:
            rows.append([*head, row["error"], *[""] * 6])
            continue
        ratios = [shown(row["over_sgd"]), shown(row["over_stock"])]
        times = [shown(row["kinds"].get(kind)) for kind in kinds]
        rows.append([*head, shown(row["ms"], "{:.3f}"), *ratios, *times, shown(row["gigabytes"])])
    absent = f"\n\nNot installed there: {', '.join(measured.missing)}." if measured.missing else ""
    return table(["step", "ms", "x SGD", "x stock SGD", *kinds, "GB"], rows) + absent


def parts(measured: SpeedRows) -> str:
    columns = [(kind, part) for kind, names in PARTS_OF.items() for part in names]
    head = [f"{part} ({kind})" for kind, part in columns]
    rows = [
        [f"{network}: {step}, {mode}"]
        + [shown(row.get(kind, {}).get(part)) for kind, part in columns]
        for (network, step, mode), row in measured.parts.items()
    ]
    return table(["ms in a step of that kind", *head], rows)


def against_bounds(measured: SpeedRows) -> str:
    """Each part of K-FAC-G's fastest steps beside the least that the device's data sheet allows."""
    about = [row for row in measured.about if row["file"].startswith("step")]
    places = {(row["device"], row["batch_size"]) for row in about}
    rows = []
    for network in NETWORKS:
        best, sgd = measured.best(network, "kfac-g"), measured.best(network, "sgd")
        parts = measured.parts.get((network, "kfac-g", best["mode"])) if best else None
        least = least_ms(network, *next(iter(places))) if len(places) == 1 else None
        if parts is None or sgd is None or least is None:
            continue
        taken = {part: ms for kind in PARTS_OF for part, ms in parts[kind].items() if part in EVERY}
        for part, every in EVERY.items():
            times = [f"{taken[part]:.2f}", f"{least[part]:.2f}", f"{taken[part] / least[part]:.1f}"]
            rows.append([f"{network}: {part}", str(every), *times])
        both = [per_step(taken), per_step(least)]
        added = [f"{both[0]:.2f}", f"{both[1]:.2f}", f"{both[0] / both[1]:.1f}"]
        rows.append([f"{network}: all, on average over steps", "1", *added])
        ratios = [f"{1 + ms / sgd['ms']:.2f}" for ms in both]
        rows.append([f"{network}: a step with them over our SGD", "", *ratios, ""])
    head = ["", "every ... steps", "ms", "least ms", "x the least"]
    return table(head, rows) if rows else ""


def epochs(measured: SpeedRows) -> str:
    """A table for each part of the epoch benchmark, with the columns that its rows have."""
    blocks = []
    for part, part_rows in measured.epochs.items():
        columns = list(dict.fromkeys(key for row in part_rows.values() for key in row))
        rows = [[cell(row.get(key, "")) for key in columns] for row in part_rows.values()]
        blocks.append(table([name.replace("_", " ") for name in columns], rows))
        blocks[-1] = f"{EPOCH_PARTS[part]}:\n\n{blocks[-1]}"
    return "\n\n".join(blocks)


def schedules(measured: SpeedRows) -> str:
    """Of 100 epochs in batches of 128: longer ones have no goal."""
    columns = ("first_epoch", "steps", "seconds", "with_probes")
    rows = []
    for row in measured.schedules:
        usual = (row["batch_size"], row["epochs"]) == (128, 100)
        limit = SCHEDULES.get(row["network"]) if usual else None
        reached = "" if limit is None else "yes" if row["seconds"] <= limit else "missed"
        words = [f"`{row['run']}`", "yes" if row["compiled"] else "no"]
        times = [shown(row[key], "{:.1f}") for key in columns]
        rows.append([*words, *times, shown(limit, "<= {:g}"), reached])
    head = ["run (times in seconds)", "compiled", "first epoch's steps", "all steps"]
    head += ["to the last epoch", "total"]
    return table([*head, "to the last epoch: target", "reached"], rows)


def determinism(measured: SpeedRows) -> str:
    """What deterministic steps take longer, from one run."""
    rows = []
    for (network, step), modes in measured.determinism.items():
        usual, fixed = (modes.get(mode, {}).get("ms") for mode in ("captured", "deterministic"))
        if usual is not None and fixed is not None:
            times = [shown(usual, "{:.3f}"), shown(fixed, "{:.3f}")]
            rows.append([f"{network}: {step}", *times, f"{fixed / usual - 1:+.1%}"])
    return table(["ms a step", "captured", "deterministic", "cost"], rows)


def trained(measured: SpeedRows) -> str:
    """Run by run, and mean and standard deviation of each network's in each precision."""
    rows, by_setting = [], defaultdict[tuple[str, str], list[Row]](list)
    for row in measured.accuracies:
        by_setting[row["network"], row["precision"]].append(row)
    for (network, precision), runs in by_setting.items():
        for row in runs:
            words = [f"`{row['run']}`", str(row["seed"]), precision]
            compiled = "yes" if row["compiled"] else "no"
            rows.append([*words, compiled, f"{row['accuracy']:.2f}", "", ""])
        values, limit = [row["accuracy"] for row in runs], ACCURACIES[network]
        mean = statistics.fmean(values)
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        reached = "yes" if mean >= limit else "missed"
        line = [f"mean of {network}", "", precision, "", f"{mean:.2f}{spread}"]
        rows.append([*line, f">= {limit:g}", reached])
    head = ["run", "seed", "precision", "compiled", "test accuracy", "target", "reached"]
    return table(head, rows)


def precision(measured: SpeedRows) -> str:
    """The worst layer and the middle one of each run."""
    rows = []
    for run in measured.precision.values():
        for way in ("as trained", "bf16 inverses"):
            by_error = sorted((row[way], name) for name, row in run["layers"].items())
            worst, layer = by_error[-1]
            middle = by_error[len(by_error) // 2][0]
            over = sum(error > LARGEST_ERROR for error, _ in by_error)
            numbers = [f"{middle:.2%}", f"{worst:.2%} ({layer})", f"{over} of {len(by_error)}"]
            rows.append(
                [f"`{run['run']}`, step {run['step']}", f"{run['damping']:g}", way, *numbers]
            )
    head = ["factors of", "damping", "computed", "median", "worst layer"]
    return table([*head, f"layers over {LARGEST_ERROR:.0%}"], rows)


def measured_section(measured: SpeedRows) -> str:
    """What stands between the marks."""
    places = []
    for about in measured.about:
        place = "{file}: {device}, {date}, torch {torch}, decaylab {version}".format(**about)
        commit = f" ({about['commit'][:9]})" if about["commit"] else ""
        if "batch_size" in about:
            commit += ", {precision}, batch {batch_size}, inversion lag {inversion_lag}".format(
                **about
            )
            commit += ", compiled" if about.get("compiled") else ""
        places.append(f"- {place}{commit}")
    sections = {
        "Targets": goals(measured),
        "Steps": steps(measured) if measured.steps else "",
        "Parts of K-FAC steps": parts(measured) if measured.parts else "",
        "Parts against their bounds": against_bounds(measured),
        "Epochs": epochs(measured) if measured.epochs else "",
        "Deterministic steps": determinism(measured) if measured.determinism else "",
        "Accuracy": trained(measured) if measured.accuracies else "",
        "Whole schedules": schedules(measured) if measured.schedules else "",
        "Precision of a K-FAC step": precision(measured) if measured.precision else "",
    }
    filled = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(["Measured with:", "\n".join(places), *filled])


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(given)
    text = options.page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        parser.error(f"{options.page} has no {BEGIN} ... {END} to fill")
    section = measured_section(SpeedRows.read(options.files, options.runs))
    options.page.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
