"""The figures of the paper as panels, from the records of their cells. Drawn by `drawing`.

Lines and bars are means over seeds; a line has a band from the lowest to the highest run. Every
point is one net.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import TypeGuard

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
    rows = []
    for tier, drawn in figures:
        for panel in drawn:
            for mark in panel.marks:
                if isinstance(mark, Bars):
                    points = zip(panel.groups, mark.values, mark.spreads, strict=True)
                    rows += [
                        [panel.title, mark.label, group, plain(value), plain(spread), tier]
                        for group, value, spread in points
                        if value is not None
                    ]
                else:
                    ends = zip(mark.low, mark.high, strict=True) if _is_band(mark) else []
                    spreads = [plain((high - low) / 2) for low, high in ends] or [""] * len(mark.x)
                    rows += [
                        [panel.title, mark.label, plain(x), plain(y), spread, tier]
                        for x, y, spread in zip(mark.x, mark.y, spreads, strict=True)
                    ]
    return csv_text(["panel", "label", "x", "y", "spread", "tier"], rows)


def _is_band(mark: Line | Points) -> TypeGuard[Line]:
    return isinstance(mark, Line) and len(mark.low) > 0


def over_seeds(
    label: str, runs: Sequence[Sequence[tuple[float, float]]], factor: float = 1.0
) -> list[Line]:
    """One line for the runs of one setting: their mean, in a band from lowest to highest.

    Runs that were not recorded at the same places are lines of their own.
    """
    places = [[x for x, _ in run] for run in runs]
    if len(runs) < 2 or any(xs != places[0] for xs in places):
        names = [f"seed {n}" for n in range(len(runs))] if len(runs) > 1 else [""]
        return (
            [line(label, run, factor, name) for run, name in zip(runs, names, strict=True)]
            if runs
            else []
        )
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
        lines = [
            curve
            for cell in group
            for curve in over_seeds(
                label_of(cell),
                [
                    run.curve(artefact.metric)
                    for run in _with_metric(cell, artefact.metric, finished_runs)
                ],
                factor,
            )
        ]
        marks = [*lines, *_published_lines(artefact, group, lines)]
        drawn.append(Panel(title, "epoch", y_label, marks, late=True))
    return drawn


def _bars(artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns) -> list[Panel]:
    """Fig. 1: final test accuracy, means over seeds with their spread; optimizers by scheme."""
    bar_panels = []
    factor, y_label = _shown(artefact)
    columns = [name for name in artefact.keys[:-1] if name != "optimizer"]
    for title, group in groups(cells, columns):
        names = [named(cell.key.get("optimizer", "")) for cell in group]  # no key: there is one
        optimizers = list(dict.fromkeys(names))
        measured: dict[str, dict[str, OverSeeds]] = {}
        printed: dict[tuple[str, str], float | None] = {}
        for cell, name in zip(group, names, strict=True):
            values = tuple(
                factor * value for value in finished_runs.values(cell.runs, artefact.metric)
            )
            measured.setdefault(label_of(cell), {})[name] = OverSeeds(values)
            printed[label_of(cell), name] = _published(artefact, cell) if values else None
        bars = []
        for label, by_optimizer in measured.items():
            ours = [by_optimizer.get(name, OverSeeds()) for name in optimizers]
            means, spreads = [item.mean for item in ours], [item.spread for item in ours]
            numbers = [printed.get((label, name)) for name in optimizers]
            bars.append(Bars(label, means, spreads, numbers))
        bar_panels.append(Panel(title, "", y_label, bars, optimizers))
    return bar_panels


def _effective_lr(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Fig. 3: the first layer's effective learning rate over epochs."""
    laws = {"SGD": "lr / |W|²", "Adam": "lr / |W|"}
    lr_panels = []
    for title, group in groups(cells, artefact.keys[:-1]):
        lines = [
            curve
            for cell in group
            for curve in over_seeds(
                label_of(cell), _of_first_layer(cell, finished_runs, "effective_lr")
            )
        ]
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
    return [
        Panel(
            f"{key_title(cell.key, artefact.keys[:-1])}, K-FAC-F, {label_of(cell)}",
            "epoch",
            "trace, first layer",
            [
                curve
                for label, quantity in quantities.items()
                for curve in over_seeds(label, _of_first_layer(cell, finished_runs, quantity))
            ],
            log_y=True,
        )
        for cell in cells
    ]


def _convergence(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Fig. 9: training loss over epochs and over seconds of training, alone on the device."""
    name, drawn = artefact.metric, []
    for title, group in groups(cells, ["network"]):
        runs = [
            (named(c.key["optimizer"]), run)
            for c in group
            for run in _with_metric(c, name, finished_runs)
        ]
        by_epoch = [line(label, curve) for label, run in runs if (curve := run.curve(name))]
        by_second = [
            line(label, seconds.points)
            for label, run in runs
            if (seconds := timed(run, name, finished_runs))
        ]
        for x_label, lines in (("epoch", by_epoch), ("seconds of training", by_second)):
            drawn.append(Panel(title, x_label, "training loss", lines, log_y=True))
    return drawn


def _with_metric(cell: Cell, name: str, finished_runs: FinishedRuns) -> list[FinishedRun]:
    """The finished runs of a cell; one made again in its place, if that alone has the metric.

    Or if that alone has seconds of its own.
    """
    chosen = []
    for run in finished_runs.of_cell(cell):
        again = finished_runs.repeats.of(run.spec)
        better = again is not None and (
            (bool(again.curve(name)), bool(again.timed_curve(name)))
            > (bool(run.curve(name)), bool(run.timed_curve(name)))
        )
        chosen.append(again if again is not None and better else run)
    return chosen


def _correlation(
    artefact: Artefact, cells: Sequence[Cell], finished_runs: FinishedRuns
) -> list[Panel]:
    """Fig. 5: K-FAC GN norm, Jacobian norm and test loss - train loss, two by two."""
    scatters = []
    gn, jacobian, gap = "K-FAC GN norm", "squared Jacobian norm", "generalization gap"
    quantities: dict[str, Callable[[FinishedRun], float | None]] = {
        gn: lambda run: run.final("kfac_gn_norm"),
        jacobian: lambda run: run.final("jacobian_norm"),
        gap: lambda run: run.generalization_gap,
    }
    for title, group in groups(cells, ["dataset"]):
        runs = [(named(c.key["optimizer"]), run) for c in group for run in finished_runs.of_cell(c)]
        for x_label, y_label in ((gn, jacobian), (gn, gap), (jacobian, gap)):
            points: dict[str, list[tuple[float, float]]] = {}
            for optimizer, run in runs:
                x, y = quantities[x_label](run), quantities[y_label](run)
                if x is not None and y is not None:
                    label = optimizer if run.trained else NOT_FITTED
                    points.setdefault(label, []).append((x, y))
            marks = [
                Points(
                    label, [x for x, _ in pairs], [y for _, y in pairs], framed=label != NOT_FITTED
                )
                for label, pairs in sorted(points.items())
            ]
            log_y = y_label != gap
            scatters.append(Panel(title, x_label, y_label, marks, log_x=True, log_y=log_y))
    return scatters


_FIGURES = {
    "fig3": _effective_lr,
    "fig5": _correlation,
    "fig7": _traces,
    "fig9": _convergence,
    "fig9-bn": _convergence,
}
