"""The figures of the paper as panels, from the records of their cells. Drawn by `drawing`.

Every line is one run and every point one net, as recorded; only Fig. 1's bars are means over seeds.
"""

from collections.abc import Callable, Iterable, Sequence

from decaylab.paper import Artefact, Cell, Readings, RunReading
from decaylab.report.drawing import NOT_FITTED, Bars, Panel, Points, line
from decaylab.report.names import key_title, named
from decaylab.report.tables import Measured, csv_text, plain


def panels(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
    """The panels of one figure; panels without a finished run are empty, not left out."""
    usual = _bars if artefact.kind == "bars" else _accuracy_curves
    make = _FIGURES.get(artefact.name, usual)
    return make(artefact, cells, readings)


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
                    rows += [
                        [panel.title, mark.label, plain(x), plain(y), "", tier]
                        for x, y in zip(mark.x, mark.y, strict=True)
                    ]
    return csv_text(["panel", "label", "x", "y", "spread", "tier"], rows)


def label_of(cell: Cell) -> str:
    """What is compared, the last key, in a cell: mostly what is done about decay."""
    return key_title(cell.key, list(cell.key)[-1:])


def groups(cells: Sequence[Cell], columns: Sequence[str]) -> list[tuple[str, list[Cell]]]:
    """The cells by the values of some key columns, with a title."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(cell.key[name] for name in columns), []).append(cell)
    return [(key_title(group[0].key, columns), group) for group in found.values()]


def _shown(artefact: Artefact) -> tuple[float, str]:
    """By what the metric is multiplied, and its name on an axis."""
    factor, unit = (100.0, " (%)") if artefact.percent else (1.0, "")
    return factor, artefact.metric.replace("/", " ") + unit


def _accuracy_curves(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
    """Figs. 2, 4, 6, 8: test accuracy over epochs, one panel per net and optimizer."""
    factor, y_label = _shown(artefact)
    return [
        Panel(
            title,
            "epoch",
            y_label,
            [
                line(label_of(cell), run.curve(artefact.metric), factor)
                for cell in group
                for run in readings.finished(cell)
            ],
            late=True,
        )
        for title, group in groups(cells, artefact.keys[:-1])
    ]


def _bars(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
    """Fig. 1: final test accuracy, means over seeds with their spread; optimizers by scheme."""
    found = []
    factor, y_label = _shown(artefact)
    columns = [name for name in artefact.keys[:-1] if name != "optimizer"]
    for title, group in groups(cells, columns):
        names = [named(cell.key.get("optimizer", "")) for cell in group]  # no key: there is one
        optimizers = list(dict.fromkeys(names))
        measured: dict[str, dict[str, Measured]] = {}
        for cell, name in zip(group, names, strict=True):
            values = tuple(factor * value for value in readings.values(cell.runs, artefact.metric))
            measured.setdefault(label_of(cell), {})[name] = Measured(values)
        bars = []
        for label, by_optimizer in measured.items():
            of = [by_optimizer.get(name, Measured()) for name in optimizers]
            bars.append(Bars(label, [one.mean for one in of], [one.spread for one in of]))
        found.append(Panel(title, "", y_label, bars, optimizers))
    return found


def _effective_lr(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
    """Fig. 3: the first layer's effective learning rate over epochs."""
    laws = {"SGD": "lr / |W|²", "Adam": "lr / |W|"}
    found = []
    for title, group in groups(cells, artefact.keys[:-1]):
        lines = [
            line(label_of(cell), curve)
            for cell in group
            for run in readings.finished(cell)
            if (curve := run.first_layer_curve("effective_lr"))
        ]
        law = laws.get(named(group[0].key["optimizer"]), "")
        found.append(Panel(title, "epoch", f"effective lr, {law}", lines, log_y=True))
    return found


def _traces(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
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
                line(label, curve)
                for run in readings.finished(cell)
                for label, quantity in quantities.items()
                if (curve := run.first_layer_curve(quantity))
            ],
            log_y=True,
        )
        for cell in cells
    ]


def _convergence(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
    """Fig. 9: training loss over epochs and over seconds of training."""
    found = []
    for title, group in groups(cells, ["network"]):
        runs = [(named(c.key["optimizer"]), run) for c in group for run in _with_times(c, readings)]
        over: list[tuple[str, Callable[[RunReading], Sequence[tuple[float, float]]]]] = [
            ("epoch", lambda run: run.curve(artefact.metric)),
            ("seconds of training", lambda run: run.timed_curve(artefact.metric)),
        ]
        for x_label, curve in over:
            lines = [line(label, points) for label, run in runs if (points := curve(run))]
            found.append(Panel(title, x_label, "training loss", lines, log_y=True))
    return found


def _with_times(cell: Cell, readings: Readings) -> list[RunReading]:
    """The finished runs of a cell; one that was made again, alone on the device, in its place."""
    runs = readings.finished(cell)
    again = [readings.repeats.of(run.spec) for run in runs]
    name = "train/seconds"
    return [
        other
        if other is not None and other.timed_curve(name) and not run.timed_curve(name)
        else run
        for run, other in zip(runs, again, strict=True)
    ]


def _correlation(artefact: Artefact, cells: Sequence[Cell], readings: Readings) -> list[Panel]:
    """Fig. 5: K-FAC GN norm, Jacobian norm and test loss - train loss, two by two."""
    found = []
    gn, jacobian, gap = "K-FAC GN norm", "squared Jacobian norm", "generalization gap"
    quantities: dict[str, Callable[[RunReading], float | None]] = {
        gn: lambda run: run.final("kfac_gn_norm"),
        jacobian: lambda run: run.final("jacobian_norm"),
        gap: lambda run: run.generalization_gap,
    }
    for title, group in groups(cells, ["dataset"]):
        runs = [(named(c.key["optimizer"]), run) for c in group for run in readings.finished(c)]
        for x_label, y_label in ((gn, jacobian), (gn, gap), (jacobian, gap)):
            points: dict[str, list[tuple[float, float]]] = {}
            for optimizer, run in runs:
                x, y = quantities[x_label](run), quantities[y_label](run)
                if x is not None and y is not None:
                    label = optimizer if run.trained else NOT_FITTED
                    points.setdefault(label, []).append((x, y))
            marks = [
                Points(label, [x for x, _ in of], [y for _, y in of], framed=label != NOT_FITTED)
                for label, of in sorted(points.items())
            ]
            log_y = y_label != gap
            found.append(Panel(title, x_label, y_label, marks, log_x=True, log_y=log_y))
    return found


_FIGURES = {
    "fig3": _effective_lr,
    "fig5": _correlation,
    "fig7": _traces,
    "fig9": _convergence,
    "fig9-bn": _convergence,
}
