"""The figures of the paper as panels, from the records of their cells. Drawn by `drawing`.

Lines and bars are means over seeds; a line has a band from the lowest to the highest run. Every
point is one net.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import fmean

from decaylab.paper import Artefact, Cell, FinishedRun, FinishedRuns
from decaylab.paper import cells as paper_cells
from decaylab.paper.pace import timed
from decaylab.report.drawing import NOT_FITTED, PAPER, Bars, Line, Panel, Points, line
from decaylab.report.names import key_title, named
from decaylab.report.tables import OverSeeds, csv_text, plain


def panels(artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns) -> list[Panel]:
    """The panels of one figure; panels without a finished run are empty, not left out."""
    usual = _bars if artefact.kind == "bars" else _accuracy_curves
    make = _FIGURES.get(artefact.name, usual)
    return make(artefact, cells, finished_runs)


def panels_csv(figures: Iterable[tuple[str, Sequence[Panel]]]) -> str:
    """What the panels show, per tier: `panel, label, x, y, spread, tier`."""
    rows = (
        [panel.title, mark.label, x, plain(y), plain(spread), tier]
        for tier, drawn in figures
        for panel in drawn
        for mark in panel.marks
        for x, y, spread in _points(panel, mark)
    )
    return csv_text(["panel", "label", "x", "y", "spread", "tier"], rows)


def _points(
    panel: Panel, mark: Line | Bars | Points
) -> Iterator[tuple[str, float | None, float | None]]:
    """What a mark shows: x, y and the spread, if there is one."""
    if isinstance(mark, Bars):
        bars = zip(panel.groups, mark.values, mark.spreads, strict=True)
        yield from (bar for bar in bars if bar[1] is not None)
        return
    spreads: Sequence[float | None] = [None] * len(mark.x)
    if isinstance(mark, Line) and mark.low:
        spreads = [(high - low) / 2 for low, high in zip(mark.low, mark.high, strict=True)]
    yield from zip(map(plain, mark.x), mark.y, spreads, strict=True)


def over_seeds(
    label: str, runs: Sequence[Sequence[tuple[float, float]]], factor: float = 1.0
) -> list[Line]:
    """One line for the runs of one setting: their mean, in a band from lowest to highest.

    Runs that were not recorded at the same places are lines of their own.
    """
    places = [[x for x, _ in run] for run in runs]
    if len(runs) == 1:
        return [line(label, runs[0], factor)]
    if any(xs != places[0] for xs in places):
        return [line(label, run, factor, f"seed {seed}") for seed, run in enumerate(runs)]
    if not runs:
        return []
    columns = [[factor * y for _, y in at] for at in zip(*runs, strict=True)]
    means, low, high = map(fmean, columns), map(min, columns), map(max, columns)
    return [Line(label, places[0], [*means], f"mean of {len(runs)} seeds", [*low], [*high])]


@cache
def published_accuracies() -> Mapping[str, float]:
    """By the id of a run's spec, the test accuracy (%) that the paper prints in Tables 1 and 3.

    Only at its own schedule: at a shorter one there is nothing to compare with.
    """
    printed = [cell for name in ("table1", "table3") for cell in paper_cells(name, "full")]
    return {cell.runs[0].id: cell.paper for cell in printed if cell.runs and cell.paper is not None}


def _published(artefact: Artefact, cell: Cell) -> float | None:
    if artefact.metric != "test/accuracy" or not cell.runs:
        return None
    return published_accuracies().get(cell.runs[0].id)


def _published_lines(
    artefact: Artefact, cells: Sequence[Cell], lines: Sequence[Line]
) -> list[Line]:
    """The paper's final accuracies as level lines, for what is drawn."""
    ends = {curve.label: curve.x for curve in lines if len(curve.x)}
    levels: list[Line] = []
    for cell in cells:
        number, label = _published(artefact, cell), label_of(cell)
        if number is not None and label in ends:
            x = [ends[label][0], ends[label][-1]]
            levels.append(Line(label + PAPER, x, [number] * 2, published=True))
    return levels


def label_of(cell: Cell) -> str:
    """What is compared, the last key, in a cell: mostly what is done about decay."""
    return key_title(cell.key, list(cell.key)[-1:])


def groups(cells: Sequence[Cell], columns: Sequence[str]) -> list[tuple[str, list[Cell]]]:
    """The cells by the values of some key columns, with a title."""
    by_key: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        by_key.setdefault(tuple(cell.key[name] for name in columns), []).append(cell)
    return [(key_title(group[0].key, columns), group) for group in by_key.values()]


def _shown(artefact: Artefact) -> tuple[float, str]:
    """By what the metric is multiplied, and its name on an axis."""
    factor, unit = (100.0, " (%)") if artefact.percent else (1.0, "")
    return factor, artefact.metric.replace("/", " ") + unit


def _accuracy_curves(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Figs. 2, 4, 6, 8: test accuracy over epochs, one panel per net and optimizer."""
    factor, y_label = _shown(artefact)
    drawn = []
    for title, group in groups(cells, artefact.keys[:-1]):
        lines: list[Line] = []
        for cell in group:
            runs = _with_metric(cell, artefact.metric, finished_runs)
            curves = [run.curve(artefact.metric) for run in runs]
            lines += over_seeds(label_of(cell), curves, factor)
        marks = [*lines, *_published_lines(artefact, group, lines)]
        drawn.append(Panel(title, "epoch", y_label, marks, late=artefact.percent))
    return drawn


def _bars(artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns) -> list[Panel]:
    """Fig. 1: final test accuracy, means over seeds with their spread; optimizers by scheme."""
    bar_panels = []
    factor, y_label = _shown(artefact)
    columns = [name for name in artefact.keys[:-1] if name != "optimizer"]
    for title, group in groups(cells, columns):
        names = [named(cell.key.get("optimizer", "")) for cell in group]  # no key: there is one
        optimizers = list(dict.fromkeys(names))
        by_label: dict[str, dict[str, tuple[OverSeeds, float | None]]] = {}
        for cell, name in zip(group, names, strict=True):
            values = finished_runs.values(cell.runs, artefact.metric)
            ours = OverSeeds(tuple(factor * value for value in values))
            printed = _published(artefact, cell) if values else None
            by_label.setdefault(label_of(cell), {})[name] = ours, printed
        bars = []
        for label, by_optimizer in by_label.items():
            shown = [by_optimizer.get(name, (OverSeeds(), None)) for name in optimizers]
            means, spreads = [ours.mean for ours, _ in shown], [ours.spread for ours, _ in shown]
            bars.append(Bars(label, means, spreads, [printed for _, printed in shown]))
        bar_panels.append(Panel(title, "", y_label, bars, optimizers))
    return bar_panels


def _effective_lr(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Fig. 3: the first layer's effective learning rate over epochs."""
    laws = {"SGD": "lr / |W|²", "Adam": "lr / |W|"}
    lr_panels = []
    for title, group in groups(cells, artefact.keys[:-1]):
        lines: list[Line] = []
        for cell in group:
            curves = _of_first_layer(cell, finished_runs, "effective_lr")
            lines += over_seeds(label_of(cell), curves)
        law = laws.get(named(group[0].key["optimizer"]), "")
        lr_panels.append(Panel(title, "epoch", f"effective lr, {law}", lines, log_y=True))
    return lr_panels


def _of_first_layer(
    cell: Cell, finished_runs: FinishedRuns, quantity: str
) -> list[list[tuple[int, float]]]:
    """A quantity of the first layer over epochs, of each run that recorded it."""
    curves = [run.first_layer_curve(quantity) for run in finished_runs.of_cell(cell)]
    return [curve for curve in curves if curve]


def _traces(artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns) -> list[Panel]:
    """Fig. 7: trace of Fisher and Gauss-Newton of the first layer's normalised weights.

    With batch normalisation in train mode; rows of older runs, in eval mode, are not drawn.
    """
    quantities = {"tr F": "fisher_trace_normalised_train", "tr G": "gn_trace_normalised_train"}
    trace_panels = []
    for cell in cells:
        lines: list[Line] = []
        for label, quantity in quantities.items():
            lines += over_seeds(label, _of_first_layer(cell, finished_runs, quantity))
        title = f"{key_title(cell.key, artefact.keys[:-1])}, K-FAC-F, {label_of(cell)}"
        trace_panels.append(Panel(title, "epoch", "trace, first layer", lines, log_y=True))
    return trace_panels


def _convergence(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Fig. 9: training loss over epochs and over seconds of training, alone on the device."""
    name, drawn = artefact.metric, []
    for title, group in groups(cells, ["network"]):
        by_epoch, by_second = list[Line](), list[Line]()
        for cell in group:
            label = named(cell.key["optimizer"])
            for run in _with_metric(cell, name, finished_runs):
                if curve := run.curve(name):
                    by_epoch.append(line(label, curve))
                if seconds := timed(run, name, finished_runs):
                    by_second.append(line(label, seconds.points))
        for x_label, lines in (("epoch", by_epoch), ("seconds of training", by_second)):
            drawn.append(Panel(title, x_label, "training loss", lines, log_y=True))
    return drawn


def _with_metric(cell: Cell, name: str, finished_runs: FinishedRuns) -> list[FinishedRun]:
    """The finished runs of a cell; one made again in its place, if that alone has the metric.

    Or if that alone has seconds of its own.
    """

    def recorded(run: FinishedRun) -> tuple[bool, bool]:
        return bool(run.curve(name)), bool(run.timed_curve(name))

    pairs = [(run, finished_runs.repeats.of(run.spec)) for run in finished_runs.of_cell(cell)]
    return [again if again and recorded(again) > recorded(run) else run for run, again in pairs]


def _correlation(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Fig. 5: K-FAC GN norm, Jacobian norm and test loss - train loss, two by two."""
    scatters = []
    quantities = ("K-FAC GN norm", "squared Jacobian norm", "generalization gap")
    for title, group in groups(cells, ["dataset"]):
        measured: list[tuple[str, dict[str, float | None]]] = []
        for cell in group:
            for run in finished_runs.of_cell(cell):
                label = named(cell.key["optimizer"]) if run.trained else NOT_FITTED
                gn_norm, jacobian = run.final("kfac_gn_norm"), run.final("jacobian_norm")
                numbers = (gn_norm, jacobian, run.generalization_gap)
                measured.append((label, dict(zip(quantities, numbers, strict=True))))
        for x_label, y_label in combinations(quantities, 2):
            points: dict[str, list[tuple[float, float]]] = {}
            for label, values in measured:
                x, y = values[x_label], values[y_label]
                if x is not None and y is not None:
                    points.setdefault(label, []).append((x, y))
            marks = []
            for label, pairs in sorted(points.items()):
                xs, ys = zip(*pairs, strict=True)
                marks.append(Points(label, xs, ys, framed=label != NOT_FITTED))
            log_y = y_label != quantities[-1]
            scatters.append(Panel(title, x_label, y_label, marks, log_x=True, log_y=log_y))
    return scatters


_FIGURES = {
    "fig3": _effective_lr,
    "fig5": _correlation,
    "fig7": _traces,
    "fig9": _convergence,
    "fig9-bn": _convergence,
}
