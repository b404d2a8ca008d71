"""Tables that fit: whatever the width, every word and number is there, whole."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.panel import Panel

from decaylab.text_table import Column, Styled, TextTable, wrapped

WIDTHS = [40, 60, 80, 120, 200]
RUN = "cifar10-vgg16-bn-kfac-f-decoupled-02d27321"


def runs():
    columns = [
        Column("run"),
        Column("status"),
        Column("test accuracy", number=True),
        Column("train loss", number=True, drop=1),
        Column("device", drop=2),
    ]
    return TextTable(columns, [[RUN, "finished", "93.21 %", "0.0003214", "NVIDIA H200"]] * 3)


def layers(count, quantities=12):
    columns = [Column(f"kfac norm {i}", number=True) for i in range(quantities)]
    rows = [[f"features.{i}", *["-1.2345e-05"] * quantities] for i in range(count)]
    return TextTable([Column("layer"), *columns], rows)


def sentences():
    why = "decay removed 0.44 % of the weights in 440 steps, which is too little to act"
    columns = [Column("layer"), Column("verdict"), Column("why", words=True)]
    return TextTable(columns, [["conv1", "does not act", why], ["fc", "acts", "larger"]])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [runs, lambda: layers(3), lambda: layers(30), sentences])
def test_every_line_is_within_the_width(make, width):
    assert max(map(len, make().text(width).splitlines())) <= width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 3, 30])
def test_no_number_is_cut_and_none_is_lost(count, width):
    assert layers(count).text(width).split().count("-1.2345e-05") == 12 * count


@pytest.mark.parametrize("width", WIDTHS)
def test_words_of_sentences_stay_whole_and_in_order(width):
    text = sentences().text(width)
    for word in ("decay", "0.44", "440", "too", "little"):
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", text)


def long_names():
    names = [
        *(f"bert.encoder.layer.*.attention.self.{part}.weight (12)" for part in ("query", "key")),
        "bert.encoder.layer.*.intermediate.dense.weight (12)",
        "bert.pooler.dense.weight",
        "classifier.weight",
    ]
    columns = [Column("parameter", words=True, path=True), Column("role", drop=1)]
    columns += [Column("decay"), Column("a step"), Column("long run")]
    cells = ["weight", "decoupled 0.01", "0.9999995", "0.9999995"]
    return TextTable(columns, [[name, *cells] for name in names])


def test_what_long_names_share_stands_once_above_them():
    lines = long_names().text(80).splitlines()
    assert [line.split("  weight")[0].rstrip() for line in lines[1:]] == [
        "bert.encoder.layer.*.",
        "  attention.self.query.weight (12)",
        "  attention.self.key.weight (12)",
        "  intermediate.dense.weight (12)",
        "bert.pooler.dense.weight",
        "classifier.weight",
    ]
    assert all(line.endswith("0.9999995") for line in lines[1:] if not line.endswith("."))
    assert "bert.encoder.layer.*.attention.self.query.weight (12)  " in long_names().text(120)


@pytest.mark.parametrize("width", [30, *WIDTHS])
def test_long_names_fit_at_any_width(width):
    text = long_names().text(width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("0.9999995") == 10


def test_the_least_columns_go_first_and_are_named():
    text = runs().text(80)
    assert "0.0003214" in text
    assert "NVIDIA" not in text
    assert text.splitlines()[-1].endswith("device")
    assert runs().text(120).splitlines()[0].endswith("device")


def test_a_few_rows_of_many_numbers_are_turned_on_their_side():
    first, *rest = layers(3).text(80).splitlines()
    assert first.split() == ["layer", "features.0", "features.1", "features.2"]
    assert len(rest) == 12


def test_many_rows_of_many_numbers_come_in_parts_with_their_names():
    text = layers(30).text(80)
    assert text.count("features.29") == 3


def test_a_long_name_is_broken_at_a_mark_in_it():
    table = TextTable([Column("where")], [["/home/someone/data/cifar10/batches"]])
    lines = table.text(20).splitlines()[1:]
    assert "".join(lines) == "/home/someone/data/cifar10/batches"
    assert all(line.endswith("/") for line in lines[:-1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["", "a", "1.25e-07", "some words here", RUN]), min_size=4),
        max_size=5,
    ),
    st.integers(60, 200),
)
def test_any_table_fits_and_keeps_its_words(rows, width):
    columns = [Column("name"), Column("n", number=True), Column("x", words=True), Column("y")]
    cut = [["name", *row[1:4]] for row in rows]
    text = TextTable(columns, cut).text(width)
    assert all(len(line) <= width for line in text.splitlines())
    assert text.split().count("1.25e-07") == sum(row.count("1.25e-07") for row in cut)


def test_styles_are_kept_out_of_the_text():
    table = TextTable([Column("")], [[Styled("holds", "green")]])
    assert table.text(80) == "holds"
    assert [cell.style for line in table.lines(80) for cell in line if cell.text] == ["green"]


def test_inside_a_panel_it_takes_the_panels_width():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Panel(runs()))
    lines = console.export_text().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum(RUN in line for line in lines) == 3


def test_wrapping_keeps_paragraphs_and_indents():
    assert wrapped("  one two three\nfour", 9) == ["  one two", "  three", "four"]
