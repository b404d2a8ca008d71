"""A diagnosis printed, in a notebook, as a figure and as a page; records and tables as frames."""

import io
import math
import re
from dataclasses import replace
from html import unescape

import pytest
import torch
from diagnosis.recorded import ScriptedLayer, records
from PIL import Image
from refusals import refuses
from rich.console import Console
from torch import nn

from decaylab import decay_table, diagnose
from decaylab.diagnosis import layout
from decaylab.diagnosis.words.findings import finding_text, verdict_title
from decaylab.diagnosis.words.headline import headline
from decaylab.diagnosis.words.motions import motion_legend, motion_table, motion_title
from decaylab.errors import BadValue
from decaylab.notebook import html_table
from decaylab.records import Row, Rows

STRONG = 0.02


def sgd(**settings):
    return ScriptedLayer(growth=0.005, **settings)


@pytest.fixture(scope="module")
def result():
    return diagnose(
        records({"conv": sgd(weight_decay=STRONG), "head": sgd(invariant=False)}),
        records({"conv": sgd(), "head": sgd(invariant=False)}),
    )


@pytest.mark.parametrize("columns", [40, 80])
def test_it_prints_within_the_terminal(result, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(result)
    assert max(map(len, text.splitlines())) <= columns
    said = " ".join(text.split())
    assert headline(result) in said
    for finding in result.findings:
        assert verdict_title(finding) in said
        assert finding_text(finding) in said
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_rich_shows_every_layer_and_cuts_no_number(result, width):
    console = Console(width=width, file=io.StringIO())
    console.print(result)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for row in motion_table(result)[1]:
        assert all(cell in text for cell in row)


def test_every_form_shows_the_whole_layout(tmp_path):
    """What there is to say is said in a terminal, a notebook, Markdown and a page alike."""
    layers = {"conv": sgd(weight_decay=STRONG), "head": sgd(weight_decay=STRONG, invariant=False)}
    rows = records(layers | {"idle": sgd()}).rows
    rows = [row for row in rows if row.name != "weight_norm/idle"]
    other = records({"conv": sgd(weight_decay=STRONG)})
    result = diagnose(Rows(tuple(rows)), other)  # a baseline with decay: that is said first
    assert result.first
    assert result.skipped
    console = Console(width=10_000, file=io.StringIO())
    console.print(result)
    forms = [console.file.getvalue(), result.to_markdown(), result._repr_html_()]
    forms.append(result.report(tmp_path / "page.html").read_text(encoding="utf-8"))
    for form in forms:
        shown = unescape(re.sub(r"</?code>|`", "", form))
        assert headline(result).replace("`", "") in shown
        assert all(text in shown for text in layout.warnings(result))
        for section in layout.sections(result):
            assert section.title in shown
            for text in (*section.text, *section.items):
                assert text.replace("`", "") in shown


def test_a_long_table_is_not_printed_and_leaves_no_bare_title():
    names = [f"conv{number}" for number in range(30)]
    rows = records({name: sgd() for name in names}).rows
    turns = [Row(1000, 0, 0.0, f"rotation/{name}", 0.01) for name in names]
    many = diagnose(Rows((*rows, *turns)))
    assert motion_title(many) not in str(many)
    assert motion_title(many) in many.to_markdown()


def test_columns_of_which_nothing_is_known_are_left_out():
    nothing = diagnose(records({"conv": sgd()}))
    assert motion_table(nothing) == (["layer"], [["conv"]])
    assert motion_title(nothing) not in nothing.to_markdown()
    alone = diagnose(records({"conv": sgd(weight_decay=STRONG)}))
    headings, rows = motion_table(alone)
    assert headings == ["layer", "balance", "turns", "norm"]
    assert "-" not in rows[0]
    legend = motion_legend(alone)
    assert "balance:" in legend
    assert "turns, norm: as a multiple of a reconstruction" in legend
    assert "angle/step" not in legend
    assert "size:" not in legend


def test_its_repr_is_one_line(result):
    assert "\n" not in repr(result)
    assert str(result.findings[0].verdict) in repr(result)


def test_a_notebook_shows_verdicts_and_escapes_names(result):
    html = result._repr_html_()
    assert "`" not in html  # commands are code
    for finding in result.findings:
        assert f">{finding.verdict}</span> <b>{verdict_title(finding)}</b>" in html
    odd = diagnose(records({"<script>": sgd(weight_decay=STRONG)}))._repr_html_()
    assert "&lt;script&gt;" in odd
    assert "<script>" not in odd


def test_a_figure_has_the_recorded_curves(result):
    figure = result.plot()
    assert [axes.get_ylabel() for axes in figure.axes][:2] == [
        "effective learning rate",
        "norm |W|",
    ]
    drawn = {tuple(line.get_ydata()) for line in figure.axes[1].lines}
    (run, baseline), *_ = result.compared
    assert drawn == {tuple(value for _, value in of.layers["conv"].norms) for of in (run, baseline)}
    assert Image.open(io.BytesIO(figure._repr_png_())).width > 600


def test_a_layer_is_drawn_of_both_runs_though_its_size_counts_in_one_alone():
    def run(response, **settings):
        layer = ScriptedLayer(invariant=False, power=1, growth=2e-3, **settings)
        rows = records({"a": layer, "b": replace(layer, invariant=True)}).rows
        return Rows((*rows, Row(1000, 0, 0.0, "size_response/a", response / 100)))

    figure = diagnose(run(0.2, weight_decay=0.02), run(0.3)).plot()
    norms = figure.axes[1]
    assert [line.get_label() for line in norms.lines if line.get_label()[0] != "_"] == [
        "weight decay",
        "baseline",
    ]
    assert len(norms.lines) == 4


def test_a_page_is_written_where_one_says(result, tmp_path):
    path = result.report(tmp_path / "new" / "page.html")
    assert verdict_title(result.findings[0]) in path.read_text(encoding="utf-8")
    with refuses(BadValue, name="the report"):
        result.report(tmp_path / "page.txt")


def test_several_seeds_are_all_drawn():
    decayed = [records({"conv": sgd(weight_decay=STRONG)}) for _ in range(2)]
    result = diagnose(decayed, [records({"conv": sgd()}) for _ in range(2)])
    assert len(result.compared) == 2
    assert len(result.plot().axes[0].lines) == 4


def test_what_holds_for_several_runs_is_said_once(result):
    why, other = result.findings[1].reasons[0], result.findings[2].reasons[0]
    noted = replace(result, first=(("a", why), ("b", other), ("c", why), ("", other)))
    texts = layout.warnings(noted)
    assert [text.partition(":")[0] for text in texts[:1]] == ["a, c"]
    assert len(texts) == 2
    assert layout.plain(noted)["first"] == texts


def test_rows_as_a_frame():
    rows = Rows((Row(1, 0, 0.5, "rotation/a.b", 0.1), Row(2, 0, 1.0, "jacobian_norm", math.inf)))
    frame = rows.to_pandas()
    assert frame.to_dict("list") == {
        "step": [1, 2],
        "epoch": [0, 0],
        "seconds": [0.5, 1.0],
        "quantity": ["rotation", "jacobian_norm"],
        "layer": ["a.b", ""],
        "value": [0.1, math.inf],
    }


def test_a_decay_table_as_text_html_and_frame():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    table = decay_table(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    assert repr(table) == str(table)
    frame = table.to_pandas()
    assert list(frame["parameter"]) == [name for name, _ in model.named_parameters()]
    assert frame["factor"].tolist() == pytest.approx([0.95] * 4)
    html = table._repr_html_()
    assert html.count("<tr>") == 5
    assert "decoupled 0.5" in html


def test_what_stands_in_a_table_is_text():
    assert html_table(["<b>"], [["&"]]).count("&lt;b&gt;") == 1
