"""What the pages say in numbers, read from the records in results/.

A page asks for a block with the lines `<!-- records: NAME -->` and `<!-- end -->`; `BLOCKS` has the
names. So nothing is typed by hand, and where there are no records a block says so and which command
makes them. `mkdocs build` loads this file as a hook and fills in the blocks again, with figures;
`python docs/from_records.py` (part of `make results-pages`) writes their text between the lines,
for readers of the files themselves.
"""

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from decaylab.attribution import SIZE_FREE_ROTATION, Estimate
from decaylab.attribution.shares import in_points
from decaylab.attribution.words import fraction, margin
from decaylab.diagnosis import Finding, diagnose, reasons
from decaylab.document import grid_markdown, text_grid
from decaylab.errors import DecaylabError, check_name
from decaylab.paper import TIERS, FinishedRun, FinishedRuns, artefact_of
from decaylab.paper.claims import CLAIMS
from decaylab.paper.evidence import Bench, Comparison, Sample
from decaylab.paper.plan import chosen_cells, plan
from decaylab.records import RunFolder, RunStore
from decaylab.report.diagnoses import baseline_of
from decaylab.report.drawing import Line, Panel, draw
from decaylab.report.mechanisms import (
    MECHANISMS,
    Demo,
    MechanismSection,
    demo_runs,
    mechanism_grid,
    mechanism_panels,
    short_accuracy_grid,
)
from decaylab.report.names import counted_seeds, key_title, named
from decaylab.report.tables import OverSeeds, number, seeds_words, to_grid
from decaylab.sweeps.estimate import Estimator, checked_estimates
from decaylab.sweeps.queue import CommandEntry, read_queue
from decaylab.sweeps.run_index import indexed_runs
from decaylab.sweeps.sweep import pack

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path
from results_pages.results import PAPERS_OWN, Results

RESULTS = Path(__file__).parents[1] / "results"
NET = ("dataset", "network", "batch_norm", "augment")  # Table 1's columns that tell a net
BLOCK = re.compile(r"^<!-- records: ([\w-]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
PANELS = re.compile(r'<div class="panels" markdown>.*?</div>', re.DOTALL)
NO_PANELS = "*The figures are in the site that `make docs` builds.*"
# A link from a page to a file of the repository that is not a page.
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


@dataclass(frozen=True)
class Figure:
    """Panels that stand side by side on a page, as files named `figures/<name>-<number>.png`."""

    name: str
    panels: Sequence[Panel]

    @property
    def markdown(self) -> str:
        """The images, as a page shows them; nothing where there is none."""
        images = (
            f"![{panel.title}: {panel.y_label} over {panel.x_label or 'optimizers'}]({path})"
            for path, panel in self.files()
        )
        return f'<div class="panels" markdown>\n{" ".join(images)}\n</div>\n' if self.panels else ""

    def files(self) -> list[tuple[str, Panel]]:
        """Where each panel is found, from the pages."""
        return [(f"figures/{self.name}-{i}.png", panel) for i, panel in enumerate(self.panels)]


class Records(Results):
    """The records of a results folder, and the demo's in it."""

    def __init__(self, root: Path = RESULTS) -> None:
        super().__init__(root)

    def tiers_of(self, artefact: str) -> list[str]:
        """The paper's own tiers at which an artefact has a finished run, the full one first."""
        return [tier for tier in PAPERS_OWN if self.filled(artefact, tier).done]

    def bench(self, tier: str) -> Bench:
        """The records at a tier, to be compared."""
        return Bench(self.finished_runs, tier, self.seeds, self.root / "searched")

    @cache  # noqa: B019 - one object a build
    def demo(self) -> Demo:
        """The demo's runs."""
        finished_runs = FinishedRuns(RunStore(self.root / "demo"))
        indexed, _ = indexed_runs(finished_runs.store)
        return demo_runs(indexed, finished_runs)


def _commands(artefact: str) -> str:
    return f"*Not run yet.* `decaylab reproduce {artefact} --tier short` makes these runs.\n"


def _tier_words(tier: str, runs: Iterable[FinishedRun]) -> str:
    devices = dict.fromkeys(run.manifest.device for run in runs)
    return f"{TIERS[tier].schedule}, on {', '.join(devices)}"


def gains(records: Records, artefact: str) -> str:
    """Test accuracy of each net with its first scheme, and what every other scheme adds to it.

    A row at the longest schedule it has been run at, and again where a shorter one has more of it.
    """
    shown = defaultdict[tuple[object, ...], set[object]](set)
    tables = (_gains_at(records, artefact, tier, shown) for tier in records.tiers_of(artefact))
    return "\n".join(filter(None, tables)) or _commands(artefact)


def _gains_at(
    records: Records, artefact: str, tier: str, shown: dict[tuple[object, ...], set[object]]
) -> str:
    bench = records.bench(tier)
    groups = bench.groups(artefact)
    baseline, *others = dict.fromkeys(last for _, cells in groups for last in cells)
    columns = [name for name in artefact_of(artefact).keys[:-1] if name != "optimizer"]
    rows, used, complete, in_part = [], list[FinishedRun](), 0, False
    for key, cells in groups:
        base = bench.sample(cells.get(baseline))
        samples = {last: bench.sample(cells.get(last)) for last in others}
        decayed = {last: sample for last, sample in samples.items() if sample is not None}
        if base is None or not decayed:
            continue
        complete += 1
        in_part |= len(decayed) < len(others)
        before = shown[tuple(key.values())]
        if decayed.keys() <= before:
            continue
        before.update(decayed)
        used += [run for sample in (base, *decayed.values()) for run in sample.runs]
        gained = (bench.difference("", (1, sample), (-1, base)) for sample in samples.values())
        counts = dict.fromkeys(len(sample.values) for sample in (base, *decayed.values()))
        rows.append(
            [
                key_title(key, columns),
                named(key["optimizer"]),
                OverSeeds(tuple(100 * v for v in base.values.values())).short(),
                *map(_gain, gained),
                _strengths(decayed.values()),
                seeds_words(*counts),
            ]
        )
    if not rows:  # each needs a run without decay and one with it
        return ""
    header = ["network", "optimizer", *map(_label, (baseline, *others)), "lr, decay", "seeds"]
    table = text_grid(header, rows)
    data = dict.fromkeys(named(run.spec.data) for run in used)
    on = f" on {', '.join(data)}" if "dataset" not in columns else ""
    caption = f"Test accuracy in %{on} and what decay adds, in points; {_tier_words(tier, used)};"
    caption += f" {complete} of {len(groups)} rows have been run{', some in part' * in_part}"
    caption += "; rows missing here are in the table above." if complete > len(rows) else "."
    if "†" in table:
        caption += " †: too short a schedule for this decay to take full effect (exposure below 1)."
    return f"{table}\n<small>{caption}</small>\n"


def _label(last: object) -> str:
    words = {"0": "no decay", "1": "with decay", "baseline": "no decay"}
    return words.get(str(last), named(last))


def _gain(compared: Comparison | None) -> str:
    """Points ± one standard error, bold where they are beyond the noise."""
    if compared is None:
        return "not run yet"
    text = f"{compared.value:+.2f} ± {compared.noise.error:.2f}"
    text = text if compared.leaning() == "unclear" else f"**{text}**"
    return text if compared.enough else f"{text} †"


def _strengths(samples: Iterable[Sample]) -> str:
    specs = [sample.runs[0].spec.resolved() for sample in samples]
    settings = dict.fromkeys(
        f"{spec.lr:g}, {named(spec.decay)} {spec.weight_decay:g}" for spec in specs
    )
    return "; ".join(settings)


def claimed(records: Records, names: Sequence[str]) -> str:
    """What the paper claims, and what our records say to it, at every tier with runs."""
    rows = []
    for name in names:
        where, claim = CLAIMS[name].where, CLAIMS[name].claim
        by_tier = [records.claims(tier)[name] for tier in PAPERS_OWN]
        cells = [[c.effect, f"{c.verdict}, tier {c.tier}"] for c in by_tier if c.n]
        rows += [[f"{claim} ({where})", *pair] for pair in cells or [["not run yet"] * 2]]
    return text_grid(["the paper's claim", "our records", "verdict"], rows)


def verdicts(records: Records) -> str:
    """What `diagnose` says of the runs of Table 1 with decay: which mechanism it acts through.

    Of each, at the longest schedule it has been run at.
    """
    rows: list[list[str]] = []
    for tier, words, folders in _decayed(records):
        if words in (row[: len(words)] for row in rows):
            continue
        result = diagnose(*folders)
        judged_from = "both runs" if result.baselines else "the run alone"
        rows.append([*words, *map(_finding, result.findings), judged_from, tier])
    header = ["network", "optimizer", *reasons.Mechanism, "judged from", "tier"]
    return text_grid(header, rows) if rows else _commands("table1")


def reconstructed(records: Records) -> str:
    """The first mechanism's factor as one run tells it, beside that of both runs."""
    rows = []
    for tier, words, folders in _decayed(records):
        if len(folders) < 2:
            continue
        both, alone = (diagnose(*sources) for sources in (folders, folders[:1]))
        effects = [result.findings[0].effect for result in (alone, both)]
        if both.baselines and all(effects):
            layers = both.compared[0][0].turned_layers
            exposure = fmean(x.total_exposure or 0.0 for x in layers)
            rows.append([*words, number(exposure), *(number(e.value) for e in effects if e), tier])
    header = ["network", "optimizer", "exposure", "from the run alone", "against its baseline"]
    header += ["tier"]
    return text_grid(header, rows) if rows else _commands("table1")


def _decayed(records: Records) -> Iterator[tuple[str, list[str], list[RunFolder]]]:
    """The runs of Table 1 with decay: tier, words, the run's folder and that of its baseline.

    A baseline differs by the decay alone. At other learning rates, as often in Table 1, it is none.
    """
    for tier in records.tiers_of("table1"):
        for key, cells in records.bench(tier).groups("table1"):
            for run in records.finished_runs.of_cell(cells[1])[:1]:
                net = key_title(key, NET)
                baseline = baseline_of(run.spec.resolved(), records.indexed)
                folders = [records.finished_runs.store.folder(run.spec.id)]
                folders += [baseline.folder] if baseline is not None else []
                yield tier, [net, named(key["optimizer"])], folders


def _printed(records: Records, name: str) -> dict[str, Any] | None:
    """What benchmarks/NAME.py printed."""
    path = records.root / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _not_run(name: str) -> str:
    return f"*Not run yet.* `python benchmarks/{name}.py --json > results/{name}.json`\n"


def _by(name: str, about: dict[str, Any], size: str) -> str:
    """The line below a table that a benchmark printed."""
    caption = "{seeds} seeds, {size}; {device}, {date}, torch {torch}, decaylab {version}"
    return f"<small>{caption.format(**about, size=size)}: `benchmarks/{name}.py`</small>\n"


def schedules(records: Records, part: str) -> str:
    """A part of what benchmarks/schedules.py measured; [smallest, largest] as a range."""
    printed = _printed(records, "schedules")
    if printed is None:
        return _not_run("schedules")
    table = text_grid([*printed[part][0]], [[*map(_range, row.values())] for row in printed[part]])
    about = printed["about"]
    return f"{table}\n{_by('schedules', about, '{steps} steps'.format(**about))}"


def bursts(records: Records) -> str:
    """What benchmarks/bursts.py measured, by setting, and the norms of its first seed."""
    printed = _printed(records, "bursts")
    if printed is None:
        return _not_run("bursts")
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in printed["runs"]:
        runs[run["setting"]].append(run)
    rows = []
    for setting, seeds in runs.items():
        before = [burst["before"] for run in seeds for burst in run["bursts"]]
        last = [run["norm"][-1] for run in seeds]
        accuracies = [100 * run["test accuracy"] for run in seeds]
        counts = ", ".join(str(len(run["bursts"])) for run in seeds)
        ranges = [_range([min(v), max(v)]) if v else "—" for v in (before, last, accuracies)]
        rows.append([setting, counts, *ranges])
    header = ["K-FAC-F with", "bursts, by seed", "norm before a burst", "norm at the end"]
    about = printed["about"]
    by = _by("bursts", about, "{epochs} epochs".format(**about))
    table = text_grid([*header, "test accuracy"], rows)
    return f"{bursts_figure(records).markdown}\n{table}\n{by}"


def bursts_figure(records: Records) -> Figure:
    """The norm of the first layer over the epochs, first seed: fixed and scale-free damping."""
    printed = _printed(records, "bursts") or {"runs": []}
    lines = [
        Line(run["setting"], range(1, len(run["norm"]) + 1), run["norm"])
        for run in printed["runs"]
        if run["seed"] == 0 and run["setting"] in ("fixed damping", "scale-free damping")
    ]
    panel = Panel(
        "K-FAC-F on digits, seed 0", "epoch", "norm of the first layer", lines, log_y=True
    )
    return Figure("bursts", [panel] if lines else [])


SHARES = ("rotation", "size", "damping", "others", "direction")


def attributions(records: Records) -> str:
    """What every attribution in results/attribution found: a row per setting and metric."""
    rows, about = [], dict[str, None]()
    for path in sorted((records.root / "attribution").glob("*.json")):
        attribution = json.loads(path.read_text(encoding="utf-8"))
        size = f"{len(attribution['seeds'])} seeds, {attribution['steps']} steps"
        for metric, shares in attribution["metrics"].items():
            unclear = shares["doubt"] is not None
            rows.append(
                [
                    f"{attribution['title']} ({size})" if metric == attribution["metric"] else "",
                    metric,
                    margin(_estimate(shares["total"]), in_points(metric, [])),
                    *(
                        "—" if unclear or name not in shares["shares"] else fraction(share)
                        for name in SHARES
                        for share in [_estimate(shares["shares"].get(name))]
                    ),
                    "; ".join(
                        fraction(_estimate(share)) + (", each epoch" if "epoch" in arm else "")
                        for arm, share in shares["extra"].items()
                        if arm.startswith(SIZE_FREE_ROTATION.name) and not unclear
                    )
                    or "—",
                ]
            )
        about[
            "{device}, {date}, torch {torch}, decaylab {version}".format(**attribution["about"])
        ] = None
    if not rows:
        command = "decaylab attribute SPEC --json > results/attribution/NAME.json"
        return f"*Not run yet.* `{command}`\n{_queued(records, 'attribution')}"
    header = ["run", "metric", "total", *SHARES, "norms alone"]
    caption = (
        "Effect of decay, with minus without, and the shares of it; accuracies in points. —: the"
        " total cannot be told apart from zero, or there is no such path or arm. Norms alone: what"
        " the norms recover without decay (Fig. 4). Each interval is 95 % on its own: among so"
        f" many, some will miss. {'; '.join(about)}."
    )
    left = _queued(records, "attribution")
    return f"{text_grid(header, rows)}\n<small>{caption}</small>\n{left}"


def _queued(records: Records, folder: str) -> str:
    """What the queue has for a folder of results that is not there yet."""
    queue = records.root / "queue.toml"
    names = [
        entry.name.partition(": ")[2] or entry.name
        for entry in (read_queue(queue).entries if queue.exists() else ())
        if isinstance(entry, CommandEntry)
        and Path(entry.writes).parent.name == folder
        and not (records.root / folder / Path(entry.writes).name).exists()
    ]
    listed = ", ".join(names)
    return f"\nIn the [queue](reproduction.md#the-queue), not run yet: {listed}.\n" if names else ""


def advice_followed(records: Records) -> str:
    """What benchmarks/advice.py found: the suggested decay beside a sweep, best first."""
    paths = sorted((records.root / "advice").glob("*.json"))
    tables = [_advice(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return "\n".join(tables) or "*Not run yet.* `python benchmarks/advice.py` makes these runs.\n"


def _advice(printed: dict[str, Any]) -> str:
    about, suggestion = printed["about"], printed["suggestion"]
    sound = [row for row in printed["rows"] if "held_out" in row]
    losses = {
        name: OverSeeds(tuple(row["held_out"] for row in sound if row["decay"] == name))
        for name in dict.fromkeys(row["decay"] for row in sound)
    }
    layers = {name for group in suggestion["groups"] for name in group["layers"]}
    value = math.exp(
        fmean(
            math.log(group["weight_decay"])
            for group in suggestion["groups"]
            for _ in group["layers"]
        )
    )
    titles = {
        "suggested": f"{value:.2g}, on the {len(layers)} layers it is suggested for",
        "suggested, on every matrix": f"{value:.2g}, on every matrix",
    }
    rows = [
        [
            titles.get(name, f"{name}, on every matrix"),
            f"{fmean(loss.values):.4f}",
            f"{stdev(loss.values):.4f}" if len(loss.values) > 1 else "—",
            str(len(loss.values)),
        ]
        for name, loss in sorted(losses.items(), key=lambda item: fmean(item[1].values))
    ]
    targets = {row["layer"]: row["target"] for row in suggestion["layers"] if row["target"]}
    reached = [
        row["norms"][layer] / target
        for row in sound
        if row["decay"] == "suggested"
        for layer, target in targets.items()
        if layer in layers
    ]
    header = ["weight decay", "held-out loss", "std over seeds", "seeds"]
    by_layer = [row["suggested"] for row in suggestion["layers"] if row["suggested"]]
    mean = math.exp(fmean(map(math.log, by_layer)))
    how = "their mean" if math.isclose(value, mean) else "the weakest that acts within the run"
    caption = (
        f"GPT ({about['size']}), AdamW at lr {about['lr']:g}, {about['steps']} steps, on"
        " {device}, {date}, torch {torch}, decaylab {version}".format(**about)
        + f". Suggested from the run without decay of seed 0; layer by layer the values go from"
        f" {min(by_layer):.2g} to {max(by_layer):.2g}, and the single value is {how}."
        f" With it, the layers' norms ended at {min(reached):.2f} to {max(reached):.2f} times the"
        f" predicted ones (median {median(reached):.2f})."
    )
    return f"{text_grid(header, rows)}\n<small>{caption}</small>\n"


def _estimate(values: dict[str, Any] | None) -> Estimate:
    """From JSON, where what is not finite is null."""
    known = {"value": None, "low": None, "high": None, "seeds": 0, **(values or {})}
    return Estimate(**{key: math.nan if v is None else v for key, v in known.items()})


def _range(value: Any) -> str:
    return " to ".join(f"{x:.2f}" for x in value) if isinstance(value, list) else str(value)


def _finding(finding: Finding) -> str:
    effect = "" if finding.effect is None else f" (× {number(finding.effect.value)})"
    return f"{finding.verdict}{effect}"


def demo_accuracy(records: Records) -> str:
    """The demo's test accuracy by kind of decay."""
    if not records.demo():
        return "*Not run yet.* `decaylab demo --runs results/demo` makes these runs.\n"
    seeds = {run.spec.seed for runs in records.demo().values() for run in runs}
    caption = (
        f"Test accuracy in % on digits, {counted_seeds(len(seeds))}; one test image is 0.28 points."
    )
    return f"{grid_markdown(short_accuracy_grid(records.demo()))}\n<small>{caption}</small>\n"


def demo_figure(records: Records, mechanism: MechanismSection) -> Figure:
    """A mechanism in the demo's nets."""
    panels = [p for p in mechanism_panels(mechanism, records.demo()) if not p.empty]
    return Figure(f"demo-{mechanism.anchor}", panels)


def demo_numbers(records: Records, mechanism: MechanismSection) -> str:
    """A mechanism in the demo's nets: the figure, then its quantities at the end."""
    if not records.demo():
        return demo_accuracy(records)
    grids = [
        mechanism_grid(mechanism, quantity, records.demo()) for quantity in mechanism.quantities
    ]
    tables = [f"{grid.caption}:\n\n{grid_markdown(grid)}" for grid in grids]
    return "\n".join([demo_figure(records, mechanism).markdown, *tables])


def effective_lr_figure(records: Records) -> Figure:
    """The first mechanism in the nets of Table 1 with BN, at the schedules that `gains` shows."""
    panels: dict[str, list[Panel]] = {}
    for tier in records.tiers_of("table1"):
        nets: dict[str, Demo] = {}
        for cell in records.filled("table1", tier).cells:
            title = key_title(cell.key, NET)
            for run in records.finished_runs.of_cell(cell):
                place = (run.spec.batch_norm, run.spec.optimizer, run.spec.decay)
                nets.setdefault(title, {}).setdefault(place, []).append(run)
        for title, runs in nets.items():
            for panel in mechanism_panels(MECHANISMS[0], runs):
                name = f"{panel.title.split(',')[0]}: {title}"  # the optimizer comes first
                shown = panels.setdefault(name, [])
                if len(panel.marks) > max((len(longer.marks) for longer in shown), default=0):
                    shown.append(replace(panel, title=f"{name} ({tier})", log_y=True))
    return Figure("effective-lr", [panel for shown in panels.values() for panel in shown])


def paper_table(records: Records, artefact: str) -> str:
    """A table of the paper beside ours, the rows that have runs."""
    parts = []
    for tier in records.tiers_of(artefact):
        filled = records.filled(artefact, tier)
        assert filled.table is not None
        runs = (run for cell in filled.cells for run in records.finished_runs.of_cell(cell))
        caption = f"{_tier_words(tier, runs)}; {filled.coverage} have been run."
        parts.append(f"{grid_markdown(to_grid(filled.table))}\n<small>{caption}</small>\n")
    return "\n".join(parts) or _commands(artefact)


def paper_figure(records: Records, artefact: str) -> Figure:
    """A figure of the paper: the panels that have runs, at every tier."""
    panels = [
        panel
        for tier in records.tiers_of(artefact)
        for panel in records.filled(artefact, tier).panels
        if not panel.empty
    ]
    return Figure(artefact, panels)


def figures(records: Records) -> list[Figure]:
    """All figures of the site."""
    return [
        *(demo_figure(records, mechanism) for mechanism in MECHANISMS),
        effective_lr_figure(records),
        paper_figure(records, "fig7"),
        bursts_figure(records),
    ]


def large_folders(records: Records) -> str:
    """What benchmarks/folders.py measured: seconds and memory of commands."""
    measured = _printed(records, "folders")
    if measured is None:
        return _not_run("folders")
    rows = [
        [f"`{command}`", f"{m['seconds']:.1f}", f"{m['cpu_seconds']:.1f}", f"{m['megabytes']:.0f}"]
        for command, m in measured["commands"].items()
    ]
    about = (
        "{runs:,} runs of {epochs} epochs, on {cores} cores with a load of {load:g}; {date},"
        " decaylab {version}"
    )
    table = text_grid(["command", "seconds", "CPU seconds", "memory (MB)"], rows)
    return f"{table}\n<small>{about.format(**measured['about'])}: `benchmarks/folders.py`</small>\n"


def paper_cost(records: Records) -> str:
    """How long the whole paper takes on some GPUs, each with one job at a time."""
    cells = chosen_cells("all", "full", 1, [], records.root)
    planned = plan(cells, cells, tier="full")
    estimator = Estimator(RunStore(records.root))
    expected = {run.spec.id: estimator.of(run.spec) for run in planned}
    recorded = sum(estimate.recorded for estimate in expected.values())
    if not recorded:
        return _commands("table1")
    seconds = {run: estimate.seconds for run, estimate in expected.items()}
    rows = []
    for gpus in (1, 8, 64):
        loads = [
            sum(seconds[run.spec.id] for run in runs)
            for runs in pack(planned, seconds, jobs=gpus, longest=math.inf)
        ]
        busy = sum(loads) / (len(loads) * max(loads))
        rows.append([str(gpus), in_hours(max(loads)), in_hours(sum(loads)), f"{100 * busy:.0f} %"])
    header = ["GPUs", "until the last run ends", "GPU time", "GPUs busy"]
    note = (
        f"{len(planned)} runs of all tables and figures at tier full, one seed; {recorded} of them"
        " are estimated from similar runs in `results/`, the others from the table of step"
        " times. Searches are not included.\n"
    )
    return text_grid(header, rows) + "\n" + note


def in_hours(seconds: float) -> str:
    """Hours with one digit, or minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def estimates_checked(records: Records) -> str:
    """Estimates against the runs that were recorded since, by network."""
    groups = defaultdict(list)
    for check in checked_estimates(RunStore(records.root)):
        groups[check.spec.data == "digits", named(check.spec.network)].append(check)
    rows = []
    for (digits, network), checks in sorted(groups.items()):
        like = [c.from_like / c.seconds for c in checks if c.from_like is not None]
        table = [c.from_table / c.seconds for c in checks]
        device = "CPU" if digits else "GPU"
        name = f"{network} on digits" if digits else network
        rows.append([name, device, str(len(checks)), spread_words(like), spread_words(table)])
    if not rows:
        return _commands("table1")
    ratios = ["from similar runs / recorded", "from the table / recorded"]
    header = ["network", "device", "runs", *ratios]
    return text_grid(header, rows)


def spread_words(ratios: Sequence[float]) -> str:
    """The median of ratios, and the range of the middle eight tenths."""
    if not ratios:
        return "-"
    ordered = sorted(ratios)
    tenth = len(ordered) // 10
    return f"{median(ordered):.2f} ({ordered[tenth]:.2f} to {ordered[-1 - tenth]:.2f})"


BLOCKS: dict[str, Callable[[Records], str]] = {
    "claims-kind": lambda records: claimed(records, ["E2"]),
    "claims-layers": lambda records: claimed(records, ["E4", "E6", "E9"]),
    "claims-optimizer": lambda records: claimed(records, ["E1", "E3", "E13", "E11"]),
    "gains-kind": lambda records: gains(records, "fig1"),
    "gains-first-order-layers": lambda records: gains(records, "fig2"),
    "gains-kfac-layers": lambda records: gains(records, "fig6"),
    "gains-optimizer": lambda records: gains(records, "table1"),
    "verdicts": verdicts,
    "reconstructed": reconstructed,
    "schedules-first-order": lambda records: schedules(records, "first-order"),
    "schedules-kfac": lambda records: schedules(records, "kfac"),
    "schedules-one-run": lambda records: schedules(records, "one-run"),
    "bursts": bursts,
    "attributions": attributions,
    "advice-followed": advice_followed,
    "demo-accuracy": demo_accuracy,
    "demo-mechanism-1": lambda records: demo_numbers(records, MECHANISMS[0]),
    "demo-mechanism-2": lambda records: demo_numbers(records, MECHANISMS[1]),
    "demo-mechanism-3": lambda records: demo_numbers(records, MECHANISMS[2]),
    "effective-lr": lambda records: effective_lr_figure(records).markdown or _commands("table1"),
    "large-folders": large_folders,
    "paper-cost": paper_cost,
    "estimates-checked": estimates_checked,
    "table2": lambda records: paper_table(records, "table2"),
    "fig7": lambda records: paper_figure(records, "fig7").markdown or _commands("fig7"),
}


def block_text(name: str, records: Records) -> str:
    """What a block says."""
    check_name("block", name, BLOCKS)
    return BLOCKS[name](records)


def filled_in(markdown: str, records: Records) -> str:
    """A page of the site with its blocks; links to files that are not pages become their names."""

    def block(match: re.Match[str]) -> str:
        text = block_text(match[1], records)
        for sign in (" ± ", " †", "× "):  # no line breaks here
            text = text.replace(sign, sign.replace(" ", "\u00a0"))
        return text

    return OUTSIDE.sub(r"\1 (`\2` in the repository)", BLOCK.sub(block, markdown))


def written(markdown: str, records: Records) -> str:
    """A page of the repository with the text of its blocks between their lines."""

    def block(match: re.Match[str]) -> str:
        text = PANELS.sub(NO_PANELS, block_text(match[1], records)).strip()
        return f"<!-- records: {match[1]} -->\n\n{text}\n\n<!-- end -->"

    return BLOCK.sub(block, markdown)


_records: list[Records] = []  # of the running build
FETCHED = re.compile(r"<(?:script|img|iframe)[^>]*src=.?https?:|<link[^>]*href=.?https?:")


def on_config(config: Any) -> Any:
    """Mkdocs begins a build: read the records again."""
    _records[:] = [Records()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Draw the figures, as files of the site."""
    from mkdocs.structure.files import File

    for figure in figures(_records[0]):
        for path, panel in figure.files():
            files.append(File.generated(config, path, content=draw(panel)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in a page."""
    return filled_in(markdown, _records[0])


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Pages work offline: what they need is beside them."""
    fetched = FETCHED.search(output)
    if fetched is not None:
        raise DecaylabError(
            f"{page.file.src_uri} would fetch {fetched[0]}...: keep a copy in docs/"
        )
    return output


if __name__ == "__main__":
    everything = Records()
    for page in sorted(Path(__file__).parent.glob("*.md")):
        page.write_text(written(page.read_text(encoding="utf-8"), everything), encoding="utf-8")
