import pytest
import torch
from refusals import refuses

from decaylab.attribution.arms import ArmResult, Plan
from decaylab.attribution.result import Attribution
from decaylab.errors import BadValue, Lacks
from decaylab.report.attributions import (
    attribution_report,
    effects_panel,
    path_panels,
    write_attribution,
)
from decaylab.report.drawing import Bars
from decaylab.training.held_layers import LayerNote
from decaylab.training.paths import LayerPaths


def paths(steps=500, dampings=False):
    sizes = torch.rand(steps + 1, 2, dtype=torch.float64) + 1
    angles = torch.rand(steps, 2, dtype=torch.float64)
    return LayerPaths(("a", "b"), sizes, angles, sizes if dampings else None)


def attribution(finite=True):
    plan = Plan(("size", "rotation"))
    values = {"with decay": 0.9, "without decay": 0.8, "size": 0.81, "rotation": 0.89}
    results = [
        ArmResult(
            arm.name,
            seed,
            {"test/accuracy": values[arm.name] + seed / 100, "loss": 1 - values[arm.name]},
            {"size": {"a": 0.001}} if arm.follows else {},
            finite=finite,
        )
        for seed in (0, 1, 2)
        for arm in plan.arms()
    ]
    taken = {arm.name: paths() for arm in plan.arms()}
    return Attribution(
        plan=plan,
        layers=("a", "b"),
        notes={"c": LayerNote.ZERO},
        seeds=(0, 1, 2),
        steps=500,
        results=tuple(results),
        metric="test/accuracy",
        paths=dict.fromkeys((0, 1, 2), taken),
    )


def test_bars_are_the_effects_in_points():
    panel = effects_panel(attribution().shares_of("test/accuracy"))
    (bars,) = panel.marks
    assert isinstance(bars, Bars)
    assert panel.groups == ["total", "size", "rotation", "(together)"]
    assert list(bars.values) == pytest.approx([10, 1, 9, 0], abs=1e-9)
    assert panel.y_label == "effect, points"


def test_paths_of_every_arm_are_lines_of_few_points():
    by_arm = {"with decay": paths(dampings=True), "size": paths(dampings=True)}
    panels = path_panels(by_arm, "b")
    assert [panel.y_label for panel in panels] == ["size", "radians per step", "λ|W|²"]
    for panel in panels:
        assert [line.label for line in panel.marks] == ["with decay", "size"]
        assert all(100 <= len(line.x) <= 260 for line in panel.marks)
    assert panels[0].marks[0].y[1] == by_arm["with decay"].sizes[panels[0].marks[0].x[1], 1]


def test_the_page_says_the_answer_first(tmp_path):
    page = attribution().report(tmp_path / "deep" / "page.html")
    text = page.read_text(encoding="utf-8")
    answer = "Decay changes test/accuracy by +10"
    assert text.index(answer) < text.index("<table")
    assert "c is not held" in text
    assert text.count("data:image/png") == 2 + 2 * 2


def test_a_page_without_shares_is_a_page(tmp_path):
    report = attribution_report(attribution(finite=False))
    assert any("diverged" in notice for notice in report.notices)
    write_attribution(tmp_path / "page.html", attribution(finite=False))


def test_another_kind_of_file_is_refused(tmp_path):
    with refuses(BadValue, name="the report"):
        write_attribution(tmp_path / "page.pdf", attribution())


def test_a_figure_has_the_effects_on_every_metric():
    figure = attribution().plot()
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles[:2] == ["test/accuracy", "loss"]
    with refuses(Lacks, what="effects to draw"):
        attribution(finite=False).plot()
