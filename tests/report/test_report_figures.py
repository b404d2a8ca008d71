import csv
import io
import struct
import sys
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from refusals import refuses
from report.synthetic import everything, fill_artefacts, write_run

from decaylab.errors import NotInstalled
from decaylab.paper import FinishedRuns, artefact_of, artefacts, cells
from decaylab.records import RunStore
from decaylab.report.drawing import (
    DPI,
    NOT_FITTED,
    SIZE,
    Bars,
    Line,
    Panel,
    Points,
    draw,
)
from decaylab.report.figures import over_seeds, panels, panels_csv, published_accuracies
from decaylab.report.sheets import draw_sheets

FIGURES = [name for name, artefact in artefacts().items() if artefact.kind != "table"]
LINE = Panel("a", "x", "y", [Line("none", [0, 1], [1.0, 2.0])])


def size(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    return fill_artefacts(tmp_path_factory.mktemp("runs"), seeds=2)


def test_there_are_nine_figures_and_five_of_our_own():
    ours = ["adam-precision", "bursts", "fig9-bn", "fig9-pace", "jacobian-lr"]
    assert sorted(FIGURES) == sorted([*(f"fig{n}" for n in range(1, 10)), *ours])


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_shows_its_runs_and_nothing_else(name, filled):
    found = cells(name, "smoke", 2)
    drawn = panels(artefact_of(name), found, filled)
    assert drawn
    assert not any(panel.empty for panel in drawn)
    recorded = {
        row.value for cell in found for run in filled.of_cell(cell) for row in run.rows.rows
    }
    factor = 100 if artefact_of(name).percent else 1
    numbers = {factor * value for value in recorded}
    for mark in (mark for panel in drawn for mark in panel.marks if isinstance(mark, Line)):
        assert set(mark.low) | set(mark.high) <= numbers
        if len(mark.low):  # the mean of two seeds
            ends = zip(mark.low, mark.high, strict=True)
            assert mark.y == pytest.approx([(low + high) / 2 for low, high in ends])
        else:
            assert set(mark.y) <= numbers
    empty = panels(artefact_of(name), found, FinishedRuns(RunStore("nowhere")))
    assert [panel.title for panel in empty] == [panel.title for panel in drawn]
    assert all(panel.empty for panel in empty)


def test_curves_and_bars_are_means_over_seeds(filled):
    curves = panels(artefact_of("fig2"), cells("fig2", "smoke", 2), filled)
    assert {mark.label for mark in curves[0].marks} == {"baseline", "wd-conv", "wd-fc", "wd-all"}
    assert len(curves[0].marks) == 4
    assert all(mark.name == "mean of 2 seeds" for mark in curves[0].marks)
    assert all(panel.late for panel in curves)
    bars = panels(artefact_of("fig1"), cells("fig1", "smoke", 2), filled)[0]
    values = [100 * v for v in filled.values(cells("fig1", "smoke", 2)[0].runs, "test/accuracy")]
    assert bars.groups[0] == "SGD"
    assert bars.marks[0].values[0] == pytest.approx(sum(values) / 2)


def test_runs_recorded_at_other_places_are_not_averaged():
    first, second = [(0, 1.0), (1, 2.0)], [(0, 3.0), (2, 4.0)]
    assert [line.y for line in over_seeds("a", [first, second])] == [[1.0, 2.0], [3.0, 4.0]]
    (mean,) = over_seeds("a", [first, [(0, 3.0), (1, 6.0)]], factor=10)
    assert (mean.y, mean.low, mean.high) == ([20.0, 40.0], [10.0, 20.0], [30.0, 60.0])
    assert over_seeds("a", []) == []


@pytest.mark.parametrize("name", ["fig2", "fig1"])
def test_the_papers_numbers_stand_beside_ours_at_its_own_schedule(name, tmp_path):
    cell = next(cell for cell in cells("table1", "full") if cell.paper is not None)
    ours = [one for one in cells(name, "full") if one.runs and one.runs[0].id in printed()]
    write_run(RunStore(tmp_path), ours[0].runs[0], everything(1), tier="full")
    drawn = panels(artefact_of(name), cells(name, "full"), FinishedRuns(RunStore(tmp_path)))
    marks = [mark for panel in drawn for mark in panel.marks]
    published = [y for m in marks if isinstance(m, Line) and m.published for y in m.y]
    published += [v for m in marks if isinstance(m, Bars) for v in m.published if v is not None]
    assert set(published) == {printed()[ours[0].runs[0].id]}
    assert printed()[cell.runs[0].id] == cell.paper
    assert not {one.runs[0].id for one in cells(name, "short") if one.runs} & set(printed())


def printed():
    return published_accuracies()


def test_a_run_without_times_of_its_own_is_not_named_beside_those_that_have(tmp_path):
    """Fig. 9: it shared the device, so it is drawn over epochs alone."""
    fill_artefacts(tmp_path, ["fig9"])
    store = RunStore(tmp_path)
    found = cells("fig9", "smoke")
    shared = next(cell.runs[0] for cell in found if cell.key["optimizer"] == "sgd")
    folder = store.folder(shared.id)
    folder.write_manifest(replace(folder.manifest(), at_once=4))
    epochs, seconds, *_ = panels(artefact_of("fig9"), found, FinishedRuns(store))
    labels = [{mark.label for mark in panel.marks} for panel in (epochs, seconds)]
    assert labels[0] - labels[1] == {"SGD"}


def test_the_correlation_plot_marks_nets_that_do_not_fit(tmp_path):
    finished_runs = fill_artefacts(tmp_path, ["fig5"])
    found = cells("fig5", "smoke", 1)
    run = finished_runs.of_cell(found[0])[0]
    path = tmp_path / run.spec.id / "rows.jsonl"
    path.write_text(path.read_text().replace('"train/accuracy": 1.0', '"train/accuracy": 0.9'))
    labels = {
        mark.label
        for panel in panels(artefact_of("fig5"), found, FinishedRuns(RunStore(tmp_path)))
        for mark in panel.marks
    }
    assert "not fitted" in labels
    assert "SGD" in labels


@pytest.fixture
def figures(monkeypatch):
    """The axes that are drawn, in their order."""
    found, made = [], Figure.add_axes
    monkeypatch.setattr(
        Figure, "add_axes", lambda self, *given: found.append(made(self, *given)) or found[-1]
    )
    return found


def test_where_ends_count_the_axis_is_cut_below_them_and_says_so(figures):
    falling = Line("b", [1, 2, 3, 4], [5.0, 71.0, 66.0, 65.0])
    draw(
        Panel(
            "a", "x", "y", [Line("a", [1, 2, 3, 4], [10.0, 30.0, 60.0, 64.0]), falling], late=True
        )
    )
    low, high = figures[-1].get_ylim()
    assert low == 60 - (71 - 60)
    assert 71 < high < 75
    assert figures[-1].get_ylabel() == "y, axis cut"
    for late in (False, True):
        draw(Panel("a", "x", "y", [Line("a", [1, 2], [63.0, 64.0])], late=late))
        assert figures[-1].get_ylabel() == "y"  # nothing is far below
    draw(Panel("a", "x", "y", [Line("a", [1, 2], [10.0, 64.0])]))
    assert figures[-1].get_ylim()[0] < 10


ARMS = ("with decay", "without decay", "decay on the others", "size", "rotation", "damping",
        "size + rotation", "size + damping", "rotation + damping")  # fmt: skip


@pytest.mark.parametrize(
    "labels",
    [
        ("no decay", "weight decay", "wn-conv", "wd-fc+wn-conv"),  # Fig. 4
        ("Adam", "K-FAC-G", "SGD", "not fitted (2 outside)"),  # Fig. 5
        ("baseline", "wd-conv", "wd-fc", "wd-all"),
        ARMS[:5],  # of an attribution
        ARMS,  # under K-FAC
    ],
)
def test_legends_are_inside_the_picture(figures, labels):
    draw(Panel("a", "x", "y", [Line(label, [0, 1], [1.0, 2.0]) for label in labels]))
    box = figures[-1].get_legend().get_window_extent()
    width, height = figures[-1].figure.canvas.get_width_height()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height


def test_unframed_points_are_drawn_but_get_no_room(figures):
    fitted, near = Points("SGD", [10.0, 100.0], [1.0, 2.0]), ([20.0], [1.5])
    for x, y, said in (
        (*near, "not fitted"),
        ([1e-3, 20.0], [1.5, 1.5], "not fitted (1 outside)"),
        ([20.0], [9.0], "not fitted (1 outside)"),
    ):
        limits = []
        for loose in ([], [Points(NOT_FITTED, x, y, framed=False)]):
            draw(Panel("a", "x", "y", [*loose, fitted], log_x=True))
            limits.append((figures[-1].get_xlim(), figures[-1].get_ylim()))
        assert limits[0] == limits[1]
        assert said in figures[-1].get_legend_handles_labels()[1]
        assert len(figures[-1].collections) == 2
    draw(Panel("a", "x", "y", [Points(NOT_FITTED, [5.0], [3.0], framed=False)]))
    left, right = figures[-1].get_xlim()
    assert left < 5 < right  # alone, they are framed


def test_one_line_alone_has_its_name_too():
    """Else nobody could tell whether it is with decay or without."""
    named = [draw(Panel("a", "x", "y", [Line(n, [0, 1], [1.0, 2.0])])) for n in ("one", "two")]
    assert named[0] != named[1]


def test_drawing_gives_images_of_one_size():
    pixels = tuple(round(DPI * side) for side in SIZE)
    bars = Bars("none", [90.0, None], [0.1, None])
    shown = [
        LINE,
        Panel("b", "x", "y", [bars], ["SGD", "Adam"]),
        Panel("c", "x", "y", [Points("SGD", [1.0, 10.0], [0.0, 2.0])], log_x=True, log_y=True),
        Panel("d", "x", "y", [Line("none", [0, 1], [0.0, 0.0])], log_y=True),
        Panel("nothing", "x", "y"),
    ]
    images = [draw(panel) for panel in shown]
    assert {size(image) for image in images} == {pixels}
    assert len(set(images)) == len(images)
    sheet = draw_sheets({"all": shown})["all"]
    assert size(sheet.png) == (2 * pixels[0], 3 * pixels[1])
    assert sheet.alone == [images[1], images[2], images[4]]  # of lines alone, the browser draws


def test_csv_of_panels():
    bars = Panel("b", "", "y", [Bars("L2", [90.0, None], [0.5, None])], ["SGD", "Adam"])
    rows = list(csv.DictReader(io.StringIO(panels_csv([("quick", [LINE, bars])]))))
    assert [(r["panel"], r["label"], r["x"], r["y"], r["spread"], r["tier"]) for r in rows] == [
        ("a", "none", "0", "1", "", "quick"),
        ("a", "none", "1", "2", "", "quick"),
        ("b", "L2", "SGD", "90", "0.5", "quick"),
    ]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refuses(NotInstalled, extra="report"):
        draw(LINE)


def test_a_run_made_again_with_what_the_figure_wants_is_drawn_in_its_place(tmp_path):
    """Of Table 2's runs older ones have no course of the Jacobian norm."""
    cell = cells("jacobian-lr", "smoke")[0]
    write_run(RunStore(tmp_path), cell.runs[0], {"test/accuracy": 0.9}, tier="smoke")
    course = {"jacobian_norm_2000": 8.0}
    write_run(RunStore(tmp_path / "repeats"), cell.runs[0], course, tier="smoke")
    drawn = panels(artefact_of("jacobian-lr"), [cell], FinishedRuns(RunStore(tmp_path)))
    assert drawn[0].marks[0].y[-1] == 8.0
    assert drawn[0].marks[0].label == "lr 0.003"
    assert not drawn[0].late  # the ends of accuracies count, and of nothing else
